"""The command line: one file per command; the only importer of typer and rich.

A command parses its arguments, calls ``flows``, ``hlatctl.report`` or ``hlatctl.plan``, and prints: data on stdout,
messages on stderr. Importing these modules is fast, because ``hlatctl --help`` imports all of them.
"""
