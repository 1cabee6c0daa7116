"""From a run's journal to numbers, figures and a page for people; writes nothing but ``report/``.

The same journal always gives the same bytes. A run that is unfinished, or has not made a step, has a report too.
"""

from hlatctl.report.build import build
from hlatctl.report.summary import summary_markdown

__all__ = ["build", "summary_markdown"]
