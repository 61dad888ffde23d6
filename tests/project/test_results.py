"""The study's scripts collect runs, and their tables show what was measured."""

from __future__ import annotations

import doctest
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from catto import load_questions
from catto.engines import TAU_GRID
from catto.io.record_files import write_records
from catto.metrics.intervals import Interval
from catto.metrics.statistics import SeedSummary
from catto.recipe.settings import ResponseFields
from catto.records import PairMargin, Prediction, Question
from catto.report.numbers import Cell, Results
from catto.teacher.sources import StoredResponses
from study import claims, collect, load, names, objectives, reasons, store, tables, write

ROOT = Path(__file__).parents[2]
OUTCOME = {"score": "brier", "held_out": False, "rows_per_pair": 1}
RECIPE = {"tasks": {"snli": {}}, "teacher": {"reasoning": False}}
EVALUATION = {"bins": 20, "resamples": 20}


def make_prediction(number: int, **changes: Any) -> Prediction:
    fields = {"question": f"q{number}", "task": "witnesses", "split": "test", "gold": "A", "sample": 0, "text": "<a>"}
    fields |= {"label": "A" if number % 3 else "B", "source": "free", "confidence": 0.1 + 0.2 * (number % 5)}
    fields |= {"tokens": 3, "temperature": 0.0, "seed": 0, "engine": "e", "model": "m"}
    return Prediction.model_validate(fields | changes)


def make_cell(method: str = "dpo", **changes: Any) -> Cell:
    fields = {"task": "witnesses", "trained_on": "witnesses", "method": method, "budget": None, "seed": 0}
    return Cell.model_validate(fields | {"predictions": f"{method}.jsonl"} | changes)


def write_run(run: Path, cells: list[Cell], **recipe: Any) -> None:
    """Write the report of a run with its questions; the predictions are there already."""
    options = [{"label": "A", "text": "a"}, {"label": "B", "text": "b"}]
    posterior = {"B": 1 / 3, "A": 2 / 3}
    questions = []
    for number in range(30):
        fields = {"id": f"q{number}", "task": "witnesses", "split": "test", "fields": {"question": "?"}}
        questions.append(Question.model_validate(fields | {"options": options, "gold": "A", "posterior": posterior}))
    write_records(run / "questions.jsonl", questions)
    settings = {"tasks": {"witnesses": {}}, "evaluation": EVALUATION, "outcome": OUTCOME, "preference": {"trl": {}}}
    results = Results(
        name="tiny",
        recipe=settings | recipe,
        recipe_hash="hash",
        versions={},
        cells=tuple(cells),
        questions={"witnesses": ("questions.jsonl",)},
    )
    report = run / "stages" / "report-1" / "results.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(results.model_dump_json())


def test_stored_rows_are_read_as_they_were_collected(tmp_path: Path) -> None:
    """Confidences, samples, margins and posteriors come back bit by bit, without texts."""
    run = tmp_path / "run"
    run.mkdir()
    answers = [make_prediction(number, confidence=1 / (number + 3)) for number in range(30)]
    write_records(run / "dpo.jsonl", answers)
    write_records(run / "margins.jsonl", [PairMargin(question="p", whole=1 / 3, reasoning=None)])
    write_run(run, [make_cell(preference="margins.jsonl")])
    collect.collect_run(run, folder=tmp_path / "data")
    assert store.list_studies(tmp_path / "data") == ["tiny"]
    [(key, rows)] = store.read_rows("tiny", tmp_path / "data").items()
    assert key == ("witnesses", "witnesses", 0, "dpo", None)
    assert [row.confidence for row in rows.answers] == [round(1 / (number + 3), 12) for number in range(30)]
    assert {(row.text, row.model, row.label_logprobs) for row in rows.answers} == {("", "dpo", None)}
    assert rows.pairs == [PairMargin(question="p", whole=0.333333, reasoning=None)]
    assert list(rows.posteriors["q0"].items()) == [("B", 1 / 3), ("A", 2 / 3)]


