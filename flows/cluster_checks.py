"""Checks of a Slurm cluster from this machine, for ``hlatctl doctor --cluster``. Submits nothing."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Config
from flows.launch.slurm.commands import SchedulerAwayError, slurm
from flows.launch.slurm.limits import check, chosen, partitions
from hlatctl.run.checks import Check
from hlatctl.run.errors import HlatctlError, LaunchError
from hlatctl.units import size

_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol")
#: File systems of one machine (proc(5), mountinfo; Linux's names).
_LOCAL_TYPES = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def check_cluster(config: Config) -> Iterator[Check]:
    """Yield each check as it is done; without Slurm's commands or an answer, only those that need neither."""
    missing = [command for command in _COMMANDS if not shutil.which(command)]
    problem = f"{', '.join(missing)}: not found; run hlatctl on a login node" if missing else ""
    yield Check.of("Slurm's commands", problem, ", ".join(_COMMANDS), command="apt-get install slurm-client")
    settings: dict[str, str] = {}
    if not missing:
        yield from _scheduler(config, settings)
    yield _shared(Path(config.runs_dir))
    yield _memlock(config, settings)


def _scheduler(config: Config, settings: dict[str, str]) -> Iterator[Check]:
    """Yield the checks that need the scheduler's answer, and add its settings to ``settings``."""
    command = "scontrol ping"
    try:
        lines = slurm("scontrol", "show", "config").splitlines()
    except (LaunchError, SchedulerAwayError) as error:
        yield Check(name="scheduler", status="fail", shows=error.message, command=command)
        return
    pairs = (line.partition("=") for line in lines)
    settings.update({name.strip(): value.strip() for name, _, value in pairs})
    yield Check(
        name="scheduler",
        status="pass",
        shows=f"Slurm {settings.get('SLURM_VERSION', '?')}, cluster {settings.get('ClusterName', '?')}",
        command=command,
    )
    yield _partition(config)
    yield _shape(config)
    yield _accounting(settings)
    yield _passed_on(settings)


def _partition(config: Config) -> Check:
    command = "scontrol show partition"
    try:
        in_use = chosen(config.cluster, partitions())
    except HlatctlError as error:
        return Check(name="partition", status="fail", shows=str(error).replace("\nhint:", ";"), command=command)
    closed = [f"partition {each.name} is {each.state}" for each in in_use if each.state != "UP"]
    return Check.of("partition", "; ".join(closed), "; ".join(each.limits for each in in_use), command=command)


def _shape(config: Config) -> Check:
    """Check that a job of the configuration's shape can start some day."""
    cluster = config.cluster
    try:
        check(cluster)
    except HlatctlError as error:
        return Check(name="job", status="fail", shows=str(error).replace("\nhint:", ";"), command="hlatctl plan")
    return Check(name="job", status="pass", shows=f"cluster.nodes={cluster.nodes} can start in this partition")


def _accounting(settings: dict[str, str]) -> Check:
    name, kind = "accounting", settings.get("AccountingStorageType", "")
    forgets = f"the scheduler forgets a job {settings.get('MinJobAge', '300 sec')} after its end"
    if kind.endswith(("/none", "(null)")) or not kind:
        shows = f"none: {forgets}; hlatctl reads how a job ended from what its nodes wrote"
        return Check(name=name, status="skip", shows=shows, command="sacctmgr show configuration")
    shows = f"{kind}; tells how a job ended that the scheduler has forgotten"
    return Check(name=name, status="pass", shows=shows, command="sacctmgr show configuration")


def _passed_on(settings: dict[str, str]) -> Check:
    """Show whose limit of open files jobs get."""
    shows = "open files: jobs get the limit of "
    shows += "the shell that submits them" if _passes(settings, "NOFILE") else "the nodes' slurmd"
    return Check(
        name="limits",
        status="pass",
        shows=f"{shows}; preflight checks it there",
        command="scontrol show config | grep Propagate",
    )


def _passes(settings: dict[str, str], limit: str) -> bool:
    """Return whether jobs get a limit of the shell that submits them (slurm.conf(5), PropagateResourceLimits)."""
    kept = settings.get("PropagateResourceLimitsExcept", "(null)")
    if kept != "(null)":
        return limit not in kept.split(",")
    return bool({"ALL", limit}.intersection(settings.get("PropagateResourceLimits", "ALL").split(",")))


def _shared(folder: Path) -> Check:
    """Show what the file system of the runs folder tells. Only preflight on the nodes proves that it is shared."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    name, command = "shared runs folder", f"df -T {existing}"
    kind = _file_system(existing)
    if not kind:
        return Check(name=name, status="skip", shows="this system does not show its mounts", command=command)
    if kind in _LOCAL_TYPES:
        return Check(
            name=name,
            status="skip",
            shows=f"{folder}: {kind} is a file system of one machine; set runs_dir to storage that all nodes share, "
            "unless this machine exports it. Preflight checks it on the nodes",
            command=command,
        )
    return Check(name=name, status="pass", shows=f"{folder}: {kind}; preflight checks it on the nodes", command=command)


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder; empty if the system does not show it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    words = [line.split() for line in lines]
    mounts = {line[4]: line[line.index("-") + 1] for line in words if "-" in line}
    place = folder.resolve()
    return next((mounts[name] for path in (place, *place.parents) if (name := os.fspath(path)) in mounts), "")


def _memlock(config: Config, settings: dict[str, str]) -> Check:
    name, command = "locked memory", "ulimit -l"
    if config.backend.device == "cpu":
        return Check(name=name, status="skip", shows="backend.device=cpu needs none", command=command)
    if not _passes(settings, "MEMLOCK"):
        shows = "jobs get the limit of the nodes' slurmd; network adapters of clusters need `unlimited`"
        return Check(name=name, status="skip", shows=shows, command="srun bash -c 'ulimit -l'")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    problem = "" if unlimited else f"{size(limit)}: network adapters of clusters need `unlimited` (limits.conf(5))"
    return Check.of(name, problem, "unlimited", command=command)
