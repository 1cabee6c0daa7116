"""The journal under torn writes, several writers and clocks that are set back."""

from __future__ import annotations

import errno
import io
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run import journal as lines
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.fold import apply, fold
from hlatctl.run.journal import Event, JournalTail, JournalWriter, heartbeat, read_events
from hlatctl.run.paths import RunPaths
from hlatctl.units import number
from tests.hlatctl.conftest import MakeRun

TEXT = st.text('aé\n"\\\r\u2028😀', max_size=20)
NUMBERS = st.one_of(st.integers(0, 10**12), st.floats(), st.none())
FIELDS = st.fixed_dictionaries(
    {"step": st.integers(0, 10**12), "milestone_tokens": st.integers(0, 10**12)},
    optional={"tokens": st.integers(0, 10**12), "loss": NUMBERS, "stage": TEXT, "message": st.none() | TEXT},
)
KINDS = st.sampled_from(["step", "stage_started", "warning", "milestone", "eval_finished", "some_future_kind"])


def kinds(events: list[Event]) -> list[str]:
    return [event["kind"] for event in events]


def write(run: RunPaths, writer: str, *events: tuple[str, dict[str, Any]]) -> None:
    with JournalWriter(run, writer) as journal:
        for kind, fields in events:
            journal.append(kind, **fields)


@given(st.lists(st.tuples(KINDS, FIELDS), min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_journal_torn_at_any_byte_loses_only_the_torn_event(
    events: list[tuple[str, dict[str, Any]]], where: int
) -> None:
    with TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "r")
        write(run, "flow", *events)
        path = run.journal / "flow.jsonl"
        whole = path.read_bytes()
        cut = where % (len(whole) + 1)
        path.write_bytes(whole[:cut])
        left = read_events(run)
        assert kinds(left) == [kind for kind, _ in events][: whole[:cut].count(b"\n")]
        fold(left)
        # The next writer of the file goes on behind the last whole event, and its own events are whole.
        write(run, "flow", ("resumed", {}))
        again = read_events(run)
        assert kinds(again) == [*kinds(left), "resumed"]
        assert [event["seq"] for event in again] == list(range(1, len(again) + 1))


class _FullDisk(io.FileIO):
    """A file on a disk with this many free bytes."""

    free_bytes = 0

    def write(self, data: Any) -> int:
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = super().write(bytes(data[: self.free_bytes]))
        self.free_bytes -= done
        return done


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_events_that_do_not_fit_on_a_full_disk_are_written_when_there_is_space(room: list[int]) -> None:
    with TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "r")
        with JournalWriter(run, "flow") as journal:
            journal._file.close()
            disk = journal._file = _FullDisk(journal.path, "a+b")
            for step, freed in enumerate(room):
                disk.free_bytes += freed
                journal.append("step", durable=True, step=step)
                assert kinds(read_events(run)) == ["step"] * journal.path.read_bytes().count(b"\n")
            disk.free_bytes = 10**6
            journal.append("step", step=len(room))
            assert not journal.unwritten
        assert [event["step"] for event in read_events(run)] == list(range(len(room) + 1))


