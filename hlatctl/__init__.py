"""hlatctl: the experiment manager for pre-training language models.

This package is what a person touches (``cli``, ``report``, ``plan``) and, as the lowest layer, the run
directory (``run``). It must never import torch, ``trainer`` or ``eval``.
"""

__version__ = "0.1.0"
