"""The packages that the validate stage asks before anything is created."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from conf.compose import compose
from flows import pretrain
from flows.launchers import open_context
from flows.stages import validate
from hlatctl.run.errors import ConfigError
from tests.flows.conftest import Recorder


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], []),
        (["eval.tasks=[smoke_mmlu]"], ["eval.check"]),
        (["eval=hlat"], ["eval.check"]),
        (["eval.runner=vllm"], ["eval.check"]),
        (["eval.items={smoke_mmlu:[1]}"], ["eval.check"]),
        (["eval.include_path=[mine]"], ["eval.check"]),
        (["eval=hlat", "eval.enabled=false"], []),
        (["backend.device=cuda"], ["trainer.device_check"]),
        (["backend.device=cuda", "cluster=slurm", "cluster.nodes=2"], []),
    ],
)
def test_the_evaluator_is_asked_if_the_suite_may_miss_something(
    overrides: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(validate, "ask_about", lambda module, config, timeout_s: calls.append(module))
    validate.check(compose(overrides))
    assert calls == asked


def test_a_chat_template_needs_a_tokenizer_that_has_one() -> None:
    with pytest.raises(ConfigError, match=r"eval\.chat_template=True: a tokenizer that hlatctl trains has no chat"):
        validate.check(compose(["eval.chat_template=true"]))


def test_a_run_says_once_which_tasks_this_machine_will_skip(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hlatctl.machine_checks._sandbox_problem", lambda: "bwrap: not found")
    monkeypatch.setattr(validate, "check", lambda config, begun: None)
    run = pretrain.create(compose(["cluster=local", "tracking=none", f"runs_dir={tmp_path / 'runs'}"]), argv=[])
    with closing(open_context(run, recorder)) as ctx:
        validate.validate(ctx)
        (warning,) = ctx.refresh().warnings
        assert warning.startswith("smoke_humaneval: will be skipped, because ")
        assert recorder.messages.count(warning) == 1
