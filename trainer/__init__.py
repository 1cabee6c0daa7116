"""The code that runs on the nodes: data, model, training loop, checkpoints.

``backends`` runs steps on a device, ``checkpoint`` saves and restores, ``convert`` exports and imports, ``data``
prepares and loads the corpus, and ``neuron`` checks a Trainium node. ``docs/architecture.md`` lists the processes, and
what each reads and writes.
"""

#: Read by `hlatctl.__main__`, because another distribution may have a package of this name.
OWNER = "hlatctl"
