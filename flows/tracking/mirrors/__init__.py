"""Optional further views of a run's journal: TensorBoard and Weights & Biases (``tracking.mirrors``).

- ``base``: the interface of a mirror, and which steps count; ``points``: the data that it gets.
- ``tensorboard_files``, ``wandb_run``: the two mirrors. Only they import TensorBoard and wandb.
- ``copier``: copies new events to one mirror, and keeps how far a run has been copied.
- ``sync``: does so once, or as a process alongside a run until it ends.
"""
