"""Backend nxd on a CPU against the real library: the curves of torch_native, from its checkpoint. Real processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run.paths import RunPaths

#: Processes, and keys of ``parallel``.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "zero1_dp2_tp2": (4, {"tensor_parallel_size": 2, "data_parallel": "zero1"}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
_SAVED_STEP, _STEPS = 5, 25


@pytest.fixture(scope="module")
def make_layout(make_run: Callable[..., RunPaths]) -> Callable[..., RunPaths]:
    def make(root: Path, *, processes: int = 1, **changes: Any) -> RunPaths:
        train = {
            "global_batch_size": 4, "micro_batch_size": 2 // min(processes, 2), "max_steps": _STEPS, "tokens": 1 << 20,
            **changes.pop("train", {}),
        }  # fmt: skip
        groups: dict[str, Any] = {
            "train": train, "cluster": {"processes_per_node": processes},
            "optimizer": {"lr": 3e-3, "warmup_steps": 1, "min_lr_fraction": 1.0},
            "checkpoint": {"every_steps": _SAVED_STEP, "keep": 9}, **changes,
        }  # fmt: skip
        return make_run(root, **groups)

    return make


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, make_layout: Callable[..., RunPaths], start: Callable[..., Any],
    finish: Callable[..., str],
) -> RunPaths:  # fmt: skip
    """One process of torch_native."""
    run = make_layout(tmp_path_factory.mktemp("reference") / "run")
    finish(start("-m", "trainer", "--run-dir", os.fspath(run.root), "--attempt", "1", processes=1))
    return run


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_goes_on_with_the_curve_of_torch_native(
    layout: str, reference: RunPaths, tmp_path: Path, make_layout: Callable[..., RunPaths], start: Callable[..., Any],
    finish: Callable[..., str], events_of: Callable[..., list[dict[str, Any]]],
) -> None:  # fmt: skip
    processes, parallel = LAYOUTS[layout]
    run = make_layout(tmp_path / layout, processes=processes, parallel=parallel, backend={"name": "nxd"})
    run.checkpoints.mkdir()
    shutil.copytree(reference.checkpoint(_SAVED_STEP), run.checkpoint(_SAVED_STEP))
    print(finish(start("-m", "trainer", "--run-dir", os.fspath(run.root), "--attempt", "1", processes=processes)))
    ours, theirs = events_of(run, "step"), events_of(reference, "step")[_SAVED_STEP:]
    assert len(ours) == _STEPS - _SAVED_STEP
    for key in ("loss", "grad_norm", "param_norm"):
        got, expected = [event[key] for event in ours], [event[key] for event in theirs]
        print(layout, key, max(abs(a - b) / b for a, b in zip(got, expected, strict=True)))
        assert got == pytest.approx(expected, rel=2e-5), key
