"""The environment of a run's jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from flows.runtime.context import make_job
from hlatctl.run.paths import RunPaths


def test_a_single_process_keeps_the_users_threads_and_gives_its_cores_away_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["cluster=local", "cluster.processes_per_node=2", "cluster.threads_per_process=3"])

    def openmp(*, distributed: bool = False) -> tuple[str | None, str | None]:
        env = make_job(config, RunPaths(tmp_path), "eval-1", distributed=distributed).env
        return env.get("OMP_NUM_THREADS"), env.get("OMP_WAIT_POLICY")

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert openmp() == ("6", "passive")
    assert openmp(distributed=True) == ("3", None), "training has its cores alone"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert openmp() == ("1", "active")
    assert openmp(distributed=True) == ("3", None), "the configuration decides about training"
