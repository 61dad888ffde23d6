"""The site: README, the pages of docs/ and the API reference, built by `make docs`."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from sphinx.application import Sphinx

from catto import __version__

project, author, release = "catto", "The catto authors", __version__
copyright = author  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"catto {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# The sources are read from the repository's root, so that their links are the same in a checkout and on the site.
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/tutorials/*.md"]
exclude_patterns = [".*", "build", "runs"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes in a list; autodoc lists those of a dataclass itself

# Pages in a reader's order. Every page is listed: one outside the contents fails the build.
CONTENTS = """

```{toctree}
:hidden:
:caption: Tutorials

docs/tutorials/calibrate-a-dpo-model
docs/tutorials/check-a-log
docs/tutorials/answer-when-sure
```

```{toctree}
:hidden:
:caption: Start

docs/measure
docs/use-with
docs/data
docs/answers-without-labels
docs/method
```

```{toctree}
:hidden:
:caption: Guides

docs/recipes
docs/page
docs/rewards
docs/serve
docs/publishing
docs/scale
docs/gpu
docs/extending
```

```{toctree}
:hidden:
:caption: Reference

docs/conventions
docs/api
docs/architecture
CONTRIBUTING
CHANGELOG
```

```{toctree}
:hidden:
:caption: Results

docs/results
docs/results-in-full
docs/speed
```
"""


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the README, the first page, the table of contents that the sidebar shows."""
    if name == root_doc:
        source[0] += CONTENTS


FENCED_CODE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def as_markdown(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Read docstrings as Markdown does: backticks hold code, an indented line continues its paragraph."""
    text = "\n".join(lines)
    converted = []
    end = 0
    for block in FENCED_CODE.finditer(text):
        converted.append(convert_paragraphs(text[end : block.start()]))
        converted.append(convert_code(block))
        end = block.end()
    converted.append(convert_paragraphs(text[end:]))
    lines[:] = "".join(converted).split("\n")


def convert_code(block: re.Match[str]) -> str:
    """Turn a fenced block into a directive of reStructuredText."""
    margin, language, code = block.groups()
    return f"{margin}.. code-block:: {language}\n\n{textwrap.indent(code, '    ')}"


def convert_paragraphs(text: str) -> str:
    """Turn Markdown's code in single backticks into reStructuredText; examples stay as they are."""
    paragraphs = text.split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if ">>>" in paragraph:
            continue
        parts = re.split(r"`([^`]+)`", re.sub(r"\n +", " ", paragraph))
        parts[::2] = [re.sub(r"\\?([|*_])", r"\\\1", plain) for plain in parts[::2]]
        parts[1::2] = [f"``{code}``" for code in parts[1::2]]
        paragraphs[place] = "".join(parts)
    return "\n\n".join(paragraphs)


def without_inherited(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Leave out a signature of two pages, as that of CATTOConfig, which repeats TRL's hundred settings."""
    return ("(...)", returned) if len(signature or "") > 2000 else None


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Copy the first page to the address that servers look for."""
    if error is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", as_markdown)
    app.connect("autodoc-process-signature", without_inherited)
    app.connect("build-finished", add_front_page)
