"""The configuration: its schema, composition, validation and fingerprints.

``schema`` defines keys, types and defaults; the YAML groups contain differences. Only ``compose``, ``axes``, ``space``
and ``variations`` import Hydra, so the trainer and the evaluator read a resolved ``config.yaml`` (``load``) without it.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
