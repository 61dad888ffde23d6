"""Choose the sampled responses that each micro-batch scores or replays in addition to its preference pairs.

A micro-batch is what one process computes in one forward pass. A step consists of `gradient_accumulation_steps`
micro-batches on each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from catto.training.config import CATTOConfig
from catto.training.examples import Example, drop_too_long, with_targets


class OutcomeStream:
    """An endless stream of examples: one pass over the examples after another, each in a new random order.

    The examples of a step depend only on the seed and on the number of the step. A killed run therefore resumes with
    the same examples, and a step has the same examples however its pairs are divided into micro-batches and processes.
    """

    def __init__(self, examples: Sequence[Example], config: CATTOConfig) -> None:
        self.examples = examples
        self.examples_per_pair = config.outcome_rows_per_pair
        self.seed = config.data_seed
        if self.seed is None:
            self.seed = config.seed
        self._step = -1  # the step of the last call of `take_examples`
        self._calls_in_step = 0  # number of its calls in this step before the last one
        self._pass = -1  # the pass over the examples whose order is `_order`
        self._order = np.arange(0)

    def take_examples(self, trainer: Any, pairs: int) -> list[Example]:
        """Return the examples for the next micro-batch of this process.

        The first call in a step is for its first micro-batch, the second call for its second, and so on.

        Args:
            trainer: The trainer, for its arguments and the number of the step.
            pairs: Number of pairs in the micro-batch. The last one of an epoch may be smaller than the others.

        Returns:
            `outcome_rows_per_pair` examples for each pair.
        """
        args = trainer.args
        step = trainer.state.global_step
        is_same_step = step == self._step
        if is_same_step:
            self._calls_in_step += 1
        else:
            self._calls_in_step = 0
        self._step = step
        # All micro-batches, from the start of training and over all processes, are numbered one after another.
        micro_batch_of_process = step * args.gradient_accumulation_steps + self._calls_in_step
        micro_batch = micro_batch_of_process * args.world_size + args.process_index
        examples_per_micro_batch = args.per_device_train_batch_size * self.examples_per_pair
        start = micro_batch * examples_per_micro_batch
        return [self.example_at(start + offset) for offset in range(pairs * self.examples_per_pair)]

    def example_at(self, position: int) -> Example:
        """Return the example at a position of the endless stream."""
        current_pass, index_in_pass = divmod(position, len(self.examples))
        if current_pass != self._pass:
            generator = np.random.default_rng((self.seed, current_pass))
            self._pass = current_pass
            self._order = generator.permutation(len(self.examples))
        return self.examples[int(self._order[index_in_pass])]


def make_stream(examples: Sequence[Example], args: CATTOConfig) -> OutcomeStream | None:
    """Return a stream of the examples that are not longer than `args.max_length`, or None if none is needed.

    Args:
        examples: Responses for the calibration term `outcome` or `replay`; may be empty.
        args: The configuration.

    Returns:
        The stream; None without examples, or if the calibration term has weight 0.

    Raises:
        ValueError: Any of these is the case:

            - There are examples, but the calibration term is neither `outcome` nor `replay`.
            - There are no examples, but an option requires them.
            - `outcome_target` is votes or mix, and an example has no votes, or its votes are no distribution.
            - All examples are too long.
    """
    if examples and args.calibration not in ("outcome", "replay"):
        expected = "expected 'outcome' or 'replay'"
        raise ValueError(f"outcome_examples are given but calibration is {args.calibration!r}: {expected}")
    if not examples:
        _refuse_stream_options(args)
        return None
    if not args.weight:
        return None
    if args.calibration == "outcome":  # replay trains on the tokens of the responses, whatever their labels
        examples = with_targets(examples, args.outcome_target)
    fitting = drop_too_long(
        list(examples),
        args.max_length,
        length_of=lambda example: example.tokens,
        name_of=lambda example: example.question,
    )
    return OutcomeStream(fitting, args)


def _refuse_stream_options(args: CATTOConfig) -> None:
    """Raise ValueError if an option is set that requires outcome_examples."""
    if args.calibration == "replay":
        raise ValueError("calibration is 'replay' but outcome_examples, the responses to replay, are not given")
    if args.outcome_rows_per_pair != CATTOConfig.outcome_rows_per_pair:
        raise ValueError(f"outcome_rows_per_pair is {args.outcome_rows_per_pair} but outcome_examples are not given")
    if args.outcome_target != "gold":
        raise ValueError(
            f"outcome_target is {args.outcome_target!r} but outcome_examples, which contain the votes, are not given"
        )
