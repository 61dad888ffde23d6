"""Logs of other tools: each reader against numbers worked out from the record, by hand or by other code."""

from __future__ import annotations

import json
import struct
import zipfile
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, write_lines

from catto.answer_columns import ParseCounts, read_graded
from catto.errors import DataError
from catto.formats.answers import read_answers
from catto.formats.columns import ColumnNames

Capture = pytest.CaptureFixture[str]


def lm_eval(number: int, scores: list[float], target: Any, acc: float, **more: Any) -> dict[str, Any]:
    """A line of `samples_*.jsonl` as the harness writes it: numbers inside responses are texts."""
    choices = more.pop("choices", ["red", "dark blue", "green"][: len(scores)])
    return {
        "doc_id": number,
        "doc": {"id": f"d{number}", "subject": "b" if number % 2 else "a"},
        "target": str(target),
        "arguments": {f"gen_args_{k}": {"arg_0": "Q:", "arg_1": f" {one}"} for k, one in enumerate(choices)},
        "resps": [[[str(score), "False"]] for score in scores],
        "filtered_resps": [[str(score), "False"] for score in scores],
        "filter": "none",
        "metrics": ["acc"],
        "acc": acc,
        **more,
    }


def token(text: str, p: float, **tops: float) -> dict[str, Any]:
    top = [{"token": key.replace("_", " "), "logprob": log(value)} for key, value in tops.items()]
    return {"token": text, "logprob": log(p), "bytes": list(text.encode()), "top_logprobs": top}


def sample(number: int, p: float, value: Any, answer: str, **more: Any) -> dict[str, Any]:
    """A sample of an inspect_ai log."""
    content = [token("ANSWER", 0.9), token(":", 0.99), token(f" {answer}", p, **{f"_{answer}": p})]
    reply = {"message": {"role": "assistant", "content": f"ANSWER: {answer}"}, "logprobs": {"content": content}}
    return {
        "id": f"s{number}",
        "epoch": 1,
        "input": "?",
        "choices": ["x", "y", "z"],
        "target": "B",
        "output": {"model": "m", "choices": [reply]},
        "scores": {"choice": {"value": value, "answer": answer}},
        **more,
    }


def completion(content: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "logprobs": {"content": tokens}}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]}


def helm(number: int, p: float, right: float, **stats: float) -> dict[str, Any]:
    values = {"max_prob": p, "exact_match": right, **stats}
    return {
        "instance_id": f"id{number}",
        "train_trial_index": 0,
        "stats": [{"name": {"name": key, "split": "test"}, "count": 1, "mean": mean} for key, mean in values.items()],
    }


def read(path: Path, **names: Any) -> tuple[list[float], list[bool], list[str] | None]:
    answers = read_graded(path, ColumnNames(**names))
    return answers.confidence.tolist(), answers.correct.tolist(), answers.question


def test_multiple_choice_of_lm_eval_is_the_softmax_over_the_choices(tmp_path: Path) -> None:
    rows = [lm_eval(0, [log(0.2), log(0.1), log(0.1)], 0, 1.0), lm_eval(1, [-9.0, -1.0], 0, 0.0)]
    confidence, correct, question = read(write_lines(tmp_path / "samples_x.jsonl", rows))
    assert confidence == pytest.approx([0.5, 1 / (1 + exp(-8))], abs=1e-15)
    assert (correct, question) == ([True, False], ["0", "1"])


def test_lengths_of_choices_divide_the_likelihoods_as_acc_norm_does(tmp_path: Path) -> None:
    """`red` has 3 characters, `dark blue` 9: -3 / 3 against -4.5 / 9, so the answer changes."""
    path = write_lines(tmp_path / "s.jsonl", [lm_eval(0, [-3.0, -4.5], 1, 0.0, acc_norm=1.0)])
    assert read(path)[1] == [False]
    confidence, correct, _ = read(path, length_normalised=True)
    assert confidence == pytest.approx([1 / (1 + exp(-0.5))], abs=1e-15)
    assert correct == [True]


@pytest.mark.parametrize(
    ("target", "choices", "acc", "gold"),
    [
        ("1", ["1", "7"], 1.0, "0"),  # the text of the likeliest choice
        ("1", ["1", "7"], 0.0, "1"),  # its number: the grade tells
        ("dark blue", ["red", "dark blue"], 0.0, "1"),
        ("['red', 'x']", ["red", "x"], 1.0, None),  # several right answers: only the grade is known
    ],
)
def test_the_target_is_a_choice_or_its_number(
    tmp_path: Path, target: str, choices: list[str], acc: float, gold: str | None
) -> None:
    path = write_lines(tmp_path / "s.jsonl", [lm_eval(0, [-1.0, -2.0], target, acc, choices=choices)])
    [(_, fields)] = read_answers(path, ColumnNames())
    assert (fields.get("gold"), fields["correct"]) == (gold, acc)


