"""The records that ``hlatctl checkpoint ls`` prints."""

from __future__ import annotations

import os
from typing import Any

from conf.schema import Config
from hlatctl.run.errors import CheckpointError
from hlatctl.run.fold import read_state
from hlatctl.run.manifest import MANIFEST, folder_steps, read_manifest, why_invalid
from hlatctl.run.paths import RunPaths


def checkpoint_records(run: RunPaths, config: Config) -> list[dict[str, Any]]:
    """Return a record of each checkpoint folder of a run, in order of steps. File contents are not verified."""
    steps, trust = folder_steps(run), read_state(run).trust
    newest = steps[-config.checkpoint.keep :]
    return [
        {
            "step": step,
            "tokens": None,
            "bytes": None,
            "written_unix_s": None,
            "world": None,
            "milestone_tokens": config.milestones.get(step),
            "permanent": config.is_permanent(step),
            "newest": step in newest,
            **_of_folder(run, step),
            "trust": trust.get(step),
        }
        for step in steps
    ]


def _of_folder(run: RunPaths, step: int) -> dict[str, Any]:
    folder = run.checkpoint(step)
    record: dict[str, Any] = {"problem": why_invalid(folder, checksums=False), "path": os.fspath(folder)}
    try:
        manifest = read_manifest(folder)
        written_unix_s = (folder / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError) as error:
        return {**record, "problem": record["problem"] or str(error)}
    return {
        **record,
        "tokens": manifest.tokens,
        "world": manifest.world,
        "bytes": manifest.size_bytes,
        "written_unix_s": written_unix_s,
    }
