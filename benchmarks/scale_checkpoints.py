"""The cost of a 70B checkpoint for one process as the number of ranks grows, and the time until it is verified.

The metadata of all ranks is played: 70B in 8 stages, 8 tensor-parallel slices, and rows sharded over the rest. Hashing,
writing and reading are measured with one rank's bytes. "Before" is what older releases did, still computed by torch:
every rank parsed the headers of all shards and opened a file per rank, and rank 0 planned each save. Then 16 real
processes save and restore a small model. One rank's shard is verified on the disk of ``TMPDIR``.
``HLATCTL_BENCH_RANKS`` sets the numbers of ranks, such as ``128,512``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conf.compose import compose as compose_config
from conf.sizes import parameters
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.checkpoint import RANK_STATES, RankStates, read_manifest, read_rank_states, write_manifest
from hlatctl.run.files import JOB_FOLDER_ENV
from trainer.checkpoint.manager import rng_state
from trainer.checkpoint.shards import (
    INDEX,
    SUFFIX,
    Chunk,
    ShardIndex,
    StoredChunk,
    compose,
    file_name,
    header_of,
    read_header,
    write_shard,
)
from trainer.checkpoint.trust import PIECE_BYTES, ReadBack, drop_cached_pages

_RANKS = [int(text) for text in os.environ.get("HLATCTL_BENCH_RANKS", "128,512,2048").split(",")]
_STAGES, _SLICES, _LAYERS = 8, 8, 80
#: Name, shape and dimension that tensor parallelism slices.
_LAYER: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("attention.qkv.weight", (10240, 8192), 0),
    ("attention.o.weight", (8192, 8192), 1),
    ("mlp.gate_up.weight", (57344, 8192), 0),
    ("mlp.down.weight", (8192, 28672), 1),
    ("attention_norm.weight", (8192,), None),
    ("mlp_norm.weight", (8192,), None),
)
_KINDS = ("model", "exp_avg", "exp_avg_sq")
#: Of the storage that all ranks share; each way.
_STORAGE_BYTES_PER_S = 5e9
_STARTUP_GOAL_S, _SAVE_GOAL = 60.0, 1.2
_PROCESSES = 16
_VERIFICATIONS = 4
#: The pieces of work on rank 0, and on the slowest rank, between the end of a step and a verified checkpoint.
_SAVING = ("manifest_write", "ranks_write", "why_incomplete", "manifest_read")
_STARTING = ("manifest_read", "why_incomplete", "index_read", "index_parse", "ranks_read")


def run() -> None:
    """Print each cost at each number of ranks, its exponent, the reckoned times, and the time of 16 processes."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        rates = _rates(Path(folder))
        for ranks in _RANKS:
            print(f"{ranks:,} ranks", flush=True)
            place = Path(folder) / str(ranks)
            place.mkdir()
            for name, (cost, note) in _costs(place, ranks):
                found.setdefault(name, []).append(cost)
                print(f"  {name:<28} {cost:9.4f} s  {note}", flush=True)
    for name, costs in found.items() if len(_RANKS) > 1 else ():
        exponent = math.log(costs[-1] / costs[-2]) / math.log(_RANKS[-1] / _RANKS[-2])
        print(f"{name:<30} exponent {exponent:5.2f}, {costs[-1]:.3f} s at {_RANKS[-1]:,} ranks")
    _reckon({name: costs[-1] for name, costs in found.items()}, rates, _RANKS[-1])
    _real()


def _rank_bytes(ranks: int) -> int:
    """Return the bytes of one rank's shard: FP32 weights and moments."""
    return 12 * parameters(compose_config(["model=llama_70b"]).model).total // ranks


def _rates(folder: Path) -> dict[str, float]:
    """Print and return bytes per second of one rank, with the bytes of a rank of 2,048."""
    size = _rank_bytes(2048)
    values = torch.randint(0, 255, (size,), dtype=torch.uint8)
    data = values.numpy().data
    chunk = {"model.a": Chunk(values=values, offsets=(0,), shape=(size,))}
    path, numbers = folder / file_name(1), itertools.count(1)
    rates = {
        "sha256": size / _seconds(lambda: hashlib.sha256(data).digest()),
        "write and hash": size / _seconds(lambda: write_shard(folder / file_name(next(numbers)), chunk)),
        "read and hash": size / _seconds(lambda: files.sha256_file(path)),
        "read": size / _seconds(lambda: path.read_bytes()),
    }
    for shard in folder.iterdir():
        shard.unlink()
    _verify(folder, chunk, size)
    for name, rate in rates.items():
        print(f"{name:<16} {rate / 1e9:5.2f} GB/s: {size / rate:.2f} s for {size / 1e9:.2f} GB of one rank")
    return rates


