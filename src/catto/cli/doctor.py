"""`catto doctor`: show what is installed and what is missing, and check that training is correct on this device."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer
from typer import Option

from catto import __version__
from catto.cli.console import print_json, require_package, say, show_table
from catto.cli.run import silence_libraries
from catto.errors import shorten_text

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["diagnose_installation", "doctor"]

# The parts of an installation are the base and the extras, which are installed with pip install 'catto[EXTRA]'.
BASE = "base"
EXTRAS = ("train", "serve", "ray", "vllm")
# Environment variables. Only whether they are set is printed, never their values.
VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


class PackageState(TypedDict):
    """A package that catto depends on.

    Attributes:
        version: The installed version; None if the package is missing.
        needs: The versions that catto accepts, such as `>=2.1`.
        ok: Whether an accepted version is installed.
    """

    version: str | None
    needs: str
    ok: bool


def doctor(
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
    selftest: Annotated[
        bool, Option("--selftest", help="Also check training on this device; takes ten seconds.")
    ] = False,
) -> None:
    """Show versions, devices and missing packages.

    The exit code is 1 if the base installation is incomplete or the self-test fails. The self-test compares training
    steps on this device with reference values.

    Examples:
    catto doctor
    catto doctor --json
    catto doctor --selftest
    """
    state = diagnose_installation()
    if selftest:
        require_package("torch", "train", "--selftest")
        silence_libraries()
        from catto.training.selftest import run_selftest

        state["selftest"] = run_selftest()
    if as_json:
        print_json(state)
    else:
        _show_state(state)
    has_failed = selftest and not state["selftest"]["ok"]
    if BASE in state["missing"] or has_failed:
        raise typer.Exit(1)


def diagnose_installation() -> dict[str, Any]:
    """Return versions, devices, which environment variables are set, and which packages are missing.

    Returns:
        A dictionary with these keys, where a part of the installation is `base` or one of EXTRAS:

        - `catto`, `python`, `platform`: their versions;
        - `packages`: part -> name of a package -> PackageState;
        - `missing`: part -> names of its packages that are missing or have a version that catto does not accept; only
          parts with such packages;
        - `install`: part -> command that installs its missing packages;
        - `devices`: a description of each device;
        - `variables`: name of an environment variable -> whether it is set.
    """
    packages = _check_packages()
    missing: dict[str, list[str]] = {}
    install: dict[str, str] = {}
    for part, states in packages.items():
        names = [name for name, state in states.items() if not state["ok"]]
        if names:
            missing[part] = names
            install[part] = "pip install catto" if part == BASE else f"pip install 'catto[{part}]'"
    return {
        "catto": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "missing": missing,
        "install": install,
        "devices": _list_devices(),
        "variables": {name: name in os.environ for name in VARIABLES},
    }


def _check_packages() -> dict[str, dict[str, PackageState]]:
    """Return the packages that catto's metadata requires: part of the installation -> name -> state."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("catto") or []]
    except metadata.PackageNotFoundError:  # catto runs from its source without being installed
        return {BASE: {"catto": PackageState(version=None, needs=__version__, ok=False)}}
    packages: dict[str, dict[str, PackageState]] = {part: {} for part in (BASE, *EXTRAS)}
    for requirement in requirements:
        if requirement.name == "catto":  # an extra includes another one by requiring catto[...]
            continue
        state = _check_package(requirement)
        for part in _list_parts(requirement.marker):
            packages[part][requirement.name] = state
    return packages


def _check_package(requirement: Requirement) -> PackageState:
    """Return which version of the required package is installed, and whether it is accepted."""
    version = None
    is_accepted = False
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(requirement.name)
        is_accepted = requirement.specifier.contains(version, prereleases=True)
    return PackageState(version=version, needs=str(requirement.specifier), ok=is_accepted)


def _list_parts(marker: Any) -> list[str]:
    """Return the parts of the installation that have a requirement with this marker: the base, or some of the extras.

    The marker `extra == "train"` restricts a requirement to that extra; None means no restriction.
    """
    if marker is None or marker.evaluate({"extra": ""}):
        return [BASE]
    return [extra for extra in EXTRAS if marker.evaluate({"extra": extra})]


