"""``python -m trainer.cache --from STORE --to DIR``: a verified copy of a compiled-graph cache on this worker's disk.

A launcher starts this process on each node. Workers that all read their cache from a shared file system made
collectives time out (HLAT, arXiv 2404.10630), so each worker has its own copy. Graphs are code, so only files that
match the manifest are copied (``hlatctl.cache``). Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from hlatctl.cache.store import open_store
from hlatctl.cache.warm import warm
from hlatctl.run.errors import run_main


def main(argv: list[str] | None = None) -> int:
    """Copy the cache and print what was done as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.cache", description=__doc__)
    parser.add_argument("--from", dest="source", required=True, help="folder, archive or URL")
    parser.add_argument("--to", dest="target", type=Path, required=True)
    arguments = parser.parse_args(argv)
    done = warm(open_store(arguments.source), arguments.target.expanduser())
    for text in (*done.skipped, *done.quarantined):
        print(f"warning: {text}", file=sys.stderr)
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
