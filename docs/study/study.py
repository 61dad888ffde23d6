"""The study's summary: collect it from finished runs, and write the pages of the results and their figures from it.

    python docs/study/study.py collect RUN ...    # adds the cells of finished runs to docs/study/summary
    python docs/study/study.py write              # `make results`

The summary has a folder for each of STUDIES: one small file of predictions for each method, task and seed, without
texts, and `results.json`, which lists them with how each model was trained. docs/results.md has the answer,
docs/results-in-full.md the tables behind it. What is between `<!-- begin NAME -->` and `<!-- end NAME -->` is written
here, everything around it by hand.
"""

from __future__ import annotations

import gzip
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from catto.io.atomic import replace_binary_file, replace_file
from catto.io.record_files import read_records
from catto.io.text_files import read_json
from catto.measure import MeasureSettings, ParseCounts, compare_runs
from catto.methods import AMONG_LABELS, METHODS, TERM_OPTIONS, WEIGHTS, Budget, method_sort_key, strip_scaling
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS, Versus, holm
from catto.metrics.errors import accuracy, brier, ece, mean_confidence
from catto.metrics.ranking import auroc
from catto.metrics.temperature import rescale_predictions
from catto.records import PairMargin, Prediction, Question
from catto.report.build import read_experiment
from catto.report.drawing import Panel, reliability_figure, write_figure
from catto.report.measuring import PREFERENCE, CellAnswers, measure_results
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results
from catto.report.tables import method_title, setting_title, task_order, task_title

HERE = Path(__file__).parent
DOCS, SUMMARY = HERE.parent, HERE / "summary"
PAGES = ("results.md", "results-in-full.md", "method.md", "../README.md")
SCALINGS = ("+ts", AMONG_LABELS)  # those that the tables show
TUNED = "-held_out-score-log-weight-5"  # the variant of outcome that was run with every seed
PANELS = ("sft", "dpo", "dpo+catto", "dpo+outcome", f"dpo+outcome{TUNED}")
# What makes a variant of a method: its part of the name, and how tables say it.
OPTIONS = {"weight": "weight {}", "score": "{} score", "held_out": "held-out questions", "rows": "{} rows per pair"}
OPTIONS |= {
    "tokens": "on {} tokens",
    "reduce": "{} over tokens",
    "detached": "surrogate detached",
    "epochs": "{} epochs",
    "sft_loss": "with sft loss",
    "target": "target {}",
    "probe": "linear probe",
}
# Options of a term -> their part of the name; of the stream and the budget there are more.
NAMES = {"calibration_weight": "weight", "outcome_score": "score", "calibrate_tokens": "tokens", "reduce": "reduce"}
NAMES |= {"detach_surrogate": "detached", "outcome_target": "target"}
# The studies, and how many rows of the stream their recipes have for a pair: SmolLM2 without and with reasoning, the
# embedded world, and the comparison of objectives in that world with 1,000 test questions.
OBJECTIVES = "objectives"
STUDIES = {"answer_first": 1, "reasoning": 1, "world": 2, OBJECTIVES: 2}
# Variants of `outcome` that are held against the goals where responses have reasoning, and those with controls.
LOG, PAIRS = "dpo+outcome-score-log-weight-1", "dpo+outcome-pairs-score-log-weight-1"
WHOLE = "dpo+outcome-score-log-sft_loss-weight-1"  # the score on labels, supervision on whole responses
GOALS = (LOG, WHOLE, "dpo+outcome-held_out-rows-4-score-log-weight-1", PAIRS)
ROWS, REPLAY = "dpo+outcome-rows-4-score-log-weight-1", "dpo+replay-rows-4-weight-1"
CONTROLS = ((LOG, "dpo+replay-weight-1"), (ROWS, REPLAY))
WORLD_PARTS = ((LOG, "sft+outcome-score-log-weight-1"), (LOG, PAIRS))  # without the preference loss, the stream
REASONED = (CONTROLS[0], (LOG, PAIRS), (WHOLE, "dpo-sft_loss"), (WHOLE, LOG))
BRIEFLY = ("sft", "sft+outcome-score-log-weight-1", "dpo", LOG, PAIRS, ROWS, REPLAY)
MAIN = (0, 1, 2)  # seeds of the comparison; others have the remaining methods and most of the ablation
# Of each objective: what it optimises, and where its label probability is best. docs/method.md shows both.
OPTIMA = {
    "dpo": ("the reward margin of whole responses", "certainty: the margin has no finite optimum"),
    "dpo+catto": (
        "DPO, and an affine function of each token's confidence",
        "certainty: an affine function is least at an end",
    ),
    "ipo": ("the squared distance of the margin to 1 / (2 beta)", "wherever the margin has that value"),
    "dpo+robust": (
        "DPO, for preferences of which a tenth is wrong",
        "certainty: it falls without bound as the margin grows",
    ),
    "dpo+sft": ("DPO, and the likelihood of the chosen responses", "certainty of the chosen label"),
    "dpo+reasoning": ("the margin of the reasoning", "nothing acts on the label"),
    "dpo+outcome": (
        "the margin of whole responses, and a proper score of the label",
        "between certainty and the true probability",
    ),
    "dpo+decoupled": (
        "the margin of the reasoning, and a proper score of the label",
        "the true probability given the reasoning",
    ),
    "dpo+decoupled+sft": (
        "the same, and the likelihood of the chosen responses",
        "between certainty and the true probability",
    ),
    "dpo+decoupled-target-mix": (
        "the same as decoupled, with soft targets",
        "the mean of the truth and the start model's votes",
    ),
    "dpo+decoupled-target-votes": ("the same as decoupled, with soft targets", "the start model's votes"),
    "sft+outcome": ("a proper score of the label", "the true probability given the reasoning"),
    "outcome+decoupled": (
        "first the score, then decoupled with a calibrated reference",
        "the true probability given the reasoning",
    ),
    "outcome+dpo": ("first the score, then DPO", "certainty: the margin has no finite optimum"),
    "outcome+dpo+outcome": (
        "first the score, then DPO + outcome with a calibrated reference",
        "between certainty and the true probability",
    ),
}
# Rows of the README's table.
FINDINGS = ("dpo", "dpo+catto", "dpo+tl", "dpo+outcome-score-log", "outcome+dpo+outcome-score-log")
# Rows of the table on the results' page.
CLAIMS = ("sft", "dpo", "dpo+catto", "dpo+tl", f"dpo+outcome{TUNED}", f"dpo+outcome+tl{TUNED}")
DIGITS = 12  # of a stored confidence: after DPO many differ from 1 by less than 1e-6
DROPPED = {"confidence_raw", "logsumexp", "label_logprobs", "mean_logprob", "self_certainty", "lowest_group"}


