"""A linear probe as an alternative to `outcome`: can the hidden states of a frozen model predict the right label?

    python -m study.probe RUN [METHOD]

RUN is the folder of a finished run, and METHOD the model to probe (default: dpo). The probe is a multinomial logistic
regression on the last hidden state at the position that predicts the label. It is fitted on the data that `outcome`
learns from: the responses of the stream, up to their label, and the gold labels of their questions. It is applied to
the model's own greedy answers to the test questions. The answers do not change; their confidence becomes the
probability that the probe assigns to the label.

Run it from the folder in which the run was started, so that relative paths in the recipe refer to the same files. For
each task and seed it writes RUN/probe/METHOD-TASK-seed-N/predictions.jsonl, which `catto measure` reads.
`confidence_raw` is the model's own confidence, and `label_logprobs` are those of the probe.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

from catto.answer.confidence import close_token_ids
from catto.answer.tokens import LabelPosition, locate_label
from catto.engines import ScoredGeneration
from catto.io.record_files import read_records, write_records
from catto.io.text_files import read_json
from catto.methods import METHODS
from catto.pipeline.kinds.report import CellPlan
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, resolve_choice, stage_dir
from catto.prompts import prompt_ids, render_messages
from catto.recipe.settings import Recipe
from catto.records import Prediction, Question, SftRow
from catto.training.examples import make_examples

# Values of C, the inverse strength of the regularisation; the one with the lowest log loss on held-out folds is used.
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MAX_FOLDS = 5
# Smaller probabilities are raised to this value before their logarithm is stored.
MIN_PROBABILITY = 1e-12


class ProbeInputs(NamedTuple):
    """The inputs of the probe of one cell.

    Attributes:
        model: Folder of the model.
        stream: The rows that the probe is fitted on.
        questions: Question id -> test question.
        predictions: The model's greedy test answers.
        generations: Question id -> the generation behind the test answer, with its token ids.
    """

    model: Path
    stream: list[SftRow]
    questions: dict[str, Question]
    predictions: list[Prediction]
    generations: dict[str, ScoredGeneration]


def main(root: Path, method: str) -> None:
    """Probe the model of a method for every task and seed of a run."""
    recipe = read_newest_recipe(root)
    graph = Graph(recipe)
    cells = [cell for cell in graph.list_cells() if cell.place.method == method]
    if not cells:
        raise SystemExit(f"{root}: the recipe of this run has no method {method}")
    for cell in cells:
        inputs = read_inputs(root, graph, cell)
        predictions = apply_probe(inputs, reasoning=recipe.teacher.reasoning, context=recipe.context)
        budget = f"-{cell.place.budget}" if cell.place.budget else ""
        out = root / "probe" / f"{method}{budget}-{cell.place.task}-seed-{cell.place.seed}" / "predictions.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_records(out, predictions)
        print(f"{out}: {len(predictions)} answers, fitted on {len(inputs.stream)} responses")


def read_newest_recipe(root: Path) -> Recipe:
    """Read the recipe with which a run was last started."""
    recipes = sorted((root / "recipes").glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not recipes:
        raise SystemExit(f"{root}: contains no recipe, so it is not the folder of a run")
    return Recipe.model_validate(read_json(recipes[-1]))


# ---- the inputs of the probe -----------------------------------------------------------------------------------------


def read_inputs(root: Path, graph: Graph, cell: CellPlan) -> ProbeInputs:
    """Read the inputs for one cell from the folders of its stages."""
    questions_path = stage_dir(root, cell.questions) / "test.jsonl"
    predictions_path = stage_dir(root, cell.predictions) / "predictions.jsonl"
    generations_path = stage_dir(root, cell.predictions.needs["generated"]) / "generations.jsonl"
    generations = read_records(generations_path, ScoredGeneration)
    return ProbeInputs(
        model=stage_dir(root, resolve_choice(root, cell.chosen)) / "model",
        stream=list(read_records(find_stream(root, graph, cell), SftRow)),
        questions={question.id: question for question in read_records(questions_path, Question)},
        predictions=list(read_records(predictions_path, Prediction)),
        generations={generation.question: generation for generation in generations},
    )


def find_stream(root: Path, graph: Graph, cell: CellPlan) -> Path:
    """Return the file with the stream that a method with the outcome score was trained on in this run.

    It is the stream of the first such method in the recipe, at its first learning rate and the first budget.
    """
    for name in graph.recipe.methods:
        if name in METHODS and METHODS[name].stream == "sampled":
            learning_rate = graph.list_learning_rates(name)[0]
            budget = graph.recipe.budgets[0]
            training = graph.plan_training(cell.place.trained_on, cell.place.seed, name, budget, learning_rate)
            return find_stream_file(root, training.needs["stream"])
    raise SystemExit(f"{root}: no method of the recipe has a stream to fit the probe on; add one such as dpo+outcome")


def find_stream_file(root: Path, stream: Stage) -> Path:
    """Return the file of a stream: the one with votes (one row per question) if there is one."""
    folder = stage_dir(root, stream)
    with_votes = folder / "stream.jsonl"
    return with_votes if with_votes.exists() else folder / "outcome.jsonl"


# ---- the probe -------------------------------------------------------------------------------------------------------


def apply_probe(inputs: ProbeInputs, *, reasoning: bool, context: int) -> list[Prediction]:
    """Fit the probe on the stream and apply it to the test answers.

    Args:
        inputs: The inputs of the cell.
        reasoning: Whether the prompts of the run ask for reasoning.
        context: Maximum number of tokens of a row of the stream; longer rows are dropped.

    Returns:
        The test answers with the confidence of the probe.
    """
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    model = AutoModel.from_pretrained(inputs.model, dtype=torch.float32).eval()
    labels = find_shared_labels(inputs)

    training_contexts = []
    gold = []
    for example in make_examples(tokenizer, inputs.stream, context):
        before = example.before_label()
        training_contexts.append([*before.prompt, *before.completion])
        gold.append(example.label.gold)
    classifier = fit_classifier(compute_hidden_states(model, training_contexts), np.array(gold))

    test_contexts = []
    for row in inputs.predictions:
        test_contexts.append(make_label_context(tokenizer, inputs, row, reasoning=reasoning))
    class_probabilities = classifier.predict_proba(compute_hidden_states(model, test_contexts))
    # The classifier has no class for a label that is never the gold label in the stream; its probability is 0.
    label_probabilities = np.zeros((len(test_contexts), len(labels)))
    label_probabilities[:, classifier.classes_] = class_probabilities
    answers = []
    for row, probabilities in zip(inputs.predictions, label_probabilities, strict=True):
        answers.append(replace_confidence(row, labels, probabilities))
    return answers


def find_shared_labels(inputs: ProbeInputs) -> tuple[str, ...]:
    """Return the labels of the questions, which must be the same for all: the probe has one class per label."""
    label_sets = {row.labels for row in inputs.stream}
    label_sets |= {question.labels for question in inputs.questions.values()}
    if len(label_sets) > 1:
        raise SystemExit(f"the questions have {len(label_sets)} different sets of labels; the probe needs a single one")
    return label_sets.pop()


def fit_classifier(states: NDArray[np.float32], gold: NDArray[np.int64]) -> Any:
    """Fit a logistic regression on standardised states. Its penalty is chosen by cross-validated log loss.

    Args:
        states: Hidden states, (N, width), one per response.
        gold: Indices of the gold labels, (N,).
    """
    steps = [("scale", StandardScaler()), ("regress", LogisticRegression(max_iter=5_000))]
    rarest_count = min(Counter(gold.tolist()).values())
    # Every fold needs each label, so there are no more folds than rows of the rarest label.
    folds = StratifiedKFold(max(2, min(MAX_FOLDS, rarest_count)), shuffle=True, random_state=0)
    grid = {"regress__C": list(INVERSE_PENALTIES)}
    search = GridSearchCV(Pipeline(steps), grid, scoring="neg_log_loss", cv=folds)
    return search.fit(states, gold).best_estimator_


def make_label_context(tokenizer: Any, inputs: ProbeInputs, row: Prediction, *, reasoning: bool) -> list[int]:
    """Return the token ids up to the label of a test answer, including the prompt."""
    prompt = prompt_ids(tokenizer, render_messages(inputs.questions[row.question], reasoning=reasoning))
    return [*prompt, *find_label_position(tokenizer, inputs, row).ids_before]


def find_label_position(tokenizer: Any, inputs: ProbeInputs, row: Prediction) -> LabelPosition:
    """Find the label of a test answer, as the evaluation does.

    If the answer had to be forced, the response is closed as in the evaluation, so that a label comes next.
    """
    question = inputs.questions[row.question]
    generation = inputs.generations[row.question]
    ids = generation.token_ids or ()
    option_texts = [option.text for option in question.options]
    is_cut = generation.finish_reason == "length"
    position = None
    if row.source != "fallback":
        position = locate_label(tokenizer, ids, question.labels, option_texts, cut=is_cut)
    if position is None:
        position = close_token_ids(tokenizer, ids, question.labels)
    if position is None:
        raise ValueError(f"{row.name}: no room for an answer")
    return position


def compute_hidden_states(model: Any, contexts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the last hidden state at the last token of each context, (N, width).

    The contexts are not batched, since padding would change the last bits; a few thousand take minutes.
    """
    states = []
    with torch.inference_mode():
        for context in contexts:
            outputs = model(input_ids=torch.tensor([list(context)]))
            states.append(outputs.last_hidden_state[0, -1].float().numpy())
    return np.stack(states)


def replace_confidence(row: Prediction, labels: Sequence[str], probabilities: NDArray[np.float64]) -> Prediction:
    """Return a test answer with the probe's probability of its label as confidence.

    Args:
        row: The test answer. Without a label, it keeps its confidence.
        labels: The labels of the question, K.
        probabilities: The probe's probability of each label, (K,).
    """
    confidence = row.confidence
    if row.label is not None:
        confidence = float(probabilities[labels.index(row.label)])
    logprobs = np.log(np.maximum(probabilities, MIN_PROBABILITY)).tolist()
    update = {
        "confidence": confidence,
        "confidence_raw": row.confidence,
        "label_logprobs": dict(zip(labels, logprobs, strict=True)),
        "logsumexp": None,
    }
    return row.model_copy(update=update)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [run]:
            main(Path(run), "dpo")
        case [run, name]:
            main(Path(run), name)
        case _:
            raise SystemExit(__doc__)
