"""Measure the confidence of a model during training with any Trainer of Transformers or TRL."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from transformers import TrainerCallback

from catto.answer_columns import ParseCounts
from catto.measure import MeasureSettings, measure_runs
from catto.metrics.binning import Bools, Floats, reliability
from catto.metrics.resampling import Answers
from catto.predict import evaluate_model
from catto.prompts import check_ids
from catto.records import Prediction, Question
from catto.report.drawing import STYLE, Panel, reliability_figure
from catto.training.monitor import MonitoredTrainer

logger = logging.getLogger(__name__)

LOGGED_METRICS = ("accuracy", "mean_confidence", "ece", "brier")
PREFIX = "eval_reliability_"
# Number of simulated runs for the null band: enough for a figure. More would slow down every evaluation.
NULL_BAND_RESAMPLES = 200


@dataclass(frozen=True)
class ReliabilityLog:
    """The results of one evaluation, as sent to the trackers.

    Attributes:
        step: Number of optimizer steps so far.
        numbers: Metric name without prefix -> value in [0, 1].
        figure: The reliability diagram.
        output_dir: The trainer's output folder.
    """

    step: int
    numbers: dict[str, float]
    figure: Figure
    output_dir: Path

    def with_prefix(self, prefix: str) -> dict[str, float]:
        """Return the numbers with a prefix before each name."""
        return {prefix + name: value for name, value in self.numbers.items()}


class ReliabilityCallback(TrainerCallback):  # type: ignore[misc]
    """Answer held-out questions at every evaluation, and log how reliable the confidences are.

    The numbers are `eval_reliability_accuracy`, `_mean_confidence`, `_ece`, `_brier` and `_fallback_rate`. They are
    added to the metrics of the evaluation, so `metric_for_best_model="reliability_ece"` works. The numbers and the
    reliability diagram are logged to every tracker in `report_to` that is a key of `TRACKERS`.

    Questions are asked in the same way as by `catto.evaluate`. Every process answers all questions, because a sharded
    model needs every process in each forward pass, but only the main process logs. With several evaluation datasets,
    the questions are answered once per dataset.

    Args:
        questions: Held-out questions, as returned by `catto.load_questions`.
        tokenizer: Tokenizer with a chat template.
        batch_size: Number of responses generated at the same time.
        bins: Number of bins for the ECE and the diagram.
        reasoning: Whether the model is asked to reason before it answers.
        max_tokens: Maximum number of generated tokens per response.
    """

    def __init__(
        self,
        questions: Iterable[Question],
        tokenizer: Any,
        *,
        batch_size: int = 16,
        bins: int = 20,
        reasoning: bool = True,
        max_tokens: int = 512,
    ) -> None:
        self.questions = list(questions)
        if not self.questions:
            raise ValueError("ReliabilityCallback needs at least one question")
        check_ids(self.questions)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.bins = bins
        self.reasoning = reasoning
        self.max_tokens = max_tokens

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer the questions, add the numbers to the metrics of the evaluation, and log numbers and diagram.

        Args:
            args: The `TrainingArguments`.
            state: The `TrainerState`.
            control: The `TrainerControl`, which is not used.
            kwargs: `model`, and `metrics`, the dict of the evaluation's metrics, to which the numbers are added.
        """
        predictions = evaluate_model(
            kwargs["model"],
            self.tokenizer,
            self.questions,
            batch_size=self.batch_size,
            reasoning=self.reasoning,
            max_tokens=self.max_tokens,
        )
        answers = gather_logged_answers(predictions)
        record = make_log(answers, step=state.global_step, bins=self.bins, output_dir=Path(args.output_dir))
        numbers = record.with_prefix(PREFIX)
        metrics = kwargs.get("metrics")
        if metrics is not None:
            metrics.update(numbers)
        if not state.is_world_process_zero:
            return
        # The Trainer has logged the metrics of this evaluation before this event, so the numbers are added here.
        state.log_history.append({**numbers, "step": state.global_step})
        logger.info("step %d: %s", state.global_step, numbers)
        send_to_trackers(record, args.report_to)


