"""``python -m trainer.cache --from STORE --to DIR``: copy a compiled-graph cache to this worker's disk, verified.

A launcher starts this process on each node. When all workers read their cache from a shared file system, collectives
timed out (HLAT, arXiv 2404.10630), so each worker has its own copy. Graphs are code, so only files that match the
manifest are copied (``hlatctl.cache``). Uses only the standard library.

With ``-- COMMAND``, this process becomes the command after the copy. A scheduler gives each job different nodes, so
each job copies first. If the copy fails, the command still runs and compiles the graphs again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from hlatctl.cache.store import open_store
from hlatctl.cache.warm import warm
from hlatctl.run.errors import HlatctlError, run_main


def main(argv: list[str] | None = None) -> int:
    """Copy the cache, and print what was done as JSON or run the command."""
    words = sys.argv[1:] if argv is None else argv
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(prog="trainer.cache", description=__doc__)
    parser.add_argument("--from", dest="source", required=True, help="folder, archive or URL")
    parser.add_argument("--to", dest="target", type=Path, required=True)
    arguments = parser.parse_args(own)
    try:
        done = warm(open_store(arguments.source), arguments.target.expanduser())
    except HlatctlError as error:
        if not command:
            raise
        print(f"warning: {error.message}; graphs are compiled again", file=sys.stderr, flush=True)
        os.execvp(command[0], command)
    for text in (*done.skipped, *done.quarantined):
        print(f"warning: {text}", file=sys.stderr, flush=True)
    if command:
        os.execvp(command[0], command)
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
