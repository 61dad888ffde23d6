"""`catto doctor`: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catto import __version__
from catto.cli.console import print_json, print_table, say, table

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["diagnosis", "doctor"]

EXAMPLES = """
[bold]Examples[/bold]

  catto doctor

  catto doctor --json
"""

EXTRAS = ("train", "vllm", "ray")
# Only whether they are set is ever told.
VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show versions, devices and what is missing; exit code 1 where the base install itself is broken."""
    found = diagnosis()
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["missing"].get("base"):
        raise typer.Exit(1)


def diagnosis() -> dict[str, Any]:
    """Return versions, devices, which variables are set, and for each part what is missing and how to get it."""
    packages = _packages()
    missing = {part: [name for name, one in found.items() if not one["ok"]] for part, found in packages.items()}
    return {
        "catto": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "missing": {part: names for part, names in missing.items() if names},
        "install": {part: _install(part) for part, names in missing.items() if names},
        "devices": _devices(),
        "variables": {name: name in os.environ for name in VARIABLES},
    }


def _packages() -> dict[str, dict[str, dict[str, Any]]]:
    """Return part -> name -> version (None: not installed), what is needed, and whether the two agree."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in metadata.requires("catto") or []]
    except metadata.PackageNotFoundError:  # a copy of the source that nobody installed
        return {"base": {"catto": {"version": None, "needs": __version__, "ok": False}}}
    others = [one for one in needed if one.name != "catto"]
    return {part: {one.name: _state(one) for one in others if _belongs(one, part)} for part in ("base", *EXTRAS)}


def _state(needed: Requirement) -> dict[str, Any]:
    version = _version(needed.name)
    ok = version is not None and needed.specifier.contains(version, prereleases=True)
    return {"version": version, "needs": str(needed.specifier), "ok": ok}


def _belongs(needed: Requirement, part: str) -> bool:
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        return part == "base"
    return needed.marker.evaluate({"extra": part})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install(part: str) -> str:
    return "pip install catto" if part == "base" else f"pip install 'catto[{part}]'"


def _devices() -> list[str]:
    """Name the devices; accelerators only where torch is installed, which is not imported before."""
    devices = [f"cpu: {os.cpu_count()} cores"]
    if importlib.util.find_spec("torch") is None:
        return devices
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing system library is an OSError
        return [*devices, f"torch is installed but does not load: {str(error).splitlines()[0]}"]
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        devices.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _show(found: dict[str, Any]) -> None:
    say(f"catto {found['catto']}, Python {found['python']}, {found['platform']}")
    made = table("", "package", "part", "installed", "needed")
    for part, packages in found["packages"].items():
        for name, one in packages.items():
            version = one["version"] or "missing"
            made.add_row(name, part, version if one["ok"] or not one["version"] else f"{version} (!)", one["needs"])
        made.add_section()
    print_table(made)
    say("Devices: " + "; ".join(found["devices"]))
    say("Set: " + ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in found["variables"].items()))
    for part, names in found["missing"].items():
        say(f"{part} lacks {', '.join(names)}: {found['install'][part]}")
