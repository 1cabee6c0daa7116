"""The check of a whole configuration before any machine is used, and warnings for keys that have no effect.

The rules read only the configuration and never change a value; the validate stage checks what needs the disk, such as
the corpus. Rules of ``eval.*`` are here too. A key that has no effect with another key's value causes a warning, not an
error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from conf import cluster_rules, layouts, tracking
from conf.constraints import Range, violations
from conf.data_changes import batch_numbers
from conf.environment import SET_ELSEWHERE
from conf.listing import is_url
from conf.registries import BACKENDS, LAUNCHERS, OPTIMIZERS, SCHEDULES
from conf.schema import Config, EvalConfig
from conf.schema.data import is_named
from conf.sizes import SHARED_MEMORY_FRACTION, memory_copies_bytes
from conf.stages import stage_errors
from hlatctl.cache.trust import require_own
from hlatctl.run.errors import ConfigError, nearest, unset

#: Settings of generated answers that each runner supports, with type and bounds; names as in lm-evaluation-harness.
_GENERATION: dict[str, tuple[type, Range | None]] = {
    "do_sample": (bool, None),
    "temperature": (float, Range(gt=0)),
    "top_p": (float, Range(gt=0, le=1)),
    "min_p": (float, Range(ge=0, le=1)),
    "top_k": (int, Range(ge=0)),
    "repetition_penalty": (float, Range(gt=0)),
    "max_gen_toks": (int, Range(gt=0)),
    "until": (list, None),
}
#: Without ``do_sample`` they have no effect.
_OF_SAMPLING = ("temperature", "top_p", "min_p", "top_k")
#: The harness's tasks whose answers are programs, with the judge that tests them, and such tasks of a built-in suite.
CODE_TASKS: dict[str, Literal["human_eval", "mbpp"]] = {"humaneval": "human_eval", "mbpp": "mbpp"}
BUILT_IN_CODE_TASKS = {"smoke": ("smoke_humaneval",)}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", list: "a list of texts"}


def code_tasks(wanted: EvalConfig) -> list[str]:
    """Return the tasks of an evaluation whose answers are programs, which run only in a sandbox."""
    of_suite = [] if wanted.groups else list(BUILT_IN_CODE_TASKS.get(wanted.suite, ()))
    chosen = set(wanted.tasks)
    groups = [group for name, group in wanted.groups.items() if not chosen or name in chosen]
    named = [name for name in of_suite if not chosen or name in chosen]
    named += [name for group in groups if group.judge != "harness" for name in group.tasks]
    return list(dict.fromkeys([*named, *(name for name in wanted.tasks if name in CODE_TASKS)]))


def _limit(config: Config) -> Iterator[ConfigError]:
    limit = config.eval.limit
    if limit is None or (isinstance(limit, int) and limit > 0) or 0 < limit < 1:
        return
    hint = "eval.limit=null evaluates all items"
    if isinstance(limit, float) and limit > 1 and math.isfinite(limit):
        hint = f"eval.limit={int(limit)} evaluates {int(limit)} items of each task"
    yield ConfigError(
        f"eval.limit={limit}: must be a whole number greater than 0, or a fraction above 0 and below 1", hint=hint
    )


def _items(config: Config) -> Iterator[ConfigError]:
    for task, items in config.eval.items.items():
        key = f"eval.items.{task}"
        if not items:
            yield ConfigError(f"{key}=[]: must name an item", hint=f"all items: {unset(key)}")
        twice = next((item for item in items if items.count(item) > 1), None)
        if twice is not None:
            yield ConfigError(f"{key}: names item {twice} more than once", hint=f"list {twice} once")


def _chat(config: Config) -> Iterator[ConfigError]:
    if config.eval.chat_template == "":
        yield ConfigError(
            "eval.chat_template='': must be true, false or the name of a template",
            hint="eval.chat_template=true uses the tokenizer's own template",
        )
    if config.eval.system_prompt is not None and not config.eval.system_prompt.strip():
        yield ConfigError("eval.system_prompt: is empty", hint="eval.system_prompt=null uses none")


def _groups(config: Config) -> Iterator[ConfigError]:
    groups = config.eval.groups
    for name in (name for name, group in groups.items() if not group.tasks):
        key, near = f"eval.groups.{name}", nearest(name, [other for other, group in groups.items() if group.tasks])
        question = f"did you mean eval.groups.{near}? " if near else ""
        others = f"{key}.tasks=[TASK] names its tasks; ~{key} removes a group that the suite has"
        yield ConfigError(f"{key}.tasks=[]: must name a task", hint=question + others)


def _include_path(config: Config) -> Iterator[ConfigError]:
    for index, path in enumerate(config.eval.include_path):
        key = f"eval.include_path[{index}]={path}"
        if not path or is_url(path):
            yield ConfigError(f"{key}: must be a folder", hint="eval.include_path=[FOLDER]")


def require_own_tasks(place: Path, folder: Path) -> None:
    """Refuse a folder of ``eval.include_path``, or a file that its tasks use, that another user can write to.

    Raises:
        StorageError: names the place.
    """
    rule = "the task's templates and Python functions run with your rights, so that no other user may write there"
    hint = f"if you trust it: `chmod -R go-w {folder}`; or copy it to a folder of your own"
    require_own(place, rule, hint)


def _generation(config: Config) -> Iterator[ConfigError]:
    for name, group in config.eval.groups.items():
        settings, key = group.generation, f"eval.groups.{name}.generation"
        for setting, value in settings.items():
            yield from _setting(f"{key}.{setting}", setting, value)
        asks_code_often = group.judge != "harness" and config.eval.code.samples_per_problem > 1
        if settings.get("do_sample") is True and "temperature" not in settings and not asks_code_often:
            yield ConfigError(
                f"{key}.do_sample=true: needs a temperature; the harness's default of 0 can't be sampled",
                hint=f"{key}.temperature=0.8",
            )
        idle = [setting for setting in _OF_SAMPLING if setting in settings]
        if idle and settings.get("do_sample") is not True:
            yield ConfigError(
                f"{key}.{idle[0]}={settings[idle[0]]}: has no effect without {key}.do_sample=true",
                hint=f"{key}.do_sample=true samples the answers",
            )


def _setting(key: str, name: str, value: Any) -> Iterator[ConfigError]:
    if name not in _GENERATION:
        yield ConfigError(f"{key}: unknown key", hint=f"known here: {', '.join(_GENERATION)}")
        return
    kind, bounds = _GENERATION[name]
    right = type(value) is kind or (kind is float and type(value) is int)
    if kind is list:
        right = right and bool(value) and all(isinstance(text, str) and text for text in value)
    if not right or (kind is float and not math.isfinite(value)):
        yield ConfigError(f"{key}={value}: must be {_WORDS[kind]}", hint=f"the tasks' own: {unset(key)}")
    elif bounds and value not in bounds:
        yield ConfigError(f"{key}={value}: must be {bounds}", hint=f"the tasks' own: {unset(key)}")


def _weights(config: Config) -> Iterator[ConfigError]:
    if config.eval.weights == "ema" and config.optimizer.ema_decay is None:
        yield ConfigError(
            "eval.weights=ema: the run keeps no average of its weights",
            hint="eval.weights=trained; or set optimizer.ema_decay=0.999 for a new run",
        )


EVAL_RULES = (_weights, _limit, _items, _chat, _groups, _include_path, _generation)


#: Suites whose items are in the package; every other suite lists its groups of tasks.
_BUILT_IN_SUITES = ("smoke",)
#: The suites generate up to 96 tokens; the remaining context must have room for a prompt.
_MIN_EVAL_SEQ_LEN = 128
#: Each milestone keeps a checkpoint and needs an evaluation; a larger number is a typing error.
_MAX_MILESTONES = 1000
#: A run id adds 21 characters to it, and has at most 100.
_MAX_NAME_CHARS = 79


def validate(config: Config, *, to_start: bool = True) -> None:
    """Check every rule.

    Args:
        to_start: also check what only a start needs (:func:`missing_to_start`).

    Raises:
        ConfigError: the first broken rule: dotted key, value, rule, the other value, hint.
    """
    for error in (error for rule in _RULES for error in rule(config)):
        raise error
    for error in stage_errors(config, _RULES):
        raise error
    for error in missing_to_start(config) if to_start else ():
        raise error


def missing_to_start(config: Config) -> list[ConfigError]:
    """Return why jobs can't be started with a configuration although it can be planned."""
    rules = LAUNCHERS.part(config.cluster.launcher, "start_rules")
    return unsupported(config) + (list(rules(config)) if rules else [])


