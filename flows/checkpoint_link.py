"""Gives a run another run's checkpoint, as hard links where the file system allows them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from hlatctl.run.checkpoint import MANIFEST, read_manifest
from hlatctl.run.errors import cannot_write
from hlatctl.run.files import fsync
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths

#: Errors of a file system that can't link a file: another file system, or the rules for files of other users.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def adopt_checkpoint(owner: RunPaths, run: RunPaths, step: int) -> None:
    """Give a run that has not trained another run's checkpoint.

    The event is journalled first: a run that should have a checkpoint and lacks it must not start over.

    Raises:
        CheckpointError: the checkpoint has no manifest.
        StorageError: a file can't be written.
    """
    source, target = owner.checkpoint(step), run.checkpoint(step)
    manifest = read_manifest(source)
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("checkpoint_committed", durable=True, step=step, manifest_sha256=manifest.sha256)
    try:
        target.mkdir(parents=True)
        for name in [*(str(entry["path"]) for entry in manifest.files), MANIFEST]:  # last: a part never counts
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _same_file(source / name, target / name)
        fsync(target)
    except OSError as error:
        raise cannot_write(f"{target}", error, hint=f"delete {run.root}, free space, and try again") from None


def _same_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        fsync(target)
