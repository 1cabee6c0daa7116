"""What every flow uses: its context, jobs, clocks, signals, and Python processes outside of jobs.

The stages of one flow share a ``context``. ``jobs`` runs a job to its end. ``spawn`` starts Python processes that are
not jobs.
"""
