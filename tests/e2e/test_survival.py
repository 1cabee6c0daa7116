"""What a run survives: killed processes, a killed head, interrupts, requests to stop, damage. Bits must not change."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hlatctl.run.errors import StoppedError
from tests.e2e.conftest import WAIT_S, Cli, wait_for

#: Enough steps that something can be done to a run while it trains.
LONG = "train.max_steps=400"


@pytest.fixture(scope="module")
def losses(cli: Cli) -> dict[int, float]:
    """The losses of a run of that length that nothing disturbs."""
    result = cli.train("long", LONG)
    assert result.returncode == 0, result.stderr
    return cli.losses("long")


def wait_for_new_checkpoints(cli: Cli, run_id: str, count: int) -> None:
    already = len(cli.events(run_id, "checkpoint_committed"))
    wait_for(lambda: len(cli.events(run_id, "checkpoint_committed")) >= already + count)


def assert_stopped_with_a_checkpoint(cli: Cli, run_id: str, head: subprocess.Popen[str]) -> None:
    output, _ = head.communicate(timeout=60)
    assert head.returncode == StoppedError.exit_code, output
    assert f"hlatctl resume {run_id}" in output
    assert "Traceback" not in output
    stopped = cli.events(run_id, "train_stopped")[-1]
    assert stopped["reason"] == "stop"
    assert cli.events(run_id, "checkpoint_written")[-1]["step"] == stopped["step"]
    assert not cli.trainer_pids(run_id)
    assert "stopped" in cli.run("status", run_id).stdout


def test_a_killed_process_restarts_by_itself_a_killed_head_is_replaced_and_no_bit_changes(
    cli: Cli, losses: dict[int, float]
) -> None:
    head = cli.start_train("killed", LONG)
    wait_for_new_checkpoints(cli, "killed", 1)
    os.kill(cli.trainer_pids("killed")[1], signal.SIGKILL)
    wait_for(lambda: len(cli.events("killed", "train_started")) == 2)
    (ended,) = cli.events("killed", "attempt_ended")
    assert (ended["cause"], ended["decision"]) == ("killed", "restart")
    assert ended["evidence"] == "a trainer process died of signal 9"
    assert cli.events("killed", "train_started")[1]["resumed_from_step"] >= 10

    head.kill()
    head.communicate()
    assert "interrupted" in cli.run("status", "killed").stdout
    result = cli.run("resume", "killed")
    assert result.returncode == 0, result.stderr
    assert len(cli.events("killed", "attempt_started")) == 2, "the second attempt was seen to its end"
    assert cli.losses("killed") == losses


def test_a_stop_a_damaged_checkpoint_and_an_interrupt_lose_nothing(cli: Cli, losses: dict[int, float]) -> None:
    head = cli.start_train("stopped", LONG)
    wait_for_new_checkpoints(cli, "stopped", 2)
    assert cli.run("stop", "stopped").returncode == 0
    assert_stopped_with_a_checkpoint(cli, "stopped", head)

    newest = max(cli.paths("stopped").checkpoints.glob("step-*"))
    shard = max((p for p in newest.iterdir() if p.name != "manifest.json"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)

    head = cli.start("resume", "stopped")
    wait_for_new_checkpoints(cli, "stopped", 1)
    (rejected,) = cli.events("stopped", "checkpoint_rejected")
    assert rejected["reason"] == f"{shard.name}: checksum differs"
    head.send_signal(signal.SIGINT)
    assert_stopped_with_a_checkpoint(cli, "stopped", head)

    result = cli.run("resume", "stopped")
    assert result.returncode == 0, result.stderr
    assert cli.losses("stopped") == losses


def test_a_head_that_is_told_to_end_leaves_training_alone(cli: Cli) -> None:
    head = cli.start_train("told", LONG)
    wait_for_new_checkpoints(cli, "told", 1)
    head.terminate()
    output, _ = head.communicate(timeout=60)
    assert head.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    assert "Traceback" not in output
    assert cli.trainer_pids("told"), "training goes on"
    assert cli.run("stop", "told").returncode == 0
    assert not cli.trainer_pids("told")


def test_a_process_that_stands_still_is_a_hang_which_is_named_ended_and_recovered_from(
    cli: Cli, losses: dict[int, float]
) -> None:
    head = cli.start_train("hung", LONG, "recovery.hang_floor_s=3", "recovery.hang_factor=50")
    wait_for_new_checkpoints(cli, "hung", 1)
    pids = cli.trainer_pids("hung")
    os.kill(pids[1], signal.SIGSTOP)
    output, _ = head.communicate(timeout=WAIT_S)
    assert head.returncode == 0, output
    (hang,) = cli.events("hung", "hang")
    assert "(recovery.hang_factor=50, recovery.hang_floor_s=3)" in hang["evidence"]
    assert hang["stacks"] == (
        "1 of 2 processes asked to print their stacks into their logs; "
        f"process {pids[1]} is stopped and can not show its stack"
    )
    ended = cli.events("hung", "attempt_ended")
    assert [(end["cause"], end["decision"]) for end in ended] == [("hang", "restart"), ("finished", "done")]
    log = (cli.paths("hung").logs(1) / "train.log").read_text()
    assert "Current thread" in log or "Thread 0x" in log
    assert "in _sum_over_processes" in log or "in reduce_gradients" in log, "the other one waits for the first"
    assert cli.losses("hung") == losses