def test_collecting_adds_methods_and_replaces_those_of_the_same_seed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for method in ("dpo", "sft"):
        write_records(run / f"{method}.jsonl", [make_prediction(number) for number in range(30)])
    write_run(run, [make_cell("dpo"), make_cell("sft")])
    collect.collect_run(run, folder=tmp_path / "data")
    before = store.read_rows("tiny", tmp_path / "data")
    write_records(run / "dpo.jsonl", [make_prediction(number, confidence=0.5) for number in range(30)])
    write_records(run / "ipo.jsonl", [make_prediction(number) for number in range(30)])
    write_run(run, [make_cell("dpo"), make_cell("ipo")])
    summary = collect.collect_run(run, folder=tmp_path / "data")
    after = store.read_rows("tiny", tmp_path / "data")
    assert [cell.method for cell in summary.cells] == ["sft", "dpo", "ipo"]
    sft, dpo, _ = after
    assert after[sft] == before[sft]
    assert {row.confidence for row in after[dpo].answers} == {0.5}


def test_a_collected_study_is_measured_and_tabulated(tmp_path: Path) -> None:
    """`dpo` is right on 20 of 30 questions. Every posterior of A is 2/3, so confidences decide the true error."""
    run = tmp_path / "run"
    run.mkdir()
    for method in ("sft", "dpo"):
        write_records(run / f"{method}.jsonl", [make_prediction(number) for number in range(30)])
    write_run(run, [make_cell("sft"), make_cell("dpo")])
    collect.collect_run(run, "mine", folder=tmp_path / "data")
    measured = load.measure_study("mine", folder=tmp_path / "data")
    lines = list(tables.tabulate_briefly(tables.list_places(measured.numbers)))
    assert lines[0].endswith(", 30 test questions, seed 0:")
    assert lines[5].startswith("| DPO | 66.7 | 50.0 |")
    assert lines[2].endswith("| true error |")


def test_stored_samples_rank_as_in_the_run(tmp_path: Path) -> None:
    """Their confidence is stored at the cell's tau. Logits (0, ln 0.25): 0.8 at tau 1, 1 / (1 + 0.25^2) at tau 0.5."""
    logprobs = {"A": math.log(0.8), "B": math.log(0.2)}
    logsumexp = {str(tau): math.log1p(0.25 ** (1 / tau)) for tau in TAU_GRID}
    row = make_prediction(1, confidence=0.8, label_logprobs=logprobs, logsumexp=logsumexp, mean_logprob=-0.3)
    write_records(tmp_path / "dpo.jsonl", [row])
    rows = collect.read_cell_rows(make_cell(candidates="dpo.jsonl", tau=0.5), tmp_path, method="dpo")
    [answer] = rows.answers
    [sample] = rows.samples
    assert (answer.confidence, answer.mean_logprob) == (0.8, None)
    assert (sample.confidence, sample.mean_logprob) == (pytest.approx(1 / 1.0625, abs=1e-9), -0.3)
    assert sample.logsumexp is None
    assert sample.label_logprobs is None


def test_stored_margins_keep_their_sign() -> None:
    large = collect.shorten_margin(PairMargin(question="1", whole=1.23456789, reasoning=None))
    small = collect.shorten_margin(PairMargin(question="2", whole=-1e-9, reasoning=1e-8))
    assert (large.whole, large.reasoning) == (1.23457, None)
    assert (small.whole, small.reasoning) == (-1e-9, 1e-8)


def test_the_stored_studies_hold_no_text_and_no_path() -> None:
    studies = store.list_studies()
    assert {"answer_first", "reasoning", "world", "objectives"} <= set(studies)
    for name in studies:
        summary = store.read_summary(name)
        assert store.read_rows(name).keys() == {cell.key for cell in summary.cells}
        runs = [run.model_copy(update={"command": None}) for run in summary.runs]
        assert "/" not in summary.model_copy(update={"runs": tuple(runs)}).model_dump_json()


def test_every_block_of_the_pages_can_be_written() -> None:
    blocks = write.make_blocks()
    texts = "".join((ROOT / page).read_text() for page in write.PAGES)
    for name in blocks:
        is_optional = any(name.startswith(f"{study} ") for study in store.list_studies())
        assert is_optional or texts.count(f"<!-- begin {name} -->\n") == 1, name
    names_in_pages = write.fill_blocks(texts, dict.fromkeys(blocks, list))
    assert names_in_pages.count("<!-- begin ") == texts.count("<!-- begin ")


