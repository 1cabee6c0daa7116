"""``python -m trainer.torchtitan.check --config FILE``: check a configuration, and print torchtitan's own as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from conf.environment import check_torchtitan
from conf.load import load
from conf.schema import Config
from hlatctl.run.errors import run_main


def settings(config: Config) -> dict[str, Any]:
    """Return torchtitan's configuration, without its model.

    Raises:
        ConfigError: torchtitan refuses it, or has no such model or setting.
        DependencyError: a package is missing.
    """
    check_torchtitan(config)
    if config.backend.device == "cpu":
        from trainer.torchtitan import cpu

        cpu.adapt()
    from trainer.torchtitan.configuration import trainer_config

    titan: dict[str, Any] = trainer_config(config).to_dict()
    spec = titan.pop("model_spec")
    return {"model": {"name": spec["name"], "flavor": spec["flavor"]}, **titan}


def main(argv: list[str] | None = None) -> int:
    """Check a configuration; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.torchtitan.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    print(json.dumps(settings(load(parser.parse_args(argv).config)), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