def unsupported(config: Config) -> list[ConfigError]:
    """Return why the backend can't train a layout that a plan can describe."""
    configs = [stage.config for stage in config.stages] or [config]
    return [error for of in configs for rule in layouts.UNSUPPORTED for error in rule(of)]


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
    yield from _memory_copies(config)
    remote_url = config.checkpoint.remote_url
    if remote_url is not None and not re.fullmatch(r"[a-z0-9+]+://[^\s?#]+", remote_url):
        yield ConfigError(
            f"checkpoint.remote_url={remote_url}: must be the URL of a folder in object storage",
            hint="use one such as s3://bucket/folder, or set checkpoint.remote_url=null",
        )


def _memory_copies(config: Config) -> Iterator[ConfigError]:
    every, off = config.checkpoint.memory_every_steps, "set checkpoint.memory_every_steps=null"
    if every is None:
        return
    key = f"checkpoint.memory_every_steps={every}"
    if not LAUNCHERS[config.cluster.launcher].keeps_memory:
        keeping = ", ".join(name for name, row in LAUNCHERS.built_in.items() if row.keeps_memory)
        yield ConfigError(
            f"{key}: cluster.launcher={config.cluster.launcher} keeps nothing in a node's memory between attempts; "
            f"these do: {keeping}",
            hint=off,
        )
    if every >= config.checkpoint.every_steps:
        yield ConfigError(
            f"{key}: must be less than checkpoint.every_steps={config.checkpoint.every_steps}, because a restart takes "
            "the newest of both",
            hint=f"{off}, or use a smaller number or a larger checkpoint.every_steps",
        )
    needed, there = memory_copies_bytes(config), config.cluster.hardware.node_memory_bytes
    if there is not None and needed > there * SHARED_MEMORY_FRACTION:
        yield ConfigError(
            f"{key}: the copies need {needed} bytes of each node, more than half of "
            f"cluster.hardware.node_memory_bytes={there}",
            hint=f"{off}, or use more nodes",
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
    launcher = config.cluster.launcher
    if config.cluster.jobs_run == "here" and config.cluster.nodes != 1:
        yield ConfigError(
            f"cluster.nodes={config.cluster.nodes}: cluster.launcher={launcher} runs on this machine only",
            hint="set cluster.nodes=1",
        )


def _capacity(config: Config) -> Iterator[ConfigError]:
    cluster, example = config.cluster, "such as 2026-12-01T11:30Z"
    try:
        _ = cluster.capacity_ends_unix_s
    except ValueError:
        key = f"cluster.capacity_ends={cluster.capacity_ends}"
        yield ConfigError(f"{key}: must be a date and time with its time zone, {example}", hint=f"write it {example}")
    url = cluster.metadata_url
    found = re.fullmatch(r"http://(?:[\w.-]+|\[[0-9A-Fa-f:]+\])(?::(\d{1,5}))?/?", url or "", re.ASCII)
    if url is not None and (found is None or int(found[1] or 80) > 65535):
        yield ConfigError(
            f"cluster.metadata_url={url}: must be http:// and a host, without a path",
            hint="on EC2 it is http://169.254.169.254",
        )


def _budget(config: Config) -> Iterator[ConfigError]:
    if config.budget.usd is not None and not config.cluster.price_usd_per_node_hour:
        yield ConfigError(
            f"budget.usd={config.budget.usd:g}: can't be counted without cluster.price_usd_per_node_hour",
            hint="set the price of a node, or use budget.node_hours",
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
    if flags and not config.backend.kind.torch_xla:
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
        names = [other.name for other in data.sources[:index]]
        if source.name is not None and source.name in names:
            yield ConfigError(f"{key}.name={source.name}: another source has this name", hint="use another")
    for name in data.weights:
        meant = [source.path for source in data.sources if is_named(source, name)]
        if len(meant) != 1:
            yield ConfigError(
                f"data.weights.{name}: means {len(meant)} of the data.sources, must mean one",
                hint=f"the sources are {', '.join(s.name or s.path for s in data.sources) or 'not listed'}",
            )
    if data.weights and not any(data.weights.values()):
        yield ConfigError("data.weights: all are 0", hint="give one source a weight above 0")


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
    *layouts.PIPELINE_RULES,
    _fork,
    _milestones,
    _checkpoints,
    _context,
    _suite,
    *EVAL_RULES,
    _runner,
    _cluster,
    _budget,
    _capacity,
    *cluster_rules.RULES,
    _urls,
    _sources,
    _skipped,
    _environment,
    _compiler_flags,
    tracking.notify_entries,
    tracking.mirror_entries,
)


@dataclass(frozen=True)
class Dependence:
    """Keys that have an effect only under a condition.

    Args:
        keys: names, or groups that end with a dot.
        needs: the condition, as overrides.
        holds: whether it holds.
    """

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[Config], bool]


