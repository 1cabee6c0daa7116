"""torchtitan as an engine: its own loop, models, parallelism and checkpoints, under this project's manager.

Everything here plugs in through torchtitan's interfaces, of the versions in ``conf.environment``. Nothing of it is
patched, except on a CPU (``cpu``), where it lacks a few functions.
"""