def test_older_lists_and_unconditional_likelihoods_of_lm_eval(tmp_path: Path) -> None:
    arguments = [["Q:", " a"], ["Q:", " b"], ["", " a"], ["", " b"]]
    row = lm_eval(0, [-1.0, -2.0], 0, 1.0) | {"arguments": arguments}
    row["filtered_resps"] = [[-1.0, False], [-2.0, False], [-50.0, False], [0.0, False]]
    assert read(write_lines(tmp_path / "s.jsonl", [row]))[0] == pytest.approx([1 / (1 + exp(-1))], abs=1e-15)


def test_generated_answers_of_lm_eval_need_a_named_confidence(tmp_path: Path, capsys: Capture) -> None:
    row = lm_eval(0, [-1.0], "red", 0.0) | {"filtered_resps": ["red"], "metrics": ["exact_match"], "exact_match": 1.0}
    path = write_lines(tmp_path / "s.jsonl", [row | {"doc": {"sure": 0.7}}])
    error = run(capsys, "measure", path).err
    assert error.startswith(f"catto: {path} row 1: filtered_resps has texts instead of log-likelihoods: name a")
    assert read(path, confidence="doc.sure") == ([0.7], [True], ["0"])


def test_a_log_of_lm_eval_with_several_filters_is_refused(tmp_path: Path, capsys: Capture) -> None:
    rows = [lm_eval(0, [-1.0, -2.0], 0, 1.0, filter=name) for name in ("strict", "loose")]
    path = write_lines(tmp_path / "s.jsonl", rows)
    assert run(capsys, "measure", path).err == (
        f"catto: {path} row 2: filter: got 'loose' after 'strict', expected one filter: keep the lines of one\n"
    )


def packed(path: Path, samples: list[dict[str, Any]], method: int) -> Path:
    """A log of inspect_ai. Zstandard, which zipfile cannot write before 3.14, is put in by hand."""
    if method == zipfile.ZIP_DEFLATED:
        with zipfile.ZipFile(path, "w", method) as log_file:
            log_file.writestr("header.json", "{}")
            for one in samples:
                log_file.writestr(f"samples/{one['id']}_epoch_1.json", json.dumps(one))
        return path
    arrow = pytest.importorskip("pyarrow")
    local, central, count = b"", b"", 0
    for one in samples:
        name, data = f"samples/{one['id']}_epoch_1.json".encode(), json.dumps(one).encode()
        small = arrow.Codec("zstd").compress(data, asbytes=True)
        crc = zipfile.crc32(data)
        sizes = (crc, len(small), len(data), len(name), 0)
        entry = struct.pack("<HHHHHIIIHH", 20, 0, 93, 0, 0, *sizes)
        central += b"PK\x01\x02" + struct.pack("<H", 20) + entry + struct.pack("<HHHII", 0, 0, 0, 0, len(local)) + name
        local += b"PK\x03\x04" + entry + name + small
        count += 1
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(central), len(local), 0)
    path.write_bytes(local + central + b"PK\x05\x06" + end)
    return path


SAMPLES = [sample(0, 0.6, "C", "B"), sample(1, 0.5, "I", "A")]


@pytest.mark.parametrize("form", ["json", "deflate", "zstd"])
def test_inspect_logs_give_the_probability_of_the_answers_token(tmp_path: Path, form: str) -> None:
    if form == "json":
        path = tmp_path / "log.json"
        path.write_text(json.dumps({"version": 2, "status": "success", "eval": {}, "samples": SAMPLES}))
    else:
        path = packed(tmp_path / "log.eval", SAMPLES, zipfile.ZIP_DEFLATED if form == "deflate" else 93)
    confidence, correct, question = read(path)
    assert confidence == pytest.approx([0.6, 0.5], abs=1e-15)
    assert (correct, question) == ([True, False], ["s0", "s1"])


def test_an_answer_that_has_no_token_of_its_own_is_refused(tmp_path: Path) -> None:
    """What a grader read elsewhere than in a stated form, and an open answer of several tokens."""
    unread = sample(0, 0.6, "C", "B")
    tokens = [token("Surely", 0.9), token(" B", 0.6)]
    unread["output"]["choices"][0]["logprobs"]["content"] = tokens
    with pytest.raises(DataError, match="row 1: logprobs: the graded answer 'B' is not found in the reply"):
        read(write_lines(tmp_path / "log.jsonl", [unread]))
    scores = {"graded": {"value": "C", "answer": "Paris it is"}}
    reply = {"message": {"role": "assistant", "content": "Paris it is"}}
    reply["logprobs"] = {"content": [token("Paris", 0.9), token(" it", 0.5), token(" is", 0.5)]}
    row = sample(0, 0.6, "C", "B", scores=scores, choices=None, output={"model": "m", "choices": [reply]})
    with pytest.raises(DataError, match="row 1: logprobs: an open answer of several tokens"):
        read(write_lines(tmp_path / "log.jsonl", [row]))


