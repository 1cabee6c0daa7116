"""What a Slurm cluster lets a user ask for, checked before a run is created so that no job waits forever.

Slurm accepts a job with more nodes or time than its partition has, and never starts it (EnforcePartLimits=NO, the
default).
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from conf.cluster_rules import SIGNAL_EARLY_S
from conf.schema import ClusterConfig, Config, EvalClusterConfig
from flows.launch.base import AwayError, PlannedStops
from flows.launch.slurm.commands import hosts_of, slurm
from flows.launch.slurm.script import device_options
from hlatctl.cache.environment import Layout
from hlatctl.run.errors import ConfigError, HlatctlError, LaunchError
from hlatctl.run.processes import user_name
from hlatctl.units import duration, utc

#: Answers of ``sbatch --test-only`` that may hold only today: nodes are down, or too many jobs are queued.
_MAY_CHANGE = (
    "Requested node configuration is not available",
    "Required partition not available",
    "violates accounting/QOS policy",
)
_TRAINING, _EVALUATION, _DRIVER = "cluster.slurm", "eval.cluster", "cluster.slurm.driver"
#: A job that trains for a shorter time isn't worth its start.
_USEFUL_S = 300
#: The answer for a reservation that has not started yet.
_STARTS_LATER = "Invalid time specified"
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "(null)")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition and its limits; None: no limit.

    Args:
        nodes: number of its nodes, including those that are down.
        max_nodes: most nodes of one job.
        min_nodes: fewest nodes of one job.
        max_time_s: longest time of one job.
        default_time_s: time of a job that names no time limit; None: ``max_time_s``.
        state: ``UP`` if it accepts and starts jobs.
        accounts: accounts that may use it; None: all.
        qos: QOS that may use it; None: all.
        hosts: its nodes, as Slurm writes lists.
        submit_hosts: nodes from which jobs can be submitted to it, as Slurm writes lists; None: all.
    """

    name: str
    default: bool
    state: str
    nodes: int
    max_nodes: int | None
    min_nodes: int
    max_time_s: int | None
    default_time_s: int | None
    accounts: tuple[str, ...] | None
    qos: tuple[str, ...] | None
    hosts: str = ""
    submit_hosts: str | None = None

    @property
    def limits(self) -> str:
        """Its limits in words."""
        most = self.nodes if self.max_nodes is None else min(self.nodes, self.max_nodes)
        time = "no time limit" if self.max_time_s is None else f"jobs of at most {duration(self.max_time_s)}"
        default = "" if self.default_time_s is None else f" ({duration(self.default_time_s)} by default)"
        return f"partition {self.name} gives at most {most} of its {self.nodes} nodes to a job, {time}{default}"


def partitions() -> list[Partition]:
    """Return all partitions that this user sees.

    Raises:
        LaunchError: Slurm is not installed.
        AwayError: the scheduler does not answer.
    """
    return [_partition(line) for line in slurm("scontrol", "show", "partition", "--oneliner").splitlines() if line]


def chosen(cluster: ClusterConfig, known: list[Partition], *, where: str = _TRAINING) -> list[Partition]:
    """Return the partitions that jobs of a cluster may go to.

    Args:
        cluster: the configuration that names them.
        known: all partitions.
        where: the part of the configuration that names them, for messages.

    Raises:
        ConfigError: there is no such partition.
    """
    name = cluster.slurm.partition
    if name is None:
        if default := [partition for partition in known if partition.default]:
            return default
        raise ConfigError(f"{where}.partition=null: the cluster has no default partition", hint=_one_of(where, known))
    wanted = name.split(",")
    for word in wanted:
        if word not in {partition.name for partition in known}:
            raise ConfigError(
                f"{where}.partition={name}: the cluster has no partition {word}", hint=_one_of(where, known)
            )
    return [partition for partition in known if partition.name in wanted]


