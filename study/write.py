"""Write the tables and the figure of the pages from the stored studies.

    python -m study.write    # `make results`

This module writes the blocks of a page, which lie between `<!-- begin NAME -->` and `<!-- end NAME -->`. The rest of
the page is written by hand. For every study, a page can have the blocks `STUDY briefly`, `STUDY scores`, `STUDY seeds`
and `STUDY costs`, for example `<!-- begin smollm2-reasoned scores -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

from catto.io.atomic import write_text

from . import ablation, claims, objectives, tables
from .figures import draw_reliability
from .load import ALL_TERMS, MeasuredStudy, measure_study
from .names import TUNED
from .store import list_studies, read_summary

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/results.md", "docs/results-in-full.md", "docs/method.md")
FIGURE = "docs/images/smollm2-snli.svg"

# The seeds of the main comparison. Seeds 3 and 4 have the remaining methods and most of the ablation.
MAIN_SEEDS = (0, 1, 2)
# Variants of `outcome` with the log score, and their controls: on its own stream, on pairs, with the sft loss, with
# more rows per pair, likelihood in place of the score (replay), without DPO.
LOG_SCORE = "dpo+outcome-score-log-weight-1"
ON_PAIRS = "dpo+outcome-pairs-score-log-weight-1"
SFT_LOSS = "dpo+outcome-score-log-sft_loss-weight-1"
FOUR_ROWS = "dpo+outcome-rows-4-score-log-weight-1"
FOUR_ROWS_HELD_OUT = "dpo+outcome-held_out-rows-4-score-log-weight-1"
REPLAY = "dpo+replay-weight-1"
FOUR_ROWS_REPLAY = "dpo+replay-rows-4-weight-1"
ONLY_SCORE = "sft+outcome-score-log-weight-1"
# The variants whose goals each study checks, and the pairs of variants that it compares.
SNLI_GOALS = ("dpo+outcome", f"dpo+outcome{TUNED}", ON_PAIRS)
LOG_SCORE_GOALS = (LOG_SCORE, SFT_LOSS, FOUR_ROWS_HELD_OUT, ON_PAIRS)
REASONING_CONTROLS = ((LOG_SCORE, REPLAY), (LOG_SCORE, ON_PAIRS), (SFT_LOSS, "dpo-sft_loss"), (SFT_LOSS, LOG_SCORE))
WORLD_CONTROLS = ((LOG_SCORE, REPLAY), (FOUR_ROWS, FOUR_ROWS_REPLAY))
WORLD_PARTS = ((LOG_SCORE, ONLY_SCORE), (LOG_SCORE, ON_PAIRS))
WORLD_METHODS = ("sft", ONLY_SCORE, "dpo", LOG_SCORE, ON_PAIRS, FOUR_ROWS, FOUR_ROWS_REPLAY)

# Makes the lines of a block.
Block = Callable[[], Iterable[str]]


# ---- the parts of the studies; each is measured only once


@cache
def measure_part(study: str, seeds: tuple[int, ...] | None, terms: tuple[str, ...] = ALL_TERMS) -> MeasuredStudy:
    """Measure the cells of a study with the given seeds and calibration terms, as `measure_study` does."""
    return measure_study(study, seeds, terms)


def measure_snli() -> MeasuredStudy:
    """Measure SmolLM2 without reasoning."""
    return measure_part("answer_first", MAIN_SEEDS)


def measure_reasoning() -> MeasuredStudy:
    """Measure SmolLM2 with one sentence of reasoning."""
    return measure_part("reasoning", MAIN_SEEDS)


def measure_world() -> MeasuredStudy:
    """Measure `outcome` and its controls in the embedded world."""
    return measure_part("world", MAIN_SEEDS, ("none", "outcome", "replay"))


def measure_objectives() -> MeasuredStudy:
    """Measure every objective in the embedded world."""
    return measure_part("objectives", MAIN_SEEDS)


@cache
def check_study_goals(block: str) -> list[claims.Goal]:
    """Check the goals that a block of GOAL_TITLES shows."""
    if block == "goals":
        return claims.check_goals(measure_snli(), SNLI_GOALS)
    if block == "seed 4 goals":
        return claims.check_goals(measure_part("answer_first", (4,)), (ON_PAIRS,))
    if block == "reasoning goals":
        return claims.check_goals(measure_reasoning(), LOG_SCORE_GOALS)
    return claims.check_goals(measure_world(), LOG_SCORE_GOALS)


# Block with the goals of a study -> title of its tasks in the table of all goals.
GOAL_TITLES = {
    "goals": "{}",
    "seed 4 goals": "{}, seed 4",
    "reasoning goals": "{} with reasoning",
    "world goals": "{}",
}


@cache
def compare_reasoning_controls() -> list[claims.Control]:
    """Compare `outcome` with its controls in the study with reasoning."""
    return claims.compare_controls(measure_reasoning(), REASONING_CONTROLS)


# ---- blocks


def make_blocks() -> dict[str, Block]:
    """Return name -> function that makes the lines, for all blocks that pages can have."""
    blocks: dict[str, Block] = {}
    for study in list_studies():
        blocks |= make_study_blocks(study)
    blocks |= make_snli_blocks()
    blocks |= make_reasoning_blocks()
    blocks |= make_world_blocks()
    for name in GOAL_TITLES:
        blocks[name] = partial(tabulate_study_goals, name)
    blocks["reached"] = tabulate_all_goals
    return blocks


def tabulate_study_goals(block: str) -> list[str]:
    """Return the table of the goals of one study."""
    return claims.tabulate_goals(check_study_goals(block))


def tabulate_all_goals() -> list[str]:
    """Return the table of all goals."""
    goal_lists = [(title, check_study_goals(block)) for block, title in GOAL_TITLES.items()]
    return claims.tabulate_reached(goal_lists)


def make_study_blocks(study: str) -> dict[str, Block]:
    """Return the blocks that every study can have, with all its seeds and methods."""

    def measure_all() -> MeasuredStudy:
        return measure_part(study, None)

    def list_places() -> list[tables.Place]:
        return tables.list_places(measure_all().numbers)

    return {
        f"{study} briefly": lambda: tables.tabulate_briefly(list_places()),
        f"{study} scores": lambda: tables.tabulate_scores(list_places()),
        f"{study} seeds": lambda: tables.tabulate_seeds(list_places(), measure_all().numbers),
        f"{study} costs": lambda: ablation.tabulate_costs(read_summary(study)),
    }


def make_snli_blocks() -> dict[str, Block]:
    """Return the blocks of SmolLM2 without reasoning."""
    summary = read_summary("answer_first")

    def select_snli(is_snli: bool) -> list[tables.Place]:
        places = tables.select_places(measure_snli().numbers, ablation=False)
        return [place for place in places if (place.title == "SNLI") == is_snli]

    def tabulate_seeds() -> Iterable[str]:
        numbers = measure_snli().numbers
        return tables.tabulate_seeds(tables.select_places(numbers, ablation=False), numbers)

    def tabulate_seed_3() -> Iterable[str]:
        numbers = measure_part("answer_first", (3,)).numbers
        return tables.tabulate_scores(tables.select_places(numbers, ablation=False))

    def tabulate_seed_4() -> Iterable[str]:
        return tables.tabulate_scores(tables.list_places(measure_part("answer_first", (4,)).numbers))

    return {
        "claims": lambda: tables.tabulate_first(measure_snli().numbers),
        "scores briefly": lambda: tables.tabulate_briefly(select_snli(True)),
        "scores": lambda: tables.tabulate_scores(select_snli(True)),
        "other scores": lambda: tables.tabulate_scores(select_snli(False)),
        "seeds": tabulate_seeds,
        "costs": lambda: ablation.tabulate_costs(summary),
        "ablation": lambda: ablation.tabulate_ablation(measure_snli()),
        "margins": lambda: ablation.tabulate_margins(summary),
        "seed 3 scores": tabulate_seed_3,
        "seed 3 ablation": lambda: ablation.tabulate_ablation(measure_part("answer_first", (3,))),
        "seed 4 scores": tabulate_seed_4,
    }


def make_reasoning_blocks() -> dict[str, Block]:
    """Return the blocks of SmolLM2 with reasoning; `make_study_blocks` makes `reasoning costs`."""

    def measure_sampled() -> MeasuredStudy:
        # Seed 0 has sampled answers, and few enough of its answers were forced to compare methods.
        return measure_part("reasoning", (0,))

    def list_places() -> list[tables.Place]:
        return tables.list_places(measure_reasoning().numbers)

    return {
        "reasoning briefly": lambda: tables.tabulate_briefly(list_places()),
        "reasoning scores": lambda: tables.tabulate_scores(list_places()),
        "reasoning seeds": lambda: tables.tabulate_seeds(list_places(), measure_reasoning().numbers),
        "reasoning controls briefly": lambda: claims.tabulate_controls_briefly(compare_reasoning_controls()),
        "reasoning controls": lambda: claims.tabulate_controls(compare_reasoning_controls()),
        "reasoning seed 0 scores": lambda: tables.tabulate_scores(tables.list_places(measure_sampled().numbers)),
        "selection": lambda: tables.tabulate_selection(measure_sampled().numbers),
    }


def make_world_blocks() -> dict[str, Block]:
    """Return the blocks of the embedded world; `make_study_blocks` makes `world costs`."""

    def list_places() -> list[tables.Place]:
        return tables.list_places(measure_world().numbers)

    def tabulate_terms() -> Iterable[str]:
        terms = measure_part("world", MAIN_SEEDS, ("none", "catto", "bce"))
        return tables.tabulate_scores(tables.list_places(terms.numbers))

    def tabulate_parts() -> Iterable[str]:
        return claims.tabulate_controls(claims.compare_controls(measure_world(), WORLD_PARTS, scalings=("",)))

    return {
        "world terms": tabulate_terms,
        "world": lambda: tables.tabulate_scores(list_places()),
        "world briefly": lambda: tables.tabulate_briefly(list_places(), WORLD_METHODS),
        "world controls": lambda: claims.tabulate_controls(claims.compare_controls(measure_world(), WORLD_CONTROLS)),
        "world parts": tabulate_parts,
        "objectives": lambda: objectives.tabulate_objectives(measure_objectives().numbers),
        "objective seeds": lambda: objectives.tabulate_objective_seeds(measure_objectives().numbers),
        "optima": lambda: objectives.tabulate_optima(measure_objectives().numbers),
        "findings": lambda: objectives.tabulate_findings(measure_objectives().numbers),
    }


# ---- pages


def fill_blocks(text: str, blocks: dict[str, Block]) -> str:
    """Return the text of a page with new contents for its blocks.

    Args:
        text: The page.
        blocks: Name -> function that makes the lines of the block.

    >>> fill_blocks("<!-- begin a -->\\nold\\n<!-- end a -->", {"a": lambda: ["new"]})
    '<!-- begin a -->\\nnew\\n<!-- end a -->'
    """
    for name in re.findall(r"<!-- begin (.+?) -->\n", text):
        if name not in blocks:
            raise SystemExit(f"there is no block {name!r}; expected one of {', '.join(blocks)}")
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"block {name!r} has no end")
        lines = [f"{line}\n" for line in blocks[name]()]
        text = "".join([before, begin, *lines, end, after])
    return text


def main() -> None:
    """Write every page and the figure."""
    blocks = make_blocks()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        write_text(ROOT / page, fill_blocks(text, blocks))
        print(f"{page}: written", flush=True)
    draw_reliability(measure_snli(), "snli", ROOT / FIGURE)


if __name__ == "__main__":
    main()
