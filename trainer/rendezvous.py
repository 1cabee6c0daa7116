"""Connect the processes of a job: through files in a private folder, or on several nodes through torchrun's store.

``hlatctl.run.peers`` rejects processes of other users.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from conf.devices import HOST_PROCESS_GROUP
from conf.schema import Config
from hlatctl.run import peers
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.processes import node_name

#: How long to wait for the other processes, and for each other's storage.
TIMEOUT = timedelta(minutes=15)
#: How much longer a collective waits than the driver, which ends an attempt that hangs and keeps its evidence.
_MARGIN_S = 300.0
_HOSTS = "hosts"


def join(backend: str, *, timeout: timedelta, device: torch.device | None = None) -> None:
    """Create the default process group of the processes that torchrun started.

    Args:
        timeout: timeout of its collectives.
        device: the device to bind the group to (:class:`conf.devices.Device`). Other groups are then split from this
            one, by all processes together: those of another backend must have all of them.

    Raises:
        ConfigError: this node has no such network interface.
        LaunchError: another user's process is connected.
    """
    folder = os.environ.get(JOB_FOLDER_ENV)
    if folder is None or not peers.on_one_machine():
        _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        with peers.connecting(backend):
            dist.init_process_group(backend, timeout=timeout, device_id=device)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = os.path.join(folder, f"ranks-{start}")
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined] # public, but not in its module's list
    store.set_timeout(timeout)
    peers.meet(store, rank, world_size)
    with peers.connecting(backend):  # now: with a stranger in a rank's place, the next group would wait for its timeout
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )


def timeout(config: Config, step_s: float | None) -> timedelta:
    """Return how long collectives wait: longer than the driver's limit of a hang, so that the driver finds it first.

    Args:
        step_s: duration of a step; None: the first step is to come, whose graphs may take long on some processes.
    """
    recovery = config.recovery
    limit_s = recovery.start_timeout_s if step_s is None else max(recovery.hang_floor_s, recovery.hang_factor * step_s)
    return timedelta(seconds=limit_s + _MARGIN_S)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of all groups of this process but those of :func:`host_groups`.

    The groups of a mesh have PyTorch's default (NCCL: 10 minutes), whatever timeout the default group has.
    """
    in_torch = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before 2.14
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # a library that has no timeouts
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.group_desc != _HOSTS:
                in_torch(timeout, group)


def host_groups(*timeouts: timedelta) -> list[dist.ProcessGroup]:
    """Create groups that connect the hosts of all processes, one for each timeout.

    They are for exchanges among all processes, and with rank 0; no other process can be a root. gloo would connect
    each process with every other, which takes minutes with thousands. Here it connects those that need it: in the first
    exchange of each kind, which happens here, because later nobody can connect.
    """
    with peers.connecting(HOST_PROCESS_GROUP), _connecting_when_needed():
        groups = [
            dist.new_group(backend=HOST_PROCESS_GROUP, timeout=timeout, group_desc=_HOSTS) for timeout in timeouts
        ]
        for group in groups:
            _exchange(group)
    return groups


def pairs_group(sends: Iterable[int], receives: Iterable[int]) -> dist.ProcessGroup:
    """Create a group as :func:`host_groups` does, in which this process can also send to, and receive from, some ranks.

    Each rank that this one sends to names it in ``receives``.
    """
    with peers.connecting(HOST_PROCESS_GROUP), _connecting_when_needed():
        group: dist.ProcessGroup = dist.new_group(backend=HOST_PROCESS_GROUP, timeout=TIMEOUT, group_desc=_HOSTS)
        _exchange(group)
        works = [dist.isend(torch.zeros(1), rank, group) for rank in sends]
        works += [dist.irecv(torch.zeros(1), rank, group) for rank in receives]
        for work in works:
            if work is not None:
                work.wait()
    return group


@contextmanager
def _connecting_when_needed() -> Iterator[None]:
    before = os.environ.get(peers.LAZY_ENV)
    os.environ[peers.LAZY_ENV] = "1"
    try:
        yield
    finally:
        del os.environ[peers.LAZY_ENV]
        if before is not None:
            os.environ[peers.LAZY_ENV] = before


def _exchange(group: dist.ProcessGroup) -> None:
    """Exchange something in each way that ``trainer.backends.base`` and ``torch.distributed.checkpoint`` do."""
    mine, rows = torch.zeros(1), list(torch.zeros(dist.get_world_size(group), 1))
    all_rows = rows if dist.get_rank(group) == 0 else None
    dist.all_reduce(mine, group=group)
    dist.all_gather(rows, mine, group=group)
    dist.broadcast(mine, 0, group=group)
    dist.gather(mine, all_rows, dst=0, group=group)
    dist.scatter(mine, all_rows, src=0, group=group)
    dist.barrier(group=group)


def _check_interfaces(names: str) -> None:
    """Check that this node has the configured interfaces; empty: none are configured."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in here:
            raise ConfigError(
                f"cluster.interface={names}: {node_name()} has no network interface {name}; it has {', '.join(here)}",
                hint="set cluster.interface to an interface that every node has",
            )
