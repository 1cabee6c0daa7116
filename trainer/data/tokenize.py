"""``python -m trainer.data.tokenize --config FILE --dataset FILE --to DIR``: write a text corpus as token ids.

Several processes write parts (``trainer.data.tokenize_part``) into a folder next to the target, so the same command
continues after an interruption. The finished folder also has the tokenizer, the held-out text, ``SHA256SUMS`` and
``token_ids.json``. It gets its final name when it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from conf.load import load
from hlatctl.run import files
from hlatctl.run.errors import DISK_FULL, DataError, LaunchError, StorageError, cannot_write, run_main
from hlatctl.run.files import fsync, lock_folder, reading
from hlatctl.run.processes import end_with_parent
from trainer.data import documents
from trainer.data.dataset import VALIDATION
from trainer.data.documents import MANIFEST, Source, sources_of
from trainer.data.tokenize_part import PLAN, Part, TokenizationPlan, read_plan, read_record, write_part
from trainer.data.workers import Progress, spread

#: Text per part. A kill loses at most one part per process. 1.8 T tokens make about 7,000 parts.
_LEAST_PART_BYTES, _MOST_PART_BYTES = 4 << 20, 1 << 30
#: A small corpus has this many parts, so that all processes have work until the end.
_PARTS = 64
#: Bytes of a document in the index: its length, its position and its number.
_INDEX_BYTES = 20
#: Margin, because the tokens are estimated from a sample.
_SPARE = 1.1


def tokenize(dataset_path: Path, target: Path, *, processes: int | None, validation_fraction: float) -> dict[str, Any]:
    """Write the folder of token ids of a prepared corpus, or finish it; return ``token_ids.json``.

    Args:
        dataset_path: ``dataset.json`` of one source of text.
        processes: number of processes; None: one per core.
        validation_fraction: the fraction that the text was prepared with.

    Raises:
        DataError: the corpus has several sources, contains ids, or can't be read.
        StorageError: the target has other contents, the disk is too small, or another process writes to it.
        LaunchError: a process was killed.
    """
    with reading(dataset_path):
        dataset = files.read_sealed_json(dataset_path)
    source = _only_source(dataset)
    work = target.with_name(f".{target.name}.tokenizing")
    try:
        if (finished := _finished(target, dataset)) is not None:
            return finished
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work, target):
            plan = _plan(dataset_path, dataset, source, work)
            _check_space(plan, dataset, work)
            records = _write_parts(plan, dataset, work, processes)
            return _finish(records, dataset, work, target, validation_fraction)
    except OSError as error:
        failure = cannot_write(f"--to={target}", error, hint="name another folder with --to")
        if failure.code == DISK_FULL:
            failure.hint = "free space, then run the same command"
        raise failure from None
    except BrokenProcessPool:
        raise LaunchError(
            f"--to={target}: a tokenizing process was killed, perhaps for lack of memory",
            hint="run the same command, perhaps with fewer --processes; complete parts are kept",
        ) from None


def _only_source(dataset: dict[str, Any]) -> Source:
    sources = sources_of(dataset)
    if len(sources) != 1:
        raise DataError(
            f"data.sources: has {len(sources)} sources; one corpus is tokenized at a time",
            hint="run the command for each, with data.path=FOLDER",
        )
    if not isinstance(sources[0], Source):
        raise DataError(f"data.path={sources[0].name}: contains token ids already", hint="train with it as it is")
    return sources[0]


def _finished(target: Path, dataset: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a target that is complete; None if there is no target.

    Raises a StorageError if the target is something else.
    """
    if (target / MANIFEST).is_file():
        with reading(target / MANIFEST, hint="remove the folder, and run the same command"):
            manifest = files.read_sealed_json(target / MANIFEST)
            same = manifest["fingerprint"] == dataset["fingerprint"]
        if same:
            return manifest
        raise StorageError(f"--to={target}: contains ids of another corpus or tokenizer", hint="name another folder")
    if target.exists():
        raise StorageError(f"--to={target}: exists, and is not a corpus of token ids", hint="name another folder")
    return None


@contextmanager
def _locked(work: Path, target: Path) -> Iterator[None]:
    lock = lock_folder(work)
    if lock is None:
        raise StorageError(
            f"{work}: is locked, or can't be locked",
            hint=f"wait for the process that writes {target}, or use a file system that supports flock",
        )
    try:
        yield
    finally:
        os.close(lock)


