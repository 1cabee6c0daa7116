"""Mirrors: copies of a run's journal in MLflow, TensorBoard and Weights & Biases.

- ``base``: the interface of a mirror, the data that it gets, and which steps count.
- ``mlflow_run``, ``tensorboard_files``, ``wandb_run``: the mirrors. Each alone imports its service's package.
- ``copier``: copies new events to one mirror, and keeps how far a run has been copied.
- ``sync``: copies a run once, or as a process alongside the run until it ends. ``conf.tracking`` lists the mirrors.
"""
