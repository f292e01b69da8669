"""How Sphinx builds these pages: `bash scripts/docs.sh`."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

project = "megatron_kd"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["results/*.md"]
html_theme = "furo"
html_title = "megatron_kd"
root_doc = "index"

# Docstrings mark code with single backticks, as the pages do.
default_role = "literal"
# The host is not imported to build pages: they build where it is not installed, in less time.
autodoc_mock_imports = ["megatron", "modelopt"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
myst_heading_anchors = 4
# A link to a file of the repository that is no page is checked by the tests, not by Sphinx.
suppress_warnings = ["config.cache"]
