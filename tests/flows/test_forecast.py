"""A forecast that is terminated leaves no process behind; tests/flows/simulation has what a simulation computes."""

from __future__ import annotations

import subprocess
import sys
from signal import SIGKILL, SIGTERM

import pytest

from hlatctl.run import processes
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

#: Two workers on any machine, and more simulations than they can finish.
FORECAST = """
import os, sys
os.cpu_count = lambda: 2
from conf.compose import compose
from conf.schema import SimulationConfig
from flows import forecast

config = compose(["cluster=simulated", "eval.enabled=false", "train.max_steps=100000", "train.seq_len=512"])
forecast.play_all(config, SimulationConfig(), 10_000, print)
"""


def test_a_forecast_that_is_terminated_leaves_no_worker_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FORECAST], stdout=subprocess.DEVNULL)
    workers: list[processes.Identity] = []

    def started() -> bool:
        children = filter(None, map(processes.identify, processes.descendants(parent.pid)))
        workers[:] = [child for child in children if "spawn_main" in " ".join(processes.command_line(child.pid))]
        return len(workers) == 2

    try:
        wait_for(started)
        parent.send_signal(SIGTERM)
        assert parent.wait(WAIT_S) == -SIGTERM
        wait_for(lambda: not any(map(processes.alive, workers)))
    finally:
        parent.kill()
        parent.wait()
        for worker in workers:
            processes.send(worker, SIGKILL)
