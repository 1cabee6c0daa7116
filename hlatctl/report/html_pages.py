"""Fill the HTML templates in ``templates/``; the only importer of jinja2.

All values are escaped; none is marked safe. Figures are embedded as base64 images, so that ids of different SVGs can't
collide.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from hlatctl.run.errors import DependencyError, install
from hlatctl.run.labels import MARK, REPORT
from hlatctl.units import utc

_TEMPLATES = Path(__file__).parent / "templates"


def fill(template: str, **values: Any) -> str:
    """Return the HTML text of a page; DependencyError if jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise DependencyError("the report's pages need jinja2", hint=install("head")) from None
    environment = jinja2.Environment(
        autoescape=True,
        keep_trailing_newline=True,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"data_uri": _data_uri, "utc": utc}
    return environment.get_template(template).render(MARK=MARK, REPORT=REPORT, **values)


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
