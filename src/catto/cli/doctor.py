"""`catto doctor`: what is installed and what is missing; whether training computes what it should on this device."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import Annotated, Any

import typer
from typer import Option

from catto import __version__
from catto.cli.console import needs, print_json, say, show_table
from catto.cli.run import QUIET

__all__ = ["diagnosis", "doctor"]

EXTRAS = ("train", "serve", "ray", "vllm")
# Only whether they are set is ever printed.
VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


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
    state = diagnosis()
    if selftest:
        needs("torch", "train", "--selftest")
        os.environ.update(QUIET | os.environ)
        from catto.training.selftest import run_selftest

        state["selftest"] = run_selftest()
    if as_json:
        print_json(state)
    else:
        _show(state)
    if "base" in state["missing"] or not state.get("selftest", {"ok": True})["ok"]:
        raise typer.Exit(1)


def diagnosis() -> dict[str, Any]:
    """Return versions, devices, which variables are set, and for each part what is missing and how to install it.

    packages: part -> name -> version (None: not installed), what is needed, and whether the two agree.
    """
    from packaging.requirements import Requirement

    packages: dict[str, dict[str, dict[str, Any]]] = {part: {} for part in ("base", *EXTRAS)}
    try:
        needed = [Requirement(text) for text in metadata.requires("catto") or []]
    except metadata.PackageNotFoundError:  # a copy of the source that was never installed
        needed, packages = [], {"base": {"catto": {"version": None, "needs": __version__, "ok": False}}}
    for requirement in needed:
        name, marker = requirement.name, requirement.marker
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        ok = version is not None and requirement.specifier.contains(version, prereleases=True)
        if marker is None or marker.evaluate({"extra": ""}):
            parts = ["base"]
        else:
            parts = [extra for extra in EXTRAS if marker.evaluate({"extra": extra})]
        for part in parts if name != "catto" else ():  # an extra that includes another names catto itself
            packages[part][name] = {"version": version, "needs": str(requirement.specifier), "ok": ok}
    lacking = {part: [name for name, state in states.items() if not state["ok"]] for part, states in packages.items()}
    missing = {part: names for part, names in lacking.items() if names}
    install = {part: "pip install catto" if part == "base" else f"pip install 'catto[{part}]'" for part in missing}
    return {
        "catto": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "missing": missing,
        "install": install,
        "devices": _devices(),
        "variables": {name: name in os.environ for name in VARIABLES},
    }


def _devices() -> list[str]:
    """Return the devices. Accelerators are known to torch alone, which is imported only here."""
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


def _show(state: dict[str, Any]) -> None:
    """Print what is installed and what is missing; then the checks of a self-test, and one line that says all of it."""
    say(f"catto {state['catto']}, Python {state['python']}, {state['platform']}")
    rows: list[list[str]] = []
    for part, packages in state["packages"].items():
        for name, package in packages.items():
            mark = "" if package["ok"] or not package["version"] else " (!)"
            rows.append([name, part, (package["version"] or "missing") + mark, package["needs"]])
        rows.append([])
    show_table("", ("package", "part", "installed", "needed"), rows)
    say("Devices: " + "; ".join(state["devices"]))
    say("Set: " + ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in state["variables"].items()))
    for part, names in state["missing"].items():
        say(f"{part} lacks {', '.join(names)}: {state['install'][part]}")
    if (result := state.get("selftest")) is None:
        return
    rows = []
    for check in result["checks"]:
        error = check["problem"] if check["error"] is None else f"{check['error']:.1e}"
        rows.append([check["name"], error, f"{check['bound']:g}", "ok" if check["ok"] else "FAILED"])
    show_table("", ("self-test", "error", "bound", ""), rows)
    times = result["milliseconds"]
    ratios = [f"{name} {times[name] / times['trl']:.2f}x" for name in ("catto", "shared") if times]
    beside = f"; step {', '.join(ratios)} of TRL's {times['trl']:.0f} ms" if times else ""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    passed = f"{sum(check['ok'] for check in result['checks'])} of {len(result['checks'])} checks"
    verdict = f"{'passed' if result['ok'] else 'FAILED'}: {passed}"
    where = f"{result['device']} in {result['precision']} with {result['attention']} attention"
    say(f"Self-test {verdict} on {where}{beside}; catto {state['catto']}, {versions}")
