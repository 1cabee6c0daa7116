"""Numbers, figures and pages from journals; writes only to ``report/``.

The same journal always gives the same bytes. Unfinished runs have a report too, even without a step.
"""

from hlatctl.report.build import build
from hlatctl.report.summary import summary_markdown

__all__ = ["build", "summary_markdown"]
