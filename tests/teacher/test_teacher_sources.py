"""Responses that exist already, the embedded world's teacher, a local model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from teacher_world import LABELS, questions, teach

from catto.errors import DataError
from catto.io.record_files import read_manifest, read_records
from catto.prompts import render_completion, render_messages
from catto.recipe.settings import ResponseFields, TeacherSettings
from catto.records import Option, Question, Response, SftRow
from catto.tasks import witnesses
from catto.teacher.responses import draw_sampling


def stored(tmp_path: Path, rows: list[dict[str, object]], **fields: str | None) -> TeacherSettings:
    path = tmp_path / "given.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TeacherSettings(source="responses", responses=str(path), n=3, fields=ResponseFields(**fields))


def test_stored_responses_are_numbered_as_they_stand_and_others_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "q0", "text": render_completion("x", "A")},
        {"question": "q9", "text": "another question's"},
        {"question": "q0", "text": "no label"},
        *({"question": "q1", "text": render_completion(f"y{i}", "B")} for i in range(5)),
    ]
    found = teach(questions(3), None, stored(tmp_path, rows), tmp_path / "out")
    responses = list(read_records(tmp_path / "out" / "responses.jsonl", Response))
    keys = [(r.question, r.sample, r.label) for r in responses]
    assert keys == [("q0", 0, "A"), ("q0", 1, None), ("q1", 0, "B"), ("q1", 1, "B"), ("q1", 2, "B")]
    assert {(r.temperature, r.seed) for r in responses} == {(None, None)}
    assert (found.answered, found.dropped["no responses"]) == (2, 1)
    assert read_manifest(tmp_path / "out" / "responses.jsonl").notes["rows_of_other_questions"] == 1


@pytest.mark.parametrize("ending", ["csv", "json", "parquet", "folder"])
def test_stored_responses_are_read_from_every_format(tmp_path: Path, ending: str) -> None:
    rows = [{"id": "q0", "cot": f"line one\nline {i}", "choice": LABELS[i % 4]} for i in range(3)]
    place = write_table(tmp_path, ending, rows)
    fields = ResponseFields(question="id", text=None, reasoning="cot", label="choice")
    given_settings = TeacherSettings(source="responses", responses=str(place), n=3, fields=fields)
    teach(questions(1), None, given_settings, tmp_path / "out")
    (sft,) = read_records(tmp_path / "out" / "sft.jsonl", SftRow)
    assert sft.completion[0].content == render_completion("line one\nline 0", "A")
    assert len(list(read_records(tmp_path / "out" / "outcome.jsonl", SftRow))) == 3


def write_table(tmp_path: Path, ending: str, rows: list[dict[str, str]]) -> Path:
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "parquet":
        pytest.importorskip("pyarrow")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.mkdir()
        (path / "b.json").write_text(json.dumps(rows[1:]))
        (path / "a.jsonl").write_text(json.dumps(rows[0]))
    return path


def test_a_question_is_found_by_its_text_where_letters_keep_their_meaning(tmp_path: Path) -> None:
    """By the whole user's message for letters; a question's text alone could stand for another order of options."""
    first, second = questions(2)
    rows: list[dict[str, object]] = [
        {"p": "  " + render_messages(first)[-1].content.upper(), "text": render_completion("x", "A")},
        {"p": second.fields["question"], "text": render_completion("x", "A")},
    ]
    teach([first, second], None, stored(tmp_path, rows, question=None, prompt="p"), tmp_path / "out")
    assert [r.question for r in read_records(tmp_path / "out" / "responses.jsonl", Response)] == ["q0"]


def test_word_labels_are_found_by_the_questions_own_fields(tmp_path: Path) -> None:
    words = tuple(Option(label=x, text=x) for x in ("yes", "no"))
    asked = Question(
        id="w", task="t", split="train", fields={"premise": "P", "hypothesis": "H"}, options=words, gold="no"
    )
    given_settings = stored(tmp_path, [{"p": "p\nh", "text": render_completion(None, "no")}], question=None, prompt="p")
    assert teach([asked], None, given_settings, tmp_path / "out").correct == 1


BAD_INPUT: dict[str, tuple[list[dict[str, object]], dict[str, str]]] = {
    "row 2: text: missing": ([{"question": "q0", "text": "x"}, {"question": "q0"}], {}),
    "row 1: question: missing": ([{"text": "x"}], {}),
    "row 1: label 'F' is not one of A, B, C, D": ([{"question": "q0", "text": "x", "label": "F"}], {"label": "label"}),
    "row 1: label is A, but the text answers B": (
        [{"question": "q0", "text": render_completion("x", "B"), "label": "A"}],
        {"label": "label"},
    ),
    "row 2: question q0 sample 1 occurs twice": ([{"question": "q0", "text": "x", "k": 1}] * 2, {"sample": "k"}),
    "row 1: k: expected a number from 0, got 'one'": ([{"question": "q0", "text": "x", "k": "one"}], {"sample": "k"}),
    "row 1: question: expected a text or a whole number, got 7.0": ([{"question": 7.0, "text": "x"}], {}),
    "none of its 1 rows answers a question": ([{"question": "q77", "text": "x"}], {}),
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_a_bad_row_of_the_input_is_one_clear_line(tmp_path: Path, message: str) -> None:
    rows, fields = BAD_INPUT[message]
    with pytest.raises(DataError) as caught:
        teach(questions(2), None, stored(tmp_path, rows, **fields), tmp_path / "out")
    assert message in str(caught.value)
    assert "given.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"question": "\xff"}', "row 2: not UTF-8"), (b'"' + b"x" * 50 * 2**20, "row 2: line is longer than 16 MB")],
)
def test_bytes_that_are_no_rows_are_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "given.jsonl"
    path.write_bytes(b'{"question": "q0", "text": "x"}\n' + content + b"\n")
    with pytest.raises(DataError, match=message):
        teach(questions(1), None, TeacherSettings(source="responses", responses=str(path)), tmp_path / "out")


@pytest.mark.filterwarnings("ignore")  # whatever `datasets` has to say when it is offline
@pytest.mark.parametrize("place", ["none.jsonl", "nobody/nothing-at-all", "a/b/c"])
def test_a_place_that_is_neither_file_nor_hub_dataset_is_one_clear_line(tmp_path: Path, place: str) -> None:
    with pytest.raises(DataError, match=place) as caught:
        teach(questions(1), None, TeacherSettings(source="responses", responses=place), tmp_path)
    assert "\n" not in str(caught.value)


def test_the_embedded_worlds_teacher_is_asked_at_the_drawn_temperature(tmp_path: Path) -> None:
    asked = list(witnesses.generate_questions("train", 5, seed=0))
    given_settings = TeacherSettings(source="witnesses", n=4)
    teach(asked, None, given_settings, tmp_path)
    for response in read_records(tmp_path / "responses.jsonl", Response):
        question = next(question for question in asked if question.id == response.question)
        expected = witnesses.respond(question, *draw_sampling(given_settings, response.question, response.sample))
        assert (response.reasoning, response.label) == expected


def test_a_local_model_teaches_and_its_batch_size_belongs_to_the_recipe(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from test_prompts import CHATML, tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer(CHATML).save_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    local = {"source": "transformers", "model": str(tmp_path / "model"), "n": 2, "max_tokens": 3, "concurrency": 4}
    found = teach(questions(2), None, TeacherSettings(**local), tmp_path / "out")
    assert (found.responses, found.unparsed) == (4, 4)
    responses = list(read_records(tmp_path / "out" / "responses.jsonl", Response))
    assert all(r.token_ids is not None and len(r.token_ids) <= 3 and r.mean_logprob is not None for r in responses)
    with pytest.raises(DataError, match="other settings"):
        teach(questions(2), None, TeacherSettings(**{**local, "concurrency": 2}), tmp_path / "out")


def test_settings_name_what_their_source_needs(tmp_path: Path) -> None:
    for wrong, message in [
        ({"source": "server"}, "model: needed"),
        ({"source": "server", "model": "m"}, "base_url: needed"),
        ({"source": "responses"}, "responses: name a file"),
        ({"temperature": (1.2, 0.6)}, "0 <= low <= high"),
        ({"n": 0}, "greater than or equal to 1"),
        ({"temprature": 1}, "Extra inputs"),
        ({"fields": {"prompt": "p"}}, "exactly one of question"),
    ]:
        with pytest.raises(ValueError, match=message):
            TeacherSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither the settings nor the caller names one"):
        teach(questions(1), None, TeacherSettings(), tmp_path)


def test_labels_are_drawn_evenly_and_by_the_seed_of_each_request_alone(tmp_path: Path) -> None:
    settings = TeacherSettings(source="labels", reasoning=False, n=40)
    teach(questions(50), None, settings, tmp_path / "out")
    responses = list(read_records(tmp_path / "out" / "responses.jsonl", Response))
    counts = [sum(r.label == label for r in responses) for label in LABELS]
    # 2,000 draws of 4: each count has mean 500 and deviation 19.4, and the seeds are fixed.
    assert sum(counts) == 2000
    assert all(abs(count - 500) < 3 * 19.4 for count in counts)
    assert {r.text for r in responses} == {render_completion(None, label) for label in LABELS}
    reordered = [q.model_copy(update={"options": q.options[::-1]}) for q in reversed(questions(50))]
    teach(reordered, None, settings, tmp_path / "again")
    again = {(r.question, r.sample): r.label for r in read_records(tmp_path / "again" / "responses.jsonl", Response)}
    assert again == {(r.question, r.sample): r.label for r in responses}


def test_labels_without_reasoning_only() -> None:
    with pytest.raises(ValueError, match=r"reasoning: source labels draws labels and no reasoning"):
        TeacherSettings(source="labels")
