"""Flows: the order of the stages, where jobs run, and recovery after failures.

``pretrain`` and ``evaluate`` are the flows; ``control`` and ``describe`` stop and describe one. ``sweep``, ``drill``
and ``forecast`` are flows of flows. Below them are ``stages`` (one function each), ``tracking`` (MLflow and Prefect),
``simulation``, ``runtime``, ``recovery`` and ``launch``, which starts jobs behind one protocol. Flows never import
torch, ``trainer`` or ``eval``: they start them as processes and read the files that these write.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
