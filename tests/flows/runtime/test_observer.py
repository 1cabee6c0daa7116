from __future__ import annotations

import os
from pathlib import Path

from flows.runtime import observer
from flows.runtime.observer import DriverLog


def test_lines_have_times_and_no_control_characters(tmp_path: Path) -> None:
    log = DriverLog(tmp_path / "logs" / "driver.log", lambda: 0.0)
    log.write("data: done")
    log.write("evil \x1b[31m\nname")
    assert (tmp_path / "logs" / "driver.log").read_text(encoding="utf-8").splitlines() == [
        "1970-01-01 00:00:00 UTC  data: done",
        "1970-01-01 00:00:00 UTC  evil \\x1b[31m name",
    ]


def test_a_full_log_begins_anew_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    path.write_bytes(bytes(observer._MOST_BYTES))
    log = DriverLog(path, lambda: 0.0)
    log.write("last")
    log.write("first")
    assert path.read_text(encoding="utf-8").endswith("first\n")
    assert path.with_suffix(".log.1").stat().st_size > observer._MOST_BYTES


def test_a_log_that_can_not_be_written_is_no_failure_and_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("", encoding="utf-8")
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "fifo.log")
    for name in ("link.log", "fifo.log"):
        DriverLog(tmp_path / name, lambda: 0.0).write("x")
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == ""
