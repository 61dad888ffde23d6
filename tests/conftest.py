"""Suite-wide settings: offline, no telemetry, quiet and repeatable."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections import Counter
from pathlib import Path

# Before anything imports torch, Hugging Face's libraries or rich: they read these when they are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    # Sums in the same order on every machine; the tiny models gain nothing from a second thread.
    OMP_NUM_THREADS="1",
    HYPOTHESIS_STORAGE_DIRECTORY=str(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"),
)
# What a shell or a CI service sets to change colours and widths, and a user's own keys and servers.
for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS", "COLUMNS"):
    os.environ.pop(name, None)
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HF_TOKEN", "PYTHONWARNINGS", "MPLCONFIGDIR"):
    os.environ.pop(name, None)

# Helpers are next to the tests they serve; every test, and every process that a test starts, finds them by name.
_FOLDERS = [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]
sys.path.extend(_FOLDERS)
_GIVEN = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([*([_GIVEN] if _GIVEN else []), str(Path(__file__).parent), *_FOLDERS])

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

import needs  # noqa: E402

# The gate draws the same examples in every run; `make fuzz` draws new ones. Neither keeps a database: an example that
# failed once would fail every later run on that machine and no other. Neither looks at the clock.
REPEATABLE = settings(database=None, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", REPEATABLE, derandomize=True)
settings.register_profile("fuzz", REPEATABLE, derandomize=False)
settings.load_profile("gate")


def _no_constants(none: providers.Constants = providers._local_constants) -> providers.Constants:
    """Draw no constants from the source of the modules loaded so far: the order of tests would change the examples."""
    return none


assert callable(providers._get_local_constants)
providers._get_local_constants = _no_constants


@pytest.fixture(autouse=True)
def _repeatable(request: pytest.FixtureRequest) -> None:
    """Seed torch by the test's name, as pytest-randomly seeds random and numpy."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(request.node.nodeid.encode()))


# The slowest files, the slowest first: begun last, one of them would keep one worker busy while the others wait.
FIRST = (
    "test_ray",
    "test_launch",
    "test_plan",
    "test_experiment_kill",
    "test_readme",
    "test_attempts",
    "test_tasks_real",
    "test_training_processes",
    "test_notebook",
    "test_drop_in",
    "test_confidence",
    "test_integrity",
    "test_gpu_path",
    "test_report_page",
    "test_preference_trainer",
    "test_smollm2_recipe",
    "test_kept_states",
    "test_experiment",
    "test_gateway_guarantee",
    "test_own_questions",
    "test_gateway",
    "test_refusals",
    "test_packing",
    "test_mixed_precision",
    "test_gateway_equals_eval",
    "test_malformed_input",
    "test_train_stage",
    "test_teacher_kill",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the slow files to the front and leave the rest in pytest-randomly's order."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collection: every training ends with a full one, 0.3 s for that alone."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="refuse to start where a test would be skipped")
    parser.addoption("--update-snapshots", action="store_true", help="write what the commands print to snapshots/")


def pytest_configure(config: pytest.Config) -> None:
    # No GPU is a property of the machine, not something to install.
    lacking = [needs.REASONS[name] for name in needs.missing() if name != "vllm"]
    if config.getoption("everything") and lacking:
        raise pytest.UsageError(f"the whole suite needs {' and '.join(lacking)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped and how to have it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        told = "; ".join(f"{count} that need {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"Skipped: {told}. `make test-all` stops where a browser or the data is missing.")