def _plan(dataset_path: Path, dataset: dict[str, Any], source: Source, work: Path) -> TokenizationPlan:
    """Return the plan in the folder, or write a new one.

    Raises a StorageError if the folder contains parts of another corpus.
    """
    if (work / PLAN).is_file():
        plan = read_plan(work)
        if plan.fingerprint != dataset["fingerprint"]:
            raise StorageError(f"{work}: contains parts of another corpus or tokenizer", hint=f"rm -r {work}")
        return plan
    part_bytes = min(max(source.text_bytes // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    plan = TokenizationPlan(
        dataset=os.fspath(dataset_path.absolute()),
        fingerprint=dataset["fingerprint"],
        documents=len(source.documents),
        part_documents=-(-len(source.documents) // max(1, round(source.text_bytes / part_bytes))),
        dtype=documents.dtype_for(dataset["tokenizer"]["vocab_size"]).name,
    )
    files.write_sealed_json(work / PLAN, asdict(plan))
    return plan


def _check_space(plan: TokenizationPlan, dataset: dict[str, Any], work: Path) -> None:
    tokens = dataset["sources"][0]["estimated_tokens"] * _SPARE
    held_out = Path(dataset["validation"]["path"]).stat().st_size
    needed = round(tokens * np.dtype(plan.dtype).itemsize + plan.documents * _INDEX_BYTES + held_out)
    missing = needed - sum(path.stat().st_size for path in work.iterdir())
    free = shutil.disk_usage(work).free
    if missing > free:
        raise StorageError(
            f"{work.parent}: about {missing / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} MiB are free",
            hint="free space, or set --to to a folder on a larger disk",
            code=DISK_FULL,
        )


def _write_parts(
    plan: TokenizationPlan, dataset: dict[str, Any], work: Path, processes: int | None
) -> list[dict[str, Any]]:
    """Write the missing parts; return the records of all parts."""
    parts = [Part(work, number) for number in range(len(plan))]
    records = {part.number: read_record(part) for part in parts}
    missing = [part for part in parts if records[part.number] is None]
    if 0 < len(missing) < len(parts):
        print(f"tokenize: {len(parts) - len(missing)} of {len(parts)} parts are complete", file=sys.stderr)
    left_bytes = round(dataset["sources"][0]["text_bytes"] * len(missing) / len(parts))
    progress = Progress("tokenize", left_bytes, None, things="tokens")
    for part, record in zip(missing, spread(write_part, missing, progress, processes=processes), strict=True):
        records[part.number] = record
    return [record for record in records.values() if record is not None]


def _finish(
    records: Sequence[dict[str, Any]], dataset: dict[str, Any], work: Path, target: Path, validation_fraction: float
) -> dict[str, Any]:
    described, (entry,) = dataset["tokenizer"], dataset["sources"]
    shutil.copyfile(dataset["validation"]["path"], work / VALIDATION)
    shutil.copytree(described["path"], work / "tokenizer", dirs_exist_ok=True)
    sums = [f"{record[f'{kind}_sha256']}  {record['name']}.{kind}\n" for record in records for kind in ("bin", "idx")]
    files.write_text(work / "SHA256SUMS", "".join(sums))
    manifest = {
        "v": 1,
        "fingerprint": dataset["fingerprint"],
        "source": {"path": entry["path"], "fingerprint": entry["fingerprint"]},
        "tokenizer": {name: value for name, value in described.items() if name != "path"},
        "documents": sum(record["documents"] for record in records),
        "tokens": sum(record["tokens"] for record in records),
        "text_bytes": sum(record["text_bytes"] for record in records),
        "validation_fraction": validation_fraction,
        "validation": {name: dataset["validation"][name] for name in ("documents", "text_bytes")},
        "shards": [{name: record[name] for name in ("name", "documents", "tokens")} for record in records],
    }
    files.write_sealed_json(work / MANIFEST, manifest)
    fsync(work / VALIDATION)
    work.rename(target)
    fsync(target.parent)
    for path in (target / PLAN, *(target / f"{record['name']}.json" for record in records)):
        path.unlink()  # last: a killed process needs them to continue
    return manifest


def main(argv: list[str] | None = None) -> int:
    """Write the ids; print a summary as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.data.tokenize", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--dataset", type=Path, required=True, help="dataset.json of the text")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    parser.add_argument("--processes", type=int, help="number of processes; by default one per core")
    arguments = parser.parse_args(argv)
    end_with_parent()
    fraction = load(arguments.config).data.validation_fraction
    to = arguments.to.absolute()
    manifest = tokenize(arguments.dataset, to, processes=arguments.processes, validation_fraction=fraction)
    print(json.dumps({name: manifest[name] for name in ("documents", "tokens", "text_bytes", "fingerprint")}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