def _verify(folder: Path, chunk: dict[str, Chunk], size: int) -> None:
    """Print the time in which a shard is verified on this disk, read after it is written and meanwhile, in turn."""
    for number, follows in enumerate((False, True) * _VERIFICATIONS, 1):
        os.sync()
        path, began_s = folder / file_name(number), time.perf_counter()
        read_back = ReadBack(path) if follows else None
        expected = write_shard(path, chunk).entry["sha256"]
        written_s = time.perf_counter() - began_s
        if read_back:
            read_back.written()
            found = read_back.sha256()
        else:
            drop_cached_pages(path)
            found = files.sha256_file(path)
        verified_s = time.perf_counter() - began_s
        assert found == expected
        path.unlink()
        times = f"written in {written_s:5.2f} s, verified in {verified_s:5.2f} s, {verified_s / written_s:.2f} x"
        name = "read meanwhile" if follows else "read afterwards"
        print(f"{name:<16} {times}; {size / 1e9:.2f} GB on this disk", flush=True)


def _shard(rank: int, ranks: int) -> list[tuple[str, Chunk]]:
    """Return the blocks of one rank, without their values."""
    replicas = ranks // (_STAGES * _SLICES)
    stage, rest = divmod(rank, replicas * _SLICES)
    replica, piece = divmod(rest, _SLICES)
    blocks = []
    for layer in range(stage * _LAYERS // _STAGES, (stage + 1) * _LAYERS // _STAGES):
        for number, (name, shape, dim) in enumerate(_LAYER):
            if dim is None and number % _SLICES != piece:
                continue  # another of those that have it writes it
            offsets, sizes = [0] * len(shape), list(shape)
            for axis, parts, place in ((dim, _SLICES, piece), (0, replicas, replica)):
                if axis is not None:
                    sizes[axis] //= parts
                    offsets[axis] += sizes[axis] * place
            values = torch.empty(sizes, device="meta")
            chunk = Chunk(values=values, offsets=tuple(offsets), shape=shape)
            blocks += [(f"{kind}.layers.{layer}.{name}", chunk) for kind in _KINDS]
    return sorted(blocks, key=lambda block: block[0])


def _costs(folder: Path, ranks: int) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield each cost with its seconds and what it is about."""
    shards: dict[str, list[StoredChunk]] = {}
    for rank in range(ranks):
        header, shards[file_name(rank + 1)] = header_of(dict(_shard(rank, ranks)))
        path = folder / file_name(rank + 1)
        path.write_bytes(header)
        os.truncate(path, max(chunk.begin + chunk.nbytes for chunk in shards[path.name]))  # sparse
    keys = sum(map(len, shards.values()))
    sent = [json.dumps(chunks) for chunks in shards.values()]
    note = f"first save: rank 0 gets {sum(map(len, sent)) / 1e6:.1f} MB, {keys:,} blocks"
    made: list[ShardIndex] = []

    def first() -> None:
        received = [[StoredChunk(*chunk) for chunk in json.loads(text)] for text in sent]
        made.append(compose(dict(zip(shards, received, strict=True))))

    yield "index_compose", (_seconds(first, 1), note)
    index = made[0]
    files.write_text(folder / INDEX, index.text)
    yield from _json_costs(folder, ranks, {path.name: path.stat().st_size for path in folder.iterdir()})
    sizes = {entry["path"]: entry["bytes"] for entry in read_manifest(folder).files}
    yield "why_incomplete", (_seconds(lambda: index.why_incomplete(sizes), 1), "rank 0")
    text = folder / INDEX
    yield "index_read", (_seconds(lambda: json.dumps(text.read_text())), f"rank 0, {len(index.text) / 1e6:.1f} MB")
    mine = {name for name, _ in _shard(ranks // 2, ranks)}

    def parse() -> None:
        assert len(list(ShardIndex(json.loads(json.dumps(index.text))).tensors(mine.__contains__))) == len(mine)

    yield "index_parse", (_seconds(parse, 1), "each rank, after the broadcast")
    yield "header_check", (_seconds(lambda: read_header(path)), "each rank, one shard")
    yield from _before(folder, ranks)
    for path in folder.glob(f"*{SUFFIX}"):
        path.unlink()


def _json_costs(folder: Path, ranks: int, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield the costs of the manifest and of the ranks' states."""
    entries = [{"path": name, "bytes": size, "sha256": "0" * 64} for name, size in sizes.items()]
    gathered = json.dumps([{"entry": entry, "changed": False} for entry in entries])

    def write() -> None:
        received = [part["entry"] for part in json.loads(gathered)]
        write_manifest(folder, step=1, tokens=1, world={"world_size": ranks}, entries=received)

    yield "manifest_write", (_seconds(write), f"rank 0, {len(gathered) / 1e6:.2f} MB to all ranks")
    yield "manifest_read", (_seconds(lambda: read_manifest(folder)), "rank 0")
    replicas = ranks // (_STAGES * _SLICES)
    row = [430_000, 1234, 567_890, 7]
    states = [{"loader": [row] * 4 if rank < replicas else [], "rng": rng_state()} for rank in range(ranks)]
    sent = [json.dumps(state) for state in states]

    def write_states() -> None:
        received = [json.loads(text) for text in sent]
        files.write_json(folder / RANK_STATES, asdict(RankStates.of(received)))

    yield "ranks_write", (_seconds(write_states), f"rank 0 gets {sum(map(len, sent)) / 1e6:.1f} MB")
    note = f"rank 0, one file of {(folder / RANK_STATES).stat().st_size / 1e3:.0f} kB"
    yield "ranks_read", (_seconds(lambda: read_rank_states(folder)), note)
    for rank, state in enumerate(states):
        files.write_text(folder / f"rank-{rank:05d}.json", json.dumps(state, indent=2))

    def read_each() -> None:
        for rank in range(ranks):
            files.read_json(folder / f"rank-{rank:05d}.json")

    yield "before: rank files", (_seconds(read_each, 1), "each rank, from the page cache")
    for rank in range(ranks):
        (folder / f"rank-{rank:05d}.json").unlink()


def _before(folder: Path, ranks: int) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield what torch's reader and planner need for the same shards."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    reader = HuggingFaceStorageReader(os.fspath(folder))
    yield "before: all headers", (_seconds(reader.read_metadata, 1), "each rank")

    def item(name: str, chunk: Chunk) -> WriteItem:
        place = ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=chunk.values.size())
        data = TensorWriteData(chunk=place, properties=TensorProperties(), size=torch.Size(chunk.shape))
        return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    plans = [
        SavePlan([item(name, chunk) for name, chunk in _shard(rank, ranks)], planner_data={}) for rank in range(ranks)
    ]
    planner = DefaultSavePlanner()
    yield "before: plan of a save", (_seconds(lambda: planner.create_global_plan(plans), 1), "rank 0, each save")


