"""The examples in the docstrings of the package run, and public functions have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import catto

SRC = Path(__file__).parents[2] / "src"
FILES = [path for path in sorted((SRC / "catto").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
# A model is needed to call it: the README shows it in use, and the tests run the README.
SHOWN_IN_README = {"evaluate"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(module_name(path)), optionflags=flags, report=True)
    assert result.attempted
    assert not result.failed


def test_a_wrong_example_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_example.py").write_text(
        'def one():\n    """Return 1.\n\n    >>> one()\n    2\n    """\n    return 1\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert doctest.testmod(importlib.import_module("wrong_example")).failed == 1


@pytest.mark.parametrize("name", catto.__all__)
def test_public_functions_have_an_example(name: str) -> None:
    value = getattr(catto, name)
    if inspect.isfunction(value) and name not in SHOWN_IN_README:
        assert ">>> " in (value.__doc__ or ""), f"catto.{name} has no example in its docstring"
