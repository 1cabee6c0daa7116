"""A job's script on a real Slurm: values stay values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conf.schema import ClusterConfig
from flows.launch.slurm.launcher import SlurmLauncher
from tests.slurm.lab import Lab, wait_for
from tests.slurm.test_launcher import job

pytestmark = pytest.mark.processes

EVIL = "'; touch pwned; $(touch pwned) `touch pwned` \" \\ %j\nnext line"


def test_values_never_become_shell_syntax_nor_options_of_slurm(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "a $(touch pwned)'\"%j#`b`|c"
    code = "import os, sys; print(os.environ['EVIL'] == sys.argv[1])"
    what = job(folder, code)
    what = dataclasses.replace(what, argv=(*what.argv, EVIL), env={**what.env, "EVIL": EVIL}, processes_per_node=0)
    launcher = SlurmLauncher(ClusterConfig(launcher="slurm", nodes=2))
    handle = launcher.submit(launcher.render(what))
    wait_for(lambda: launcher.status(handle).ended)
    assert launcher.status(handle).state == "succeeded"
    assert what.log.read_text() == "True\nTrue\n"
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("pwned").exists()
    launcher.cancel(handle, grace_s=0)
    assert launcher.status(handle).state == "succeeded"
