"""What the pages for people say, as data: their code blocks and all their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str = README) -> list[Block]:
    return [Block(match[1].strip(), match[2]) for match in BLOCK.finditer(page)]


def everything() -> str:
    """The text of all pages but the changelog, which also names what is gone."""
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES if page != "CHANGELOG.md")
