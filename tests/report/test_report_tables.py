"""Tables: the paper's numbers, ours beside them, and the four forms in which they are written."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_world import HOSTILE, SMALL, TINY, measured
from rich.console import Console

from catto.answer_columns import ParseCounts
from catto.cli.console import print_table
from catto.measure import HEADLINE
from catto.metrics.catalogue import METRICS, Versus, holm
from catto.metrics.comparisons import ALPHA
from catto.metrics.intervals import Interval, NullBand, drop_invalid_interval
from catto.metrics.selection import Candidates, measure_rules
from catto.metrics.statistics import SeedSummary
from catto.report import render
from catto.report.figures import choose_looks
from catto.report.headline import write_headline
from catto.report.measuring import DELTA, RISK, correct_group_p_values, find_training, has_papers_budget
from catto.report.numbers import GroupNumbers, Numbers, Training, Verdict
from catto.report.render import Entry, Table, csv_text, render_latex, render_markdown, render_terminal
from catto.report.tables import (
    build_group_tables,
    build_summary,
    build_tables,
    build_training_tables,
    describe_budget,
    list_sizes,
    method_order,
    method_title,
    read_papers_numbers,
    read_specs,
)

Tables = dict[str, Table]


def printed(*place: str) -> str:
    """The paper's number at table, method, quantity and task; empty where it prints none."""
    return read_papers_numbers().get(place, "")


@pytest.fixture(scope="module")
def tables() -> Tables:
    world = measured(SMALL)
    return {table.name: table for table in build_tables(world.numbers, world.results)}


def test_the_papers_numbers_as_typed_by_hand() -> None:
    assert printed("in", "dpo+catto", "ece", "snli") == "19.13"
    assert printed("in", "dpo+catto", "accuracy", "snli") == "78.52"
    assert printed("in", "dpo", "ece", "reward_bench_2") == "19.41"
    assert printed("in", "sft+ls", "ece", "commonsense_qa") == "42.20"
    assert printed("out", "sft", "accuracy", "reward_bench_2") == "10.69"
    assert printed("out", "dpo+bce", "ece", "tldr") == "32.46"
    assert printed("std-in", "dpo+catto", "ece", "anli") == "6.73"
    assert printed("std-out", "dpo", "ece", "commonsense_qa") == "18.24"
    assert printed("k", "dpo+catto", "8", "snli") == "82.80"
    assert printed("k", "rcft", "4", "tldr") == "64.24"
    assert printed("std-k", "dpo", "4", "snli") == "4.58"
    assert printed("rates", "dpo+bce", "0", "anli") == "5e-06"
    assert printed("rates", "dpo", "3", "tldr") == "5e-07"
    assert printed("training", "rcft", "minutes", "commonsense_qa") == "2909"
    assert printed("training", "dpo+catto", "minutes", "reward_bench_2") == "135"


def test_the_paper_prints_no_deviation_of_bce_at_k_and_nothing_of_our_own_methods() -> None:
    assert printed("std-k", "dpo+bce", "4", "snli") == ""
    assert printed("in", "dpo+outcome", "ece", "snli") == ""
    assert printed("in", "dpo", "ece", "witnesses") == ""
    assert printed("k", "dpo", "16", "snli") == ""
    assert printed("rates", "dpo", "5", "snli") == ""


def test_every_row_of_the_paper_is_complete() -> None:
    """Seven methods of two scores, six at two k (five with a deviation), three at five seeds, three with minutes."""
    rows = list(csv.DictReader((Path(render.__file__).parent / "paper.csv").read_text().splitlines()))
    tables = ("in", "out", "std-in", "std-out", "k", "std-k", "rates", "training")
    assert Counter(row["table"] for row in rows) == dict(zip(tables, (14, 14, 14, 14, 12, 10, 15, 3), strict=True))
    assert len({(row["table"], row["method"], row["quantity"]) for row in rows}) == len(rows)
    for row in rows:
        numbers = list(row.values())[3:]
        assert len(numbers) == 5
        form = {"rates": r"5e-0[67]", "training": r"\d+"}.get(row["table"], r"\d+\.\d\d")
        assert all(re.fullmatch(form, number) for number in numbers)


def test_the_texts_of_the_tables_state_what_is_computed() -> None:
    by_kind = {spec.kind: spec for spec in read_specs().values()}
    assert f"p < {ALPHA} in a swap test" in by_kind["in"].notes["mark"]
    assert (
        f"error rate is at most {100 * RISK:g} % with a confidence of {100 * (1 - DELTA):g} %"
        in by_kind["risk"].caption
    )
    assert by_kind["risk"].title.endswith(f"{100 * RISK:g} %")
    rules = [column.rule for column in by_kind["rules"].columns]
    assert rules == [one.rule for one in measure_rules(Candidates(("q",), *(np.ones((4, 1, 1)))), 1)]
    shown = [column for column in by_kind["metrics"].columns if column.metric in METRICS]
    assert [column.metric for column in shown] == list(HEADLINE)
    for column in shown:
        metric = METRICS[column.metric]
        assert (column.name, column.scale == 100) == (metric.title, metric.percent)


