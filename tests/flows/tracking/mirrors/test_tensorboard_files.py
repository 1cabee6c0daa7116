"""TensorBoard's own reader sees each step once, with the values that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.util import tensor_util

from conf.schema import Config
from flows.tracking.mirrors import sync
from flows.tracking.mirrors.tensorboard_files import FILE
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.conftest import events, scalars, texts
from tests.flows.tracking.mirrors.make import evaluate, finish, label, losses, make_run, train


def served(run: RunPaths, part: str, tag: str) -> list[tuple[int, float]]:
    """Return a curve as TensorBoard's server reads it without its data server."""
    reader = plugin_event_accumulator.EventAccumulator(str(run.tensorboard / part), tensor_size_guidance={"scalars": 0})
    values = reader.Reload().Tensors(tag)
    return [(event.step, tensor_util.make_ndarray(event.tensor_proto).item()) for event in values]


def test_after_a_restart_only_the_new_values_are_shown(run: RunPaths) -> None:
    train(run, 1, 10)
    evaluate(run, 8)
    sync.sync(run, "tensorboard")
    train(run, 6, 7, attempt=2, add=100)
    sync.sync(run, "tensorboard")
    expected = [*losses(1, 5), *losses(6, 7, add=100)]
    assert scalars(run, "train_by_tokens/loss", "by_tokens") == [(step * 100, loss) for step, loss in expected]
    assert scalars(run, "eval/mmlu_all") == [(8, 0.5)], "scores stay"
    assert scalars(run, "eval_by_tokens/mmlu_all") == [(800, 0.5)]
    assert served(run, "by_step", "train/loss") == expected


@pytest.mark.parametrize("part", ["", "by_step"])
def test_removed_files_are_written_again(run: RunPaths, part: str) -> None:
    train(run, 1, 3)
    evaluate(run, 2)
    sync.sync(run, "tensorboard")
    (run.tensorboard / part / FILE).unlink()
    train(run, 4, 4, attempt=2)
    sync.sync(run, "tensorboard")
    assert [step for step, _ in scalars(run, "train/loss", "by_step")] == [1, 2, 3, 4]
    assert scalars(run, "eval/mmlu_all") == [(2, 0.5)]


def test_configuration_labels_and_outcome_are_there(run: RunPaths) -> None:
    label(run, name="best", tags=["model=a|b"], note="looks good")
    train(run, 1, 2)
    finish(run, "failed", "it broke")
    sync.sync(run, "tensorboard")
    seq_len = Config().train.seq_len
    assert f"| train.seq_len | {seq_len} |" in texts(run, "config")[0]
    assert texts(run, "outcome") == ["failed at step 2: it broke"]
    assert texts(run, "labels")[0].startswith("**best**\n\n| key | value |\n|---|---|\n| model | a&#124;b |\n\n")
    content: dict[str, Any] = events(run).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert (start.group_name, start.hparams["train.seq_len"].number_value) == ("one", seq_len)
    assert end.status == api_pb2.STATUS_FAILURE


def test_a_simulated_run_is_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path, "dry", simulated=True)
    train(run, 1, 2)
    sync.sync(run, "tensorboard")
    assert [path.name for path in run.tensorboard.iterdir()] == ["SIMULATED"]
    assert len(scalars(run, "train/loss", "SIMULATED/by_step")) == 2
    assert texts(run, "simulated", "SIMULATED")[0].startswith("SIMULATED: nothing was trained")
    assert texts(run, "labels", "SIMULATED")[0].startswith("**dry (SIMULATED)**")


def test_files_are_as_private_as_their_run(run: RunPaths) -> None:
    train(run, 1, 2)
    sync.sync(run, "tensorboard")
    made = [run.tensorboard, *run.tensorboard.rglob("*"), run.mirror_cursor("tensorboard")]
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)
