"""Configuration of the site.

``python -m sphinx -W --keep-going -n -b html docs OUT`` builds it; ``pip install --group docs``
installs what that needs besides this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import roseinfer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "roseinfer"
author = "the authors of roseinfer"
copyright = author  # noqa: A001 - Sphinx's name
release = version = roseinfer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["Containerfile"]
source_suffix = {".md": "markdown"}

# Every link to a heading is checked; the anchors are GitHub's, where pages are read too.
myst_heading_anchors = 4
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80

# A build downloads nothing, so names of other projects have no link.
nitpick_ignore_regex = [
    ("py:class", r"(collections|os|torch)\..*|Tensor|PreTrained(Model|TokenizerBase)"),
]
# Types in public signatures that are not public themselves: aliases, and arguments that only the
# package itself passes.
_PRIVATE = "Adapter Finding KeyValue LeadingRank Prompt Request Snapshot StagedIndices Update"
nitpick_ignore = [("py:class", name) for name in _PRIVATE.split()] + [
    ("py:class", f"pytest_roseinfer.{name}")
    for name in (
        "capabilities.operation.Operation",
        "suite.conformance.ConformanceTests",
        "suite.shipped_tests.ShippedTests",
    )
]
nitpick_ignore.append(("py:class", "roseinfer.async_llm.StreamGroup"))

linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "roseinfer"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False


def shorten_defaults(*event: object) -> tuple[str, str] | None:
    """Write ``...`` for ``<factory>``, a dataclass default that Sphinx cannot parse."""
    signature, returned = event[-2:]
    if not isinstance(signature, str):
        return None
    return signature.replace("<factory>", "..."), str(returned or "")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shorten_defaults)
