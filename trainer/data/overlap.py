"""``python -m trainer.data.overlap --run-dir RUN --step N --items FILE --to DIR``: find items in what a run has read.

Scans the documents that a run had read at a checkpoint for n-grams of evaluation items (``trainer.data.overlap_scan``),
in several processes, each document once. Prints a summary as JSON. Progress is kept in ``DIR``: the same command
continues after an interruption, and ``--shard I/N`` scans a part, on any node that has the folder. A complete scan
writes ``result.json``. Each scan has its own folder in ``DIR``, named by a hash of everything that decides its result,
so scans of other items or of another checkpoint don't affect it.

It yields to training on the same machine. Its processes take at most half of the free memory, and the kernel kills them
first when memory runs out, which loses 10 s of work. A whole document is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
import uuid
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from conf.fingerprint import digest
from hlatctl.run import files
from hlatctl.run.checkpoint import read_rank_states
from hlatctl.run.errors import ConfigError, DataError, LaunchError, RunBusyError, cannot_write, run_main
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import die_first, end_with_parent, free_host_bytes
from trainer.data import overlap_scan
from trainer.data.overlap_scan import Part, Place, Scan, Task, Worker, dataset_of, scan_chunk, worker_of
from trainer.data.workers import Progress, spread

RESULT = "result.json"
#: Change it whenever a change affects what is found.
_VERSION = 2
#: Share of the free memory that all processes together may take.
_OF_FREE = 0.5
#: A kill loses the chunks of this many seconds, and those that are being scanned.
_SAVE_EVERY_S = 10.0
#: Exit code of a program that SIGINT has ended, as shells report it.
_INTERRUPTED = 130
#: Hexadecimal digits of the name of a scan's folder.
_NAME_DIGITS = 12
_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


def find(
    run: RunPaths,
    step: int,
    items: Path,
    folder: Path,
    *,
    workers: int | None = None,
    shard: tuple[int, int] = (0, 1),
    most: int | None = None,
) -> dict[str, Any]:
    """Scan the remaining chunks and return the summary.

    Args:
        run, step: the run, and the step of its checkpoint.
        items: JSON Lines with ``task``, ``item`` and ``text``.
        folder: for the progress and the result.
        workers: number of processes; None: one per core, but only as many as fit into half of the free memory.
        shard: (I, N): scan every N-th chunk, starting with chunk I, from 0.
        most: maximum number of chunks to scan; None: all.

    Returns:
        ``complete``; ``documents`` and ``text_bytes`` that were read; ``total_documents``; ``total_bytes``
        (estimated); ``cpu_s``; ``wall_s`` and ``processes`` of this call; ``ngrams``; ``tasks`` (:meth:`Items.results`,
        with ``file`` and ``row`` of each example), of what was found so far.

    Raises:
        DataError: corpus or items can't be read.
        CheckpointError: the checkpoint can't be read.
        RunBusyError: another process scans the same shard.
        StorageError: the folder can't be written.
        LaunchError: a process was killed.
    """
    began_s, scan = time.monotonic(), Scan(run.root, step, items, uuid.uuid4().hex)
    worker = worker_of(scan)
    identity = _identity(run, step, items)
    parts = folder / digest(identity)[:_NAME_DIGITS]
    path = parts / _part_name(shard)
    try:
        with hold(parts / f"{path.stem}.lease", _refuse):
            part = _read(path, identity, worker)
            done = set(part.done)
            for other in sorted(parts.glob("part-*.json")):
                done |= part.done if other == path else _read(other, identity, worker).done
            chunks = [chunk for chunk in worker.consumed.chunks if chunk.number % shard[1] == shard[0]]
            chunks = [chunk for chunk in chunks if chunk.number not in done][:most]
            processes = workers or _fitting(len(chunks))
            _scan([Task(scan, chunk) for chunk in chunks], part, path, identity, processes, worker)
        summary = _summary(parts, identity, worker)
        if summary["complete"]:
            record = {**summary, "identity": identity, "finished_unix_s": round(time.time(), 3)}
            files.write_sealed_json(parts / RESULT, record)
    except OSError as error:
        raise cannot_write(folder, error) from None
    except BrokenProcessPool:
        raise LaunchError(
            "a process of the scan was killed, perhaps for lack of memory",
            hint="run the same command, perhaps with fewer --workers; finished chunks are kept",
        ) from None
    finally:
        worker_of.cache_clear()
    return {**summary, "processes": processes, "wall_s": round(time.monotonic() - began_s, 3)}


def _fitting(chunks: int) -> int:
    """Return the number of processes: one per core, but at most what fits into :data:`_OF_FREE` of the free memory.

    Each process holds the items like this one, so this process's peak size shows how much one needs.
    """
    one_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    fitting, cores = max(1, int(_OF_FREE * free_host_bytes() / one_bytes)), len(os.sched_getaffinity(0))
    if fitting < min(cores, chunks):
        text = f"{fitting} processes instead of {cores}: each needs {one_bytes >> 20:,} MiB, and little memory is free"
        print(text, file=sys.stderr, flush=True)
    return min(fitting, cores)


def _scan(tasks: list[Task], part: Part, path: Path, identity: Mapping[str, Any], workers: int, worker: Worker) -> None:
    total = round(worker.consumed.text_bytes * len(tasks) / len(worker.consumed.chunks))
    progress, saved_s = Progress("corpus", total, None), time.monotonic()
    try:
        for scanned in spread(scan_chunk, tasks, progress, processes=workers):
            part.add(scanned)
            if time.monotonic() - saved_s >= _SAVE_EVERY_S:
                overlap_scan.write_part(path, part, identity)
                saved_s = time.monotonic()
    finally:
        if tasks:
            overlap_scan.write_part(path, part, identity)


def _summary(parts: Path, identity: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
    part, consumed = Part(), worker.consumed
    for path in sorted(parts.glob("part-*.json")):
        part.add(_read(path, identity, worker))
    tasks = worker.items.results(part.found)
    for task in tasks.values():
        for item in task["overlapping"].values():
            place: Place = item.pop("place")
            origin = consumed.sources[place.source].origin(place.position)
            item |= {"file": origin.file, "row": origin.row}
    return {
        "complete": len(part.done) == len(consumed.chunks),
        "documents": part.documents,
        "text_bytes": part.text_bytes,
        "total_documents": len(consumed),
        "total_bytes": consumed.text_bytes,
        "cpu_s": round(part.cpu_s, 3),
        "ngrams": len(worker.items),
        "tasks": tasks,
    }


def _read(path: Path, identity: Mapping[str, Any], worker: Worker) -> Part:
    return overlap_scan.read_part(path, identity, ngrams=len(worker.items), chunks=len(worker.consumed.chunks))


def _identity(run: RunPaths, step: int, items: Path) -> dict[str, Any]:
    rows = read_rank_states(run.checkpoint(step)).loader
    return {
        "version": _VERSION,
        "step": step,
        "corpus": str(dataset_of(run)["fingerprint"]),
        "read": digest(rows),
        "items": files.sha256_file(items),
    }


def _part_name(shard: tuple[int, int]) -> str:
    return f"part-{shard[0] + 1}-of-{shard[1]}.json"


def _refuse(holder: Holder) -> None:
    raise RunBusyError(f"{holder} scans this already", hint="wait for it, or scan another part with --shard")


def shard_of(text: str) -> tuple[int, int]:
    """Return ``(2, 8)`` for ``3/8``. Raises a ConfigError if the text isn't such a pair."""
    match = _SHARD.fullmatch(text)
    number, total = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= total:
        raise ConfigError(f"--shard={text}: must be I/N, with I from 1 to N", hint="the first of eight parts is 1/8")
    return number - 1, total


def main(argv: list[str] | None = None) -> int:
    """Scan, and print the summary as JSON."""
    end_with_parent()
    die_first()
    parser = argparse.ArgumentParser(prog="trainer.data.overlap", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--step", type=int, required=True, help="optimizer step of the checkpoint")
    parser.add_argument("--items", type=Path, required=True, help="JSON Lines with task, item and text")
    parser.add_argument("--to", type=Path, required=True, help="folder for what is done, and the result")
    parser.add_argument("--workers", type=int, help="processes; by default one per core that memory has room for")
    parser.add_argument("--shard", default="1/1", help="I/N: scan one part of N")
    parser.add_argument("--chunks", type=int, help="scan at most so many chunks")
    options = parser.parse_args(argv)
    run, items = RunPaths(options.run_dir.absolute()), options.items.absolute()
    if not items.is_file():
        raise DataError(f"--items={items}: no such file")
    chosen = {"workers": options.workers, "shard": shard_of(options.shard), "most": options.chunks}
    try:
        answer = find(run, options.step, items, options.to.absolute(), **chosen)
    except KeyboardInterrupt:
        print("interrupted: finished chunks are kept, and the same command continues", file=sys.stderr, flush=True)
        return _INTERRUPTED
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
