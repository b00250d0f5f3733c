"""Sphinx configuration; the pages of reference are generated when the site is built (`generated.py`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generated import write_pages

project = "Forge"
author = "The Forge authors"
copyright = "2026, The Forge authors"
extensions = ["myst_nb", "sphinxcontrib.mermaid", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Forge"
html_static_path = ["_static"]
html_js_files = ["access.js"]
exclude_patterns = ["_build", "notebooks/sources"]
nb_execution_mode = "off"  # outputs are stored in the notebooks: see notebooks/make.py

write_pages()