def test_a_confidence_in_the_scores_metadata_comes_first(tmp_path: Path) -> None:
    score = {"value": 1, "answer": "B", "metadata": {"confidence": 0.25}}
    path = write_lines(tmp_path / "log.jsonl", [sample(0, 0.6, "C", "B", scores={"own": score})])
    assert read(path)[:2] == ([0.25], [True])


def test_one_of_several_scorers_is_named(tmp_path: Path) -> None:
    scores = {"strict": {"value": "I", "answer": "B"}, "loose": {"value": "C", "answer": "B"}}
    path = write_lines(tmp_path / "log.jsonl", [sample(0, 0.6, "C", "B", scores=scores)])
    with pytest.raises(DataError, match="row 1: scores: name one of strict, loose with --correct"):
        read(path)
    assert read(path, correct="loose")[1] == [True]
    assert read(path, correct="strict")[1] == [False]


def test_a_sampled_answer_is_looked_up_where_the_log_holds_the_likeliest_token(tmp_path: Path) -> None:
    row = sample(0, 0.6, "C", "B")
    tokens = row["output"]["choices"][0]["logprobs"]["content"]
    tokens[2] = token(" A", 0.7, _A=0.7, _B=0.2)
    assert read(write_lines(tmp_path / "log.jsonl", [row]))[0] == pytest.approx([0.2], abs=1e-15)
    tokens[2] = token(" A", 0.7, _A=0.7)
    with pytest.raises(DataError, match="row 1: logprobs: the tokens say 'A', but the graded answer 'B'"):
        read(write_lines(tmp_path / "log.jsonl", [row]))


def vocabulary_token(text: str, p: float, **tops: float) -> dict[str, Any]:
    """A token as inspect_ai's Transformers engine logs it: in the vocabulary's form, with code points as its bytes."""
    made = token(text, p, **tops)
    for one in (made, *made["top_logprobs"]):
        one["bytes"] = [ord(sign) for sign in one["token"]]
    return made


@pytest.mark.parametrize("space", ["\u0120", "\u2581"])  # byte-level and SentencePiece vocabularies
def test_tokens_in_the_form_of_the_vocabulary_are_read_up_to_the_end_of_the_reply(tmp_path: Path, space: str) -> None:
    row = sample(0, 0.6, "C", "B")
    letter = vocabulary_token(f"{space}B", 0.6, **{f"{space}A": 0.1, f"{space}B": 0.6, f"{space}C": 0.2})
    padding = [vocabulary_token(text, 0.01) for text in ("<end>", f"{space}so", f"{space}A")]
    content = [vocabulary_token("ANSWER", 0.9), vocabulary_token(":", 0.99), letter, *padding]
    row["output"]["choices"][0]["logprobs"]["content"] = content
    row["choices"] = ["x", "y", "z"]
    path = write_lines(tmp_path / "log.jsonl", [row])
    [(_, fields)] = read_answers(path, ColumnNames())
    assert fields["confidence"] == pytest.approx(0.6, abs=1e-15)
    assert fields["label_logprobs"] == pytest.approx({"A": log(0.1), "B": log(0.6), "C": log(0.2)}, abs=1e-15)


def test_an_unanswered_reply_in_a_batch_has_the_probability_of_its_own_tokens(tmp_path: Path) -> None:
    """0.5 * 0.4: what follows the end belongs to longer replies of the batch."""
    row = sample(0, 0.6, "I", "")
    reply = row["output"]["choices"][0]
    reply["message"]["content"] = "No idea"
    padding = [vocabulary_token("<end>", 0.9), vocabulary_token("\u0120A", 0.3)]
    reply["logprobs"]["content"] = [vocabulary_token("No", 0.5), vocabulary_token("\u0120idea", 0.4), *padding]
    assert read(write_lines(tmp_path / "log.jsonl", [row]))[0] == pytest.approx([0.2], abs=1e-15)


def test_what_a_scorer_stores_with_the_confidence_is_read(tmp_path: Path) -> None:
    stored = {"confidence": 0.25, "source": "fallback", "label_logprobs": {"A": -1.0, "B": log(0.25)}}
    score = {"value": "I", "answer": "", "metadata": stored}
    path = write_lines(tmp_path / "log.jsonl", [sample(0, 0.6, "C", "B", scores={"own": score})])
    [(_, fields)] = read_answers(path, ColumnNames())
    assert {name: fields[name] for name in stored} == stored
    assert read_graded(path).sources == ParseCounts(fallback=1)


