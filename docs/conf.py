"""Sphinx's configuration: `tox run -e docs` builds the documentation, with every warning an error."""

from pallets_sphinx_themes import get_version

project = "flask-runonce"
copyright = "the flask-runonce maintainers"
release, version = get_version("flask-runonce")

extensions = ["myst_parser", "sphinx.ext.autodoc", "pallets_sphinx_themes"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `name` for code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpick_ignore_regex = [
    # Other projects' names, and what the type checker alone sees. Their documentation is not asked for at each build.
    ("py:.*", r"(flask|werkzeug|httpx|redis|sqlalchemy|sa|blinker|collections|uuid|threading|asyncio|wsgiref)\..*"),
    ("py:.*", r"(typing\.|t\.)?(Any|Callable|Collection|Iterable|Mapping|Sequence|NamedTuple|UUID)"),
    ("py:.*", r"(typing\.)?Protocol|Flask|Blueprint"),
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
