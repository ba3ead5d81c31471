"""How Sphinx makes the site of this folder: `sphinx-build -W docs build/site`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import streamkl_cupy

project = "streamkl_cupy"
version = release = streamkl_cupy.__version__
project_copyright = "the contributors of streamkl_cupy, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_tools", "patches"]

html_theme = "furo"
html_title = f"streamkl_cupy {version}"
html_copy_source = html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"

myst_heading_anchors = 3
default_role = "code"

autodoc_typehints = "none"  # and so one signature for functions with overloads
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Accuracy"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Accuracy|Example|Examples|Attributes):$")


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: stars and bars are themselves, and indented lines above the sections are formulas."""
    above, previous, section = True, "", ""
    for i, line in enumerate(lines):
        section = line if SECTION.match(line) else section
        above = above and not section
        if section.startswith(("Args", "Returns", "Raises")) and line.startswith(" " * 9):
            line = " " * 8 + line.lstrip()  # a line that goes on, indented for those who read the docstring
        if above and line.startswith("    ") and not previous:
            lines[i] = f"::\n\n{line}"
        elif not (above and line.startswith("    ")) and not line.lstrip().startswith(">>>"):
            lines[i] = re.sub(r"([*|\\])", r"\\\1", line)
        previous = line if line.strip() else ("" if not previous.startswith("    ") else previous)
    lines[:] = "\n".join(lines).split("\n")


class Notebook(MystParser):
    """A notebook as a page: its texts, its code, and what that printed when it was last run."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            source = "".join(cell["source"])
            code = cell["cell_type"] == "code"
            parts.append(f"```python\n{source}\n```" if code else source)
            printed = ("".join(output["text"]).rstrip() for output in cell.get("outputs", ()))
            parts += [f"```{{code-block}} text\n:class: printed\n\n{words}\n```" for words in printed]
        super().parse("\n\n".join(parts), document)


def setup(app: Any) -> None:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
