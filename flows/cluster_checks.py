"""Checks of a cluster and its nodes for ``hlatctl doctor``.

``--cluster`` checks a Slurm or Kubernetes cluster from this machine, and neither submits nor creates anything.
``--neuron`` checks the tools and devices of a Trainium node, then runs short commands on it. GPUs are checked where a
driver has some, or where the configuration needs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from conf.devices import DEVICES
from conf.schema import Config, KubernetesConfig
from flows.launch.base import AwayError, Job
from flows.launch.kubernetes import api as limits
from flows.launch.kubernetes.api import IN_CLUSTER, IN_NAMESPACE, Api, RefusedError, Right
from flows.launch.kubernetes.launcher import KubernetesLauncher
from flows.launch.slurm.commands import slurm
from flows.launch.slurm.limits import associations, check, chosen, partitions
from flows.runtime.programs import ask, ask_about
from hlatctl.run.checks import Check, Status
from hlatctl.run.errors import HlatctlError, LaunchError
from hlatctl.run.files import private_folder
from hlatctl.units import size

_MODULES_TIMEOUT_S = 60
_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol")
#: File systems that belong to one machine (proc(5), mountinfo; Linux's names).
_LOCAL_TYPES = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def check_cluster(config: Config) -> Iterator[Check]:
    """Yield each check as it is done. If Slurm is missing or silent, yield only those that don't need it."""
    missing = [command for command in _COMMANDS if not shutil.which(command)]
    problem = f"{', '.join(missing)}: not found; run hlatctl on a login node" if missing else ""
    yield Check.of("Slurm's commands", problem, ", ".join(_COMMANDS), command="apt-get install slurm-client")
    settings: dict[str, str] = {}
    if not missing:
        yield from _scheduler(config, settings)
    yield _shared(Path(config.runs_dir))
    yield _memlock(config, settings)


def _scheduler(config: Config, settings: dict[str, str]) -> Iterator[Check]:
    command = "scontrol ping"
    try:
        lines = slurm("scontrol", "show", "config").splitlines()
    except (LaunchError, AwayError) as error:
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
    yield _accounting(config, settings)
    yield _passed_on(settings)
    if modules := config.cluster.slurm.modules:
        yield _modules(modules)


def _partition(config: Config) -> Check:
    command = "scontrol show partition"
    try:
        in_use = chosen(config.cluster, partitions())
    except HlatctlError as error:
        return Check(name="partition", status="fail", shows=str(error).replace("\nhint:", ";"), command=command)
    closed = [f"partition {each.name} is {each.state}" for each in in_use if each.state != "UP"]
    return Check.of("partition", "; ".join(closed), "; ".join(each.limits for each in in_use), command=command)


def _shape(config: Config) -> Check:
    cluster = config.cluster
    try:
        check(cluster)
    except HlatctlError as error:
        return Check(name="job", status="fail", shows=str(error).replace("\nhint:", ";"), command="hlatctl plan")
    return Check(name="job", status="pass", shows=f"cluster.nodes={cluster.nodes} can start in this partition")


def _modules(modules: list[str]) -> Check:
    """Load the modules in a login shell of this machine; those of the nodes are usually the same."""
    command = f"module load {shlex.join(modules)}"
    try:
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(("bash", "-lc", command), check=False, timeout=_MODULES_TIMEOUT_S, **options)
        problem = " ".join(done.stderr.split())[:400] or f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer in {_MODULES_TIMEOUT_S} s"
    return Check.of("modules", problem, ", ".join(modules), command=command)


def _accounting(config: Config, settings: dict[str, str]) -> Check:
    name, kind = "accounting", settings.get("AccountingStorageType", "")
    forgets = f"the scheduler forgets a job {settings.get('MinJobAge', '300 sec')} after its end"
    if kind.endswith(("/none", "(null)")) or not kind:
        shows = f"none: {forgets}; hlatctl reads how a job ended from what its nodes wrote"
        return Check(name=name, status="skip", shows=shows, command="sacctmgr show configuration")
    shows = f"{kind}; says how a job ended that the scheduler has forgotten"
    for account, qos in associations(config.cluster.slurm.partition):
        shows += f"; you may use account {account} with QOS {', '.join(qos)}"
    return Check(name=name, status="pass", shows=shows, command="sacctmgr show configuration")


def _passed_on(settings: dict[str, str]) -> Check:
    shows = "open files: jobs get the limit of "
    shows += "the shell that submits them" if _passes(settings, "NOFILE") else "the nodes' slurmd"
    return Check(
        name="limits",
        status="pass",
        shows=f"{shows}; preflight checks it there",
        command="scontrol show config | grep Propagate",
    )


def _passes(settings: dict[str, str], limit: str) -> bool:
    """Return whether the submitting shell passes on its limits to jobs (slurm.conf(5), PropagateResourceLimits)."""
    kept = settings.get("PropagateResourceLimitsExcept", "(null)")
    if kept != "(null)":
        return limit not in kept.split(",")
    return bool({"ALL", limit}.intersection(settings.get("PropagateResourceLimits", "ALL").split(",")))