def test_events_that_a_full_disk_does_not_take_are_still_a_heartbeat_and_known_to_their_writer(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    tail = JournalTail(run)
    assert heartbeat(run, "flow") == 0
    with JournalWriter(run, "flow") as journal:
        journal._file.close()
        disk = journal._file = _FullDisk(journal.path, "a+b")
        os.utime(journal.path, ns=(0, 0))
        tail.add(journal.append("step", step=1), "flow")
        assert heartbeat(run, "flow") > 0
        assert kinds(tail.read_new()) == ["step"]
        disk.free_bytes = 10**6
        journal.flush()
        assert kinds(read_events(run)) == ["step"]
        assert tail.read_new() == [], "once"


def test_a_request_that_a_full_disk_does_not_take_is_an_error(tmp_path: Path) -> None:
    def request() -> None:
        with JournalWriter(RunPaths(tmp_path), "operator") as journal:
            journal._file.close()
            journal._file = _FullDisk(journal.path, "a+b")
            journal.append("stop_requested")

    with pytest.raises(StorageError, match=r"operator\.jsonl: can't be written \(No space left on device\)"):
        request()


def test_a_disk_that_fails_in_another_way_is_an_error(tmp_path: Path) -> None:
    with JournalWriter(RunPaths(tmp_path), "flow") as journal:
        journal._file.close()
        journal._file = _Broken(journal.path, "a+b")
        with pytest.raises(StorageError, match=r"flow\.jsonl: can't be written \(Input/output error\)"):
            journal.append("step", step=1)


class _Broken(io.FileIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")


@given(st.integers(0, 40))
def test_a_reader_in_the_middle_of_a_write_gets_the_event_later_and_once(cut: int) -> None:
    with TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "r")
        write(run, "flow", ("first", {}))
        path = run.journal / "flow.jsonl"
        before = path.read_bytes()
        write(run, "flow", ("second", {"text": "ü" * 5}))
        whole = path.read_bytes()
        tail = JournalTail(run)
        path.write_bytes(whole[: len(before) + cut])
        assert kinds(tail.read_new()) == ["first"]
        path.write_bytes(whole)
        assert kinds(tail.read_new()) == ["second"]
        assert tail.read_new() == []


def test_a_tail_continues_from_saved_offsets_and_finds_new_writers(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("a", {}))
    tail = JournalTail(run)
    tail.read_new()
    offsets = json.loads(json.dumps(tail.offsets))
    write(run, "flow", ("b", {}))
    write(run, "train-rank00000", ("c", {}))
    assert kinds(JournalTail(run, offsets).read_new()) == ["b", "c"]


def test_events_of_several_writers_come_in_order_of_time(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    for index in range(6):
        write(run, f"eval-{index % 3}", (f"event{index}", {}))
    events = read_events(run)
    assert kinds(events) == [f"event{index}" for index in range(6)]
    assert events[0]["writer"] == "eval-0"


def test_a_clock_that_is_set_back_does_not_reorder_a_writer(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    run.journal.mkdir(parents=True)
    events = [
        {"v": 1, "seq": seq, "time_unix_s": time_s, "attempt": 1, "kind": f"event{seq}"}
        for seq, time_s in ((1, 100.0), (2, 101.0), (3, 50.0), (4, 51.0))
    ]
    (run.journal / "flow.jsonl").write_bytes(b"".join(map(lines.to_line, events)))
    assert kinds(read_events(run)) == ["event1", "event2", "event3", "event4"]


@given(st.lists(st.one_of(st.binary(max_size=30), st.just(b'{"seq":1}'), st.just(b"[]"), st.just(b"7")), max_size=8))
def test_foreign_lines_are_no_events_and_hide_none(lines: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "r")
        write(run, "flow", ("first", {}))
        with (run.journal / "flow.jsonl").open("ab") as file:
            file.write(b"".join(line.replace(b"\n", b"") + b"\n" for line in lines))
        write(run, "flow", ("last", {}))
        assert [kind for kind in kinds(read_events(run)) if kind != "warning"] == ["first", "last"]


def _with_checksum(line: bytes) -> bytes:
    return b'%b,"crc":"%08x"}' % (line[:-1], zlib.crc32(line))


DAMAGED_LINES = [
    b"rubbish",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":1}',
    *map(
        _with_checksum,
        [
            b'{"v":1,"seq":2,"time_unix_s":1e999,"attempt":1,"kind":"step","step":1}',
            b'{"v":1,"seq":2,"time_unix_s":1e300,"attempt":1,"kind":"step","step":1}',
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":' + b"9" * 5000 + b"}",
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":' + b"9" * 400 + b"}",
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":NaN}',
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":1,"loss":"much"}',
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step","step":1,"tokens":[1]}',
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"step"}',
            b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"eval_finished","step":1,"milestone_tokens":1,"scores":{"a":1}}',
        ],
    ),
]


@pytest.mark.parametrize("line", DAMAGED_LINES, ids=lambda line: line[-30:].decode(errors="replace"))
def test_a_damaged_line_is_left_out_with_a_warning(tmp_path: Path, line: bytes) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}))
    with (run.journal / "flow.jsonl").open("ab") as file:
        file.write(line + b"\n")
    write(run, "flow", ("last", {}))
    events = read_events(run)
    assert kinds(events) == ["first", "warning", "last"]
    assert fold(events).warnings == ["journal/flow.jsonl: line 2 is damaged and ignored"]


def test_a_reader_that_continues_names_the_line_of_the_file(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}), ("second", {}))
    tail = JournalTail(run)
    state = fold(tail.stream())
    with (run.journal / "flow.jsonl").open("ab") as file:
        file.write(b"\nrubbish\n")
    write(run, "flow", ("last", {}))
    for event in tail.stream():
        apply(state, event)
    assert state.damages == state.warnings == ["journal/flow.jsonl: line 4 is damaged and ignored"]