def test_the_tables_of_the_paper_are_there_for_both_budgets(tables: Tables) -> None:
    for name in ("in-distribution", "out-of-distribution", "confidence-at-k"):
        for kind in ("", "deviation-"):
            assert {f"{kind}{name}-paper", f"{kind}{name}-matched"} <= set(tables)
    assert {"training", "learning-rates-snli", "world-paper", "selection-snli-paper"} <= set(tables)


def test_a_printed_value_is_the_groups_mean_in_per_cent(tables: Tables) -> None:
    for table in (tables["in-distribution-paper"], tables["out-of-distribution-matched"]):
        for line in table.lines:
            for column, entry in zip(table.columns, line.entries, strict=True):
                group = entry.group
                assert (group.method, group.task, group.budget) == (line.method, column.task, table.budget)
                mean = group.metrics[column.metric].mean
                assert entry.text == (f"{mean:.4f}" if column.metric == "brier" else f"{100 * mean:.2f}")


def test_confidence_at_k_prints_the_selection_rule(tables: Tables) -> None:
    entry = tables["confidence-at-k-paper"].lines[0].entries[1]
    wanted = entry.group.selection[8]["most confident"].mean
    assert entry.value == pytest.approx(100 * wanted)
    rules = tables["selection-snli-paper"]
    oracle = [c.name for c in rules.columns].index("Oracle")
    assert all(line.entries[oracle].value >= line.entries[0].value for line in rules.lines)


def entry_of(table: Table, method: str, task: str, metric: str) -> Entry:
    line = next(line for line in table.lines if line.method == method)
    place = [(column.task, column.metric) for column in table.columns].index((task, metric))
    return line.entries[place]


def test_the_papers_number_stands_beside_models_of_its_own_budget_only(tables: Tables) -> None:
    assert entry_of(tables["in-distribution-paper"], "dpo", "snli", "ece").paper == "26.74"
    assert entry_of(tables["in-distribution-matched"], "dpo", "snli", "ece").paper == ""
    assert entry_of(tables["in-distribution-matched"], "dpo+catto", "snli", "ece").paper == "19.13"
    assert entry_of(tables["out-of-distribution-paper"], "rcft", "snli", "accuracy").paper == "36.39"
    assert "paper: 26.74" in render_markdown(tables["in-distribution-paper"])


def versus(difference: float, low: float, high: float, p_corrected: float) -> Versus:
    return Versus(0.5, 0.5 - difference, difference, low, high, 0.95, 0.001, p_corrected=p_corrected)


@pytest.mark.parametrize(
    ("difference", "p_value", "metric", "mark"),
    [(-0.1, 0.01, "ece", "*"), (0.1, 0.01, "ece", "†"), (0.1, 0.01, "accuracy", "*"), (-0.1, 0.06, "ece", "")],
)
def test_marks_say_better_or_worse_only_where_significant(
    difference: float, p_value: float, metric: str, mark: str
) -> None:
    low, high = sorted((difference / 2, 2 * difference))
    assert versus(difference, low, high, p_value).mark(metric) == mark
    assert versus(difference, -0.9, 0.9, p_value).mark(metric) == ""
    assert versus(-difference, low, high, p_value).mark(metric) == ""
    assert versus(difference, math.nan, math.nan, p_value).mark(metric) == ""
    assert versus(difference, low, high, math.nan).mark(metric) == ""


def test_a_difference_below_the_smallest_of_interest_gets_no_mark() -> None:
    """0.08 points, every confidence moved one way, p as small as can be: nobody's difference. 0.5 points is one."""
    assert versus(-0.0008, -0.0012, -0.0004, 0.004).mark("ece") == ""
    assert versus(-0.0049, -0.006, -0.004, 0.004).mark("ece") == ""
    assert versus(-0.005, -0.006, -0.004, 0.004).mark("ece") == "*"
    assert versus(-0.004, -0.006, -0.002, 0.004).mark("brier") == ""


def test_bold_is_only_where_the_best_was_tested(tables: Tables) -> None:
    """A first value by chance is no finding: bold needs the verdict of the first table."""
    others = [table for name, table in tables.items() if name != "summary"]
    assert not [entry for table in others for line in table.lines for entry in line.entries if entry.best]


@pytest.mark.parametrize("methods", [("sft",), SMALL.methods], ids=len)
def test_a_caption_explains_what_its_table_has_and_nothing_else(methods: tuple[str, ...]) -> None:
    world, by_kind = measured(replace(SMALL, methods=methods)), {spec.kind: spec for spec in read_specs().values()}
    explained = Counter()
    for table in build_tables(world.numbers, world.results):
        for name, note in by_kind[table.kind].notes.items():
            there = any(getattr(entry, name) for line in table.lines for entry in line.entries)
            assert (note.replace("{baseline}", "DPO") in table.caption) == there, (table.name, name)
            explained[name] += there
        assert ("DPO" in table.caption) <= (len(methods) > 1), table.name
    assert explained["interval"]
    assert explained["null"]
    assert bool(explained["versus"]) == (len(methods) > 1)
    assert {"best", "mark", "forced", "paper"} <= explained.keys()


