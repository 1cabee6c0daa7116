"""Damage to any file of a run directory: the run continues from a state that it had, or fails with an error."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.load import load
from hlatctl.run.errors import HlatctlError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeRun
from tests.trainer.damage import WAYS, damage
from trainer.backends.torch_native import TorchNative
from trainer.step.loop import Training

#: Of a run of 24 steps.
_SAVED = (8, 16, 24)
#: Batches read after the last step; one of them must be skipped.
_BATCHES, _SKIPPED_BATCH = 4, 27


def _resume(run: RunPaths, newest: int | None = None) -> dict[str, Any]:
    """Begin an attempt like the trainer; return its step, its tensors and the next tokens."""
    config = load(run.config)
    training = Training(config, run, TorchNative(config), None, max_checkpoint_step=newest)
    try:
        return {
            "config": config,
            "step": training.step,
            "tokens": torch.stack([training.batches.next()[0] for _ in range(_BATCHES)]),
            "tensors": {name: tensor.clone() for name, tensor in training.optimizer.tensors().items()},
        }
    finally:
        training.batches.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun) -> Iterator[RunPaths]:
    run = make_run(tmp_path_factory.mktemp("damaged") / "run")
    with JournalWriter(run, OPERATOR_WRITER) as journal:
        journal.append("data_changed", key="data.skip_steps", value=[_SKIPPED_BATCH], by="someone", why="")
    config, before = load(run.config), signal.getsignal(signal.SIGTERM)
    with JournalWriter(run, train_writer(0), 1) as journal:
        assert Training(config, run, TorchNative(config), journal).run() == 0
    yield run
    signal.signal(signal.SIGTERM, before)


class _States(dict[int, dict[str, Any]]):
    def __repr__(self) -> str:  # hypothesis shows this for a failure
        return f"states of steps {list(self)}"


@pytest.fixture(scope="module")
def states(trained: RunPaths) -> _States:
    return _States({step: _resume(trained, step) for step in _SAVED})


@settings(max_examples=150, deadline=None)
@given(which=st.integers(0), where=st.integers(0), how=WAYS)
def test_damage_to_any_file_of_a_run_never_gives_a_wrong_resume(
    trained: RunPaths, states: _States, which: int, where: int, how: str
) -> None:
    present = sorted(path for path in trained.root.rglob("*") if path.is_file() and path.stat().st_size)
    path = present[which % len(present)]
    content = path.read_bytes()
    try:
        damage(path, how, where)
        try:
            resumed = _resume(trained)
        except HlatctlError as error:
            message = error.message
        else:
            message = ""
        if message:
            assert str(trained.root) in message or path.name in message
            return
        expected = states[resumed["step"]]
        assert resumed["config"] == expected["config"]
        assert torch.equal(resumed["tokens"], expected["tokens"])
        assert resumed["tensors"].keys() == expected["tensors"].keys()
        assert all(torch.equal(tensor, expected["tensors"][name]) for name, tensor in resumed["tensors"].items())
    finally:
        path.write_bytes(content)
