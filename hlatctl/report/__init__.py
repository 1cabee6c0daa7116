"""From a run's journal to numbers, figures and a page for people; writes nothing but ``report/``.

The same journal always gives the same bytes. A run that is unfinished, or has not made a step, has a report too.
"""
