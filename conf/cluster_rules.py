"""Rules of the configuration of a Slurm or Kubernetes cluster; they need no scheduler and no cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from conf.registries import LAUNCHERS
from conf.schema import Config
from hlatctl.run.errors import ConfigError

#: Options of sbatch that hlatctl sets or that break its jobs, and what sets them instead.
_OWN_OPTIONS = {
    "--account": "cluster.slurm.account",
    "--array": "hlatctl, which submits single jobs",
    "--comment": "hlatctl, which finds its jobs by it",
    "--constraint": "cluster.slurm.constraint",
    "--exclude": "the node ledger",
    "--exclusive": "cluster.slurm.exclusive",
    "--export": "backend.env",
    "--job-name": "hlatctl, which finds its jobs by it",
    "--no-requeue": "hlatctl, which submits a new job",
    "--nodes": "cluster.nodes",
    "--ntasks": "cluster.nodes",
    "--ntasks-per-node": "hlatctl, which starts one program per node",
    "--open-mode": "hlatctl",
    "--output": "hlatctl, which writes to the run's logs",
    "--partition": "cluster.slurm.partition",
    "--qos": "cluster.slurm.qos",
    "--requeue": "hlatctl, which submits a new job",
    "--reservation": "cluster.slurm.reservation",
    "--signal": "cluster.slurm.stop_before_limit_s",
    "--test-only": "`hlatctl plan`, which submits nothing",
    "--time": "cluster.slurm.time_limit_s",
    "--wait": "hlatctl, which waits itself",
    "--wrap": "hlatctl, which submits a script",
}
#: Slurm may send the signal before the time limit up to this much earlier (sbatch(1), --signal).
SIGNAL_EARLY_S = 60
#: A mount: absolute paths and options, without the separators of lists.
_MOUNT = re.compile(r"/[^:,]*:/[^:,]*(:[A-Za-z+]+)?")
#: Names of interfaces have at most 15 characters on Linux (IFNAMSIZ).
_INTERFACES = re.compile(r"[^\s,/]{1,15}(,[^\s,/]{1,15})*")
#: Annotation of jobs that SageMaker HyperPod restarts by itself (AWS, "Running jobs using kubectl").
_AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
_WORD = re.compile(r"[^\s,-][^\s]*")


def _names(config: Config) -> Iterator[ConfigError]:
    settings = config.cluster.slurm
    named = {key: getattr(settings, key) for key in ("partition", "account", "qos", "reservation", "constraint")}
    named |= {f"modules[{index}]": module for index, module in enumerate(settings.modules)}
    for key, value in named.items():
        if value is not None and not _WORD.fullmatch(value):
            yield ConfigError(
                f"cluster.slurm.{key}={value!r}: must be a name without spaces",
                hint=f"cluster.slurm.{key.partition('[')[0]}={'[NAME]' if '[' in key else 'NAME'}",
            )
    script = settings.setup_script
    if script is not None and not re.fullmatch(r"/[^\x00-\x1f\x7f]+", script):
        yield ConfigError(
            f"cluster.slurm.setup_script={script!r}: must be an absolute path, because jobs start in other folders",
            hint="cluster.slurm.setup_script=/project/you/environment.sh",
        )


def _gpus_per_node(config: Config) -> Iterator[ConfigError]:
    cluster = config.cluster
    gpus = cluster.slurm.gpus_per_node
    if gpus and config.backend.device == "cuda" and cluster.processes_per_node > gpus:
        yield ConfigError(
            f"cluster.processes_per_node={cluster.processes_per_node}: with cluster.slurm.gpus_per_node={gpus}, each "
            "process needs a GPU of its own",
            hint=f"set cluster.processes_per_node={gpus}",
        )


def _interface(config: Config) -> Iterator[ConfigError]:
    name = config.cluster.interface
    if name is not None and not _INTERFACES.fullmatch(name):
        yield ConfigError(
            f"cluster.interface={name!r}: must be the name of a network interface, or several with commas between them",
            hint="`ip -brief address` on a node lists its interfaces, such as eth0",
        )


def _extra(config: Config) -> Iterator[ConfigError]:
    # An evaluation has a partition and limits of its own; its options come last, and sbatch takes the last one.
    evaluations = {**_OWN_OPTIONS, "--partition": "eval.cluster.partition"}
    for name in ("time", "exclusive", "signal", "qos", "reservation", "constraint"):
        del evaluations[f"--{name}"]
    yield from _options("cluster.slurm.extra", config.cluster.slurm.extra, _OWN_OPTIONS)
    yield from _options("eval.cluster.extra", config.eval.cluster.extra, evaluations)


def _placement(config: Config) -> Iterator[ConfigError]:
    own = config.eval.cluster
    for key, value in (("partition", own.partition), ("extra", own.extra)):
        if config.eval.placement == "between" and value:
            yield ConfigError(
                f"eval.cluster.{key}={value}: is for jobs of their own, and eval.placement=between evaluates on the "
                "nodes of training",
                hint="set eval.placement=beside",
            )


def _options(where: str, options: list[str], own: dict[str, str]) -> Iterator[ConfigError]:
    for index, option in enumerate(options):
        key, name = f"{where}[{index}]={option!r}", option.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]*(=[^\x00-\x1f\x7f]*)?", option):
            yield ConfigError(
                f"{key}: must be one long option of sbatch, on one line",
                hint=f"write --name=value, such as \"{where}=['--mem=0']\"",
            )
        elif owner := _owner(name, own):
            yield ConfigError(f"{key}: {name} is set by {owner}", hint=f"remove {name} from {where}")


def _owner(name: str, own: dict[str, str]) -> str:
    """Return what sets an option; sbatch also accepts the beginning of a name."""
    if name in own:
        return own[name]
    longer = sorted(option for option in own if option.startswith(name))
    return own[longer[0]] if longer else ""


def _time_limit(config: Config) -> Iterator[ConfigError]:
    settings = config.cluster.slurm
    least = settings.stop_before_limit_s + SIGNAL_EARLY_S
    if settings.time_limit_s is not None and settings.time_limit_s <= least:
        yield ConfigError(
            f"cluster.slurm.time_limit_s={settings.time_limit_s}: must be more than {least}, because training stops "
            f"cluster.slurm.stop_before_limit_s={settings.stop_before_limit_s} before it, and Slurm asks up to "
            f"{SIGNAL_EARLY_S} s earlier",
            hint="use a longer time_limit_s or a shorter stop_before_limit_s",
        )


def _container(config: Config) -> Iterator[ConfigError]:
    container = config.cluster.container
    words = {"image": container.image or "-", "python": container.python}
    words |= {f"options[{index}]": option for index, option in enumerate(container.options)}
    for key, value in words.items():
        if not value or re.search(r"[\x00-\x1f\x7f]", value):
            yield ConfigError(f"cluster.container.{key}={value!r}: must be one line, and not empty")
    for index, mount in enumerate(container.mounts):
        if not _MOUNT.fullmatch(mount):
            yield ConfigError(
                f"cluster.container.mounts[{index}]={mount!r}: must be FROM:TO or FROM:TO:OPTIONS, with absolute paths "
                "without commas",
                hint="write \"cluster.container.mounts=['/data:/data:ro']\"",
            )
    if container.image and _here(config):
        yield ConfigError(
            f"cluster.container.image={container.image}: {_here(config)} runs jobs without a container",
            hint="set cluster.container.image=null, or use cluster=slurm",
        )


def _stage_environment(config: Config) -> Iterator[ConfigError]:
    cluster = config.cluster
    if not cluster.stage_environment:
        return
    key = "cluster.stage_environment=true"
    if _here(config):
        yield ConfigError(
            f"{key}: {_here(config)} runs jobs in the environment of this machine",
            hint="set cluster.stage_environment=false, or use cluster=slurm",
        )
    if cluster.container.image:
        yield ConfigError(
            f"{key}: with cluster.container.image={cluster.container.image}, the environment is in the image",
            hint="set cluster.stage_environment=false; `enroot` and Apptainer can keep images on the nodes",
        )
    if Path(cluster.worker_cache_dir).expanduser().is_relative_to(Path.home()):
        yield ConfigError(
            f"cluster.worker_cache_dir={cluster.worker_cache_dir}: with {key}, must be on each node's own disk and "
            "not in your home folder, which nodes usually share",
            hint="use a local disk, such as cluster.worker_cache_dir=/scratch/$USER/hlatctl",
        )


def _spare_nodes(config: Config) -> Iterator[ConfigError]:
    if config.cluster.spare_nodes and _here(config):
        yield ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes}: {_here(config)} has this machine only",
            hint="set cluster.spare_nodes=0, or use cluster=slurm",
        )


def _hyperpod_auto_resume(config: Config) -> Iterator[ConfigError]:
    """Refuse SageMaker HyperPod's auto-resume: it would restart a job whose successor hlatctl has submitted."""
    cluster = config.cluster
    options = {"cluster.slurm.extra": cluster.slurm.extra, "cluster.container.options": cluster.container.options}
    found = [key for key, words in options.items() if any(word.startswith("--auto-resume") for word in words)]
    if _AUTO_RESUME in str(cluster.kubernetes.patch):
        found.append("cluster.kubernetes.patch")
    for key in found:
        yield ConfigError(
            f"{key}: turns HyperPod's auto-resume on, but hlatctl restarts the run",
            hint=f"remove it from {key}; HyperPod still replaces the node, and the next attempt uses a good one",
        )


