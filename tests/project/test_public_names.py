"""What `import catto` gives: names that load on first use, no torch before, a clear word where an extra is missing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import catto

HEAVY = ("torch", "transformers", "trl", "datasets", "numpy", "scipy", "sklearn", "matplotlib", "pydantic")
LIGHT = ("METHODS", "METRICS", "TASKS", "DataError", "ece", "load_questions", "rewards")


def python(code: str) -> str:
    """Run code in a fresh interpreter; the last printed line."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_import_loads_nothing_heavy() -> None:
    assert python(f"import sys, catto; print([n for n in {HEAVY} if n in sys.modules])") == "[]"


def test_dir_and_star_name_everything_without_loading_it() -> None:
    code = "import json, sys, catto; print(json.dumps([dir(catto), 'torch' in sys.modules]))"
    names, loaded = json.loads(python(code))
    assert set(catto.__all__) <= set(names)
    assert not loaded


def test_every_public_name_is_the_one_at_home() -> None:
    assert set(catto.__all__) == {*catto._HOME, *catto._MODULES, "__version__"}
    for name, (module, there) in catto._HOME.items():
        assert getattr(catto, name) is getattr(importlib.import_module(f"catto.{module}"), there)
    for name in catto._MODULES:
        assert getattr(catto, name) is importlib.import_module(f"catto.{name}")


def test_a_name_is_kept_once_loaded() -> None:
    assert catto.ece is catto.ece
    assert "ece" in vars(catto)


@pytest.mark.parametrize("name", LIGHT)
def test_names_of_the_base_install_need_no_torch(name: str) -> None:
    assert python(f"import sys, catto; catto.{name}; print('torch' in sys.modules)") == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CATTOTrainr'"):
        _ = catto.CATTOTrainr


@pytest.mark.parametrize("name", ["CATTOTrainer", "CATTOConfig", "catto_loss", "token_stats"])
def test_a_missing_extra_says_what_to_install(name: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"try:\n    from catto import {name}\n"
        "except ImportError as error:\n    print(error)"
    )
    said = python(code)
    assert f"catto.{name} needs torch" in said
    assert 'pip install "catto[train]"' in said


def test_a_broken_module_of_our_own_is_not_blamed_on_an_extra() -> None:
    code = (
        "import sys; sys.modules['catto.metrics.errors'] = None\nimport catto\n"
        "try:\n    catto.ece\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "pip install" not in python(code)


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback() -> None:
    (script,) = [entry.value for entry in entry_points(group="console_scripts") if entry.name == "catto"]
    assert script == "catto.__main__:main"
    source = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from catto.__main__ import main\n"
        "main()"
    )
    stopped = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")