def test_a_file_that_begins_with_damaged_lines_has_one_warning_for_them(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}))
    path = run.journal / "flow.jsonl"
    path.write_bytes(b"rubbish\n\x00\n" + path.read_bytes())
    events = read_events(run)
    assert fold(events).warnings == ["journal/flow.jsonl: 2 lines from line 1 on are damaged and ignored"]
    assert events[0]["time_unix_s"] == events[1]["time_unix_s"], "a warning makes no run longer"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_journal_file_that_is_not_regular_is_ignored_with_one_warning(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}))
    make(run.journal / "x.jsonl")
    tail = JournalTail(run)
    events = tail.read_new()
    assert sorted(kinds(events)) == ["first", "warning"]
    assert fold(events).warnings == ["journal/x.jsonl: is not a regular file, ignored"]
    assert tail.read_new() == []


def test_a_journal_file_that_is_not_regular_is_not_written_to(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    run.journal.mkdir(parents=True)
    os.mkfifo(run.journal / "flow.jsonl")
    with pytest.raises(StorageError, match=r"flow\.jsonl: can't be written"):
        JournalWriter(run, "flow")


def test_nan_and_infinity_are_read_back_as_numbers(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "train-rank00000", ("step", {"step": 1, "loss": float("nan"), "grad_norm": float("-inf"), "lr": 0.1}))
    text = (run.journal / "train-rank00000.jsonl").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (event,) = read_events(run)
    assert number(event, "loss") != number(event, "loss")
    assert number(event, "grad_norm") == float("-inf")
    assert number(event, "lr") == 0.1
    assert number(event, "missing") != number(event, "missing")


def test_a_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    with JournalWriter(run, "flow"), pytest.raises(RunBusyError, match="another process is writing this journal"):
        JournalWriter(run, "flow")
    write(run, "flow", ("free again", {}))


def test_every_prefix_of_a_journal_folds_to_a_state_that_grows(make_run: MakeRun) -> None:
    events = read_events(make_run())
    tokens_by_step: dict[int, int] = {}
    for end in range(0, len(events) + 1, 7):
        state = fold(events[:end])
        assert state.warnings == []
        assert state.step == max(state.steps, default=0)
        # Steps that count have no gap: what a restart repeats is there once.
        assert sorted(state.steps) == list(range(1, state.step + 1))
        for step, event in state.steps.items():
            assert tokens_by_step.setdefault(step, event["tokens"]) == event["tokens"]
        assert state.tokens == tokens_by_step.get(state.step, 0)
    assert fold(events).status == "finished"


def test_threads_of_one_writer_do_not_mix_their_lines(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    with JournalWriter(run, "w") as journal:

        def append() -> None:
            for _ in range(300):
                journal.append("warning", message="x" * 5000)

        threads = [Thread(target=append) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event["seq"] for event in read_events(run)] == list(range(1, 1201))


def test_a_line_without_an_end_costs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BYTES", 10_000)
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}))
    path = run.journal / "flow.jsonl"
    with path.open("ab") as file:
        file.write(b'{"v":1,"seq":2,"time_unix_s":1,"attempt":1,"kind":"x","a":[' + b"1," * 5_000_000)
    tracemalloc.start()
    assert kinds(read_events(run)) == ["first"], "it is torn as long as it has no end"
    with path.open("ab") as file:
        file.write(b"1]}\n")
    write(run, "flow", ("last", {}))
    events = read_events(run)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [event["seq"] for event in events if event["kind"] != "warning"] == [1, 2]
    assert fold(events).warnings == ["journal/flow.jsonl: line 2 is damaged and ignored"]
    assert peak_bytes < path.stat().st_size / 2


def test_an_event_that_readers_would_ignore_is_not_written(tmp_path: Path) -> None:
    with (
        JournalWriter(RunPaths(tmp_path / "r"), "flow") as journal,
        pytest.raises(ValueError, match="the note event has"),
    ):
        journal.append("note", text="x" * lines.MAX_BYTES)


def test_a_torn_tail_is_read_once_and_its_line_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunPaths(tmp_path / "r")
    write(run, "flow", ("first", {}))
    path = run.journal / "flow.jsonl"
    event = {"v": 1, "seq": 2, "time_unix_s": 2e9, "attempt": 0, "kind": "second", "text": "x" * 100}
    line = lines.to_line(event)
    tail, items, read = JournalTail(run), lines._items, list[Any]()

    def counted(*args: Any) -> Any:
        read.append(args)
        return items(*args)

    monkeypatch.setattr(lines, "_items", counted)
    with path.open("ab", buffering=0) as file:
        file.write(line[:50])
        assert kinds(tail.read_new()) == ["first"]
        for part in (line[50:60], b"", line[60:-1]):
            file.write(part)
            assert tail.read_new() == []
        assert len(read) == 1
        file.write(line[-1:])
        assert kinds(tail.read_new()) == ["second"]
        file.write(line[:50])
        assert tail.read_new() == []
    write(run, "flow", ("third", {}))
    assert kinds(tail.read_new()) == ["third"], "its writer has cut the torn line"
