"""hlatctl: the experiment manager for pre-training language models.

It contains the command line (``cli``), reports (``report``), planning (``plan``), caches of compiled graphs (``cache``)
and, as the lowest layer, the run directory (``run``). It never imports torch, ``trainer`` or ``eval``.
"""

__version__ = "0.1.0"
