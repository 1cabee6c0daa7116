"""Compiled graphs: what a cache of them holds, whether it is whole, and how it gets to every worker's own disk.

Knows files and folders, no compiler and no run: the command line and the workers use it alike. Standard library only,
but for ``store.py``, which takes fsspec for stores that are no folder.
"""
