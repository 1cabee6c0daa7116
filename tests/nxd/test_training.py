"""Backend nxd on a CPU against the real library: the curves of torch_native, from its checkpoint. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from hlatctl.run import processes as process_tree
from hlatctl.run.checkpoint import MANIFEST, why_invalid
from hlatctl.run.paths import RunPaths, step_name
from trainer.checkpoint.shards import read_tensors
from trainer.convert.export import read_weights

pytestmark = pytest.mark.processes

_ONE_KEY_HEAD = {"model": {"num_heads": 8, "num_kv_heads": 1}}
#: Processes, keys of ``parallel``, and of other groups.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2}, {}),
    "dp2": (2, {}, {}),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True, "activation_checkpointing": "full"}, {}),
    "zero1_dp2_tp2": (4, {"tensor_parallel_size": 2, "data_parallel": "zero1"}, {}),
    "pp2": (2, {"pipeline_parallel_size": 2, "activation_checkpointing": "selective"}, {}),
    "zero1_dp2_pp2": (4, {"pipeline_parallel_size": 2, "data_parallel": "zero1"}, {}),
    "tp2_sp_pp2": (4, {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2}, {}),
    # Processes that share a key/value head: of 4 with 2 heads the first and the third, and the second and the fourth
    # (trn1's order), so that a head is not a rank; of 2 with 1 head both, each with four of its query heads.
    "tp4_kv2": (4, {"tensor_parallel_size": 4}, {}),
    "zero1_dp2_tp2_sp_kv1": (
        4,
        {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel": "zero1"},
        _ONE_KEY_HEAD,
    ),
    "tp2_kv1_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, _ONE_KEY_HEAD),
}
#: The same with other number formats, and how far rounding may lead the loss from that of one process.
ROUNDED: dict[str, tuple[str, float]] = {
    "zero1_dp2_mixed": ("mixed", 5e-3),
    "tp2_bf16_sr": ("bf16_sr", 2e-2),
    "zero1_dp2_bf16_sr": ("bf16_sr", 2e-2),
    "zero1_dp2_tp2_kv1_mixed": ("mixed", 5e-3),
    "tp2_kv1_bf16_sr": ("bf16_sr", 2e-2),
}
LAYOUTS |= {
    "zero1_dp2_mixed": (2, {"data_parallel": "zero1"}, {"precision": {"name": "mixed"}}),
    "tp2_bf16_sr": (2, {"tensor_parallel_size": 2}, {"precision": {"name": "bf16_sr"}}),
    "zero1_dp2_bf16_sr": (2, {"data_parallel": "zero1"}, {"precision": {"name": "bf16_sr"}}),
    "zero1_dp2_tp2_kv1_mixed": (
        4,
        {"tensor_parallel_size": 2, "data_parallel": "zero1"},
        {"precision": {"name": "mixed"}, **_ONE_KEY_HEAD},
    ),
    "tp2_kv1_bf16_sr": (2, {"tensor_parallel_size": 2}, {"precision": {"name": "bf16_sr"}, **_ONE_KEY_HEAD}),
}
_SAVED_STEP, _STEPS = 5, 25
_TOLERANCE = {"loss": 2e-6, "grad_norm": 1e-4, "param_norm": 1e-6}

Events = Callable[..., list[dict[str, Any]]]
Train = Callable[[RunPaths, int], str]


@pytest.fixture(scope="module")
def make_layout(make_run: Callable[..., RunPaths]) -> Callable[..., RunPaths]:
    def make(root: Path, *, processes: int = 1, **changes: Any) -> RunPaths:
        train = {
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "max_steps": _STEPS,
            "tokens": 1 << 20,
            **changes.pop("train", {}),
        }
        groups: dict[str, Any] = {
            "train": train,
            "cluster": {"processes_per_node": processes},
            "optimizer": {"lr": 3e-3, "warmup_steps": 1, "min_lr_fraction": 1.0},
            "checkpoint": {"every_steps": _SAVED_STEP, "keep": 9},
            **changes,
        }
        return make_run(root, **groups)

    return make


@pytest.fixture(scope="module")
def launch(start: Callable[..., Any]) -> Callable[[RunPaths, int], Any]:
    """Start an attempt of a run."""

    def begin(run: RunPaths, attempt: int) -> Any:
        argv = ("-m", "trainer", "--run-dir", os.fspath(run.root), "--attempt", str(attempt))
        return start(*argv, processes=load(run.config).world_size)

    return begin


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
) -> Callable[..., RunPaths]:
    """Runs of one process of torch_native, by their additional configuration."""
    runs: dict[str, RunPaths] = {}

    def train(**changes: Any) -> RunPaths:
        key = str(changes)
        if key not in runs:
            runs[key] = make_layout(tmp_path_factory.mktemp("reference") / "run", **changes)
            finish(launch(runs[key], 1))
        return runs[key]

    return train


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    reference: Callable[..., RunPaths],
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
) -> Callable[[str], RunPaths]:
    """A layout's run on backend nxd, that began from torch_native's checkpoint."""
    runs: dict[str, RunPaths] = {}

    def train(layout: str) -> RunPaths:
        if layout not in runs:
            processes, parallel, changes = LAYOUTS[layout]
            root = tmp_path_factory.mktemp(layout) / layout
            runs[layout] = run = make_layout(
                root, processes=processes, parallel=parallel, backend={"name": "nxd"}, **changes
            )
            begin_from(reference(**changes), run)
            finish(launch(run, 1))
        return runs[layout]

    return train


def begin_from(other: RunPaths, run: RunPaths) -> None:
    run.checkpoints.mkdir()
    shutil.copytree(other.checkpoint(_SAVED_STEP), run.checkpoint(_SAVED_STEP))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_goes_on_with_the_curve_of_torch_native(
    layout: str, reference: Callable[..., RunPaths], trained: Callable[[str], RunPaths], events_of: Events
) -> None:
    ours, theirs = events_of(trained(layout), "step"), events_of(reference(**LAYOUTS[layout][2]), "step")
    assert [event["step"] for event in ours] == list(range(_SAVED_STEP + 1, _STEPS + 1))
    tolerances = {"loss": ROUNDED[layout][1]} if layout in ROUNDED else _TOLERANCE
    for key, tolerance in tolerances.items():
        got, expected = [event[key] for event in ours], [event[key] for event in theirs[_SAVED_STEP:]]
        differ = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
        print(f"{layout}: {key} differs by at most {differ:.1e}")
        assert differ <= tolerance, key
    assert not events_of(trained(layout), "alarm")


@pytest.mark.parametrize("layout", ["zero1_dp2_tp2", "zero1_dp2_tp2_sp_kv1"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    layout: str,
    reference: Callable[..., RunPaths],
    trained: Callable[[str], RunPaths],
    tmp_path: Path,
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
    events_of: Events,
) -> None:
    undisturbed = trained(layout)
    processes, parallel, changes = LAYOUTS[layout]
    run = make_layout(tmp_path / layout, processes=processes, parallel=parallel, backend={"name": "nxd"}, **changes)
    begin_from(reference(**changes), run)
    process = launch(run, 1)
    while not [event for event in events_of(run, "checkpoint_verified", 1) if event["step"] >= 10]:
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    for pid in (*process_tree.descendants(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    finish(launch(run, 2))
    resumed = events_of(run, "train_started", 2)[0]["resumed_from_step"]
    assert 10 <= resumed < _STEPS
    expected = {event["step"]: event["loss"] for event in events_of(undisturbed, "step")}
    got = {event["step"]: event["loss"] for event in events_of(run, "step", 2)}
    assert got == {step: loss for step, loss in expected.items() if step > resumed}


@pytest.mark.parametrize("layout", ["zero1_dp2_tp2", "tp4_kv2", "zero1_dp2_tp2_sp_kv1"])
def test_what_it_trained_reads_as_what_torch_native_trained(
    layout: str, reference: Callable[..., RunPaths], trained: Callable[[str], RunPaths]
) -> None:
    ours, theirs = read_weights(trained(layout), _STEPS), read_weights(reference(**LAYOUTS[layout][2]), _STEPS)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize("layout", ["tp4_kv2", "zero1_dp2_tp2_sp_kv1"])
def test_torch_native_goes_on_from_what_it_trained(
    layout: str,
    reference: Callable[..., RunPaths],
    trained: Callable[[str], RunPaths],
    tmp_path: Path,
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
    events_of: Events,
) -> None:
    changes = LAYOUTS[layout][2]
    run, step = make_layout(tmp_path / "run", **changes), _STEPS - _SAVED_STEP
    run.checkpoints.mkdir()
    shutil.copytree(trained(layout).checkpoint(step), run.checkpoint(step))
    finish(launch(run, 1))
    ours, theirs = events_of(run, "step"), events_of(reference(**changes), "step")[step:]
    assert [event["step"] for event in ours] == [event["step"] for event in theirs]
    assert all(abs(a["loss"] - b["loss"]) <= _TOLERANCE["loss"] * b["loss"] for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layout", ["zero1_dp2_tp2", "zero1_dp2_tp2_sp_kv1"])
def test_the_librarys_own_checkpoint_holds_everything(
    layout: str,
    trained: Callable[[str], RunPaths],
    tmp_path: Path,
    start: Callable[..., Any],
    finish: Callable[..., str],
) -> None:
    run, step = trained(layout), 10
    exchange = ("-m", "trainer.convert.nxd_exchange", "--run-dir", os.fspath(run.root))
    theirs, ours = tmp_path / "theirs", tmp_path / step_name(step)
    finish(start(*exchange, "--step", str(step), "--to", os.fspath(theirs), processes=4))
    tag = theirs / step_name(step)
    assert (tag / "done").exists(), "the library knows it for complete"
    assert len(list((tag / "optim").glob("*.pt.tensors"))) == 4, "each process has its part of the moments"
    finish(start(*exchange, "--from", os.fspath(theirs), "--to", os.fspath(ours), processes=4))
    before, after = (read_tensors(folder, lambda name: True) for folder in (run.checkpoint(step), ours))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    told = {path.name: path.read_bytes() for path in run.checkpoint(step).glob("*.json") if path.name != MANIFEST}
    assert {name: (ours / name).read_bytes() for name in told} == told, "the loader's state among it"
    assert why_invalid(ours) is None


def test_graphs_do_not_grow_with_steps_and_the_kernel_attends_as_torch(
    tmp_path: Path, make_layout: Callable[..., RunPaths], start: Callable[..., Any], finish: Callable[..., str]
) -> None:
    # With these rates both of AdamW's bias corrections become exactly 1 on the way.
    run = make_layout(
        tmp_path / "run",
        backend={"name": "nxd"},
        train={"micro_batch_size": 2, "max_steps": 20},
        optimizer={"lr": 3e-3, "warmup_steps": 10, "beta1": 0.05, "beta2": 0.1},
    )
    seen = json.loads(finish(start("tests/nxd/single.py", os.fspath(run.root), processes=1)).splitlines()[-1])
    boundaries_of_step = 3  # two micro-batches and the update
    compiled = seen["compiled"][-20 * boundaries_of_step :]
    print(f"graphs compiled by step 1: {compiled[2]}, by step 20: {compiled[-1]}; by kernel {seen['attention']:.1e}")
    assert compiled[2] == compiled[-1]
    assert seen["attention"] < 1e-4
    assert seen["sums"] == [], "FP32"
