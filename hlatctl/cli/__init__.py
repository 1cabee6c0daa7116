"""The command line: one file a command; the only importer of typer and rich.

A command parses what was typed, calls ``flows`` or reads a run directory, and prints. stdout is data, stderr is talk.
What a run is, does or means is decided in other rooms. Modules here import nothing slow when they are imported:
``hlatctl --help`` reads all of them.
"""