def _reckon(costs: dict[str, float], rates: dict[str, float], ranks: int) -> None:
    """Print the times of a save and of a start, from what was measured and the storage's bandwidth."""
    size = _rank_bytes(ranks)
    moved_s = size * ranks / _STORAGE_BYTES_PER_S
    write_s, read_s, load_s = (size / rates[name] for name in ("write and hash", "read and hash", "read"))
    own_s = sum(costs[name] for name in _SAVING)
    written_s = max(moved_s, write_s) + costs["manifest_write"] + costs["ranks_write"]
    checks_s = costs["header_check"] + costs["why_incomplete"]
    rest_s = 2 * PIECE_BYTES * ranks / _STORAGE_BYTES_PER_S  # what may not have come back when the shards are written
    verified_s, shared_s = written_s + rest_s + checks_s, 2 * written_s + checks_s
    after_s = written_s + max(moved_s, read_s) + checks_s
    print(f"reckoned for {size * ranks / 1e9:.0f} GB on {ranks:,} ranks, storage of 5 GB/s for writing and for reading")
    print(f"  bytes / bandwidth {moved_s:.1f} s; rank 0's own work {own_s:.1f} s")
    print(f"  end of a step to committed: {written_s:.1f} s, {written_s / moved_s:.2f} x (goal < {_SAVE_GOAL} x)")
    print(
        f"  to verified: {verified_s:.1f} s, {verified_s / moved_s:.2f} x (goal < {_SAVE_GOAL} x); "
        f"{shared_s / moved_s:.2f} x if writing and reading share the bandwidth; before, reading after writing: "
        f"{after_s:.1f} s, {after_s / moved_s:.2f} x"
    )
    first_s = costs["index_compose"]
    print(f"  the first save of an attempt takes {first_s:.1f} s more on rank 0, beside training")
    start_s = max(moved_s, read_s) + load_s + sum(costs[name] for name in _STARTING)
    print(
        f"  start-up: {start_s:.1f} s, {start_s - moved_s:+.1f} s beyond bytes / bandwidth "
        f"(goal < {_STARTUP_GOAL_S:.0f} s); what a rank verified is loaded from its page cache"
    )


def _real() -> None:
    """Save and restore by real processes; see ``checkpoint_ranks.py``."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        job = Path(folder) / "job"
        job.mkdir(mode=0o700)
        env = {**os.environ, **node.one_machine(job), JOB_FOLDER_ENV: os.fspath(job), "OMP_NUM_THREADS": "1"}
        torchrun = ("torch.distributed.run", f"--nproc-per-node={_PROCESSES}")
        script = Path(__file__).with_name("checkpoint_ranks.py")
        root = Path(__file__).parents[1]
        argv = [sys.executable, "-m", *torchrun, os.fspath(script), os.fspath(Path(folder) / "run")]
        subprocess.run(argv, env={**env, "PYTHONPATH": os.fspath(root)}, check=True)


def _seconds(work: Callable[[], Any], repeats: int = 3, clock: Callable[[], float] = time.process_time) -> float:
    """Return the shortest time of some calls; processor time, because machines are shared."""
    return min(_once(work, clock) for _ in range(repeats))


def _once(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    began_s = clock()
    work()
    return clock() - began_s


if __name__ == "__main__":
    run()