def test_a_table_of_runs_without_a_budget_names_none() -> None:
    world = measured(replace(TINY, methods=("sft",)))
    titles = [table.title for table in build_tables(world.numbers, world.results)]
    assert "In distribution" in titles
    assert not [title for title in titles if "budget" in title]


def test_training_time_is_total_and_per_row_and_epoch(tables: Tables) -> None:
    """The made-up DPO at the matched budget: 500 pairs, 2 epochs, 0.11 s each: 110 s, 1.83 minutes, 110 ms, 310,000."""
    line = next(line for line in tables["training"].lines if line.title == "DPO (matched budget)")
    assert [entry.text for entry in line.entries[:3]] == ["1.83", "110.00", "0.31"]


def test_the_kept_step_stands_beside_all_steps(tables: Tables) -> None:
    """500 pairs, 2 epochs, batches of 4: 250 steps, of which the made-up CATTO keeps the 125th."""
    kept = {line.title: line.entries[3].text for line in tables["training"].lines}
    assert tables["training"].columns[3].name == "Kept step"
    assert kept["DPO (matched budget)"] == "250 of 250"
    assert kept["DPO + CATTO"] == "125 of 250"


def test_a_budget_is_told_as_it_was_trained() -> None:
    results = measured(SMALL).results
    kept = "500 pairs, epochs: 2, kept after 1"
    assert describe_budget(results, "paper") == f"DPO: 1,400 pairs, epochs: 6; DPO + CATTO: {kept}"
    assert describe_budget(results, "matched") == f"DPO: 500 pairs, epochs: 2; DPO + CATTO: {kept}"


def test_markdown_has_one_width_and_no_raw_markup(tables: Tables) -> None:
    for table in tables.values():
        spoiled = replace(table, title=HOSTILE, lines=tuple(replace(line, title=HOSTILE) for line in table.lines))
        lines = [line for line in render_markdown(spoiled).splitlines() if line.startswith("|")]
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert cells == {len(table.columns) + 2}, table.name
        assert not re.search(r"(?<!\\)<script", render_markdown(spoiled))


def test_latex_braces_balance_and_every_row_has_every_column(tables: Tables) -> None:
    for table in tables.values():
        spoiled = replace(table, lines=tuple(replace(line, title=HOSTILE) for line in table.lines))
        text = render_latex(spoiled)
        bare = re.sub(r"\\[\\{}&%$#_]", "", text)
        assert bare.count("{") == bare.count("}")
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
        assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
        rows = [row for row in text.splitlines() if row.endswith(r" \\") and "multicolumn" not in row]
        assert len(rows) == len(table.lines) + 1
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.columns)}
        assert text.isascii()


LATEX = {
    r"a\b": r"a\textbackslash{}b",
    r"\input{x}": r"\textbackslash{}input\{x\}",
    "50% & $x_1$ #1": r"50\% \& \$x\_1\$ \#1",
    "~^<>|": r"\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}",
    "[2ex] x": "{}[2ex] x",
    "* x": "{}* x",
}


@pytest.mark.parametrize("title", LATEX)
def test_latex_prints_every_sign_and_obeys_none(tables: Tables, title: str) -> None:
    table = tables["in-distribution-matched"]
    spoiled = replace(table, lines=(replace(table.lines[0], title=title),))
    (row,) = [row for row in render_latex(spoiled).splitlines() if row.startswith(f"{LATEX[title]} & ")]
    assert row.endswith(r" \\")


FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "+", "--1")


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_of_a_csv_file_is_a_formula(tables: Tables, text: str) -> None:
    table = tables["in-distribution-matched"]
    spoiled = replace(
        table,
        columns=tuple(replace(column, top="", name=text, task=text) for column in table.columns),
        lines=tuple(replace(line, block=text, method=text) for line in table.lines),
    )
    for row in csv.DictReader(io.StringIO(csv_text(spoiled), newline="")):
        assert [row[name] for name in ("block", "method", "task", "column")] == [f"'{text.strip()}"] * 4


def test_a_negative_number_of_a_csv_file_stays_a_number(tables: Tables) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(tables["in-distribution-matched"]))))
    below = [row["difference_to_dpo"] for row in rows if row["difference_to_dpo"].startswith("-")]
    assert below
    assert all(float(value) < 0 for value in below)


def test_csv_holds_every_number_with_its_interval_and_p_value(tables: Tables) -> None:
    table = tables["in-distribution-matched"]
    rows = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert len(rows) == len(table.lines) * len(table.columns)
    row = next(row for row in rows if (row["method"], row["task"], row["metric"]) == ("dpo+catto", "snli", "ece"))
    entry = entry_of(table, "dpo+catto", "snli", "ece")
    assert float(row["value"]) == pytest.approx(entry.value, rel=1e-5)
    assert float(row["null_high"]) == pytest.approx(entry.null[1], rel=1e-5)
    assert float(row["p_value"]) == pytest.approx(entry.versus.p_value, rel=1e-5)
    assert row["paper"] == "19.13"


