"""The copy of a checkpoint from the node's own disk to the run directory, to which each rank adds its share."""

from __future__ import annotations

import os
from pathlib import Path

from hlatctl.run.errors import HlatctlError
from hlatctl.run.manifest import read_manifest
from hlatctl.run.paths import step_name
from trainer.backends.base import Backend
from trainer.checkpoint.tiers import Tiers
from trainer.checkpoint.together import Together
from trainer.checkpoint.verify import share


def copy_to_shared(step: int, tiers: Tiers, backend: Backend, together: Together) -> Path:
    """Return a committed checkpoint's folder in the run directory, after copying it if there is a fast folder.

    All ranks call this together.

    Raises:
        HlatctlError: a rank can't copy its share; on all ranks. Nothing of the copy is left.
    """
    if tiers.fast is None:
        return tiers.shared / step_name(step)
    source = tiers.fast / step_name(step)

    def copy_share() -> None:
        entries = share(read_manifest(source).files, backend.rank, backend.world_size)
        tiers.copy(step, [entry["path"] for entry in entries])

    try:
        together.on_rank0(lambda: tiers.begin_copy(step))
        together.everywhere(copy_share)
        return Path(together.on_rank0(lambda: os.fspath(tiers.finish_copy(step))))
    except HlatctlError:
        if backend.rank == 0:
            tiers.abandon_copy(step)
        raise
