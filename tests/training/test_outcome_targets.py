"""`outcome_target`: the score of the label aims at the votes of samples, or at the mean of these and the gold label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from steps import distance, made, step
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import one_hot

from catto.io.record_files import read_records, write_records
from catto.records import SftRow
from catto.training.config import CATTOConfig
from catto.training.examples import Example, make_examples
from catto.training.trainer import CATTOTrainer

VOTES = ({"A": 0.5, "B": 0.5}, {"C": 1.0}, {"A": 0.125, "B": 0.25, "C": 0.125, "D": 0.5})


def _voted() -> list[SftRow]:
    rows = pairs.sft_rows(8)
    return [row.model_copy(update={"votes": VOTES[number % 3]}) for number, row in enumerate(rows)]


class TermAlone(CATTOTrainer):
    """The stream of the first step, and a preference loss that counts for nothing."""

    drawn: list[Example]

    def _make_policy(self, model: Any, layout: Any, streamed: Any) -> Any:
        self.drawn = list(streamed)
        return super()._make_policy(model, layout, streamed)


def _dense(model: Any, drawn: list[Example], kind: str, score: str) -> Tensor:
    """The mean score from full logits, one response at a time; targets from the rows, not from the examples."""
    votes = {row.question: row.votes or {} for row in _voted()}
    losses = []
    for example in drawn:
        row = example.before_label()
        logits = model(input_ids=torch.tensor([[*row.prompt, *row.completion]])).logits[0, -1]
        log_p = logits.log_softmax(-1)[torch.tensor(example.label.candidates)]
        gold = one_hot(torch.tensor(example.label.gold), 4).double()
        share = torch.tensor([votes[example.question].get(label, 0.0) for label in pairs.LABELS], dtype=torch.float64)
        target = {"gold": gold, "votes": share, "mix": (gold + share) / 2}[kind]
        losses.append(-(target * log_p).sum() if score == "log" else ((log_p.exp() - target) ** 2).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("score", ["log", "brier"])
@pytest.mark.parametrize("kind", ["gold", "votes", "mix"])
def test_the_term_is_the_dense_computation_in_float64(kind: str, score: str, packed: bool) -> None:
    stream = make_examples(tiny_tokenizer(), _voted())
    options = {"calibration": "outcome", "outcome_target": kind, "outcome_score": score, "padding_free": packed}
    options |= {"loss_type": ["sigmoid"], "loss_weights": [0.0], "prefix_sharing": packed}
    models = {"model": tiny_model().double(), "ref_model": tiny_model(seed=1).double()}
    ours = step(TermAlone, CATTOConfig, outcome_examples=stream, **models, **options)
    model = tiny_model().double()
    expected = _dense(model, ours.trainer.drawn, kind, score)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.loss.item() == pytest.approx(expected.item(), abs=1e-6 if packed else 1e-10)
    assert distance(ours.gradients, gradients) < (1e-6 if packed else 1e-8)


def test_votes_that_are_missing_or_no_distribution_are_refused() -> None:
    options = {"calibration": "outcome", "outcome_target": "votes"}
    with pytest.raises(ValueError, match="outcome_target is 'votes' but outcome_examples"):
        made(CATTOTrainer, CATTOConfig, **options)
    stream = make_examples(tiny_tokenizer(), pairs.sft_rows(8))
    with pytest.raises(ValueError, match="question s0: outcome_target is 'votes' but the example has no votes"):
        made(CATTOTrainer, CATTOConfig, outcome_examples=stream, **options)
    wrong = [Example(one.question, one.row, one.label._replace(target=(0.5, 0.4, 0.0, 0.0))) for one in stream]
    with pytest.raises(ValueError, match=r"question s0: label.target is \(0.5, 0.4, 0.0, 0.0\), expected 4 shares"):
        made(CATTOTrainer, CATTOConfig, outcome_examples=wrong, **options)


def test_samples_without_votes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outcome_samples is 4 but outcome_target is 'gold'"):
        CATTOConfig(str(tmp_path), calibration="outcome", outcome_samples=4, bf16=False)


def test_rows_store_votes_only_where_they_have_some(tmp_path: Path) -> None:
    plain, voted = pairs.sft_rows(1)[0], _voted()[0]
    assert "votes" not in plain.model_dump_json()
    path = tmp_path / "rows.jsonl"
    write_records(path, [plain, voted])
    assert list(read_records(path, SftRow)) == [plain, voted]
    with pytest.raises(ValueError, match="votes name 'E'"):
        SftRow.model_validate({**plain.model_dump(), "votes": {"E": 1.0}})
    for votes in ({"A": 0.9}, {"A": -0.5, "B": 1.5}, {"A": float("nan"), "B": 0.5}):
        with pytest.raises(ValueError, match="are not shares that sum to 1"):
            SftRow.model_validate({**plain.model_dump(), "votes": votes})
