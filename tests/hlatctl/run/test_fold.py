"""A fold that is continued from a kept state gives the state of the whole journal, and otherwise is discarded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlatctl.run import fold as kept_fold
from hlatctl.run import steps
from hlatctl.run.fold import fold, read_state
from hlatctl.run.journal import Event, read_events, to_line
from hlatctl.run.paths import RunPaths

#: Times are whole thousands of seconds, so that each event is settled when the next thousand begins.
_S = 1000.0


@pytest.fixture(autouse=True)
def _keep_often() -> Iterator[None]:
    """Keep the fold after each byte, in segments of four rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_fold, "KEEP_BYTES", 1)
        patch.setattr(steps, "SEGMENT_ROWS", 4)
        patch.setattr(steps, "_COLUMN_BYTES", 32)
        yield


class Writers:
    """Appends events of several writers to a journal, at times of their own."""

    def __init__(self, run: RunPaths) -> None:
        self.run, self.now_s, self._seq = run, 1.7e9, dict[str, int]()
        run.journal.mkdir(parents=True)

    def add(self, writer: str, kind: str, attempt: int = 1, after_s: float = _S, **fields: Any) -> None:
        self.now_s += after_s
        self._seq[writer] = self._seq.get(writer, 0) + 1
        head = {"v": 1, "seq": self._seq[writer], "time_unix_s": self.now_s, "attempt": attempt, "kind": kind}
        self.raw(writer, to_line({**head, **fields}))

    def raw(self, writer: str, line: bytes) -> None:
        with (self.run.journal / f"{writer}.jsonl").open("ab") as file:
            file.write(line)

    def train(self, attempt: int, resumed: int, last: int) -> None:
        self.add("flow", "attempt_started", attempt, handle={"launcher": "local"})
        self.add("train-rank00000", "train_started", attempt, resumed_from_step=resumed, tokens=resumed * 10)
        for step in range(resumed + 1, last + 1):
            self.add("train-rank00000", "step", attempt, step=step, tokens=step * 10, loss=attempt + 1 / step, lr=1e-3)


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(RunPaths(tmp_path / "r"))


_damage = st.sampled_from([b"rubbish\n", b"\n", b'{"seq":1}\n', b"\xff\xfe\n", b"7\n"])
_restarts = st.tuples(st.integers(0, 9), st.integers(0, 7))
_more = st.one_of(
    _restarts,
    _damage,
    st.sampled_from(
        ["checkpoint", "milestone", "eval", "stop", "spike", "warning", "amended", "late", "again", "nan", "slow"]
    ),
)


def _play(writers: Writers, acts: list[Any], keep_after: set[int]) -> None:
    """Write a course of a run, and read it after some of the acts."""
    attempt, reached = 0, 0
    for number, act in enumerate(acts):
        if isinstance(act, tuple):
            attempt, resumed = attempt + 1, max(0, reached - act[0])
            reached = resumed + act[1]
            writers.train(attempt, resumed, reached)
        elif isinstance(act, bytes):
            writers.raw("train-rank00000", act)
        else:
            _event(writers, act, attempt, reached)
        if number in keep_after:
            read_state(writers.run)


def _event(writers: Writers, act: str, attempt: int, step: int) -> None:
    scores = {"piqa": {"metric": "acc", "value": 0.5, "stderr": None, "n": 3}}
    at = {"milestone_tokens": 10 * step, "step": step}
    rank0: dict[str, tuple[str, dict[str, Any]]] = {
        "checkpoint": ("checkpoint_committed", {"step": step, "manifest_sha256": "0"}),
        "spike": ("gradient_spike", {"step": step, "grad_norm": float(step), "mean": 0.5}),
        "late": ("step", {"step": max(1, step - 2), "tokens": 7, "loss": 9.0}),
        "again": ("step", {"step": step, "tokens": 8, "loss": None}),
        "nan": ("step", {"step": step + 1, "tokens": 10 * step + 10, "loss": "nan", "grad_norm": "-inf"}),
        "amended": ("data_changed", {"key": "data.skip_steps", "value": [step], "by": "me", "why": "x"}),
    }
    flow: dict[str, tuple[str, dict[str, Any]]] = {
        "milestone": ("milestone", {**at, "tokens": 10 * step}),
        "eval": ("eval_finished", {**at, "scores": scores, "contract": "c"}),
        "stop": ("stop_requested", {"by": "me"}),
        "warning": ("warning", {"message": f"at {step}"}),
    }
    if act == "slow":  # the clock of its host is behind
        writers.add("eval-10", "warning", attempt, after_s=-3.5 * _S, message=f"slow, at {step}")
        writers.now_s += 3.5 * _S
    elif act in rank0:
        kind, fields = rank0[act]
        writers.add("train-rank00000", kind, max(1, attempt - (act == "late")), **fields)
    else:
        kind, fields = flow[act]
        writers.add("flow", kind, attempt, **fields)


@settings(max_examples=60, deadline=None)
@given(st.lists(_more, max_size=25), st.sets(st.integers(0, 25), max_size=6))
def test_a_continued_fold_equals_the_fold_of_the_whole_journal(acts: list[Any], keep_after: set[int]) -> None:
    with TemporaryDirectory() as folder:
        writers = Writers(RunPaths(Path(folder) / "r"))
        _play(writers, acts, keep_after)
        writers.add("flow", "head_started")
        continued, again = read_state(writers.run), read_state(writers.run)
        whole = fold(read_events(writers.run))
        assert continued == again == whole
        assert repr(continued.steps.losses()) == repr(whole.steps.losses())
        assert list(continued.steps) == sorted(continued.steps)
        for state in (continued, again):
            assert state.steps.rows.home is not None
            assert state.steps.rows.home.rebuild().event is not None