def test_the_terminal_shows_value_interval_null_band_and_the_papers_number(tables: Tables) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_terminal(tables["in-distribution-paper"]))
    text = console.export_text()
    entry = entry_of(tables["in-distribution-paper"], "dpo", "snli", "ece")
    assert entry.text in text
    assert f"[{entry.interval[0]:.2f}, {entry.interval[1]:.2f}]" in text
    assert f"null {entry.null[0]:.2f} to {entry.null[1]:.2f}" in text
    assert "paper: 26.74" in text


INSIDE = {"null": NullBand(0.5, 0.0, 1.0, 0.95), "gap": Interval(0.0, -0.1, 0.1, 0.95)}
OUTSIDE = {"null": NullBand(0.0, 0.0, 0.0, 0.95), "gap": Interval(0.0, -0.1, 0.1, 0.95)}
OVER = {"null": NullBand(0.0, 0.0, 0.0, 0.95), "gap": Interval(0.9, 0.8, 1.0, 0.95)}


def test_the_headline_names_exactly_the_methods_within_chance_on_all_tasks() -> None:
    places = [(name, task) for name in SMALL.methods for task in SMALL.tasks]
    none = write_headline(regrouped(*((*place, OUTSIDE) for place in places)))
    assert none.lead == "SFT and 4 others are measurably miscalibrated at the matched budget."
    sure = write_headline(regrouped(*((*place, OVER) for place in places)))
    assert sure.lead == "SFT and 4 others are overconfident by 90 points at the matched budget."
    one = [(*place, INSIDE if place[0] == "rcft" else OUTSIDE) for place in places]
    told = "RCFT shows no miscalibration in 30 questions per task at the matched budget"
    assert write_headline(regrouped(*one)).lead == f"{told}; SFT and 3 others are measurably miscalibrated."
    some = write_headline(regrouped(*one, ("dpo", "snli", INSIDE), ("sft", "snli", INSIDE))).lead
    rest = "SFT and DPO are miscalibrated on some tasks; SFT + temperature scaling and DPO + CATTO are"
    assert some == f"{told}; {rest} measurably miscalibrated."


def alone(n: int, stated: float, right: float, gap: tuple[float, float], ece: float, high: float) -> Numbers:
    """One method on one task with these numbers."""
    numbers = measured(replace(TINY, methods=("sft",))).numbers
    (group,) = numbers.groups
    means = {"mean_confidence": stated, "accuracy": right, "ece": ece}
    update = {
        "n": n,
        "metrics": group.metrics | {name: SeedSummary(mean, None, 1) for name, mean in means.items()},
        "gap": Interval(stated - right, *gap, 0.95),
        "null": NullBand(high / 2, 0.02, high, 0.95),
    }
    return numbers.model_copy(update={"groups": (group.model_copy(update=update),)})


ALONE = {
    "SFT is overconfident by 20 points: it states 92 % and is right 72 % of the time (ECE 21; by chance 2 to 5).": (
        400,
        0.92,
        0.72,
        (0.15, 0.25),
        0.21,
        0.05,
    ),
    "SFT is too sure of some answers and not sure enough of others: it states 74 % and is right 72 % of the time "
    "(ECE 21; by chance 2 to 5).": (400, 0.74, 0.72, (0.01, 0.03), 0.21, 0.05),
    "SFT shows no miscalibration in 400 questions: it states 74 % and is right 72 % of the time (ECE 4; by chance 2 "
    "to 5).": (400, 0.74, 0.72, (-0.01, 0.05), 0.04, 0.05),
    # The null band holds the ECE, and the interval of the gap excludes 0.
    "SFT is underconfident by 1 point: it states 71 % and is right 72 % of the time (ECE 4; by chance 2 to 5).": (
        400,
        0.71,
        0.72,
        (-0.02, -0.001),
        0.04,
        0.05,
    ),
    # One question, and answers that are all right, have a gap that no resample moves: an interval of no width.
    "SFT shows no miscalibration in 1 question: it states 90 % and is right 100 % of the time (ECE 10; by chance 2 "
    "to 90).": (1, 0.9, 1.0, (-0.1, -0.1), 0.1, 0.9),
    "SFT shows no miscalibration in 3 questions: it states 90 % and is right 67 % of the time (ECE 24; by chance 2 "
    "to 60).": (3, 0.9, 2 / 3, (0.1, 0.3), 0.24, 0.6),
    "SFT shows no miscalibration in 40 questions: it states 98 % and is right 100 % of the time (ECE 2; by chance 2 "
    "to 9).": (40, 0.98, 1.0, (-0.02, -0.02), 0.02, 0.09),
}


@pytest.mark.parametrize("sentence", ALONE)
def test_one_method_is_told_by_what_it_states_and_how_often_it_is_right(sentence: str) -> None:
    n = ALONE[sentence][0]
    told = write_headline(alone(*ALONE[sentence]))
    assert told.lead == told.answer == sentence
    only = f"SNLI: only {n} question{'s' * (n > 1)}; below 30"
    few = (f"{only}, intervals are too narrow and miscalibration is hard to detect.",)
    assert told.warnings == (few if n < 30 else ())


