"""The study's summary: collect it from finished runs, and write docs/results.md and its figures from it.

    python docs/study/study.py collect RUN ...    # adds the cells of finished runs to docs/study/summary
    python docs/study/study.py write              # `make results`

The summary holds one small file of predictions for each method, task and seed, without texts, and `results.json`, which
lists them with how each model was trained. A page has blocks between `<!-- begin NAME -->` and `<!-- end NAME -->`;
everything in them is written here, everything around them by hand.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from catto.files import read_json, read_records, replacing, replacing_bytes
from catto.measure import MeasureSettings, Sources, compare_runs
from catto.methods import AMONG_LABELS, KNOBS, METHODS, SCALINGS, Budget, order, unscaled
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS, Versus, holm
from catto.metrics.errors import accuracy, brier, ece, mean_confidence
from catto.metrics.ranking import auroc
from catto.records import Prediction
from catto.report.build import read
from catto.report.drawing import Panel, reliability_figure, write_figure
from catto.report.measuring import Answered, measure_results
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results
from catto.report.tables import method_title, setting_title, task_order, task_title

HERE = Path(__file__).parent
SUMMARY, PAGE, IMAGES = HERE / "summary", HERE.parent / "results.md", HERE.parent / "images"
TUNED = "-calibration_weight-5-held_out-outcome_score-log"  # the variant of outcome that was run with every seed
PANELS = ("sft", "dpo", "dpo+catto", "dpo+outcome", f"dpo+outcome{TUNED}")
HELD_OUT, EPOCHS = "held_out", "epochs"  # an option of the stream and one of the budget, beside those of the term
OPTIONS = (*KNOBS, HELD_OUT, EPOCHS)
OTHER = 3  # the seed of the remaining methods and of most of the ablation, with tables of its own
DIGITS = 12  # of a stored confidence: after DPO many differ from 1 by less than 1e-6
DROPPED = {"confidence_raw", "logsumexp", "label_logprobs", "mean_logprob", "self_certainty", "lowest_group"}


# ---- collecting ------------------------------------------------------------------------------------------------------


def collect(runs: Sequence[Path]) -> Results:
    """Add the cells of every report in the runs to the summary; a cell that is there already is replaced."""
    known = {_name(cell): cell for cell in _summary().cells} if (SUMMARY / "results.json").exists() else {}
    found: list[Results] = []
    for run in runs:
        reports = sorted(run.glob("stages/*/results.json"), key=lambda path: path.stat().st_mtime)
        if not reports:
            raise SystemExit(f"{run}: holds no finished report")
        for path in reports:
            found.append(Results.model_validate(read_json(path)))
            for cell in found[-1].cells:
                method = _variant(cell.method, found[-1].recipe, cell.budget)
                budget = None if cell.budget is None else "matched"  # one table: the paper's budget is a variant
                named = cell.model_copy(update={"method": method, "budget": budget})
                known[_name(named)] = _copied(named, run)
    newest = found[-1]
    cells = sorted(known.values(), key=lambda cell: (cell.trained_on, cell.task, cell.seed, order(cell.method)))
    # The rest of a recipe holds paths of the machine that it ran on.
    recipe = {"evaluation": newest.recipe["evaluation"]}
    summary = newest.model_copy(update={"recipe": recipe, "cells": tuple(cells), "questions": {}})
    with replacing(SUMMARY / "results.json") as file:
        file.write(summary.model_dump_json(indent=1) + "\n")
    return summary


def _summary() -> Results:
    return Results.model_validate(read_json(SUMMARY / "results.json"))


def _variant(name: str, recipe: Mapping[str, Any], budget: Budget | None = None) -> str:
    """The method with the options that are not the recipe's defaults: `dpo+catto-calibration_weight-10`."""
    calibration, outcome = METHODS[unscaled(name)].calibration, recipe["outcome"]
    settings = recipe["preference"]["trl"] | ({"outcome_score": "log"} if outcome["score"] == "log" else {})
    knobs = {knob: value for knob, value in settings.items() if knob in KNOBS and calibration in KNOBS[knob]}
    options = [f"{knob}-{value}".lower() for knob, value in knobs.items()]
    if outcome.get(HELD_OUT) and calibration in ("outcome", "replay"):
        options.append(HELD_OUT)
    if budget == "paper":
        options.append(f"{EPOCHS}-{METHODS[unscaled(name)].effort[budget].epochs}")
    return "-".join([name, *sorted(options)])


