"""A run with the real torchtitan through the command line: killed, amended, proven and forked."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from conf.compose import compose
from flows import amendments, pretrain
from tests.e2e.conftest import Cli
from tests.e2e.driver import Driver, Held

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed (docs/engines.md)"),
]
#: The amendment's step, and steps enough to kill a rank after it.
_AMENDED, _LAST = 10, 40


def test_a_run_is_amended_survives_a_killed_rank_and_is_proven_and_forked(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    driver = Driver(cli, "titan")
    settings = ("backend=torchtitan", "parallel=fsdp", "train.max_steps=4000", "checkpoint.every_steps=5")
    pretrain.create(compose([*cli.overrides, *settings, f"runs_dir={cli.runs_dir}"]), argv=[], run_id="titan")
    changes = [f"train.max_steps={_LAST}", "optimizer.weight_decay=0", "optimizer.lr=1e-3"]
    amendments.amend(driver.run, changes, by="a test", at=_AMENDED)
    driver.resume()
    try:
        assert driver.ended(1)["cause"] == "amended"
        driver.steps(2)
        Held(cli, "titan").kill()
        assert driver.ended(2)["cause"] == "killed"
        output = driver.end()
        assert driver.events("run_finished")[-1]["outcome"] == "finished", output
    finally:
        driver.kill()
    steps = {event["step"]: event for event in driver.events("step")}
    assert list(steps) == list(range(1, _LAST + 1))
    assert steps[_AMENDED + 1]["lr"] < steps[_AMENDED]["lr"], "the amended rate is smaller"

    proof = cli.run("verify-resume", "titan")
    assert proof.returncode == 0, proof.stderr
    assert "equal, to the last bit" in proof.stdout
    few_steps = (f"train.max_steps={_LAST + 2}", "backend.compile=false")
    fork = cli.run("fork", "titan", "--run-id", "native", "backend=torch_native", *few_steps)
    assert fork.returncode == 0, fork.stderr
    began = Driver(cli, "native").events("step")[0]
    assert began["loss"] == pytest.approx(steps[_LAST]["loss"], rel=0.2)
