"""The shape of the package in numbers. `python tests/shape.py [ROOM ...]` prints them; a test limits them."""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "catto"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def code_lines(source: str) -> int:
    """Lines that hold code: no docstring, no comment, no blank."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(ast.parse(source)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@dataclass(frozen=True)
class Shape:
    """What the budgets limit."""

    code: int
    files: int
    functions: int
    median: float
    percentile: int  # the 95th, of the lines of a function
    longest: int
    used_once: int  # private definitions that one place uses
    longest_file: int
    twins: tuple[str, ...]  # file names that occur twice


def shape(paths: list[Path], everywhere: list[Path]) -> Shape:
    """Measure the files `paths`; uses of a private definition are counted in `everywhere`."""
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    )
    words = Counter(word for path in everywhere for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))
    private = [
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef) and node.name.startswith("_") and not node.name.startswith("__")
    ]
    names = Counter(path.name for path in paths if path.name != "__init__.py" and path.parent.name != "cli")
    return Shape(
        code=sum(map(code_lines, sources.values())),
        files=len(paths),
        functions=len(lengths),
        median=statistics.median(lengths),
        percentile=lengths[int(0.95 * len(lengths))],
        longest=lengths[-1],
        used_once=sum(words[name] == 2 for name in private),
        longest_file=max(source.count("\n") for source in sources.values()),
        twins=tuple(sorted(name for name, count in names.items() if count > 1)),
    )


def main() -> None:
    everywhere = sorted(SRC.rglob("*.py"))
    rooms = {path.relative_to(SRC).parts[0] for path in everywhere}
    wanted = sys.argv[1:] or sorted(rooms)
    print(f"{'room':18} code files functions median p95 longest used-once longest-file")
    for room in [*wanted, "all"]:
        paths = [path for path in everywhere if room in ("all", path.relative_to(SRC).parts[0])]
        if any(True for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)):
            s = shape(paths, everywhere)
            print(f"{room:18} {s.code:4} {s.files:5} {s.functions:9} {s.median:6g} {s.percentile:3} {s.longest:7}"
                  f" {s.used_once:9} {s.longest_file:12}")  # fmt: skip
    print(f"file names that occur twice: {', '.join(shape(everywhere, everywhere).twins) or 'none'}")
    print(f"README: {(ROOT / 'README.md').read_text(encoding='utf-8').count(chr(10))} lines")


if __name__ == "__main__":
    main()
