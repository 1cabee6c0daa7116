"""The cost of a job's regular exchanges as its ranks grow, and of reading for a replica of 8 processes.

Before: every rank's time and host went to all ranks as JSON, and a value of rank 0 was gathered from all. Now: rank 0
receives four bytes a rank, and its values are broadcast. Each is measured as processor time of rank 0 and of another
rank, because machines are shared: with gloo between real processes, and played (one process whose collectives copy its
own value), which is the cost of packing and parsing alone.

``HLATCTL_BENCH_RANKS`` sets the numbers of real processes, such as ``2,8``.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_REAL = os.environ.get("HLATCTL_BENCH_RANKS", "2,4,8,16")
_PLAYED = (16, 256, 2048, 4096, 16384)
_ROUNDS = 20
_TENSOR_PARALLEL, _ROWS, _SEQ_LEN, _BATCHES = 8, 4, 4096, 30
_CPU = torch.device("cpu")
#: A step's message of rank 0, such as the result of preparing a save.
_VALUE = [True, None]
#: Median processor seconds of a call, by the call's name.
Costs = dict[str, float]


def run() -> None:
    """Print the costs of the exchanges by number of ranks, with exponents, and the cost of reading."""
    counts = [int(text) for text in _REAL.split(",")]
    print("processor time of one exchange, ms: with gloo between real processes, rank 0 | another rank")
    _table(counts, [_real(count) for count in counts])
    print("the same, played: packing and parsing alone, rank 0")
    _table(_PLAYED, [[_played(count)] for count in _PLAYED])
    _reading()


def _exchanges() -> dict[str, Callable[[], object]]:
    from trainer.backends.base import gather_json, gather_numbers, json_from_rank0
    from trainer.step.monitor import RankTimes

    times = RankTimes(1.5, 100)
    places = [(f"node-{rank}", "cpu") for rank in range(dist.get_world_size())]

    def compare() -> None:
        own_s = gather_numbers(0.25, _CPU, None)
        if own_s is not None:
            times.compare(20, own_s, places)

    return {
        "times, before": lambda: _compare_before(_gather_before(["node-1", 0.25])),
        "times": compare,
        "value of rank 0, before": lambda: _gather_before(_VALUE)[0],
        "value of rank 0": lambda: json_from_rank0(_VALUE, _CPU, None),
        "JSON of all, before": lambda: _gather_before(None),
        "JSON of all": lambda: gather_json(None, _CPU, None),
    }


def _gather_before(value: Any) -> list[Any]:
    world_size = dist.get_world_size()
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded)
    return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(received, sizes, strict=True)]


def _compare_before(ranks: list[tuple[str, float]]) -> object:
    median_s = statistics.median_low([own_s for _, own_s in ranks])
    ratios = [own_s / median_s for _, own_s in ranks]
    slow = {rank: 1 for rank, ratio in enumerate(ratios) if ratio > 1.5}
    slowest = max(range(len(ranks)), key=ratios.__getitem__)
    return slow, ranks[slowest], min(own_s for _, own_s in ranks)


def _measure() -> Costs:
    costs = {}
    for name, call in _exchanges().items():
        each = []
        for _ in range(_ROUNDS):
            began_s = time.process_time()
            call()
            each.append(time.process_time() - began_s)
        costs[name] = statistics.median(each)
    return costs


def _real(world_size: int) -> list[Costs]:
    """Return the costs of rank 0 and of rank 1."""
    fork = multiprocessing.get_context("fork")  # the children need not import PyTorch again
    results: SimpleQueue[tuple[int, Costs]] = fork.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:

        def rank_of_job(rank: int) -> None:
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
            store = dist.FileStore(os.path.join(folder, "ranks"), world_size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            results.put((rank, _measure()))
            dist.barrier()
            dist.destroy_process_group()

        ranks = [fork.Process(target=rank_of_job, args=(rank,)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        costs = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join()
    return [costs[0], costs[1]]


def _played(world_size: int) -> Costs:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        return _measure()
    finally:
        dist.destroy_process_group()


def _table(counts: Sequence[int], costs: Sequence[Sequence[Costs]]) -> None:
    """Print a row for each exchange; the exponent is that of rank 0 between the last two numbers of ranks."""
    print(f"  {'ranks':<24}", *(f"{count:>15,}" for count in counts), "  exponent")
    for name in costs[0][0]:
        cells = [" | ".join(f"{rank[name] * 1e3:.2f}" for rank in ranks) for ranks in costs]
        exponent = math.nan
        if len(counts) > 1:
            first, last = (ranks[0][name] for ranks in costs[-2:])
            exponent = math.log(last / first) / math.log(counts[-1] / counts[-2])
        print(f"  {name:<24}", *(f"{cell:>15}" for cell in cells), f"{exponent:10.2f}", flush=True)


def _reading() -> None:
    """Print the processor time of a replica's processes for a step's tokens: each reads, and one reads for all."""
    from benchmarks import loader_speed

    corpus, model = loader_speed.inputs()
    if not (corpus.is_file() and model.is_file()):
        print(f"reading: skipped: {corpus} and {model} are not there")
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        dataset = loader_speed.prepare(Path(folder), corpus, model)
        for name, shared in (("each of 8 reads", False), ("one of 8 reads", True)):
            spent_s, tokens = _replica(dataset, Path(folder) / "batches", shared=shared)
            print(f"{name:<18} {spent_s / _BATCHES * 1e3:8.1f} ms a step of {tokens // _BATCHES:,} tokens")


def _replica(dataset: dict[str, Any], path: Path, *, shared: bool) -> tuple[float, int]:
    """Return the processor seconds of a replica's 8 processes, played by threads, and the tokens of the replica."""
    from conf.schema import Config, DataConfig, TrainConfig
    from trainer.data.loader import Batches, Loader, ReceivedBatches, Sender

    train = TrainConfig(seq_len=_SEQ_LEN, global_batch_size=_ROWS)
    config = Config(seed=1, train=train, data=DataConfig(prefetch_batches=1))
    others = _TENSOR_PARALLEL - 1
    began_s = time.process_time()
    members: list[Batches] = [Loader(config, dataset, rank=0, size=1, sender=Sender(path, others) if shared else None)]
    for _ in range(others):
        if shared:
            members.append(ReceivedBatches(path, (_ROWS, _SEQ_LEN + 1), ahead=1))
        else:
            members.append(Loader(config, dataset, rank=0, size=1))
    tokens = 0
    for _ in range(_BATCHES):
        inputs: list[Tensor] = [member.next()[0] for member in members]
        assert all(torch.equal(each, inputs[0]) for each in inputs)
        tokens += inputs[0].numel()
    for member in members:
        member.close()
    return time.process_time() - began_s, tokens
