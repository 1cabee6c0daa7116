"""Connect the processes of a job: through files in a private folder, or on several nodes through torchrun's store.

``hlatctl.run.peers`` rejects processes of other users.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from hlatctl.run import peers
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.processes import node_name


def join(backend: str, *, timeout: timedelta) -> None:
    """Create the default process group of the processes that torchrun started.

    Args:
        timeout: timeout of its collectives.

    Raises:
        ConfigError: this node has no such network interface.
        LaunchError: another user's process is connected.
    """
    folder = os.environ.get(JOB_FOLDER_ENV)
    if folder is None or not peers.on_one_machine():
        _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        with peers.connecting(backend):
            dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = os.path.join(folder, f"ranks-{start}")
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined] # public, but not in its module's list
    store.set_timeout(timeout)
    peers.meet(store, rank, world_size)
    with peers.connecting(backend):  # now: with a stranger in a rank's place, the next group would wait for its timeout
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _check_interfaces(names: str) -> None:
    """Check that this node has the configured interfaces; empty: none are configured."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in here:
            raise ConfigError(
                f"cluster.interface={names}: {node_name()} has no network interface {name}; it has {', '.join(here)}",
                hint="set cluster.interface to an interface that every node has",
            )