def test_a_partly_right_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1: correct: expected true or false"):
        read(write_lines(tmp_path / "log.jsonl", [sample(0, 0.6, "P", "B")]))


def test_chat_completions_give_the_probability_of_the_label(tmp_path: Path) -> None:
    tokens = [token("The answer is", 0.9), token(" (", 0.8), token("B", 0.3, A=0.2, B=0.3), token(").", 0.7)]
    told = completion("The answer is (B).", tokens)
    batch = {"custom_id": "q7", "response": {"status_code": 200, "body": told}, "gold": {"label": "B"}}
    lost = {"custom_id": "q8", "response": {"body": completion("Hm", [token("Hm", 0.5)])}, "gold": {"label": "A"}}
    path = write_lines(tmp_path / "chat.jsonl", [batch, lost])
    confidence, correct, question = read(path, gold="gold.label")
    assert confidence == pytest.approx([0.3, 0.5], abs=1e-15)
    assert (correct, question) == ([True, False], ["q7", "q8"])
    [(_, fields), (_, unread)] = read_answers(path, ColumnNames(gold="gold.label"))
    assert fields["label_logprobs"] == pytest.approx({"A": log(0.2), "B": log(0.3)})
    assert (unread["label"], unread["source"]) == (None, "fallback")


@pytest.mark.parametrize(
    "lost", [{"response": {"status_code": 429, "body": {}}}, {"response": None, "error": {"code": "batch_expired"}}]
)
def test_a_failed_request_of_a_batch_is_named(tmp_path: Path, lost: dict[str, Any]) -> None:
    told = {"response": {"status_code": 200, "body": completion("B", [token("B", 0.3)])}, "error": None, "gold": "B"}
    with pytest.raises(DataError, match=r"row 2: the request failed \(.*(429|batch_expired).*\): leave this row out"):
        read(write_lines(tmp_path / "chat.jsonl", [told, {**lost, "gold": "A"}]), gold="gold")


def test_a_completion_alone_is_told_to_name_the_gold(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", [completion("B", [token("B", 0.3)])])
    with pytest.raises(
        DataError, match="row 1: a completion does not contain the right answer: name its field with --gold"
    ):
        read(path)


def test_helm_gives_max_prob_and_exact_match_or_what_is_named(tmp_path: Path) -> None:
    path = tmp_path / "per_instance_stats.json"
    path.write_text(json.dumps([helm(0, 0.9, 1.0, quasi_exact_match=0.0), helm(1, 0.4, 0.0, quasi_exact_match=1.0)]))
    assert read(path) == ([0.9, 0.4], [True, False], ["id0", "id1"])
    assert read(path, correct="quasi_exact_match")[1] == [False, True]
    path.write_text(json.dumps([helm(0, 0.9, 0.5)]))
    with pytest.raises(DataError, match="row 1: correct: expected true or false"):
        read(path)


def test_uqlm_tables_by_rows_and_by_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{k}", "response": "r", "min_probability": p, "response_correct": k == 0}
        for k, p in enumerate((0.8, 0.3))
    ]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    by_rows, by_columns = write_lines(tmp_path / "a.jsonl", rows), tmp_path / "b.json"
    by_columns.write_text(json.dumps({"data": columns, "metadata": {"temperature": 1.0}}))
    assert read(by_rows) == read(by_columns) == ([0.8, 0.3], [True, False], ["p0", "p1"])
    two = write_lines(tmp_path / "c.jsonl", [row | {"sequence_probability": 0.1} for row in rows])
    with pytest.raises(DataError, match="name one of the scores sequence_probability, min_probability"):
        read(two)
    assert read(two, confidence="sequence_probability")[0] == [0.1, 0.1]
    unscored = write_lines(tmp_path / "d.jsonl", [{"prompt": "p", "response": "r", "response_correct": True}])
    with pytest.raises(DataError, match="found none of uqlm's scores: name the column of the confidence"):
        read(unscored, format="uqlm")


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_any_table_by_the_names_of_its_columns(tmp_path: Path, sign: str) -> None:
    cells = [("p", "said", "truth, or not"), ("0.9", "yes", "yes"), ("0.6", "no", "yes")]
    lines = [sign.join(f'"{cell}"' if sign in cell else cell for cell in row) for row in cells]
    path = tmp_path / ("a.tsv" if sign == "\t" else "a.csv")
    path.write_text("\n".join(lines) + "\n")
    assert read(path, confidence="p", prediction="said", gold="truth, or not")[:2] == ([0.9, 0.6], [True, False])


