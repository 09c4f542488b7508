"""Sphinx: `make docs` turns these pages into HTML below build/docs."""

project = "pytest-mlhpc"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "pytest-mlhpc"
myst_heading_anchors = 3
