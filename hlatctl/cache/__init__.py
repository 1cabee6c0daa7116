"""Caches of compiled graphs: their contents, their checks, and verified copies on every worker's own disk.

Archives of Python environments and the mirror of checkpoints in object storage are here too. All know files and
folders, not compilers or training. Standard library only, except that ``objects.py`` uses fsspec for URLs.
"""
