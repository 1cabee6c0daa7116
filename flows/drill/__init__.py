"""Drills: inject faults into a short real run, and check its recovery.

``arena`` has the drilled run and what can be observed of it, and ``faults`` has one function per fault. ``exercise``
injects one fault after another and compares the run with an undisturbed one. Faults come from outside, as signals and
damaged files: the trainer has no code for drills.
"""
