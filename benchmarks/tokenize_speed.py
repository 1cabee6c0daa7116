"""Tokens/s of ``hlatctl data tokenize``, against bare tokenizers on every core.

The text is books, repeated. A bare tokenizer is a loop of ``encode_batch_fast`` over its share of the texts, which are
in memory before its time begins; it writes nothing. The command's time begins after the preparation of the text and
includes the start of its processes. As many bare loops run together as the command has processes, in turn with it, so
other work on the machine slows both. Processor time is not disturbed by other work.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import DATA_FOLDER
from conf.compose import compose
from conf.load import dump

_TOKENIZERS = {"Llama-2": "llama2-tokenizer.model", "GPT-NeoX": "gpt-neox-20b"}
_REPEATS = 8
_GOAL = 0.9


@dataclass(frozen=True)
class _Rate:
    """Tokens per second, and per second of processor time of one core."""

    wall: float
    cpu: float


def run() -> None:
    """Print the rates of both and their ratios, for two tokenizers."""
    corpus, rounds = DATA_FOLDER / "corpora" / "books-train.parquet", int(os.environ.get("HLATCTL_BENCH_ROUNDS", "3"))
    if not corpus.is_file():
        print(f"skipped: {corpus} is not there")
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = len(os.sched_getaffinity(0))
    for name, tokenizer in _TOKENIZERS.items():
        with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
            dataset = _prepare(Path(folder), corpus, DATA_FOLDER / "tokenizers" / tokenizer)
            pairs = [(_bare(dataset, cores), _ours(Path(folder), dataset, cores)) for _ in range(rounds)]
        print(f"{name}, {cores} processes, {rounds} rounds")
        for thing, rates in zip(("bare tokenizers", "hlatctl data tokenize"), zip(*pairs, strict=True), strict=True):
            wall, cpu = statistics.median(r.wall for r in rates), statistics.median(r.cpu for r in rates)
            print(f"  {thing:22s} {wall:12,.0f} tokens/s {cpu:12,.0f} tokens per second of processor time")
        for thing in ("wall", "cpu"):
            ratio = statistics.median(getattr(ours, thing) / getattr(bare, thing) for bare, ours in pairs)
            print(f"  ratio by {thing} time: {ratio:.2f} (goal {_GOAL})")


def _prepare(folder: Path, corpus: Path, tokenizer: Path) -> Path:
    """Prepare the repeated corpus; return ``dataset.json``."""
    import pyarrow as pa
    import pyarrow.feather as feather
    import pyarrow.parquet as pq

    from trainer.data.prepare import prepare

    table = pa.concat_tables([pq.read_table(corpus, columns=["text"])] * _REPEATS)
    feather.write_feather(table, str(folder / "text.arrow"), compression="uncompressed", chunksize=64)
    keys = ["model.vocab_size=64000", f"runs_dir={folder}"]
    config = compose([f"data.path={folder / 'text.arrow'}", f"tokenizer.path={tokenizer}", *keys])
    (folder / "config.yaml").write_text(dump(config))
    prepare(config, folder / "data")
    return folder / "data" / "dataset.json"


def _ours(folder: Path, dataset: Path, processes: int) -> _Rate:
    argv = ["--config", str(folder / "config.yaml"), "--dataset", str(dataset), "--processes", str(processes)]
    target = folder / f"ids-{time.monotonic_ns()}"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "trainer.data.tokenize", *argv, "--to", str(target)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tokens = json.loads(answer.stdout)["tokens"]
    return _Rate(tokens / wall, tokens / cpu)


def _bare(dataset: Path, processes: int) -> _Rate:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        shares = list(pool.map(_loop, [dataset] * processes, range(processes), [processes] * processes))
    tokens = sum(tokens for tokens, _, _ in shares)
    return _Rate(sum(tokens / wall for tokens, wall, _ in shares), tokens / sum(cpu for _, _, cpu in shares))


def _loop(path: Path, first: int, step: int) -> tuple[int, float, float]:
    """Encode a share of the texts one by one; return tokens, seconds, and seconds of processor time."""
    from trainer.data import tokenizer
    from trainer.data.documents import sources_of

    dataset: dict[str, Any] = json.loads(path.read_text())
    encoder = tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON)
    (source,) = sources_of(dataset)
    texts = [str(source.documents[position]) for position in range(first, len(source.documents), step)]
    started, cpu = time.monotonic(), time.process_time()
    tokens = sum(len(encoder.encode_batch_fast([text], add_special_tokens=False)[0]) + 1 for text in texts)
    return tokens, time.monotonic() - started, time.process_time() - cpu
