"""The folders of a run's checkpoints: in the run directory and, optionally, on the node's own disk.

Folders are created under a temporary name, renamed when they are complete, copied and deleted here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from conf.schema import Config
from hlatctl.run.atomic import REPLACED, fsync, replace_folder
from hlatctl.run.fence import Fence
from hlatctl.run.manifest import MANIFEST, steps_in
from hlatctl.run.paths import RunPaths, attempt_name, step_name

_TEMPORARY = ".tmp-"


class Tiers:
    """The folders that hold a run's checkpoints.

    Args:
        run: its directory, on shared storage.
        attempt: that writes, until it is over; 0: none.
    """

    def __init__(self, config: Config, run: RunPaths, attempt: int = 0) -> None:
        self.shared = run.checkpoints
        self._fence = Fence(run, attempt)
        self.fast: Path | None = None
        if config.checkpoint.fast_dir is not None:
            # Runs in other runs folders may have the same id.
            of_run = hashlib.sha256(os.fsencode(run.root)).hexdigest()[:8]
            self.fast = Path(config.checkpoint.fast_dir).expanduser() / f"{run.run_id}-{of_run}"

    @property
    def folders(self) -> list[Path]:
        """All folders. Checkpoints are written to the first, the fastest."""
        return [self.shared] if self.fast is None else [self.fast, self.shared]

    def copies(self) -> Iterator[tuple[int, Path]]:
        """Yield step and folder of every checkpoint: newest step first, of each step the fastest folder first."""
        for step in sorted({step for folder in self.folders for step in steps_in(folder)}, reverse=True):
            for folder in self.folders:
                if (folder / step_name(step)).is_dir():
                    yield step, folder / step_name(step)

    def temporary(self, step: int) -> Path:
        """Return the folder that a checkpoint is written to before it is committed."""
        return self.folders[0] / self._temporary_name(step)

    def partial(self, step: int) -> Path:
        """Return the folder in the run directory that a checkpoint is copied to before it has its final name."""
        return self.shared / self._temporary_name(step)

    def _temporary_name(self, step: int) -> str:
        """Each attempt has its own: a process of an earlier one may still write there."""
        attempt = self._fence.attempt
        return f"{_TEMPORARY}{step_name(step)}{f'-{attempt_name(attempt)}' if attempt else ''}"

    def check(self) -> None:
        """Raise an error if the attempt is over (see :class:`hlatctl.run.fence.Fence`)."""
        self._fence.check(now=True)

    def begin(self, step: int) -> None:
        """Create an empty temporary folder."""
        self.check()
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        self.temporary(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Rename the temporary folder durably; return its new path."""
        self.check()
        return replace_folder(self.temporary(step), self.folders[0] / step_name(step))

    def begin_copy(self, step: int) -> None:
        """Create an empty folder in the run directory for the copy of a checkpoint from the fast folder."""
        self.abandon_copy(step)
        self.partial(step).mkdir(parents=True)

    def copy(self, step: int, names: Iterable[str]) -> None:
        """Copy files of a checkpoint durably from the fast folder.

        Raises:
            OSError: the run directory can't be written, or a file is not in the fast folder.
        """
        assert self.fast is not None
        for name in names:
            target = self.partial(step) / name
            shutil.copyfile(self.fast / step_name(step) / name, target)
            fsync(target)

    def finish_copy(self, step: int) -> Path:
        """Copy the manifest, last, and give the copy its final name durably; return its path."""
        self.copy(step, [MANIFEST])
        fsync(self.partial(step))
        self.check()
        return replace_folder(self.partial(step), self.shared / step_name(step))

    def abandon_copy(self, step: int) -> None:
        """Delete what is copied so far."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def delete(self, step: int) -> None:
        """Delete a checkpoint in all folders."""
        self.check()
        for folder in self.folders:
            _delete(folder / step_name(step))

    def trim_fast(self, newest: int) -> None:
        """Delete checkpoints from the fast folder that are older than one that the run directory has too."""
        if self.fast is not None:
            for step in steps_in(self.fast):
                if step < newest:
                    _delete(self.fast / step_name(step))

    def clean(self) -> None:
        """Delete the remains of interrupted writes."""
        self.check()
        for folder in self.folders:
            for left_over in folder.iterdir() if folder.is_dir() else ():
                if left_over.name.startswith((_TEMPORARY, REPLACED)):
                    shutil.rmtree(left_over, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that a partly deleted folder never counts
    shutil.rmtree(checkpoint, ignore_errors=True)
