"""``python -m trainer.data.check --config FILE``: check a corpus and tokenizer within seconds.

Reads names, schemas and first lines, with the same code as ``trainer.data.prepare``. A corpus in object storage is
listed; the listing is kept for fingerprints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from conf.load import load
from conf.schema import Config
from hlatctl.run.errors import HlatctlError, run_main
from trainer.data import corpus
from trainer.data.prepare_tokens import check_tokens, fetch_indexes
from trainer.data.remote import in_words, is_remote, stand_ins


def check(config: Config) -> None:
    """Check the corpus of a configuration.

    Raises:
        HlatctlError: names the problem.
    """
    if not is_remote(config):
        if not check_tokens(config):
            corpus.check(config)
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-") as folder:
        try:
            here = stand_ins(config, Path(folder), fresh=True)
            fetch_indexes(here, whole=False)
            if not check_tokens(here):
                corpus.check(here)
        except HlatctlError as error:
            error.message, error.hint = in_words(error.message), in_words(error.hint)
            raise


def main(argv: list[str] | None = None) -> int:
    """Check the corpus; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.data.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    check(load(parser.parse_args(argv).config))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