def _shared(folder: Path) -> Check:
    """Show the type of the runs folder's file system. Only preflight on the nodes proves that it is shared."""
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


#: The first minor version of 1.x whose servers have ``podReplacementPolicy`` by default (KEP 3939).
_OLDEST_SERVER = 29
#: All requests of the launcher were tested with 1.20, 1.27 to 1.33 and 1.37, against a server of 1.36.
_OLDEST_KUBECTL = 20


def check_kubernetes(config: Config) -> Iterator[Check]:
    """Yield each check as it is done. Without kubectl or the server, yield only those that need neither."""
    settings, api = config.cluster.kubernetes, Api(config.cluster.kubernetes)
    yield _image(settings)
    kubectl = shutil.which("kubectl")
    yield Check.of("kubectl", "" if kubectl else "not found; install it on the driver's machine", str(kubectl))
    if not kubectl:
        return
    server = _server(api)
    yield server
    if server.status == "fail":
        return
    yield _rights(api)
    yield _nodes(config)
    yield _user(config)
    for claim in settings.claims:
        yield _object(api, "volume claim", "persistentvolumeclaim", claim)
    if settings.queue:
        yield _object(api, "Kueue's queue", "localqueues.kueue.x-k8s.io", settings.queue)


def _image(settings: KubernetesConfig) -> Check:
    name, image = "image", settings.image
    if not image:
        shows = "cluster.kubernetes.image=null: build one with `make image`, and name it by digest"
        return Check(name=name, status="fail", shows=shows, command="make image IMAGE=cpu")
    if "@sha256:" not in image:
        shows = f"cluster.kubernetes.image={image}: a tag can change between attempts; better NAME@sha256:DIGEST"
        return Check(name=name, status="skip", shows=shows)
    return Check(name=name, status="pass", shows=image)


def _server(api: Api) -> Check:
    name, command = "API server", "kubectl version"
    try:
        versions = json.loads(api.run("version", "--output=json"))
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    client, server = (versions.get(f"{side}Version", {}).get("gitVersion", "?") for side in ("client", "server"))
    shows = f"Kubernetes {server}, kubectl {client}"
    if _minor(server) < _OLDEST_SERVER:
        shows += (
            f": Kubernetes must be 1.{_OLDEST_SERVER} or newer: older Jobs start a node's next pod before the last ends"
        )
        return Check(name=name, status="fail", shows=shows, command=command)
    if _minor(client) < _OLDEST_KUBECTL:
        shows += f": kubectl older than 1.{_OLDEST_KUBECTL} has not been tried; install a newer one"
        return Check(name=name, status="skip", shows=shows, command=command)
    return Check(name=name, status="pass", shows=shows, command=command)


def _minor(version: str) -> int:
    """Return N of ``v1.N.M``; for another form, a number above any version."""
    found = re.match(r"v1\.(\d+)", version)
    return int(found[1]) if found else sys.maxsize


def _rights(api: Api) -> Check:
    name, command = "rights", "kubectl auth can-i --list"
    try:
        denied = [f"{right.verb} {right.resource}" for right in (*IN_NAMESPACE, *IN_CLUSTER) if not _may(api, right)]
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    problem = f"missing: {', '.join(denied)}; see deploy/kubernetes/rbac.yaml" if denied else ""
    return Check.of(name, problem, f"{len(IN_NAMESPACE) + len(IN_CLUSTER)} of the launcher's verbs", command=command)


def _may(api: Api, right: Right) -> bool:
    """Return the server's answer, which is also kubectl's exit code."""
    try:
        return api.run("auth", "can-i", right.verb, right.resource).strip().startswith("yes")
    except RefusedError as error:
        if error.reason:
            raise
        return False


def _nodes(config: Config) -> Check:
    name, command, cluster = "nodes", "kubectl get nodes --show-labels", config.cluster
    try:
        warning = limits.check_limits(cluster)
    except HlatctlError as error:
        return Check(name=name, status="fail", shows=str(error).replace("\nhint:", ";"), command=command)
    if warning:
        return Check(name=name, status="skip", shows=warning, command=command)
    shows = f"cluster.nodes={cluster.nodes}: at least so many ready nodes have the labels and resources asked for"
    return Check(name=name, status="pass", shows=shows, command=command)