def test_the_sign_between_columns_is_not_counted_inside_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"p, that is, confidence";correct\n0.5;1\n0.25;0\n')
    assert read(tmp_path / "a.csv", confidence="p, that is, confidence")[:2] == ([0.5, 0.25], [True, False])


def test_numbers_as_labels_are_compared_by_their_value(tmp_path: Path) -> None:
    """pandas writes whole numbers as 1.0 where another row of the column is missing."""
    rows = [
        {"confidence": 0.9, "id": 7.0, "label": 1.0, "gold": 1},
        {"confidence": 0.8, "id": 8, "label": 2, "gold": "2"},
    ]
    assert read(write_lines(tmp_path / "a.jsonl", rows)) == ([0.9, 0.8], [True, True], ["7", "8"])


def test_an_empty_answer_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("confidence,label,gold\n0.9,A,A\n0.8,,A\n0.7, ,B\n")
    assert read(tmp_path / "a.csv")[1] == [True, False, False]


@pytest.mark.parametrize("column", ["gold", "id", "t"])
@pytest.mark.parametrize("empty", ["", " ", None, float("nan")])
def test_a_gold_label_question_or_slice_that_is_empty_is_refused(tmp_path: Path, column: str, empty: object) -> None:
    """Two empty cells were an answer that is right, rows without an id one question."""
    row = {"confidence": 0.9, "id": "q", "t": "x", "label": "A", "gold": "A"}
    path = write_lines(tmp_path / "a.jsonl", [row, {**row, "label": "", column: empty}])
    with pytest.raises(DataError, match=f"a.jsonl row 2: {column}: expected a text or a number, got"):
        read_graded(path, ColumnNames(by="t"))
    if isinstance(empty, str):
        lines = [
            ",".join(row),
            "0.9,q,x,A,A",
            "0.9," + ",".join({**row, column: empty}[name] for name in list(row)[1:]),
        ]
        (tmp_path / "a.csv").write_text("\n".join(lines))
        with pytest.raises(DataError, match=f"a.csv row 2: {column}: expected a text or a number, got"):
            read_graded(tmp_path / "a.csv", ColumnNames(by="t"))


def test_a_completion_without_its_gold_label_is_refused(tmp_path: Path) -> None:
    reply = completion("A", [token("A", 0.9)])
    path = write_lines(tmp_path / "a.jsonl", [{**reply, "gold": "A"}, {**reply, "gold": None}])
    with pytest.raises(DataError, match=r"a\.jsonl row 2: gold: expected a text or a number, got None"):
        read_graded(path, ColumnNames(gold="gold"))


def binary(count: int = 24) -> list[dict[str, Any]]:
    """P(yes) of a binary task, with the likelier label as the answer."""
    probability = np.linspace(0.02, 0.98, count)
    said = np.where(probability > 0.5, "yes", "no")
    return [
        {"p": float(p), "answer": str(label), "truth": "yes" if k % 3 else "no"}
        for k, (p, label) in enumerate(zip(probability, said, strict=True))
    ]


def test_a_probability_of_one_label_is_refused_until_it_is_named(tmp_path: Path, capsys: Capture) -> None:
    rows = binary()
    path = write_lines(tmp_path / "a.jsonl", rows)
    columns = ("--confidence", "p", "--prediction", "answer", "--gold", "truth")
    refused = run(capsys, "measure", path, *columns)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "below 0.5 exactly where the answer is 'no', so it looks like the probability of 'yes'" in refused.err
    assert "--positive yes" in refused.err
    confidence, correct, _ = read(path, confidence="p", gold="truth", positive="yes")
    assert confidence == pytest.approx([max(row["p"], 1 - row["p"]) for row in rows], abs=1e-15)
    assert correct == [row["answer"] == row["truth"] for row in rows]
    one_class = [row for row in rows if row["truth"] == "no"]  # as a slice of a file may be
    _, correct, _ = read(write_lines(tmp_path / "b.jsonl", one_class), confidence="p", gold="truth", positive="yes")
    assert correct == [row["answer"] == "no" for row in one_class]


