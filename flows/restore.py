"""Recreates the directory of a run whose storage was lost, from its mirror in object storage.

Only the small files are made here. The processes of training fetch the checkpoint, each its share
(``trainer.checkpoint.fetch``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import conf.load
from conf.schema import Config
from hlatctl.cache.mirror import CONFIG, Copy, complete_copies
from hlatctl.cache.objects import Objects
from hlatctl.run import runs
from hlatctl.run.errors import CheckpointError, ConfigError, HlatctlError, StorageError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.scratch import private_folder


def recreate(url: str, runs_dir: Path, *, argv: list[str]) -> tuple[RunPaths, int]:
    """Create a run's directory with the configuration in its mirror.

    Args:
        url: the run's folder in the mirror; its last part is the run's id.
        runs_dir: where to create it, absolute.
        argv: the command line, for the journal.

    Returns:
        The run, and the step of the newest checkpoint in the mirror.

    Raises:
        StorageError: the mirror can't be read, or is none.
        ConfigError: the URL is none.
        CheckpointError: it has no complete checkpoint.
        RunExistsError: the run's directory is there.
    """
    parent, _, run_id = url.rstrip("/").rpartition("/")
    if "://" not in url:
        raise ConfigError(f"URL={url}: must be a run's folder in object storage", hint="s3://bucket/folder/RUN")
    runs.check_run_id(run_id, "URL")
    config, copies = _read(url, Objects(url))
    if not copies:
        raise CheckpointError(
            f"{url}: has no complete checkpoint", hint="start the run anew with `hlatctl train`, under another id"
        )
    checkpoint = replace(config.checkpoint, mirror_url=parent)
    config = replace(config, runs_dir=os.fspath(runs_dir), checkpoint=checkpoint)
    words = [hide(word) for word in argv]

    def begin(run: RunPaths) -> None:
        with JournalWriter(run, FLOW_WRITER) as journal:
            journal.append("run_created", durable=True, run_id=run_id, simulated=False, argv=words)

    run = runs.create_run(runs_dir, run_id, conf.load.dump(config), int(config.runs_mode, 8), begin)
    return run, copies[0].step


def _read(url: str, mirror: Objects) -> tuple[Config, list[Copy]]:
    """Return the configuration and the complete copies in a run's mirror."""
    try:
        with private_folder("restore") as own:
            file = own.path / CONFIG
            file.write_bytes(mirror.read(CONFIG))
            config = conf.load.load(file)
        return config, complete_copies(mirror)
    except HlatctlError:
        raise
    except FileNotFoundError:
        hint = "name the folder of one run: checkpoint.mirror_url followed by /RUN"
        raise StorageError(f"{url}: has no {CONFIG}, so it is not the mirror of a run", hint=hint) from None
    except Exception as error:  # whatever the service's own library raises
        hint = "check the address and the credentials in the environment"
        raise StorageError(f"{url}: can't be read ({type(error).__name__}: {error})", hint=hint) from None
