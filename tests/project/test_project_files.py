"""Files that other tools read: the workflow, the contents of the site, the API reference, the source archive."""

from __future__ import annotations

import importlib
import re
import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from pages import PAGES, ROOT

import catto

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def jobs() -> list[dict[str, Any]]:
    return [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]


def test_the_workflow_runs_targets_of_the_makefile_on_every_supported_python() -> None:
    supported = {name.rsplit(" ", 1)[1] for name in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", name)}
    (job,) = jobs()
    matrix = job["strategy"]["matrix"]
    assert set(matrix["python"]) == supported == {"3.11", "3.12", "3.13"}
    targets = [*matrix["target"], *(extra["target"] for extra in matrix["include"])]
    assert {"test", "test-oldest", "test-newest", "lint", "wheel", "docs"} == set(targets)
    assert not [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make ${{ matrix.target }}"]


def test_actions_are_pinned_to_commits() -> None:
    used = [step["uses"] for job in jobs() for step in job["steps"] if "uses" in step]
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)]


def test_the_sidebar_of_the_site_lists_every_page() -> None:
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    entries = []
    for toctree in re.findall(r"```\{toctree\}(.*?)```", conf, re.DOTALL):
        lines = toctree.split("\n")
        entries += [line for line in lines if line and not line.startswith(":")]
    assert entries
    pages = [page.removesuffix(".md") for page in PAGES if page != "README.md"]
    assert not [page for page in pages if not any(fnmatch(page, entry) for entry in entries)]
    for entry in entries:
        assert any(fnmatch(page, entry) for page in pages), f"{entry} matches no page"


@pytest.mark.parametrize("name", re.findall(r"^\.\. automodule:: (\S+)$", API, re.MULTILINE))
def test_modules_and_members_of_the_api_reference_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    listed = re.search(rf"^\.\. automodule:: {re.escape(name)}\n   :members: (.+)$", API, re.MULTILINE)
    for member in re.split(r",\s*", listed[1]) if listed else []:
        assert getattr(module, member).__doc__, f"{name}.{member}"


def test_public_names_are_in_the_api_reference() -> None:
    """`:members:` documents what `__all__` lists; the tables, which have no docstring, are named in the text."""
    tables = re.search(r"^\.\. automodule:: catto\n(?:   .*\n)*?   :exclude-members: (.+)$", API, re.MULTILINE)
    assert tables is not None
    for name in tables[1].split(", "):
        assert isinstance(getattr(catto, name), dict)
        assert f"`catto.{name}`" in API


def test_the_source_archive_holds_what_a_checkout_holds() -> None:
    """`make test` and `make docs` work from the archive: setuptools itself adds only src, README and test_*.py."""
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    local = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {"benchmarks", "docs", "examples", "tests"} <= set(manifest) & local
    assert {".ci", ".github"} <= set(manifest)
    constraints = {path.name for path in ROOT.glob("constraints*.txt")}
    assert constraints == {"constraints.txt", "constraints-oldest.txt", "constraints-newest.txt"}
    files = {"Makefile", *constraints, *(page for page in PAGES if "/" not in page)} - {"README.md"}
    assert files <= set(manifest)


def test_what_the_extras_ask_for_is_pinned() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["train"], *extras["docs"], *extras["dev"], "build", "twine"]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in asked}  # type: ignore[index]
    assert names - pinned == {"catto"}


def test_the_oldest_corner_is_the_lower_end_of_the_ranges() -> None:
    """torch, an install of its own, is 2.13.0 in every corner."""
    pinned = {}
    for line in (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines():
        name, version = line.split("==")
        pinned[name] = Version(version).release[:2]
    for text in PROJECT["project"]["optional-dependencies"]["train"]:
        requirement = Requirement(text)
        if requirement.name == "torch":
            continue
        floors = [part.version for part in requirement.specifier if part.operator == ">="]
        assert [Version(floor).release for floor in floors] == [pinned[requirement.name]]


def test_install_commands_of_the_pages_work_in_a_clone() -> None:
    """The package is on no index yet: pages install `.[extra]`."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        texts[notebook.name] = notebook.read_text(encoding="utf-8")
    by_name = [page for page, text in texts.items() for _ in re.findall(r"pip install \\?[\"']?catto\b", text)]
    assert by_name == []
    extras = [extra for text in texts.values() for extra in re.findall(r"pip install \\?[\"']?\.\[(\w+)\]", text)]
    assert {"train", "serve", "ray", "vllm"} <= set(extras) <= set(PROJECT["project"]["optional-dependencies"])
