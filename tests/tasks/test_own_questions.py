"""A user's own questions in every shape, wherever a task is named: data, eval, teach, train, recipes, Python."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, run, write_lines
from experiment_world import write_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import ROOT
from public_schemas import SCHEMAS, Schema

import catto
from catto.engines import open_engine
from catto.errors import DataError
from catto.io.record_files import read_records
from catto.predict import evaluate
from catto.prompts import render_messages
from catto.records import SPLITS, Prediction, Question, SftRow
from catto.tasks import from_file, load_questions
from catto.tasks.fields import LETTERS
from catto.tasks.own_file import propose

Capture = pytest.CaptureFixture[str]
FREE = {"source": "labels", "reasoning": False, "n": 4, "min_wrong": 1}


def options_of(folder: Path, schema: Schema, split: str = "test") -> list[str | Path]:
    """Write the rows of a schema; return the options that name them."""
    file = write_lines(folder / "mine.jsonl", schema.rows)
    options: list[str | Path] = ["--file", f"{split}={file}", "--fields", schema.fields]
    if schema.answers is not None:
        (folder / "mine.lst").write_text(schema.answers)
        options += ["--answers", f"{split}={folder / 'mine.lst'}"]
    return options


def task_file(folder: Path, schema: Schema) -> Path:
    """Write the rows and a task file beside them, which names them by their names alone."""
    options_of(folder, schema)
    parts = [part.split("=") for part in schema.fields.split(",")]
    fields = {name: value.split("+") if "+" in value else value for name, value in parts}
    block: dict[str, Any] = {"path": "mine.jsonl", "fields": fields}
    if schema.answers is not None:
        block["answers"] = "mine.lst"
    (folder / "mine.yaml").write_text(yaml.safe_dump(block))
    return folder / "mine.yaml"


def gold_text(question: Question) -> str:
    return next(option.text for option in question.options if option.label == question.gold)


def checked(schema: Schema, questions: list[Question]) -> None:
    """Each row is there, with its own options and its own answer, under letters or words of all rows."""
    assert len(questions) == len(schema.rows)
    golds = {}
    for question in questions:
        (place,) = [n for n, row in enumerate(schema.rows) if all_texts(row) >= set(_stated(question))]
        golds[place] = gold_text(question)
        texts = {option.text for option in question.options}
        if "|" in schema.fields:
            assert set(question.labels) == texts
        else:
            assert question.labels == LETTERS[: len(question.options)]
            assert texts <= all_texts(schema.rows[place])
    assert [golds[place] for place in range(len(schema.rows))] == schema.gold


def _stated(question: Question) -> list[str]:
    return [line for field in question.fields.values() for line in field.split("\n") if line]


def all_texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {text for item in value.items() for text in all_texts(list(item))}
    return {text for item in value for text in all_texts(item)} if isinstance(value, list) else {str(value)}


@pytest.mark.parametrize("name", SCHEMAS)
def test_catto_data_shows_every_shape(name: str, tmp_path: Path, capsys: Capture) -> None:
    schema = SCHEMAS[name]
    shown = run(capsys, "data", *options_of(tmp_path, schema), "--split", "test", "--n", "9", "--json")
    assert shown.code == 0, shown.err
    told = [{name: each[name] for name in each if name != "messages"} for each in shown.json["questions"]]
    checked(schema, [Question.model_validate(question) for question in told])


@pytest.mark.parametrize("name", SCHEMAS)
def test_without_fields_a_map_is_proposed_with_the_first_prompt(name: str, tmp_path: Path, capsys: Capture) -> None:
    schema = SCHEMAS[name]
    arguments = options_of(tmp_path, schema)
    shown = run(capsys, "data", *arguments[:2], *arguments[4:], "--split", "test")
    if not schema.proposed:
        assert (shown.code, shown.out) == (2, "")
        assert "mine.jsonl: no " in shown.err
        return
    assert shown.code == 0, shown.err
    quoted = f"'{schema.fields}'" if any(sign in schema.fields for sign in "{|\\") else schema.fields
    assert f"--fields {quoted}\n" in shown.out
    first = next(load_questions(from_options(tmp_path, schema), "test"))
    assert render_messages(first)[1].content in shown.out
    assert shown.out.count("[user]") == 1


def from_options(folder: Path, schema: Schema) -> Any:
    from catto.cli.data import choose_source
    from catto.cli.options import QuestionFileOptions

    _, file, _, fields, *answers = map(str, options_of(folder, schema))
    return choose_source(None, QuestionFileOptions(file=[file], fields=fields, answers=answers[1:]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    texts: list[str] = []
    for schema in SCHEMAS.values():
        questions = load_questions(from_options(folder, schema), "test")
        texts += [message.content for question in questions for message in render_messages(question)]
    words = tiny_tokenizer(texts)
    tiny_model(1, vocab_size=len(words)).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    return folder / "model"


def test_every_shape_is_answered_and_read(model: Path, tmp_path: Path) -> None:
    engine = open_engine("transformers", str(model), batch_size=4)
    for schema in SCHEMAS.values():
        asked = list(load_questions(from_options(tmp_path, schema), "test"))
        predictions = evaluate(engine, asked, max_tokens=2)
        assert [(one.question, one.gold) for one in predictions] == [(each.id, each.gold) for each in asked]
        logprobs = [one.label_logprobs or {} for one in predictions]
        assert [set(known) for known in logprobs] == [set(question.labels) for question in asked]


@pytest.mark.parametrize("name", ["arc", "boolq", "piqa"])
def test_catto_eval_asks_own_questions(name: str, model: Path, tmp_path: Path, capsys: Capture) -> None:
    schema = SCHEMAS[name]
    arguments = (*options_of(tmp_path, schema), "--max-tokens", "2", "--out", tmp_path / "eval")
    done = run(capsys, "eval", model, *arguments)
    assert done.code == 0, done.err
    predictions = list(read_records(tmp_path / "eval" / "predictions.jsonl", Prediction))
    asked = {question.id: question for question in load_questions(from_options(tmp_path, schema), "test")}
    assert {one.question: one.gold for one in predictions} == {key: each.gold for key, each in asked.items()}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_recipe_takes_every_shape_by_its_task_file(name: str, tmp_path: Path, capsys: Capture) -> None:
    schema, place = SCHEMAS[name], task_file(tmp_path, SCHEMAS[name])
    recipe = write_recipe(tmp_path, tasks={"mine": {"path": str(place)}}, teacher=FREE, methods=["sft"])
    taught = run(capsys, "teach", recipe, "--out", tmp_path / "run")
    assert taught.code == 0, taught.err
    folder = Path(taught.out.splitlines()[0].partition(": ")[2])
    rows = list(read_records(folder / "outcome.jsonl", SftRow))
    questions = {question.id: question for question in catto.load_questions(str(place), "train")}
    assert {row.question: row.gold for row in rows} == {key: each.gold for key, each in questions.items()}
    checked(schema, list(questions.values()))


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - {"own labels elsewhere", "nli with numbers"}))
def test_the_page_on_own_questions_has_the_map_of_every_public_set(name: str) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").replace("\\|", "|")
    assert f"`{SCHEMAS[name].fields}`" in page


def colours(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"stem": f"Question {n}?", "choices": ["red", "blue"], "key": "AB"[n % 2], **more} for n in range(count)]


FIELDS = "question=stem,options=choices,answer=key"
MAP = {"question": "stem", "options": "choices", "answer": "key"}


def test_own_questions_replace_the_tasks_of_a_recipe_in_teach_and_train(tmp_path: Path, capsys: Capture) -> None:
    """What is trained on and what `catto eval` asks of the same file are disjoint; 80 % of one file are trained on."""
    rows = [{**row, "stem": f"Is A or B number {n}?"} for n, row in enumerate(colours(40))]  # words of the vocabulary
    file, run_folder = write_lines(tmp_path / "mine.jsonl", rows), tmp_path / "run"
    own = ("--file", file, "--fields", FIELDS)
    scratch = {"layers": 1, "width": 16, "heads": 2, "intermediate": 16}
    recipe = write_recipe(tmp_path, teacher=FREE, methods=["sft"], model={"scratch": scratch})
    taught = run(capsys, "teach", recipe, *own, "--out", run_folder)
    assert taught.code == 0, taught.err
    assert "128 responses to 32 of 32 questions" in taught.out
    trained = run(capsys, "train", recipe, *own, "--method", "sft", "--out", run_folder)
    assert trained.code == 0, trained.err
    assert "sft on mine, seed 0" in trained.out
    model, more = trained.out.splitlines()[-1], ("--no-reasoning", "--max-tokens", "4", "--out", tmp_path / "eval")
    asked = run(capsys, "eval", model, *own, *more)
    assert asked.code == 0, asked.err
    assert "mine: test is cut from the only file by seed 0; to use a whole file, name it with test=FILE" in asked.out
    folder = Path(taught.out.splitlines()[0].partition(": ")[2])
    seen = {row.question for row in read_records(folder / "outcome.jsonl", SftRow)}
    tested = {one.question for one in read_records(tmp_path / "eval" / "predictions.jsonl", Prediction)}
    assert (len(seen), len(tested), len(seen & tested)) == (32, 4, 0)


def test_only_the_seeds_in_use_are_held_out_and_the_training_key_has_them(tmp_path: Path) -> None:
    from catto.pipeline.kinds.questions import load_split
    from catto.pipeline.plan import Graph, open_recipe

    block = {"path": str(write_lines(tmp_path / "mine.jsonl", colours(200))), "fields": MAP}
    sizes, keys, held_out = [], [], []
    for seeds in ([0], [7], [0, 7]):
        graph = Graph(open_recipe(str(write_recipe(tmp_path, tasks={"mine": block}, seeds=seeds))))
        train = graph.plan_questions("mine")
        sizes.append(len(load_split(train.settings)[0]))
        keys.append(train.key)
        held_out.append(graph.plan_questions("mine", "test", seeds[-1]).key)
        asked = {one.id for seed in seeds for split in SPLITS[1:] for one in held(graph, split, seed)}
        assert not asked & {one.id for one in load_split(train.settings)[0]}
    assert sizes[:2] == [160, 160]
    assert 120 <= sizes[2] <= 136  # 0.8 x 0.8 of 200, and a few
    assert len(set(keys)) == 3
    assert held_out[1] == held_out[2] != held_out[0]


def held(graph: Any, split: Any, seed: int) -> list[Question]:
    from catto.pipeline.kinds.questions import load_split

    return load_split(graph.plan_questions("mine", split, seed).settings)[0]


def test_the_keys_of_benchmarks_do_not_depend_on_settings_of_own_files() -> None:
    from catto.pipeline.plan import Graph, open_recipe

    counted = Graph(open_recipe("quickstart")).plan_questions("witnesses").settings.key_fields()
    assert "seeds" not in counted
    assert "answers" not in counted["block"]
    assert counted["block"]["answer"] == "label"


def test_the_key_has_the_fields_of_a_task_file_and_the_contents_of_the_answers(tmp_path: Path) -> None:
    from catto.pipeline.plan import Graph, open_recipe

    place = task_file(tmp_path, SCHEMAS["piqa"])
    recipe = str(write_recipe(tmp_path, tasks={"mine": {"path": str(place)}}))

    def key() -> str:
        return Graph(open_recipe(recipe)).plan_questions("mine").key

    first = key()
    assert key() == first
    (tmp_path / "mine.lst").write_text("1\n0\n")
    second = key()
    block = yaml.safe_load(place.read_text())
    place.write_text(yaml.safe_dump({**block, "fields": {**block["fields"], "options": ["sol2", "sol1"]}}))
    assert len({first, second, key()}) == 3


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "tsv.gz"])
def test_every_format_gives_the_same_questions(form: str, tmp_path: Path) -> None:
    rows = [{"q": f"Row {n}, says?", "a": "one", "b": 'two "2"', "gold": str(n % 2)} for n in range(6)]
    path = tmp_path / f"mine.{form}"
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        text = tmp_path / "text"
        with text.open("w", newline="") as file:
            if form.startswith(("csv", "tsv")):
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if "tsv" in form else ",")
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.write(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
        path.write_bytes(gzip.compress(text.read_bytes()) if form.endswith(".gz") else text.read_bytes())
    task = from_file({"test": path}, fields={"question": "q", "options": ["a", "b"], "answer": "gold"})
    found = {one.fields["question"]: gold_text(one) for one in load_questions(task, "test")}
    assert found == {row["q"]: row["ab"[int(row["gold"])]] for row in rows}


def test_a_list_in_a_cell_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('stem,choices,key\nWhich?,"[""red"", ""blue""]",B\n')
    assert [gold_text(one) for one in load_questions(from_file({"test": path}, fields=MAP), "test")] == ["blue"]


def test_words_that_all_rows_share_are_the_labels_and_phrases_are_not(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [{"stem": f"Claim {n}", "key": n % 3} for n in range(6)])
    words = from_file({"test": path}, fields={**MAP, "options": "true|false|unknown"})
    assert {frozenset(one.labels) for one in load_questions(words, "test")} == {frozenset({"true", "false", "unknown"})}
    spaced = from_file({"test": path}, fields={**MAP, "options": " true | false| unknown"})
    assert list(load_questions(spaced, "test")) == list(load_questions(words, "test"))
    phrases = from_file({"test": path}, fields={**MAP, "options": "it holds|it does not|nobody knows"})
    assert {one.labels for one in load_questions(phrases, "test")} == {("A", "B", "C")}


def test_options_that_are_the_numbers_0_and_1_keep_their_labels(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [{"stem": "How many?", "choices": {"A": 0, "B": 1}, "key": "B"}])
    assert [gold_text(one) for one in load_questions(from_file({"test": path}, fields=MAP), "test")] == ["1"]


def test_an_answer_that_is_always_one_column_shows_at_no_place(tmp_path: Path) -> None:
    """Options that name letters keep their order elsewhere; here the second would always be right."""
    rows = [{"q": f"Row {n}", "right": "Both A and B", "wrong": "C only"} for n in range(40)]
    task = from_file(
        {"test": write_lines(tmp_path / "mine.jsonl", rows)},
        fields={"question": "q", "options": ["wrong", "right"], "answer": "right"},
    )
    questions = list(load_questions(task, "test"))
    assert {gold_text(one) for one in questions} == {"Both A and B"}
    assert {one.gold for one in questions} == {"A", "B"}


@pytest.mark.parametrize(
    ("answers", "golds"),
    [
        ([0, 1, 1], ["p", "q", "q"]),  # a 0 occurs: counted from 0
        ([1, 3, 1], ["p", "r", "p"]),  # as many as there are options: counted from 1
        (["1", "2", "0"], ["q", "r", "p"]),
        (["r", "p", "q"], ["r", "p", "q"]),
        (["a", "C", "b"], ["p", "r", "q"]),
        ([2.0, 0.0, 1.0], ["r", "p", "q"]),
    ],
)
def test_all_rows_decide_what_an_answer_is(answers: list[Any], golds: list[str], tmp_path: Path) -> None:
    rows = [{"stem": f"Row {n}", "choices": ["p", "q", "r"], "key": key} for n, key in enumerate(answers)]
    task = from_file({"test": write_lines(tmp_path / "mine.jsonl", rows)}, fields=MAP)
    found = {one.fields["question"]: gold_text(one) for one in load_questions(task, "test")}
    assert [found[f"Row {n}"] for n in range(len(rows))] == golds


def test_labels_of_the_rows_come_before_indices_and_letters_do_not_come_before_texts(tmp_path: Path) -> None:
    choices = {"label": ["1", "2", "3"], "text": ["p", "q", "r"]}
    rows = [{"stem": f"Row {n}", "choices": choices, "key": "1"} for n in range(3)]
    files = {"test": write_lines(tmp_path / "mine.jsonl", rows)}
    assert {gold_text(one) for one in load_questions(from_file(files, fields=MAP), "test")} == {"p"}  # type: ignore[arg-type]
    write_lines(files["test"], [{"stem": "Which letter?", "choices": ["B", "A"], "key": "A"}])
    with pytest.raises(DataError, match="key 'A' may be an option's label or an option's text, and no row decides"):
        load_questions(from_file(files, fields=MAP), "test")  # type: ignore[arg-type]


def test_what_no_row_decides_is_refused_and_can_be_stated(tmp_path: Path) -> None:
    rows = [{"stem": "Row", "choices": ["p", "q", "r"], "key": 1}] * 3
    files = {"test": write_lines(tmp_path / "mine.jsonl", rows)}
    with pytest.raises(DataError) as caught:
        load_questions(from_file(files, fields=MAP), "test")  # type: ignore[arg-type]
    said = "key 1 may be an index from 0 or an index from 1, and no row decides which"
    assert str(caught.value) == f"{files['test']} row 1: {said}: state answer index or answer index1"
    for answer, gold in (("index", "q"), ("index1", "p")):
        task = from_file(files, fields=MAP, answer=answer)  # type: ignore[arg-type]
        assert {gold_text(one) for one in load_questions(task, "test")} == {gold}


def test_0_and_1_beside_yes_and_no_may_be_booleans(tmp_path: Path) -> None:
    rows = [{"stem": f"Row {n}", "key": n % 2} for n in range(4)]
    files = {"test": write_lines(tmp_path / "mine.jsonl", rows)}
    with pytest.raises(DataError, match="key 0 may be an index from 0 or true or false, and no row decides which"):
        load_questions(from_file(files, fields={**MAP, "options": "yes|no"}), "test")  # type: ignore[arg-type]
    for options, answer in (("yes|no", "boolean"), ("no|yes", None)):
        task = from_file(files, fields={**MAP, "options": options}, answer=answer)  # type: ignore[arg-type]
        found = {one.fields["question"]: gold_text(one) for one in load_questions(task, "test")}
        assert [found[f"Row {n}"] for n in range(4)] == ["no", "yes", "no", "yes"]


COLOURS = colours(3)
TWO = ["x", "y"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": "C"}, "key 'C' is not one of A, B"),
        ({"key": 1}, "key 1 is not one of A, B"),  # the rows before answer by letters
        ({"key": None}, "key: missing"),
        ({"key": [1, 1]}, "key: expected 2 marks, a 1 for the right option and a 0 for every other"),
        ({"choices": None}, "choices: missing"),
        ({"choices": "red or blue"}, "choices: expected a list of texts, got str"),
        ({"choices": [{"id": 1}, {"id": 2}]}, "choices: expected a list of texts, got a list with NoneType"),
        ({"choices": ["red"]}, "choices: expected 2 to 26 options, got 1"),
        ({"choices": ["red", float("nan")]}, "choices: expected a list of texts, got a list with nan"),
        ({"choices": ["red", " "]}, "choices: an option is empty"),
        ({"choices": {"label": ["A", "A"], "text": TWO}}, "choices: expected 2 different labels, got A, A"),
        ({"choices": {"label": ["A"], "text": TWO}}, "choices: expected 2 different labels, got A"),
        ({"choices": {"label": [1, 2], "text": TWO}}, "key 'A' is not one of 1, 2"),
        ({"choices": {"label": "AB", "text": TWO}}, "labels of choices: expected a list of texts, got str"),
        ({"choices": {"a": TWO, "b": TWO}}, "choices: expected a list of texts, got a list with list"),
        ({"choices": "['red', 'blue']"}, "choices: not JSON: Expecting value at column 2"),
        ({"stem": " "}, "stem is empty"),
        ({"stem": 7}, "stem: expected text, got int"),
    ],
)
@pytest.mark.parametrize("command", ["data", "eval"])
def test_a_malformed_row_is_one_line(
    command: str, change: dict[str, Any], said: str, tmp_path: Path, capsys: Capture
) -> None:
    file = write_lines(tmp_path / "mine.jsonl", [*COLOURS, {**COLOURS[0], **change}])
    assert_refused(run(capsys, *asking(command, tmp_path), "--fields", FIELDS), f"{file} row 4: {said}\n")


def asking(command: str, folder: Path) -> list[str | Path]:
    """The start of a command that asks all questions of a file; no model is loaded before they are read."""
    (folder / "config.json").write_text("{}")
    model = [folder] if command == "eval" else []
    return [command, *model, "--file", f"test={folder / 'mine.jsonl'}", "--split", "test"]


def test_a_text_that_two_options_share_is_no_answer(tmp_path: Path, capsys: Capture) -> None:
    rows = [{**row, "choices": ["x", "x"], "key": "x"} for row in COLOURS]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    done = run(capsys, *asking("data", tmp_path), "--fields", FIELDS)
    assert_refused(done, f"{file} row 1: key 'x' is the text of more than one option\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["question=stem,options=choices", "--answers", "test=a.lst"],
            "a.lst: 2 answers, expected 3, one for each",
        ),
        (["question=stem,options=choices", "--answers", "test=b.lst"], "b.lst: 4 answers, expected 3, one for each"),
        ([FIELDS, "--answers", "test=a.lst"], "fields: answer: remove this field, since the answers are in a separate"),
        (["question=stem,options=choices", "--answers", "a.lst"], "2 answers, expected 3"),
        (["question=stem,options=choices+other,answer=key"], "row 1: other: missing"),
        (["question={ctx}\\n{stem},options=choices,answer=key"], "row 1: ctx: missing"),
        (["question={stem,options=choices,answer=key"], "fields: question: a brace that belongs to no field"),
        (["question={stem} {},options=choices,answer=key"], "fields: question: a brace that belongs to no field"),
        (
            ["question=stem,options=choices,question=ctx,answer=key"],
            "--fields: question=ctx: expected name=column once",
        ),
        (["question=stem,options=choices"], "fields: answer is missing"),
        ([FIELDS, "--answer", "boolean"], "row 1: key 'A' is not one of red, blue"),
        (
            ["question=stem,options=yes|no,answer=stem"],
            "row 1: stem 'Question 0?' is not one of yes, no, nor an option's",
        ),
        ([f"{FIELDS},labels=stem"], "row 1: labels of choices: expected a list of texts, got str"),
    ],
)
def test_a_malformed_map_is_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "mine.jsonl", COLOURS)
    (tmp_path / "a.lst").write_text("A\nB\n")
    (tmp_path / "b.lst").write_text("A\nB\nA\nB\n")
    assert_refused(run(capsys, *asking("data", tmp_path), "--fields", *options), said)


def assert_refused(done: Done, said: str) -> None:
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["A", "b", "1", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["label", "text", "A"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.fixed_dictionaries({"stem": VALUES, "choices": VALUES, "key": VALUES}), min_size=1, max_size=3))
def test_any_row_is_a_question_or_refused(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_lines(Path(folder) / "mine.jsonl", rows)
        for tried in (
            lambda: propose({"test": file}),
            lambda: list(load_questions(from_file({"test": file}, fields=MAP), "test")),
        ):
            with suppress(DataError):
                tried()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("path: mine.jsonl", "fields: question is missing"),
        (
            "fields: {question: stem, options: choices, answer: key}",
            "path or files: the file of the questions is missing",
        ),
        ("path: mine.jsonl\nfield: {}", "mine.yaml: field: unknown key"),
        ("path: mine.jsonl\nfields: {question: [", "mine.yaml: line "),
        ("path: other.jsonl\nfields: {question: stem, options: choices, answer: key}", "other.jsonl: no such file"),
        ("path: mine.jsonl\nanswer: letters", "mine.yaml: answer: expected label, index, index1, text or boolean"),
        ("- 1", "mine.yaml: expected a block of names and values"),
    ],
)
def test_a_malformed_task_file_is_one_line(content: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    write_lines(tmp_path / "mine.jsonl", COLOURS)
    (tmp_path / "mine.yaml").write_text(content)
    assert_refused(run(capsys, "data", tmp_path / "mine.yaml"), said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("eval", "m", "--file", "mine.jsonl"),
            "--fields: needed with --file; catto data --file mine.jsonl proposes it",
        ),
        (("data", "mmlu", "--answers", "a.lst"), "--answers: needs --file"),
        (("data",), "TASK or --file is needed: a task's name, or a file of your own"),
        (("data", "nowhere.yaml"), "nowhere.yaml: No such file"),
        (("data", "--file", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("train", "quickstart", "--method", "sft", "--file", "x.csv"), "--fields: needed with --file"),
    ],
)
def test_options_that_do_not_fit_are_one_line(arguments: tuple[str, ...], said: str, capsys: Capture) -> None:
    assert_refused(run(capsys, *arguments), said)