def test_confidences_that_are_not_split_by_the_label_are_read_as_they_are(tmp_path: Path) -> None:
    rows = binary()
    rows[0]["answer"] = "yes"
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert read(path, confidence="p", prediction="answer", gold="truth")[0] == [row["p"] for row in rows]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"confidence": "p", "gold": "truth"}, "no column 'label' to compare with 'truth': name it with --prediction"),
        ({"confidence": "p", "gold": "truth", "positive": "maybe"}, "--positive maybe: expected one of two labels"),
        ({"confidence": "p.x", "gold": "truth"}, "no column 'p.x'"),
        ({"confidence": "p", "correct": "p"}, "row 1: p: expected true or false"),
        ({"format": "helm"}, "row 1: stats: missing, expected a record of helm"),
        ({"format": "inspect", "confidence": "p"}, "row 1: scores: empty"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, names: dict[str, str], told: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl") as error:
        read(write_lines(tmp_path / "a.jsonl", binary()), **names)
    assert told in str(error.value)


def spoiled(value: Any) -> list[Any]:
    """The same record with one value, at any depth, replaced or left out."""
    if not isinstance(value, dict | list) or not value:
        return [None, 7, "x", [], {}, [1], {"x": None}, -1e400]
    keys = list(value) if isinstance(value, dict) else range(len(value))
    copies = []
    for key in keys:
        for other in [*spoiled(value[key]), None, 7, "x", []]:
            copies.append(json.loads(json.dumps(value)))
            copies[-1][key] = other
        if isinstance(value, dict):
            copies.append({name: kept for name, kept in value.items() if name != key})
    return copies


@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("lm-eval", lm_eval(0, [-1.0, -2.0], 0, 1.0)),
        ("inspect", sample(0, 0.6, "C", "B")),
        ("helm", helm(0, 0.9, 1.0)),
        ("openai", {"gold": "B", "response": completion("B", [token("B", 0.3, A=0.2)])}),
        ("uqlm", {"prompt": "p", "response": "r", "min_probability": 0.8, "response_correct": True}),
    ],
)
def test_spoiled_records_are_read_or_refused_in_one_line(tmp_path: Path, form: str, record: dict[str, Any]) -> None:
    outcomes, path = [], tmp_path / "a.jsonl"
    for one in spoiled(record):
        for named in (form, "auto"):
            path.write_text(json.dumps(one) + "\n")
            try:
                read(path, format=named, gold="gold" if form == "openai" else None)
                outcomes.append("read")
            except DataError as error:
                outcomes.append(str(error))
    assert "read" in outcomes
    assert all(outcome == "read" or outcome.startswith(str(path)) for outcome in outcomes)


def test_broken_zip_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match=r"log\.eval: broken zip file"):
        read(path)


def test_a_log_is_calibrated_and_compared_like_any_file(tmp_path: Path, capsys: Capture) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(80, 3)) * 3 - 20
    right = [bool(rng.random() < 0.6) for _ in scores]
    golds = [int(row.argmax()) if one else int(row.argmin()) for row, one in zip(scores, right, strict=True)]
    rows = [
        lm_eval(k, row.tolist(), gold, float(one))
        for k, (row, gold, one) in enumerate(zip(scores, golds, right, strict=True))
    ]
    path = write_lines(tmp_path / "samples_x.jsonl", rows)
    for on in ("confidence", "labels"):
        fitted, out = tmp_path / f"{on}.json", tmp_path / f"{on}.jsonl"
        told = run(capsys, "calibrate", "fit", path, "--on", on, "--out", fitted)
        assert f"tau = {json.loads(fitted.read_text())['tau']:.4g}" in told.out
        assert run(capsys, "calibrate", "apply", fitted, path, "--out", out).code == 0
        written = [json.loads(line) for line in out.read_text().splitlines()]
        assert written[0].keys() == {
            "question",
            "label",
            "text",
            "confidence",
            "correct",
            "label_logprobs",
            "gold",
            "confidence_raw",
        }
        assert [row["confidence_raw"] for row in written] == read(path)[0]
    done = run(capsys, "measure", path, "--compare", tmp_path / "labels.jsonl", "--by", "doc.subject", "--json")
    document = done.json
    assert list(document["slices"]["values"]) == ["a", "b"]
    assert document["compare"]["metrics"]["accuracy"]["difference"] == 0.0


