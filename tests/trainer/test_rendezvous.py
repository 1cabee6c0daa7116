"""A job's processes listen only on loopback, and refuse connections of other users."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.launch.base import Handle, Job
from flows.launch.local import LocalLauncher, recorded_start
from hlatctl.run.errors import LaunchError, load_error
from tests.sockets import LOOPBACK, hosts, listening
from tests.waiting import WAIT_S

_PEERS = os.fspath(Path(__file__).with_name("peers.py"))

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")]

#: Another user's process, which connects to the gloo ports like a rank.
_STRANGER = """
import encodings.idna, os, socket, struct, sys, time
os.setuid(65534)
held = []
for port in map(int, sys.argv[1:]):
    for number in range(8):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(struct.pack("<q", number))
        held.append(connection)
print("connected", flush=True)
time.sleep(600)
"""


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[Job, Handle]]:
    """A job of two ranks; the second joins when the test allows it."""
    job = Job(
        name="peers",
        run_dir=tmp_path,
        argv=(_PEERS, os.fspath(tmp_path)),
        launch_dir=tmp_path / "launch",
        log_dir=tmp_path / "logs",
        env={"OMP_NUM_THREADS": "1"},
        processes_per_node=2,
    )
    launcher = LocalLauncher()
    handle = launcher.submit(launcher.render(job))
    yield job, handle
    launcher.cancel(handle, grace_s=0)


def _wait_until(true: Callable[[], object], job: Job) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, job.log.read_text()
        time.sleep(0.05)


def _listening(handle: Handle) -> list[str]:
    record = recorded_start(handle)
    assert record
    return listening(process.pid for process in record.members())


def _ports(handle: Handle) -> list[int]:
    return sorted({int(address.split(":")[1], 16) for address in _listening(handle)})


def test_every_socket_of_a_job_that_listens_is_on_loopback(peers: tuple[Job, Handle], tmp_path: Path) -> None:
    job, handle = peers
    (tmp_path / "let-them-come").touch()
    _wait_until(lambda: len(list(tmp_path.glob("met-*"))) == 2, job)
    addresses = _listening(handle)
    assert len(addresses) >= 4, "two ranks, each in two groups"
    assert hosts(addresses) <= LOOPBACK
    (tmp_path / "let-them-go").touch()
    _wait_until(lambda: LocalLauncher().status(handle).ended, job)
    assert LocalLauncher().status(handle).state == "succeeded", job.log.read_text()
    assert [path.read_text() for path in sorted(tmp_path.glob("met-*"))] == ["2", "2"]


def test_a_connected_job_takes_no_more_connections(peers: tuple[Job, Handle], tmp_path: Path) -> None:
    job, handle = peers
    (tmp_path / "let-them-come").touch()
    _wait_until(lambda: len(list(tmp_path.glob("met-*"))) == 2, job)
    for port in _ports(handle):
        with socket.socket() as stranger:
            stranger.settimeout(0.1)
            with pytest.raises(TimeoutError):  # the kernel drops it
                stranger.connect(("127.0.0.1", port))
    (tmp_path / "let-them-go").touch()
    _wait_until(lambda: LocalLauncher().status(handle).ended, job)
    assert LocalLauncher().status(handle).state == "succeeded", job.log.read_text()


def test_no_process_listens_while_it_waits_for_another_to_start(peers: tuple[Job, Handle], tmp_path: Path) -> None:
    job, handle = peers
    _wait_until((tmp_path / "joining-0").exists, job)
    assert not _listening(handle)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_connection_is_refused(peers: tuple[Job, Handle], tmp_path: Path) -> None:
    job, handle = peers
    (tmp_path / "let-them-start").touch()
    _wait_until(lambda: _listening(handle), job)
    ports = map(str, _ports(handle))
    with subprocess.Popen([sys.executable, "-c", _STRANGER, *ports], stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout
            assert stranger.stdout.readline() == "connected\n"
            (tmp_path / "let-them-come").touch()
            _wait_until(lambda: LocalLauncher().status(handle).ended or load_error(job.error_file), job)
        finally:
            stranger.kill()
    error = load_error(job.error_file)
    assert isinstance(error, LaunchError), job.log.read_text()
    assert re.search(r"a process of user \w+ is connected instead of another rank", error.message)
    assert not list(tmp_path.glob("met-*"))


def test_an_interface_that_a_node_does_not_have_is_named_with_those_that_it_has() -> None:
    code = """
from datetime import timedelta
from trainer import rendezvous
rendezvous.join("gloo", timeout=timedelta(seconds=5))
"""
    nodes = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "0", "GLOO_SOCKET_IFNAME": "lo,eth77"}
    env = {**os.environ, **nodes, "HLATCTL_NODE_NAME": "n3"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "cluster.interface=lo,eth77: n3 has no network interface eth77; it has lo" in done.stderr


_HOSTS = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from hlatctl.run import peers
from trainer import rendezvous
from trainer.backends.base import gather_json, gather_json_on_rank0, json_from_rank0

def main(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.FileStore(sys.argv[1], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    before = set(peers._own_sockets())
    first, second = rendezvous.host_groups(*[timedelta(seconds=60)] * 2)
    opened = set(peers._own_sockets()) - before
    for group in (first, second):
        assert gather_json(rank, torch.device("cpu"), group) == list(range(world))
        assert json_from_rank0(rank, torch.device("cpu"), group) == 0
        assert gather_json_on_rank0(rank, group) == (list(range(world)) if rank == 0 else [])
        large = torch.full((1 << 18,), 1.0)
        dist.all_reduce(large, group=group)
        assert large.eq(world).all()
        rows = [None] * world
        dist.gather_object(rank, rows if rank == 0 else None, dst=0, group=group)
        mine = [None]
        dist.scatter_object_list(mine, rows if rank == 0 else None, src=0, group=group)
        assert mine == [rank]
        dist.broadcast_object_list(rows, src=0, group=group)
        assert rows == list(range(world))
    assert set(peers._own_sockets()) - before == opened, "nothing connected later"
    os.write(1, f"{rank}: {len(opened)}\\n".encode())  # in one piece
    dist.barrier(group=first)
    os._exit(0)

world = int(sys.argv[2])
children = []
for rank in range(world):
    child = os.fork()
    if not child:
        main(rank, world)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_hosts_are_connected_with_few_others_and_exchange_everything_afterwards(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _HOSTS, os.fspath(tmp_path / "meet"), "12"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split(": ") for line in result.stdout.splitlines()]
    opened = {int(rank): int(count) for rank, count in rows}
    assert opened.keys() == set(range(12))
    assert max(count for rank, count in opened.items() if rank) < 2 * 11
