"""Settings that pass through to torchtitan: checked against its own configuration, each value with one owner."""

from __future__ import annotations

from typing import Any

import pytest

from conf.schema import BackendConfig, Config
from hlatctl.run.errors import ConfigError

pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")

from trainer.torchtitan.configuration import trainer_config

#: torchtitan's imports use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"metrics": {"log_frek": 1}}, "metrics.log_frek=1: torchtitan has no such setting", "log_freq"),
        ({"metrics": {"log_freq": "often"}}, "metrics.log_freq=often: must be int", ""),
        ({"metrics": {"log_freq": 0}}, "metrics.log_freq=0: must be at least 1", "leave it out"),
        ({"comm": {"mode": "fake"}}, "comm.mode=fake: hlatctl doesn't support it", "leave it out"),
        ({"training": {"steps": 7}}, "training.steps=7: this is set by train.max_steps", "set train.max_steps"),
        (
            {"dataloader": {"dataset": "c4"}},
            "dataloader.dataset=c4: this is set by data.inputs; with torchtitan's loaders, a run could continue only "
            "with as many processes as before, and no batch could be looked up or skipped",
            "set data.inputs",
        ),
    ],
)
def test_a_setting_that_can_not_pass_through_is_refused_with_its_owner_or_a_suggestion(
    settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_config(Config(backend=BackendConfig(name="torchtitan", device="cpu", torchtitan=settings)))
    assert caught.value.message.startswith(f"backend.torchtitan.{message}")
    assert hint in caught.value.hint
