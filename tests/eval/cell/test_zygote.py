"""The memory of a cell's processes, however they try to hide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.cell import zygote

_STATUS = "Name:\tpython3\nNSpid:\t{ids}\nVmPeak:\t 9999 kB\nVmRSS:\t    100 kB\nVmSwap:\t    20 kB\n"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the texts of /proc by path; a missing path belongs to a process that has ended."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(zygote, "_read", lambda path: texts.get(str(path), ""))
    return texts


def test_what_was_swapped_out_is_still_held(kernel: dict[str, str]) -> None:
    kernel["/proc/7/status"] = _STATUS.format(ids="7\t1")
    kernel["/proc/7/smaps_rollup"] = "Rss:  100 kB\nPss:   50 kB\nPss_Anon:   40 kB\nSwap:  20 kB\nSwapPss:  10 kB\n"
    assert zygote._resident_bytes("7") == 120 << 10
    assert zygote._proportional_bytes("7", 120 << 10) == 60 << 10


def test_only_processes_of_the_cell_count(kernel: dict[str, str]) -> None:
    kernel["/proc/7/status"] = _STATUS.format(ids="7")
    assert zygote._resident_bytes("7") == 0
    assert zygote._resident_bytes("8") == 0
    assert zygote._proportional_bytes("8", 1) == 0


def test_a_process_that_shows_no_details_counts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(zygote, "_read", refuse)
    assert zygote._proportional_bytes("7", 120 << 10) == 120 << 10
