"""The cost of a corpus as it grows: conversion, index, first batch, random documents, and reading from object storage.

The corpus has ``HLATCTL_BENCH_FILES`` Arrow files of 5 MB (default ``1000,10000``: 50 GB). They are links to 20 real
ones, so they take 100 MB of disk and are in the page cache. Each figure comes from a separate process. An exponent of
1 means that a cost grows with the corpus.

``HLATCTL_BENCH_BEFORE=DIR`` measures the code in another folder as well. It may copy the corpus, so it gets
``HLATCTL_BENCH_FILES_BEFORE`` files (default ``100,400``), and its cost at the largest number is extrapolated.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig

_ROOT = Path(__file__).parents[1]
_FILES = os.environ.get("HLATCTL_BENCH_FILES", "1000,10000")
_FILES_BEFORE = os.environ.get("HLATCTL_BENCH_FILES_BEFORE", "100,400")
_BEFORE = os.environ.get("HLATCTL_BENCH_BEFORE", "")
_REAL_FILES, _ROWS, _BATCH_ROWS, _WORDS = 20, 1250, 125, 550
_DRAWN, _GOAL_FILES = 50_000, 10_000
_JSONL_BYTES = 1 << 30
_READ, _BUCKET = 5_000, "/bucket"
_S3 = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_DEFAULT_REGION": "us-east-1"}
#: Unit of each figure, its factor, and its goal at 10,000 files.
_FIGURES = {"index": ("s", 1.0, 30.0), "first_batch": ("s", 1.0, 5.0), "document": ("us", 1e6 / _DRAWN, 100.0)}


def run() -> None:
    """Print each figure at each number of files, and its exponent."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as name:
        folder = Path(name)
        _make_tokenizer(folder)
        _measure("", folder, [int(n) for n in _FILES.split(",")])
        if _BEFORE:
            _measure(_BEFORE, folder, [int(n) for n in _FILES_BEFORE.split(",")])
        _measure_conversion(folder)
        _measure_remote(folder)


def _measure(code: str, folder: Path, numbers: list[int]) -> None:
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in _FIGURES}
    for number in numbers:
        corpus = _link_files(folder, number)
        target = folder / f"prepared-{number}{'-before' if code else ''}"
        for name in _FIGURES:
            costs[name].append(_cost(name, code, corpus, target))
    print(f"code: {code or 'this'}; files: {', '.join(f'{number:,}' for number in numbers)}")
    for name, (unit, factor, goal) in _FIGURES.items():
        wall, processor = ([cost[kind] * factor for cost in costs[name]] for kind in ("wall_s", "processor_s"))
        power = _exponent(numbers, processor)
        print(
            f"  {name:12s} wall {', '.join(f'{value:.2f}' for value in wall)} {unit}; "
            f"processor {', '.join(f'{value:.2f}' for value in processor)} {unit}, exponent {power:.2f}, "
            f"at {_GOAL_FILES:,} files by it {processor[-1] * (_GOAL_FILES / numbers[-1]) ** power:.1f} {unit} "
            f"(goal {goal:g} {unit}); {costs[name][-1]['mib']:,.0f} MiB"
        )


