"""``python -m trainer.cache --from STORE --to DIR``: a verified copy of a compiled-graph cache on this worker's disk.

A shared file system under every worker's compiler made collectives time out (HLAT, arXiv 2404.10630), so each worker
reads its own copy. Graphs are code: only what equals its manifest is copied. All of it is ``hlatctl.cache``'s; this is
the process that a launcher starts on each node. Standard library only.
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
    """Copy, and print what was done as JSON; an exception says what is wrong."""
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