@pytest.mark.parametrize(("right", "said"), [(1.0, "All answers are right. "), (0.0, "No answer is right. ")])
def test_answers_that_are_all_right_or_all_wrong_are_told_first(right: float, said: str) -> None:
    numbers = measured(replace(TINY, tasks=("snli",))).numbers
    gaps, groups = {"sft": 0.2, "dpo": 0.26}, []
    for group in numbers.groups:
        gap = gaps[group.method] * (1 - 2 * right)
        metrics = group.metrics | {"accuracy": SeedSummary(right, None, 1), "ece": SeedSummary(abs(gap), None, 1)}
        update = {"gap": Interval(gap, gap, gap, 0.95), "null": NullBand(0.02, 0.0, 0.05, 0.95), "metrics": metrics}
        groups.append(group.model_copy(update=update))
    told = write_headline(numbers.model_copy(update={"groups": tuple(groups), "verdict": None}))
    side = "under" if right else "over"
    assert told.answer == f"{said}SFT and DPO are {side}confident by 20 to 26 points at the matched budget."


def test_the_headline_says_who_differs_from_dpo_and_once_where_budgets_agree() -> None:
    numbers = measured(SMALL).numbers
    far, near = versus(-0.1, -0.2, -0.01, 0.001), versus(-0.1, -0.2, -0.01, 0.9)

    def points(*budgets: str) -> tuple[str, ...]:
        groups = [
            g.model_copy(
                update={
                    "versus": {"ece": far if g.method == "rcft" and g.budget in budgets else near, "accuracy": near}
                }
            )
            if g.versus
            else g
            for g in numbers.groups
        ]
        return write_headline(numbers.model_copy(update={"groups": tuple(groups)})).points

    told, same = "against DPO on the same questions", "no significant difference in accuracy"
    lower, nothing = (
        f"{told}: ECE is significantly lower for RCFT; {same}.",
        f"{told}: no significant difference in ECE; {same}.",
    )
    assert points("paper", "matched") == (f"Both budgets, {lower}",)
    assert points("paper") == (f"Paper's budget, {lower}", f"Matched budget, {nothing}")
    near = versus(-0.1, -0.2, -0.01, float("nan"))  # an answer too many was forced: not compared
    far = near
    assert points() == ()
    near = versus(-0.1, -0.2, -0.01, 0.9)
    one = numbers.model_copy(update={"groups": tuple(g.model_copy(update={"budget": None}) for g in numbers.groups)})
    assert write_headline(one).points[0].startswith("Against DPO on the same questions: ")
    other_baseline = one.model_copy(update={"baseline": "sft"})
    assert write_headline(other_baseline).points[0].startswith("Against SFT on the same questions: ")


def test_the_ks_of_a_table_are_the_papers_and_the_largest() -> None:
    (group, *_) = measured(SMALL).numbers.groups
    for measured_at, shown in (((1, 2, 3), [3]), ((1, 2, 4, 8), [4, 8]), ((1, 2, 4, 8, 16), [4, 8, 16]), ((), [])):
        assert list_sizes([group.model_copy(update={"selection": {k: {} for k in measured_at}})]) == shown


def regrouped(*changes: tuple[str, str, dict[str, Any]]) -> Numbers:
    """The numbers with the groups of (method, task) changed."""
    numbers = measured(SMALL).numbers
    groups = list(numbers.groups)
    for method, task, update in changes:
        groups = [changed(g, update) if (g.method, g.task) == (method, task) else g for g in groups]
    return numbers.model_copy(update={"groups": tuple(groups)})


def changed(group: GroupNumbers, update: dict[str, Any]) -> GroupNumbers:
    """The group with some fields changed; of `others`, the given numbers alone."""
    return group.model_copy(update=update | {"others": group.others | update.get("others", {})})


MOSTLY_FORCED = {"sources": ParseCounts(free=9, fallback=51), "others": {"fallback_rate": SeedSummary(0.85, 0.0, 2)}}


def test_a_cell_of_forced_answers_says_so_first_and_wins_nothing() -> None:
    sure = versus(-0.2, -0.3, -0.1, 0.001)
    best = {"metrics": measured(SMALL).numbers.groups[0].metrics | {"ece": SeedSummary(0.0001, 0.0, 2)}}
    changed = regrouped(("rcft", "snli", MOSTLY_FORCED | best | {"versus": {"ece": sure, "accuracy": sure}}))
    table = build_group_tables(changed, "in")[0]
    entry = entry_of(table, "rcft", "snli", "ece")
    assert (entry.forced, entry.mark, entry.best) == ("85 % forced", "", False)
    assert entry_of(table, "rcft", "witnesses", "ece").forced == ""
    assert f"| 85 % forced<br>{entry.text}" in render_markdown(table)
    assert r"\shortstack[r]{{\scriptsize 85 \% forced} \\ " + entry.text in render_latex(table)
    assert "85 % forced" in csv_text(table)


