"""Sweeps: many runs of one configuration that differ in a few keys, compared while they go on.

``create`` makes a sweep or extends it, ``head`` drives it from wherever it stands, ``trials`` looks after one run of
it, ``study`` is the only importer of Optuna, ``objective`` and ``signs`` judge a run by its state (both pure), ``cost``
predicts what a sweep takes. The sweep's journal is the truth; ``hlatctl.run.sweep`` folds it.
"""