def check(cluster: ClusterConfig) -> None:
    """Check that jobs of this shape can eventually start, as ``Launcher.check_limits``."""
    if cluster.stage_environment:
        Layout().check()
    may = chosen(cluster, partitions())
    problems = [next(_problems(cluster, partition), None) for partition in may]
    if problems[0] and all(problems):
        raise problems[0]
    for partition in may:
        _check_default_time(cluster, partition)
    _check_nodes(cluster, may)
    _check_reservation(cluster)
    _check_account(cluster)
    image = cluster.container.image
    for key, path in (("slurm.setup_script", cluster.slurm.setup_script), ("container.image", image)):
        if path and path.startswith("/") and not Path(path).exists():
            raise ConfigError(
                f"cluster.{key}={path}: there is no such file here",
                hint=f"create it on storage that all nodes share, or correct cluster.{key}",
            )
    _try(cluster)


@dataclass(frozen=True, kw_only=True)
class Maintenance:
    """A maintenance reservation, during which its nodes run no jobs.

    Args:
        hosts: its nodes, as Slurm writes lists.
    """

    name: str
    start_unix_s: float
    end_unix_s: float
    hosts: str


def maintenances(now_unix_s: float) -> list[Maintenance]:
    """Return the maintenance reservations that have not started, the next one first."""
    found = []
    for values in _reservations():
        if "MAINT" in values.get("Flags", "").split(","):
            start, end = (datetime.fromisoformat(values[name]).timestamp() for name in ("StartTime", "EndTime"))
            found.append(
                Maintenance(
                    name=values["ReservationName"], start_unix_s=start, end_unix_s=end, hosts=values.get("Nodes", "")
                )
            )
    coming = (one for one in found if one.start_unix_s > now_unix_s)
    return sorted(coming, key=lambda one: one.start_unix_s)


def next_maintenance(cluster: ClusterConfig, now_unix_s: float) -> tuple[Maintenance, Partition, int] | None:
    """Return the first maintenance that a job of training would reach into, the partition, and its nodes in there.

    None if each leaves enough nodes in one of the job's partitions.
    """
    coming = maintenances(now_unix_s)
    if not coming:
        return None
    may = chosen(cluster, partitions())
    for one in coming:
        reserved = set(hosts_of(one.hosts))
        taken = [len(reserved.intersection(hosts_of(partition.hosts))) for partition in may]
        reaches = any(now_unix_s + _limit_s(cluster, partition) > one.start_unix_s for partition in may)
        if reaches and all(part.nodes - n < cluster.nodes for part, n in zip(may, taken, strict=True)):
            return one, may[0], taken[0]
    return None


def maintenance_text(cluster: ClusterConfig, now_unix_s: float) -> str:
    """Return in words how the next maintenance interrupts training; empty if none does."""
    found = next_maintenance(cluster, now_unix_s)
    if found is None:
        return ""
    one, partition, taken = found
    limit_s = _limit_s(cluster, partition)
    limit = "a job without a time limit" if limit_s == math.inf else f"a job of {duration(limit_s)}"
    return (
        f"maintenance {one.name} takes {taken} of the {partition.nodes} nodes of partition {partition.name} from "
        f"{utc(one.start_unix_s)}, in {duration(one.start_unix_s - now_unix_s)}, to {utc(one.end_unix_s)}: {limit} "
        "would reach into it, so training saves a checkpoint and ends before it, and the next job waits for its end"
    )


def stops(cluster: ClusterConfig, now_unix_s: float) -> PlannedStops:
    """Return when jobs of training end (``Launcher.stops``), or what is configured if the cluster does not answer."""
    limit_s: float = cluster.slurm.time_limit_s or math.inf
    found = None
    with suppress(HlatctlError):
        limit_s = min(_limit_s(cluster, partition) for partition in chosen(cluster, partitions()))
        found = next_maintenance(cluster, now_unix_s)
    return PlannedStops(
        after_s=None if limit_s == math.inf else int(max(1, limit_s - cluster.slurm.stop_before_limit_s)),
        maintenance_unix_s=(found[0].start_unix_s, found[0].end_unix_s) if found else None,
    )


