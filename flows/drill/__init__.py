"""Drills: faults are injected into a short real run, and its recovery is checked.

``arena`` is the drilled run and what can be observed of it, ``faults`` has one function per fault, and ``exercise``
injects one after another and compares with an undisturbed run. Faults come from outside, as signals and as damage to
files: the trainer has no code for drills.
"""