def _here(config: Config) -> str:
    """Return the launcher as an override if its jobs run on this machine alone; otherwise nothing."""
    return f"cluster.launcher={config.cluster.launcher}" if config.cluster.jobs_run == "here" else ""


def _of_launcher(config: Config) -> Iterator[ConfigError]:
    if rules := LAUNCHERS.part(config.cluster.launcher, "rules"):
        yield from rules(config)


#: Each yields an error for every rule that the configuration breaks.
RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (
    _names,
    _gpus_per_node,
    _interface,
    _extra,
    _placement,
    _time_limit,
    _container,
    _spare_nodes,
    _stage_environment,
    _hyperpod_auto_resume,
    _of_launcher,
)


#: A DNS label; names of most objects are such labels joined by dots (RFC 1123).
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
#: A quantity, such as 8, 500m or 64Gi (Kubernetes, "Resource units").
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_NAMED = ("namespace", "queue", "priority_class", "service_account", "pull_secret")


def to_start_on_kubernetes(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each setting that only a start on Kubernetes needs; a plan reports the missing ones."""
    if not config.cluster.kubernetes.image:
        yield ConfigError(
            "cluster.kubernetes.image=null: pods need an image with hlatctl in this version",
            hint="build one from deploy/images, then cluster.kubernetes.image=REGISTRY/NAME@sha256:DIGEST",
        )
    yield from _runs_dir(config)


def _no_container(config: Config) -> Iterator[ConfigError]:
    if config.cluster.container.image:
        yield ConfigError(
            f"cluster.container.image={config.cluster.container.image}: is for Slurm",
            hint="set cluster.kubernetes.image, and cluster.container.image=null",
        )


def _object_names(config: Config) -> Iterator[ConfigError]:
    settings = config.cluster.kubernetes
    for key in _NAMED:
        value = getattr(settings, key)
        if value is not None and not _NAME.fullmatch(value):
            yield _invalid(key, value, "must be a name of lowercase letters, digits, '-' and '.'")
    for claim in settings.claims:
        if not _NAME.fullmatch(claim):
            yield _invalid(f"claims.{claim}", settings.claims[claim], "its name must be lowercase")


def _quantities(config: Config) -> Iterator[ConfigError]:
    settings = config.cluster.kubernetes
    for name, value in settings.resources.items():
        if not _QUANTITY.fullmatch(value):
            yield _invalid(f"resources.{name}", value, "must be a quantity, such as 8 or 64Gi")
    for name, value in config.eval.cluster.resources.items():
        if not _QUANTITY.fullmatch(value):
            yield ConfigError(
                f"eval.cluster.resources.{name}={value!r}: must be a quantity, such as 8 or 64Gi",
                hint=f"set eval.cluster.resources.{name} to a number with or without a unit",
            )
    if not _QUANTITY.fullmatch(settings.shared_memory):
        yield _invalid("shared_memory", settings.shared_memory, "must be a quantity, such as 64Gi")


def _folders(config: Config) -> Iterator[ConfigError]:
    settings, cache = config.cluster.kubernetes, config.cluster.worker_cache_dir
    folders = {f"claims.{claim}": folder for claim, folder in settings.claims.items()}
    if settings.cache_host_path is not None:
        folders["cache_host_path"] = settings.cache_host_path
    for key, folder in folders.items():
        if not Path(folder).is_absolute():
            yield _invalid(key, folder, "must be an absolute path")
    if not Path(cache).is_absolute():
        yield ConfigError(
            f"cluster.worker_cache_dir={cache}: must be an absolute path, because a volume is mounted there",
            hint="cluster.worker_cache_dir=/var/cache/hlatctl",
        )


def _runs_dir(config: Config) -> Iterator[ConfigError]:
    runs, folders = Path(config.runs_dir).absolute(), config.cluster.kubernetes.claims.values()
    if not any(runs.is_relative_to(folder) for folder in folders):
        mounted = next(iter(folders), None)
        add = "mount a shared volume as +cluster.kubernetes.claims.NAME=/PATH, and use runs_dir=/PATH/runs"
        yield ConfigError(
            f"runs_dir={config.runs_dir}: lies on no volume that all pods mount "
            f"(cluster.kubernetes.claims: {', '.join(folders) or 'none'})",
            hint=f"use runs_dir={mounted}/runs" if mounted else add,
        )


def _no_spare_nodes(config: Config) -> Iterator[ConfigError]:
    if config.cluster.spare_nodes:
        yield ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes}: with cluster.launcher=kubernetes the cluster's other "
            "nodes are the spare ones",
            hint="set cluster.spare_nodes=0",
        )


def _invalid(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"cluster.kubernetes.{key}={value!r}: {rule}", hint=f"correct cluster.kubernetes.{key}")


def of_kubernetes(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each rule of Kubernetes' settings that a configuration breaks."""
    for rule in (_no_container, _object_names, _quantities, _folders, _no_spare_nodes):
        yield from rule(config)