@pytest.mark.slow
def test_the_tables_of_objectives_are_written_from_the_stored_predictions() -> None:
    """The blocks in the README and the other pages are what the data gives."""
    measured = load.measure_study("objectives", write.MAIN_SEEDS)
    pages = "".join((ROOT / page).read_text() for page in write.PAGES)
    for make_lines in (objectives.tabulate_findings, objectives.tabulate_objectives, objectives.tabulate_optima):
        assert "\n".join(make_lines(measured.numbers)) in pages


@pytest.mark.parametrize("module", [names, reasons, tables, write])
def test_examples_in_docstrings(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_variant_of_a_term_has_a_name_and_a_title() -> None:
    trl = {"bf16": True, "calibration_weight": 10, "calibrate_tokens": "label"}
    recipe = {**RECIPE, "preference": {"trl": trl}, "outcome": {**OUTCOME, "score": "log", "held_out": True}}
    assert names.variant_name("dpo", recipe) == "dpo"
    scored = names.variant_name("dpo+outcome+ts", recipe)
    assert scored == "dpo+outcome+ts-held_out-score-log-weight-10"
    title = "DPO + outcome + temperature scaling, held-out questions, log score, weight 10"
    assert names.variant_title(scored) == title
    assert names.variant_name("dpo+catto", recipe) == "dpo+catto-tokens-label-weight-10"
    longer = names.variant_name("dpo+ts", recipe, "paper")
    assert longer == "dpo+ts-epochs-6"
    assert names.variant_title(longer) == "DPO + temperature scaling, 6 epochs"


def test_usual_settings_have_no_name() -> None:
    unset = {"calibration_weight": None, "detach_surrogate": False, "outcome_score": "brier"}
    recipe = {**RECIPE, "preference": {"trl": unset}, "outcome": {**OUTCOME, "score": "log"}}
    assert names.variant_name("dpo+catto", recipe) == "dpo+catto"
    assert names.variant_name("dpo+outcome", recipe) == "dpo+outcome"
    recipe["preference"] = {"trl": {"calibration_weight": 1.0, "detach_surrogate": True}}
    assert names.variant_name("dpo+catto", recipe) == "dpo+catto-detached-weight-1"
    more_rows = {**RECIPE, "preference": {"trl": {}}, "outcome": {**OUTCOME, "rows_per_pair": 4}}
    assert names.variant_name("dpo+replay", more_rows) == "dpo+replay-rows-4"
    assert names.variant_title("dpo+replay-rows-4") == "DPO + replay, 4 rows per pair"


def test_the_sft_loss_names_methods_with_a_preference_loss() -> None:
    trl = {"loss_type": ["sigmoid", "sft"]}
    recipe = {**RECIPE, "preference": {"trl": trl}, "outcome": {**OUTCOME, "score": "log"}}
    methods = ("sft", "sft+outcome", "dpo+tl", "dpo+outcome")
    variants = [names.variant_name(method, recipe) for method in methods]
    assert variants == ["sft", "sft+outcome-score-log", "dpo+tl-sft_loss", "dpo+outcome-score-log-sft_loss"]
    assert names.variant_title(variants[-1]) == "DPO + outcome, log score, with sft loss"


def test_a_short_title_leaves_out_what_the_page_states_once() -> None:
    assert names.short_title("dpo+outcome-score-log-sft_loss-weight-1") == "DPO + outcome, with sft loss"
    assert names.short_title(f"dpo+outcome{names.TUNED}") == "DPO + outcome, tuned"
    assert names.short_title("dpo+catto-weight-10") == "DPO + CATTO, weight 10"


def test_held_out_pairs_are_columns_where_they_were_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for method in ("sft", "dpo"):
        write_records(run / f"{method}.jsonl", [make_prediction(number) for number in range(30)])
    write_run(run, [make_cell("sft"), make_cell("dpo")])
    collect.collect_run(run, folder=tmp_path)
    [place] = tables.list_places(load.measure_study("tiny", folder=tmp_path).numbers)
    sft, dpo = place.groups
    rows = [["sft"], ["dpo"]]
    without = tables.tabulate_place(place, ["method"], rows)
    metrics = {**dpo.metrics, "preference_accuracy": SeedSummary(0.61, None, 1)}
    intervals = {**dpo.intervals, "preference_accuracy": Interval(0.61, 0.55, 0.67, 0.95)}
    dpo = dpo.model_copy(update={"metrics": metrics, "intervals": intervals})
    measured = tables.tabulate_place(tables.Place(place.title, [sft, dpo]), ["method"], rows)
    assert measured[2] == f"{without[2][:-2]} | held-out pairs ordered, % | by their reasoning, % |"
    assert measured[4].endswith(" | - | - |")
    assert measured[5].endswith(" | 61.0 [55.0, 67.0] | - |")


def test_built_reasoning_answers_every_question_with_every_label(tmp_path: Path) -> None:
    """The sentences quote the hypothesis, and stored responses of a recipe can be read from the file."""
    for split in ("train", "dev", "test"):
        lines = []
        for number in range(40):
            row = {"pairID": f"{split}-{number}.jpg#0r1e", "captionID": f"{number}.jpg#0", "gold_label": "entailment"}
            row |= {"sentence1": f"A man walks past house {number}. {split}", "sentence2": "A tall man walks."}
            lines.append(json.dumps(row))
        (tmp_path / f"snli_1.0_{split}.jsonl").write_text("\n".join(lines) + "\n")
    reasons.main(str(tmp_path), str(tmp_path / "reasons.jsonl"))
    questions = load_questions("snli", "train", data_dir=str(tmp_path))
    fields = ResponseFields(text=None, reasoning="reasoning", label="label", sample="sample")
    stored = StoredResponses(str(tmp_path / "reasons.jsonl"), fields, list(questions))
    assert stored.notes == {"rows_found": 120, "rows_of_other_questions": 120}
    held_out = load_questions("snli", "validation", data_dir=str(tmp_path), seed=2, limit=7)  # drawn by its seed
    stored = StoredResponses(str(tmp_path / "reasons.jsonl"), fields, list(held_out))
    assert stored.notes == {"rows_found": 21, "rows_of_other_questions": 219}
    texts = {json.loads(line)["reasoning"] for line in (tmp_path / "reasons.jsonl").read_text().splitlines()}
    assert {"New: tall.", "Both: man, walks.", "Both: man, walks. New: tall."} <= texts


def make_goals(task: str) -> list[claims.Goal]:
    goals = [claims.Goal(task, "DPO + outcome", "", "debiased_ece", "1.0, 8.0", "", "yes")]
    for scaling, metric in itertools.product(tables.SCALINGS, claims.GOAL_METRICS):
        reached = "better, within noise ‡" if metric == "auroc" else "yes"
        goals.append(claims.Goal(task, "DPO + outcome", scaling, metric, f"{metric}{scaling}", "", reached))
    return goals


def test_goals_are_shown_as_a_line_for_each_scaling() -> None:
    lines = claims.tabulate_reached([("{}", make_goals("SNLI")), ("{} with reasoning", make_goals("SNLI"))])
    texts = "yes: brier{0} | within noise ‡: auroc{0} | yes: ece{0} | yes: accuracy{0} |"
    expected = []
    for task in ("SNLI", "SNLI with reasoning"):
        expected.append(f"| {task} | DPO + outcome | yes: 1.0, 8.0 | whole vocabulary | {texts.format('+ts')}")
        expected.append(f"|  |  |  | labels | {texts.format('+tl')}")
    assert lines[2:6] == expected
    goal = "| SNLI | DPO + outcome | AUROC, both scaled among labels: better than DPO's | auroc+tl |"
    assert goal in "".join(claims.tabulate_goals(make_goals("SNLI")))


def test_controls_are_shown_as_a_line_for_each_pair_and_scaling() -> None:
    controls = []
    for scaling, metric in itertools.product(("", "+tl"), ("ece", "brier")):
        control = claims.Control(
            first="dpo+outcome-score-log-weight-1",
            second="dpo+replay-weight-1",
            scaling=scaling,
            about="(seed 0) ‡",
            metric=metric,
            values=f"{metric}{scaling}",
            difference="-1 to 1, p = 0.5",
            reached="better, within noise",
        )
        controls.append(control)
    assert claims.tabulate_controls_briefly(controls)[2:4] == [
        "| DPO + outcome (seed 0) ‡ | DPO + replay | - | within noise: ece | within noise: brier |",
        "|  |  | labels | within noise: ece+tl | within noise: brier+tl |",
    ]
    both = "DPO + outcome + scaling among labels, log score, weight 1; DPO + replay + scaling among labels, weight 1"
    line = f"| {both} (seed 0) ‡ | ECE | ece+tl | -1 to 1, p = 0.5 | better, within noise |"
    assert line in claims.tabulate_controls(controls)