_DEPENDENCES = (
    Dependence(
        ("parallel.pipeline_schedule",),
        "parallel.pipeline_parallel_size=2 or more",
        lambda config: config.parallel.pipeline_parallel_size > 1,
    ),
    Dependence(
        ("parallel.pipeline_chunks",),
        "parallel.pipeline_schedule=interleaved_1f1b",
        lambda config: config.parallel.pipeline_schedule == "interleaved_1f1b",
    ),
    Dependence(
        ("parallel.activation_memory_budget",),
        "parallel.activation_checkpointing=budget",
        lambda config: config.parallel.activation_checkpointing == "budget",
    ),
    Dependence(
        ("model.rope_scaling_factor", "model.rope_original_seq_len"),
        "model.rope_scaling=llama3 or yarn",
        lambda config: config.model.rope_scaling != "none",
    ),
    Dependence(
        ("model.rope_low_freq_factor", "model.rope_high_freq_factor"),
        "model.rope_scaling=llama3",
        lambda config: config.model.rope_scaling == "llama3",
    ),
    Dependence(
        ("model.rope_beta_slow", "model.rope_beta_fast"),
        "model.rope_scaling=yarn",
        lambda config: config.model.rope_scaling == "yarn",
    ),
    Dependence(
        (
            "model.flavor",
            "model.total_parameters",
            "model.active_parameters",
            "model.flops_per_token",
            "model.score_flops_per_token",
        ),
        "model.module=NAME",
        lambda config: config.model.module is not None,
    ),
    Dependence(
        (
            "model.experts_per_token",
            "model.expert_intermediate_size",
            "model.num_shared_experts",
            "model.num_dense_layers",
            "model.router_score",
            "model.normalize_router_weights",
            "model.router_scale",
            "model.router_groups",
        ),
        "model.num_experts=8 or more",
        lambda config: config.model.num_experts > 0,
    ),
    Dependence(
        ("model.router_limited_groups",),
        "model.router_groups=NUMBER",
        lambda config: config.model.num_experts > 0 and config.model.router_groups is not None,
    ),
    Dependence(
        ("model.q_lora_rank", "model.qk_nope_head_dim", "model.qk_rope_head_dim", "model.v_head_dim"),
        "model.kv_lora_rank=NUMBER",
        lambda config: config.model.kv_lora_rank is not None,
    ),
    Dependence(("model.head_dim",), "model.kv_lora_rank=null", lambda config: config.model.kv_lora_rank is None),
    Dependence(("tokenizer.train_vocab_size",), "tokenizer.path=null", lambda config: config.tokenizer.path is None),
    Dependence(("train.tokens",), "train.stages=[]", lambda config: not config.train.stages),
    Dependence(
        ("train.max_nonfinite_steps",), "train.on_nonfinite=skip", lambda config: config.train.on_nonfinite == "skip"
    ),
    Dependence(
        ("checkpoint.remote_keep",),
        "checkpoint.remote_url=URL",
        lambda config: config.checkpoint.remote_url is not None,
    ),
)


