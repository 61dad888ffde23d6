"""A linear probe in place of the score: how well do a frozen model's hidden states know whether a label is right?

    python -m study.probe RUN [METHOD]

RUN is the folder of a finished run, METHOD the model that is probed (dpo). The probe is a multinomial logistic
regression on the last hidden state at the position that predicts the label. It is fitted on what `outcome` learns from:
the responses of the stream, up to their label, and the gold labels of their questions. It is applied to the model's own
greedy answers to the test questions. The answers stay; their confidence becomes the probe's probability of the label.

Run it from the folder in which the run was started, where relative paths of the recipe lead to the same files. For each
task and seed it writes RUN/probe/METHOD-TASK-seed-N/predictions.jsonl, which `catto measure` reads.
`confidence_raw` is the model's own confidence, and `label_logprobs` are the probe's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
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

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # values of C; one is chosen by the log loss of held-out folds
FOLDS = 5
SMALLEST = 1e-12  # of a probability whose logarithm is stored


class Inputs(NamedTuple):
    """What the probe of one cell reads: the model's folder, the stream, and the test answers with their tokens."""

    model: Path
    stream: list[SftRow]
    questions: dict[str, Question]
    predictions: list[Prediction]
    generations: dict[str, ScoredGeneration]


def main(root: Path, method: str) -> None:
    """Probe the model of a method on every task and seed of a run."""
    recipe = newest_recipe(root)
    graph = Graph(recipe)
    cells = [cell for cell in graph.list_cells() if cell.place.method == method]
    if not cells:
        raise SystemExit(f"{root}: its recipe has no method {method}")
    for cell in cells:
        inputs = read_inputs(root, graph, cell)
        predictions = probe(inputs, reasoning=recipe.teacher.reasoning, context=recipe.context)
        budget = f"-{cell.place.budget}" if cell.place.budget else ""
        out = root / "probe" / f"{method}{budget}-{cell.place.task}-seed-{cell.place.seed}" / "predictions.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_records(out, predictions)
        print(f"{out}: {len(predictions)} answers, fitted on {len(inputs.stream)} responses")


