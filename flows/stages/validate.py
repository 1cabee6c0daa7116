"""Validate: the configuration's rules, and whether the corpus and tokenizer that it names are there and readable."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import conf.load
import conf.validate
from conf import fingerprint
from conf.schema import Config
from flows.context import FlowContext
from flows.stages import run_stage
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError, load_error

_TIMEOUT_S = 120


def validate(ctx: FlowContext) -> None:
    """Check the configuration and its inputs."""

    def work() -> dict[str, Any]:
        check(ctx.config)
        return {}

    run_stage(ctx, "validate", fingerprint.config_fingerprint(ctx.config), work)


def check(config: Config) -> None:
    """Check a configuration and the files that it names; makes nothing.

    Raises:
        ConfigError: a rule is broken, or the suite has no task of that name.
        DataError: the corpus or the tokenizer is missing, empty or unreadable.
    """
    conf.validate.validate(config)
    if config.data.path or config.tokenizer.path:
        _ask("trainer.data.check", config)
    if config.eval.enabled and config.eval.tasks:
        _ask("eval.check", config)


def _ask(module: str, config: Config) -> None:
    """Let a room that this one must not import judge the configuration, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-check-") as folder:
        config_file, error_file = Path(folder) / "config.yaml", Path(folder) / "error.json"
        config_file.write_text(conf.load.dump(config), encoding="utf-8")
        result = subprocess.run(
            [sys.executable, "-P", "-m", module, "--config", os.fspath(config_file)],
            env={**os.environ, ERROR_FILE_ENV: os.fspath(error_file)},
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if result.returncode:
            last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise load_error(error_file) or LaunchError(f"{module}: the check itself failed ({last_line})")
