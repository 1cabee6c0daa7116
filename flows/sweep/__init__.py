"""Sweeps: many runs of one configuration that differ in a few keys, compared while they run.

``create`` makes or extends a sweep, ``driver`` drives it, and ``trials`` handles one run of it. ``study`` is the only
importer of Optuna. ``objective`` and ``signs`` compute from a run's state (both pure), and ``cost`` predicts what a
sweep takes. The sweep's journal is the only record; ``hlatctl.run.sweep`` folds it.
"""
