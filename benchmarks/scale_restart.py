"""The parts of a training process's start that may grow with the ranks: imports, rendezvous, groups, model, weights.

The rendezvous is real: light processes, forked so that they share their memory, meet in a store as torchrun's do on
several nodes, and create the group of hosts. For up to 16,384 ranks, the clients of a real store that a few processes
have send it what those ranks send. Groups and model are those of one rank of 2,048, for Llama 3 8B and 70B in PyTorch's
fake process group. ``HLATCTL_BENCH_RANKS`` sets the numbers of real processes, such as ``16,64``, and
``HLATCTL_BENCH_CLIENTS`` those of clients. docs/performance.md adds them to the time of a restart.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

_REAL = [int(text) for text in os.environ.get("HLATCTL_BENCH_RANKS", "32,64,128,256").split(",")]
_CLIENTS = [int(text) for text in os.environ.get("HLATCTL_BENCH_CLIENTS", "2048,4096,8192,16384").split(",")]
#: Processes that have the clients, and what a rank tells the others about itself (bytes, gloo of PyTorch 2.13).
_HOLDERS, _ADDRESS_BYTES = 6, 154
_RANKS, _RANK, _PER_NODE = 2048, 1234, 8
_TIMEOUT = timedelta(minutes=10)
_ROUNDS = 3
_IMPORT = "import torch, trainer.__main__, trainer.step.loop, trainer.backends.torch_native"
_MODELS = {
    "8B": "model=llama3_8b parallel.tensor_parallel_size=1",
    "70B": "model=llama_70b parallel.tensor_parallel_size=8",
}


def run() -> None:
    """Print the seconds of each part."""
    _imports()
    _numbers()
    print("rendezvous and group of hosts, processor time: of the store, of rank 0, of another rank (median)")
    points = [(ranks, _rendezvous(ranks)) for ranks in _REAL]
    for ranks, costs in points:
        cells = "  ".join(f"{name} {cost_s:7.3f} s" for name, cost_s in costs.items())
        print(f"  {ranks:>5} processes: {cells}", flush=True)
    if len(points) > 1:
        (few, first), (many, last) = points[-2:]
        for name in first:
            exponent = math.log(last[name] / first[name]) / math.log(many / few)
            reckoned_s = last[name] * (_RANKS / many) ** exponent
            print(f"  {name}: exponent {exponent:.2f}, reckoned for {_RANKS:,}: {reckoned_s:.1f} s", flush=True)
    print("the store with the clients of so many ranks")
    for ranks in _CLIENTS:
        cells = "  ".join(f"{name} {value}" for name, value in _store_of_many(ranks).items())
        print(f"  {ranks:>6} clients: {cells}", flush=True)
    for name, overrides in _MODELS.items():
        _in_fork(partial(_one_of_many, name, overrides.split()))


def _imports() -> None:
    code = f"import time; began_s = time.perf_counter(); {_IMPORT}; "
    code += "print(time.perf_counter() - began_s, time.process_time())"
    times = []
    for _ in range(_ROUNDS):
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        times.append([float(number) for number in done.stdout.split()])
    wall_s, cpu_s = (min(each) for each in zip(*times, strict=True))
    print(f"start of Python and imports, from the page cache: {wall_s:.2f} s, {cpu_s:.2f} s of a core", flush=True)


def _numbers() -> None:
    """Print the processor time of drawing, in turn with PyTorch's generator, one thread."""
    from trainer.model.initial import normal_block

    torch.set_num_threads(1)
    rows, generator = torch.arange(16), torch.Generator().manual_seed(1)
    block = torch.empty(len(rows), 4096)
    calls: dict[str, Callable[[], object]] = {
        "initial weights": lambda: normal_block(1, rows, range(4096), 4096),
        "torch.normal_": lambda: block.normal_(generator=generator),
    }
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(300):
        for name, call in calls.items():
            began_s = time.process_time()
            call()
            spent[name].append(time.process_time() - began_s)
    for name, each in spent.items():
        print(
            f"{name:<16} {block.numel() / statistics.median(each) / 1e6:6.0f} million numbers/s of a core", flush=True
        )