def test_labels_are_the_same_however_a_table_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CSV with blanks after its commas, whole numbers that pandas has made floats, padded names of columns."""
    lines = ["0.9, A,A", "0.8,B , B", "0.7, 1.0,1", "0.6,2,2.00", "0.5,A,B"]
    path = tmp_path / "a.csv"
    for header in ("confidence, label, gold", "confidence ,label,gold", "confidence,label,gold"):
        path.write_text("\n".join([header, *lines]) + "\n")
        for smallest in (0, 10**9):  # by Arrow, and row by row
            monkeypatch.setattr("catto.io.tables.MIN_TABLE_BYTES", smallest)
            assert read(path)[:2] == ([0.9, 0.8, 0.7, 0.6, 0.5], [True, True, True, True, False])


def test_padded_names_of_columns_are_the_same_for_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id ,confidence,correct\n" + "q,0.5,1\nr,0.6,0\n")
    for smallest in (0, 10**9):
        monkeypatch.setattr("catto.io.tables.MIN_TABLE_BYTES", smallest)
        assert read(path)[2] == ["q", "r"]


def test_the_keys_of_label_logprobs_are_labels_too(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 0, "gold": " A", "label_logprobs": {" A": log(0.6), " B": log(0.3)}}]
    rows += [{"id": 1, "gold": 1, "label_logprobs": {"1.0": log(0.4), "2.0": log(0.5)}}]
    assert read(write_lines(tmp_path / "a.jsonl", rows))[1] == [True, False]
    twice = [{"id": 0, "gold": "A", "label_logprobs": {"A": log(0.6), " A": log(0.3)}}]
    with pytest.raises(DataError, match="row 1: label_logprobs: a label occurs twice among 'A', ' A'"):
        read(write_lines(tmp_path / "b.jsonl", twice))


def test_the_probability_is_that_of_the_prediction_that_is_named(tmp_path: Path) -> None:
    rows = [{"id": 0, "said": "B", "gold": "B", "label_logprobs": {"A": log(0.9), "B": log(0.09)}}]
    confidence, correct, _ = read(write_lines(tmp_path / "a.jsonl", rows), prediction="said")
    assert (confidence, correct) == (pytest.approx([0.09]), [True])


@pytest.mark.parametrize(
    ("answers", "golds"), [("abcd", "ABCD"), ("0123", "ABCD"), (["True", "no"], ["true", "false"])]
)
def test_answers_that_are_written_in_another_way_are_refused(tmp_path: Path, answers: Any, golds: Any) -> None:
    def rows(times: int) -> list[dict[str, Any]]:
        pairs = list(zip(answers, golds, strict=True)) * times
        return [{"id": n, "confidence": 0.9, "label": said, "gold": gold} for n, (said, gold) in enumerate(pairs)]

    with pytest.raises(DataError, match=r"no answer equals a gold label.*the answers are .*, the gold labels are"):
        read(write_lines(tmp_path / "a.jsonl", rows(15)))
    assert not any(read(write_lines(tmp_path / "b.jsonl", rows(2)))[1])  # so few may all be wrong


@pytest.mark.parametrize("golds", [["unsafe"] * 60, [f"{n}" for n in range(60)]], ids=["one label", "free answers"])
def test_answers_may_all_be_wrong(tmp_path: Path, golds: list[str]) -> None:
    rows = [{"id": n, "confidence": 0.9, "label": f"no {n % 2}", "gold": gold} for n, gold in enumerate(golds)]
    assert not any(read(write_lines(tmp_path / "a.jsonl", rows))[1])


def test_bytes_are_no_label(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"confidence": [0.9], "label": [b"A"], "gold": ["A"]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1: label: expected a text or a number, got b'A'"):
        read(tmp_path / "a.parquet")


def test_a_column_that_occurs_twice_in_parquet_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array([0.9]), arrow.array([0.1]), arrow.array([True])]
    table = arrow.Table.from_arrays(columns, names=["confidence", "confidence", "correct"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column 'confidence' occurs twice"):
        read(tmp_path / "a.parquet")


def test_a_log_likelihood_without_a_rival_is_no_confidence(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "lambada.jsonl", [lm_eval(0, [-1.0], 0, 1.0)])
    with pytest.raises(DataError, match="row 1: filtered_resps: expected log-likelihoods of several choices, got 1"):
        read(path)


def test_documents_of_two_tasks_are_different_questions(tmp_path: Path) -> None:
    rows = [lm_eval(0, [-1.0, -2.0], 0, 1.0, doc_hash=name) for name in ("arc", "hella")]
    assert read(write_lines(tmp_path / "a.jsonl", rows))[2] == ["0 arc", "0 hella"]


def test_a_reply_that_was_cut_is_no_answer_and_tags_are_read(tmp_path: Path) -> None:
    def reply(*tokens: tuple[str, float], finish: str = "stop") -> dict[str, Any]:
        made = completion("".join(text for text, _ in tokens), [token(text, p) for text, p in tokens])
        made["choices"][0]["finish_reason"] = finish
        return {"gold": "B", "response": made}

    whole = reply(("<answer>", 0.9), ("B", 0.6), ("</answer>", 0.9))
    thought = reply(("<think>", 0.9), ("A or B?", 0.5), ("</think>", 0.9), ("\n", 0.9), ("B", 0.7))
    cut = reply(("The answer is ", 0.9), ("B", 0.8), finish="length")
    one = reply((" B", 0.5), finish="length")  # max_tokens=1, the usual way to ask for a letter
    answers = read_graded(write_lines(tmp_path / "a.jsonl", [whole, thought, one, cut]), ColumnNames(gold="gold"))
    assert answers.read_as is not None
    assert answers.correct.tolist() == [True, True, True, False]
    assert answers.confidence.tolist()[:3] == pytest.approx([0.6, 0.7, 0.5])
    assert list(answers.read_as)[3] == "fallback"


def test_labels_that_begin_with_the_same_token_are_refused(tmp_path: Path) -> None:
    def reply(last: str, p: float) -> dict[str, Any]:
        return completion(f"not {last}", [token("not", 0.99), token(f" {last}", p)])

    rows = [{"gold": f"not {word}", "response": reply(word, 0.5)} for word in ("hate", "sure")]
    with pytest.raises(DataError, match="row 1: logprobs: labels 'not hate' and 'not sure' begin with the same token"):
        read(write_lines(tmp_path / "a.jsonl", rows), gold="gold")


def test_a_label_that_is_a_token_of_its_own_is_no_rival(tmp_path: Path) -> None:
    known = {"gold": "1", "response": completion("1", [token("1", 0.6, **{"10": 0.1})])}
    other = {"gold": "10", "response": completion("10", [token("10", 0.7, **{"1": 0.1})])}
    assert read(write_lines(tmp_path / "a.jsonl", [known, other]), gold="gold")[0] == pytest.approx([0.6, 0.7])


def test_a_label_whose_first_token_is_another_label_is_refused(tmp_path: Path) -> None:
    """Of digits written one by one, `1` has the probability of 1 and of 10 together."""
    ten = {"gold": "10", "response": completion("10", [token("1", 0.9, **{"1": 0.9, "9": 0.05}), token("0", 0.5)])}
    one = {"gold": "1", "response": completion("1", [token("1", 0.9, **{"1": 0.9, "9": 0.05})])}
    for first, second in ((ten, one), (one, ten)):
        labels = f"{first['gold']!r} and {second['gold']!r}"
        with pytest.raises(DataError, match=f"row 1: logprobs: labels {labels} begin with the same token '1'"):
            read(write_lines(tmp_path / "a.jsonl", [first, second]), gold="gold")


def test_labels_that_begin_alike_are_read_where_a_longer_candidate_begins_one(tmp_path: Path) -> None:
    no = {"gold": "no", "response": completion("no", [token("no", 0.7, **{" Not": 0.1})])}
    not_sure = {
        "gold": "not sure",
        "response": completion("not sure", [token("not", 0.6, no=0.2), token(" sure", 0.9)]),
    }
    assert read(write_lines(tmp_path / "a.jsonl", [no, not_sure]), gold="gold")[0] == pytest.approx([0.7, 0.6])


def test_an_answer_in_its_tags_is_a_free_one(tmp_path: Path) -> None:
    tagged = completion("<answer>B</answer>", [token("<answer>", 0.9), token("B", 0.7), token("</answer>", 0.9)])
    rows = [{"gold": "B", "response": tagged}, {"gold": "B", "response": completion("B", [token("B", 0.5)])}]
    answers = read_graded(write_lines(tmp_path / "a.jsonl", rows), ColumnNames(gold="gold"))
    assert answers.read_as is not None
    assert list(answers.read_as) == ["free", "plain"]


def test_several_choices_in_one_completion_are_refused(tmp_path: Path) -> None:
    made = completion("B", [token("B", 0.3)])
    made["choices"] *= 3
    with pytest.raises(DataError, match="row 1: choices: expected one, got 3"):
        read(write_lines(tmp_path / "a.jsonl", [{"gold": "B", "response": made}]), gold="gold")


@pytest.mark.parametrize("second", ["prediction", "positive"])
def test_two_ways_to_say_what_is_right_are_refused(tmp_path: Path, second: str) -> None:
    rows = [{**row, "graded": True} for row in binary()]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=f"--correct and --{second}: each says which answers are right"):
        read(path, confidence="p", correct="graded", **{second: "yes"})


def test_a_file_in_which_some_rows_do_not_say_how_they_were_read_is_refused(tmp_path: Path) -> None:
    sources = ["fallback"] * 3 + [None]
    rows = [{"id": n, "confidence": 0.9, "correct": True, "source": said} for n, said in enumerate(sources)]
    with pytest.raises(DataError, match="source: expected free, plain, fallback or none in every row"):
        read(write_lines(tmp_path / "a.jsonl", rows))
    routed = [{**row, "source": row["source"] or "primary"} for row in rows]  # another kind of source
    assert read_graded(write_lines(tmp_path / "b.jsonl", routed)).read_as is None
