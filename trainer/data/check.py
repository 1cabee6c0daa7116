"""``python -m trainer.data.check --config FILE``: would this corpus and tokenizer do? In seconds.

Looks at names, schemas and first lines, with the same code that ``trainer.data.prepare`` reads them with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.load import load
from hlatctl.run.errors import run_main
from trainer.data import corpus


def main(argv: list[str] | None = None) -> int:
    """Check; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.data.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    corpus.check(load(parser.parse_args(argv).config))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
