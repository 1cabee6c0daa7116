"""Evaluation of a checkpoint: held-out loss, language tasks, code tasks.

Imports only conf and hlatctl.run of this project. ``python -m eval`` is the process; start reading at
``eval.milestone``.
"""

#: Read by `hlatctl.__main__`, because another distribution may have a package of this name.
OWNER = "hlatctl"
