"""How Sphinx builds these pages: from Markdown, offline, warnings as errors (make docs)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "tft"
author = "the tft authors"
copyright = f"2026, {author}"  # the name is Sphinx's
release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "api_reference"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_inherit_docstrings = False  # torch writes its docstrings for another reader of them
autodoc_preserve_defaults = True  # as the source spells them
autodoc_typehints = "signature"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "tft 0.1.0"
html_static_path = ["_static"]
html_css_files = ["wide.css", "diagrams.css"]
html_show_sphinx = False
