"""Rows of answers, whichever tool wrote them: catto, lm-evaluation-harness, inspect_ai, HELM, chat completions, uqlm.

A reader turns one record of a log into catto's own fields: question, confidence, label, gold, correct, label_logprobs.
What a log does not hold is left out. The record's own fields stay below them, so that they can be named as columns.
"""

from __future__ import annotations

import os
import re
import reprlib
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import exp, inf, isfinite, log, nan
from pathlib import Path
from typing import IO, Any, Literal

from catto.answer.response import parse_response
from catto.errors import DataError, data_errors_at, find_field, join_names, shorten_text
from catto.io.tables import Rows, check_finished, read_rows
from catto.io.text_files import MOST_JSON_BYTES, check_value_count, open_input, parse_object
from catto.records import LOGPROB_NOISE

Fields = Mapping[str, Any]
Format = Literal["auto", "catto", "lm-eval", "inspect", "helm", "openai", "uqlm"]

ZSTANDARD = 93  # the zip method that Python's zipfile knows from 3.14 on
HEADER = "header.json"  # of a log of inspect_ai
CHUNK_BYTES = 1 << 20  # of a packed file, unpacked at a time
# The scores of uqlm's scorers and ensembles that lie in 0 to 1.
UQLM_SCORES = (
    *("sequence_probability", "normalized_probability", "min_probability", "probability_margin", "p_true"),
    *("mean_token_negentropy", "min_token_negentropy", "monte_carlo_probability", "consistency_and_confidence"),
    *("semantic_negentropy", "semantic_density", "semantic_sets_confidence", "noncontradiction", "entailment"),
    *("exact_match", "cosine_sim", "bert_score", "bleurt", "ensemble_score", "avg", "median"),
)
WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}
# What inspect_ai writes for right, wrong and no answer; its "P", partly right, is neither.
INSPECT_VALUES = {"C": True, "I": False, "N": False}


@dataclass(frozen=True)
class ColumnNames:
    """Where a file holds what; `a.b` is field b inside a. `by` is the column that cuts the file into slices.

    prediction, gold None: `label` and `gold`. positive: the confidence is the probability of this label of two.
    question None: the first of QUESTION_COLUMNS that there is.
    """

    confidence: str = "confidence"
    correct: str = "correct"
    by: str | None = None
    prediction: str | None = None
    gold: str | None = None
    positive: str | None = None
    format: Format = "auto"
    length_normalised: bool = False
    question: str | None = None


def probability_of(name: str, fields: Fields) -> float:
    """Return a number in [0, 1], also from its text."""
    value = find_field(fields, name)
    try:
        number = nan if isinstance(value, bool) or (isinstance(value, str) and "_" in value) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not 0 <= number <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}{_number_hint(value, number)}")
    return number


def _number_hint(value: object, number: float) -> str:
    """Return a hint on a value that is no probability. number: what it was read as, nan if it was not."""
    text = str(value).strip()
    if not text:
        return "; leave such rows out"
    if 1 < number <= 100 or text.endswith("%"):
        return "; divide percentages by 100"
    if re.fullmatch(r"[-+]?\d*,\d+", text):
        return f"; decimal commas are not read: write {text.replace(',', '.')}"
    return ""


def truth_of(name: str, fields: Fields) -> bool:
    """Return a boolean, also from 0, 1 and the words of a CSV file."""
    value = find_field(fields, name)
    if isinstance(value, bool):
        return value
    word = WORDS.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if word is None:
        raise ValueError(f"{name}: expected true or false (or 1, 0, yes, no), got {reprlib.repr(value)}")
    return word


def text_of(name: str, fields: Fields) -> str:
    """Return the field as text; ids and labels may be written as numbers, 1 also as 1.0. An empty cell is none."""
    value = find_field(fields, name)
    if value is None or isinstance(value, dict | list | bytes) or value != value or not str(value).strip():
        raise ValueError(f"{name}: expected a text or a number, got {reprlib.repr(value)}")
    return _label(str(int(value) if isinstance(value, float) and value.is_integer() else value))


