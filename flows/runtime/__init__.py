"""The common parts of all flows: context, jobs, clocks, signals, and Python processes other than jobs.

The stages of one flow share a ``context``. ``jobs`` runs a job to its end. ``programs`` starts Python processes that
are not jobs.
"""