def newest_recipe(root: Path) -> Recipe:
    """Return the recipe of a run that was used last."""
    stored = sorted((root / "recipes").glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not stored:
        raise SystemExit(f"{root}: holds no recipe, so it is not the folder of a run")
    return Recipe.model_validate(read_json(stored[-1]))


# ---- what the probe reads --------------------------------------------------------------------------------------------


def read_inputs(root: Path, graph: Graph, cell: CellPlan) -> Inputs:
    """Read the files of one cell from the folders of its stages."""
    held_out = stage_dir(root, cell.questions) / "test.jsonl"
    answers = stage_dir(root, cell.predictions) / "predictions.jsonl"
    generated = stage_dir(root, cell.predictions.needs["generated"]) / "generations.jsonl"
    return Inputs(
        model=stage_dir(root, resolve_choice(root, cell.chosen)) / "model",
        stream=list(read_records(find_stream(root, graph, cell), SftRow)),
        questions={question.id: question for question in read_records(held_out, Question)},
        predictions=list(read_records(answers, Prediction)),
        generations={one.question: one for one in read_records(generated, ScoredGeneration)},
    )


def find_stream(root: Path, graph: Graph, cell: CellPlan) -> Path:
    """Return the rows that a method with the outcome score has learnt from in this run."""
    source, seed = cell.place.trained_on, cell.place.seed
    for name in graph.recipe.methods:
        if name in METHODS and METHODS[name].stream == "sampled":
            rate = graph.list_learning_rates(name)[0]
            training = graph.plan_training(source, seed, name, graph.recipe.budgets[0], rate)
            return rows_of(root, training.needs["stream"])
    raise SystemExit(f"{root}: no method of its recipe has a stream to fit the probe on, as dpo+outcome has")


def rows_of(root: Path, stream: Stage) -> Path:
    """Return the file of a stream: one row per question with votes, or rows without them."""
    folder = stage_dir(root, stream)
    with_votes = folder / "stream.jsonl"
    return with_votes if with_votes.exists() else folder / "outcome.jsonl"


# ---- the probe -------------------------------------------------------------------------------------------------------


def probe(inputs: Inputs, *, reasoning: bool, context: int) -> list[Prediction]:
    """Fit the probe on the stream and return the test answers with its confidence."""
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    model = AutoModel.from_pretrained(inputs.model, dtype=torch.float32).eval()
    labels = shared_labels(inputs)

    fitted_on = make_examples(tokenizer, inputs.stream, context)
    contexts = []
    gold = []
    for example in fitted_on:
        before = example.before_label()
        contexts.append([*before.prompt, *before.completion])
        gold.append(example.label.gold)
    classifier = fit_classifier(hidden_states(model, contexts), np.array(gold))

    tested = [label_context(tokenizer, inputs, row, reasoning=reasoning) for row in inputs.predictions]
    probabilities = classifier.predict_proba(hidden_states(model, tested))
    # A label that is the gold one of no response of the stream has no column: the probe gives it 0.
    by_label = np.zeros((len(tested), len(labels)))
    by_label[:, classifier.classes_] = probabilities
    return [with_confidence(row, labels, shares) for row, shares in zip(inputs.predictions, by_label, strict=True)]


def shared_labels(inputs: Inputs) -> tuple[str, ...]:
    """Return the labels of all questions, which must be the same: the probe has a class for each."""
    sets = {row.labels for row in inputs.stream} | {question.labels for question in inputs.questions.values()}
    if len(sets) > 1:
        raise SystemExit(f"the questions have {len(sets)} sets of labels, and a probe has one class for each label")
    return sets.pop()


def fit_classifier(states: NDArray[np.float32], gold: NDArray[np.int64]) -> Any:
    """Fit a logistic regression on standardised states; its penalty is chosen by the log loss of held-out folds.

    Args:
        states: (N, width), one for each response.
        gold: (N,), the index of the gold label.
    """
    steps = [("scale", StandardScaler()), ("regress", LogisticRegression(max_iter=5_000))]
    rarest = min(Counter(gold.tolist()).values())
    folds = StratifiedKFold(max(2, min(FOLDS, rarest)), shuffle=True, random_state=0)
    grid = {"regress__C": list(PENALTIES)}
    search = GridSearchCV(Pipeline(steps), grid, scoring="neg_log_loss", cv=folds)
    return search.fit(states, gold).best_estimator_


def label_context(tokenizer: Any, inputs: Inputs, row: Prediction, *, reasoning: bool) -> list[int]:
    """Return the tokens before the label of a test answer, those of the prompt included."""
    prompt = prompt_ids(tokenizer, render_messages(inputs.questions[row.question], reasoning=reasoning))
    return [*prompt, *find_place(tokenizer, inputs, row).ids]


def find_place(tokenizer: Any, inputs: Inputs, row: Prediction) -> LabelPosition:
    """Find where a test answer has its label, as the evaluation does.

    An answer that had to be forced is closed as in the evaluation, so that a label comes next.
    """
    question, generation = inputs.questions[row.question], inputs.generations[row.question]
    ids = generation.token_ids or ()
    texts = [option.text for option in question.options]
    found = None
    if row.source != "fallback":
        found = locate_label(tokenizer, ids, question.labels, texts, cut=generation.finish_reason == "length")
    if found is None:
        found = close_token_ids(tokenizer, ids, question.labels)
    if found is None:
        raise ValueError(f"{row.name}: no room for an answer")
    return found


def hidden_states(model: Any, contexts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the last hidden state at the last token of each context. -> (N, width).

    Contexts run one by one: padding would change the last bits, and a few thousand take minutes.
    """
    return np.stack(list(_states(model, contexts)))


def _states(model: Any, contexts: Sequence[Sequence[int]]) -> Iterator[NDArray[np.float32]]:
    with torch.inference_mode():
        for context in contexts:
            outputs = model(input_ids=torch.tensor([list(context)]))
            yield outputs.last_hidden_state[0, -1].float().numpy()


def with_confidence(row: Prediction, labels: Sequence[str], shares: NDArray[np.float64]) -> Prediction:
    """Return an answer with the probe's probability of its label; no answer keeps its confidence."""
    confidence = row.confidence
    if row.label is not None:
        confidence = float(shares[labels.index(row.label)])
    logprobs = np.log(np.maximum(shares, SMALLEST)).tolist()
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