def least_time_s(cluster: ClusterConfig, now_unix_s: float) -> int | None:
    """Return how far Slurm may shorten a job of training so that it ends before a maintenance; None if none is known.

    Half of the time until then: the other half may pass in the queue.
    """
    try:
        found = next_maintenance(cluster, now_unix_s)
    except HlatctlError:
        return None
    half_s = int(found[0].start_unix_s - now_unix_s) // 2 if found else 0
    longest_s = cluster.slurm.time_limit_s or half_s
    return min(half_s, longest_s) if half_s > useful_s(cluster) else None


def useful_s(cluster: ClusterConfig) -> int:
    """Return the time limit below which a job of training isn't worth its start."""
    return cluster.slurm.stop_before_limit_s + SIGNAL_EARLY_S + _USEFUL_S


def _limit_s(cluster: ClusterConfig, partition: Partition) -> float:
    """Return the time limit of a job of training."""
    limits = (cluster.slurm.time_limit_s, partition.default_time_s, partition.max_time_s)
    return next((limit for limit in limits if limit is not None), math.inf)


def _check_default_time(cluster: ClusterConfig, partition: Partition) -> None:
    """Check that a job without a time limit of its own is not asked to stop immediately."""
    settings = cluster.slurm
    limit_s = partition.max_time_s if partition.default_time_s is None else partition.default_time_s
    least_s = settings.stop_before_limit_s + SIGNAL_EARLY_S
    if settings.time_limit_s is None and limit_s is not None and limit_s <= least_s:
        raise ConfigError(
            f"cluster.slurm.time_limit_s=null: partition {partition.name} gives {duration(limit_s)} to a job that "
            f"names no limit, and training is asked to stop "
            f"cluster.slurm.stop_before_limit_s={settings.stop_before_limit_s} before it, up to "
            f"{SIGNAL_EARLY_S} s earlier",
            hint=f"use cluster.slurm.time_limit_s={least_s + 1} or more if the partition allows it, a shorter "
            "cluster.slurm.stop_before_limit_s, or another cluster.slurm.partition",
        )


def check_evaluations(config: Config) -> None:
    """Check that evaluations alongside training, one node each, can eventually start, as ``Launcher.check_limits``."""
    own, training = config.eval.cluster, config.cluster.slurm
    devices = device_options(config.eval_devices, own.extra, config.cluster)
    if own == EvalClusterConfig() and not devices:
        return  # like a job of training, which has been checked
    slurm_settings = replace(training, gpus_per_node=None, extra=[*devices, *own.extra])
    if own.partition:
        slurm_settings = replace(slurm_settings, partition=own.partition, reservation=None, constraint=None)
    cluster = replace(config.cluster, nodes=1, slurm=slurm_settings)
    may = chosen(cluster, partitions(), where=_EVALUATION)
    if all(partition.min_nodes > 1 for partition in may):
        raise ConfigError(
            f"{_EVALUATION}.partition={own.partition}: starts no job of one node, which evaluations are",
            hint=f"use another {_EVALUATION}.partition",
        )
    _try(cluster, where=_EVALUATION)


def check_driver(cluster: ClusterConfig, options: Sequence[str], *, least_s: int) -> None:
    """Check that the job of a driver can start, and can submit the run's jobs and its successor from its node.

    Args:
        options: options of its job, without partition, account, QOS and time limit.
        least_s: shortest time limit that is of use.
    """
    known, settings = partitions(), cluster.slurm.driver
    own = driver_cluster(cluster)
    may = chosen(own, known, where=_DRIVER)
    targets = {partition.name: partition for partition in [*may, *chosen(cluster, known)]}
    for partition in may:
        limit_s = min(settings.time_limit_s, partition.max_time_s or settings.time_limit_s)
        if limit_s < least_s:
            raise ConfigError(
                f"{_DRIVER}.time_limit_s={settings.time_limit_s}: partition {partition.name} gives "
                f"{duration(limit_s)} to a driver's job, which needs at least {duration(least_s)}",
                hint=f"use a longer {_DRIVER}.time_limit_s, or another {_DRIVER}.partition",
            )
        if partition.min_nodes > 1:
            raise ConfigError(
                f"{_DRIVER}.partition={settings.partition or 'null'}: partition {partition.name} starts no job of one "
                "node, which a driver is",
                hint=f"use another {_DRIVER}.partition",
            )
        for target in targets.values():
            if target.submit_hosts and set(hosts_of(partition.hosts)).difference(hosts_of(target.submit_hosts)):
                raise ConfigError(
                    f"{_DRIVER}.partition={settings.partition or 'null'}: a driver on the nodes of {partition.name} "
                    f"can't submit jobs to partition {target.name}, which takes them from {target.submit_hosts} only",
                    hint="run the driver there: `hlatctl train --detach`",
                )
    _try(replace(own, slurm=replace(own.slurm, extra=list(options))), where=_DRIVER)