def test_the_headline_names_forced_cells_first_and_does_not_judge_them() -> None:
    """RCFT would be within chance everywhere; its answers on one task were forced, so nothing is said of it."""
    tasks = ("snli", "witnesses")
    methods = ("sft", "sft+ts", "dpo", "dpo+catto")
    base = [(name, task, OUTSIDE) for name in methods for task in tasks] + [("rcft", task, INSIDE) for task in tasks]
    assert write_headline(regrouped(*base)).lead.startswith("RCFT shows no miscalibration")
    told = write_headline(regrouped(*base, ("rcft", "snli", MOSTLY_FORCED)))
    assert any("RCFT on SNLI, paper's budget: 51 of 60 answers had to be forced" in line for line in told.warnings)
    assert "RCFT" not in told.lead
    everything = [(name, task, MOSTLY_FORCED) for name in (*methods, "rcft") for task in tasks]
    assert write_headline(regrouped(*everything)).lead.startswith("No verdict on calibration")
    assert write_headline(measured(SMALL).numbers).warnings == ()


def test_an_ece_outside_its_interval_shows_what_holds_instead() -> None:
    withheld = {
        "intervals": {
            name: drop_invalid_interval(Interval(0.05, 0.06, 0.07, 0.95))
            if name == "ece"
            else Interval(0.5, 0.4, 0.6, 0.95)
            for name in ("accuracy", "ece", "brier", "auroc")
        },
        "gap": Interval(0.012, -0.034, 0.056, 0.95),
    }
    table = build_group_tables(regrouped(("dpo", "snli", withheld)), "in")[0]
    entry = entry_of(table, "dpo", "snli", "ece")
    assert entry.interval is None
    assert entry.null is not None
    debiased = entry.group.metrics["debiased_ece"].mean
    assert entry.notes == (f"debiased {100 * debiased:.2f}", "conf. - acc. +1.20 [-3.40, +5.60]")
    assert entry_of(table, "dpo", "snli", "accuracy").notes == ()
    rows = [row for row in csv.DictReader(io.StringIO(csv_text(table))) if row["notes"]]
    assert [(row["method"], row["low"], row["high"]) for row in rows] == [("dpo", "", "")]


def test_a_difference_stands_with_its_interval_and_corrected_p_value(tables: Tables) -> None:
    entry = entry_of(tables["in-distribution-paper"], "sft", "snli", "accuracy")
    shown = entry.versus
    text = render_markdown(tables["in-distribution-paper"])
    assert f"to DPO {100 * shown.difference:+.2f}, p = {shown.p_corrected:.2g}" in text
    assert f"\\[{100 * shown.low:+.2f}, {100 * shown.high:+.2f}]" in text
    brier = entry_of(tables["in-distribution-paper"], "sft", "snli", "brier").versus
    assert f"to DPO {brier.difference:+.4f}" in text


def test_the_method_that_others_are_compared_with_is_named_everywhere() -> None:
    measured_against_sft = measured(SMALL).numbers.model_copy(update={"baseline": "sft"})
    (table, *_) = build_group_tables(measured_against_sft, "in")
    text = render_markdown(table)
    assert "to SFT: the difference to SFT" in text
    assert "to DPO" not in text


def test_p_values_are_corrected_over_the_comparisons_of_one_table() -> None:
    numbers = measured(SMALL).numbers
    for budget in numbers.budgets:
        for inside in (True, False):
            of_table = [g for g in numbers.groups if g.budget == budget and (g.task == g.trained_on) == inside]
            found = [one for group in of_table for one in group.versus.values()]
            assert len(found) == 4 * sum(group.method != "dpo" for group in of_table)
            assert [one.p_corrected for one in found] == pytest.approx(holm([one.p_value for one in found]))


def test_forced_answers_of_either_side_are_left_out_of_the_correction() -> None:
    groups = regrouped(("rcft", "snli", MOSTLY_FORCED), ("dpo", "witnesses", MOSTLY_FORCED)).groups
    for group in correct_group_p_values(groups):
        judged = group.task == "snli" and group.method != "rcft"
        assert all(math.isnan(one.p_corrected) != judged for one in group.versus.values())


def test_latex_keeps_the_papers_columns_and_the_other_forms_have_brier_and_auroc(tables: Tables) -> None:
    table = tables["in-distribution-paper"]
    assert {column.metric for column in table.columns} == {"accuracy", "ece", "brier", "auroc"}
    assert {column.metric for column in table.in_papers_shape().columns} == {"accuracy", "ece"}
    assert "Brier" in render_markdown(table)
    assert {column.metric for column in tables["confidence-at-k-paper"].in_papers_shape().columns} == {"4", "8"}


