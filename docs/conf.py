"""Sphinx configuration; the configuration reference is generated from the structs at build time."""

from pathlib import Path

from forge_config.reference import reference_markdown
from forge_trainer.job import Job

project = "Forge"
author = "The Forge authors"
copyright = "2026, The Forge authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Forge"
exclude_patterns = ["_build"]

(Path(__file__).parent / "configuration_reference.md").write_text(reference_markdown(Job))
