"""``python -m trainer.torchtitan.check --config FILE``: check a configuration, and print torchtitan's own as JSON.

With ``--counts``, print the counts and the shape of ``model.flavor`` instead. ``model.module`` may be anyone's code:
this process has a limit of memory, and only its answer gets to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from conf.environment import check_torchtitan
from conf.load import load
from conf.schema import Config
from hlatctl.run.errors import run_main

#: Limit of memory. Importing torchtitan and building a model without storage takes 0.4 GB.
_MEMORY_BYTES = 16 << 30


def settings(config: Config) -> dict[str, Any]:
    """Return torchtitan's configuration, without its model.

    Raises:
        ConfigError: torchtitan refuses it, or has no such model or setting.
        DependencyError: a package is missing.
    """
    _prepare(config)
    from trainer.convert.torchtitan import check_export
    from trainer.torchtitan.configuration import trainer_config

    made = trainer_config(config)
    check_export(config, made.model_spec)
    titan: dict[str, Any] = made.to_dict()
    spec = titan.pop("model_spec")
    return {"model": {"name": spec["name"], "flavor": spec["flavor"]}, **titan}


def counts(config: Config) -> dict[str, Any]:
    """Return the keys of ``model`` that follow from ``model.module`` and ``model.flavor``. Raises as `settings`."""
    _prepare(config)
    from trainer.convert.torchtitan import counts_of

    return counts_of(config)


def _prepare(config: Config) -> None:
    check_torchtitan(config)
    if config.backend.device == "cpu":
        from trainer.torchtitan import cpu

        cpu.adapt()


def main(argv: list[str] | None = None) -> int:
    """Check a configuration; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.torchtitan.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--counts", action="store_true", help="count the parameters of model.flavor")
    arguments = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    work = counts if arguments.counts else settings
    text = json.dumps(work(load(arguments.config)), default=str)
    with open(answer, "w", encoding="utf-8") as stdout:
        print(text, file=stdout)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
