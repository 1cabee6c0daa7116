"""What may be asked of hlatctl: the schema, how a configuration is composed, checked and fingerprinted.

``schema`` is the truth; the YAML groups hold differences. Only ``compose``, and what makes sweeps of it (``axes``, ``variations``), import Hydra, so the trainer and the
evaluator read a resolved ``config.yaml`` (``load``) without it.
"""
