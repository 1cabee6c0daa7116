"""Where a run's checkpoints lie: the run directory and, nearer, an optional folder on the node's own disk.

Folders are made under a temporary name, renamed when they are whole, copied and removed here. What they hold, and which
of them is trusted, is not this module's business.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Config
from hlatctl.run.atomic import REPLACED, fsync, replace_folder
from hlatctl.run.manifest import MANIFEST, steps_in
from hlatctl.run.paths import RunPaths, step_name

_TEMPORARY = ".tmp-"


class Tiers:
    """The places of a run's checkpoints.

    Args:
        config: of the run.
        run: its directory, which lies on shared storage.
    """

    def __init__(self, config: Config, run: RunPaths) -> None:
        self.shared = run.checkpoints
        self.fast: Path | None = None
        if config.checkpoint.fast_dir is not None:
            # Runs of other runs folders may have the same id.
            of_run = hashlib.sha256(os.fsencode(run.root)).hexdigest()[:8]
            self.fast = Path(config.checkpoint.fast_dir).expanduser() / f"{run.run_id}-{of_run}"

    @property
    def folders(self) -> list[Path]:
        """All places, the nearest first; that one is written to."""
        return [self.shared] if self.fast is None else [self.fast, self.shared]

    def copies(self) -> Iterator[tuple[int, Path]]:
        """Every folder that is named as a checkpoint: newest steps first, and of a step the nearest copy first."""
        for step in sorted({step for folder in self.folders for step in steps_in(folder)}, reverse=True):
            for folder in self.folders:
                if (folder / step_name(step)).is_dir():
                    yield step, folder / step_name(step)

    def temporary(self, step: int) -> Path:
        """Where a checkpoint is written before it counts."""
        return self.folders[0] / f"{_TEMPORARY}{step_name(step)}"

    def begin(self, step: int) -> None:
        """Make the temporary folder, empty."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        self.temporary(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Give the temporary folder up."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Rename the temporary folder, durably; its new name."""
        return replace_folder(self.temporary(step), self.folders[0] / step_name(step))

    def copy_to_shared(self, step: int) -> Path:
        """Copy a checkpoint from the fast folder into the run directory, durably; where it lies there.

        Raises:
            OSError: the run directory can't be written; nothing is left in it.
        """
        target = self.shared / step_name(step)
        if self.fast is None:
            return target
        partial = self.shared / f"{_TEMPORARY}{step_name(step)}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(self.fast / step_name(step), partial, copy_function=_copy_durably)
            return replace_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def delete(self, step: int) -> None:
        """Remove all copies of a checkpoint."""
        for folder in self.folders:
            _delete(folder / step_name(step))

    def keep_near(self, newest: int) -> None:
        """Remove from the fast folder what is older than a checkpoint that the run directory has too."""
        if self.fast is not None:
            for step in steps_in(self.fast):
                if step < newest:
                    _delete(self.fast / step_name(step))

    def clean(self) -> None:
        """Remove what interrupted writes have left behind."""
        for folder in self.folders:
            for left_over in folder.iterdir() if folder.is_dir() else ():
                if left_over.name.startswith((_TEMPORARY, REPLACED)):
                    shutil.rmtree(left_over, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that half a folder never counts
    shutil.rmtree(checkpoint, ignore_errors=True)


def _copy_durably(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    fsync(Path(target))
    return target
