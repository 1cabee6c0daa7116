"""``python -m trainer.data.check --config FILE``: check a corpus and tokenizer within seconds.

It reads names, schemas and first lines, with the same code as ``trainer.data.prepare``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.load import load
from hlatctl.run.errors import run_main
from trainer.data import corpus
from trainer.data.prepare_tokens import check_tokens


def main(argv: list[str] | None = None) -> int:
    """Check the corpus; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.data.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    config = load(parser.parse_args(argv).config)
    if not check_tokens(config):
        corpus.check(config)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
