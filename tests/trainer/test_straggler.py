"""A slow process is reported, although all processes take equally long for a step; devices are measured before."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from tests.trainer.conftest import EventsOf, MakeRun, Ranks
from trainer.gpu_node import runtime

pytestmark = pytest.mark.processes


def test_the_slow_process_is_reported_and_not_the_one_that_waits(
    tmp_path: Path, make_run: MakeRun, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "slow", cluster={"processes_per_node": 2}, recovery={"straggler_steps": 20})
    ranks(2, [{"work": "train", "run": os.fspath(run.root), "attempt": 1, "slow_s": 0.1}])
    (times,) = events_of(run, "rank_times")
    assert (times["step"], times["slowest_rank"]) == (20, 1)
    (straggler,) = events_of(run, "straggler")
    assert (straggler["rank"], straggler["host"]) == (1, platform.node())


def test_with_fsdp_the_process_with_the_slow_product_is_reported_and_the_model_has_the_same_bits(
    tmp_path: Path, make_run: MakeRun, ranks: Ranks, events_of: EventsOf
) -> None:
    changes = {
        "cluster": {"processes_per_node": 2},
        "parallel": {"data_parallel": "fsdp"},
        "recovery": {"straggler_steps": 20},
    }
    plain, run = make_run(tmp_path / "plain", **changes), make_run(tmp_path / "slow", **changes)
    ranks(
        2,
        [
            {"work": "train", "run": os.fspath(plain.root), "attempt": 1},
            {"work": "train", "run": os.fspath(run.root), "attempt": 1, "product": True, "slow_s": 0.1},
        ],
    )
    (times,) = events_of(run, "rank_times")
    assert (times["step"], times["what"], times["slowest_rank"]) == (20, "product", 1)
    (straggler,) = events_of(run, "straggler")
    assert (straggler["rank"], straggler["host"], straggler["device"]) == (1, platform.node(), "cpu")
    assert "times the median process's time for a matrix product for 20 steps" in straggler["message"]
    assert not events_of(plain, "rank_times"), "a thousandth of this model's step is less than any product"
    losses = [[(event["loss"], event["grad_norm"]) for event in events_of(each, "step")] for each in (plain, run)]
    assert losses[0] == losses[1]


def test_processes_measure_their_products_and_exchanges_before_training(
    tmp_path: Path, make_run: MakeRun, ranks: Ranks
) -> None:
    run = make_run(tmp_path / "run", cluster={"processes_per_node": 2})
    job = {"work": "gpu_speed", "run": os.fspath(run.root), "path": os.fspath(Path(__file__).parent / "gpu_libraries")}
    gpus = json.dumps([{}, {"CurrentClocksEventReasons": 0x80}])
    ((cool, slow),) = ranks(2, [{**job, "env": {"FAKE_GPUS": gpus}}])
    assert slow.pop("slowed") == ["power brake of the node"]
    for values, rank in ((cool, 0), (slow, 1)):
        speeds = [values.pop(name) for name in ("gpu_tflops_per_s", "gpu_node_gib_per_s")]
        assert min(speeds) > 0
        assert values == {"gpu": f"NVIDIA H200 GPU-0000000{rank}", **runtime()}
