"""Caches of compiled graphs: their contents, their checks, and verified copies on every worker's own disk.

It knows files and folders, not compilers or runs. Standard library only, except that ``store.py`` uses fsspec for URLs.
"""
