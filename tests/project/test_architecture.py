"""Imports point one way, measuring needs no torch, and the source has nothing unsafe in it."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "catto"
FILES = sorted(SRC.rglob("*.py"))

# An import goes to the same level or down: from the command line towards the records.
LEVELS = {
    "errors": 0,
    "io": 0,
    "records": 0,
    "redaction": 0,
    "telemetry": 0,
    "recipe": 1,
    "methods": 1,
    "answer": 2,
    "prompts": 2,
    "token_ids": 2,
    "tasks": 2,
    "engines": 2,
    "objectives": 2,
    "metrics": 2,
    "formats": 3,
    "answer_columns": 3,
    "measure": 3,
    "calibrate": 3,
    "model_calibration": 3,
    "predict": 3,
    "elicit": 4,
    "teacher": 3,
    "rewards": 3,
    "training": 4,
    "serve": 4,
    "pipeline": 5,
    "report": 5,
    "integrations": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_parts(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the first part below `catto` of every import; `from catto import prompts` is an import of prompts."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        yield from (
            name.split(".")[1] for name in names if name.startswith("catto.") and not name.endswith("__version__")
        )


def arrows_back(part: str, source: str, package: tuple[str, ...] = ("catto",)) -> list[str]:
    return [other for other in imported_parts(source, package) if LEVELS[other] > LEVELS[part]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_dependencies_point_one_way(path: Path) -> None:
    package = ("catto", *path.relative_to(SRC).parts[:-1])
    back = arrows_back(part_of(path), path.read_text(encoding="utf-8"), package)
    assert not back, f"{path.relative_to(SRC)} imports {', '.join(back)}, which stand above it"


@pytest.mark.parametrize(
    "source",
    [
        "import catto.cli.measure",
        "from catto.report.drawing import Panel",
        "def f():\n    from catto import training",
        "from ..teacher import collect",
    ],
)
def test_an_arrow_that_points_back_is_found(source: str) -> None:
    assert arrows_back("tasks", source, ("catto", "tasks"))


def test_parts_do_not_import_each_other_in_a_circle() -> None:
    imports: dict[str, set[str]] = {}
    for path in FILES:
        package = ("catto", *path.relative_to(SRC).parts[:-1])
        others = set(imported_parts(path.read_text(encoding="utf-8"), package)) - {part_of(path)}
        imports.setdefault(part_of(path), set()).update(others)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_every_part_has_a_level() -> None:
    assert {part_of(path) for path in FILES} <= set(LEVELS)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_measuring_imports_no_torch() -> None:
    code = (
        "import sys, catto, catto.records, catto.metrics.catalogue, catto.metrics.statistics\n"
        "import catto.metrics.calibrators, catto.measure, catto.report.drawing, catto.cli\n"
        "print(sorted({'torch', 'transformers', 'trl', 'peft', 'accelerate', 'datasets'} & set(sys.modules)))"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom catto.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'sklearn', 'scipy', 'matplotlib', 'numpy', 'transformers', 'openai'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


# Hosts are matched by the registry's name, homes by their shape.
FORBIDDEN = {
    "pickle": r"^\s*(import|from) (pickle|cloudpickle|dill|shelve|marshal)\b",
    "torch.load": r"\btorch\.load\(",
    "remote code": r"trust_remote_code\s*=\s*True",
    "a package registry": r"https?://[\w.-]*(pypi|pythonhosted|anaconda|npmjs)|--(extra-)?index-url",
    "a developer's home": r"(/home/|/Users/|/root/|[A-Z]:\\Users\\)\w",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_source_is_free_of(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    sources = [path for path in SRC.rglob("*") if path.suffix in (".py", ".yaml", ".html", ".jinja", ".css")]
    assert not [path.name for path in sources if pattern.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("pickle", "    import pickle"),
        ("torch.load", "state = torch.load(path)"),
        ("remote code", "load(name, trust_remote_code=True)"),
        ("a developer's home", 'path = "/home/someone/models"'),
    ],
)
def test_forbidden_lines_are_found(what: str, line: str) -> None:
    assert re.search(FORBIDDEN[what], line, re.MULTILINE)
