"""Signals to a job's processes, sent on the node where they run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flows.drill import on_node
from flows.launch.base import Handle, Job
from flows.launch.local import LocalLauncher
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

#: Starts one process like a training process of rank 0, and ends with its code.
_JOB = """
import os, subprocess, sys
code = "import time; print('started', flush=True); time.sleep(600)"
sys.exit(-subprocess.run([sys.executable, "-c", code], env={**os.environ, "RANK": "0"}).returncode)
"""


@pytest.mark.parametrize(
    ("what", "name", "ends"),
    [(on_node.RANK, "SIGKILL", ("failed", signal.SIGKILL)), (on_node.PROGRAM, "SIGKILL", ("lost", None))],
)
def test_the_process_that_is_named_gets_the_signal(
    what: str, name: str, ends: tuple[str, int | None], tmp_path: Path
) -> None:
    job = Job(name="try", run_dir=tmp_path, argv=("-c", _JOB), launch_dir=tmp_path / "launch", log_dir=tmp_path)
    launcher = LocalLauncher()
    handle = launcher.submit(launcher.render(job))
    try:
        wait_for(lambda: "started" in job.log.read_text())
        assert on_node.main([str(tmp_path / "launch" / "try"), "0", what, name]) == 0
        wait_for(lambda: launcher.status(handle).ended)
        assert (launcher.status(handle).state, launcher.status(handle).exit_code) == ends
    finally:
        launcher.cancel(handle, grace_s=0)


def test_a_job_without_a_process_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = Handle(launcher="slurm", name="try", launch_dir=str(tmp_path))
    assert on_node.main([f"{handle.launch_dir}/{handle.name}", "1", on_node.RANK, "SIGKILL"]) == 1
    assert f"{tmp_path}/try: node 1 has no record of its start" in capsys.readouterr().err