def _rendezvous(ranks: int) -> dict[str, float]:
    """Return the processor time of the store's process, of rank 0, and the median of the others."""
    from trainer import rendezvous

    fork = multiprocessing.get_context("fork")
    results: SimpleQueue[tuple[int, float]] = fork.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(_PER_NODE),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the first node's program has the store
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_GLOO_LAZY_INIT": "1",  # the default group connects nobody: NCCL's doesn't either
    }
    connected = fork.Event()

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", port, ranks + 1, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        connected.wait()
        results.put((-1, time.process_time()))
        store.num_keys()

    def rank_of_job(rank: int) -> None:
        os.environ |= common | {"RANK": str(rank), "LOCAL_RANK": str(rank % _PER_NODE)}
        torch.set_num_threads(1)
        began_s = time.process_time()
        rendezvous.join("gloo", timeout=_TIMEOUT)
        rendezvous.host_groups(_TIMEOUT)
        results.put((rank, time.process_time() - began_s))
        connected.wait()  # a process that ends early would disconnect others

    processes = [fork.Process(target=serve)]
    processes += [fork.Process(target=rank_of_job, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    spent = dict(results.get() for _ in range(ranks))
    connected.set()
    spent |= dict([results.get()])
    for process in processes:
        process.join()
    others = statistics.median(spent[rank] for rank in range(1, ranks))
    return {"store": spent[-1], "rank 0": spent[0], "another rank": others}


def _store_of_many(ranks: int) -> dict[str, str]:
    """Return the costs of a store that serves the rendezvous of so many ranks, each with a connection of its own.

    The requests are those that ``rendezvous.host_groups`` makes with gloo's lazy connections, as a store in between
    showed with 8 processes: each rank sets its address, then waits for and gets those of the ranks that it connects to.
    These are rank 0, its neighbours, and those whose number differs in one bit; rank 0 connects to all.
    """
    # PyTorch looks up the name of each peer until one lookup fails: docs/performance.md has its cost.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    fork = multiprocessing.get_context("fork")
    ports: SimpleQueue[int] = fork.SimpleQueue()
    costs: SimpleQueue[tuple[float, int, int]] = fork.SimpleQueue()
    phases = fork.Barrier(_HOLDERS + 2)
    over = fork.Event()

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        ports.put(store.port)
        phases.wait()  # connected
        sockets = sum(os.readlink(entry.path).startswith("socket:") for entry in os.scandir("/proc/self/fd"))
        phases.wait()  # set
        phases.wait()  # got
        over.wait()
        costs.put((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, sockets))

    def client(port: int) -> Any:
        return dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]

    def hold(first: int, port: int) -> None:
        mine = range(first, ranks, _HOLDERS)
        stores = {rank: client(port) for rank in mine}
        phases.wait()
        for rank, store in stores.items():
            store.set(f"hosts/{rank}", "a" * _ADDRESS_BYTES)
        phases.wait()
        for rank, store in stores.items():
            for other in _peers(rank, ranks) if rank else []:
                store.wait([f"hosts/{other}"])
                store.get(f"hosts/{other}")
        phases.wait()
        over.wait()

    server = fork.Process(target=serve)
    server.start()
    port = ports.get()
    holders = [fork.Process(target=hold, args=(first, port)) for first in range(_HOLDERS)]
    laps = [time.perf_counter()]
    for holder in holders:
        holder.start()
    for _ in range(3):
        phases.wait()
        laps.append(time.perf_counter())
    rank0 = client(port)
    for other in range(1, ranks):
        rank0.wait([f"hosts/{other}"])
        rank0.get(f"hosts/{other}")
    laps.append(time.perf_counter())
    over.set()
    cpu_s, peak_bytes, sockets = costs.get()
    for process in (server, *holders):
        process.join()
    walls = dict(zip(("connect", "set", "get", "rank 0"), (b - a for a, b in itertools.pairwise(laps)), strict=True))
    return {
        "connections": f"{sockets:,}",
        **{name: f"{wall_s:.2f} s" for name, wall_s in walls.items()},
        "processor time of the store": f"{cpu_s:.2f} s",
        "its memory": f"{peak_bytes / 2**20:.0f} MiB",
    }


def _peers(rank: int, ranks: int) -> set[int]:
    near = {0, (rank - 1) % ranks, (rank + 1) % ranks}
    return (near | {rank ^ (1 << bit) for bit in range(ranks.bit_length()) if rank ^ (1 << bit) < ranks}) - {rank}


def _in_fork(work: Callable[[], None]) -> None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def _one_of_many(name: str, overrides: list[str]) -> None:
    """Print the times of one rank's groups, model, optimizer and weights."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from conf.compose import compose
    from trainer.model.decoder import Llama
    from trainer.model.initial import initialize
    from trainer.model.precision import PRECISIONS
    from trainer.optim.adamw import AdamW
    from trainer.parallel.layout import make_layout, parameter_shards, prepare

    sizes = [f"cluster.nodes={_RANKS // _PER_NODE}", f"cluster.processes_per_node={_PER_NODE}"]
    common = [
        "cluster=simulated",
        "eval.enabled=false",
        "parallel.data_parallel=fsdp",
        f"train.global_batch_size={_RANKS}",
    ]
    config = compose([*common, *sizes, *overrides])
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=_RANKS)
    clock = _Clock()
    layout = make_layout(config, "cpu", _RANKS)
    clock.lap("groups")
    with torch.device("meta"):
        model = Llama(config.model, config.train.seq_len, tp=layout.tp)
    clock.lap("layers")
    prepare(model, layout, PRECISIONS["mixed"], compile_backend=None)
    clock.lap("sharding")
    model.to_empty(device="cpu")
    clock.lap("allocation")
    initialize(model, config.model, config.seed)
    clock.lap("initial weights")
    AdamW(parameter_shards(model.named_parameters(), layout), config.optimizer)
    clock.lap("optimizer")
    print(f"{name}, rank {_RANK} of {_RANKS:,}, processor time: " + ", ".join(clock.laps), flush=True)


class _Clock:
    def __init__(self) -> None:
        self.laps: list[str] = []
        self._last_s = time.process_time()

    def lap(self, name: str) -> None:
        now_s = time.process_time()
        self.laps.append(f"{name} {now_s - self._last_s:.2f} s")
        self._last_s = now_s


if __name__ == "__main__":
    run()
