"""Sphinx's configuration: `tox run -e docs` builds the documentation, with every warning an error."""

import re

from pallets_sphinx_themes import get_version
from sphinx.application import Sphinx

project = "flask-runonce"
copyright = "the flask-runonce maintainers"
release, version = get_version("flask-runonce")

extensions = ["myst_parser", "sphinx.ext.autodoc", "pallets_sphinx_themes"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `name` for code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["pytest", "webtest"]  # of the extra "testing", without which the documentation can be built
nitpick_ignore_regex = [
    # Other projects' names, and what the type checker alone sees. Their documentation is not asked for at each build.
    ("py:.*", r"(flask|werkzeug|httpx|redis|sqlalchemy|sa|blinker|collections|uuid|threading|asyncio|wsgiref)\..*"),
    ("py:.*", r"(typing\.|t\.)?(Any|Callable|Collection|Iterable|Mapping|Sequence|NamedTuple|UUID)"),
    ("py:.*", r"(typing\.)?Protocol|Flask|Blueprint|(webtest\.)?TestResponse|prometheus_client\..*"),
    ("py:.*", r".*\b(WSGIEnvironment|WSGIApplication|StartResponse)"),
    # The shapes of callables; the docstrings that take them say them.
    ("py:.*", r"(.*\.)?(Key|Scope|Guard|Fingerprint|Hook|Unset|View|T)"),
]

html_theme = "flask"
html_title = f"flask-runonce {version}"
html_sidebars = {"**": ["globaltoc.html", "localtoc.html", "searchbox.html"]}
html_theme_options = {"globaltoc_maxdepth": 1}
version_banner = False  # it would ask the package index from each reader's browser
html_show_sourcelink = False
html_copy_source = False


def link_the_contract(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make the "CONTRACT section 4" of a docstring a link to that section."""
    lines[:] = [re.sub(r"(CONTRACT section (\d))", r":ref:`\1 <contract-\2>`", line) for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", link_the_contract)
