"""Caches of compiled graphs: their contents, their checks, and verified copies on every worker's own disk.

Archives of Python environments and copies of checkpoints in object storage are here too. This package handles files
and folders and knows nothing about compilers or training. Standard library only, except fsspec for URLs.
"""