def _kept(writers: Writers) -> Path:
    """Write a run of two attempts, read it, and return the kept state."""
    writers.train(1, 0, 9)
    writers.train(2, 6, 15)
    read_state(writers.run)
    return writers.run.fold / "state"


def test_what_is_kept_is_not_folded_again(writers: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    _kept(writers)
    whole = fold(read_events(writers.run))
    appended: list[int] = []
    append = steps.Rows.append

    def spy(rows: steps.Rows, event: Event) -> None:
        appended.append(event["step"])
        append(rows, event)

    monkeypatch.setattr(steps.Rows, "append", spy)
    writers.add("flow", "warning", message="later")
    state = read_state(writers.run)
    assert (state.warnings, appended) == (["later"], [15]), "the newest step was not settled"
    assert state.steps == whole.steps


def _flip(path: Path, at: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _other_code(path: Path) -> None:
    line, _, rest = path.read_bytes()[9:].partition(b"\n")
    body = json.dumps({**json.loads(line), "code": 1}).encode() + b"\n" + rest
    path.write_bytes(b"%08x\n" % kept_fold._crc([body]) + body)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "flipped": _flip,
    "flipped at its beginning": lambda path: _flip(path, 0),
    "flipped in its text": lambda path: _flip(path, 200),
    "cut": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b""),
    "of other code": _other_code,
    "foreign": lambda path: path.write_bytes(b"\x00" * 4096),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": _fifo,
    "huge": lambda path: os.truncate(path, 1 << 34),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_kept_state_is_discarded(writers: Writers, damage: Any) -> None:
    path = _kept(writers)
    damage(path)
    assert read_state(writers.run) == fold(read_events(writers.run))


@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda path: os.truncate(path, 8)])
def test_a_damaged_segment_is_made_again_from_the_journal(writers: Writers, damage: Any) -> None:
    _kept(writers)
    for segment in writers.run.fold.glob("rows-*"):
        damage(segment)
    assert read_state(writers.run).steps == fold(read_events(writers.run)).steps


def test_a_kept_state_that_does_not_fit_the_journal_is_discarded(writers: Writers) -> None:
    _kept(writers)
    path = writers.run.journal / "train-rank00000.jsonl"
    complete = path.read_bytes()
    lines = complete.splitlines(keepends=True)
    for content in (b"".join(lines[:5]), b"".join([*lines[:-1], b"x" * len(lines[-1])]), b"".join(lines[1:] * 2)):
        path.write_bytes(content)
        assert read_state(writers.run) == fold(read_events(writers.run))
    path.unlink()
    assert read_state(writers.run).step == 0


def test_an_event_of_a_host_with_a_slow_clock_is_put_in_its_place(writers: Writers) -> None:
    writers.add("flow", "warning", message="first")
    _kept(writers)
    writers.now_s -= 40 * _S
    writers.add("eval-10", "warning", message="before the first")
    writers.add("flow", "warning", after_s=50 * _S, message="now")
    assert read_state(writers.run).warnings == ["before the first", "first", "now"]


def test_damaged_lines_at_the_end_of_a_file_are_counted_with_those_that_follow(writers: Writers) -> None:
    writers.train(1, 0, 9)
    writers.raw("train-rank00000", b"rubbish\n")
    for _ in range(3):
        writers.add("flow", "data_changed", key="x", value=1)
    read_state(writers.run)
    writers.raw("train-rank00000", b"rubbish\n")
    writers.add("train-rank00000", "warning", message="now")
    warnings = read_state(writers.run).warnings
    assert warnings == ["journal/train-rank00000.jsonl: 2 lines from line 11 on are damaged and ignored", "now"]


def test_a_state_is_read_where_nothing_can_be_kept(writers: Writers) -> None:
    writers.run.fold.write_text("in the way")  # works for root too, unlike a folder's mode
    _kept(writers)
    assert read_state(writers.run) == fold(read_events(writers.run))
    assert writers.run.fold.read_text() == "in the way"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere"), Path.mkdir])
def test_a_state_is_read_and_kept_beside_a_file_that_is_not_regular(writers: Writers, make: Any) -> None:
    writers.run.journal.mkdir(parents=True, exist_ok=True)
    odd = writers.run.journal / "x.jsonl"
    make(odd)
    os.utime(odd, (0, 0), follow_symlinks=False)  # before the events: its place is kept
    _kept(writers)
    for _ in range(2):
        assert read_state(writers.run) == fold(read_events(writers.run))


def test_kept_files_are_as_private_as_the_journal(writers: Writers) -> None:
    writers.run.journal.chmod(0o750)
    path = _kept(writers)
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o750, 0o640)


def test_files_of_an_earlier_course_of_the_journal_are_removed(writers: Writers) -> None:
    _kept(writers)
    before = {path.name for path in writers.run.fold.glob("rows-*")}
    shutil.rmtree(writers.run.journal)  # the run is restored from a copy
    later = Writers(writers.run) if not writers.run.journal.exists() else writers
    assert before
    later.train(1, 0, 14)
    read_state(later.run)
    assert len({path.name[:10] for path in later.run.fold.glob("rows-*")}) == len([*later.run.fold.glob("rows-*")])