def _label(text: str) -> str:
    """A label as it is compared: without the white space around it, a whole number without its zeros."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text.strip())


def logprob_of(value: object, name: str) -> float:
    """Return a log-probability; rounding noise above 0 counts as 0.

    Args:
        value: What a file holds. Only a number is one; minus infinity is allowed.
        name: The field, for the message.

    Returns:
        A number of at most 0.

    Raises:
        ValueError: The value is a text, a boolean, NaN, or above the noise of float32.

    >>> logprob_of(1e-7, "logprob")
    0.0
    """
    expected = f"{name}: expected a log-probability of at most 0, got {reprlib.repr(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(expected)
    if not value <= LOGPROB_NOISE:  # NaN is not at most anything
        raise ValueError(expected)
    try:
        return min(float(value), 0.0)
    except OverflowError:  # a whole number of more than 308 digits
        return -inf


def logprobs_of(fields: Fields) -> dict[str, float]:
    """Return `label_logprobs`: label -> log-probability, finite and at most 0 (rounding noise counts as 0)."""
    logprobs = find_field(fields, "label_logprobs")
    if not isinstance(logprobs, dict) or not logprobs:
        raise ValueError(f"label_logprobs: expected an object label -> log-probability, got {reprlib.repr(logprobs)}")
    named: dict[str, float] = {}
    for label, value in logprobs.items():
        number = logprob_of(value, f"label_logprobs.{label}")
        if number == -inf:
            raise ValueError(f"label_logprobs.{label}: expected a finite number, got {reprlib.repr(value)}")
        named[_label(label)] = number
    if len(named) < len(logprobs):
        raise ValueError(f"label_logprobs: a label occurs twice among {', '.join(map(repr, logprobs))}")
    return named


def answer_of(name: str, fields: Fields) -> str | None:
    """Return the answer's label; None where nothing could be parsed, which is never right."""
    if name == "label" and "label" not in fields:
        logprobs = logprobs_of(fields)
        return max(logprobs, key=logprobs.__getitem__)
    value = find_field(fields, name)
    return None if value is None or (isinstance(value, str) and not value.strip()) else text_of(name, fields)


def answer_probability(name: str, fields: Fields) -> float:
    """Return the probability of the answer, the field `name`, in `label_logprobs`."""
    logprobs, answer = logprobs_of(fields), answer_of(name, fields)
    if answer not in logprobs:
        raise ValueError(f"label_logprobs: the answer {answer!r} is not one of {', '.join(logprobs)}")
    return exp(logprobs[answer])


def format_of(first: Fields, names: ColumnNames) -> str:
    """Return the tool that wrote a file with this first row; a table that has the column needs no reader."""
    if names.format != "auto":
        return names.format
    known = (name for name, (recognised, _) in READERS.items() if recognised(first))
    return "catto" if "confidence" in first else next(known, "catto")


def read_answers(path: Path, names: ColumnNames) -> Iterator[tuple[int, Fields]]:
    """Yield (row, fields) of a file of answers, whichever tool wrote it. `auto` looks at the first row."""
    rows = _samples(path) if path.suffix.lower() == ".eval" else read_rows(path)
    first = next(rows, None)
    if first is None:
        return
    name = format_of(first[1], names)
    records: Iterable[tuple[int, dict[str, Any]]] = chain([first], rows)
    if name == "catto":
        yield from records
        return
    labels: list[str] = []
    if name == "openai" and names.gold is not None:  # only the whole file says which answers there are
        records = list(records)
        labels = _labels(path, records, names.gold)
    for row, record in records:
        if name == "lm-eval" and record.get("filter") != first[1].get("filter"):
            filters = f"got {record.get('filter')!r} after {first[1].get('filter')!r}"
            raise DataError(path, row, f"filter: {filters}, expected one filter: keep the lines of one")
        try:
            yield row, ChainMap(READERS[name][1](record, names, labels), record)
        except KeyError as error:
            raise DataError(path, row, f"{error.args[0]}: missing, expected a record of {name}") from None
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
        except (TypeError, AttributeError, IndexError) as error:
            raise DataError(path, row, f"expected a record of {name}: {error}") from None


def _samples(path: Path) -> Rows:
    """Yield the samples of a log of inspect_ai: a zip file of JSON files, packed by deflate or by Zstandard."""
    with open_input(path) as file:
        try:
            with zipfile.ZipFile(file) as log:
                _check_header(path, file, log)
                number = 0
                for member in log.infolist():
                    if not member.filename.startswith("samples/"):
                        continue
                    number += 1
                    text = _unpack_member(path, number, file, log, member).decode()
                    check_value_count(path, number, text)
                    yield number, parse_object(path, number, text)
        except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, NotImplementedError) as error:
            raise DataError(path, None, f"broken zip file: {error}") from None


