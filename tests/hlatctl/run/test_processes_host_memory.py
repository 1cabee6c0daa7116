"""Free memory is the control group's if it has less than the host, and a process can offer to die first."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run import processes
from hlatctl.run.processes import die_first, free_host_bytes


def test_a_smaller_control_group_limits_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_CGROUP", tmp_path)
    host_bytes = free_host_bytes()
    assert host_bytes > 1 << 20
    (tmp_path / "memory.current").write_text("3000\n")
    for limit, free_bytes in (("5000\n", 2000), ("1000\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_host_bytes() == free_bytes
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 700\n")
    assert free_host_bytes() == 2700, "files that were read are dropped first"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes() > 1 << 20


def test_the_kernel_is_asked_to_kill_this_process_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ADJUSTMENT", tmp_path / "oom_score_adj")
    die_first()
    assert (tmp_path / "oom_score_adj").read_text() == "1000"
    monkeypatch.setattr(processes, "_ADJUSTMENT", tmp_path / "missing" / "oom_score_adj")
    die_first()