def test_confidence_at_k_stands_beside_greedy_vote_auroc_within_and_fallback(tables: Tables) -> None:
    table = tables["confidence-at-k-paper"]
    wanted = {"4", "8", "4 majority vote", "8 majority vote", "accuracy", "auroc_within", "sample_fallback_rate"}
    assert {column.metric for column in table.columns} == wanted | {"sampling_temperature", "tau"}
    entry = entry_of(table, "sft", "snli", "auroc_within")
    group = entry.group
    assert entry.value == pytest.approx(100 * group.others["auroc_within"].mean)
    assert entry.notes == (f"in {group.others['questions_with_both'].mean:g} of 30 questions",)
    assert entry_of(table, "sft", "snli", "accuracy").value == pytest.approx(100 * group.metrics["accuracy"].mean)
    vote = group.selection[4]["majority vote"].mean
    assert entry_of(table, "sft", "snli", "4 majority vote").value == pytest.approx(100 * vote)
    assert entry_of(table, "sft", "snli", "sampling_temperature").text == "1.00"


def test_the_risk_table_says_where_no_threshold_promises_it(tables: Tables) -> None:
    """30 validation answers promise nothing: with no error among m answers, at most 5 % takes m >= 143."""
    columns = [column.name for column in tables["risk-paper"].columns[:4]]
    assert columns == ["Threshold", "Coverage ↑", "Errors", "Bound"]
    for line in tables["risk-paper"].lines:
        assert [entry.text for entry in line.entries[:4]] == ["none", "0.00", "-", "-"]
    assert "| none | 0.00<br>" in render_markdown(tables["risk-paper"])
    shares = {"risk_promised": 0.5, "risk_threshold": 0.72, "risk_coverage": 0.4, "risk_errors": 0.01}
    changed = regrouped(
        ("dpo", "snli", {"others": {name: SeedSummary(value, None, 2) for name, value in shares.items()}})
    )
    entries = [entry_of(build_group_tables(changed, "risk")[0], "dpo", "snli", name) for name in list(shares)[1:]]
    assert [entry.text for entry in entries] == ["0.7200", "40.00", "1.00"]
    assert entries[0].notes == ("in 1 of 2 seeds",)


def test_the_papers_out_of_distribution_numbers_stand_beside_training_on_mmlu_only() -> None:
    for trained_on, wanted in (("mmlu", "17.67"), ("anli", "")):
        numbers = regrouped(("dpo", "snli", {"trained_on": trained_on}))
        assert entry_of(build_group_tables(numbers, "out")[0], "dpo", "snli", "ece").paper == wanted
        deviation = build_group_tables(numbers, "std-out")[0]
        assert entry_of(deviation, "dpo", "snli", "ece").paper == ("10.82" if wanted else "")


def test_the_papers_numbers_need_its_epochs_and_pairs() -> None:
    """DPO: 6 epochs on all pairs. CATTO: 2 epochs on 500 pairs. Of a rescaled model, those of the model below it."""
    six, two = Training(epochs=6, rows=1400), Training(epochs=2, rows=500)
    assert has_papers_budget("dpo", "paper", six)
    assert not has_papers_budget("dpo", "paper", two)
    assert not has_papers_budget("dpo", "matched", six)
    assert has_papers_budget("dpo+catto", None, two)
    assert not has_papers_budget("dpo+catto", None, Training(epochs=2, rows=60))
    assert has_papers_budget("sft+ts", None, Training(epochs=3, rows=100))
    assert not has_papers_budget("sft+ts", None, Training(epochs=1, rows=100))


def test_a_shorter_training_hides_the_papers_score_learning_rate_and_minutes() -> None:
    results = measured(SMALL).results
    short = [
        cell.model_copy(update={"training": cell.training.model_copy(update={"epochs": 1})})
        if cell.method in ("dpo", "sft") and cell.training
        else cell
        for cell in results.cells
    ]
    changed = results.model_copy(update={"cells": tuple(short)})
    rates, *_, time = build_training_tables(changed)
    assert (rates.kind, time.kind) == ("rates", "training")
    assert not any(entry.paper for line in rates.lines if line.method == "dpo" for entry in line.entries)
    assert any(entry.paper for line in rates.lines if line.method == "dpo+catto" for entry in line.entries)
    assert not any(entry.paper for line in time.lines if line.method == "dpo" for entry in line.entries)
    scaled = next(cell for cell in short if cell.method == "sft+ts")
    assert find_training(scaled, "paper", changed).epochs == 1


def test_a_suffix_scales_any_trained_method() -> None:
    name = "dpo+outcome+ts"
    assert method_title(name) == "DPO + outcome + temperature scaling"
    assert sorted(["unknown", name, "dpo+outcome", "sft"], key=method_order) == ["sft", "dpo+outcome", name, "unknown"]
    assert len({*choose_looks([name, "dpo+outcome", "dpo+catto+ts", "dpo+ts", "unknown"]).values()}) == 5
    world = measured(replace(TINY, methods=("dpo", "dpo+outcome", name)))
    tables = build_tables(world.numbers, world.results)
    assert [(line.method, line.block) for line in tables[0].lines] == [
        ("dpo", "DPO"),
        ("dpo+outcome", "DPO"),
        (name, "DPO"),
    ]
    rates = [table for table in build_training_tables(world.results) if table.kind == "rates"]
    assert rates
    assert not [line for table in rates for line in table.lines if line.method == name]