def _measure_conversion(folder: Path) -> None:
    corpus = folder / "jsonl"
    corpus.mkdir()
    line = json.dumps({"text": _text(0)}) + "\n"
    for number in range(4):
        with (corpus / f"{number}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines([line] * (_JSONL_BYTES // 4 // len(line)))
    cores = len(os.sched_getaffinity(0))
    costs = {n: _cost("index", "", corpus, folder / f"jsonl-{n}", cores=n) for n in (1, cores)}
    print(f"conversion of {_JSONL_BYTES / 1e6:,.0f} MB of JSON Lines:")
    for number, cost in costs.items():
        print(
            f"  {number} processes: {_JSONL_BYTES / 1e6 / cost['wall_s']:.0f} MB/s, "
            f"processor {cost['processor_s']:.1f} s"
        )


def _measure_remote(folder: Path) -> None:
    """Print the documents/s of one reader from the disk, and from a server on loopback with two latencies."""
    corpus = _link_files(folder, _REAL_FILES)
    print(f"documents/s of one reader, {_READ:,} random documents of {_REAL_FILES} files:")
    figures = [("disk", _cost("reader", "", corpus, folder / "of-disk"))]
    for latency_s in (0.0, 0.1):
        argv = [sys.executable, "-m", "benchmarks.object_server", os.fspath(folder), str(latency_s)]
        with subprocess.Popen(argv, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            os.environ.update(_S3, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.stdout.readline().strip()}")
            target = folder / f"of-server-{latency_s:g}"
            cost = _cost("reader", "", Path(f"s3:/{_BUCKET}/{corpus.name}"), target)
            figures.append((f"server, {latency_s * 1000:g} ms", cost))
            server.terminate()
    for name, cost in figures:
        processor_us = cost["processor_s"] * 1e6 / _READ
        print(f"  {name:16s} {_READ / cost['wall_s']:,.0f}; processor {processor_us:,.0f} us each")


def _text(seed: int) -> str:
    words = random.Random(seed)
    return " ".join(f"word{words.randrange(3000)}" for _ in range(_WORDS))


def _link_files(folder: Path, number: int) -> Path:
    import pyarrow as pa

    for real in range(_REAL_FILES):
        if (path := folder / f"real-{real:02d}.arrow").exists():
            continue
        texts = pa.array([_text(real * _ROWS + row) for row in range(_ROWS)], pa.string())
        table = pa.table({"id": list(range(_ROWS)), "text": texts})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=_BATCH_ROWS)
    corpus = folder / f"corpus-{number}"
    corpus.mkdir(exist_ok=True)
    for place in range(number):
        if not (link := corpus / f"{place:06d}.arrow").exists():
            os.link(folder / f"real-{place % _REAL_FILES:02d}.arrow", link)
    return corpus


def _make_tokenizer(folder: Path) -> None:
    from trainer.data.prepare import prepare

    (folder / "text.jsonl").write_text("".join(json.dumps({"text": _text(seed)}) + "\n" for seed in range(50)))
    prepare(Config(data=DataConfig(path=os.fspath(folder / "text.jsonl"))), folder / "tokenizer")


def _cost(name: str, code: str, corpus: Path, target: Path, *, cores: int | None = None) -> dict[str, float]:
    tokenizer = target.parent / "tokenizer" / "tokenizer"
    env = {**os.environ, "PYTHONPATH": code or os.fspath(_ROOT)}
    argv = [sys.executable, "-P", __file__, name, os.fspath(corpus), os.fspath(target), os.fspath(tokenizer)]
    output = subprocess.run([*argv, str(cores or "")], env=env, check=True, stdout=subprocess.PIPE).stdout
    cost: dict[str, float] = json.loads(output.splitlines()[-1])
    return cost


def _exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2]) if len(sizes) > 1 else math.nan


def _index(config: Config, target: Path) -> Callable[[], object]:
    from trainer.data.prepare import prepare

    return lambda: prepare(config, target)


def _first_batch(config: Config, target: Path) -> Callable[[], object]:
    from trainer.data.loader import Loader

    def work() -> None:
        loader = Loader(config, _dataset(target), rank=0, size=1)
        loader.next()
        loader.close()

    return work


def _document(config: Config, target: Path) -> Callable[[], object]:
    from trainer.data.documents import sources_of

    del config
    (source,) = sources_of(_dataset(target))
    drawn = random.Random(1).choices(range(len(source.documents)), k=_DRAWN)
    return lambda: [len(source.documents[position]) for position in drawn]


def _reader(config: Config, target: Path) -> Callable[[], object]:
    from trainer.data.documents import sources_of
    from trainer.data.prepare import prepare
    from trainer.data.remote import in_order

    url = os.fspath(config.data.path or "").replace("s3:/", "s3://")
    prepare(replace(config, runs_dir=os.fspath(target), data=replace(config.data, path=url)), target / "data")
    (source,) = sources_of(_dataset(target / "data"))
    drawn = random.Random(1).choices(range(len(source.documents)), k=_READ)
    return lambda: sum(len(document) for document in in_order(source.documents, drawn))


def _dataset(target: Path) -> dict[str, Any]:
    from hlatctl.run import files

    return files.read_sealed_json(target / "dataset.json")


def main(name: str, corpus: str, target: str, tokenizer: str, cores: str) -> None:
    """Print the times of a figure, and the peak memory of this process or its largest child."""
    if cores:
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: int(cores)])
    config = Config(
        data=DataConfig(path=corpus),
        model=ModelConfig(vocab_size=32_000),
        tokenizer=TokenizerConfig(path=tokenizer),
        train=TrainConfig(global_batch_size=8, seq_len=4096),
    )
    make = {"index": _index, "first_batch": _first_batch, "document": _document, "reader": _reader}
    work = make[name](config, Path(target))
    began_s, used_s = time.monotonic(), _processor_s()
    work()
    took_s, used_s = time.monotonic() - began_s, _processor_s() - used_s
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    mib = max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024
    print(json.dumps({"wall_s": took_s, "processor_s": used_s, "mib": mib}))


def _processor_s() -> float:
    """Return the processor time of this process and the children that it has waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main(*sys.argv[1:])
