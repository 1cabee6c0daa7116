"""`hlatctl watch` shows the runs that matter now, on a terminal of any size and without one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from hlatctl.cli.ui import _lines
from hlatctl.report import run_list
from hlatctl.report.run_list import LiveRow, LiveRuns
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[3]


def row(run_id: str, **fields: object) -> LiveRow:
    known: dict[str, object] = {
        "status": "running", "simulated": False, "step": 130_000, "total_steps": 2_000_000, "loss": 2.5,
        "tokens_per_s": 1.5e6, "left_s": 9e5, "needs_person": False, "what": "",
    }  # fmt: skip
    return LiveRow(run_id=run_id, **{**known, **fields})  # type: ignore[arg-type]


def test_without_a_terminal_a_table_is_printed_once(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("killed", until="killed", simulated=True)
    assert main(["watch"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "STATUS", "STEP", "LOSS", "TOKENS/S", "LEFT", "WHAT"]
    assert line.startswith("killed  interrupted (SIMULATED) !  130/306")
    assert line.endswith("its driver is not running")


def test_no_run_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once"]) == 0
    assert "is running" in capsys.readouterr().err


def test_a_run_that_ended_more_than_a_day_ago_is_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    old, new = make_run("old"), make_run("new")
    os.utime(old.journal / "flow.jsonl", (time.time() - 90_000,) * 2)
    os.utime(new.journal / "flow.jsonl")
    assert [row.run_id for row in LiveRuns(tmp_path / "runs").refresh()] == ["new"]


def test_a_refresh_shows_new_steps_and_that_a_person_is_needed(make_run: MakeRun, tmp_path: Path) -> None:
    run, live = make_run("one", until="killed"), LiveRuns(tmp_path / "runs")
    with hold_driver(run):
        with JournalWriter(run, FLOW_WRITER, 2) as flow:
            flow.append("head_started", pid=os.getpid(), host="here")
        with JournalWriter(run, train_writer(0), 2) as steps:
            steps.append("step", step=131, tokens=131 * 8192, loss=3.25, step_s=0.5)
        (shown,) = live.refresh()
        assert (shown.status, shown.step, shown.loss, shown.needs_person) == ("running", 131, 3.25, False)
        with JournalWriter(run, FLOW_WRITER, 2) as flow:
            flow.append("job_queued", job="preflight", reason="n3: no spare node", code="no_spare_node")
        (shown,) = live.refresh()
        assert (shown.needs_person, shown.what) == (True, "preflight queued (n3: no spare node)")
    (shown,) = live.refresh()
    assert (shown.status, shown.needs_person) == ("interrupted", True)


def test_runs_that_ended_are_not_read_again_at_each_refresh(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("one")
    live = LiveRuns(tmp_path / "runs")
    before = live.refresh()
    monkeypatch.setattr(run_list, "rows", lambda folder: pytest.fail("the folder is read at each refresh"))
    assert live.refresh() == before


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (80, 6), (100, 8)])
def test_every_size_of_terminal_shows_numbers_in_full_and_counts_what_has_no_room(width: int, height: int) -> None:
    name = "hlat_7b-lower-learning-rate-20261123-001122-abcd"
    rows = [row(f"{name}{n}", what="alarm: " + "x" * 300, simulated=True) for n in range(20)]
    lines = [text for text, _ in _lines("/runs", rows, width, height)]
    shown = [line for line in lines if line.startswith("hlat")]
    assert len(lines) < height
    assert all("130000/2000000" in line and "10 d 10 h" in line and len(line) <= width for line in shown)
    left_out = 20 - len(shown)
    assert lines[-1].startswith(f"{left_out} more · 0 need a person" if left_out else "0 need a person")
    assert all(line.startswith("  SIMULATED · alarm") for line in lines[3:-1:2])


def test_a_run_that_needs_a_person_is_marked_without_colour() -> None:
    lines = list(_lines("/runs", [row("one", status="failed", needs_person=True, what="\x1b[2Jbad")], 80, 24))
    assert "failed !" in lines[2][0]
    assert lines[3][0] == "  \\x1b[2Jbad"


@pytest.mark.processes
@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_on_a_terminal_it_is_redrawn_in_place_and_a_key_ends_it(make_run: MakeRun, tmp_path: Path, key: bytes) -> None:
    make_run("one", until="killed")
    main_fd, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "PYTHONPATH": os.fspath(ROOT)}
    for name in ("COLUMNS", "LINES"):
        env.pop(name, None)
    words = [sys.executable, "-m", "hlatctl", "watch"]
    with subprocess.Popen(words, stdin=other, stdout=other, stderr=other, env=env, start_new_session=True,
                          preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) as process:  # fmt: skip
        os.close(other)
        drawn, deadline_s = b"", time.monotonic() + WAIT_S
        while b"interrupted !" not in drawn and time.monotonic() < deadline_s:
            if select.select([main_fd], [], [], 0.1)[0]:
                drawn += os.read(main_fd, 65536)
        os.write(main_fd, key)
        while process.poll() is None and time.monotonic() < deadline_s:
            if select.select([main_fd], [], [], 0.1)[0]:
                try:
                    drawn += os.read(main_fd, 65536)
                except OSError:
                    break
        assert process.wait(WAIT_S) == 0
    os.close(main_fd)
    assert b"\x1b[2J" not in drawn, "the screen is not cleared before each drawing: it would flicker"
    assert b"\x1b[31m" not in drawn, "NO_COLOR"
    assert b"q ends" in drawn
    assert RunPaths(tmp_path / "runs" / "one").config.is_file()
