"""Recipes: what is wrong with one is said in one line that names the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from catto.errors import DataError
from catto.methods import METHODS
from catto.pipeline import launch
from catto.pipeline.plan import Graph, open_recipe
from catto.pipeline.stage import list_needed
from catto.recipe.load import find_shipped_recipes, load_recipe
from catto.recipe.settings import ModelSettings, Recipe, TaskSettings, TeacherSettings
from catto.recipe.yaml_text import parse_yaml

BASE: dict[str, Any] = {
    "name": "one",
    "tasks": {"witnesses": None},
    "model": {"scratch": {"layers": 1}},
    "teacher": {"source": "witnesses"},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in {**BASE, **changes}.items() if value != "absent"}))
    return str(path)


def problem(source: str, *overrides: str) -> str:
    with pytest.raises(DataError) as caught:
        load_recipe(source, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", find_shipped_recipes())
def test_every_shipped_recipe_loads_and_plans(name: str) -> None:
    recipe = open_recipe(name)
    assert recipe.name == name
    assert list_needed([Graph(recipe).plan_report()])[-1].kind == "report"


def test_a_folder_of_its_name_hides_no_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper").mkdir()
    assert load_recipe("paper").name == "paper"
    (tmp_path / "quickstart").write_text(yaml.safe_dump(BASE))
    assert load_recipe("quickstart").name == "one"


@pytest.mark.parametrize("name", find_shipped_recipes())
def test_every_shipped_recipe_begins_with_a_comment(name: str) -> None:
    assert find_shipped_recipes()[name].read_text(encoding="utf-8").startswith("# ")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"evaluaton": {}}, "evaluaton: unknown key; did you mean evaluation? (known: name, tasks,"),
    ({"evaluation": {"bin": 15}}, "evaluation.bin: unknown key; did you mean bins?"),
    ({"tasks": {"snli": {"limit": 5}}}, "tasks.snli.limit: unknown key (known: data_dir,"),
    ({"tasks": {"snli": {"tset": 5}}}, "tasks.snli.tset: unknown key; did you mean test?"),
    ({"model": {"scratch": {"layer": 1}}}, "model.scratch.layer: unknown key; did you mean layers?"),
    ({"model": "absent"}, "model: missing"),
    ({"model": {}}, "model: name exactly one of path (a folder or hub id) and scratch"),
    ({"model": {"path": "x", "scratch": {}}}, "model: name exactly one of path"),
    ({"evaluation": {"bins": "many"}}, "evaluation.bins: expected a whole number, got 'many'"),
    ({"evaluation": {"bins": 0}}, "evaluation.bins: expected a number of at least 1, got 0"),
    ({"evaluation": {"k": [0]}}, "evaluation.k.0: expected a number of at least 1, got 0"),
    ({"sft": {"learning_rates": []}}, "sft.learning_rates: expected at least 1 entry, got []"),
    ({"seeds": []}, "seeds: expected at least 1 entry, got []"),
    ({"tasks": {}}, "tasks: expected at least 1 entry, got {}"),
    ({"name": "a/b"}, "name: recipe name 'a/b': expected letters, digits and ._-, at most 64, not dots alone"),
    ({"budgets": ["papr"]}, "budgets.0: expected paper or matched, got 'papr'"),
    ({"sft": {"learning_rates": [0]}}, "sft.learning_rates.0: expected a number above 0, got 0"),
    ({"rcft": {"learning_rates": [-1e-4]}}, "rcft.learning_rates.0: expected a number above 0"),
    ({"preference": {"learning_rates": [1e-4, float("nan")]}}, "preference.learning_rates.1: expected a"),
    ({"preference": {"learning_rates": [float("inf")]}}, "preference.learning_rates.0: expected a finite"),
    ({"preference": {"learning_rates": [1e-4, 1e-4]}}, "preference.learning_rates: one value occurs twice"),
    ({"outcome": {"temperature": float("inf")}}, "outcome.temperature: expected a finite number"),
    ({"seeds": [0, -1]}, "seeds.1: expected a number of at least 0, got -1"),
    ({"methods": []}, "methods: expected at least 1 entry"),
    ({"budgets": []}, "budgets: expected at least 1 entry"),
    (
        {"model": {"path": "x", "peft": {"task_type": "X"}}},
        "model.peft.task_type: cannot be set here: it is always CAUSAL_LM",
    ),
    (
        {"preference": {"trl": {"calibration": "bce"}}},
        "preference.trl.calibration: cannot be set here: the method sets it",
    ),
    ({"preference": {"trl": {"max_length": 30}}}, "preference.trl.max_length: cannot be set here: context sets it"),
    ({"sft": {"trl": {"output_dir": "x"}}}, "sft.trl.output_dir: cannot be set here: the run has its own"),
    ({"seeds": [2**32]}, "seeds.0"),
    (
        {"preference": {"trl": {"beta": float("nan")}}},
        "preference.trl.beta: expected a finite number, got nan",
    ),
    (
        {"preference": {"learning_rates": [1e-4, 1e-5], "trl": {"learning_rate": 1e-3}}},
        "preference.trl.learning_rate: would replace each of preference.learning_rates",
    ),
    ({"evaluation": {"sampling": "fited"}}, "evaluation.sampling: expected validation or fitted"),
    ({"methods": ["sft", "dpo+cato+ts"]}, "did you mean dpo+catto+ts?"),
    ({"methods": ["sft", "sft+ts+ts"]}, "methods: 'sft+ts+ts' is not one of sft,"),
    ({"methods": ["sft", "dpo", "dpo+catto+ts"]}, "dpo+catto+ts starts from dpo+catto, which is not among the methods"),
    ({"methods": ["sft", "dpo+cato"]}, "methods: 'dpo+cato' is not one of sft,"),
    ({"methods": ["sft", "dpo+cato"]}, "did you mean dpo+catto?"),
    ({"methods": ["sft", "rcft"]}, "methods: rcft starts from dpo, which is not among the methods"),
    ({"methods": ["dpo"]}, "methods: dpo starts from sft, which is not among the methods"),
    ({"seeds": [0, 1, 0]}, "seeds: one value occurs twice in 0, 1, 0"),
    ({"methods": ["sft", "sft"]}, "methods: one value occurs twice in sft, sft"),
    ({"train_on": "mmlu"}, "train_on: 'mmlu' is not among the tasks witnesses"),
    ({"outcome": {"held_out": True}}, "outcome.held_out: outcome.questions must say how many questions are held out"),
    (
        {"outcome": {"held_out": True, "questions": 9}, "tasks": {"snli": None}},
        "outcome.held_out: set tasks.snli.train, beyond which questions are held out",
    ),
    (
        {
            "outcome": {"held_out": True, "questions": 9},
            "tasks": {"snli": {"train": 9}},
            "methods": ["sft", "dpo+replay"],
        },
        "outcome.held_out: dpo+replay reads the teacher's traces, which cover only `train`",
    ),
    ({"teacher": {"source": "server", "model": "m"}}, "teacher: base_url: needed for source server"),
    ({"teacher": {"source": "responses"}}, "teacher: responses: name a file, a folder or a hub id"),
    (
        {"teacher": {"source": "witnesses", "temperature": [1.2, 0.6]}},
        "teacher: temperature: expected 0 <= low <= high",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES, ids=[expected[:60] for _, expected in CHANGES])
def test_a_bad_recipe_is_one_line_with_the_place(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    source = write(tmp_path, **changes)
    message = problem(source)
    assert message.startswith(f"{source}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nname: b\n", "key 'name' occurs twice"),
        ("name: a\nsft: {rows: 1, rows: 2}\n", "key 'rows' occurs twice"),
        ("name: [a\n", "line 2"),
        ("- a\n- b\n", "expected a mapping of settings"),
        ("", "expected a mapping of settings"),
    ],
)
def test_bad_yaml_is_one_line_with_the_place(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert expected in problem(str(path))


def test_a_file_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\n")
    assert "recipe.yaml: not UTF-8 at byte 6" in problem(str(path))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("evaluation.bins", "--set evaluation.bins: expected place=value"),
        ("=5", "--set =5: expected place=value"),
        ("evaluation.bin=5", "evaluation.bin: unknown key; did you mean bins?"),
        ("evaluation.bins=x", "--set evaluation.bins=x: evaluation.bins: expected a whole number, got 'x'"),
        ("evaluation.bins = x", "--set evaluation.bins = x: evaluation.bins: expected a whole number, got 'x'"),
        (" = 5", "= 5: expected place=value"),
        ("evaluation.bins=[", "--set evaluation.bins=[: "),
        ("sft={rows: 1, rows: 2}", "key 'rows' occurs twice"),
        ("name.x=5", "name: "),
    ],
)
def test_a_bad_override_is_one_line(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in problem(write(tmp_path), override)


def test_overrides_are_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path), ["evaluation.k=[2, 8]", "evaluation.k=[3]", "seeds = [4]", "tasks.witnesses.test=7"]
    )
    assert recipe.evaluation.k == (3,)
    assert recipe.seeds == (4,)
    assert recipe.tasks["witnesses"].test == 7


def test_a_block_can_be_merged_into_another_and_changed_there(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    path.write_text(path.read_text() + "\nrcft: &block {rows: 5, batch_size: 3}\nsft: {<<: *block, rows: 7}\n")
    recipe = load_recipe(str(path))
    assert [(block.rows, block.batch_size) for block in (recipe.rcft, recipe.sft)] == [(5, 3), (7, 3)]


def test_a_whole_number_for_a_float_keyword_is_that_float(tmp_path: Path) -> None:
    given = ["preference.trl.beta=1", "preference.trl.max_steps=1", "sft.trl.bf16=true"]
    recipe = load_recipe(write(tmp_path), given)
    found = [*recipe.preference.trl.values(), *recipe.sft.trl.values()]
    assert [(value, type(value)) for value in found] == [(1.0, float), (1, int), (True, bool)]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tasks.witnesses.data_dir=d", "tasks.witnesses.data_dir: not read for this task"),
        ("tasks.witnesses.labels=[A, B]", "tasks.witnesses.labels: not read for this task"),
        ("tasks={snli: {witnesses: 3}}", "tasks.snli.witnesses: not read for this task"),
        ("tasks={mine: {path: a.jsonl, data_dir: d}}", "tasks.mine.data_dir: not read for this task"),
        ("model.dtype=bfloat16", "model: dtype and attention need a path"),
        ("sft.trl.label_smoothing_factor=0.1", "cannot be set here: the method sft+ls smooths labels"),
        (
            "preference.trl.outcome_score=brier",
            "preference.trl.outcome_score: cannot be set here: outcome.score sets it",
        ),
        ("preference.trl.outcome_rows_per_pair=5", "cannot be set here: outcome.rows_per_pair sets it"),
        ("preference.trl.prefix_sharing=false", "cannot be set here: it is set at the top of the recipe"),
        ("rcft.trl.load_best_model_at_end=false", "cannot be set here: keep sets it"),
        ("sft.trl.metric_for_best_model=loss", "cannot be set here: keep sets it"),
        ("sft.trl.save_only_model=true", "cannot be set here: a run that was killed would end with a different model"),
        (
            "preference.trl.ignore_data_skip=true",
            "cannot be set here: a run that was killed would end with a different model",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(override: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        open_recipe("quickstart", [override])
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"--set {override}: ")


def test_a_rate_without_a_point_is_a_number(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["sft.learning_rates=[1e-4]", "sft.trl.weight_decay=1e-5"])
    assert recipe.sft.learning_rates == (1e-4,)
    assert recipe.sft.trl == {"weight_decay": 1e-5}


def test_an_unknown_recipe_is_told_with_a_suggestion() -> None:
    assert "did you mean quickstart?" in problem("quickstrat")


def test_a_recipe_without_methods_compares_all(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert recipe.methods == tuple(name for name in METHODS if METHODS[name].only_from != "base")
    assert {"base", "base+outcome"} == {*METHODS} - {*recipe.methods}
    assert isinstance(recipe, Recipe)


def test_a_preference_on_the_reasoning_needs_reasoning(tmp_path: Path) -> None:
    """Answer first, nothing comes before the label: such methods are refused, and not among all that are compared."""
    answer_first = ["teacher.source=labels", "teacher.reasoning=false"]
    compared = load_recipe(write(tmp_path), answer_first).methods
    assert {"dpo", "dpo+outcome", "ipo"} <= set(compared)
    assert not {"dpo+decoupled", "dpo+decoupled+sft", "dpo+reasoning"} & set(compared)
    told = problem(write(tmp_path), *answer_first, "methods=[sft, dpo+decoupled]")
    assert "dpo+decoupled compares the reasoning of responses, but teacher.reasoning is false" in told


OWN = {"start": "base", "model": {"path": "models/own"}, "teacher": {"source": "transformers"}}


def test_a_recipe_that_starts_from_the_given_model_has_no_sft(tmp_path: Path) -> None:
    """Without `methods` it compares all that need none; the teacher without a name is the model itself."""
    recipe = load_recipe(write(tmp_path, **OWN))
    assert recipe.methods[0] == "base"
    assert not {"sft", "sft+ls", "sft+outcome"} & {*recipe.methods}
    assert recipe.own_teacher.model == "models/own"
    planned = list_needed([Graph(recipe).plan_report()])
    assert not [stage.name for stage in planned if "sft" in stage.name.replace("+sft", "")]
    assert len([stage for stage in planned if stage.kind == "base"]) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"scratch": {}}}, "start: base needs model.path"),
        ({"methods": ["sft", "dpo"]}, "methods: sft needs start: sft; with start: base there are base, dpo"),
        ({"methods": ["base", "dpo", "sft+ts"]}, "methods: sft+ts needs start: sft"),
        ({"methods": ["dpo"]}, "methods: dpo starts from base, which is not among the methods"),
        ({"methods": ["base+ts"]}, "methods: base+ts starts from base, which is not among the methods"),
        ({"start": "sft", "methods": ["sft", "base"]}, "methods: base needs start: base"),
        ({"start": "sft"}, "teacher.model: needed for source transformers"),
        ({"start": "sft", "teacher": {"source": "witnesses"}, "outcome": {"source": "teacher"}}, "needs start: base"),
        ({"teacher": {"source": "witnesses"}, "outcome": {"source": "teacher"}}, "teacher witnesses is not a model"),
        (
            {"teacher": {"source": "transformers", "model": "other"}, "outcome": {"source": "teacher"}},
            "the teacher is other, the start model is models/own",
        ),
        ({"outcome": {"source": "teacher", "questions": 5}}, "outcome.questions: has no effect: with source teacher"),
        (
            {"outcome": {"source": "teacher", "temperature": 0.5}},
            "outcome.temperature: has no effect: with source teacher",
        ),
        (
            {"outcome": {"source": "teacher", "target": "votes"}, "teacher": {"source": "transformers", "n": 1}},
            "votes need several responses to a question, but teacher.n is 1",
        ),
        (
            {"outcome": {"target": "mix"}, "methods": ["base", "dpo+outcome-pairs"]},
            "outcome.target: dpo+outcome-pairs scores the pairs themselves, which have no votes",
        ),
    ],
)
def test_what_does_not_go_with_the_start_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    assert told in problem(write(tmp_path, **{**OWN, **changes}))


def test_a_model_that_is_not_trained_has_no_batch_for_processes_to_share(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, **OWN, methods=["base", "base+ts", "dpo"], launch={"processes": 2}))
    launch.check_launch(recipe)


def test_a_path_takes_its_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATTO_TEST_DATA", "/data")
    assert TaskSettings(data_dir="${CATTO_TEST_DATA}/snli").data_dir == "/data/snli"
    assert TaskSettings(files={"test": ["${CATTO_TEST_DATA}/a", "b"]}).files == {"test": ["/data/a", "b"]}
    assert ModelSettings(path="${CATTO_TEST_UNSET:-models}/m").path == "models/m"
    with pytest.raises(ValueError, match="environment variable CATTO_TEST_UNSET is not set"):
        TaskSettings(path="${CATTO_TEST_UNSET}/x.jsonl")


def test_only_paths_are_expanded_so_that_no_secret_enters_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATTO_TEST_KEY", "secret")
    settings = TeacherSettings(extra_body={"key": "${CATTO_TEST_KEY}"}, base_url="http://h/${CATTO_TEST_KEY}")
    assert "secret" not in settings.model_dump_json()


def test_checkpoints_are_as_often_by_default_whatever_else_a_block_says() -> None:
    recipe = load_recipe("quickstart", ["preference={rows: 5}", "sft={rows: 5}", "rcft={rows: 5}"])
    assert [block.checkpoint_steps for block in (recipe.preference, recipe.sft, recipe.rcft)] == [100, 500, 500]


def test_nested_aliases_are_refused_in_a_moment() -> None:
    """Ten levels of ten aliases stand for ten thousand million values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, 10):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    with pytest.raises(DataError, match="aliases"):
        parse_yaml("\n".join(lines), "recipe.yaml")
