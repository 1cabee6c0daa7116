"""The command of a node inside a container: options of srun for pyxis, or a command before it for Apptainer.

Rendered as the manuals of pyxis and Apptainer describe; neither has run here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from conf.schema import ContainerConfig
from flows.launch.base import Job
from hlatctl.run.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Container:
    """What a container adds to a job's script.

    Args:
        python: runs the node's command.
        srun: options of srun.
        before: words before the node's command.
        lines: of the script, before srun.
    """

    python: str
    srun: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    lines: str = ""


def container(job: Job, settings: ContainerConfig, names: list[str]) -> Container:
    """Return what the container of a job adds; without an image, nothing.

    Args:
        job: to run inside. The runs folder is mounted: without it no job can work.
        settings: of the cluster.
        names: of the job's variables. They win over those of the image.

    Raises:
        ConfigError: the runs folder can't be named in a mount.
    """
    if not settings.image:
        return Container(python=sys.executable)
    runs_dir = os.fspath(job.run_dir.parent)
    if any(separator in runs_dir for separator in ":,"):
        raise ConfigError(
            f"runs_dir={runs_dir}: must not contain ':' or ',', because it is mounted into the container",
            hint="use another runs_dir",
        )
    mounts = (f"{runs_dir}:{runs_dir}", *settings.mounts)
    if settings.runtime == "pyxis":
        options = (
            f"--container-image={settings.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-env={','.join(names)}",
            *settings.options,
        )
        return Container(python=settings.python, srun=options)
    binds = tuple(f"--bind={mount}" for mount in mounts)
    return Container(
        python=settings.python,
        before=("apptainer", "exec", *binds, *settings.options, settings.image),
        lines=f'for name in {" ".join(names)}; do export "APPTAINERENV_$name=${{!name}}"; done\n',
    )
