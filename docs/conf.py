"""How the pages of this folder become a website: `make docs`. Nothing is fetched while building."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_extensions"))

project = "jaxpace"
html_title = "jaxpace"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon",
              "docstrings", "from_code", "measured_table"]  # these three are of _extensions
exclude_patterns = ["_extensions"]

myst_heading_anchors = 3  # page.md#a-heading

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Types in signatures: those of other packages have their pages elsewhere, and no inventory is
# fetched; of our own, only what a user calls has an entry.
nitpick_ignore_regex = [("py:(class|exc)", r".*")]

default_role = "code"  # `name` in docstrings

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
