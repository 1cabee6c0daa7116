"""The check of a whole configuration, before any machine is touched.

Read only the configuration, and never change a value. The validate stage checks what needs the disk, such as the
corpus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from conf import eval_rules, kubernetes_rules, layouts, mirrors, notify_urls, pipeline_rules, slurm_rules
from conf.amend import batch_numbers
from conf.constraints import violations
from conf.environment import SET_ELSEWHERE
from conf.listing import is_url
from conf.schema import Config
from hlatctl.run.errors import ConfigError
from hlatctl.run.suggest import unset

#: Suites whose items the package contains; every other suite lists its groups of tasks.
_BUILT_IN_SUITES = ("smoke",)
#: The suites generate up to 96 tokens; the rest must hold a prompt.
_MIN_EVAL_SEQ_LEN = 128
#: Each keeps a checkpoint and needs an evaluation; more are a typing error.
_MAX_MILESTONES = 1000
#: A run id adds 21 characters to it, and has at most 100.
_MAX_NAME_CHARS = 79


def validate(config: Config, *, to_start: bool = True) -> None:
    """Check every rule.

    Args:
        config: to check.
        to_start: also what only a start needs (:func:`missing_to_start`).

    Raises:
        ConfigError: the first broken rule: dotted key, value, rule, the other value, hint.
    """
    for rule in _RULES:
        for error in rule(config):
            raise error
    for error in missing_to_start(config) if to_start else ():
        raise error


def missing_to_start(config: Config) -> list[ConfigError]:
    """Return why no jobs can be started with a configuration, although it can be planned."""
    return unsupported(config) + [error for rule in kubernetes_rules.TO_START for error in rule(config)]


def unsupported(config: Config) -> list[ConfigError]:
    """Return why the backend can't train a layout that a plan can describe."""
    return [error for rule in pipeline_rules.UNSUPPORTED for error in rule(config)]


def _milestones(config: Config) -> Iterator[ConfigError]:
    if config.eval.enabled and config.eval.every_tokens < config.tokens_per_step:
        yield ConfigError(
            f"eval.every_tokens={config.eval.every_tokens}: below the {config.tokens_per_step} tokens of one step "
            "(train.global_batch_size x train.seq_len)",
            hint=f"use at least {config.tokens_per_step}, or eval.enabled=false",
        )

    every = config.eval.every_tokens
    count = config.total_tokens // every - config.fork.tokens // every
    if config.eval.enabled and count > _MAX_MILESTONES:
        yield ConfigError(
            f"eval.every_tokens={config.eval.every_tokens}: gives {count} milestones in {config.total_tokens} tokens; "
            f"at most {_MAX_MILESTONES} are allowed, because each keeps a checkpoint",
            hint=f"use at least {math.ceil(config.total_tokens / _MAX_MILESTONES)}",
        )


def _fork(config: Config) -> Iterator[ConfigError]:
    fork = config.fork
    if config.total_steps <= fork.step:
        steps = f" train.max_steps={fork.step + 100}" * (config.train.max_steps is not None)
        yield ConfigError(
            f"train.tokens={config.train.tokens}, train.max_steps={config.train.max_steps}: the run begins after step "
            f"{fork.step} with {fork.tokens} tokens, so there is nothing left to train",
            hint=f"train.tokens={fork.tokens + 100 * config.tokens_per_step}{steps} trains 100 steps",
        )


def _checkpoints(config: Config) -> Iterator[ConfigError]:
    every, fast_dir = config.checkpoint.keep_every_tokens, config.checkpoint.fast_dir
    if every is not None and every < config.tokens_per_step:
        yield ConfigError(
            f"checkpoint.keep_every_tokens={every}: below the {config.tokens_per_step} tokens of one step "
            "(train.global_batch_size x train.seq_len)",
            hint=f"use at least {config.tokens_per_step}",
        )
    if fast_dir is not None and not fast_dir.startswith(("/", "~")):
        yield ConfigError(
            f"checkpoint.fast_dir={fast_dir}: must be an absolute path, because each worker resolves it",
            hint="start it with / or ~",
        )
    if fast_dir is not None and config.cluster.nodes > 1:
        yield ConfigError(
            f"checkpoint.fast_dir={fast_dir}: with cluster.nodes={config.cluster.nodes} no node would have all files "
            "of a checkpoint on its own disk",
            hint="set checkpoint.fast_dir=null",
        )
    mirror_url = config.checkpoint.mirror_url
    if mirror_url is not None and not re.fullmatch(r"[a-z0-9+]+://[^\s?#]+", mirror_url):
        yield ConfigError(
            f"checkpoint.mirror_url={mirror_url}: must be the URL of a folder in object storage",
            hint="use one such as s3://bucket/folder, or set checkpoint.mirror_url=null",
        )


def _context(config: Config) -> Iterator[ConfigError]:
    if config.eval.enabled and config.train.seq_len < _MIN_EVAL_SEQ_LEN:
        yield ConfigError(
            f"train.seq_len={config.train.seq_len}: too short for evaluation, which needs at least {_MIN_EVAL_SEQ_LEN}",
            hint="use a longer train.seq_len, or eval.enabled=false",
        )


def _runner(config: Config) -> Iterator[ConfigError]:
    wanted = config.eval
    if wanted.runner == "hf":
        return
    only_hf = {
        "replicas": wanted.replicas > 1,
        "batch_size": wanted.batch_size == "auto",
        "share_prefixes": wanted.share_prefixes,
    }
    for key in (key for key, is_set in only_hf.items() if is_set):
        yield layouts.not_together(
            f"eval.{key}={getattr(wanted, key)}", f"eval.runner={wanted.runner}", "only hf has this setting"
        )


