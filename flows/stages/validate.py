"""Validate: the configuration's rules, and whether the corpus and tokenizer that it names are there and readable."""

from __future__ import annotations

from typing import Any

import conf.validate
from conf import fingerprint
from conf.schema import Config
from flows.ask import ask_about
from flows.context import FlowContext
from flows.stages import run_stage

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
    if config.data.inputs or config.tokenizer.path:
        ask_about("trainer.data.check", config, timeout_s=_TIMEOUT_S)
    if config.eval.enabled and config.eval.tasks:
        ask_about("eval.check", config, timeout_s=_TIMEOUT_S)
