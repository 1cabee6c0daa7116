"""What may be asked of hlatctl: the schema, how a configuration is composed, checked and fingerprinted.

``schema`` is the truth; the YAML groups hold differences. Only ``compose``, and ``axes`` and ``variations`` for sweeps,
import Hydra, so the trainer and the evaluator read a resolved ``config.yaml`` (``load``) without it.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