def _suite(config: Config) -> Iterator[ConfigError]:
    if not config.eval.groups and config.eval.suite not in _BUILT_IN_SUITES:
        yield ConfigError(
            f"eval.suite={config.eval.suite}: is not built in and lists no eval.groups",
            hint="use eval=smoke, eval=early, eval=hlat_core or eval=hlat, or list eval.groups",
        )


def _cluster(config: Config) -> Iterator[ConfigError]:
    if config.cluster.launcher == "local" and config.cluster.nodes != 1:
        yield ConfigError(
            f"cluster.nodes={config.cluster.nodes}: cluster.launcher=local runs on this machine only",
            hint="set cluster.nodes=1",
        )


def _environment(config: Config) -> Iterator[ConfigError]:
    for name in config.backend.env:
        key = f"backend.env.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield ConfigError(f"{key}: is not a valid name of an environment variable")
        elif name in SET_ELSEWHERE:
            yield ConfigError(f"{key}: is set by {SET_ELSEWHERE[name]}", hint=unset(key))


def _compiler_flags(config: Config) -> Iterator[ConfigError]:
    flags = config.backend.compiler_flags
    if flags and config.backend.name != "nxd":
        yield layouts.not_together(
            f"backend.compiler_flags=[{', '.join(flags)}]",
            f"backend.name={config.backend.name}",
            "only backend.name=nxd passes them to neuronx-cc",
        )
    for index, flag in enumerate(flags):
        key = f"backend.compiler_flags[{index}]={flag}"
        if not flag or flag.split() != [flag]:
            yield ConfigError(f"{key}: must be one word", hint="write --name=value")
        if flag.startswith(("--cache_dir", "--no_cache")):
            yield ConfigError(f"{key}: cluster.worker_cache_dir sets the cache's folder")


def _sources(config: Config) -> Iterator[ConfigError]:
    data = config.data
    if data.sources and data.path is not None:
        yield ConfigError(
            f"data.path={data.path}: given together with data.sources",
            hint="name every corpus in data.sources, and set data.path=null",
        )
    first: dict[str, int] = {}
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}]"
        if not source.path:
            yield ConfigError(f"{key}.path: missing", hint="data.sources=[{path:FOLDER,weight:2},{path:OTHER}]")
        if first.setdefault(source.path, index) != index:
            yield ConfigError(
                f"{key}.path={source.path}: is the same as data.sources[{first[source.path]}].path",
                hint="list it once, with the sum of the weights",
            )


def _urls(config: Config) -> Iterator[ConfigError]:
    inputs: dict[str, str | None] = {
        "tokenizer.path": config.tokenizer.path,
        "eval.data_dir": config.eval.data_dir,
        "train.init_from": config.train.init_from,
    }
    outputs = {"runs_dir": config.runs_dir, "cluster.worker_cache_dir": config.cluster.worker_cache_dir}
    for key, path in {**inputs, **outputs}.items():
        if path and is_url(path):
            copy = "copy or mount it where every node can read it, and set"
            hint = f"set {key} to a folder" if key in outputs else f"{copy} {key} to that path"
            yield ConfigError(f"{key}={path}: must be a path, not a URL", hint=hint)


def _skipped(config: Config) -> Iterator[ConfigError]:
    try:
        batch_numbers(config.data.skip_steps)
    except ConfigError as error:
        yield error


def _names(config: Config) -> Iterator[ConfigError]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.experiment_name):
        yield ConfigError(
            f"experiment_name={config.experiment_name!r}: must be letters, digits, '.', '_' and '-' only, "
            "because folders are named after it"
        )
    if not re.fullmatch(r"0?7[0-7][0145]", config.runs_mode):
        yield ConfigError(
            f"runs_mode={config.runs_mode}: must be a chmod mode with all permissions for the owner (7) and "
            "no write permission for others",
            hint="runs_mode=0700 is private, with 0750 the group can read, with 0770 also write",
        )
    if len(config.experiment_name) > _MAX_NAME_CHARS:
        yield ConfigError(
            f"experiment_name={config.experiment_name[:20]}…: has {len(config.experiment_name)} characters, must have "
            f"at most {_MAX_NAME_CHARS}, because folders are named after it"
        )
    if not config.runs_dir:
        yield ConfigError("runs_dir='': must name a folder", hint="runs_dir=runs is the default")


def _registered_model(config: Config) -> Iterator[ConfigError]:
    name = config.tracking.register_model
    if name is not None and (not name.strip() or re.search("[/:]", name) or name == "." or name.startswith("..")):
        yield ConfigError(
            f"tracking.register_model={name!r}: must be a name without '/' and ':', and must not begin with '..', "
            "because MLflow's model registry allows no other",
            hint="tracking.register_model=hlat-7b, or tracking.register_model=null",
        )


_RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (
    violations,
    _names,
    _registered_model,
    *layouts.RULES,
    *pipeline_rules.RULES,
    _fork,
    _milestones,
    _checkpoints,
    _context,
    _suite,
    *eval_rules.RULES,
    _runner,
    _cluster,
    *slurm_rules.RULES,
    _urls,
    *kubernetes_rules.RULES,
    _sources,
    _skipped,
    _environment,
    _compiler_flags,
    notify_urls.entries,
    mirrors.entries,
)
