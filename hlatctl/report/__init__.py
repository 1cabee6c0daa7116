"""Numbers, figures and pages from journals; writes only to ``report/``.

The same journal always gives the same bytes. Unfinished runs have a report too, even without a step.
"""
