"""How Sphinx builds the site: `make docs`."""

import logging
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.reference import routes_table, settings_table

from helmrec import __version__

logging.getLogger("helmrec").setLevel(logging.WARNING)  # an engine starts while the reference is generated

project = "HelmRec"
version = release = __version__
html_title = f"HelmRec {version}"
project_copyright = "the HelmRec authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
default_role = "code"  # docstrings mark names with single backquotes
highlight_language = "text"

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}


class Generated(SphinxDirective):
    """Markdown that is generated when the site is built. The argument, if any, names a settings class."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the code may have changed
        text = settings_table(self.arguments[0]) if self.arguments else routes_table()
        return [nodes.container("", *self.parse_text_to_nodes(text), classes=["reference", self.name])]


def setup(app: Any) -> None:
    app.add_directive("settings", Generated)
    app.add_directive("routes", Generated)
