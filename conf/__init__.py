"""The configuration: its schema, composition, validation and fingerprints.

``schema`` defines keys, types and defaults; the YAML groups contain differences. Only ``compose``, ``axes``, ``space``
and ``variations`` import Hydra, so the trainer and the evaluator read a resolved ``config.yaml`` (``load``) without it.
"""

#: Read by `hlatctl.__main__`, because another distribution may have a package of this name.
OWNER = "hlatctl"