# ---- collecting ------------------------------------------------------------------------------------------------------


def collect(run: Path) -> Results:
    """Add the cells of every report in a run to its study's summary; a cell that is there already is replaced."""
    reports = sorted(run.glob("stages/*/results.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise SystemExit(f"{run}: holds no finished report")
    for path in reports:
        newest = Results.model_validate(read_json(path))
        study = _study(newest.recipe)
        folder = SUMMARY / study
        folder.mkdir(parents=True, exist_ok=True)
        known = {_name(cell): cell for cell in _summary(study).cells} if (folder / "results.json").exists() else {}
        for cell in newest.cells:
            method = _variant(cell.method, newest.recipe, cell.budget)
            budget = None if cell.budget is None else "matched"  # one table: the paper's budget is a variant
            named = cell.model_copy(update={"method": method, "budget": budget})
            known[_name(named)] = _copied(named, run, folder)
        for probed in _probed(newest, run):
            known[_name(probed)] = _copied(probed, run, folder)
        cells = sorted(
            known.values(), key=lambda cell: (cell.trained_on, cell.task, cell.seed, method_sort_key(cell.method))
        )
        # The rest of a recipe holds paths of the machine that it ran on.
        update: dict[str, Any] = {"recipe": {"evaluation": newest.recipe["evaluation"]}, "cells": tuple(cells)}
        update["questions"] = _posteriors(newest, run, folder) if study in ("world", OBJECTIVES) else {}
        newest = newest.model_copy(update=update)
        with replace_file(folder / "results.json") as file:
            file.write(newest.model_dump_json(indent=1) + "\n")
    return newest


def _probed(results: Results, run: Path) -> Iterator[Cell]:
    """The cells of DPO with the confidence of a linear probe, where docs/study/probe.py has written one."""
    for cell in results.cells:
        if cell.method != "dpo":
            continue
        for path in run.glob(f"probe/dpo-*{cell.task}-seed-{cell.seed}/predictions.jsonl"):
            update = {"method": "dpo-probe", "predictions": str(path.relative_to(run)), "candidates": None}
            budget = None if cell.budget is None else "matched"
            yield cell.model_copy(update={**update, "preference": None, "budget": budget, "training": None})


def _study(recipe: Mapping[str, Any]) -> str:
    """The study that a recipe belongs to, one of STUDIES."""
    if recipe.get("name") == OBJECTIVES:
        return OBJECTIVES
    if "witnesses" in recipe["tasks"]:
        return "world"
    return "reasoning" if recipe["teacher"]["reasoning"] else "answer_first"


def _summary(study: str = "answer_first") -> Results:
    return Results.model_validate(read_json(SUMMARY / study / "results.json"))


def _posteriors(results: Results, run: Path, folder: Path) -> dict[str, tuple[str, ...]]:
    """Copy the test questions, which carry the true posterior; of all seeds into one file."""
    copies: dict[str, tuple[str, ...]] = {}
    for task, paths in results.questions.items():
        copy = folder / f"{task}-questions.jsonl.gz"
        known = [copy] if copy.exists() else []  # those of seeds that other runs have
        questions = {
            one.id: one for path in (*known, *(run / path for path in paths)) for one in read_records(path, Question)
        }
        _write_lines(copy, [one.model_dump_json() for one in questions.values()])
        copies[task] = (copy.name,)
    return copies


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with replace_binary_file(path) as file:  # no date in it: equal lines give equal bytes
        file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def _variant(name: str, recipe: Mapping[str, Any], budget: Budget | None = None) -> str:
    """The method with the options that a recipe sets: `dpo+catto-weight-10`. Brier's score has no name of its own."""
    calibration, outcome = METHODS[strip_scaling(name)].calibration, recipe["outcome"]
    settings = {"outcome_score": outcome["score"]} | recipe["preference"]["trl"]
    if outcome.get("target", "gold") != "gold":
        settings["outcome_target"] = outcome["target"]
    options = []
    for knob, value in settings.items():
        if knob in NAMES and calibration in TERM_OPTIONS[knob] and value not in (None, False, "brier"):
            text = f"{value:g}" if isinstance(value, int | float) else value
            options.append(NAMES[knob] if value is True else f"{NAMES[knob]}-{text}")
    if calibration in ("outcome", "replay"):
        rows = outcome["rows_per_pair"]
        options += ["held_out"] * outcome["held_out"] + [f"rows-{rows}"] * (rows != STUDIES[_study(recipe)])
    if "sft" in settings.get("loss_type", ()) and METHODS[strip_scaling(name)].group == "DPO":
        options.append("sft_loss")
    if budget == "paper":
        options.append(f"epochs-{METHODS[strip_scaling(name)].effort[budget].epochs}")
    return "-".join([name, *sorted(options)])


def _name(cell: Cell) -> str:
    return "-".join(filter(None, (cell.stem, str(cell.seed), cell.method, cell.budget)))


def _copied(cell: Cell, run: Path, folder: Path) -> Cell:
    """Copy the predictions of a cell without their texts, and its candidates; return the cell that names the copies.

    Candidates have the confidence at the cell's tau, by which they are ranked.
    """

    def copied(name: str, predictions: Iterable[Prediction], dropped: Collection[str]) -> str:
        lines = []
        for prediction in predictions:
            short = {"text": "", "confidence": round(prediction.confidence, DIGITS), "model": cell.method}
            lines.append(prediction.model_copy(update=short).model_dump_json(exclude={*dropped}))
        _write_lines(folder / name, lines)
        return name

    update: dict[str, Any] = {"candidates": None, "validation": None}
    if cell.preference is not None:
        update["preference"] = f"{_name(cell)}-margins.jsonl.gz"
        margins = read_records(run / cell.preference, PairMargin)
        _write_lines(folder / update["preference"], [_short_margin(pair) for pair in margins])
    update["predictions"] = copied(f"{_name(cell)}.jsonl.gz", read_records(run / cell.predictions, Prediction), DROPPED)
    if cell.candidates is not None and cell.tau is not None:
        ranked = rescale_predictions(list(read_records(run / cell.candidates, Prediction)), cell.tau)
        update["candidates"] = copied(f"{_name(cell)}-sampled.jsonl.gz", ranked, DROPPED - {"mean_logprob"})
    return cell.model_copy(update=update)


def _short_margin(pair: PairMargin) -> str:
    """The line of a margin with six significant digits: a small one must not become a tie."""
    whole = float(f"{pair.whole:.6g}")
    reasoning = None if pair.reasoning is None else float(f"{pair.reasoning:.6g}")
    return pair.model_copy(update={"whole": whole, "reasoning": reasoning}).model_dump_json()


# ---- the page --------------------------------------------------------------------------------------------------------


def write() -> None:
    """Measure the summary; fill the blocks of both pages and draw the figures."""
    main, three, four, reasoned = (
        _measured(*part)
        for part in (("answer_first", MAIN), ("answer_first", (3,)), ("answer_first", (4,)), ("reasoning", MAIN))
    )
    sampled = _measured("reasoning", (0,))  # and with as few forced answers as comparisons need
    terms, world = (_measured("world", MAIN, {"none", *of}) for of in (("catto", "bce"), ("outcome", "replay")))
    reached = {
        "goals": goals(*main, ("dpo+outcome", f"dpo+outcome{TUNED}", PAIRS)),
        "seed 4 goals": goals(*four, (PAIRS,)),
        "reasoning goals": goals(*reasoned, GOALS),
        "world goals": goals(*world, GOALS),
    }
    titles = {"seed 4 goals": "{}, seed 4", "reasoning goals": "{} with reasoning"}
    blocks = {name: goal_list(found) for name, found in reached.items()}
    blocks["reached"] = goal_matrix([(titles.get(name, "{}"), found) for name, found in reached.items()])
    controlled = controls(*reasoned, REASONED)
    blocks |= {
        "claims": claims(main[0]),
        "scores briefly": briefly(main[0], place="SNLI".__eq__),
        "scores": scores(main[0], place="SNLI".__eq__),
        "other scores": scores(main[0], place="SNLI".__ne__),
        "seeds": seeds(main[0]),
        "costs": costs(_summary()),
        "ablation": ablation(*main),
        "margins": margins(_summary()),
        "seed 3 scores": scores(three[0]),
        "seed 3 ablation": ablation(*three),
        "seed 4 scores": scores(four[0], None),
        "reasoning briefly": briefly(reasoned[0], None),
        "reasoning scores": scores(reasoned[0], None),
        "reasoning controls briefly": control_matrix(controlled),
        "reasoning controls": control_list(controlled),
        "reasoning costs": costs(_summary("reasoning")),
        "reasoning seeds": seeds(reasoned[0], None),
        "reasoning seed 0 scores": scores(sampled[0], None),
        "selection": selection(sampled[0]),
        "world terms": scores(terms[0], None),
        "world": scores(world[0], None),
        "world briefly": briefly(world[0], None, methods=BRIEFLY),
        "world controls": control_list(controls(*world, CONTROLS)),
        "world parts": control_list(controls(*world, WORLD_PARTS, ("",))),
        "world costs": costs(_summary("world")),
    }
    objective_numbers, _ = _measured(OBJECTIVES, MAIN)
    blocks["objectives"] = objectives(objective_numbers)
    blocks["objective seeds"] = objective_seeds(objective_numbers)
    blocks["optima"] = optima(objective_numbers)
    blocks["findings"] = findings(objective_numbers)
    texts = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    for name, lines in blocks.items():
        [page] = [page for page, text in texts.items() if f"<!-- begin {name} -->\n" in text] or [PAGES[1]]
        before, begin, rest = texts[page].partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{DOCS / page}: expected a block {name}")
        texts[page] = "".join([before, begin, *(f"{line}\n" for line in lines), end, after])
    for page, text in texts.items():
        with replace_file(DOCS / page) as file:
            file.write(text)
    numbers, answers = main
    figure = partial(reliability_figure, list(_panels("snli", answers, numbers)))
    write_figure(figure, DOCS / "images" / "smollm2-snli.svg")


def _measured(
    study: str, seeds: Collection[int], terms: Collection[str] = tuple(WEIGHTS)
) -> tuple[Numbers, list[CellAnswers]]:
    """Measure those cells of a study that have one of the seeds and, of the calibration terms, one of these."""
    results = _summary(study)
    cells = [cell for cell in results.cells if METHODS[strip_scaling(_parts(cell.method)[0])].calibration in terms]
    part = results.model_copy(update={"cells": tuple(cell for cell in cells if cell.seed in seeds)})
    answers, _ = read_experiment(part, SUMMARY / study)
    return measure_results(part, SUMMARY / study, answers), answers


def _title(name: str) -> str:
    """The method in words; of a variant of the ablation, with the options that make it one."""
    start, *options = _parts(name)
    words = [OPTIONS[option].format(value) for option, _, value in (part.partition("-") for part in options)]
    return ", ".join([method_title(start), *words])


def _parts(name: str) -> list[str]:
    """The method of the recipe, then the options that make a variant of it."""
    return re.split("-(?=" + "|".join(OPTIONS) + ")", name)


def _ablated(group: GroupNumbers) -> bool:
    """Whether a method is a row of the ablation alone: a variant that was run with one seed."""
    start, *options = _parts(group.method)
    compared = group.method.endswith(TUNED) or strip_scaling(start) == "dpo+outcome-pairs" or len(group.seeds) > 1
    return bool(options) and not compared


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def _groups(numbers: Numbers, variants: bool | None = False) -> Iterator[tuple[str, list[GroupNumbers]]]:
    """The methods of each pair of training set and task, in distribution first. variants: the ablation's; None: all."""
    places: dict[tuple[object, ...], list[GroupNumbers]] = {}
    for group in sorted(
        numbers.groups, key=lambda group: (_parts(group.method)[1:], method_sort_key(_parts(group.method)[0]))
    ):
        if variants is not None and _ablated(group) != variants:
            continue
        places.setdefault((group.setting, task_order(group.task), group.trained_on), []).append(group)
    for _, groups in sorted(places.items(), key=lambda place: place[0]):
        yield setting_title(groups[0]), groups


def scores(
    numbers: Numbers, variants: bool | None = False, place: Callable[[str], bool] = lambda title: True
) -> Iterator[str]:
    """Methods on tasks: means over seeds, intervals over questions, marks against DPO.

    variants: as above. place: which pairs of training set and task, by title.
    """
    heads = ["method", "accuracy", "confidence", "ECE", "by chance", "debiased ECE", "Brier", "AUROC", "forced, %"]
    for title, groups in _groups(numbers, variants):
        if place(title):
            yield from _scored(title, groups, heads, [[_title(group.method), *_scores(group)] for group in groups])


def briefly(
    numbers: Numbers,
    variants: bool | None = False,
    place: Callable[[str], bool] = lambda title: True,
    methods: Collection[str] = (),
) -> Iterator[str]:
    """A line for each method, with ECE and Brier score unscaled and after both scalings. methods: all if empty."""
    heads = ["method", "accuracy", "confidence", "ECE", "by chance", "`+ts`", "`+tl`", "Brier", "`+ts`", "`+tl`"]
    heads += ["AUROC", "forced, %"]
    for title, every in _groups(numbers, variants):
        known = {group.method: group for group in every}
        groups = [group for group in every if strip_scaling(_parts(group.method)[0]) == _parts(group.method)[0]]
        groups = [group for group in groups if place(title) and (not methods or group.method in methods)]
        groups.sort(
            key=lambda group: (_short(group.method).partition(", ")[2], method_sort_key(_parts(group.method)[0]))
        )
        rows = []
        for group in groups:
            texts = _scores(group, intervals=False)
            scaled = [known.get(_scaled(group.method, suffix)) for suffix in SCALINGS]
            others = [["-"] * len(texts) if one is None else _scores(one, intervals=False) for one in scaled]
            errors, briers = ([texts[place], *(one[place] for one in others)] for place in (2, 5))
            rows.append([_short(group.method), *texts[:2], errors[0], texts[3], *errors[1:], *briers, *texts[6:]])
        yield from _scored(title, groups, heads, rows) if groups else ()


def _scored(title: str, groups: Sequence[GroupNumbers], heads: Sequence[str], rows: list[list[str]]) -> Iterator[str]:
    """A table of groups under its title; rows that lack seeds of the first say so."""
    for row, group in zip(rows, groups, strict=True):
        row[0] += "" if group.seeds == groups[0].seeds else f" ({_listed(group.seeds)} alone)"
    yield f"**{title}**, {groups[0].n} test questions, {_listed(groups[0].seeds)}:"
    yield ""
    heads = [*heads, *["true error"] * ("true_error" in groups[0].others)]
    if any(group.number(name) for group in groups for name in PREFERENCE):
        heads += ["held-out pairs ordered, %", "by their reasoning, %"]
        for row, group in zip(rows, groups, strict=True):
            row += [_preference(group, name) for name in PREFERENCE]
    yield from _table(heads, rows)


def _preference(group: GroupNumbers, name: str) -> str:
    """The share of held-out pairs that a method orders as preferred, with its interval; a dash where it has none."""
    spread = group.number(name)
    if spread is None:
        return "-"
    interval = group.intervals[name]
    return f"{100 * spread.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _short(name: str) -> str:
    """The method in words, without options that the page states once."""
    kept = [part for part in _parts(name.removesuffix(TUNED)) if part not in ("score-log", "weight-1")]
    return _title("-".join(kept)) + (", tuned" if name.endswith(TUNED) else "")


def _listed(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _scores(group: GroupNumbers, *, intervals: bool = True) -> list[str]:
    def text(name: str, decimals: int = 1) -> str:
        scale = 100 if METRICS[name].percent else 1
        interval, mark = group.intervals[name], group.versus[name].mark(name) if name in group.versus else ""
        value = f"{scale * group.metrics[name].mean:.{decimals}f}"
        if intervals and interval.reason is None:
            value += f" [{scale * interval.low:.{decimals}f}, {scale * interval.high:.{decimals}f}]"
        return f"{value} {mark}".rstrip()

    return [
        text("accuracy"),
        f"{100 * group.metrics['mean_confidence'].mean:.1f}",
        text("ece"),
        f"{100 * group.null.low:.1f} to {100 * group.null.high:.1f}",
        f"{100 * group.metrics['debiased_ece'].mean:.1f}",
        text("brier", 3),
        text("auroc"),
        f"{100 * group.others['fallback_rate'].mean:.0f}",
        *(f"{100 * group.others[name].mean:.1f}" for name in ("true_error",) if name in group.others),
    ]


def selection(numbers: Numbers) -> Iterator[str]:
    """Accuracy of Confidence@k, the votes, and the bounds, for every method that was sampled."""
    rows, rules = [], list[str]()
    for group in numbers.groups:
        for k, accuracies in group.selection.items():
            if k > 2:
                rules = list(accuracies)
                values = [*(accuracies[rule].mean for rule in rules), group.metrics["accuracy"].mean]
                texts = [f"{100 * value:.1f}" for value in values]
                others = {name: spread.mean for name, spread in group.others.items()}
                texts += [f"{100 * others['auroc_within']:.1f}", f"{100 * others['sample_fallback_rate']:.1f}"]
                rows.append([_title(group.method), f"{k}", *texts, f"{others['sampling_temperature']:.2g}"])
    heads = ["one greedy answer", "AUROC within questions", "forced, % of samples", "sampled at"]
    yield from _table(["method", "k", *rules, *heads], rows)


def ablation(numbers: Numbers, answers: Sequence[CellAnswers]) -> Iterator[str]:
    """What options of a term change, beside the terms as they are on the same task and seed."""
    plain = ["dpo", "dpo+catto", *(_scaled(f"dpo+outcome{of}", way) for of in ("", TUNED) for way in ("", *SCALINGS))]
    for title, groups in _groups(numbers, variants=True):
        place, rows = groups[0], []
        beside = [group for _, others in _groups(numbers) for group in others if group.method in plain]
        beside = [group for group in beside if (group.task, group.trained_on) == (place.task, place.trained_on)]
        [dpo] = [one for one in answers if beside[0].holds(one.cell) and one.cell.seed == place.seeds[0]]
        for group in [*beside, *groups]:
            [mine] = [one for one in answers if group.holds(one.cell) and one.cell.seed == place.seeds[0]]
            changed = sum(a != b for a, b in zip(mine.label, dpo.label, strict=True))
            moved = 100 * float(np.abs(mine.confidence - dpo.confidence).mean())
            values = [100 * metric(mine.confidence, mine.correct) for metric in (accuracy, mean_confidence, ece, auroc)]
            texts = [f"{value:.1f}" for value in values]
            texts.insert(3, f"{brier(mine.confidence, mine.correct):.3f}")
            rows.append([_title(group.method), *texts, f"{changed} of {len(mine)}", f"{moved:.1f}"])
        heads = [
            "method",
            "accuracy",
            "confidence",
            "ECE",
            "Brier",
            "AUROC",
            "other answers than DPO",
            "mean change of confidence",
        ]
        yield f"**{title}**, seed {place.seeds[0]}:"
        yield ""
        yield from _table(heads, rows)


def margins(results: Results) -> Iterator[str]:
    """Validation confidence, accuracy and ECE of every training that was measured on its way, by reward margin."""
    rows = []
    for cell in sorted(
        results.cells, key=lambda cell: (_parts(cell.method)[1:], method_sort_key(_parts(cell.method)[0]))
    ):
        history = cell.training.history if cell.training is not None and cell.setting == "in" else ()
        points = [point for point in history if "reward_margin" in point]
        for point in points if len(points) > 1 else ():
            name = _title(cell.method) if point is points[0] else ""
            values = [100 * point[f"val_{metric}"] for metric in ("confidence", "accuracy", "ece")]
            rows.append(
                [
                    name,
                    f"{point['step']:.0f}",
                    f"{point['reward_margin']:.2f}",
                    *(f"{value:.1f}" for value in values),
                    f"{point['val_nll']:.2f}",
                ]
            )
    yield from _table(
        ["method", "step", "reward margin", "confidence", "accuracy", "ECE", "NLL of the gold label"], rows
    )


def objectives(numbers: Numbers) -> Iterator[str]:
    """Every objective in the embedded world: calibration, and how much of DPO's held-out preference is kept."""
    heads = [
        "method",
        "accuracy",
        "ECE",
        "by chance",
        "Brier",
        "AUROC",
        "true error",
        "held-out pairs",
        "kept",
        "forced, %",
    ]
    for _, groups in _groups(numbers, variants=None):
        [dpo] = [group for group in groups if group.method == "dpo"]
        rows = []
        for group in groups:
            name = _short(group.method)
            if group.seeds != dpo.seeds:
                name += f" ({_listed(group.seeds)} alone)"
            cells = [cell for cell in numbers.cells if dpo.holds(cell) and cell.seed in group.seeds]
            of_dpo = fmean(cell.metrics["preference_accuracy"].value for cell in cells)
            rows.append([name, *_objective_row(group, of_dpo)])
        yield from _table(heads, rows)


def _objective_row(group: GroupNumbers, of_dpo: float) -> list[str]:
    """The numbers of a method. of_dpo: the share of held-out pairs that DPO orders with the same seeds."""
    means = {name: spread.mean for name, spread in {**group.metrics, **group.others}.items()}
    preference = group.number("preference_accuracy")
    ordered = "-"
    kept = "-"
    if preference is not None:
        interval = group.intervals["preference_accuracy"]
        ordered = f"{100 * preference.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
        if of_dpo > 0.5:
            kept = f"{(preference.mean - 0.5) / (of_dpo - 0.5):.2f}"
    return [
        f"{100 * means['accuracy']:.1f}",
        f"{100 * means['ece']:.1f}",
        f"{100 * group.null.low:.1f} to {100 * group.null.high:.1f}",
        f"{means['brier']:.3f}",
        f"{100 * means['auroc']:.1f}",
        f"{100 * means['true_error']:.1f}",
        ordered,
        kept,
        f"{100 * means['fallback_rate']:.1f}",
    ]


def findings(numbers: Numbers) -> Iterator[str]:
    """The README's table: a few methods in the embedded world, means over seeds."""
    known = {group.method: group for group in numbers.groups}
    rows = []
    for method in FINDINGS:
        group = known[method]
        # Scaling leaves the model alone, so a scaled row has the preferences of its model.
        trained = known[_scaled_from(method)]
        preference = trained.metrics["preference_accuracy"].mean
        ece = f"{100 * group.metrics['ece'].mean:.1f} ({100 * group.null.low:.1f} to {100 * group.null.high:.1f})"
        row = [
            _short(method),
            f"{100 * group.metrics['accuracy'].mean:.1f}",
            ece,
            f"{100 * group.others['true_error'].mean:.1f}",
            f"{100 * preference:.1f}",
        ]
        rows.append(row)
    yield from _table(["method", "accuracy", "ECE (by chance)", "true error", "pairs ordered"], rows)
    yield "*A small world where the true probabilities are known:"
    yield f"{known['dpo'].n:,} test questions per seed, means over {_listed(known['dpo'].seeds)}.*"


def claims(numbers: Numbers) -> Iterator[str]:
    """The table of the results' page: a few methods on SNLI, means over seeds."""
    known = {group.method: group for group in numbers.groups if setting_title(group) == "SNLI"}
    rows = []
    for method in CLAIMS:
        accuracy_text, confidence, ece_text, chance, _, _, auroc_text, *_ = _scores(known[method], intervals=False)
        rows.append([_short(method), accuracy_text, confidence, ece_text, chance, auroc_text])
    yield from _table(["method", "accuracy", "confidence", "ECE", "by chance", "AUROC"], rows)


def _scaled_from(method: str) -> str:
    """The name of the model that a scaled row rescales."""
    start, *options = _parts(method)
    return "-".join([strip_scaling(start), *options])


def optima(numbers: Numbers) -> Iterator[str]:
    """What each objective optimises, where its optimum is, and what was measured."""
    heads = [
        "objective",
        "optimises",
        "best label probability",
        "true error",
        "held-out pairs, %",
        "by their reasoning, %",
    ]
    for _, groups in _groups(numbers, variants=None):
        known = {group.method.replace("-score-log", ""): group for group in groups}
        rows = []
        for name, (optimised, optimum) in OPTIMA.items():
            group = known.get(name)
            if group is None:
                continue
            texts = [f"{100 * group.others['true_error'].mean:.1f}"]
            for part in PREFERENCE:
                preference = group.number(part)
                texts.append("-" if preference is None else f"{100 * preference.mean:.1f}")
            rows.append([_short(group.method), optimised, optimum, *texts])
        yield from _table(heads, rows)


def objective_seeds(numbers: Numbers) -> Iterator[str]:
    """ECE, true error and held-out preference accuracy of every seed."""
    for _, groups in _groups(numbers, variants=None):
        columns = sorted({seed for group in groups for seed in group.seeds})
        rows = []
        for group in groups:
            cells = {cell.seed: cell for cell in numbers.cells if group.holds(cell)}
            texts = []
            for seed in columns:
                cell = cells.get(seed)
                texts.append("-" if cell is None else _seed_text(cell))
            rows.append([_short(group.method), *texts])
        heads = [f"seed {seed}" for seed in columns]
        yield from _table(["ECE / true error / held-out pairs", *heads], rows)


def _seed_text(cell: Any) -> str:
    values = [cell.metrics["ece"].value, cell.others["true_error"]]
    if "preference_accuracy" in cell.metrics:
        values.append(cell.metrics["preference_accuracy"].value)
    return " / ".join(f"{100 * value:.1f}" for value in values)


def seeds(numbers: Numbers, variants: bool | None = False) -> Iterator[str]:
    """Accuracy and ECE of every seed. variants: as above."""
    for title, groups in _groups(numbers, variants):
        rows, columns = [], sorted({seed for group in groups for seed in group.seeds})
        for group in groups:
            known = {cell.seed: cell.metrics for cell in numbers.cells if group.holds(cell)}
            values = {
                seed: [100 * metrics[name].value for name in ("accuracy", "ece")] for seed, metrics in known.items()
            }
            texts = ["{:.1f} / {:.1f}".format(*values[seed]) if seed in values else "-" for seed in columns]
            rows.append([_title(group.method), *texts])
        yield from _table([f"{title}: accuracy / ECE", *(f"seed {seed}" for seed in columns)], rows)


def costs(results: Results) -> Iterator[str]:
    """Steps, tokens, minutes and reward accuracy of every trained method, means over tasks and seeds."""
    trained: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if cell.training is not None and cell.setting == "in":
            trained.setdefault(cell.method, []).append(cell)
    rows = []
    for name in sorted(trained, key=method_sort_key):
        runs = [cell.training for cell in trained[name] if cell.training is not None]
        steps, tokens, seconds = (
            fmean(getattr(run, field) for run in runs) for field in ("steps", "tokens", "seconds")
        )
        ordered = [run.reward_accuracy for run in runs if run.reward_accuracy is not None]
        minutes = f"{seconds / 60:.{0 if seconds > 600 else 1}f}"
        texts = [_title(name), f"{len(runs)}", f"{steps:.0f}", f"{tokens:,.0f}", minutes]
        rows.append([*texts, f"{100 * fmean(ordered):.0f}" if ordered else "-"])
    yield from _table(["method", "models", "steps", "tokens", "minutes", "pairs ordered as preferred, %"], rows)


# ---- goals -----------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """One comparison of a variant of `outcome` with DPO, both unscaled ("") or scaled in the same way."""

    task: str
    method: str
    scaling: str
    metric: str
    values: str
    difference: str
    reached: str


def goals(numbers: Numbers, answers: Sequence[CellAnswers], names: Sequence[str]) -> list[Goal]:
    """What `outcome` was meant to reach, task by task and variant by variant, p-values corrected for all of them.

    ‡: so many answers of one of the two were forced that its numbers describe the fallback too.
    """
    found, wanted, families = list[Goal](), list[tuple[str, str, str, str, str]](), list[tuple[str, Versus]]()
    places = [(title, {group.method: group for group in groups}) for title, groups in _groups(numbers, variants=None)]
    for (title, known), name in product(places, names):
        if not {"dpo", name} <= known.keys():
            continue
        both = known[name], known["dpo"]
        cells = [cell for cell in numbers.cells if cell.seed in _common(*both)]
        ours, plain = (
            100 * fmean(cell.metrics["debiased_ece"].value for cell in cells if group.holds(cell)) for group in both
        )
        mark = " ‡" if any(group.sources.forced for group in both) else ""
        reached = ("yes" if ours <= plain / 4 else "no") + mark
        found.append(Goal(title, _title(name), "", "debiased_ece", f"{ours:.1f}, {plain:.1f}", "", reached))
        for suffix, metric in product(SCALINGS, ("brier", "auroc", "accuracy", "ece")):
            pair = known[_scaled(name, suffix)], known[f"dpo{suffix}"]
            wanted.append((title, _title(name), suffix, metric, mark))
            families.append((metric, _compare(*pair, metric, answers, numbers)))
    for (title, method, suffix, metric, mark), tested in zip(wanted, _tested(families), strict=True):
        values, difference, reached = tested
        if metric == "accuracy":
            reached = "no, lower" if reached == "no, worse" else "yes"
        found.append(Goal(title, method, suffix, metric, values, difference, reached + mark))
    return sorted(found, key=lambda goal: goal[:2])


def goal_list(goals: Sequence[Goal]) -> Iterator[str]:
    """A line for each goal."""
    rows = []
    for goal in goals:
        wanted = "debiased ECE at most a quarter of DPO's"
        if goal.scaling:
            scaled = "scaled among labels" if goal.scaling == AMONG_LABELS else "scaled"
            how = "not lower" if goal.metric == "accuracy" else "better"
            wanted = f"{METRICS[goal.metric].title}, both {scaled}: {how} than DPO's"
        rows.append([goal.task, goal.method, wanted, goal.values, goal.difference, goal.reached])
    yield from _table(["task", "method", "goal", "values", "difference", "reached"], rows)


def goal_matrix(tables: Sequence[tuple[str, Sequence[Goal]]]) -> Iterator[str]:
    """Two lines for each task and variant, one per scaling. tables: how to title the tasks of a list, and the list."""
    rows = []
    for title, found in tables:
        for (task, method), group in groupby(found, lambda goal: goal[:2]):
            cells = {(goal.scaling, goal.metric): goal for goal in group}
            for suffix, scaled in zip(SCALINGS, ("whole vocabulary", "labels"), strict=True):
                first = suffix == SCALINGS[0]
                row = [title.format(task), method] if first else ["", ""]
                wanted = [("", "debiased_ece"), *((suffix, metric) for metric in ("brier", "auroc", "ece", "accuracy"))]
                texts = [f"{cells[key].reached.replace('better, ', '')}: {cells[key].values}" for key in wanted]
                rows.append([*row, texts[0] if first else "", scaled, *texts[1:]])
    heads = ["task", "method", "debiased ECE at most a quarter", "both scaled over", "lower Brier score"]
    yield from _table([*heads, "higher AUROC", "lower ECE", "accuracy not lower"], rows)


def _scaled(name: str, suffix: str) -> str:
    """The scaling of a variant: the suffix belongs to the method, before its options."""
    start, *options = _parts(name)
    return "-".join([start + suffix, *options])


class Control(NamedTuple):
    """One comparison of two methods, both unscaled ("") or scaled in the same way."""

    pair: tuple[str, str]
    scaling: str
    about: str  # the seeds, and ‡ as above
    metric: str
    values: str
    difference: str
    better: str


def controls(
    numbers: Numbers,
    answers: Sequence[CellAnswers],
    pairs: Sequence[tuple[str, str]],
    suffixes: Sequence[str] = ("", AMONG_LABELS),
) -> list[Control]:
    """Compare `outcome` with its controls, by default unscaled and among the labels."""
    known = {group.method: group for group in numbers.groups}
    places, families = list[tuple[tuple[str, str], str, str, str]](), list[tuple[str, Versus]]()
    for pair, suffix in product(pairs, suffixes):
        both = [known[_scaled(name, suffix)] for name in pair]
        about = f"({_listed(_common(*both))})" + (" ‡" if any(group.sources.forced for group in both) else "")
        for metric in ("ece", "brier", "auroc", "accuracy"):
            places.append((pair, suffix, about, metric))
            families.append((metric, _compare(*both, metric, answers, numbers)))
    return [Control(*place, *tested) for place, tested in zip(places, _tested(families), strict=True)]


def control_list(found: Sequence[Control]) -> Iterator[str]:
    """A line for each comparison."""
    rows = []
    for one in found:
        names = "; ".join(_title(_scaled(name, one.scaling)) for name in one.pair)
        rows.append([f"{names} {one.about}", METRICS[one.metric].title, one.values, one.difference, one.better])
    yield from _table(["compared", "metric", "values", "difference", "the first is better"], rows)


def control_matrix(found: Sequence[Control]) -> Iterator[str]:
    """A line for each pair and scaling."""
    rows = []
    for (pair, scaling, about), group in groupby(found, lambda one: one[:3]):
        titles = [f"{_short(pair[0])} {about}", _short(pair[1])] if not scaling else ["", ""]
        texts = [f"{one.better.replace('better, ', '')}: {one.values}" for one in group]
        rows.append([*titles, "labels" if scaling else "-", *texts])
    heads = ["method", "compared with", "scaled over", "lower ECE", "lower Brier score", "higher AUROC"]
    yield from _table([*heads, "higher accuracy"], rows)


def _tested(families: Sequence[tuple[str, Versus]]) -> Iterator[tuple[str, str, str]]:
    """Values, difference and verdict of each comparison, corrected for all of them. families: metric, comparison."""
    corrected = holm([found.p_value for _, found in families])
    for (metric, found), p in zip(families, corrected, strict=True):
        scale, decimals = (100, 1) if METRICS[metric].percent else (1, 3)
        better = found.difference < 0 if METRICS[metric].better == "lower" else found.difference > 0
        shown = Versus(**{**vars(found), "p_corrected": p}).mark(metric)
        reached = {"*": "yes", "†": "no, worse"}.get(shown, "better, within noise" if better else "no")
        values = f"{scale * found.a:.{decimals}f}, {scale * found.b:.{decimals}f}"
        interval = f"{scale * found.low:+.{decimals}f} to {scale * found.high:+.{decimals}f}, p = {p:.3f}"
        yield values, interval, reached


def _common(*groups: GroupNumbers) -> tuple[int, ...]:
    """The seeds that all groups have."""
    return tuple(sorted(set.intersection(*(set(group.seeds) for group in groups))))


def _compare(
    ours: GroupNumbers, plain: GroupNumbers, metric: str, answers: Sequence[CellAnswers], numbers: Numbers
) -> Versus:
    """Compare two groups over the seeds that both have."""
    seeds = _common(ours, plain)
    runs = [
        [run.by_question for run in answers if group.holds(run.cell) and run.cell.seed in seeds]
        for group in (ours, plain)
    ]
    settings = MeasureSettings((metric,), numbers.bins, numbers.resamples)
    (found,) = compare_runs(runs[0], runs[1], settings, swaps=5 * numbers.resamples).values()
    return Versus(**vars(found))


@dataclass(frozen=True)
class SeedsPanel(Panel):
    """A diagram of several seeds together, with the mean of their ECEs: the number that the tables show."""

    mean_ece: float = math.nan

    def note(self) -> str:
        """Return the lines under the title."""
        pooled = super().note().splitlines()
        lines = [f"ECE {100 * self.mean_ece:.1f}" if line.startswith("ECE ") else line for line in pooled]
        return "\n".join(lines)


def _panels(task: str, answers: Sequence[CellAnswers], numbers: Numbers) -> Iterator[Panel]:
    """The reliability of methods on a task, the answers of those seeds together that all of them have."""
    here = [run for run in answers if (run.cell.task, run.cell.setting) == (task, "in")]
    runs = {name: {run.cell.seed: run for run in here if run.cell.method == name} for name in PANELS}
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
    for name, by_seed in runs.items():
        mine = [by_seed[seed] for seed in seeds]
        confidence, correct = (
            np.concatenate([getattr(run, field) for run in mine]) for field in ("confidence", "correct")
        )
        sources = ParseCounts.total_of(ParseCounts.of(run.read_as or ()) for run in mine)
        title = _title(name.removesuffix(TUNED)) + (", tuned" if name.endswith(TUNED) else "")
        title += f", {task_title(task)}" if name == PANELS[0] else ""
        errors = [ece(run.confidence, run.correct, bins=numbers.bins) for run in mine]
        yield SeedsPanel(title, reliability(confidence, correct, numbers.bins), None, sources, mean_ece=fmean(errors))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["collect", *runs] if runs:
            for run in runs:
                print(f"{run}: {len(collect(Path(run)).cells)} cells in its study's summary")
        case ["write"]:
            write()
        case _:
            raise SystemExit(__doc__)
