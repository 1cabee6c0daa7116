"""Validate: the configuration's rules, and whether the corpus and tokenizer that it names are there and readable."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import conf.load
import conf.validate
from conf import fingerprint
from conf.initial_weights import check_initial_weights
from conf.schema import Config
from flows.context import FlowContext
from flows.side_process import run_module
from flows.stages import run_stage
from hlatctl.run.manifest import checkpoint_steps

_TIMEOUT_S = 120


def validate(ctx: FlowContext) -> None:
    """Check the configuration and its inputs."""

    def work() -> dict[str, Any]:
        check(ctx.config, begun=bool(checkpoint_steps(ctx.run)))
        return {}

    run_stage(ctx, "validate", fingerprint.config_fingerprint(ctx.config), work)


def check(config: Config, *, begun: bool = False) -> None:
    """Check a configuration and the files that it names; makes nothing.

    Args:
        config: of a run.
        begun: the run has a checkpoint of its own, so that its initial weights are needed no more.

    Raises:
        ConfigError: a rule is broken, the suite has no task of that name, or the initial weights are another model's.
        DataError: the corpus or the tokenizer is missing, empty or unreadable.
        CheckpointError: the initial weights are incomplete.
    """
    conf.validate.validate(config)
    if not begun:
        check_initial_weights(config, checksums=False)
    if config.data.path or config.tokenizer.path:
        _ask("trainer.data.check", config)
    if config.eval.enabled and config.eval.tasks:
        _ask("eval.check", config)


def _ask(module: str, config: Config) -> None:
    """Let a room that this one must not import judge the configuration, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-check-") as folder:
        config_file = Path(folder) / "config.yaml"
        config_file.write_text(conf.load.dump(config), encoding="utf-8")
        run_module(module, "--config", os.fspath(config_file), timeout_s=_TIMEOUT_S)