def driver_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """Return a cluster whose ``slurm`` selects where a driver's job runs: any node of its partition, without GPUs."""
    settings, own = cluster.slurm, cluster.slurm.driver
    qos = own.qos or (None if own.partition else settings.qos)
    any_node = replace(settings, reservation=None, constraint=None, gpus_per_node=None)
    return replace(cluster, slurm=replace(any_node, partition=own.partition or settings.partition, qos=qos))


def _problems(cluster: ClusterConfig, partition: Partition) -> Iterator[ConfigError]:
    settings, shown = cluster.slurm, partition.limits
    if cluster.nodes > partition.nodes:
        yield ConfigError(f"cluster.nodes={cluster.nodes}: {shown}", hint=f"use at most {partition.nodes}")
    elif cluster.paid_nodes > partition.nodes:
        yield ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes}: with cluster.nodes={cluster.nodes}, {shown}",
            hint=f"use at most {partition.nodes - cluster.nodes}",
        )
    if cluster.nodes < partition.min_nodes:
        yield ConfigError(
            f"cluster.nodes={cluster.nodes}: partition {partition.name} starts no job of fewer than "
            f"{partition.min_nodes} nodes",
            hint=f"use at least {partition.min_nodes}, or another cluster.slurm.partition",
        )
    for key, allowed in (("account", partition.accounts), ("qos", partition.qos)):
        value = getattr(settings, key)
        if value is not None and allowed is not None and value not in allowed:
            yield ConfigError(
                f"cluster.slurm.{key}={value}: may not use partition {partition.name}",
                hint=f"cluster.slurm.{key} can be {', '.join(allowed)}; or use another cluster.slurm.partition",
            )
    if settings.qos is not None:
        return  # a QOS can lift the other limits of a partition (sacctmgr(1), PartitionMaxNodes and PartitionTimeLimit)
    if partition.max_nodes is not None and cluster.nodes > partition.max_nodes:
        yield ConfigError(f"cluster.nodes={cluster.nodes}: {shown}", hint=f"use at most {partition.max_nodes}")
    if partition.max_time_s is not None and (settings.time_limit_s or 0) > partition.max_time_s:
        yield ConfigError(
            f"cluster.slurm.time_limit_s={settings.time_limit_s}: {shown}",
            hint=f"use at most {partition.max_time_s}; a run that needs longer continues in the next job",
        )


def _try(cluster: ClusterConfig, *, where: str = _TRAINING) -> None:
    """Have sbatch check account, QOS and further options, without submitting anything."""
    settings = cluster.slurm
    given = dict(settings.selection)
    options = [f"--{name}={value}" for name, value in given.items()]
    try:
        slurm("sbatch", "--test-only", *options, *settings.device_options, "--wrap=true")
    except AwayError:
        raise
    except LaunchError as error:
        reason = " ".join(error.message.removeprefix("sbatch:").split())
        if any(answer in reason for answer in (*_MAY_CHANGE, *([_STARTS_LATER] if settings.reservation else []))):
            return
        if settings.gpus_per_node:
            given["gpus_per_node"] = str(settings.gpus_per_node)
        if settings.extra:
            given["extra"] = f"[{', '.join(settings.extra)}]"
        own = {"partition": where, "extra": where}
        values = ", ".join(f"{own.get(name, _TRAINING)}.{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"{values or 'cluster=slurm'}: sbatch refuses a job with these options ({reason})",
            hint="change the option that sbatch names; `hlatctl doctor --cluster cluster=slurm` lists the partitions",
        ) from None


