"""How Sphinx builds these pages: from Markdown, offline, warnings as errors (make docs)."""

from __future__ import annotations

project = "tft"
author = "the tft authors"
copyright = f"2026, {author}"  # the name is Sphinx's
release = "0.1.0"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "tft 0.1.0"
html_static_path = ["_static"]
html_css_files = ["wide.css", "diagrams.css"]
html_show_sphinx = False
