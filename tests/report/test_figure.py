"""The reliability diagram: what is drawn equals what was counted, and equal numbers give equal files."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from catto.cli import main
from catto.errors import DataError
from catto.metrics.binning import reliability
from catto.metrics.errors import accuracy, ece, mean_confidence
from catto.metrics.intervals import NullBand
from catto.report.drawing import STYLE, Panel, reliability_figure, write_figure

RNG = np.random.default_rng(0)
CONFIDENCE = RNG.beta(5, 1, 400)
CORRECT = RNG.random(400) < CONFIDENCE**2
PANEL = Panel("DPO", reliability(CONFIDENCE, CORRECT), NullBand(0.04, 0.02, 0.065, 0.95))


def test_bars_reach_from_accuracy_to_mean_confidence() -> None:
    """Two bins of two. (0, 0.5]: 0.2, 0.4, one right: accuracy 0.5 over confidence 0.3, the gap lies in the bar.

    (0.5, 1]: 0.9, 0.9, one right: accuracy 0.5 under confidence 0.9, the gap stands on the bar.
    """
    bins = reliability([0.2, 0.4, 0.9, 0.9], [True, False, True, False], 2)
    upper = reliability_figure([Panel("", bins)]).axes[0]
    bars = [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in upper.patches]
    expected = [(0.0, 0.0, 0.5), (0.5, 0.0, 0.5), (0.0, 0.3, 0.2), (0.5, 0.5, 0.4)]
    np.testing.assert_allclose(bars, expected, atol=1e-12)


def test_empty_bins_draw_no_bar() -> None:
    upper = reliability_figure([Panel("", reliability([0.95], [True], 20))]).axes[0]
    assert len(upper.patches) == 2


def test_bins_with_few_answers_are_pale() -> None:
    """Nine answers in the first of two bins, ten in the second; the bars of accuracy come before those of the gap."""
    upper = reliability_figure([Panel("", reliability([0.2] * 9 + [0.9] * 10, [True] * 19, 2))]).axes[0]
    assert [bar.get_alpha() for bar in upper.patches] == [0.4, None, 0.4, None]
    assert upper.get_legend().get_title().get_text() == "pale: under 10 answers"
    full = reliability_figure([Panel("", reliability([0.9] * 10, [True] * 10))]).axes[0]
    assert full.get_legend().get_title().get_text() == ""


def test_no_axis_passes_100_per_cent() -> None:
    upper, lower = reliability_figure([Panel("", reliability([0.95] * 30, [True] * 30))]).axes
    assert [*upper.get_xlim(), *upper.get_ylim(), *lower.get_ylim()] == [0, 1] * 3


def test_histogram_has_the_two_lines() -> None:
    lower = reliability_figure([PANEL]).axes[1]
    places = [float(np.asarray(line.get_xdata())[0]) for line in lower.lines]
    assert places == pytest.approx([mean_confidence(CONFIDENCE, CORRECT), accuracy(CONFIDENCE, CORRECT)], abs=1e-12)


def test_box_says_ece_null_band_and_n_with_the_decimals_that_n_supports() -> None:
    """A question of 400 is worth 0.25 points, one of 1,000 a tenth of a point."""
    assert PANEL.note() == f"ECE {100 * ece(CONFIDENCE, CORRECT):.0f}\nby chance 2 to 6\nN = 400, 20 bins"
    many = np.resize(CONFIDENCE, 1000), np.resize(CORRECT, 1000)
    large = Panel("", reliability(*many), PANEL.null)
    assert large.note() == f"ECE {100 * ece(*many):.1f}\nby chance 2.0 to 6.5\nN = 1,000, 20 bins"


def test_panels_stand_side_by_side_on_the_same_axes() -> None:
    drawn = reliability_figure([PANEL, Panel("CATTO", reliability(CONFIDENCE, RNG.random(400) < CONFIDENCE))])
    assert [axes.get_title() for axes in drawn.axes[:2]] == ["DPO", "CATTO"]
    assert drawn.axes[2].get_ylim() == drawn.axes[3].get_ylim()


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_equal_numbers_give_equal_files(tmp_path: Path, suffix: str, start: bytes) -> None:
    for name in ("a", "b"):
        write_figure(partial(reliability_figure, [PANEL]), tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first.startswith(start)
    assert first == (tmp_path / f"b.{suffix}").read_bytes()


def test_title_is_text_not_mathematics_or_markup(tmp_path: Path) -> None:
    write_figure(partial(reliability_figure, [Panel("$_b$ <i>", PANEL.bins)]), tmp_path / "a.svg")
    assert ">$_b$ &lt;i&gt;</text>" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_unknown_ending_and_unwritable_place_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.svg, \.pdf, \.png"):
        write_figure(partial(reliability_figure, [PANEL]), tmp_path / "a.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        write_figure(partial(reliability_figure, [PANEL]), tmp_path / "file" / "a.svg")


def test_a_full_disk_leaves_the_old_figure_and_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, drawn = tmp_path / "answers.jsonl", tmp_path / "reliability.svg"
    answers.write_text("".join(f'{{"confidence": 0.{n}, "correct": {str(n > 4).lower()}}}\n' for n in range(1, 10)) * 4)
    drawn.write_text("the old one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("catto.io.atomic.os.fsync", full)
    with pytest.raises(SystemExit, match="2"):
        main(["measure", str(answers), "--figure", str(drawn), "--resamples", "10"])
    assert capsys.readouterr().err == f"catto: {drawn}: cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert drawn.read_text() == "the old one"
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", "reliability.svg"}


def test_a_long_title_overlaps_nothing_and_stays_in_the_figure() -> None:
    confidence, title = np.array([0.3, 0.6, 0.9]), "DPO + outcome + temperature scaling"
    with matplotlib.rc_context(fname=STYLE):
        drawn = reliability_figure([Panel(title, reliability(confidence, confidence > 0.5))] * 2)
        drawn.draw_without_rendering()
        for axes in drawn.axes[:2]:
            (text,) = [child for child in axes.get_children() if getattr(child, "get_text", str)().startswith("DPO")]
            extent = text.get_window_extent()
            assert not extent.overlaps(axes.get_legend().get_window_extent())
            assert extent.x1 <= drawn.bbox.x1