def _check_nodes(cluster: ClusterConfig, may: list[Partition]) -> None:
    """Check that some node of the partitions has the features and GPUs that jobs ask for."""
    settings = cluster.slurm
    if not (settings.constraint or settings.gpus_per_node):
        return
    names = ",".join(partition.name for partition in may)
    rows = [line.partition("|") for line in slurm("sinfo", "-h", "-p", names, "-o", "%f|%G").splitlines()]
    features = sorted({name for row in rows for name in row[0].split(",") if name and name != "(null)"})
    # Without the counts of nodes (`gpu*4`), and without the operators & | [ ] ( ) (sbatch(1), --constraint).
    for wanted in re.findall(r"[A-Za-z0-9_.:=-]+", re.sub(r"\*\d+", "", settings.constraint or "")):
        if wanted not in features:
            raise ConfigError(
                f"cluster.slurm.constraint={settings.constraint}: no node of partition {names} has feature {wanted}",
                hint=f"features of its nodes: {', '.join(features) or 'none; set cluster.slurm.constraint=null'}",
            )
    most = max((_gpus(row[2]) for row in rows), default=0)
    if (settings.gpus_per_node or 0) > most:
        raise ConfigError(
            f"cluster.slurm.gpus_per_node={settings.gpus_per_node}: nodes of partition {names} have "
            f"{most or 'no'} GPUs that Slurm counts",
            hint=f"use cluster.slurm.gpus_per_node={most or 'null'}, or another cluster.slurm.partition",
        )


def _gpus(gres: str) -> int:
    """Return the GPUs in sinfo's list of a node's generic resources, such as ``gpu:h100:4(S:0-3),nvme:1``."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu:(?:[^:,(]+:)?(\d+)", gres))


def _check_reservation(cluster: ClusterConfig) -> None:
    wanted, user = cluster.slurm.reservation, user_name()
    if wanted is None:
        return
    known = _reservations()
    usable = {values["ReservationName"]: values for values in known if _may_use(values, user, cluster.slurm.account)}
    if wanted not in usable:
        there = any(values["ReservationName"] == wanted for values in known)
        raise ConfigError(
            f"cluster.slurm.reservation={wanted}: "
            + (f"may not be used by {user}" if there else "the cluster has no such reservation"),
            hint=f"reservations that you may use: {', '.join(usable) or 'none; set cluster.slurm.reservation=null'}",
        )
    nodes = int(usable[wanted].get("NodeCnt", "0"))
    if cluster.nodes > nodes and "FLEX" not in usable[wanted].get("Flags", ""):
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: reservation {wanted} has {nodes} nodes", hint=f"use at most {nodes}"
        )


def _reservations() -> list[dict[str, str]]:
    lines = slurm("scontrol", "show", "reservation", "--oneliner").splitlines()
    return [values for line in lines if "ReservationName" in (values := _values(line))]


def _may_use(reservation: dict[str, str], user: str, account: str | None) -> bool:
    """Return whether a reservation lists a user or account; a list with ``-`` names who may not use it."""
    users, accounts = (_names(reservation.get(key, "")) or () for key in ("Users", "Accounts"))
    if any(name.startswith("-") for name in (*users, *accounts)):
        return f"-{user}" not in users and f"-{account}" not in accounts
    return not (users or accounts) or user in users or account in accounts or (bool(accounts) and account is None)


def associations(partition: str | None) -> list[tuple[str, list[str]]]:
    """Return the accounts that this user may charge, each with its QOS; empty if the scheduler enforces none.

    Empty too if the database doesn't answer: sbatch then says what the scheduler remembers.
    """
    if not shutil.which("sacctmgr") or "associations" not in _enforced():
        return []
    try:
        rows = _accounting("assoc", f"user={user_name()}", "account,partition,qos")
    except LaunchError:
        return []
    of_partitions = ("", *(partition or "").split(","))
    return [(account, qos.split(",")) for account, limited_to, qos in rows if limited_to in of_partitions]


def _check_account(cluster: ClusterConfig) -> None:
    """Check account and QOS against what accounting lets this user use."""
    settings, user = cluster.slurm, user_name()
    rows = associations(settings.partition)
    if not rows:
        return
    accounts = sorted({account for account, _ in rows})
    if settings.account is not None and settings.account not in accounts:
        raise ConfigError(
            f"cluster.slurm.account={settings.account}: {user} may not charge jobs to it",
            hint=f"cluster.slurm.account can be {', '.join(accounts)}",
        )
    of_account = [qos for account, qos in rows if settings.account in (None, account)]
    usable = sorted({name for qos in of_account for name in qos if name})
    if usable and settings.qos is not None and settings.qos not in usable:
        raise ConfigError(
            f"cluster.slurm.qos={settings.qos}: {user} may not use it"
            + (f" with cluster.slurm.account={settings.account}" if settings.account else ""),
            hint=f"cluster.slurm.qos can be {', '.join(usable)}",
        )
    if settings.qos is not None:
        _check_qos(cluster, settings.qos)


def _check_qos(cluster: ClusterConfig, qos: str) -> None:
    """Check a job's nodes and time against its QOS (sacctmgr(1): MaxWall, MaxTRES, MinTRES)."""
    for wall, most, least in _accounting("qos", qos, "maxwall,maxtres,mintres"):
        limit_s, asked_s = seconds(wall), cluster.slurm.time_limit_s
        if limit_s is not None and asked_s is not None and asked_s > limit_s:
            raise ConfigError(
                f"cluster.slurm.time_limit_s={asked_s}: QOS {qos} lets a job run for at most {duration(limit_s)}",
                hint=f"use at most {limit_s}; a run that needs longer continues in the next job",
            )
        highest, lowest = (re.search(r"(?:^|,)node=(\d+)", limit) for limit in (most, least))
        if highest and cluster.nodes > int(highest[1]):
            raise ConfigError(
                f"cluster.nodes={cluster.nodes}: QOS {qos} gives a job at most {highest[1]} nodes",
                hint=f"use at most {highest[1]}, or another cluster.slurm.qos",
            )
        if lowest and cluster.nodes < int(lowest[1]):
            raise ConfigError(
                f"cluster.nodes={cluster.nodes}: QOS {qos} starts no job of fewer than {lowest[1]} nodes",
                hint=f"use at least {lowest[1]}, or another cluster.slurm.qos",
            )


