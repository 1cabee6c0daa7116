"""``python -m eval.check --config FILE``: whether a suite can be run, before anything is: its names, data and packages.

A built-in suite is checked without the harness; any other asks it for its definitions, which takes some seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from conf.load import load
from eval import plan, runners
from hlatctl.run.errors import run_main


def main(argv: list[str] | None = None) -> int:
    """Check the suite, its tasks and their files; 0 if all is there."""
    parser = argparse.ArgumentParser(prog="eval.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load(parser.parse_args(argv).config)
    runners.check(config.eval.runner)
    with tempfile.TemporaryDirectory(prefix="hlatctl-eval-check-") as scratch:
        made = plan.make(config.eval, Path(scratch))
    for note in made.notes:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
