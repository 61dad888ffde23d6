# ruff: noqa: E501
"""Malformed input for every command, as data: the files, the command line, and what the one line must name."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

GOOD = "".join(
    json.dumps({"id": f"q{i}", "confidence": 0.5 + i % 5 / 10, "correct": i % 3 > 0, "task": "t"}) + "\n"
    for i in range(40)
)
PREDICTION: dict[str, Any] = {
    "question": "q",
    "task": "t",
    "split": "test",
    "gold": "A",
    "sample": 0,
    "text": "",
    "label": "A",
    "source": "free",
    "confidence": 0.8,
    "temperature": 1.0,
    "seed": 0,
    "engine": "e",
    "model": "m",
}
BASE: dict[str, Any] = {
    "name": "one",
    "tasks": {"witnesses": None},
    "model": {"scratch": {"layers": 1}},
    "teacher": {"source": "witnesses"},
}
RECIPE = yaml.safe_dump(BASE)
OWN = "".join(json.dumps({"stem": f"Q{i}?", "choices": ["red", "blue"], "key": "A"}) + "\n" for i in range(60))
FIELDS = ("--fields", "question=stem,options=choices,answer=key")
TAU = json.dumps({"schema_version": 1, "kind": "temperature", "tau": 2.0})
FIFO, FOLDER = object(), object()
DEEP = "[" * 5000 + "]" * 5000


@dataclass(frozen=True)
class Case:
    """`told`: what the line must hold. files: name -> content, FIFO or FOLDER."""

    name: str
    arguments: tuple[str, ...]
    told: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        for name, content in {**COMMON, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is FIFO:
                os.mkfifo(path)
            elif content is FOLDER:
                path.mkdir()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())


COMMON: dict[str, Any] = {
    "good.jsonl": GOOD,
    "one.yaml": RECIPE,
    "own.jsonl": OWN,
    "tau.json": TAU,
    "empty.model/config.json": "{}",
    "samples.jsonl": "".join(
        json.dumps({**PREDICTION, "question": f"q{i}", "sample": k}) + "\n" for i in range(3) for k in range(2)
    ),
}


def measured() -> Iterable[Case]:
    """Answers in every broken form that a file of rows can have."""
    row = '{"confidence": 0.5, "correct": true}\n'
    files: list[tuple[str, str, Any, tuple[str, ...]]] = [
        ("empty", "a.jsonl", "", ("a.jsonl: has no rows",)),
        ("blank lines", "a.jsonl", "\n \n\n", ("has no rows",)),
        ("empty csv", "a.csv", "", ("a.csv: has no rows",)),
        ("header alone", "a.csv", "confidence,correct\n", ("has no rows",)),
        ("empty json", "a.json", "", ("a.json: not JSON",)),
        ("empty json list", "a.json", "[]", ("has no rows",)),
        ("no rows in json", "a.json", '{"rows": []}', ("expected a JSON list",)),
        ("a number", "a.json", "3", ("expected a JSON list",)),
        ("rows of json are lists", "a.json", "[[1]]", ("a.json row 1: expected a JSON object, got list",)),
        ("json lines named csv", "a.csv", row, ("a.csv: contains JSON", "named .jsonl")),
        ("json list named csv", "a.csv", f"[{row.strip()}]", ("a.csv: contains JSON",)),
        ("csv named jsonl", "a.jsonl", "confidence,correct\n0.5,1\n", ("a.jsonl row 1: not JSON", "named .csv")),
        ("json list named jsonl", "a.jsonl", f"[{row.strip()}]", ("row 1: expected a JSON object", "named .json")),
        ("semicolons", "a.csv", "confidence;correct\n0,5;1\n", ("a.csv row 1: confidence: expected a number in [0, 1], got '0,5'",)),
        ("too few after tabs", "a.tsv", "confidence\tcorrect\n0.5\n", ("a.tsv row 1: expected 2 columns (confidence, correct), got 1",)),
        ("too many after bars", "a.csv", "confidence|correct\n0.5|1|2\n", ("a.csv row 1: expected 2 columns", "got 3")),
        ("repeated column", "a.csv", "confidence,correct,correct\n0.5,1,0\n", ("column 'correct' occurs twice",)),
        ("repeated key", "a.jsonl", '{"confidence": 1, "correct": 1, "confidence": 0}\n',
         ("a.jsonl row 1: key 'confidence' occurs twice",)),
        ("repeated inner key", "a.jsonl", '{"gold": "A", "label_logprobs": {"A": -1, "A": -2}}\n',
         ("row 1: key 'A' occurs twice",)),
        ("repeated key in a list", "a.json", '[{"confidence": 1, "correct": 1, "correct": 0}]', ("key 'correct' occurs twice",)),
        ("too few cells", "a.csv", "confidence,correct\n0.5\n", ("row 1: expected 2 columns (confidence, correct), got 1",)),
        ("too many cells", "a.csv", "confidence,correct\n0.5,1\n0.5,1,2\n", ("row 2: expected 2 columns", "got 3")),
        ("open quote", "a.csv", 'confidence,correct\n"0.5,1\n', ("row 1: not CSV",)),
        ("a quote inside", "a.csv", 'confidence,correct\n"0"5,1\n', ("row 1: not CSV",)),
        ("deep line", "a.jsonl", '{"confidence": 0.5, "correct": true, "x": ' + DEEP + "}\n", ("a.jsonl row 1", "deep")),
        ("deep json", "a.json", DEEP, ("a.json", "deep")),
        ("depth that only the parser takes", "a.jsonl", '{"x": ' + "[" * 300 + "]" * 300 + "}\n", ("row 1", "deep")),
        ("deep objects", "a.jsonl", '{"x": ' * 5000 + "1" + "}" * 5000 + "\n", ("row 1", "deep")),
        ("5,000 digits", "a.jsonl", f'{{"confidence": {"1" * 5000}, "correct": 1}}\n', ("row 1: a whole number with more digits than can be read",)),
        ("400 digits", "a.jsonl", f'{{"confidence": {"1" * 400}, "correct": 1}}\n', ("row 1: confidence: expected a number in [0, 1]",)),
        ("5,000 digits in csv", "a.csv", f"confidence,correct\n{'1' * 5000},1\n", ("row 1: confidence: expected a number in [0, 1]",)),
        ("nan", "a.jsonl", '{"confidence": NaN, "correct": true}\n', ("row 1: confidence: expected a number in [0, 1], got nan",)),
        ("infinity", "a.jsonl", '{"confidence": Infinity, "correct": true}\n', ("row 1: confidence: expected",)),
        ("nan in csv", "a.csv", "confidence,correct\nnan,1\n", ("row 1: confidence: expected",)),
        ("per cent", "a.csv", "confidence,correct\n87,1\n", ("row 1: confidence", "divide percentages by 100")),
        ("decimal comma", "a.csv", 'confidence,correct\n"0,5",1\n', ("row 1: confidence: expected a number in [0, 1], got '0,5'",)),
        ("negative", "a.jsonl", '{"confidence": -0.1, "correct": true}\n', ("row 1: confidence: expected",)),
        ("null", "a.jsonl", '{"confidence": null, "correct": true}\n', ("row 1: confidence: expected", "None")),
        ("true as confidence", "a.jsonl", '{"confidence": true, "correct": true}\n', ("row 1: confidence: expected",)),
        ("a list as confidence", "a.jsonl", '{"confidence": [0.5], "correct": true}\n', ("row 1: confidence: expected",)),
        ("megabytes as confidence", "a.jsonl", f'{{"confidence": "{"x" * 3_000_000}", "correct": true}}\n', ("row 1: confidence: expected",)),
        ("correct is maybe", "a.jsonl", '{"confidence": 0.5, "correct": "maybe"}\n', ("row 1: correct: expected true or false",)),
        ("correct is 2", "a.csv", "confidence,correct\n0.5,2\n", ("row 1: correct: expected true or false",)),
        ("correct is gone", "a.jsonl", row + '{"confidence": 0.5}\n', ("row 2: correct: missing",)),
        ("confidence is gone", "a.jsonl", row + '{"correct": true}\n', ("row 2: confidence: missing",)),
        ("neither column", "a.jsonl", '{"a": 1}\n', ("row 1: no column 'confidence'",)),
        ("many columns", "a.jsonl", json.dumps({f"column{i}": i for i in range(20_000)}) + "\n", ("row 1: no column 'confidence'",)),
        ("gold without label", "a.jsonl", '{"confidence": 0.5, "gold": "A"}\n', ("no column 'correct'",)),
        ("gold is an object", "a.jsonl", '{"confidence": 0.5, "label": "A", "gold": {}}\n', ("row 1: gold: expected a text",)),
        ("logprobs are a list", "a.jsonl", '{"gold": "A", "label_logprobs": [1]}\n', ("row 1: label_logprobs: expected an object",)),
        ("logprobs are empty", "a.jsonl", '{"gold": "A", "label_logprobs": {}}\n', ("row 1: label_logprobs: expected an object",)),
        ("logprob above 0", "a.jsonl", '{"gold": "A", "label_logprobs": {"A": 0.5}}\n', ("row 1: label_logprobs.A: expected",)),
        ("logprob -inf", "a.jsonl", '{"gold": "A", "label_logprobs": {"A": -Infinity}}\n', ("row 1: label_logprobs.A: expected a finite",)),
        ("logprob is text", "a.jsonl", '{"gold": "A", "label_logprobs": {"A": "-1"}}\n', ("row 1: label_logprobs.A: expected",)),
        ("not an object", "a.jsonl", row + "[1]\n", ("row 2: expected a JSON object, got list",)),
        ("cut in the middle", "a.jsonl", row + '{"confidence": 0.', ("row 2: not JSON",)),
        ("single quotes", "a.jsonl", "{'confidence': 0.5}\n", ("row 1: not JSON",)),
        ("two objects on a line", "a.jsonl", row.strip() + row, ("row 1: not JSON: Extra data",)),
        ("latin-1", "a.jsonl", '{"id": "é", "confidence": 1}\n'.encode("latin-1"), ("row 1: not UTF-8 at byte 8",)),
        ("latin-1 csv", "a.csv", "confidence,é\n".encode("latin-1"), ("line 1: not UTF-8 at byte 11",)),
        ("utf-16", "a.jsonl", row.encode("utf-16"), ("a.jsonl row 1", "UTF-16")),
        ("utf-16 csv", "a.csv", "confidence,correct\n".encode("utf-16"), ("a.csv: line 1", "UTF-16")),
        ("nul bytes", "a.jsonl", row.encode() + b"\0" * 100, ("a.jsonl row 2: contains a NUL byte",)),
        ("nul bytes in csv", "a.csv", b"confidence,correct\n0.5,\x001\n", ("line 2: contains a NUL byte",)),
        ("half a surrogate pair", "a.jsonl", '{"id": "\\ud800", "confidence": 1, "correct": 1}\n', ("row 1: text is not valid Unicode",)),
        ("no gzip", "a.jsonl.gz", row, ("a.jsonl.gz: broken gzip file",)),
        ("torn gzip", "a.jsonl.gz", gzip.compress(row.encode() * 1000)[:-20], ("a.jsonl.gz: broken gzip file",)),
        ("no parquet", "a.parquet", b"PAR1 nothing PAR1", ("a.parquet: not Parquet",)),
        ("long line", "a.jsonl", b'{"id": "' + b"x" * (17 * 2**20), ("row 1: line is longer than 16 MB",)),
        ("another kind of file", "a.txt", "x", ("a.txt: expected a file that ends in .jsonl",)),
        ("a folder without a suffix", "eval", FOLDER, ("eval: expected a file, got a folder",)),
        ("a folder", "a.jsonl", FOLDER, ("a.jsonl: expected a file, got a folder",)),
        ("a pipe", "a.jsonl", FIFO, ("a.jsonl: expected a file, got a pipe",)),
        ("a pipe as json", "a.json", FIFO, ("a.json: expected a file, got a pipe",)),
        ("a pipe as csv", "a.csv", FIFO, ("a.csv: expected a file, got a pipe",)),
    ]  # fmt: skip
    for name, file, content, told in files:
        yield Case(f"measure: {name}", ("measure", file), told, {file: content})
    many = "".join(json.dumps({"id": i, "confidence": 0.5, "correct": i % 2}) + "\n" for i in range(1000))
    options: list[tuple[tuple[str, ...], str]] = [
        (("--bins", "1000000000"), "--bins"),
        (("--bins", "0"), "--bins"),
        (("--bins", "-3"), "--bins"),
        (("--bins", "2.5"), "--bins"),
        (("--bins", "many"), "--bins"),
        (("--resamples", "0"), "--resamples"),
        (("--resamples", "1000000000000"), "--resamples"),
        (("--level", "nan"), "--level"),
        (("--level", "0"), "--level"),
        (("--level", "95"), "--level"),
        (("--seed", "-1"), "--seed"),
        (("--seed", "1" + "0" * 400), "--seed"),
        (("--metrics", "ecee"), "did you mean ece?"),
        (("--metrics", ""), "no metric named"),
        (("--by", "tusk"), "no column 'tusk'; did you mean task?"),
        (("--method", "bootstrap"), "--method"),
        (("--unparsed", "wrong"), "no column 'source'"),
        (("--figure", "f.gif"), "must end in .svg, .png, .pdf"),
        (("--figure", "good.jsonl/f.svg"), "good.jsonl: not a folder"),
        (("--figure", "folder.svg"), "folder.svg is a folder"),
        (("--compare", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--compare", "samples.jsonl"), "samples.jsonl"),
        (("--bin", "15"), "No such option"),
        (("--figure",), "--figure"),
    ]
    for given, word in options:
        files_of = {"folder.svg": FOLDER} if "folder.svg" in given else {}
        yield Case(f"measure {' '.join(given)[:40]}", ("measure", "good.jsonl", *given), (word,), files_of)
    yield Case(
        "measure --by an id",
        ("measure", "many.jsonl", "--by", "id"),
        ("--by: 1,000 different values",),
        {"many.jsonl": many},
    )
    for path, told in (("/dev/zero.jsonl", "No such file"), ("nowhere.jsonl", "nowhere.jsonl: No such file"),
                       ("nowhere", "nowhere: No such file"), (".", ".: expected a file, got a folder"),
                       ("x" * 300 + ".jsonl", "File name too long")):  # fmt: skip
        yield Case(f"measure {path[:30]}", ("measure", path), (told,))


def recipes() -> Iterable[Case]:
    """Recipes, as `catto plan` reads them."""
    texts: list[tuple[str, Any, tuple[str, ...]]] = [
        ("empty", "", ("r.yaml: expected a mapping",)),
        ("a list", "- a\n", ("expected a mapping",)),
        ("5,000 levels", RECIPE + "x: " + DEEP, ("nested too deeply",)),
        ("unknown alias", "a: *b\n", ("line 1", "undefined alias")),
        ("nan", RECIPE + "context: .nan", ("context: expected a finite number", "got nan")),
        ("inf", RECIPE + "context: .inf", ("context: expected a finite number", "got inf")),
        ("nan inside", RECIPE + "sft: {trl: {warmup_ratio: [.nan]}}", ("sft.trl.warmup_ratio.0: expected a finite number",)),
        ("a rate beyond floats", RECIPE + "sft: {learning_rates: [1e999]}", ("sft.learning_rates.0: expected a finite number",)),
        ("a date", RECIPE + "train_on: 2001-01-01", ("train_on: expected a text", "got a date")),
        ("bytes", RECIPE + "train_on: !!binary aGk=", ("train_on: expected a text", "got a bytes")),
        ("a tag of Python", RECIPE + "x: !!python/object:os.system {}", ("line 9", "could not determine a constructor")),
        ("a number as key", RECIPE + "1: 2", ("key 1: expected a text",)),
        ("repeated key", RECIPE + "name: two", ("key 'name' occurs twice",)),
        ("repeated inner key", RECIPE + "sft: {rows: 1, rows: 2}", ("key 'rows' occurs twice",)),
        ("two documents", RECIPE + "---\nname: two\n", ("line 9", "another document")),
        ("open list", "name: [a\n", ("r.yaml: line 2",)),
        ("tab", "\tname: a\n", ("line 1", "cannot start any token")),
        ("two colons", "a: b: c\n", ("line 1", "mapping values are not allowed")),
        ("nul", "name: a\0b\n", ("r.yaml: ", "special characters are not allowed")),
        ("latin-1", b"name: \xe9\n", ("r.yaml: not UTF-8 at byte 6",)),
        ("too large", "# " + "x" * 2**21, ("r.yaml: larger than 1 MB",)),
        ("a folder", FOLDER, ("r.yaml: expected a file, got a folder",)),
        ("a pipe", FIFO, ("r.yaml: expected a file, got a pipe",)),
    ]  # fmt: skip
    for name, text, told in texts:
        yield Case(f"recipe: {name}", ("plan", "r.yaml"), told, {"r.yaml": text})
    changes: list[tuple[dict[str, Any], str]] = [
        ({"evaluaton": {}}, "evaluaton: unknown key; did you mean evaluation?"),
        ({"evaluation": {"bin": 1}}, "evaluation.bin: unknown key; did you mean bins?"),
        ({"evaluation": 7}, "evaluation: expected a block of names and values, got 7"),
        ({"evaluation": []}, "evaluation: expected a block of names and values, got []"),
        ({"evaluation": {"bins": "many"}}, "evaluation.bins: expected a whole number, got 'many'"),
        ({"evaluation": {"bins": 1.5}}, "evaluation.bins: expected a whole number, got 1.5"),
        ({"evaluation": {"bins": 10**9}}, "evaluation.bins: expected a number of at most 10000"),
        ({"evaluation": {"resamples": 10**9}}, "evaluation.resamples: expected a number of at most 100000"),
        ({"evaluation": {"k": [10**9]}}, "evaluation.k.0: expected a number of at most 1024, got 1000000000"),
        ({"evaluation": {"k": 4}}, "evaluation.k: expected a list, got 4"),
        ({"evaluation": {"engine": "torch"}}, "evaluation.engine: expected transformers or vllm, got 'torch'"),
        ({"evaluation": {"bins": list(range(5_000))}}, "evaluation.bins: expected a whole number, got [0, 1, 2"),
        ({"evaluation": {"bins": "x" * 500_000}}, "evaluation.bins: expected a whole number, got 'xxx"),
        ({"model": None}, "model: expected a block of names and values, got None"),
        ({"model": {}}, "model: name exactly one of path"),
        ({"model": {"scratch": {"layers": 0}}}, "model.scratch.layers: expected a number of at least 1, got 0"),
        ({"model": {"path": 7}}, "model.path: expected a text, got 7"),
        ({"name": "../escaped"}, "name: recipe name '../escaped': expected letters, digits and ._-"),
        ({"name": ".."}, "not dots alone"),
        ({"name": "x" * 65}, "at most 64"),
        ({"name": "a b"}, "name: recipe name 'a b': expected letters"),
        ({"name": ""}, "name: recipe name ''"),
        ({"name": 5}, "name: expected a text, got 5"),
        ({"tasks": {"x/../../escaped": {"path": "own.jsonl"}}}, "tasks.x/../../escaped: task name 'x/../../escaped': expected letters"),
        ({"tasks": {"..": {"path": "own.jsonl"}}}, "tasks...: task name '..'"),
        ({"tasks": {"two words": {"path": "own.jsonl"}}}, "tasks.two words: task name 'two words'"),
        ({"tasks": {"=cmd": {"path": "own.jsonl"}}}, "tasks.=cmd: task name '=cmd'"),
        ({"tasks": {"line\nbreak": {"path": "own.jsonl"}}}, "task name 'line"),
        ({"tasks": []}, "tasks: expected a block of names and values, got []"),
        ({"tasks": {"witnesses": 5}}, "tasks.witnesses: expected a block of names and values, got 5"),
        ({"tasks": {"witness": None}}, "tasks.witness: neither one of mmlu, snli"),
        ({"tasks": {"snli": {"files": {"train": 5}}}}, "tasks.snli.files.train: expected a text or a list, got 5"),
        ({"tasks": {"snli": {"files": {"dev": "x"}}}}, "tasks.snli.files.dev: expected train, validation or test as the key"),
        ({"methods": ["sft", "dpo+cato"]}, "methods: 'dpo+cato' is not one of"),
        ({"methods": "sft"}, "methods: expected a list, got 'sft'"),
        ({"seeds": 3}, "seeds: expected a list, got 3"),
        ({"seeds": ["a"]}, "seeds.0: expected a whole number, got 'a'"),
        ({"small_pairs": True}, "small_pairs: expected a number, got true"),
        ({"seeds": [0, True]}, "seeds: expected a number, got true"),
        ({"sft": {"learning_rates": [False]}}, "sft.learning_rates: expected a number, got false"),
        ({"evaluation": {"k": [True]}}, "evaluation.k: expected a number, got true"),
        ({"tasks": {"witnesses": {"reliabilities": [0.5, True]}}}, "tasks.witnesses.reliabilities: expected a number, got true"),
        ({"evaluation": {"bins": True}}, "evaluation.bins: expected a number, got true"),
        ({"keep": False}, "keep: expected last, val_accuracy, val_nll or val_ece, got False"),
        ({"prefix_sharing": 7}, "prefix_sharing: expected true or false, got 7"),
        ({"teacher": {"source": "server"}}, "teacher: model: needed for source server"),
        ({"teacher": {"source": "witnesses", "temperature": [1, 2, 3]}}, "teacher.temperature: expected at most 2 entries"),
        ({"teacher": {"source": "witnesses", "temperature": 1}}, "teacher.temperature: expected a list, got 1"),
    ]  # fmt: skip
    for number, (change, word) in enumerate(changes):
        text = yaml.safe_dump({**BASE, **change})
        yield Case(f"recipe change {number}: {word[:40]}", ("plan", "r.yaml"), ("r.yaml: ", word), {"r.yaml": text})


def overrides() -> Iterable[Case]:
    """`--set`: the shipped recipe is never blamed."""
    for text, told in [
        ("evaluation.bins", "--set evaluation.bins: expected place=value"),
        ("=5", "--set =5: expected place=value"),
        ("evaluation.bins=x", "--set evaluation.bins=x: evaluation.bins: expected a whole number, got 'x'"),
        ("evaluation={bins: x}", "--set evaluation={bins: x}: evaluation.bins: expected a whole number"),
        ("evaluation.bin=5", "--set evaluation.bin=5: evaluation.bin: unknown key; did you mean bins?"),
        ("evaluation.bins=[", "--set evaluation.bins=[: line 1"),
        ("evaluation.bins=.nan", "--set evaluation.bins=.nan: expected a finite number"),
        ("sft={rows: 1, rows: 2}", "key 'rows' occurs twice"),
        ("seeds=[0, 0]", "--set seeds=[0, 0]: seeds: one value occurs twice"),
        ("methods=[dpo]", "--set methods=[dpo]: methods: dpo starts from sft"),
        ("train_on=snli", "--set train_on=snli: train_on: 'snli' is not among the tasks"),
        ("tasks={snlii: }", "--set tasks={snlii: }: tasks.snlii: neither one of"),
        ("tasks.a/b.path=own.jsonl", "--set tasks.a/b.path=own.jsonl: tasks.a/b: task name 'a/b'"),
        ("name=a/b", "--set name=a/b: name: recipe name 'a/b'"),
        ("name.x=5", "--set name.x=5: name: expected a text"),
        ("model.path=x", "--set model.path=x: model: name exactly one of path"),
        ("teacher.temperature=[2, 1]", "--set teacher.temperature=[2, 1]: teacher: temperature: expected 0 <= low <= high"),
        ("context=" + "9" * 100_000, "--set context=999"),
    ]:  # fmt: skip
        yield Case(f"--set {text[:40]}", ("plan", "quickstart", "--set", text), (told,))
    both = ("plan", "quickstart", "--set", "evaluation.bins=15", "--set", "evaluation.k=[0]")
    yield Case("--set: the second of two", both, ("catto: --set evaluation.k=[0]: evaluation.k.0: expected",))
    yield Case("--set: a broken file stays to blame", ("plan", "r.yaml", "--set", "evaluation.bins=15"),
               ("r.yaml: seeds: expected a list",), {"r.yaml": RECIPE + "seeds: 3"})  # fmt: skip


def calibrated() -> Iterable[Case]:
    """`calibrate fit` and `calibrate apply`."""
    right = "".join(json.dumps({"confidence": 0.9, "correct": True}) + "\n" for _ in range(50))
    fits: list[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
        ("one row", ("a.jsonl", "--out", "c.json"), ("a.jsonl: all 1 answers are right",), {"a.jsonl": right.splitlines()[0]}),
        ("all right", ("a.jsonl", "--out", "c.json"), ("a.jsonl: all 50 answers are right",), {"a.jsonl": right}),
        ("all wrong", ("a.jsonl", "--out", "c.json", "--method", "isotonic"), ("all 50 answers are wrong",),
         {"a.jsonl": right.replace("true", "false")}),
        ("no labels", ("good.jsonl", "--on", "labels", "--out", "c.json"), ("row 1: label_logprobs: missing",), {}),
        ("labels with platt", ("good.jsonl", "--on", "labels", "--method", "platt", "--out", "c.json"), ("--on labels",), {}),
        ("unknown method", ("good.jsonl", "--method", "plat", "--out", "c.json"), ("--method",), {}),
        ("no --out", ("good.jsonl",), ("--out",), {}),
        ("--out without .json", ("good.jsonl", "--out", "c.pkl"), ("--out: c.pkl must end in .json",), {}),
        ("--out in a file", ("good.jsonl", "--out", "good.jsonl/c.json"), ("good.jsonl: not a folder",), {}),
        ("--out is a folder", ("good.jsonl", "--out", "c.json"), ("--out: c.json is a folder",), {"c.json": FOLDER}),
        ("--out is the input", ("a.json", "--out", "a.json"), ("a.json: is the input",),
         {"a.json": json.dumps([json.loads(line) for line in GOOD.splitlines()])}),
        ("--out is a pipe", ("good.jsonl", "--out", "c.json"), ("c.json is not a regular file",), {"c.json": FIFO}),
    ]  # fmt: skip
    for name, arguments, told, files in fits:
        yield Case(f"fit: {name}", ("calibrate", "fit", *arguments), told, files)
    bad: list[tuple[str, Any, str]] = [
        ("empty", "", "c.json: not JSON"),
        ("a list", "[]", "expected a block of names and values, got []"),
        ("deep", DEEP, "deep"),
        ("repeated key", TAU.replace("{", '{"tau": 1.0, '), "key 'tau' occurs twice"),
        ("another version", TAU.replace('version": 1', 'version": 9'), "schema_version is 9, this catto reads 1"),
        ("unknown kind", TAU.replace("temperature", "temp"), "kind: expected temperature, platt, isotonic, histogram, vector, got 'temp'"),
        ("a list as kind", TAU.replace('"temperature"', "[]"), "kind: expected temperature, platt, isotonic, histogram, vector, got []"),
        ("tau 0", TAU.replace("2.0", "0"), "tau: expected a number of at least 1e-09, got 0"),
        ("tau nan", TAU.replace("2.0", "NaN"), "tau: expected a finite number, got nan"),
        ("tau text", TAU.replace("2.0", '"2"'), "tau: expected a number, got '2'"),
        ("tau of 400 digits", TAU.replace("2.0", "1" * 400), "tau: expected a number"),
        ("tau that overflows", TAU.replace("2.0", "1e-300"), "tau: expected a number of at least 1e-09, got 1e-300"),
        ("no version", '{"kind": "temperature", "tau": 2.0}', "schema_version is None, this catto reads 1"),
        ("no tau", '{"schema_version": 1, "kind": "temperature"}', "tau: missing"),
        ("values above 1", '{"schema_version": 1, "kind": "histogram", "values": [0.5, 1.5]}', "values.1: expected a number of at most 1, got 1.5"),
        ("knots that fall", '{"schema_version": 1, "kind": "isotonic", "knots": [0.9, 0.1], "values": [0, 1]}', "must not decrease"),
        ("unequal knots", '{"schema_version": 1, "kind": "isotonic", "knots": [0.9], "values": [0, 1]}', "1 knots and 2 values"),
        ("slope beyond floats", '{"schema_version": 1, "kind": "platt", "slope": 1e300, "intercept": 0}', "slope: expected a number of at most 1000000000, got 1e+300"),
        ("a folder", FOLDER, "c.json: expected a file, got a folder"),
    ]  # fmt: skip
    for name, content, word in bad:
        arguments = ("calibrate", "apply", "c.json", "good.jsonl", "--on", "confidence", "--out", "n.jsonl")
        yield Case(f"apply: calibrator {name}", arguments, ("c.json: ", word), {"c.json": content})
    done = '{"confidence": 0.5, "confidence_raw": 0.6}\n'
    manifest = {"kind": "calibrator", "counts": {}}
    rest: list[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
        ("twice", ("tau.json", "a.jsonl", "--on", "confidence", "--out", "n.jsonl"),
         ("a.jsonl row 1: confidence_raw: already there",), {"a.jsonl": done}),
        ("in place", ("tau.json", "good.jsonl", "--on", "confidence", "--out", "good.jsonl"), ("good.jsonl: is the input",), {}),
        ("no manifest", ("tau.json", "good.jsonl", "--out", "n.jsonl"), ("copy it next to the calibrator too",), {}),
        ("broken manifest", ("tau.json", "good.jsonl", "--out", "n.jsonl"), ("tau.json.manifest.json: not JSON",),
         {"tau.json.manifest.json": "{"}),
        ("foreign manifest", ("tau.json", "good.jsonl", "--out", "n.jsonl"), ("notes.on: expected confidence or labels",),
         {"tau.json.manifest.json": json.dumps({**manifest, "notes": {"on": "x"}})}),
        ("manifest with other questions", ("tau.json", "good.jsonl", "--out", "n.jsonl"), ("notes.questions: expected a list",),
         {"tau.json.manifest.json": json.dumps({**manifest, "notes": {"on": "confidence", "questions": 5}})}),
        ("labels without labels", ("tau.json", "good.jsonl", "--on", "labels", "--out", "n.jsonl"), ("row 1: label_logprobs: missing",), {}),
        ("nan in another column", ("tau.json", "a.jsonl", "--on", "confidence", "--out", "n.jsonl"),
         ("a.jsonl row 1: a value cannot be written as JSON",), {"a.jsonl": '{"confidence": 0.5, "x": NaN}\n'}),
        ("--out without .jsonl", ("tau.json", "good.jsonl", "--on", "confidence", "--out", "n.csv"), ("must end in .jsonl",), {}),
        ("no rows", ("tau.json", "a.jsonl", "--on", "confidence", "--out", "n.jsonl"), ("a.jsonl: has no rows",), {"a.jsonl": ""}),
        ("no calibrator", ("none.json", "good.jsonl", "--out", "n.jsonl"), ("none.json: No such file",), {}),
    ]  # fmt: skip
    for name, arguments, told, files in rest:
        yield Case(f"apply: {name}", ("calibrate", "apply", *arguments), told, files)


def selected() -> Iterable[Case]:
    """`select`."""

    def line(**changes: Any) -> str:
        return json.dumps({**PREDICTION, **changes}) + "\n"

    files: list[tuple[str, Any, str]] = [
        ("empty", "", "no predictions to select from"),
        ("an unknown field", line(more=1), "row 1: more: unknown key"),
        ("a missing field", '{"question": "q"}\n', "row 1: task: missing"),
        ("a repeated field", line().replace('"seed": 0', '"seed": 0, "seed": 1'), "row 1: key 'seed' occurs twice"),
        ("confidence 2", line(confidence=2), "row 1: confidence: expected a number of at most 1, got 2"),
        ("confidence nan", line().replace("0.8", "NaN"), "row 1: confidence: expected"),
        ("another split", line(split="dev"), "row 1: split: expected train, validation or test, got 'dev'"),
        ("another source", line(source=None), "row 1: source: expected free, plain, fallback or none, got None"),
        ("sample -1", line(sample=-1), "row 1: sample: expected a number of at least 0, got -1"),
        ("a sample twice", line() * 2, "question q has a sample twice"),
        ("unequal samples", line() + line(question="p") + line(sample=1), "samples"),
        ("two golds", line() + line(sample=1, gold="B"), "question q has two gold labels"),
        ("label a number", line(label=5), "row 1: label: expected a text, got 5"),
        ("deep", '{"question": ' + DEEP + "}\n", "row 1"),
        ("half a surrogate pair", line(text="\ud800"), "row 1: text is not valid Unicode"),
    ]  # fmt: skip
    for name, content, word in files:
        yield Case(f"select: {name}", ("select", "a.jsonl", "--k", "1"), ("a.jsonl", word), {"a.jsonl": content})
    for given, word in [
        (("--k", "0"), "--k"),
        (("--k", "3"), "k is 3, there are 2 samples"),
        (("--k", "1000000000"), "--k"),
        (("--k", "1", "--tau", "0"), "--tau"),
        (("--k", "1", "--tau", "-1"), "--tau"),
        (("--k", "1", "--tau", "nan"), "--tau"),
        (("--k", "1", "--tau", "2"), "has no logsumexp"),
        ((), "--k"),
    ]:
        yield Case(f"select {' '.join(given)}", ("select", "samples.jsonl", *given), (word,))
    for path in (".", "/"):
        yield Case(f"select {path}", ("select", path, "--k", "1"), (f"{path}: expected a file, got a folder",))


def tasks() -> Iterable[Case]:
    """`data`."""

    def row(**changes: Any) -> str:
        return json.dumps({"stem": "Q?", "choices": ["red", "blue"], "key": "A", **changes}) + "\n"

    for name, content, word in [
        ("a list is a text", row(choices="red"), "row 1: choices: expected a list of texts"),
        ("one option", row(choices=["red"]), "row 1: choices: expected 2 to 26 options, got 1"),
        ("an answer that is none", row(key="C"), "row 1: key 'C' is not one of A, B"),
        ("no answer", row(key=None), "row 1: key: missing"),
        ("an empty question", row(stem=" "), "row 1: stem is empty"),
        ("a number as question", row(stem=5), "row 1: stem: expected text, got int"),
        ("half a surrogate pair", row(stem="\ud800"), "row 1: text is not valid Unicode"),
        ("a repeated key", row().replace('"key"', '"stem": "x", "key"'), "row 1: key 'stem' occurs twice"),
        ("a pipe", FIFO, "no such file"),
        ("a folder", FOLDER, "expected a file, got a folder"),
    ]:  # fmt: skip
        yield Case(
            f"data: {name}", ("data", "mine", "--file", "a.jsonl", *FIELDS), ("a.jsonl", word), {"a.jsonl": content}
        )
    own = ("--file", "own.jsonl")
    for arguments, word in [
        (("snl",), "did you mean snli?"),
        (("snli", "--data-dir", "nowhere"), "nowhere: no such folder"),
        (("snli", "--data-dir", "good.jsonl"), "good.jsonl: no such folder"),
        (("snli", "--data-dir", "empty.model"), "empty.model: no file for snli here"),
        (("witnesses", "--seed", "-1"), "--seed"),
        (("witnesses", "--n", "-1"), "--n"),
        (("witnesses", "--split", "dev"), "--split"),
        (("mine", *own, "--fields", "question=stem"), "fields: answer is missing"),
        (("mine", "--file", "good.jsonl"), "good.jsonl: no answer field among"),
        (("mine", *own, "--fields", "question"), "--fields: question: expected name=column"),
        (("mine", *own, "--fields", "question=stem,options=choices,answr=key"), "fields: 'answr' is not one of"),
        (("mine", *own, "--fields", "question=stm,options=choices,answer=key"), "own.jsonl row 1: stm: missing"),
        (("../mine", *own, *FIELDS), "task name '../mine': expected letters"),
        (("mine", "--file", "nowhere.jsonl", *FIELDS), "nowhere.jsonl: no such file"),
        (("mine", "--file", ".", *FIELDS), ".: expected a file, got a folder"),
        (("mine", "--file", "", *FIELDS), ".: expected a file, got a folder"),
    ]:
        yield Case(f"data {' '.join(arguments)[:50]}", ("data", *arguments), (word,))


def evaluated() -> Iterable[Case]:
    """`eval`: all of it is told before torch is imported."""
    model, task = "empty.model", ("--task", "witnesses", "--n", "2")
    notes = {"kind": "predictions", "counts": {}, "notes": {"k": 4, "temperature": 1.0}}
    cases: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
        ("no such folder", ("./nowhere/model", *task), "./nowhere/model: no such folder, and not a hub id", {}),
        ("a place with blanks", ("my model", *task), "my model: no such folder, and not a hub id", {}),
        ("three parts", ("a/b/c", *task), "a/b/c: no such folder, and not a hub id", {}),
        ("an empty name", ("", *task), "expected a folder with a model or a hub id, got an empty name", {}),
        ("a file", ("good.jsonl", *task), "good.jsonl: expected a folder with a model, got a file", {}),
        ("a gguf file", ("m.gguf", *task), "import_gguf", {"m.gguf": "x"}),
        ("a folder without a model", ("bare", *task), "bare: not a model: neither config.json nor", {"bare": FOLDER}),
        ("a broken config", ("broken", *task), "broken/config.json: not JSON", {"broken/config.json": "{"}),
        ("unknown task", (model, "--task", "snl"), "did you mean snli?", {}),
        ("no task", (model,), "--task", {}),
        ("--out is a file", (model, *task, "--out", "good.jsonl"), "good.jsonl: not a folder", {}),
        ("--out in a file", (model, *task, "--out", "good.jsonl/x/y"), "good.jsonl: not a folder", {}),
        ("k at temperature 0", (model, *task, "--k", "2"), "k is 2 at temperature 0", {}),
        ("k 0", (model, *task, "--k", "0"), "--k", {}),
        ("k of a million", (model, *task, "--k", "1000000"), "--k", {}),
        ("n 0", (model, "--task", "witnesses", "--n", "0"), "--n", {}),
        ("n beyond all", (model, "--task", "witnesses", "--n", "1000000000000"), "--n", {}),
        ("temperature nan", (model, *task, "--temperature", "nan"), "--temperature", {}),
        ("temperature inf", (model, *task, "--temperature", "inf"), "--temperature", {}),
        ("temperature -1", (model, *task, "--temperature", "-1"), "--temperature", {}),
        ("max tokens 0", (model, *task, "--max-tokens", "0"), "--max-tokens", {}),
        ("batch size 0", (model, *task, "--batch-size", "0"), "--batch-size", {}),
        ("seed -1", (model, *task, "--seed", "-1"), "--seed", {}),
        ("split seed 9", (model, "--task", "snli", "--split-seed", "9", "--data-dir", "empty.model"), "seed 9 is not one of snli's", {}),
        ("data dir", (model, "--task", "snli", "--data-dir", "nowhere"), "nowhere: no such folder", {}),
        ("unknown engine", (model, *task, "--engine", "vlm"), "--engine", {}),
        ("vllm is missing", (model, *task, "--engine", "vllm"), "--engine vllm needs vllm: pip install 'catto[vllm]'", {}),
        ("server without an address", (model, *task, "--engine", "server"), "--engine server needs --base-url", {}),
        ("an address without a server", (model, *task, "--base-url", "http://x/v1"), "--base-url needs --engine server", {}),
        ("no address", (model, *task, "--engine", "server", "--base-url", "localhost:8000"), "--base-url: expected an address", {}),
        ("no host", (model, *task, "--engine", "server", "--base-url", "http:///v1"), "--base-url: expected an address", {}),
        ("no port", (model, *task, "--engine", "server", "--base-url", "http://x:99999/"), "--base-url: expected an address", {}),
        ("other settings", (model, *task, "--out", "run"), "run/predictions.jsonl: was made with k 4, not 1",
         {"run/predictions.manifest.json": json.dumps(notes), "run/predictions.jsonl": ""}),
        ("a broken manifest", (model, *task, "--out", "run"), "run/predictions.manifest.json: not JSON",
         {"run/predictions.manifest.json": "{", "run/predictions.jsonl": ""}),
    ]  # fmt: skip
    for name, arguments, word, files in cases:
        yield Case(f"eval: {name}", ("eval", *arguments), (word,), files)


def experiments() -> Iterable[Case]:
    """`run`, `plan`, `teach`, `train`, `model`, `recipe` and the command itself."""

    def recipe(**changes: Any) -> dict[str, Any]:
        return {"r.yaml": yaml.safe_dump({**BASE, **changes})}

    own = {"path": "own.jsonl", "fields": {"question": "stem", "options": "choices", "answer": "key"}}
    server = {"source": "server", "model": "m", "base_url": "nowhere"}
    cases: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
        ("unknown recipe", ("run", "quickstrat"), "did you mean quickstart?", {}),
        ("run --out is a file", ("run", "one.yaml", "--out", "good.jsonl"), "good.jsonl: not a folder", {}),
        ("plan --out is a file", ("plan", "one.yaml", "--out", "good.jsonl"), "good.jsonl: not a folder", {}),
        ("teach --out in a file", ("teach", "one.yaml", "--out", "good.jsonl/x"), "good.jsonl: not a folder", {}),
        ("train --out is a file", ("train", "one.yaml", "--method", "dpo", "--out", "good.jsonl"), "good.jsonl: not a folder", {}),
        ("run: no data", ("run", "r.yaml"), "r.yaml: tasks.mine: nowhere.jsonl: no such file",
         recipe(tasks={"mine": {**own, "path": "nowhere.jsonl"}})),
        ("run: a pipe as data", ("run", "r.yaml"), "r.yaml: tasks.mine: p.jsonl: no such file",
         {**recipe(tasks={"mine": {**own, "path": "p.jsonl"}}), "p.jsonl": FIFO}),
        ("run: a device as data", ("run", "r.yaml"), "r.yaml: tasks.mine: /dev/zero: no such file",
         recipe(tasks={"mine": {**own, "path": "/dev/zero"}})),
        ("run: memory as data", ("run", "r.yaml"), "/proc/self/mem: ", recipe(tasks={"mine": {**own, "path": "/proc/self/mem"}})),
        ("plan: memory as data", ("plan", "r.yaml"), "/proc/self/mem: ", recipe(tasks={"mine": {**own, "path": "/proc/self/mem"}})),
        ("plan: memory as a model", ("plan", "r.yaml"), "/proc/self/mem: ", recipe(model={"path": "/proc/self/mem"})),
        ("plan: memory as a recipe", ("plan", "/proc/self/mem"), "/proc/self/mem: ", {}),
        ("plan: a device as a recipe", ("plan", "/dev/zero"), "/dev/zero: expected a file, got a device", {}),
        ("run: no fields", ("run", "r.yaml"), "r.yaml: tasks.mine: fields: question is missing",
         recipe(tasks={"mine": {"path": "own.jsonl"}})),
        ("run: no folder of data", ("run", "r.yaml"), "r.yaml: tasks.snli: nowhere: no such folder",
         recipe(tasks={"snli": {"data_dir": "nowhere"}})),
        ("run: no model", ("run", "r.yaml"), "r.yaml: model.path: ./nowhere: no such folder, and not a hub id",
         recipe(model={"path": "./nowhere"})),
        ("run: a device as a model", ("run", "r.yaml"), "r.yaml: model.path: /dev/null: expected a folder",
         recipe(model={"path": "/dev/null"})),
        ("run: no teacher", ("run", "r.yaml"), "r.yaml: teacher.model: a b: no such folder",
         recipe(teacher={"source": "transformers", "model": "a b"})),
        ("run: no server", ("run", "r.yaml"), "r.yaml: teacher.base_url: expected an address", recipe(teacher=server)),
        ("run: no vllm", ("run", "r.yaml"), "pip install 'catto[vllm]'", recipe(evaluation={"engine": "vllm", "k": []}, methods=["sft"])),
        ("teach: no responses", ("teach", "r.yaml"), "r.yaml: teacher.responses: ./nowhere: no such file",
         recipe(teacher={"source": "responses", "responses": "./nowhere"})),
        ("teach --dry-run: no fields", ("teach", "r.yaml", "--dry-run"), "r.yaml: tasks.mine: fields: question is missing",
         recipe(tasks={"mine": {"path": "own.jsonl"}})),
        ("teach --dry-run: a bad row", ("teach", "r.yaml", "--dry-run"), "a.jsonl row 1: key 'C' is not one of",
         {**recipe(tasks={"mine": {**own, "path": "a.jsonl"}}), "a.jsonl": OWN.replace('"A"', '"C"')}),
        ("run: one option", ("run", "r.yaml"), "r.yaml: tasks.witnesses: options 1: expected 2 to 26",
         recipe(tasks={"witnesses": {"options": 1}})),
        ("run: reliability 2", ("run", "r.yaml"), "r.yaml: tasks.witnesses: reliabilities (2.0,): expected numbers between",
         recipe(tasks={"witnesses": {"reliabilities": [2]}})),
        ("run --seed twice", ("run", "one.yaml", "--seed", "1", "--seed", "1"), "--seed: 1, 1 names a seed twice", {}),
        ("run --seed -1", ("run", "one.yaml", "--seed", "-1"), "--seed", {}),
        ("plan --seed x", ("plan", "one.yaml", "--seed", "x"), "--seed", {}),
        ("train --seed", ("train", "quickstart", "--method", "dpo", "--seed", "3"), "--seed: 3 is not one of 0", {}),
        ("train --budget", ("train", "r.yaml", "--method", "dpo", "--budget", "paper"), "--budget: paper is not one of",
         recipe(budgets=["matched"])),
        ("train --method", ("train", "quickstart", "--method", "dpo+cato"), "did you mean dpo+catto?", {}),
        ("train --task", ("train", "quickstart", "--method", "dpo", "--task", "witness"), "did you mean witnesses?", {}),
        ("teach --task", ("teach", "quickstart", "--task", "witness"), "did you mean witnesses?", {}),
        ("train without a method", ("train", "quickstart"), "--method", {}),
        ("recipe show", ("recipe", "show", "quickstar"), "did you mean quickstart?", {}),
        ("recipe copy over a file", ("recipe", "copy", "quickstart", "one.yaml"), "one.yaml: already exists", {}),
        ("recipe copy to nowhere", ("recipe", "copy", "quickstart", "no/where.yaml"), "no/where.yaml: No such file", {}),
        ("unknown command", ("mesure", "good.jsonl"), "Did you mean 'measure'?", {}),
        ("unknown subcommand", ("calibrate", "fitt"), "No such command 'fitt'", {}),
        ("no argument", ("measure",), "Missing argument", {}),
        ("one argument too many", ("doctor", "now"), "unexpected extra argument", {}),
    ]  # fmt: skip
    for name, arguments, word, files in cases:
        yield Case(name, arguments, (word,), files)


CASES = [
    case
    for group in (measured, recipes, overrides, calibrated, selected, tasks, evaluated, experiments)
    for case in group()
]
