"""Nodes that are cut off are found; slow, stopped and ending ones are not. Both ends are in this process."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from hlatctl import cut_nodes
from hlatctl.cut_nodes import WATCH_ENV, Link, Watch
from tests.waiting import wait_for


class Round:
    """A round on three nodes, n1 to n3, with n4 as a spare; n1 watches. Its clock is the test's."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack, *, spare: tuple[str, ...]
    ) -> None:
        self.now_s, self.stack, self.progress = 0.0, stack, folder / "progress"
        self._slurmd = {
            host: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for host in ["n1", "n2", "n3", "n4"]
        }
        self._where = {host: ("127.0.0.1", slurmd.getsockname()[1]) for host, slurmd in self._slurmd.items()}
        self.watch = stack.enter_context(
            Watch(
                ("n1", "n2", "n3"),
                spare=spare,
                needed=3,
                here="n1",
                progress=self.progress,
                addresses=self._addresses,
                now_s=lambda: self.now_s,
            )
        )
        host, port, secret = self.watch.env[WATCH_ENV].split()
        assert host == "n1"
        monkeypatch.setenv(WATCH_ENV, f"127.0.0.1 {port} {secret}")
        self.links: dict[str, Link] = {}

    def _addresses(self, hosts: Collection[str]) -> Mapping[str, tuple[str, int]]:
        return {host: self._where[host] for host in hosts}

    def connect(self, *hosts: str) -> None:
        for host in hosts:
            link = Link.of_environment(host)
            assert link
            self.links[host] = link
            self.stack.callback(link.close)
        before = self.watch.connected
        wait_for(lambda: self._answers() or self.watch.connected == before + len(hosts))

    def _answers(self) -> bool:
        self.watch.look(0.01)
        return any(link.ordered_end() for link in self.links.values())

    def cut(self, host: str, *, slurmd: bool = True) -> None:
        """End a node's program without a word, and its slurmd."""
        self.links.pop(host)._connection.close()
        if slurmd:
            self._slurmd[host].close()

    def seconds(self, count: int, each_s: float = 1.0) -> list[str]:
        """Let seconds pass; return the nodes that are then cut."""
        found: list[str] = []
        for _ in range(count):
            self.now_s += each_s
            found = self.watch.look(0.01)
            if found:
                break
        return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def round_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> Round:
    round_ = Round(tmp_path, monkeypatch, stack, spare=("n4",))
    round_.connect("n1", "n2", "n3")
    return round_


def test_a_node_is_cut_when_its_program_and_its_slurmd_are_gone_for_seconds(round_: Round) -> None:
    assert round_.seconds(9) == []
    round_.cut("n2")
    assert round_.seconds(4) == []
    assert round_.seconds(2) == ["n2"]


def test_the_other_nodes_are_ordered_to_end_the_job(round_: Round) -> None:
    round_.cut("n2")
    assert not round_.links["n3"].ordered_end()
    round_.watch.order_end()
    wait_for(round_.links["n3"].ordered_end)


def test_a_node_whose_slurmd_answers_is_not_cut(round_: Round) -> None:
    """Its program was killed, or it is so busy that it was."""
    round_.cut("n2", slurmd=False)
    assert round_.seconds(60) == []


def test_a_node_that_has_ended_its_job_is_not_even_suspected(round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_nodes, "reachable", lambda *_: pytest.fail("nobody is asked"))
    round_.links["n2"].close()
    assert round_.seconds(60) == []


def test_a_node_is_not_cut_while_training_makes_steps(round_: Round) -> None:
    round_.cut("n2")
    for step in range(30):
        round_.progress.write_text("step\n" * step)
        assert round_.seconds(1) == []
    assert round_.seconds(6) == ["n2"]


def test_a_program_that_was_held_up_counts_from_the_beginning(round_: Round) -> None:
    round_.cut("n2")
    assert round_.seconds(20, each_s=5.0) == [], "each look is late"
    assert round_.seconds(5) == ["n2"]


def test_nobody_is_cut_if_no_other_node_answers(round_: Round) -> None:
    for host in ("n2", "n3"):
        round_.cut(host)
    round_._slurmd["n4"].close()
    assert round_.seconds(60) == []


def test_the_scheduler_decides_if_no_restart_would_be_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    round_ = Round(tmp_path, monkeypatch, stack, spare=())
    round_.connect("n1", "n2", "n3")
    round_.cut("n2")
    assert round_.seconds(60) == []


def test_a_node_that_never_connects_is_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """It was a spare one, and was cut before it was needed."""
    round_ = Round(tmp_path, monkeypatch, stack, spare=("n4",))
    round_.connect("n1", "n3")
    round_._slurmd["n2"].close()
    assert round_.seconds(10) == []
    assert round_.seconds(8) == ["n2"]


def test_strangers_are_turned_away_and_listening_ends_when_all_nodes_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    round_ = Round(tmp_path, monkeypatch, stack, spare=("n4",))
    port = int(round_.watch.env[WATCH_ENV].split()[1])
    silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
    guess = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    guess.sendall(b"n2 00 00\n")
    round_.connect("n1", "n2", "n3")
    assert guess.recv(100)
    assert guess.recv(100) == b"", "the connection is closed"
    assert round_.watch.env == {}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    del silent


def test_a_job_that_nobody_watches_has_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "n1", "127.0.0.1 1 secret", "n1 port secret"):
        monkeypatch.setenv(WATCH_ENV, value)
        assert Link.of_environment("n1") is None
