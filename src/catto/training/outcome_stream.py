"""Choose the sampled responses that each micro-batch scores or replays in addition to its preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from catto.training.config import CATTOConfig
from catto.training.examples import Example, drop_too_long, with_targets


class OutcomeStream:
    """An endless stream of examples, in addition to the pairs. It is reshuffled for every pass over the examples.

    The choice of examples depends only on the seed, the step and the position in the step. A killed run therefore
    resumes with the same examples, regardless of gradient accumulation and the number of processes.
    """

    def __init__(self, examples: Sequence[Example], config: CATTOConfig) -> None:
        self.examples = examples
        self.per_pair = config.outcome_rows_per_pair
        self.seed = config.data_seed
        if self.seed is None:
            self.seed = config.seed
        self._step = -1
        self._micro_batch = 0
        self._pass = -1
        self._order = np.arange(0)

    def take_examples(self, trainer: Any, pairs: int) -> list[Example]:
        """Return the examples for this process's next micro-batch of `pairs` pairs.

        The first call in a step belongs to its first micro-batch, the second call to the second, and so on.
        """
        args = trainer.args
        step = trainer.state.global_step
        is_same_step = step == self._step
        if is_same_step:
            self._micro_batch += 1
        else:
            self._micro_batch = 0
        self._step = step
        micro_batch = step * args.gradient_accumulation_steps + self._micro_batch  # counted from the start of training
        batch_of_process = micro_batch * args.world_size + args.process_index  # counted over all processes
        examples_per_batch = args.per_device_train_batch_size * self.per_pair
        start = batch_of_process * examples_per_batch
        return [self.example_at(start + offset) for offset in range(pairs * self.per_pair)]

    def example_at(self, position: int) -> Example:
        """Return the example at a position of the endless stream."""
        number_of_pass, index_in_pass = divmod(position, len(self.examples))
        if number_of_pass != self._pass:
            generator = np.random.default_rng((self.seed, number_of_pass))
            self._pass = number_of_pass
            self._order = generator.permutation(len(self.examples))
        return self.examples[int(self._order[index_in_pass])]


def make_stream(examples: Sequence[Example], args: CATTOConfig) -> OutcomeStream | None:
    """Return a stream of the examples that are short enough; None without examples or if the term has weight 0.

    Args:
        examples: Responses for the calibration term, see `outcome_examples` of `CATTOTrainer`.
        args: The configuration.

    Raises:
        ValueError: The calibration term does not read examples, an option requires examples and there are none, the
            configured target is missing, or all examples are too long.
    """
    if examples and args.calibration not in ("outcome", "replay"):
        expected = "expected 'outcome' or 'replay'"
        raise ValueError(f"outcome_examples are given but calibration is {args.calibration!r}: {expected}")
    if not examples:
        _refuse_stream_options(args)
        return None
    if not args.weight:
        return None
    if args.calibration == "outcome":
        examples = with_targets(examples, args.outcome_target)
    fitting = drop_too_long(
        list(examples),
        args.max_length,
        length_of=lambda example: example.tokens,
        name_of=lambda example: example.question,
    )
    return OutcomeStream(fitting, args)


def _refuse_stream_options(args: CATTOConfig) -> None:
    """Raise ValueError for options that have no effect or no meaning without outcome_examples."""
    if args.calibration == "replay":
        raise ValueError("calibration is 'replay' but outcome_examples, the responses to replay, are not given")
    if args.outcome_rows_per_pair != CATTOConfig.outcome_rows_per_pair:
        raise ValueError(f"outcome_rows_per_pair is {args.outcome_rows_per_pair} but outcome_examples are not given")
    if args.outcome_target != "gold":
        raise ValueError(
            f"outcome_target is {args.outcome_target!r} but outcome_examples, which contain the votes, are not given"
        )
