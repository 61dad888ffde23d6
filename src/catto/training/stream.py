"""The third stream beside the pairs: which unfiltered responses go with which step.

The choice follows from (seed, step, place in the step) alone, so a run that was killed goes on with the same rows and
the order of accumulation or the number of processes changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from catto.training.config import CATTOConfig
from catto.training.rows import Example


class OutcomeStream:
    """Endless passes over the examples, each in an order of its own."""

    def __init__(self, examples: Sequence[Example], config: CATTOConfig) -> None:
        self.examples = examples
        self.per_pair = config.outcome_rows_per_pair
        self.seed = config.seed if config.data_seed is None else config.data_seed
        self._step, self._micro = -1, 0
        self._turn, self._order = -1, np.arange(0)

    def next(self, trainer: Any, pairs: int) -> list[Example]:
        """The examples of this process's next micro-batch of `pairs` pairs."""
        step = trainer.state.global_step
        self._micro = self._micro + 1 if step == self._step else 0
        self._step = step
        args = trainer.args
        size = args.per_device_train_batch_size * self.per_pair
        micro = step * args.gradient_accumulation_steps + self._micro
        start = (micro * args.world_size + args.process_index) * size
        return [self.at(start + n) for n in range(pairs * self.per_pair)]

    def at(self, position: int) -> Example:
        """Example number `position` of the endless stream."""
        turn, place = divmod(position, len(self.examples))
        if turn != self._turn:
            self._turn, self._order = turn, np.random.default_rng((self.seed, turn)).permutation(len(self.examples))
        return self.examples[int(self._order[place])]
