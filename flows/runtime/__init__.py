"""What every flow runs on: its context, jobs, clocks, signals, and processes of ours beside it.

``context`` is what the stages of one flow share. ``jobs`` runs a job to its end. ``spawn`` starts every Python
process of ours that is no job.
"""
