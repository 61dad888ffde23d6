"""`catto doctor`: what is installed and what is missing; whether training computes what it should on this device."""

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
from catto.cli.run import QUIET

__all__ = ["diagnose_installation", "doctor"]

EXTRAS = ("train", "serve", "ray", "vllm")
# Only whether they are set is ever printed.
VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


class PackageState(TypedDict):
    """Whether a package is as catto needs it.

    Attributes:
        version: The installed version; None if it is missing.
        needs: The versions that catto accepts, such as `>=2.1`.
        ok: Whether the installed version is one of them.
    """

    version: str | None
    needs: str
    ok: bool


def doctor(
    as_json: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False,
    selftest: Annotated[bool, Option("--selftest", help="Compare training here with references; ten seconds.")] = False,
) -> None:
    """Show versions, devices and what is missing; exit with code 1 if the base install or the self-test fails.

    Examples:
    catto doctor
    catto doctor --json
    catto doctor --selftest
    """
    state = diagnose_installation()
    if selftest:
        require_package("torch", "train", "--selftest")
        os.environ.update(QUIET | os.environ)
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
    """Return versions, devices, which variables are set, and for each part what is missing and how to install it.

    Returns:
        `catto`, `python`, `platform`; `packages`: part -> name -> installed version or None, needed versions, and
        whether they agree; `missing`: part -> names; `install`: part -> command; `devices`; `variables`.
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
    except metadata.PackageNotFoundError:  # a copy of the source that was never installed
        return {"base": {"catto": PackageState(version=None, needs=__version__, ok=False)}}
    packages: dict[str, dict[str, PackageState]] = {part: {} for part in ("base", *EXTRAS)}
    for requirement in requirements:
        if requirement.name == "catto":  # an extra that includes another names catto itself
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
    """Return the parts that need a requirement with this marker: base, or extras."""
    if marker is None or marker.evaluate({"extra": ""}):
        return ["base"]
    return [extra for extra in EXTRAS if marker.evaluate({"extra": extra})]


def _list_devices() -> list[str]:
    """Describe the devices; without torch, which alone knows accelerators, only the CPU."""
    devices = [f"cpu: {os.cpu_count()} cores"]
    if importlib.util.find_spec("torch") is None:
        return devices
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing system library is an OSError
        return [*devices, f"torch is installed but does not load: {str(error).splitlines()[0]}"]
    from catto.objectives.tiles import cpu_bf16_slowdown

    devices[0] += f", a product in bf16 takes {cpu_bf16_slowdown():.1f} times as long as in fp32"
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        devices.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _show_state(state: dict[str, Any]) -> None:
    """Print what is installed and what is missing, and the results of a self-test if there are any."""
    say(f"catto {state['catto']}, Python {state['python']}, {state['platform']}")
    rows: list[list[str]] = []
    for part, packages in state["packages"].items():
        for name, package in packages.items():
            version = package["version"] or "missing"
            is_wrong_version = package["version"] is not None and not package["ok"]
            if is_wrong_version:
                version = f"{version} (!)"
            rows.append([name, part, version, package["needs"]])
        rows.append([])  # a line between the parts
    show_table("", ("package", "part", "installed", "needed"), rows)
    say(f"Devices: {'; '.join(state['devices'])}")
    variables = []
    for name, is_set in state["variables"].items():
        variables.append(f"{name} yes" if is_set else f"{name} no")
    say(f"Set: {', '.join(variables)}")
    for part, names in state["missing"].items():
        say(f"{part} lacks {', '.join(names)}: {state['install'][part]}")
    if "selftest" in state:
        _show_selftest(state["selftest"])


def _show_selftest(result: dict[str, Any]) -> None:
    """Print the checks of a self-test, and one line that sums them up."""
    rows = []
    for check in result["checks"]:
        error = check["problem"]  # why there is no number
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
