"""Tables: the paper's numbers, ours beside them, and the four forms in which they are written."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from catto.report import paper
from catto.report.headline import headline
from catto.report.numbers import Versus
from catto.report.render import csv_text, latex, markdown, terminal
from catto.report.tables import Better, Entry, Table, marked
from catto.report.tables_more import all_tables
from catto.report.tables_training import budget_note
from report_world import HOSTILE, SMALL, measured

Tables = dict[str, Table]


@pytest.fixture(scope="module")
def tables() -> Tables:
    world = measured(SMALL)
    return {table.name: table for table in all_tables(world.numbers, world.results)}


def test_the_papers_numbers_as_typed_by_hand() -> None:
    assert paper.score("in", "dpo+catto", "snli", "ece") == 19.13
    assert paper.score("in", "dpo+catto", "snli", "accuracy") == 78.52
    assert paper.score("in", "dpo", "reward_bench_2", "ece") == 19.41
    assert paper.score("in", "sft+ls", "commonsense_qa", "ece") == 42.20
    assert paper.score("out", "sft", "reward_bench_2", "accuracy") == 10.69
    assert paper.score("out", "dpo+bce", "tldr", "ece") == 32.46
    assert paper.score("in", "dpo+catto", "anli", "ece", std=True) == 6.73
    assert paper.score("out", "dpo", "commonsense_qa", "ece", std=True) == 18.24
    assert paper.confidence_at_k("dpo+catto", "snli", 8) == 82.80
    assert paper.confidence_at_k("rcft", "tldr", 4) == 64.24
    assert paper.confidence_at_k("dpo", "snli", 4, std=True) == 4.58
    assert paper.learning_rate("dpo+bce", "anli", 0) == 5e-6
    assert paper.learning_rate("dpo", "tldr", 3) == 5e-7
    assert paper.minutes("rcft", "commonsense_qa") == 2909
    assert paper.minutes("dpo+catto", "reward_bench_2") == 135


def test_the_paper_prints_no_deviation_of_bce_at_k_and_nothing_of_our_own_methods() -> None:
    assert paper.confidence_at_k("dpo+bce", "snli", 4, std=True) is None
    assert paper.score("in", "dpo+outcome", "snli", "ece") is None
    assert paper.score("in", "dpo", "witnesses", "ece") is None
    assert paper.confidence_at_k("dpo", "snli", 16) is None
    assert paper.learning_rate("dpo", "snli", 5) is None


def test_every_row_of_the_paper_is_complete() -> None:
    tables = (paper.IN_DISTRIBUTION, paper.OUT_OF_DISTRIBUTION, paper.IN_DISTRIBUTION_STD)
    tables += (paper.OUT_OF_DISTRIBUTION_STD, paper.CONFIDENCE_AT_K, paper.CONFIDENCE_AT_K_STD)
    assert {len(row) for table in tables for row in table.values()} == {10}
    assert {len(row) for task in paper.LEARNING_RATES.values() for row in task.values()} == {5}


def test_the_tables_of_the_paper_are_there_for_both_budgets(tables: Tables) -> None:
    for name in ("in-distribution", "out-of-distribution", "confidence-at-k"):
        for kind in ("", "deviation-"):
            assert {f"{kind}{name}-paper", f"{kind}{name}-matched"} <= set(tables)
    assert {"training", "learning-rates-snli", "world-paper", "selection-snli-paper"} <= set(tables)


def test_a_printed_value_is_the_groups_mean_in_per_cent(tables: Tables) -> None:
    numbers = measured(SMALL).numbers
    for table in (tables["in-distribution-paper"], tables["out-of-distribution-matched"]):
        for line in table.lines:
            for column, entry in zip(table.columns, line.entries, strict=True):
                group = numbers.groups[entry.group]
                assert (group.method, group.task, group.budget) == (line.method, column.task, table.budget)
                assert entry.text == f"{100 * group.metrics[column.metric].mean:.2f}"


def test_confidence_at_k_prints_the_selection_rule(tables: Tables) -> None:
    numbers = measured(SMALL).numbers
    entry = tables["confidence-at-k-paper"].lines[0].entries[1]
    wanted = numbers.groups[entry.group].selection[8]["most confident"].mean
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
    assert "paper: 26.74" in markdown(tables["in-distribution-paper"])


@pytest.mark.parametrize(
    ("difference", "p_value", "better", "mark"),
    [(-0.1, 0.01, "lower", "*"), (0.1, 0.01, "lower", "†"), (0.1, 0.01, "higher", "*"), (-0.1, 0.06, "lower", "")],
)
def test_marks_say_better_or_worse_only_where_significant(
    difference: float, p_value: float, better: Better, mark: str
) -> None:
    low, high = sorted((difference / 2, 2 * difference))
    assert marked(Versus(difference=difference, low=low, high=high, p_value=p_value), better) == mark
    assert marked(Versus(difference=difference, low=-0.9, high=0.9, p_value=p_value), better) == ""
    assert marked(Versus(difference=-difference, low=low, high=high, p_value=p_value), better) == ""


def test_the_best_of_each_block_is_told_apart(tables: Tables) -> None:
    table = tables["in-distribution-paper"]
    for place, column in enumerate(table.columns):
        for _, lines in table.blocks():
            values = [line.entries[place] for line in lines]
            best = (max if column.better == "higher" else min)(float(entry.text) for entry in values)
            assert [entry.best for entry in values] == [float(entry.text) == best for entry in values]


def test_training_time_is_total_and_per_row_and_epoch(tables: Tables) -> None:
    """The made-up DPO at the matched budget: 500 pairs, 2 epochs, 0.11 s each: 110 s, 1.83 minutes, 110 ms, 310,000."""
    line = next(line for line in tables["training"].lines if line.title == "DPO (matched budget)")
    assert [entry.text for entry in line.entries[:3]] == ["1.83", "110.00", "0.31"]


def test_a_budget_is_told_as_it_was_trained() -> None:
    results = measured(SMALL).results
    assert budget_note(results, "paper") == "DPO: 1,400 pairs, epochs: 6; DPO + CATTO: 500 pairs, epochs: 2"
    assert budget_note(results, "matched") == "DPO, DPO + CATTO: 500 pairs, epochs: 2"


def test_markdown_has_one_width_and_no_raw_markup(tables: Tables) -> None:
    for table in tables.values():
        spoiled = replace(table, title=HOSTILE, lines=tuple(replace(line, title=HOSTILE) for line in table.lines))
        lines = [line for line in markdown(spoiled).splitlines() if line.startswith("|")]
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert cells == {len(table.columns) + 2}, table.name
        assert not re.search(r"(?<!\\)<script", markdown(spoiled))


def test_latex_braces_balance_and_every_row_has_every_column(tables: Tables) -> None:
    for table in tables.values():
        spoiled = replace(table, lines=tuple(replace(line, title=HOSTILE) for line in table.lines))
        text = latex(spoiled)
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
    (row,) = [row for row in latex(spoiled).splitlines() if row.startswith(f"{LATEX[title]} & ")]
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
    console.print(terminal(tables["in-distribution-paper"]))
    text = console.export_text()
    entry = entry_of(tables["in-distribution-paper"], "dpo", "snli", "ece")
    assert entry.text in text
    assert f"[{entry.interval[0]:.2f}, {entry.interval[1]:.2f}]" in text
    assert f"null {entry.null[0]:.2f} to {entry.null[1]:.2f}" in text
    assert "paper: 26.74" in text


def test_the_headline_names_exactly_the_methods_within_chance_on_all_tasks() -> None:
    numbers = measured(SMALL).numbers
    inside = [g.model_copy(update={"null": g.null.model_copy(update={"high": 1.0})}) for g in numbers.groups]
    outside = [g.model_copy(update={"null": g.null.model_copy(update={"high": 0.0})}) for g in numbers.groups]
    none = headline(numbers.model_copy(update={"groups": tuple(outside)}))
    assert none.lead.startswith("No method states")
    assert "all 5 are measurably miscalibrated" in none.lead
    mixed = [i if i.method == "rcft" else o for i, o in zip(inside, outside, strict=True)]
    one = headline(numbers.model_copy(update={"groups": tuple(mixed)}))
    assert one.lead.startswith("RCFT states confidences")
    assert "the other 4 are measurably miscalibrated" in one.lead


def test_the_headline_says_who_differs_from_dpo_and_once_where_budgets_agree() -> None:
    numbers = measured(SMALL).numbers
    far, near = (Versus(difference=-0.1, low=-0.2, high=-0.01, p_value=p) for p in (0.001, 0.9))

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
        return headline(numbers.model_copy(update={"groups": tuple(groups)})).points

    told, same = "against DPO on the same questions", "no significant difference in accuracy"
    lower, nothing = (
        f"{told}: ECE is significantly lower for RCFT; {same}.",
        f"{told}: no significant difference in ECE; {same}.",
    )
    assert points("paper", "matched") == (f"Both budgets, {lower}",)
    assert points("paper") == (f"Paper's budget, {lower}", f"Matched budget, {nothing}")
