"""The log of a node: lines keep their order and their rank, floods are cut, and last lines are kept."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl import node_log
from hlatctl.node_log import BURST_BYTES, RATE_BYTES_PER_S, TAIL_BYTES, NodeLog, RankLines
from hlatctl.run import rank_output
from hlatctl.run.rank_output import SOCKET_ENV, prefix
from tests.waiting import WAIT_S, wait_for


def test_a_line_that_comes_in_parts_is_written_once_and_with_its_rank() -> None:
    lines = RankLines(3, 0.0)
    assert lines.take(b"one\ntw", 0.0) == b"[rank3]: one\n"
    assert lines.take(b"o", 0.1) == b""
    assert lines.take(b"\n\nthree\n", 0.2) == b"[rank3]: two\n[rank3]: \n[rank3]: three\n"
    assert lines.end() == b""


def test_a_line_without_an_end_is_written_when_the_rank_is_silent_too_long_or_ends() -> None:
    lines = RankLines(0, 0.0)
    lines.take(b"waiting for", 1.0)
    assert lines.idle(1.5) == b""
    assert lines.idle(9.0) == b"[rank0]: waiting for\n"
    assert lines.take(b"Bus error", 9.0) + lines.end() == b"[rank0]: Bus error\n"


def test_a_very_long_line_is_broken_instead_of_kept() -> None:
    lines = RankLines(0, 0.0)
    written = b"".join(lines.take(b"x" * 1000, 0.0) for _ in range(200)) + lines.end()
    assert written.replace(b"[rank0]: ", b"").replace(b"\n", b"") == b"x" * 200_000
    assert max(map(len, written.splitlines())) < 2 * TAIL_BYTES


def test_a_flood_is_cut_and_the_log_says_how_much_and_keeps_the_last_lines() -> None:
    lines, block = RankLines(7, 0.0), b"flood\n" * 100_000
    written = b"".join(lines.take(block, second / 10) for second in range(600))
    assert BURST_BYTES < len(written) < 4 * (BURST_BYTES + 60 * RATE_BYTES_PER_S)
    assert lines.take(block + b"Traceback\nValueError: the reason\n", 60.0) == b""
    end = lines.end()
    assert end.endswith(b"[rank7]: Traceback\n[rank7]: ValueError: the reason\n")
    assert b"[rank7]: hlatctl left out " in end
    assert len(end) < 4 * TAIL_BYTES


def test_a_rank_that_hangs_after_a_flood_has_its_last_lines_in_the_log() -> None:
    lines = RankLines(0, 0.0)
    lines.take(b"much\n" * 1000 + b"the last one\n", 0.0, room=False)
    assert lines.idle(1.0) == b""
    assert lines.idle(3.0).endswith(b"[rank0]: the last one\n")
    assert lines.take(b"more\n", 4.0) == b"[rank0]: more\n"


def _rank(log: NodeLog, rank: int, code: str) -> subprocess.Popen[bytes]:
    start = "from hlatctl.run import rank_output; rank_output.send_to_node_log()\n"
    env = {**os.environ, SOCKET_ENV: os.fspath(log.socket), "RANK": str(rank), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, "-c", start + code], env=env)


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[tuple[NodeLog, Path]]:
    path = tmp_path / "train.log"
    with path.open("ab") as file:
        log = NodeLog(tmp_path, file.fileno())
        log.start()
        yield log, path


@pytest.mark.processes
def test_ranks_and_their_children_keep_their_order_and_a_killed_rank_its_last_words(
    collected: tuple[NodeLog, Path],
) -> None:
    log, path = collected
    counts = "for number in range(2000): print(number)\n"
    dies = f"{counts}import os, sys; print('dying', end='', file=sys.stderr); os.kill(os.getpid(), 9)"
    starts = f"{counts}import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(\"of a child\")'])"
    ranks = [_rank(log, 0, dies), _rank(log, 41, starts)]
    for rank in ranks:
        rank.wait()
    log.close()
    lines = path.read_bytes().splitlines()
    for number, last in ((0, b"dying"), (41, b"of a child")):
        own = [line.partition(b": ")[2] for line in lines if line.startswith(prefix(number))]
        assert own == [*(str(count).encode() for count in range(2000)), last]


def test_a_rank_that_is_killed_while_it_connects_does_not_end_the_log(collected: tuple[NodeLog, Path]) -> None:
    log, path = collected
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.connect(os.fspath(log.socket))
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as rank:
        rank.settimeout(WAIT_S)
        rank.connect(os.fspath(log.socket))
        socket.send_fds(rank, [b"5"], [reader])
        assert rank.recv(1) == b"1"
    os.write(writer, b"hello\n")
    os.close(reader)
    os.close(writer)
    log.close()
    assert path.read_bytes() == b"[rank5]: hello\n"


@pytest.mark.processes
def test_ranks_do_not_wait_for_a_log_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "_CLOSE_S", 0.1)
    reader, writer = os.pipe()  # nobody reads it: as storage that does not answer
    log = NodeLog(tmp_path, writer)
    log.start()
    rank = _rank(log, 0, "for _ in range(64): print('x' * (1 << 20))\n")
    assert rank.wait(WAIT_S) == 0
    assert log._queued_bytes < 2 * node_log._QUEUE_BYTES
    log.close()
    os.set_blocking(reader, False)
    taken = bytearray()

    def written() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                taken.extend(os.read(reader, 1 << 20))
        return not any(thread.is_alive() for thread in log._threads) and taken.endswith(b"x\n")

    wait_for(written)
    os.close(reader)
    os.close(writer)
    assert b"hlatctl left out" in taken


@pytest.mark.processes
def test_without_the_nodes_program_a_rank_prints_where_it_did(tmp_path: Path) -> None:
    start = "from hlatctl.run import rank_output; rank_output.send_to_node_log(); print('here')"
    for own in ({}, {SOCKET_ENV: os.fspath(tmp_path / "gone")}):
        env = {**os.environ, **own, "RANK": "0"}
        done = subprocess.run([sys.executable, "-c", start], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")


def test_a_rank_does_not_wait_for_a_nodes_program_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_output, "_ANSWER_S", 0.01)
    monkeypatch.setenv(SOCKET_ENV, os.fspath(tmp_path / "s"))
    monkeypatch.setenv("RANK", "0")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / "s"))
        silent.listen()
        rank_output.send_to_node_log()
    os.write(1, b"here")
    assert capfd.readouterr().out == "here"
