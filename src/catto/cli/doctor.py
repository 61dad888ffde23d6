"""`catto doctor`: show what is installed and what is missing, and check that training is correct on this device."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import Annotated, Any, TypedDict

import typer
from typer import Option

from catto import __version__
from catto.cli.console import print_json, require_package, say, show_table
from catto.cli.run import silence_libraries

__all__ = ["diagnose_installation", "doctor"]

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
    if "base" in state["missing"] or has_failed:
        raise typer.Exit(1)


def diagnose_installation() -> dict[str, Any]:
    """Return versions, devices, which environment variables are set, and which packages are missing.

    Returns:
        `catto`, `python`, `platform`; `packages`: part -> name -> PackageState; `missing`: part -> names; `install`:
        part -> command that installs what is missing; `devices`; `variables`: name -> whether it is set. A part is
        `base` or one of catto's extras.
    """
    packages = _check_packages()
    missing: dict[str, list[str]] = {}
    install: dict[str, str] = {}
    for part, states in packages.items():
        names = [name for name, state in states.items() if not state["ok"]]
        if names:
            missing[part] = names
            install[part] = "pip install catto" if part == "base" else f"pip install 'catto[{part}]'"
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
    """Return the state of every package, by part (base or an extra) and name."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("catto") or []]
    except metadata.PackageNotFoundError:  # catto runs from its source without being installed
        return {"base": {"catto": PackageState(version=None, needs=__version__, ok=False)}}
    packages: dict[str, dict[str, PackageState]] = {part: {} for part in ("base", *EXTRAS)}
    for requirement in requirements:
        if requirement.name == "catto":  # an extra includes another one by requiring catto[...]
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        needed = requirement.specifier
        is_needed_version = version is not None and needed.contains(version, prereleases=True)
        for part in _list_parts(requirement.marker):
            state = PackageState(version=version, needs=str(needed), ok=is_needed_version)
            packages[part][requirement.name] = state
    return packages


def _list_parts(marker: Any) -> list[str]:
    """Return the parts that need a requirement with this marker: the base installation, or some of the extras."""
    if marker is None or marker.evaluate({"extra": ""}):
        return ["base"]
    return [extra for extra in EXTRAS if marker.evaluate({"extra": extra})]


def _list_devices() -> list[str]:
    """Describe the devices. Without torch, only the CPU is listed."""
    devices = [f"cpu: {os.cpu_count()} cores"]
    if importlib.util.find_spec("torch") is None:
        return devices
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing system library raises OSError
        return [*devices, f"torch is installed but does not load: {str(error).splitlines()[0]}"]
    from catto.objectives.tiles import cpu_bf16_slowdown

    devices[0] += f", a matrix product in bf16 takes {cpu_bf16_slowdown():.1f} times as long as in fp32"
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        devices.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _show_state(state: dict[str, Any]) -> None:
    """Print what is installed, what is missing, and the results of the self-test if it was run."""
    say(f"catto {state['catto']}, Python {state['python']}, {state['platform']}")
    rows: list[list[str]] = []
    for part, packages in state["packages"].items():
        for name, package in packages.items():
            version = package["version"] or "missing"
            is_wrong_version = package["version"] is not None and not package["ok"]
            if is_wrong_version:
                version = f"{version} (!)"
            rows.append([name, part, version, package["needs"]])
        rows.append([])  # separates the parts
    show_table("", ("package", "part", "installed", "needed"), rows)
    say(f"Devices: {'; '.join(state['devices'])}")
    variables = []
    for name, is_set in state["variables"].items():
        variables.append(f"{name} set" if is_set else f"{name} not set")
    say(f"Environment: {', '.join(variables)}")
    for part, names in state["missing"].items():
        say(f"{part} lacks {', '.join(names)}: {state['install'][part]}")
    if "selftest" in state:
        _show_selftest(state["selftest"])


def _show_selftest(result: dict[str, Any]) -> None:
    """Print the checks of a self-test and a summary in one line."""
    rows = []
    for check in result["checks"]:
        error = check["problem"]  # the reason if there is no number
        if check["error"] is not None:
            error = f"{check['error']:.1e}"
        verdict = "ok" if check["ok"] else "FAILED"
        rows.append([check["name"], error, f"{check['bound']:g}", verdict])
    show_table("", ("self-test", "error", "bound", ""), rows)
    verdict = "passed" if result["ok"] else "FAILED"
    passed = sum(check["ok"] for check in result["checks"])
    summary = f"Self-test {verdict}: {passed} of {len(result['checks'])} checks"
    summary += f" on {result['device']} in {result['precision']} with {result['attention']} attention"
    milliseconds = result["milliseconds"]
    if milliseconds:  # empty if a check failed
        trl_time = milliseconds["trl"]
        ratios = [f"{name} {milliseconds[name] / trl_time:.2f}x" for name in ("catto", "shared")]
        summary += f"; step {', '.join(ratios)} of TRL's {trl_time:.0f} ms"
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl")]
    say(f"{summary}; catto {__version__}, {', '.join(versions)}")
