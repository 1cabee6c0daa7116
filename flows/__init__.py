"""Flows: run stages in order, start jobs, and recover from failures.

``pretrain`` and ``evaluate`` are the flows; ``control`` stops a run, and ``describe`` shows what a flow would do.
``sweep``, ``drill`` and ``forecast`` run many flows. They use ``stages`` (one function each), ``tracking`` (MLflow and
Prefect), ``simulation``, ``runtime``, ``recovery`` and ``launch`` (one protocol for all launchers). Flows never import
torch, ``trainer`` or ``eval``: they start them as processes and read the files that these write.
"""

#: Read by `hlatctl.__main__`: another distribution may contain a package of this name.
OWNER = "hlatctl"
