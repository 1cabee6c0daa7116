"""Checkpoint manifests: which checkpoints of a run are complete, and why others are not.

``manifest.json`` is written last, so a checkpoint without one is incomplete. A checkpoint is valid if the manifest's
own SHA-256 matches, and every listed file has its size and SHA-256. Only the trainer reads the shards.

``ranks.json`` of a checkpoint: the own states of all ranks in one file. One process reads it for all.

How many batches of its data a run had drawn at a checkpoint. Batches are numbered from 1; skipped ones count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import CheckpointError
from hlatctl.run.files import DAMAGED, fsync, parse_json, read_bytes, reading, why
from hlatctl.run.journal import Event, no_steps, read_events
from hlatctl.run.paths import RunPaths, step_name

MANIFEST = "manifest.json"
#: The file that says where a checkpoint's tensors are, by format: ours, and that of torch.distributed.checkpoint.
INDEX_FILES = {"native": "tensors.jsonl", "dcp": ".metadata"}
_STEP_DIR = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``.

    Args:
        step: the optimizer step after which it was saved, 1-based; 0 is the initial model.
        tokens: tokens that the optimizer had consumed.
        world: layout of the processes that wrote it, such as ``{"data_parallel_size": 2}``.
        files: ``[{"path", "bytes", "sha256"}]`` relative to the checkpoint's folder.
        v: version of this format.
    """

    step: int
    tokens: int
    world: dict[str, int]
    files: list[dict[str, Any]]
    v: int = 2

    @property
    def size_bytes(self) -> int:
        """Total size of the checkpoint's files."""
        return sum(int(entry["bytes"]) for entry in self.files)

    @property
    def format(self) -> str | None:
        """Format of the tensors, a key of :data:`INDEX_FILES`; None: it has none, as in a simulated run."""
        names = {entry["path"] for entry in self.files}
        return next((form for form, index in INDEX_FILES.items() if index in names), None)

    @property
    def sha256(self) -> str:
        """Hash of the content. It detects damage and identifies the checkpoint across runs."""
        return files.sha256_json(asdict(self))


def write_manifest(
    checkpoint: Path, *, step: int, tokens: int, world: dict[str, int], entries: list[dict[str, Any]] | None = None
) -> Manifest:
    """Write the manifest of a checkpoint's folder, durably, and return it.

    Args:
        step: see :class:`Manifest`, also for ``tokens`` and ``world``.
        entries: entries of all files; None: read every file in the folder and hash it.
    """
    listed = files.describe_tree(checkpoint) if entries is None else sorted(entries, key=lambda entry: entry["path"])
    manifest = Manifest(step=step, tokens=tokens, world=world, files=listed)
    files.write_sealed_json(checkpoint / MANIFEST, asdict(manifest))
    fsync(checkpoint)
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    path = checkpoint / MANIFEST
    try:
        record = parse_json(read_bytes(path))
        manifest = Manifest(
            step=int(record["step"]),
            tokens=int(record["tokens"]),
            world=dict(record["world"]),
            files=[_entry(entry) for entry in record["files"]],
            v=int(record["v"]),
        )
        if record["sha256"] != manifest.sha256:
            raise ValueError("its own checksum differs")
        return manifest
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: no {MANIFEST}, so the checkpoint was never completed") from None
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{path}: unreadable manifest ({why(error)})") from None


