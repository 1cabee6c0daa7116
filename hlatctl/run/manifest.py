"""Checkpoint manifests: which checkpoints of a run are complete, and why others are not.

``manifest.json`` is written last, so a checkpoint without one is incomplete. A checkpoint is valid if the manifest's
own SHA-256 matches, and every listed file has its size and SHA-256. Only the trainer reads the shards.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.atomic import fsync
from hlatctl.run.errors import CheckpointError
from hlatctl.run.paths import RunPaths, step_name
from hlatctl.run.reading import DAMAGED, parse_json, read_bytes, why

MANIFEST = "manifest.json"
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
        """Total size of its files."""
        return sum(int(entry["bytes"]) for entry in self.files)

    @property
    def sha256(self) -> str:
        """Hash of its content. It detects damage and identifies the checkpoint across runs."""
        return files.sha256_json(asdict(self))


def write_manifest(
    checkpoint: Path, *, step: int, tokens: int, world: dict[str, int], entries: list[dict[str, Any]] | None = None
) -> Manifest:
    """Write the manifest of a checkpoint's folder, durably, and return it.

    Args:
        checkpoint: its folder.
        step: see :class:`Manifest`, also for ``tokens`` and ``world``.
        entries: of all files; None: read every file in the folder and hash it.
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
        checkpoint: its folder.
        checksums: verify checksums, not only sizes.
        of_run: it is in a run's folder of checkpoints, so its name must be that of its step.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return error.message
    if of_run and checkpoint.name != step_name(manifest.step):
        return f"{MANIFEST}: step {manifest.step} in a folder named {checkpoint.name}"
    return files.first_difference(checkpoint, manifest.files, checksums=checksums)


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a file's entry if its fields are valid."""
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