def _check_header(path: Path, file: IO[bytes], log: zipfile.ZipFile) -> None:
    """Refuse the log of a run that failed or did not finish; a header is written at the end of a run."""
    names = log.namelist()
    if HEADER in names:
        member = log.getinfo(HEADER)
        text = _unpack_member(path, None, file, log, member).decode()
        check_finished(path, parse_object(path, 1, text))
    elif any(name.startswith("_journal/") for name in names):
        check_finished(path, {"status": "started"})


def _unpack_member(
    path: Path, row: int | None, file: IO[bytes], log: zipfile.ZipFile, member: zipfile.ZipInfo
) -> bytes:
    """Return the content of a file of a log. Its stated sizes may be wrong: what is unpacked is counted."""
    if member.compress_type == ZSTANDARD:
        stream = _open_zstandard(path, file, member)
    elif member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = log.open(member)
    else:  # zipfile unpacks all that it has read of other methods, however much that is
        raise DataError(path, row, f"packed by method {member.compress_type}, expected deflate or Zstandard")
    content = bytearray()
    with stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                return bytes(content)
            content += chunk
            if len(content) > MOST_JSON_BYTES:
                raise DataError(path, row, f"larger than {MOST_JSON_BYTES // 2**20} MB")


def _open_zstandard(path: Path, file: IO[bytes], member: zipfile.ZipInfo) -> Any:
    """Return a stream of what a file packed by Zstandard holds."""
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(path, None, "reading this log needs pyarrow: pip install 'catto[train]'") from None
    file.seek(member.header_offset)
    header = file.read(30)  # the local header, whose last two numbers are the lengths of a name and of further fields
    if len(header) < 30:
        raise zipfile.BadZipFile("a file lies behind the end")
    name_bytes, more_bytes = struct.unpack("<HH", header[26:])
    file.seek(name_bytes + more_bytes, os.SEEK_CUR)
    packed = file.read(member.compress_size)
    return arrow.input_stream(arrow.py_buffer(packed), compression="zstd")