def why_invalid(checkpoint: Path, *, checksums: bool = True, of_run: bool = True) -> str | None:
    """Return why a checkpoint is invalid, with the file's name. None if it is valid.

    Args:
        checksums: verify checksums, not only sizes.
        of_run: the checkpoint is in a run's checkpoints folder, so its name must match its step.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return error.message
    if of_run and checkpoint.name != step_name(manifest.step):
        return f"{MANIFEST}: step {manifest.step} in a folder named {checkpoint.name}"
    return files.first_difference(checkpoint, manifest.files, checksums=checksums)


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(entry["path"], str) and isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)):
        raise ValueError("an entry of files is invalid")
    return entry


def checkpoint_steps(run: RunPaths) -> list[int]:
    """Return the steps whose folder has a manifest, ascending. Nothing is verified."""
    return [step for step in folder_steps(run) if (run.checkpoint(step) / MANIFEST).is_file()]


def folder_steps(run: RunPaths) -> list[int]:
    """Return the steps that have a folder, ascending."""
    return steps_in(run.checkpoints)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    named = (_STEP_DIR.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    steps = ((match.group(0), int(match.group(1))) for match in named if match)
    return sorted(step for name, step in steps if name == step_name(step))


RANK_STATES = "ranks.json"
#: Key of a manifest's ``world``: how many ranks wrote the checkpoint.
WORLD_SIZE = "world_size"


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """The states of the ranks that wrote a checkpoint. The number of ranks may be different now.

    Args:
        loader: rows of the data loaders, in the order of ranks.
        rng: the distinct random states: ranks usually have equal ones.
        rng_of_rank: for each rank, its place in ``rng``.
    """

    loader: list[list[int]]
    rng: list[dict[str, str]]
    rng_of_rank: list[int]

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]]) -> RankStates:
        """Return the states from each rank's ``{"loader": rows, "rng": state}``."""
        places: dict[str, int] = {}
        of_rank = [places.setdefault(json.dumps(rank["rng"], sort_keys=True), len(places)) for rank in ranks]
        loader = [row for rank in ranks for row in rank["loader"]]
        return cls(loader=loader, rng=[json.loads(state) for state in places], rng_of_rank=of_rank)

    def rng_for(self, rank: int) -> dict[str, str]:
        """Return the random state that a rank continues with."""
        return self.rng[self.rng_of_rank[rank % len(self.rng_of_rank)]]


def read_rank_states(checkpoint: Path) -> RankStates:
    """Read the states of a checkpoint's ranks.

    Raises:
        DamagedFileError: the states are missing or can't be read.
    """
    path = checkpoint / RANK_STATES
    with reading(path):
        record = files.read_json(path)
        states = RankStates(**{key: list(record[key]) for key in ("loader", "rng", "rng_of_rank")})
        if not states.rng_of_rank or not all(0 <= place < len(states.rng) for place in states.rng_of_rank):
            raise ValueError("rng_of_rank names a state that rng doesn't have")
        return states


@dataclass(frozen=True)
class Drawn:
    """What all rows have drawn from one source of the corpus.

    Args:
        documents: documents begun since the run's begin.
        finished_tokens: tokens of the finished ones, since the weights of the sources changed last.
        open_tokens: tokens drawn of those that are open.
    """

    documents: int = 0
    finished_tokens: int = 0
    open_tokens: int = 0


def drawn(checkpoint: Path, sources: int) -> list[Drawn]:
    """Return what a checkpoint's rows have drawn from each source. A row's numbers are those of the loader's state.

    Raises:
        DamagedFileError: the states are missing or can't be read.
    """
    rows = read_rank_states(checkpoint).loader
    with reading(checkpoint / RANK_STATES):
        totals = [[0, 0, 0] for _ in range(sources)]
        for _, token, *counts in rows:
            opened = counts.pop() if len(counts) % 2 else None
            for source, (documents, tokens) in enumerate(zip(counts[::2], counts[1::2], strict=True)):
                totals[source][0] += documents
                totals[source][1] += tokens
            if opened is not None:
                totals[opened][0] += 1
                totals[opened][2] += token
        return [Drawn(*total) for total in totals]


def events_about(run: RunPaths, step: int) -> list[Event]:
    """Return the events of a run in order of time, without those of other steps."""
    of_step = re.compile(rb'"step": ?%d[,}]' % step)
    return read_events(run, wanted=lambda line: no_steps(line) or of_step.search(line) is not None)


def batches_drawn(run: RunPaths, step: int, events: Sequence[Event]) -> int:
    """Return the number of the last batch that a checkpoint has been trained on; 0 at step 0.

    Args:
        events: the run's events in order of time; those from :func:`events_about` are enough.

    Raises:
        DamagedFileError: neither the journal nor the checkpoint has the number.
    """
    if step == 0:
        return 0
    of_step = [event for event in events if event.get("step") == step]
    committed = [event["attempt"] for event in of_step if event["kind"] == "checkpoint_committed"]
    batches = [
        event["batch"]
        for event in of_step
        if event["kind"] in ("step", "nonfinite")
        and event.get("batch") is not None
        and event["attempt"] in (committed[-1:] or [event["attempt"]])
    ]
    return int(batches[-1]) if batches else _from_checkpoint(run, step)


def _from_checkpoint(run: RunPaths, step: int) -> int:
    """Read the number from the first loader's state, if the journal's line is damaged or missing."""
    path = run.checkpoint(step) / RANK_STATES
    with reading(path, hint=f"`hlatctl checkpoint verify {run.run_id}`"):
        return int(files.read_json(path)["loader"][0][0])
