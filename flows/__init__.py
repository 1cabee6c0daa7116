"""Flows: the order of the stages, where jobs run, and what follows when something breaks.

``pretrain`` and ``evaluate`` are the flows, ``control`` and ``describe`` stop and describe one; ``sweep``, ``drill``
and ``forecast`` are flows of flows. Below them: ``stages`` (a function each), ``tracking`` (MLflow and Prefect),
``simulation``, ``runtime``, ``recovery`` and ``launch``, which starts jobs behind one protocol. Never imports torch,
``trainer`` or ``eval``: it launches them and reads what they write.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