def _enforced() -> str:
    found = re.search(r"AccountingStorageEnforce\s*=\s*(\S+)", slurm("scontrol", "show", "config"))
    return found[1] if found else ""


def _accounting(kind: str, which: str, fields: str) -> list[list[str]]:
    """Return rows of ``sacctmgr show``.

    Raises:
        LaunchError: the database does not answer.
    """
    lines = slurm("sacctmgr", "-nP", "show", kind, which, f"format={fields}").splitlines()
    return [row for line in lines if len(row := line.split("|")) == fields.count(",") + 1]


def _one_of(where: str, known: list[Partition]) -> str:
    return f"{where}.partition can be {', '.join(partition.name for partition in known)}"


def _partition(line: str) -> Partition:
    values = _values(line)
    return Partition(
        name=values["PartitionName"],
        default=values.get("Default") == "YES",
        state=values.get("State", ""),
        nodes=int(values.get("TotalNodes", "0")),
        max_nodes=None if values.get("MaxNodes", "NONE") in _UNLIMITED else int(values["MaxNodes"]),
        min_nodes=int(values.get("MinNodes", "0")),
        max_time_s=seconds(values.get("MaxTime", "NONE")),
        default_time_s=seconds(values.get("DefaultTime", "NONE")),
        accounts=_names(values.get("AllowAccounts", "ALL")),
        qos=_names(values.get("AllowQos", "ALL")),
        hosts=values.get("Nodes", ""),
        submit_hosts=None if (submit := values.get("AllocNodes", "ALL")) == "ALL" else submit,
    )


def _values(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in ("ALL", *_UNLIMITED) else tuple(text.split(","))


def seconds(text: str) -> int | None:
    """Return a Slurm time, such as ``1-12:00:00`` or ``30:00``, in seconds; None: no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