def _name(cell: Cell) -> str:
    return "-".join(filter(None, (cell.stem, str(cell.seed), cell.method, cell.budget)))


def _copied(cell: Cell, run: Path) -> Cell:
    """Copy the predictions of a cell without their texts; return the cell that names the copy."""
    path, lines = SUMMARY / f"{_name(cell)}.jsonl.gz", []
    for prediction in read_records(run / cell.predictions, Prediction):
        short = {"text": "", "confidence": round(prediction.confidence, DIGITS), "model": cell.method}
        lines.append(prediction.model_copy(update=short).model_dump_json(exclude=DROPPED) + "\n")
    with replacing_bytes(path) as file:
        file.write(gzip.compress("".join(lines).encode(), mtime=0))  # no date: equal predictions give equal bytes
    return cell.model_copy(update={"predictions": path.name, "candidates": None, "validation": None})


# ---- the page --------------------------------------------------------------------------------------------------------


def write() -> None:
    """Measure the summary; fill the blocks of docs/results.md and draw the figures."""
    results, parts = _summary(), {}
    for name, cells in {
        "main": [cell for cell in results.cells if cell.seed != OTHER],
        "other": [cell for cell in results.cells if cell.seed == OTHER],
    }.items():
        part = results.model_copy(update={"cells": tuple(cells)})
        answers, _ = read(part, SUMMARY)
        parts[name] = measure_results(part, SUMMARY, answers), answers
    numbers, answers = parts["main"]
    blocks = {
        "scores": scores(numbers),
        "goals": goals(numbers, answers),
        "seeds": seeds(numbers),
        "costs": costs(results),
        "ablation": ablation(numbers, answers),
        "other scores": scores(parts["other"][0]),
        "other ablation": ablation(*parts["other"]),
        "margins": margins(results),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in blocks.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{PAGE}: expected a block {name}")
        text = "".join([before, begin, *(f"{line}\n" for line in lines), end, after])
    with replacing(PAGE) as file:
        file.write(text)
    for task in dict.fromkeys(cell.task for cell in results.cells if cell.setting == "in"):
        write_figure(partial(reliability_figure, list(_panels(task, answers, numbers))), IMAGES / f"smollm2-{task}.svg")


def _title(name: str) -> str:
    """The method in words; of a variant of the ablation, with the options that make it one."""
    start, *options = _parts(name)
    words = [option.replace("_", " ").replace("-", " ") for option in options]
    return ", ".join([method_title(start), *words])


def _parts(name: str) -> list[str]:
    """The method of the recipe, then the options that make a variant of it."""
    return re.split("-(?=" + "|".join(OPTIONS) + ")", name)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def _groups(numbers: Numbers, variants: bool | None = False) -> Iterator[tuple[str, list[GroupNumbers]]]:
    """The methods of each pair of training set and task, in distribution first. variants: the ablation's; None: all."""
    places: dict[tuple[object, ...], list[GroupNumbers]] = {}
    for group in sorted(numbers.groups, key=lambda group: (_parts(group.method)[1:], order(_parts(group.method)[0]))):
        if variants is not None and (len(_parts(group.method)) > 1) != variants:
            continue
        places.setdefault((group.setting, task_order(group.task), group.trained_on), []).append(group)
    for _, groups in sorted(places.items(), key=lambda place: place[0]):
        yield setting_title(groups[0]), groups


def scores(numbers: Numbers) -> Iterator[str]:
    """Every method on every task: means over seeds, intervals over questions, marks against DPO."""
    for title, groups in _groups(numbers):
        yield f"**{title}**, {groups[0].n} test questions, {_listed(groups[0])}:"
        yield ""
        heads = ["method", "accuracy", "confidence", "ECE", "by chance", "debiased ECE", "Brier", "AUROC", "forced, %"]
        rows = [_scores(group) for group in groups]
        for row, group in zip(rows, groups, strict=True):
            row[0] += "" if group.seeds == groups[0].seeds else f" ({_listed(group)} alone)"
        yield from _table(heads, rows)


def _listed(group: GroupNumbers) -> str:
    return f"seed{'s' if len(group.seeds) > 1 else ''} {', '.join(map(str, group.seeds))}"


def _scores(group: GroupNumbers) -> list[str]:
    def text(name: str, decimals: int = 1) -> str:
        scale = 100 if METRICS[name].percent else 1
        interval, mark = group.intervals[name], group.versus[name].mark(name) if name in group.versus else ""
        value = f"{scale * group.metrics[name].mean:.{decimals}f}"
        if interval.reason is None:
            value += f" [{scale * interval.low:.{decimals}f}, {scale * interval.high:.{decimals}f}]"
        return f"{value} {mark}".rstrip()

    return [
        _title(group.method),
        text("accuracy"),
        f"{100 * group.metrics['mean_confidence'].mean:.1f}",
        text("ece"),
        f"{100 * group.null.low:.1f} to {100 * group.null.high:.1f}",
        f"{100 * group.metrics['debiased_ece'].mean:.1f}",
        text("brier", 3),
        text("auroc"),
        f"{100 * group.others['fallback_rate'].mean:.0f}",
    ]


def ablation(numbers: Numbers, answers: Sequence[Answered]) -> Iterator[str]:
    """What options of a term change, beside the terms as they are on the same task and seed."""
    plain = ("dpo", "dpo+catto", "dpo+outcome", "dpo+outcome+ts", "dpo+outcome+tl")
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
    for cell in sorted(results.cells, key=lambda cell: (_parts(cell.method)[1:], order(_parts(cell.method)[0]))):
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


def seeds(numbers: Numbers) -> Iterator[str]:
    """Accuracy and ECE of every seed; of variants, those that have several."""
    for title, groups in _groups(numbers, variants=None):
        rows, columns = [], sorted({seed for group in groups for seed in group.seeds})
        for group in groups:
            if len(_parts(group.method)) > 1 and len(group.seeds) == 1:
                continue
            known = {cell.seed: cell.metrics for cell in numbers.cells if group.holds(cell)}
            values = {
                seed: [100 * metrics[name].value for name in ("accuracy", "ece")] for seed, metrics in known.items()
            }
            texts = ["{:.1f} / {:.1f}".format(*values[seed]) if seed in values else "-" for seed in columns]
            rows.append([_title(group.method), *texts])
        yield from _table([f"{title}: accuracy / ECE", *(f"seed {seed}" for seed in columns)], rows)


def costs(results: Results) -> Iterator[str]:
    """Steps, tokens and minutes of every trained method, means over tasks and seeds."""
    trained: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if cell.training is not None and cell.setting == "in":
            trained.setdefault(cell.method, []).append(cell)
    rows = []
    for name in sorted(trained, key=order):
        runs = [cell.training for cell in trained[name] if cell.training is not None]
        steps, tokens, seconds = (
            fmean(getattr(run, field) for run in runs) for field in ("steps", "tokens", "seconds")
        )
        rows.append([_title(name), f"{len(runs)}", f"{steps:.0f}", f"{tokens:,.0f}", f"{seconds / 60:.0f}"])
    yield from _table(["method", "models", "steps", "tokens", "minutes"], rows)


# ---- goals -----------------------------------------------------------------------------------------------------------


def goals(numbers: Numbers, answers: Sequence[Answered]) -> Iterator[str]:
    """What `outcome` was meant to reach, task by task: yes or no, and the numbers."""
    rows, families = [], []
    places = [(title, {group.method: group for group in groups}) for title, groups in _groups(numbers, variants=None)]
    for (title, known), options in product(places, ("", TUNED)):
        if not {"dpo", f"dpo+outcome{options}"} <= known.keys():
            continue
        title += ", tuned" if options else ""
        seeds = known[f"dpo+outcome{options}"].seeds
        plain, ours = (
            100
            * fmean(
                cell.metrics["debiased_ece"].value for cell in numbers.cells if group.holds(cell) and cell.seed in seeds
            )
            for group in (known["dpo"], known[f"dpo+outcome{options}"])
        )
        reached = "yes" if ours <= plain / 4 else "no"
        rows.append(
            [title, "debiased ECE of DPO + outcome at most a quarter of DPO's", f"{ours:.1f}, {plain:.1f}", "", reached]
        )
        for suffix in SCALINGS:
            pair = known[f"dpo+outcome{suffix}{options}"], known[f"dpo{suffix}"]
            for metric in ("brier", "auroc", "accuracy", "ece"):
                families.append((title, suffix, metric, _compare(*pair, metric, answers, numbers)))
    corrected = holm([family[-1].p_value for family in families])
    for (title, suffix, metric, found), p in zip(families, corrected, strict=True):
        scale, decimals = (100, 1) if METRICS[metric].percent else (1, 3)
        better = found.difference < 0 if METRICS[metric].better == "lower" else found.difference > 0
        shown = Versus(**{**vars(found), "p_corrected": p}).mark(metric)
        reached = {"*": "yes", "†": "no, worse"}.get(shown, "better, within noise" if better else "no")
        if metric == "accuracy":
            reached = "no, lower" if shown == "†" else "yes"
        values = f"{scale * found.a:.{decimals}f}, {scale * found.b:.{decimals}f}"
        interval = f"{scale * found.low:+.{decimals}f} to {scale * found.high:+.{decimals}f}, p = {p:.3f}"
        scaled = "scaled among labels" if suffix == AMONG_LABELS else "scaled"
        how = "not lower" if metric == "accuracy" else "better"
        wanted = f"{METRICS[metric].title}, both {scaled}: DPO + outcome {how} than DPO"
        rows.append([title, wanted, values, interval, reached])
    yield from _table(["task", "goal", "values", "difference", "reached"], sorted(rows, key=lambda row: row[0]))


def _compare(
    ours: GroupNumbers, plain: GroupNumbers, metric: str, answers: Sequence[Answered], numbers: Numbers
) -> Versus:
    """Compare outcome with DPO, over the seeds of outcome."""
    runs = [
        [run.by_question for run in answers if group.holds(run.cell) and run.cell.seed in ours.seeds]
        for group in (ours, plain)
    ]
    settings = MeasureSettings((metric,), numbers.bins, numbers.resamples)
    (found,) = compare_runs(runs[0], runs[1], settings, swaps=20 * numbers.resamples).values()
    return Versus(**vars(found))


def _panels(task: str, answers: Sequence[Answered], numbers: Numbers) -> Iterator[Panel]:
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
        sources = Sources.total_of(Sources.of(run.read_as or ()) for run in mine)
        title = _title(name.removesuffix(TUNED)) + (", tuned" if name.endswith(TUNED) else "")
        title += f", {task_title(task)}" if name == PANELS[0] else ""
        yield Panel(title, reliability(confidence, correct, numbers.bins), None, sources)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["collect", *runs] if runs:
            print(f"{len(collect([Path(run) for run in runs]).cells)} cells in {SUMMARY}")
        case ["write"]:
            write()
        case _:
            raise SystemExit(__doc__)
