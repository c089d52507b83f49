"""The documentation's site: `make docs`."""

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "tocsin"
author = "the authors of tocsin"
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True

# Docstrings have the sections of Google's style, and code in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
# Only what the page of the Python API shows can be linked to.
nitpick_ignore_regex = [("py:.*", ".*")]

# Headings down to this level can be linked to, by the names that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"tocsin {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False

# What is copied from a console block is the commands alone.
copybutton_prompt_text = "$ "