def _user(config: Config) -> Check:
    name, run = "user of pods", Path(config.runs_dir) / "doctor"
    job = Job(name="doctor", run_dir=run, argv=(), launch_dir=run / "launch" / "attempt-0000", log_dir=run / "logs")
    try:
        work = list(yaml.safe_load_all(KubernetesLauncher(config.cluster).render(job).script))[-1]
    except HlatctlError as error:
        return Check(name=name, status="fail", shows=str(error).replace("\nhint:", ";"), command="hlatctl plan")
    pod = work["spec"]["template"]["spec"]
    identity = {**(pod.get("securityContext") or {}), **(pod["containers"][0].get("securityContext") or {})}
    user, groups = identity.get("runAsUser"), {identity.get("runAsGroup"), identity.get("fsGroup")}
    own, mode = os.getuid(), config.runs_mode
    if user == own == 0:
        shows = "root, as this driver; a namespace with the profile `restricted` refuses them: use another user"
        return Check(name=name, status="skip", shows=shows, command="id -u")
    if user == own:
        return Check(name=name, status="pass", shows=f"{user}, as this driver")
    if int(mode, 8) & 0o070 == 0o070 and os.getgid() in groups:
        return Check(
            name=name, status="pass", shows=f"{user}, of this driver's group, which runs_mode={mode} lets write"
        )
    shows = (
        f"{'the one of the image' if user is None else user}, and this driver's is {own}: with runs_mode={mode} they "
    )
    shows += "can't write in its run directories; remove runAsUser from cluster.kubernetes.patch"
    return Check(name=name, status="fail", shows=shows, command="id -u")


def _object(api: Api, name: str, kind: str, wanted: str) -> Check:
    """Check that an object exists and that, if it is a volume claim, it is bound."""
    command = f"kubectl describe {kind} {wanted}"
    try:
        found = json.loads(api.run("get", kind, wanted, "--output=json"))
    except RefusedError as error:
        may_not = error.reason == "Forbidden"
        return Check(name=name, status="skip" if may_not else "fail", shows=error.message, command=command)
    except LaunchError as error:
        return Check(name=name, status="fail", shows=error.message, command=command)
    phase = found.get("status", {}).get("phase", "")
    if kind == "persistentvolumeclaim" and phase != "Bound":
        return Check(name=name, status="fail", shows=f"{wanted} is {phase or '?'}, not Bound", command=command)
    return Check(name=name, status="pass", shows=f"{wanted} is {phase or 'there'}", command=command)


_TIMEOUT_S = 1800
_ALONE = "cluster.nodes=1 eval.enabled=false tracking=none"
#: Short runs of a small model, in order: name, command, and what its success shows.
_RUNS = (
    (
        "compile ahead, every graph found, 20 steps",
        f"train {_ALONE} backend.coverage_gate=true train.max_steps=20",
        "all graphs were compiled ahead, a short attempt found them in the cache, and 20 steps were trained",
    ),
    (
        "killed and resumed",
        f"drill --fault kill_process {_ALONE}",
        "after a process was killed, the run resumed with exactly the losses of an undisturbed run",
    ),
)


def check_devices(config: Config) -> Iterator[Check]:
    """Yield the checks of devices that this machine has, or that the configuration trains on here, by PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return  # this machine doesn't train, as the check of its packages says
    for name, device in DEVICES.items():
        needed = name == config.backend.device and config.cluster.jobs_run == "here"
        if device.node_checks and device.files and (needed or any(Path(file).exists() for file in device.files)):
            try:
                yield from [Check(**json.loads(line)) for line in _ask(device.node_checks, config).splitlines()]
            except HlatctlError as error:  # such as PyTorch's libraries that don't fit the driver's
                status: Status = "fail" if needed else "skip"
                command = f'python -c "import torch; torch.{name}.init()"'
                yield Check(name=f"devices ({name})", status=status, shows=error.message, command=command)


def check_node(config: Config, overrides: list[str]) -> Iterator[Check]:
    """Yield each check as it is done. After a failed check of the node, the remaining ones are skipped.

    Args:
        overrides: overrides of that configuration.
    """
    checks = [Check(**json.loads(line)) for line in _ask("trainer.neuron.node", config).splitlines()]
    yield from checks
    failed = next((check for check in checks if check.status == "fail"), None)
    if failed is None:
        yield Check(**json.loads(_ask("trainer.neuron.rounding_probe", config)))
    with private_folder("doctor") as own:
        for name, command, shows in _RUNS:
            words = [*command.split(), *overrides]
            if failed:
                why = f"skipped until this check passes: {failed.name}"
                yield Check(name=name, status="skip", shows=why, command=f"hlatctl {' '.join(words)}")
            else:
                yield run_command(
                    name, [*words, f"runs_dir={own.path}", f"cluster.worker_cache_dir={own.path}/worker"], shows
                )


def _ask(module: str, config: Config) -> str:
    return ask_about(module, config, timeout_s=_TIMEOUT_S)


def run_command(name: str, words: list[str], shows: str) -> Check:
    """Run a command of hlatctl in a separate process. If it fails, the check shows its error."""
    started, problem = time.monotonic(), ""
    try:
        ask("hlatctl", *words)
    except HlatctlError as error:
        problem = f"error: {error.message}"
    values = {"wall_s": round(time.monotonic() - started, 1)}
    return Check.of(name, problem, shows, command=f"hlatctl {' '.join(words)}", values=values)