def verdict(metric: str, n: int = 400, **losses: float) -> Verdict:
    """Losses in order, lowest first; a method that is more than 0.05 behind the first is measurably worse."""
    named = {name.replace("_", "+"): loss for name, loss in losses.items()}
    first = next(iter(named.values()))
    behind = {
        name: versus(loss - first, loss - first - 0.01, loss - first + 0.01, 0.001 if loss - first > 0.05 else 0.9)
        for name, loss in named.items()
    }
    behind.pop(next(iter(named)))
    return Verdict(input="", metric=metric, n=n, losses=named, behind=behind)


ANSWERS = {
    "The confidence of DPO + CATTO is closest to the truth: 18 points from the true probability; DPO: 27.": verdict(
        "true_error", dpo_catto=0.178, dpo=0.267
    ),
    "The confidence of RCFT and SFT is closest to the truth, as far as 1,000 questions can tell: 17.8 to 18.0 points "
    "from the true probability; DPO: 26.7.": verdict("true_error", 1000, rcft=0.178, sft=0.18, dpo=0.267),
    "The confidence of RCFT and 3 others is closest to the truth, as far as 400 questions can tell: 18 points from the "
    "true probability.": verdict("true_error", rcft=0.178, sft=0.179, cft=0.18, dpo=0.18, dpo_catto=0.267),
    "400 questions cannot tell the two methods apart: 18 to 22 points from the true probability.": verdict(
        "true_error", dpo=0.18, sft=0.22
    ),
    "The confidence of RCFT best predicts correctness: Brier score 0.18; DPO: 0.25.": verdict(
        "brier", rcft=0.1849, dpo=0.2482
    ),
    "The confidence of RCFT and SFT best predicts correctness, as far as 400 questions can tell: Brier "
    "score 0.18 to 0.21.": verdict("brier", rcft=0.1849, sft=0.21, dpo_bce=0.4),
}


@pytest.mark.parametrize("sentence", ANSWERS)
def test_the_best_are_named_without_breaking_ties(sentence: str) -> None:
    numbers = measured(SMALL).numbers.model_copy(update={"verdict": ANSWERS[sentence]})
    told = write_headline(numbers)
    assert told.best == sentence
    assert told.answer.startswith("After DPO the model states ")


def test_the_first_table_prints_what_n_supports_and_marks_all_that_may_be_best() -> None:
    """30 questions: whole per cents. Two tasks, of which one has no posterior: means, decided by the Brier score."""
    numbers = measured(SMALL).numbers
    numbers = numbers.model_copy(update={"verdict": verdict("brier", 30, rcft=0.18, sft=0.2, dpo=0.3)})
    table = build_summary(numbers)
    assert table.title == "SNLI, Witnesses, N = 30, matched budget"
    assert [column.name for column in table.columns] == [
        "Acc. ↑",
        "ECE ↓",
        "by chance",
        "Brier ↓",
        "Conf. @8 ↑",
        "Forced",
    ]
    assert "Conf. @k" in table.caption
    assert "True error" not in table.caption  # only what the table has is explained
    for line in table.lines:
        groups = [group for group in numbers.first_screen if group.method == line.method]
        assert {group.budget for group in groups} == {"matched"}
        accuracy, _, chance, brier, *_ = line.entries
        assert accuracy.text == f"{50 * sum(group.metrics['accuracy'].mean for group in groups):.0f}"
        assert brier.text == f"{sum(group.metrics['brier'].mean for group in groups) / 2:.2f}"
        assert chance.text == f"in {sum(group.within_null for group in groups)} of 2 tasks"
        assert [entry.best for entry in line.entries] == [False] * 3 + [line.method in ("rcft", "sft"), False, False]


def test_the_first_table_fits_sixty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    numbers = measured(replace(TINY, tasks=("witnesses",), methods=("dpo", "dpo+outcome", "dpo+outcome+ts"))).numbers
    forced = [changed(group, MOSTLY_FORCED) for group in numbers.groups]
    for one in (numbers, numbers.model_copy(update={"groups": tuple(forced)})):
        table = build_summary(one)
        print_table(render_terminal(table))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 60
        assert all(entry.text in text for line in table.lines for entry in line.entries)
        assert "…" not in text


def test_the_first_table_shows_the_true_error_and_the_band_of_chance_of_one_known_world() -> None:
    numbers = measured(replace(SMALL, tasks=("witnesses",), seeds=(0,))).numbers
    table = build_summary(numbers)
    assert table.columns[0].metric == numbers.verdict.metric == "true_error"
    for line in table.lines:
        group = line.entries[0].group
        assert line.entries[0].text == f"{100 * group.others['true_error'].mean:.0f}"
        assert line.entries[3].text == f"{100 * group.null.low:.0f} to {100 * group.null.high:.0f}"
    told = {line.method for line in table.lines if line.entries[0].best}
    leaders = numbers.verdict.leaders
    assert told == (set() if len(leaders) == len(numbers.verdict.losses) else set(leaders))
    tied = numbers.model_copy(update={"verdict": verdict("true_error", rcft=0.18, sft=0.2)})
    assert not [entry for line in build_summary(tied).lines for entry in line.entries if entry.best]
