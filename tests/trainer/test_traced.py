"""A step of a large job, traced without a device: devices, collectives, and the memory that the planner expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conf import load
from conf.sizes import parameters
from hlatctl.plan.memory import memory
from hlatctl.run import files
from tests.trainer.conftest import ROOT


@pytest.mark.processes
def test_8b_on_512_gpus_has_no_tensor_on_the_host_and_the_planned_memory(tmp_path: Path) -> None:
    config = load.decode(
        {
            "model": {**yaml.safe_load((ROOT / "conf/model/llama3_8b.yaml").read_text()), "num_layers": 16},
            "precision": {"name": "mixed"},
            "parallel": {"data_parallel": "fsdp", "tensor_parallel_size": 8, "sequence_parallel": True},
            "train": {"seq_len": 8192, "global_batch_size": 64},
            "backend": {"device": "neuron", "compile": False},
            "cluster": {"nodes": 64, "processes_per_node": 8},
        }
    )
    file = tmp_path / "config.yaml"
    file.write_text(files.seal_lines(load.dump(config)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.traced", os.fspath(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    traced = json.loads(done.stdout.split("traced ")[-1])
    assert traced["devices"] == ["neuron:0"]
    # Embedding, layers, and norm with head are gathered for the forward pass, layers again for the backward pass.
    layers = config.model.num_layers
    assert traced["collectives"]["allgather_base"] == 2 * layers + 2
    assert traced["collectives"]["reduce_scatter_base"] == layers + 2
    # More than an equal share, because rank 0 has the larger part of what can't be divided equally.
    assert traced["parameters"] == pytest.approx(parameters(config.model).total / 512, rel=1e-3)
    planned = memory(replace(config, backend=replace(config.backend, device="cuda"))).need_bytes
    assert traced["peak_bytes"]["neuron:0"] == pytest.approx(planned, rel=0.02)
