"""The configuration: its schema, composition, checks and fingerprints.

``schema`` defines all keys and defaults; the YAML groups contain differences. Only ``compose``, and for sweeps ``axes``
and ``variations``, import Hydra. The trainer and the evaluator read a resolved ``config.yaml`` (``load``) without it.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
