"""``python -m eval.check --config FILE``: whether the tasks that a configuration names exist, before anything runs.

Quick: reads package data, imports no harness.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.load import load
from eval import suites
from hlatctl.run.errors import run_main


def main(argv: list[str] | None = None) -> int:
    """Check the suite and the tasks; 0 if they are there."""
    parser = argparse.ArgumentParser(prog="eval.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load(parser.parse_args(argv).config)
    suites.check(config.eval.suite, config.eval.tasks)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