def _dependences() -> Iterator[Dependence]:
    """Yield all dependences, also those of keys that only some optimizers, schedules or launchers read."""
    yield from _DEPENDENCES
    for needs, kinds in (("optimizer", OPTIMIZERS.built_in), ("optimizer.schedule", SCHEDULES.built_in)):
        for name, kind in kinds.items():
            yield Dependence(
                tuple(f"optimizer.{key}" for key in kind.settings), f"{needs}={name}", partial(_reads, kind.settings)
            )
    for key in dict.fromkeys(key for kind in BACKENDS.built_in.values() for key in kind.ignores):
        reads = next(name for name, kind in BACKENDS.built_in.items() if key not in kind.ignores)
        yield Dependence((key,), f"backend={reads}", partial(_backend_reads, key))
    for name, launcher in LAUNCHERS.built_in.items():
        if launcher.settings:
            yield Dependence((launcher.settings,), f"cluster.launcher={name}", partial(_may_read, launcher.settings))


def _reads(keys: tuple[str, ...], config: Config) -> bool:
    optimizer, schedule = OPTIMIZERS[config.optimizer.name], SCHEDULES[config.optimizer.schedule]
    return {*keys} <= {*optimizer.settings, *schedule.settings}


def _backend_reads(key: str, config: Config) -> bool:
    return key not in config.backend.kind.ignores


def _may_read(group: str, config: Config) -> bool:
    """Return whether jobs run on a launcher with these settings, or a simulation may represent it."""
    launcher = LAUNCHERS[config.cluster.launcher]
    return launcher.settings == group or launcher.jobs_run == "nowhere"


def without_effect(config: Config, keys: Iterable[str]) -> list[str]:
    """Return a warning for each key that has no effect in a configuration.

    Args:
        keys: keys that a person set, such as ``optimizer.momentum``.
    """
    return [
        f"{key}: has no effect without {dependence.needs}"
        for key in dict.fromkeys(keys)
        for dependence in _dependences()
        if _covers(dependence.keys, key) and not dependence.holds(config)
    ]


def _covers(keys: Sequence[str], key: str) -> bool:
    return key in keys or any(name.endswith(".") and key.startswith(name) for name in keys)
