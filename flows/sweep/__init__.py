"""Sweeps: many runs of one configuration that differ in a few keys, compared while they run.

``create`` makes or extends a sweep and predicts its cost, ``driver`` drives it and its trials, and ``report`` writes
its report. ``study`` computes what is compared and is the only importer of Optuna. The sweep's journal, which ``book``
writes, is the only record; ``hlatctl.run.sweep`` folds it.
"""
