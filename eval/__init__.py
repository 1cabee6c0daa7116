"""What judges a checkpoint: held-out loss, language tasks, code tasks.

Stands on conf and hlatctl.run alone. ``python -m eval`` is the process; ``eval.milestone`` reads top to bottom.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
