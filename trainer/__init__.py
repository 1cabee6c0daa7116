"""What runs on the nodes: data, model, training loop, checkpoints.

Processes (``docs/architecture.md`` says what each reads and writes): ``trainer``, ``trainer.preflight``,
``trainer.cache``, ``trainer.convert.export``, ``trainer.convert.import_model``, ``trainer.data.check``,
``trainer.data.prepare``.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