def _list_devices() -> list[str]:
    """Describe each device in a few words, the CPU first. Without torch, only the CPU is listed."""
    devices = [f"cpu: {os.cpu_count()} cores"]
    if importlib.util.find_spec("torch") is None:
        return devices
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing system library raises OSError
        return [*devices, f"torch is installed but does not load: {shorten_text(str(error))}"]
    from catto.objectives.tiles import cpu_bf16_slowdown

    devices[0] += f", a matrix product in bf16 takes {cpu_bf16_slowdown():.1f} times as long as in fp32"
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        devices.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _show_state(state: dict[str, Any]) -> None:
    """Print the result of `diagnose_installation`, and that of the self-test if it was run.

    These are the versions, the packages of each part of the installation, the devices, whether environment variables
    are set, and how to install missing packages.
    """
    say(f"catto {state['catto']}, Python {state['python']}, {state['platform']}")
    _show_packages(state["packages"])
    say(f"Devices: {'; '.join(state['devices'])}")
    variables = []
    for name, is_set in state["variables"].items():
        variables.append(f"{name} set" if is_set else f"{name} not set")
    say(f"Environment: {', '.join(variables)}")
    for part, names in state["missing"].items():
        say(f"{part} lacks {', '.join(names)}: {state['install'][part]}")
    if "selftest" in state:
        _show_checks(state["selftest"]["checks"])
        say(_summarise_selftest(state["selftest"]))


def _show_packages(packages: dict[str, dict[str, PackageState]]) -> None:
    """Print a table of packages with a section for each part of the installation: the base and each extra."""
    rows: list[list[str]] = []
    has_wrong_version = False
    for part, states in packages.items():
        for name, state in states.items():
            installed = state["version"] or "missing"
            is_wrong_version = state["version"] is not None and not state["ok"]
            if is_wrong_version:
                installed = f"{installed} (!)"
                has_wrong_version = True
            rows.append([name, part, installed, state["needs"]])
        rows.append([])  # ends the section
    show_table(title="", columns=("package", "part", "installed", "needed"), rows=rows)
    if has_wrong_version:
        say("(!) catto does not accept the installed version.")


def _show_checks(checks: Sequence[dict[str, Any]]) -> None:
    """Print a table of the self-test's checks: the relative error of each, and the bound that it must not exceed."""
    rows = []
    for check in checks:
        if check["error"] is None:  # the computation raised an exception, or its error is not finite
            error = check["problem"]
        else:
            error = f"{check['error']:.1e}"
        verdict = "ok" if check["ok"] else "FAILED"
        rows.append([check["name"], error, f"{check['bound']:g}", verdict])
    show_table(title="", columns=("self-test", "error", "bound", ""), rows=rows)


def _summarise_selftest(result: dict[str, Any]) -> str:
    """Describe the result of the self-test in one line, with everything that a bug report needs."""
    checks = result["checks"]
    passed = sum(check["ok"] for check in checks)
    verdict = "passed" if result["ok"] else "FAILED"
    outcome = f"Self-test {verdict}: {passed} of {len(checks)} checks"
    setup = f"on {result['device']} in {result['precision']} with {result['attention']} attention"
    libraries = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl")]
    versions = f"catto {__version__}, {', '.join(libraries)}"
    milliseconds = result["milliseconds"]
    if not milliseconds:  # steps are not timed if a check failed
        return f"{outcome} {setup}; {versions}"
    times = _compare_step_times(milliseconds)
    return f"{outcome} {setup}; {times}; {versions}"


def _compare_step_times(milliseconds: dict[str, float]) -> str:
    """Describe the times of our training steps, without and with shared prompts, as multiples of TRL's time."""
    trl_time = milliseconds["trl"]
    catto_ratio = milliseconds["catto"] / trl_time
    shared_ratio = milliseconds["shared"] / trl_time
    return f"step catto {catto_ratio:.2f}x, shared {shared_ratio:.2f}x of TRL's {trl_time:.0f} ms"