def lm_eval(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """A line of `samples_*.jsonl`. multiple_choice: the softmax over the choices' log-likelihoods.

    Length-normalised: each is divided by the characters of its choice first, as for the harness's `acc_norm`.
    """
    answer: dict[str, Any] = {"question": " ".join(str(record[key]) for key in ("doc_id", "doc_hash") if key in record)}
    try:  # pairs of a log-likelihood and whether it is the greedy one
        pairs = [reply if isinstance(reply, list) else [] for reply in record["filtered_resps"]]
        likelihoods = [float(score) for score, _ in pairs]
    except (TypeError, ValueError):
        if names.confidence == "confidence" and "confidence" not in record:
            raise ValueError(
                "filtered_resps holds texts, no log-likelihoods: name a confidence with --confidence"
            ) from None
        metric = next(iter(record.get("metrics") or ()), None)
        return answer | ({} if metric is None else {"correct": record[metric]})
    arguments = record["arguments"]
    requests = arguments.values() if isinstance(arguments, dict) else arguments
    requests = [tuple(request.values()) if isinstance(request, dict) else tuple(request) for request in requests]
    for likelihood in likelihoods:
        if not likelihood <= LOGPROB_NOISE:  # NaN is not at most anything
            raise ValueError(f"filtered_resps: expected a log-likelihood of at most 0, got {likelihood}")
    # An empty context asks for the choice's likelihood alone, which acc_mutual_info compares with.
    asked = [place for place, (context, _) in enumerate(requests) if context] or list(range(len(requests)))
    choices = [requests[place][1].removeprefix(" ") for place in asked]
    scores = [likelihoods[place] for place in asked]
    if names.length_normalised:
        scores = [score / max(len(choice), 1) for score, choice in zip(scores, choices, strict=True)]
    if len(scores) < 2:
        raise ValueError("filtered_resps: one log-likelihood, expected one for each of several choices")
    best = max(range(len(scores)), key=scores.__getitem__)
    if not isfinite(scores[best]):
        raise ValueError(f"filtered_resps: expected a finite log-likelihood, got {scores[best]}")
    total = log(sum(exp(score - scores[best]) for score in scores))
    logprobs = [min(score - scores[best] - total, 0.0) for score in scores]
    target, metric = str(record["target"]).strip(), "acc_norm" if names.length_normalised else "acc"
    golds = [place for place, choice in enumerate(choices) if choice.strip() == target]
    golds += [int(target)] if target.isdecimal() and int(target) < len(choices) else []
    graded = record.get(metric)
    if graded is None and not golds:
        raise ValueError(f"target: expected a choice or its number, got {reprlib.repr(target)}")
    # A number may be a choice or the place of one: the grade tells which.
    gold = next((place for place in golds if graded is None or (place == best) == (graded == 1)), None)
    answer |= {"label": str(best), "confidence": exp(logprobs[best])}
    answer["correct"] = best == gold if graded is None else graded
    answer["label_logprobs"] = {str(place): value for place, value in enumerate(logprobs) if isfinite(value)}
    return answer if gold is None else answer | {"gold": str(gold)}


def inspect_ai(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """A sample: the confidence in the score's metadata, else the probability of the answer's token.

    `--correct NAME` chooses among several scorers.
    """
    scores = record.get("scores") or {}
    if names.correct not in scores and len(scores) != 1:
        raise ValueError(
            f"scores: name one of {join_names(list(scores))} with --correct" if scores else _no_scores(record)
        )
    score = scores[names.correct if names.correct in scores else next(iter(scores))]
    value, target = score["value"], record.get("target")
    answer: dict[str, Any] = {"question": str(record["id"]), names.correct: INSPECT_VALUES.get(str(value), value)}
    if score.get("answer"):
        answer["label"] = score["answer"]
    if isinstance(target, str):
        answer["gold"] = target
    stated = (score.get("metadata") or {}).get("confidence")
    if stated is not None:
        return answer | {"confidence": stated}
    choices = record.get("choices") or ()
    labels = [chr(ord("A") + place) for place in range(len(choices))] or [str(score.get("answer"))]
    replies = record["output"]["choices"]
    tokens = ((replies[0].get("logprobs") or {}).get("content") if replies else None) or ()
    if names.confidence == "confidence" and not tokens:
        raise ValueError("neither scores hold metadata.confidence nor output.choices.0 logprobs: name a --confidence")
    return answer | (_from_tokens(tokens, labels, score.get("answer") or None) if tokens else {})


def _no_scores(sample: Fields) -> str:
    """Say why a sample of inspect_ai has no scores."""
    error = sample.get("error")
    if isinstance(error, dict) and error.get("message"):
        return f"the sample failed: {shorten_text(str(error['message']), 200)}"
    return "scores: empty"


def helm(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """An entry of `per_instance_stats.json`: every statistic by its name; `max_prob` and `exact_match` by default."""
    answer = {stat["name"]["name"]: stat.get("mean") for stat in record["stats"]}
    answer |= {"question": str(record["instance_id"]), "correct": answer.get("exact_match")}
    answer["perturbation"] = (record.get("perturbation") or {}).get("name", "none")
    if names.confidence == "confidence":
        answer["confidence"] = answer["max_prob"]
    return answer


def openai(record: Fields, names: ColumnNames, labels: Sequence[str]) -> dict[str, Any]:
    """A chat completion with `logprobs`, alone or as the response of a batch: the probability of the label's token."""
    answered = record["response"] if isinstance(record.get("response"), dict) else {}
    if record.get("error") or answered.get("status_code", 200) != 200:
        raise ValueError(f"the request failed ({reprlib.repr(record.get('error') or answered)}): leave this row out")
    reply, *others = _completion(record)["choices"]
    if others:
        raise ValueError(f"choices: expected one, got {1 + len(others)}: write a record for each")
    name = next((name for name in ("custom_id", "question", "id") if name in record), None)
    answer = {} if name is None else {"question": str(record[name])}
    if not labels:
        raise ValueError("the right answer is not in a completion: name its field with --gold")
    answer[names.gold or "gold"] = text_of(names.gold or "gold", record)
    tokens = (reply.get("logprobs") or {}).get("content")
    if not tokens:
        raise ValueError("choices.0.logprobs.content: expected tokens with log-probabilities, got none")
    text = reply["message"].get("content") or ""
    # A reply of one token ends at its limit, and is whole if it is a label.
    cut = reply.get("finish_reason") == "length" and text.strip(" \n().") not in labels
    return answer | _from_tokens(tokens, labels, parse_response(text, labels, cut=cut).label)


def uqlm(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """A row of `results.to_df()`, with the column `response_correct` that a grader added."""
    answer = {"question": record.get("prompt"), "correct": record.get("response_correct")}
    answer = {**record, **{name: value for name, value in answer.items() if value is not None}}
    if names.confidence == "confidence":
        scores = [name for name in UQLM_SCORES if name in record]
        if len(scores) != 1:
            raise ValueError(f"name one of the scores {join_names(scores)} with --confidence")
        answer["confidence"] = record[scores[0]]
    return answer


Reader = Callable[[Fields, ColumnNames, Sequence[str]], dict[str, Any]]
# How the first record shows which tool wrote it, and what reads it.
READERS: dict[str, tuple[Callable[[Fields], bool], Reader]] = {
    "lm-eval": (lambda record: {"doc_id", "filtered_resps"} <= record.keys(), lm_eval),
    "inspect": (lambda record: {"epoch", "scores", "output"} <= record.keys(), inspect_ai),
    "helm": (lambda record: {"instance_id", "stats"} <= record.keys(), helm),
    "openai": (lambda record: "choices" in _completion(record), openai),
    "uqlm": (lambda record: "response" in record and not record.keys().isdisjoint(UQLM_SCORES), uqlm),
}


def _completion(record: Fields) -> Fields:
    """Find the completion in a record: itself, or below `response`, of a batch also below its `body`."""
    for name in ("response", "body"):
        record = record[name] if isinstance(record.get(name), dict) else record
    choices = record.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return record if isinstance(first, dict) and "message" in first else {}


def _labels(path: Path, rows: list[tuple[int, dict[str, Any]]], gold: str) -> list[str]:
    """Return the labels that occur as right answers; of letters, those before them too."""
    labels = set()
    for row, record in rows:
        with data_errors_at(path, row):
            labels.add(text_of(gold, record))
    if all(len(label) == 1 and "A" <= label <= "Z" for label in labels):
        return [chr(code) for code in range(ord("A"), ord(max(labels)) + 1)]
    return sorted(labels)


def _from_tokens(tokens: Sequence[Fields], labels: Sequence[str], said: str | None) -> dict[str, Any]:
    """Return the answer `said` and its probability at the token where the reply's label begins.

    Some engines log the likeliest token where another was sampled: then `said` is looked up among `top_logprobs`. A
    reply without a label is a wrong answer of `source` fallback, with the probability of the whole reply.
    """
    texts = [token["token"] for token in tokens]
    text = "".join(texts)
    reading = parse_response(text, labels)
    if reading.span is None and said is not None:
        raise ValueError(f"logprobs: the graded answer {said!r} is not found in the reply: name a --confidence")
    if reading.span is None or reading.label is None or said is None:
        total = sum(logprob_of(token["logprob"], "logprob") for token in tokens)
        return {"label": None, "confidence": exp(total), "source": "fallback"}
    place = bisect_right(ends := list(accumulate(map(len, texts))), reading.span[0])
    token, own = tokens[place], text[reading.span[0] : min(ends[place], reading.span[1])]
    if len(labels) == 1 and reading.span[1] > ends[place]:
        raise ValueError("logprobs: an open answer of several tokens has no token of its own: name a --confidence")
    known: dict[str, float] = {}
    for top in reversed(token.get("top_logprobs") or ()):
        if top["logprob"] not in (None, -inf):  # a token that cannot be drawn
            known[top["token"].strip()] = logprob_of(top["logprob"], "top_logprobs.logprob")
    own = (own if said == reading.label else said).lower()
    # A rival that begins alike has a token of its own where a longer candidate begins it: 10 beside 1.
    longer = tuple(top.lower() for top in known if len(top) > len(own))
    rivals = (label for label in labels if label != said and label.lower().startswith(own))
    if alike := next((label for label in rivals if not label.lower().startswith(longer)), None):
        raise ValueError(f"logprobs: labels {said!r} and {alike!r} begin with the same token {own!r}")
    known[reading.label] = logprob_of(token["logprob"], "logprob")
    if said not in known:
        raise ValueError(f"logprobs: the tokens say {reading.label!r}, the answer is {said!r} and not in top_logprobs")
    answer = {"label": said, "confidence": exp(known[said]), "source": reading.source}
    whole = {"label_logprobs": {label: known[label] for label in labels}} if known.keys() >= set(labels) else {}
    return answer | whole