class ValidationReliability(TrainerCallback):  # type: ignore[misc]
    """Log how reliable the label confidences are that catto's own trainers compute at every evaluation.

    `catto run` adds this callback if the recipe's `trl` block names a tracker. It generates nothing: the trainer has
    already computed the confidences, after reasoning that was sampled once.

    Args:
        trainer: A trainer whose `validation` is not empty.
        bins: Number of bins for the ECE and the diagram.
    """

    def __init__(self, trainer: MonitoredTrainer, *, bins: int = 20) -> None:
        self.trainer = trainer
        self.bins = bins
        self.logged_step: int | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log numbers and diagram once per step, although this event occurs after every evaluation dataset."""
        if not state.is_world_process_zero or state.global_step == self.logged_step:
            return
        validation_answers = self.trainer.validation_answers
        if validation_answers is None:
            return
        self.logged_step = state.global_step
        answers = LoggedAnswers(validation_answers.confidence, validation_answers.correct, sources=None)
        record = make_log(answers, step=state.global_step, bins=self.bins, output_dir=Path(args.output_dir))
        send_to_trackers(record, args.report_to)


class LoggedAnswers(NamedTuple):
    """N answers, as columns.

    Attributes:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans.
        sources: How the answers were parsed; None if they did not have to be parsed.
    """

    confidence: Floats
    correct: Bools
    sources: ParseCounts | None


def gather_logged_answers(predictions: Sequence[Prediction]) -> LoggedAnswers:
    """Convert predictions to columns."""
    confidence = np.array([prediction.confidence for prediction in predictions], dtype=np.float64)
    correct = np.array([prediction.is_correct for prediction in predictions], dtype=np.bool_)
    return LoggedAnswers(confidence, correct, ParseCounts.of(prediction.source for prediction in predictions))


def make_log(answers: LoggedAnswers, *, step: int, bins: int, output_dir: Path) -> ReliabilityLog:
    """Measure answers and draw their reliability diagram.

    The diagram also states the null band of the ECE: the range of its values for a perfectly calibrated model with the
    same confidences, which is due to chance.

    Args:
        answers: At least one answer.
        step: Number of optimizer steps so far.
        bins: Number of bins for the ECE and the diagram.
        output_dir: The trainer's output folder.

    Returns:
        The figure and the numbers: `LOGGED_METRICS` and, if the answers had to be parsed, `fallback_rate`: the share of
        responses without a readable answer, for which the most probable label was taken.
    """
    # Resamples are needed only for the null band. The intervals that they also give are not logged.
    settings = MeasureSettings(LOGGED_METRICS, bins=bins, resamples=NULL_BAND_RESAMPLES)
    run = Answers(question=None, confidence=answers.confidence, correct=answers.correct)
    results = measure_runs([run], settings)
    numbers = {}
    for name in LOGGED_METRICS:
        numbers[name] = float(results[name].interval.value)
    if answers.sources is not None:
        numbers["fallback_rate"] = answers.sources.share("fallback")
    panel = Panel(
        title=f"Step {step}",
        bins=reliability(answers.confidence, answers.correct, bins),
        null=results["ece"].null,
        sources=answers.sources,
    )
    figure = draw_panel(panel)
    return ReliabilityLog(step=step, numbers=numbers, figure=figure, output_dir=output_dir)


def draw_panel(panel: Panel) -> Figure:
    """Draw one reliability diagram in the style of all catto figures."""
    with matplotlib.rc_context({"figure.dpi": 100}, STYLE):
        figure = reliability_figure([panel])
        ConstrainedLayoutEngine(w_pad=0.1).execute(figure)
    return figure


# ---- trackers


def list_trackers(report_to: str | Sequence[str] | None) -> list[str]:
    """Return the trackers in `report_to` that this module supports.

    >>> list_trackers(["tensorboard", "comet_ml"])
    ['tensorboard']
    """
    if report_to is None:
        return []
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if "all" in names:
        from transformers.integrations import get_available_reporting_integrations

        names = get_available_reporting_integrations()
    return [name for name in names if name in TRACKERS]


def send_to_trackers(record: ReliabilityLog, report_to: str | Sequence[str] | None) -> None:
    """Log to every tracker in `report_to` that this module supports."""
    for tracker in list_trackers(report_to):
        TRACKERS[tracker](record)


def _log_to_tensorboard(record: ReliabilityLog) -> None:
    """Write to a folder below the trainer's, since TensorBoard follows only the newest event file of a folder."""
    from torch.utils.tensorboard import SummaryWriter

    folder = find_tensorboard_folder(record.output_dir) / "reliability"
    with SummaryWriter(log_dir=str(folder)) as writer:
        for name, value in record.with_prefix("eval/reliability_").items():
            writer.add_scalar(name, value, record.step)
        writer.add_figure("eval/reliability", record.figure, record.step)


def find_tensorboard_folder(output_dir: Path) -> Path:
    """Return the folder that the trainer's own TensorBoard callback writes to.

    It is `TENSORBOARD_LOGGING_DIR` if that is set, otherwise the newest folder in `output_dir/runs`.
    """
    from_environment = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if from_environment:
        return Path(from_environment).expanduser()
    runs = output_dir / "runs"
    folders = [path for path in runs.glob("*") if path.is_dir()]
    if not folders:
        return runs
    return max(folders, key=lambda path: path.stat().st_mtime)


def _log_to_wandb(record: ReliabilityLog) -> None:
    import wandb

    if wandb.run is None:
        logger.warning("the reliability diagram is not logged: W&B has no active run")
        return
    values: dict[str, Any] = dict(record.with_prefix("eval/reliability_"))
    values["eval/reliability"] = wandb.Image(_read_pixels(record.figure))
    wandb.log({**values, "train/global_step": record.step})


def _log_to_mlflow(record: ReliabilityLog) -> None:
    import mlflow

    if mlflow.active_run() is None:
        logger.warning("the reliability diagram is not logged: MLflow has no active run")
        return
    mlflow.log_metrics(record.with_prefix(PREFIX), step=record.step)
    mlflow.log_image(_read_pixels(record.figure), f"reliability/step-{record.step}.png")


def _log_to_trackio(record: ReliabilityLog) -> None:
    import trackio

    values: dict[str, Any] = dict(record.with_prefix("eval/reliability_"))
    values["eval/reliability"] = trackio.Image(_read_pixels(record.figure))
    trackio.log({**values, "train/global_step": record.step})


def _read_pixels(figure: Figure) -> Any:
    """Render a figure as a PIL image."""
    from PIL import Image

    content = io.BytesIO()
    figure.savefig(content, format="png")
    content.seek(0)
    image = Image.open(content)
    return image.convert("RGB")


# Name in `report_to` -> function that logs to it.
TRACKERS: dict[str, Callable[[ReliabilityLog], None]] = {
    "tensorboard": _log_to_tensorboard,
    "wandb": _log_to_wandb,
    "mlflow": _log_to_mlflow,
    "trackio": _log_to_trackio,
}
