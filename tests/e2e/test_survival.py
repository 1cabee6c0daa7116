"""What a run survives: killed processes, a killed head, interrupts, requests to stop. Bits must not change."""

from __future__ import annotations

import os
import signal

from hlatctl.run.errors import StoppedError
from tests.e2e.conftest import Cli, wait_for

#: Enough steps that something can be done to a run while it trains.
LONG = "train.max_steps=400"


def assert_same_beginning(cli: Cli, run_id: str, undisturbed: str) -> None:
    """Every loss equals the undisturbed run's, to the last bit, as far as that one goes."""
    losses, expected = cli.losses(run_id), cli.losses(undisturbed)
    assert losses.keys() >= expected.keys()
    # The schedule depends on the run's length, so only runs of equal length can be compared.
    assert {step: losses[step] for step in expected} == expected


def long_reference(cli: Cli) -> str:
    if not cli.paths("long").root.exists():
        result = cli.train("long", LONG)
        assert result.returncode == 0, result.stderr
    return "long"


def test_a_killed_trainer_process_restarts_by_itself_and_changes_no_bit(cli: Cli) -> None:
    reference = long_reference(cli)
    head = cli.start_train("killed", LONG)
    wait_for(lambda: cli.events("killed", "checkpoint_written"))
    os.kill(cli.trainer_pids("killed")[1], signal.SIGKILL)
    output, _ = head.communicate(timeout=180)
    assert head.returncode == 0, output
    ended = cli.events("killed", "attempt_ended")
    assert [(event["cause"], event["decision"]) for event in ended] == [("killed", "restart"), ("finished", "done")]
    assert ended[0]["evidence"] == "a trainer process died of signal 9"
    resumed = cli.events("killed", "train_started")[1]["resumed_from_step"]
    assert resumed >= 10
    assert cli.losses("killed") == cli.losses(reference)


def test_a_killed_head_leaves_training_alive_and_resume_re_attaches(cli: Cli) -> None:
    reference = long_reference(cli)
    head = cli.start_train("headless", LONG)
    wait_for(lambda: cli.events("headless", "checkpoint_written"))
    head.kill()
    head.communicate()
    assert "interrupted" in cli.run("status", "headless").stdout
    result = cli.run("resume", "headless")
    assert result.returncode == 0, result.stderr
    assert len(cli.events("headless", "attempt_started")) == 1, "the same attempt, seen to its end"
    assert cli.losses("headless") == cli.losses(reference)


def test_an_interrupt_writes_a_checkpoint_and_the_run_can_be_resumed(cli: Cli) -> None:
    reference = long_reference(cli)
    head = cli.start_train("interrupted", LONG)
    wait_for(lambda: len(cli.events("interrupted", "step")) > 12)
    head.send_signal(signal.SIGINT)
    output, _ = head.communicate(timeout=60)
    assert head.returncode == StoppedError.exit_code, output
    assert "hlatctl resume interrupted" in output
    assert "Traceback" not in output
    stopped = cli.events("interrupted", "train_stopped")[-1]
    assert stopped["reason"] == "stop"
    assert cli.events("interrupted", "checkpoint_written")[-1]["step"] == stopped["step"]
    assert not cli.trainer_pids("interrupted")
    assert cli.run("resume", "interrupted").returncode == 0
    assert cli.losses("interrupted") == cli.losses(reference)


def test_stop_from_another_terminal_writes_a_checkpoint_and_resume_goes_on(cli: Cli) -> None:
    reference = long_reference(cli)
    head = cli.start_train("stopped", LONG)
    wait_for(lambda: len(cli.events("stopped", "step")) > 12)
    assert cli.run("stop", "stopped").returncode == 0
    head.communicate(timeout=60)
    assert head.returncode == StoppedError.exit_code
    assert "stopped" in cli.run("status", "stopped").stdout
    result = cli.run("resume", "stopped")
    assert result.returncode == 0, result.stderr
    assert len(cli.events("stopped", "attempt_started")) == 2
    assert cli.losses("stopped") == cli.losses(reference)


def test_a_damaged_newest_checkpoint_is_rejected_by_name_and_the_one_before_is_taken(cli: Cli) -> None:
    reference = long_reference(cli)
    head = cli.start_train("damaged", LONG)
    wait_for(lambda: len(cli.events("damaged", "checkpoint_written")) >= 2)
    assert cli.run("stop", "damaged").returncode == 0
    head.communicate(timeout=60)
    newest = max(cli.paths("damaged").checkpoints.glob("step-*"))
    shard = max((p for p in newest.iterdir() if p.name != "manifest.json"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    assert cli.run("resume", "damaged").returncode == 0
    (rejected,) = cli.events("damaged", "checkpoint_rejected")
    assert rejected["reason"] == f"{shard.name}: checksum differs"
    assert cli.losses("damaged") == cli.losses(reference)
