"""The graph of stages: a changed knob reruns exactly what depends on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from catto.io.record_files import write_records
from catto.io.text_files import read_json
from catto.methods import SCALINGS, WEIGHTS
from catto.pipeline.kinds.choice import run_choice
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, Work, list_needed, stage_dir
from catto.recipe.load import load_recipe
from catto.recipe.settings import Recipe
from catto.records import Prediction
from catto.report import VERSION

TASKS = ("witnesses", "snli")
BASE: dict[str, Any] = {
    "name": "graph",
    "tasks": {"witnesses": {"train": 40, "validation": 10, "test": 20}, "snli": {"data_dir": "somewhere"}},
    "model": {"path": "some/model"},
    "methods": ["sft", "sft+ts", "sft+ls", "dpo", "rcft", "dpo+catto", "dpo+outcome"],
    "seeds": [0, 1],
    "teacher": {"source": "server", "model": "m", "base_url": "http://localhost:1/v1"},
    "evaluation": {"k": [4]},
}


def recipe_of(folder: Path, *overrides: str, **blocks: Any) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, **blocks}))
    return load_recipe(str(path), overrides)


def stages(recipe: Recipe) -> list[Stage]:
    return list_needed([Graph(recipe).plan_report()])


def short(stage: Stage) -> str:
    """The stage without its budget, task, seed and learning rate."""
    return re.sub(rf"( paper| matched)? ({'|'.join(TASKS)})( seed \d+)?( lr .*)?$", "", stage.name)


def fresh(before: Recipe, after: Recipe) -> list[Stage]:
    """The stages that `after` has to run where all of `before` is done."""
    known = {stage.folder for stage in stages(before)}
    return [stage for stage in stages(after) if stage.folder not in known]


def read_twice(what: str, *methods: str, reading: str = "read ") -> set[str]:
    """Generated text and its reading."""
    return {f"{stage}{what} {method}" for method in methods for stage in ("generated ", reading)}


def validated(*methods: str) -> set[str]:
    return read_twice("validation", *methods, reading="")


def sampled(*methods: str) -> set[str]:
    return read_twice("sampling", *methods) | {f"sampling {method}" for method in methods}


def candidates(*methods: str) -> set[str]:
    return read_twice("candidates", *methods) | {f"candidates {method}" for method in methods}


def on_test(*methods: str) -> set[str]:
    return read_twice("test", *methods, reading="") | candidates(*methods)


def measured(*methods: str) -> set[str]:
    return validated(*methods) | on_test(*methods) | sampled(*methods) | {f"tau {method}" for method in methods}


def model(*methods: str) -> set[str]:
    return {*methods, *(f"chosen {method}" for method in methods), *measured(*methods)}


PREFERENCE = ("dpo", "dpo+catto", "dpo+outcome")
MODELS = ("sft", "sft+ls", *PREFERENCE, "rcft")
WATCHED = {f"{stage}{what}" for what in ("reasoning sft", "reasoning dpo", "stream sft") for stage in ("sampled ", "")}
AFTER_SFT = model(*PREFERENCE, "rcft") | {"sampled reasoning dpo", "reasoning dpo", "report"}
TRAINED = model(*MODELS) | WATCHED | {"scaled sft+ts", "report"}
GENERATED = TRAINED - {"sft", "sft+ls", "chosen sft", "chosen sft+ls"}
TESTED = on_test(*MODELS)
ASKED, TRACED = {"responses", "teacher"}, {"responses traces", "traces"}
STREAM = {"sampled stream sft", "stream sft"}

KNOBS: list[tuple[str, set[str]]] = [
    ("name=other", {"report"}),
    ("evaluation.bins=15", {"report"}),
    ("evaluation.resamples=50", {"report"}),
    ("evaluation.unparsed=wrong", {"report"}),
    ("evaluation.k=[2, 4]", {"report"}),
    ("evaluation.k=[8]", candidates(*MODELS) | sampled(*MODELS) | {"report"}),
    ("evaluation.sampling=fitted", candidates(*MODELS) | {"report"}),
    ("evaluation.decode=sample", read_twice("scaled", "sft+ts") | {"scaled sft+ts", "report"}),
    ("evaluation.max_tokens=99", GENERATED),
    ("evaluation.batch_size=3", GENERATED),
    ("outcome.score=brier", model("dpo+outcome") | {"report"}),
    ("outcome.rows_per_pair=3", model("dpo+outcome") | {"report"}),
    ("outcome.temperature=0.5", model("dpo+outcome") | STREAM | {"report"}),
    ("outcome.questions=9", model("dpo+outcome") | STREAM | {"report"}),
    ("rcft.epochs=2", model("rcft") | {"report"}),
    ("rcft.rows=7", model("rcft") | {"report"}),
    ("preference.trl={beta: 0.2}", AFTER_SFT),
    ("preference.trl.calibration_weight=5", model("dpo+catto", "dpo+outcome") | {"report"}),
    ("preference.trl.calibration_weight=0.1", model("dpo+outcome") | {"report"}),  # the default of dpo+catto
    ("preference.trl.calibration_weight=null", set()),
    ("preference.trl.reduce=sum", model("dpo+catto") | {"report"}),
    ("preference.checkpoint_steps=7", AFTER_SFT),
    ("prefix_sharing=false", AFTER_SFT),
    ("small_pairs=10", AFTER_SFT),
    ("sft.epochs=1", TRAINED),
    ("sft.batch_size=4", TRAINED),
    ("keep=val_nll", TRAINED),
    ("context=99", TRAINED),
    ("model.path=another/model", TRAINED),
    ("model.peft={r: 4}", TRAINED),
    ("teacher.n=5", TRAINED | ASKED),
    ("teacher.min_wrong=1", TRAINED | {"teacher"}),
    ("teacher.pairs_per_question=2", TRAINED | {"teacher"}),
    ("teacher.model=other", TRAINED | ASKED | TRACED),
    ("teacher.max_tokens=77", TRAINED | ASKED | TRACED),
    ("tasks.witnesses.train=50", TRAINED | ASKED | {"questions"}),
    ("tasks.witnesses.test=50", TESTED | {"test questions", "scaled sft+ts", "report"}),
    ("tasks.witnesses.validation=50", TRAINED | TRACED | {"validation questions"}),
    (
        "tasks.snli.data_dir=elsewhere",
        TRAINED | ASKED | TRACED | {"questions", "test questions", "validation questions"},
    ),
    (
        "lr_choice=mean",
        {f"chosen {m}" for m in PREFERENCE}
        | on_test(*PREFERENCE)
        | sampled(*PREFERENCE)
        | {f"tau {m}" for m in PREFERENCE}
        | {"sampled reasoning dpo", "reasoning dpo"}
        | model("rcft")
        | {"report"},
    ),
    ("teacher.base_url=http://localhost:2/v1", set()),
    ("teacher.api_key_env=OTHER_KEY", set()),
    ("teacher.concurrency=99", set()),
    ("teacher.timeout=1", set()),
    ("teacher.retries=0", set()),
    ("methods=[rcft, dpo, sft, sft+ts, sft+ls, dpo+outcome, dpo+catto]", {"report"}),
]


@pytest.mark.parametrize(("override", "expected"), KNOBS, ids=[override for override, _ in KNOBS])
def test_a_changed_knob_reruns_exactly_what_depends_on_it(tmp_path: Path, override: str, expected: set[str]) -> None:
    found = fresh(recipe_of(tmp_path), recipe_of(tmp_path, override))
    assert {short(stage) for stage in found} == expected


def test_a_report_that_is_made_differently_is_made_again_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {stage.folder for stage in stages(recipe_of(tmp_path))}
    monkeypatch.setattr("catto.pipeline.plan.VERSION", VERSION + 1)
    assert [stage.name for stage in stages(recipe_of(tmp_path)) if stage.folder not in known] == ["report"]


def test_another_default_weight_trains_the_methods_with_that_term_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {stage.folder for stage in stages(recipe_of(tmp_path))}
    monkeypatch.setattr("catto.pipeline.plan.WEIGHTS", {**WEIGHTS, "outcome": 2.0})
    changed = {short(stage) for stage in stages(recipe_of(tmp_path)) if stage.folder not in known}
    assert changed == model("dpo+outcome") | {"report"}


def test_a_task_of_its_own_leaves_the_others_alone(tmp_path: Path) -> None:
    found = fresh(recipe_of(tmp_path), recipe_of(tmp_path, "tasks.snli.data_dir=elsewhere"))
    assert all("witnesses" not in stage.name for stage in found)


def test_an_added_method_costs_its_own_stages(tmp_path: Path) -> None:
    found = fresh(recipe_of(tmp_path), recipe_of(tmp_path, methods=[*BASE["methods"], "dpo+bce", "dpo+ts"]))
    assert {short(stage) for stage in found} == model("dpo+bce") | {"scaled dpo+ts", "report"}


def test_temperature_scaling_of_any_method_costs_no_model(tmp_path: Path) -> None:
    scaled = [f"{name}{suffix}" for name in (*PREFERENCE, "rcft", "sft+ls") for suffix in SCALINGS]
    found = fresh(recipe_of(tmp_path), recipe_of(tmp_path, methods=[*BASE["methods"], *scaled]))
    fitted = set[str]()
    for name in (*PREFERENCE, "rcft", "sft+ls"):
        fitted |= {f"tau among labels {name}", f"vector {name}"}
    assert {short(stage) for stage in found} == {f"scaled {name}" for name in scaled} | fitted | {"report"}
    cells = {
        (cell.place.method, cell.place.budget)
        for cell in Graph(recipe_of(tmp_path, methods=[*BASE["methods"], *scaled])).list_cells()
    }
    assert {("rcft+ts", "paper"), ("rcft+ts", "matched"), ("dpo+catto+ts", None)} <= cells


def test_nothing_is_sampled_at_a_temperature_among_the_labels(tmp_path: Path) -> None:
    """It says nothing of other tokens. What is sampled at another temperature has no validation answers like it."""
    methods = [*BASE["methods"], "dpo+ts", "dpo+tl"]
    cells = Graph(recipe_of(tmp_path, "evaluation.decode=sample", methods=methods)).list_cells()
    cells = [cell for cell in cells if (cell.place.task, cell.place.budget) == ("witnesses", "paper")]
    sampled, kept = (next(cell for cell in cells if cell.place.method == name) for name in ("dpo+ts", "dpo+tl"))
    assert sampled.predictions.needs["predicted"].settings.text.temperatures == 1
    assert kept.predictions.needs["predicted"].name.startswith("test dpo paper")
    assert not sampled.validation
    assert [stage.kind for stage in kept.validation] == ["predicted", "predicted"]


def test_an_added_learning_rate_leaves_the_old_trainings(tmp_path: Path) -> None:
    one = recipe_of(tmp_path, "preference.learning_rates=[1e-4]")
    found = fresh(one, recipe_of(tmp_path, "preference.learning_rates=[1e-4, 1e-5]"))
    trained = {stage.settings.learning_rate for stage in found if stage.kind == "train" and stage.method != "rcft"}
    assert trained == {1e-5}


def test_an_added_seed_costs_its_own_stages(tmp_path: Path) -> None:
    found = fresh(recipe_of(tmp_path), recipe_of(tmp_path, "seeds=[0, 1, 2]"))
    assert all("seed 2" in stage.name for stage in found if stage.kind != "report")


def test_a_changed_teacher_is_noticed_beside_responses_that_are_not_read(tmp_path: Path) -> None:
    model = tmp_path / "teacher"
    model.mkdir()
    (model / "config.json").write_text("{}")
    teacher = {"source": "transformers", "model": str(model), "responses": "unread.jsonl"}
    recipe = recipe_of(tmp_path, teacher=teacher)
    before = {stage.folder for stage in stages(recipe)}
    (model / "config.json").write_text('{"a": 1}')
    changed = {short(stage) for stage in stages(recipe) if stage.folder not in before}
    assert changed >= ASKED


def test_seeds_share_questions_and_teacher_and_nothing_else(tmp_path: Path) -> None:
    first, second = ({s.key: s for s in stages(recipe_of(tmp_path, f"seeds=[{seed}]"))} for seed in (0, 1))
    shared = {first[key].name for key in first.keys() & second.keys()}
    assert shared == {f"{what} {task}" for what in ("questions", "responses", "teacher") for task in TASKS}


def test_budgets_share_what_trains_equally_in_both(tmp_path: Path) -> None:
    graph = Graph(recipe_of(tmp_path))

    def keys(method: str) -> set[str]:
        return {graph.plan_choice("snli", 0, method, budget).key for budget in ("paper", "matched")}

    assert {method: len(keys(method)) for method in MODELS} == {
        "sft": 1, "sft+ls": 1, "dpo": 2, "dpo+catto": 1, "dpo+outcome": 1, "rcft": 2
    }  # fmt: skip


def test_small_pairs_leave_the_paper_budgets_dpo(tmp_path: Path) -> None:
    few, many = (Graph(recipe_of(tmp_path, f"small_pairs={n}")) for n in (10, 20))
    assert few.plan_choice("snli", 0, "dpo", "paper").key == many.plan_choice("snli", 0, "dpo", "paper").key
    assert few.plan_choice("snli", 0, "dpo", "matched").key != many.plan_choice("snli", 0, "dpo", "matched").key


def test_sft_is_trained_once_for_all_methods(tmp_path: Path) -> None:
    trained = [stage.name for stage in stages(recipe_of(tmp_path)) if stage.kind == "train" and short(stage) == "sft"]
    assert sorted(trained) == sorted(f"sft {task} seed {seed} lr 5e-05" for task in TASKS for seed in (0, 1))


@pytest.mark.parametrize(
    ("choice", "method", "depends"), [("mean", "dpo", True), ("mean", "sft", False), ("seed", "dpo", False)]
)
def test_only_a_mean_over_several_rates_depends_on_the_seeds(
    tmp_path: Path, choice: str, method: str, depends: bool
) -> None:
    one, two = (Graph(recipe_of(tmp_path, f"lr_choice={choice}", f"seeds={seeds}")) for seeds in ("[0]", "[0, 1]"))
    assert (
        one.plan_choice("snli", 0, method, "paper").key != two.plan_choice("snli", 0, method, "paper").key
    ) == depends


@pytest.mark.parametrize(("choice", "rate"), [("mean", 5e-7), ("seed", 5e-6)])
def test_the_lowest_ece_of_the_seed_or_of_the_mean_over_seeds_is_chosen(
    tmp_path: Path, choice: str, rate: float
) -> None:
    """ECE of the first rate: 10 % at seed 0, 90 % at seed 1; of the second 30 % at both. All answers are right."""
    recipe = recipe_of(tmp_path, f"lr_choice={choice}")
    stage = Graph(recipe).plan_choice("snli", 0, "dpo", "paper")
    assert stage.settings.rates == (5e-6, 5e-7)
    confidence = {"0 seed 0": 0.9, "0 seed 1": 0.1, "1 seed 0": 0.7, "1 seed 1": 0.7}
    for role, need in stage.needs.items():
        if role.startswith("validation"):
            row = prediction(confidence[role.removeprefix("validation ")])
            write_records(stage_dir(tmp_path, need) / "predictions.jsonl", [row])
    run_choice(Work(stage, tmp_path, tmp_path / "out", lambda *_: None))
    told = read_json(tmp_path / "out" / "choice.json")
    number = [5e-6, 5e-7].index(rate)
    assert (told["learning_rate"], told["model"]) == (rate, f"model {number} seed 0")
    assert told["validation_ece"] == pytest.approx({"5e-06": 0.5 if choice == "mean" else 0.1, "5e-07": 0.3})


def prediction(confidence: float) -> Prediction:
    """A right answer."""
    text: dict[str, Any] = dict.fromkeys(("question", "task", "gold", "label", "text", "engine", "model"), "A")
    numbers = {"sample": 0, "confidence": confidence, "temperature": 0.0, "seed": 0}
    return Prediction(**text, **numbers, split="validation", source="free")


def test_out_of_distribution_trains_on_one_task_at_the_first_rate(tmp_path: Path) -> None:
    found = stages(recipe_of(tmp_path, "train_on=snli"))
    trained = [stage for stage in found if stage.kind == "train"]
    assert {stage.settings.learning_rate for stage in trained if stage.method == "dpo"} == {5e-6}
    assert all("snli" in stage.name for stage in trained)
    tested = [stage for stage in found if stage.kind == "generated" and stage.settings.split == "test"]
    assert {short(stage) for stage in tested} == {f"generated {w} {m}" for m in MODELS for w in ("test", "candidates")}
    assert all("witnesses" in stage.name for stage in tested)


def test_a_stage_comes_after_what_it_needs_and_once(tmp_path: Path) -> None:
    found = stages(recipe_of(tmp_path))
    places = {stage.key: place for place, stage in enumerate(found)}
    assert len(places) == len(found)
    assert all(places[need.key] < place for place, stage in enumerate(found) for need in stage.needs.values())


def test_folders_and_names_are_as_distinct_as_keys(tmp_path: Path) -> None:
    found = stages(recipe_of(tmp_path))
    assert len({stage.name for stage in found}) == len(found)
    assert len({stage.folder for stage in found}) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9.+-]+", stage.folder) for stage in found)


def test_stored_responses_are_to_training_questions_so_sft_is_not_watched(tmp_path: Path) -> None:
    teacher = {"source": "responses", "responses": "somewhere.jsonl"}
    assert not [stage for stage in stages(recipe_of(tmp_path, teacher=teacher)) if "traces" in stage.name]
    assert [stage for stage in stages(recipe_of(tmp_path)) if "traces" in stage.name]
