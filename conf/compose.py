"""Composition of a configuration from YAML groups and overrides, in Hydra's grammar.

A configuration that contains a secret is refused before anything is created, because config.yaml stores every value.
Errors name the key and never repeat the value; ``hlatctl.run.redact`` defines what looks like a secret.

The schema's defaults are stored in Hydra's ConfigStore as plain values, because OmegaConf makes frozen dataclasses
read-only and rejects ``Literal``. Hydra refuses unknown keys, and ``conf.load.decode`` checks types.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf import folders, tracking
from conf.listing import is_url
from conf.load import decode, flatten, parse_yaml
from conf.registries import BACKENDS
from conf.schema import CodeConfig, Config, EvalConfig
from conf.validate import validate
from hlatctl.run.errors import ConfigError, nearest, suggest
from hlatctl.run.redact import is_secret_name, secret_in

RUNS_DIR_ENV = "HLATCTL_RUNS_DIR"
CONF_DIR = folders.OURS
#: More processes don't speed up training, because they share the machine's memory bandwidth.
_MAX_LOCAL_PROCESSES = 16
#: Limit of the characters that all ``${KEY}`` of a configuration insert. Each counts as 100 more characters, and a
#: group of keys as 10,000. One inside the value of another counts as 2,000, because OmegaConf parses it each time.
_MAX_INSERTED_CHARACTERS = 1_000_000
#: Hydra's parser takes quadratic time, 2 s for this many marks, and recurses.
_MAX_MARKS, _MAX_DEPTH = 5_000, 100
#: Mappings whose entries have free names; an override may add entries and keys, which ``decode`` checks.
_MAPPINGS = ("eval.groups", "eval.items", "backend.torchtitan")


def compose(overrides: Sequence[str] = (), folder: Path | None = None, *, to_start: bool = True) -> Config:
    """Compose, decode and validate a configuration.

    Args:
        overrides: Hydra overrides, such as ``["experiment=quickstart", "train.tokens=100000"]``.
        folder: base of relative paths; None: the working directory.
        to_start: also check what only a start needs, not only what a plan needs.

    Raises:
        ConfigError: unknown key or group (with the nearest match), bad grammar, wrong type, or a broken rule.
    """
    return finish(compose_plain(list(overrides)), folder, to_start=to_start)


def finish(plain: dict[str, Any], folder: Path | None = None, *, to_start: bool = True) -> Config:
    """Return the typed, validated configuration of composed plain values.

    Raises:
        ConfigError: a secret, a wrong type, or a broken rule.
    """
    check_values(plain)  # first, because other errors repeat the value
    return _typed(plain, folder, to_start=to_start)


def _typed(plain: dict[str, Any], folder: Path | None = None, *, to_start: bool = True) -> Config:
    config = _counted(_resolve_paths(decode(plain), folder))
    validate(config, to_start=to_start)
    return config


def _counted(config: Config) -> Config:
    """Return a configuration with the counts of a model of ``model.module``, which only its backend knows."""
    model = config.model
    if not model.module or not model.flavor or model.total_parameters is not None:
        return config
    count = BACKENDS.part(config.backend.name, "counts")
    return config if count is None else count(config)


def override_eval(config: Config, overrides: Sequence[str]) -> Config:
    """Return a run's configuration with other settings of its evaluation.

    Args:
        overrides: overrides of ``eval`` and its keys. ``eval=SUITE`` replaces the run's suite; the run's other
            settings of evaluations (data folder, batch size, limits) stay.

    Raises:
        ConfigError: as :func:`compose`, or an override of another key.
    """
    keys = [override.lstrip("+~").split("=")[0] for override in overrides]
    for key in keys:
        if key != "eval" and not key.startswith("eval."):
            raise ConfigError(
                f"{key}: is fixed by the run; its evaluation can change eval.* only",
                hint="such as eval=hlat_core, eval.limit=100, eval.tasks=[piqa]",
            )
    if "eval" in keys:
        code = dataclasses.replace(config.eval.code, samples_per_problem=CodeConfig().samples_per_problem)
        config = dataclasses.replace(
            config,
            eval=dataclasses.replace(config.eval, suite=EvalConfig().suite, groups={}, tasks=[], items={}, code=code),
        )
    added = [f"+{override}" if override.startswith("eval=") else override for override in overrides]
    return _typed(compose_plain(added, of_run=config))


def amend(config: Config, overrides: Sequence[str]) -> Config:
    """Return a run's configuration with some values changed.

    Args:
        overrides: as for :func:`compose`. An option of a group, such as ``backend=cpu``, replaces the whole group;
            ``eval=SUITE`` keeps the settings that :func:`override_eval` keeps.

    Raises:
        ConfigError: as :func:`compose`; or an override of ``experiment``.
    """
    for override in overrides:
        key, _, option = override.lstrip("+~").partition("=")
        if key == "experiment":
            raise ConfigError(
                f"experiment={option}: belongs to a new run", hint="name the keys to change, such as optimizer.lr=1e-4"
            )
        if key == "eval":
            config = override_eval(config, [override])
        elif key in groups():
            default: Any = getattr(Config(), key)
            config = dataclasses.replace(config, **{key: default})
    added = [f"+{o}" if o.split("=")[0] in groups() else o for o in overrides if o.split("=")[0] != "eval"]
    return finish(compose_plain(added, of_run=config))


def groups() -> dict[str, list[str]]:
    """Return the configuration groups with their built-in and user options."""
    found: dict[str, set[str]] = {}
    for folder in (CONF_DIR, *folders.user_folders()):
        for group, names in folders.options(folder).items():
            found.setdefault(group, set()).update(names)
    return {group: sorted(found[group]) for group in sorted(found) if group not in folders.APART}


def default_options() -> dict[str, str]:
    """Return the option of each group that is used if none is given."""
    root = parse_yaml((CONF_DIR / "config.yaml").read_text(encoding="utf-8"))
    return {group: option for entry in root["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def default_runs_dir() -> Path:
    """Return the default runs folder: ``$HLATCTL_RUNS_DIR``, ``runs_dir`` of a ``hlatctl.yaml``, or ``./runs``.

    Raises:
        ConfigError: a ``hlatctl.yaml`` can't be used.
    """
    return Path(os.environ.get(RUNS_DIR_ENV) or folders.project_runs_dir() or "runs").expanduser().absolute()


def compose_plain(overrides: list[str], of_run: Config | None = None) -> dict[str, Any]:
    """Compose plain values, unchecked, from a run's configuration if given, otherwise from the YAML files.

    Raises:
        ConfigError: unknown key or group, bad grammar, or a secret.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_overrides(overrides)
    _check_options(overrides)
    if of_run is None:
        overrides = with_defaults(overrides)
    store = ConfigStore.instance()
    store.store(name="schema", node=dataclasses.asdict(of_run or Config()), provider="conf.schema")
    store.store(name="of_run", node={"defaults": ["schema", "_self_"]}, provider="conf.compose")
    root = "of_run" if of_run else "config"
    overrides = [f"++{text}" if text.startswith(_MAPPINGS) else text for text in overrides]
    try:
        if folders.user_folders():
            folders.require_options([path for path, _ in composed_files(overrides, root)])
        with initialize_config_dir(config_dir=os.fspath(CONF_DIR), version_base="1.3"), _only_our_resolvers():
            composed = hydra_compose(root, overrides=[*overrides, *search_path()])
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra on `model=null`
        raise explain(error, overrides, of_run) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def with_defaults(typed: list[str]) -> list[str]:
    """Return the overrides with those of the user's ``hlatctl.yaml`` in front; overrides on the command line win.

    Raises:
        ConfigError: a user's folder can't be used, or contains a secret.
    """
    folders.checked_folders()
    project = list(folders.project_overrides(typed))
    check_overrides(project)
    _check_options(project)
    runs_dir = None if os.environ.get(RUNS_DIR_ENV) else folders.project_runs_dir()
    if runs_dir and not any(text.startswith("runs_dir=") for text in typed):
        project.insert(0, f"runs_dir={quoted(runs_dir)}")
    return [*project, *typed]


def composed_files(overrides: list[str], root: str = "config") -> list[tuple[Path, str]]:
    """Return the YAML files that Hydra composes for these overrides, in its order, each with its dotted package.

    Args:
        overrides: include those of the user's ``hlatctl.yaml``.
        root: the configuration that composition begins with.

    Raises:
        HydraException: an option or group is unknown.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    places = [CONF_DIR, *folders.checked_folders()]
    with initialize_config_dir(config_dir=os.fspath(CONF_DIR), version_base="1.3"), _only_our_resolvers():
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(root, [*overrides, *search_path()], RunMode.RUN).defaults
    found = []
    for default in defaults:
        candidates = [place / f"{default.config_path}.yaml" for place in places]
        if path := next((path for path in candidates if path.is_file()), None):
            found.append((path, default.package or ""))
    return found


@contextmanager
def _only_our_resolvers() -> Iterator[None]:
    """Let ``${NAME:…}`` call only the functions listed here, and limit what ``${KEY}`` inserts.

    The table of functions is replaced, so it doesn't matter how a name is written or computed. OmegaConf's own
    functions read any environment variable, which would be stored resolved. References that contain references can
    double the text at each level.
    """
    from omegaconf import Container, OmegaConf
    from omegaconf.basecontainer import BaseContainer
    from omegaconf.errors import InterpolationResolutionError

    known, resolve = BaseContainer._resolvers, BaseContainer._resolve_node_interpolation
    kept, inserted, depth = dict(known), 0, 0

    def bounded(container: BaseContainer, inter_key: str, memo: set[int] | None) -> Any:
        nonlocal inserted, depth
        depth += 1
        try:
            node = resolve(container, inter_key, memo)
        finally:
            depth -= 1
        once = 2_000 if depth else 100
        inserted += 10_000 if isinstance(node, Container) else once + len(str(node._value()))
        if inserted > _MAX_INSERTED_CHARACTERS:
            raise InterpolationResolutionError("Values that refer to each other with ${...} become too long")
        return node

    known.clear()
    try:
        OmegaConf.register_new_resolver("local_processes", local_processes)
        OmegaConf.register_new_resolver("oc.env", _environment)
        BaseContainer._resolve_node_interpolation = bounded  # type: ignore[assignment, method-assign]
        yield
    finally:
        BaseContainer._resolve_node_interpolation = resolve  # type: ignore[method-assign]
        known.clear()
        known.update(kept)


def _environment(variable: str, default: str = "") -> str:
    """Return the only variable that a configuration may read; conf/config.yaml does so."""
    from omegaconf.errors import UnsupportedInterpolationType

    if variable != RUNS_DIR_ENV:
        raise UnsupportedInterpolationType(f"Unsupported interpolation type oc.env:{variable}")
    return os.environ.get(variable, default)


def search_path() -> list[str]:
    """Return the override that lets Hydra find the user's folders.

    Raises:
        ConfigError: a folder can't be used.
    """
    places = [quoted(f"file://{folder}") for folder in folders.checked_folders()]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def quoted(text: str) -> str:
    """Return a text as Hydra's grammar quotes it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\'", text)
    return f"'{escaped}'"


def check_size(override: str) -> None:
    """Refuse an override that Hydra's parser can't read in seconds.

    Raises:
        ConfigError: it has too many values, or is nested too deep.
    """
    depth = deepest = 0
    for char in override:
        depth += (char in "[{(") - (char in "]})")
        deepest = max(deepest, depth)
    key = override.partition("=")[0][:100]
    if deepest > _MAX_DEPTH:
        raise ConfigError(f"{key}: its value is nested deeper than {_MAX_DEPTH} levels", hint="write a flatter value")
    if sum(map(override.count, "[{(,:=$")) > _MAX_MARKS:
        raise ConfigError(
            f"{key}: its value has more than {_MAX_MARKS:,} commas, colons and brackets",
            hint="write it in a YAML file of a folder for --config-dir",
        )


def _check_options(overrides: Sequence[str]) -> None:
    """Refuse words that aren't overrides, overrides of Hydra itself, overrides that are too long, and paths."""
    known = groups()
    for text in overrides:
        check_size(text)
        key, equals, value = text.lstrip("+~").partition("=")
        if not key or not (equals or text.startswith("~")):
            raise ConfigError(
                f"OVERRIDES={text}: must be KEY=VALUE",
                hint="such as train.tokens=100M; `hlatctl config keys` lists the keys",
            )
        if key.partition(".")[0].partition("/")[0] == "hydra":
            raise ConfigError(f"{text}: Hydra's own settings are fixed", hint="--config-dir names folders of options")
        if key.partition(".")[0] == folders.SIMULATION:
            raise ConfigError(
                f"{text}: describes the simulated cluster of a new dry run or of a forecast",
                hint="add --dry-run to `hlatctl train` or `hlatctl sweep`, or use `hlatctl forecast`",
            )
        group = key.partition("@")[0]
        if group in known and ("/" in value or ".." in value) and not value.startswith("{"):
            raise _unknown_option(group, value)


def local_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_processes(runs: int = 1) -> int:
    """Return the number of training processes per run if this machine trains this many runs simultaneously.

    It is the largest power of two within the run's share of the usable cores, from 1 to 16.
    """
    share = max(1, local_cores() // runs)
    return min(1 << (share.bit_length() - 1), _MAX_LOCAL_PROCESSES)


def _resolve_paths(config: Config, folder: Path | None = None) -> Config:
    """Make paths absolute, because a run may be resumed from another working directory; URLs stay as they are."""

    def absolute(path: str | None) -> str | None:
        if path and is_url(path):
            return path
        return os.fspath((folder or Path.cwd()) / Path(path).expanduser()) if path else None

    return dataclasses.replace(
        config,
        runs_dir=absolute(config.runs_dir) or "",
        data=dataclasses.replace(
            config.data,
            path=absolute(config.data.path),
            sources=[dataclasses.replace(s, path=absolute(s.path) or "") for s in config.data.sources],
        ),
        tokenizer=dataclasses.replace(config.tokenizer, path=absolute(config.tokenizer.path)),
        eval=dataclasses.replace(
            config.eval,
            data_dir=absolute(config.eval.data_dir),
            include_path=[absolute(path) or "" for path in config.eval.include_path],
        ),
        train=dataclasses.replace(config.train, init_from=absolute(config.train.init_from)),
        cluster=dataclasses.replace(config.cluster, worker_cache_dir=absolute(config.cluster.worker_cache_dir) or ""),
    )


#: OmegaConf's message about ``${NAME:…}`` with a name that is not in its table.
_UNKNOWN_RESOLVER = re.compile(r"Unsupported interpolation type ([^\s:]*)(?::(\S*))?")
#: Messages of Hydra's parser (ANTLR) about a value that it can't read.
_GRAMMAR = re.compile(r"LexerNoViableAlt|no viable alternative|(mismatched|extraneous) input|token recognition error")


def explain(error: Exception, overrides: Sequence[str], of_run: Config | None = None) -> ConfigError:
    """Return our error for Hydra's, with the key or option and the nearest existing one.

    Args:
        error: the error of Hydra or OmegaConf.
        overrides: the composed overrides.
        of_run: the run's configuration that they change, if any.
    """
    text = str(error).strip()
    if called := _UNKNOWN_RESOLVER.match(text):
        return _not_callable(getattr(error, "full_key", None) or "configuration", called[1], called[2])
    key = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if key:
        return _unknown_key(next(name for name in key.groups() if name), overrides)
    option = re.search(r"Could not find '([^']+)/([^'/]+)'", text) or re.search(
        r"In '[^']+': Could not find '([^']+)/([^']+)'", text
    )
    if option:
        return _unknown_option(*option.groups())
    absent = re.search(r"Could not delete from config\. '([^']+)' does not exist", text)
    if absent:
        return _not_there(absent.group(1), overrides, of_run)
    several = re.search(r"Ambiguous value for argument '([^']+)'", text)
    if several:
        quoted = f"{several[1].partition('=')[0]}='a,b'"
        return ConfigError(
            f"{several[1]}: has several values, which only a sweep tries",
            hint=f'`hlatctl sweep` takes them; or quote a text that has a comma, such as "{quoted}"',
        )
    group = re.search(r"Could not override '([^'@]+)'\. No match in the defaults list", text)
    if group:
        return _unknown_key(group.group(1), overrides)
    if _GRAMMAR.search(text):
        hint = "quote text that has special characters, such as \"cluster.slurm.extra=['--mem=0']\""
        return ConfigError(" ".join(text.split()), hint=hint)
    return ConfigError(" ".join(text.split()), hint="overrides look like train.tokens=100000 or cluster=local")


def _not_callable(key: str, resolver: str, variable: str | None) -> ConfigError:
    if resolver == "oc.env":
        named = f" {variable}" if variable else ""
        return ConfigError(
            f"{key}: reads the environment variable{named}, whose value would be written into config.yaml and the "
            "journal",
            hint=f'if it is not a secret, let the shell insert it: {key}="${variable or "NAME"}"; otherwise remove it '
            "and set the variable where the run is started",
        )
    return ConfigError(
        f"{key}: ${{{resolver}:...}} is not available",
        hint="${KEY} inserts another key's value; write other values out",
    )


def _unknown_key(name: str, overrides: Sequence[str]) -> ConfigError:
    asked = next((o.split("=")[0].lstrip("+~") for o in overrides if o.split("=")[0].lstrip("+~").endswith(name)), name)
    if asked.startswith("backend.env."):
        return ConfigError(f"{asked}: is not set by the backend", hint=f"+{asked}=VALUE adds it")
    known = [*flatten(Config()), *groups()]
    leaves = {key.rsplit(".", maxsplit=1)[-1]: key for key in reversed(known)}
    # The last part of the key may be right although the group is wrong.
    leaf = nearest(asked.rsplit(".", maxsplit=1)[-1], list(leaves), similarity=0.7)
    otherwise = f"did you mean {leaves[leaf]}?" if leaf else "`hlatctl config keys` lists them"
    return ConfigError(f"{asked}: unknown key", hint=suggest(asked, known, otherwise=otherwise))


def _not_there(key: str, overrides: Sequence[str], of_run: Config | None) -> ConfigError:
    """Return the error for ``~KEY`` if nothing sets the key; a mapping's entry may be misspelled."""
    parent, _, name = key.rpartition(".")
    others = [text for text in overrides if text.lstrip("+~").split("=")[0] != key]
    entries: Any = compose_plain(others, of_run)
    for part in parent.split(".") if parent else ():
        entries = entries.get(part) if isinstance(entries, dict) else None
    known = list(entries) if isinstance(entries, dict) else []
    prefix = f"~{parent}." if parent else "~"
    return ConfigError(
        f"~{key}: nothing sets it", hint=suggest(name, known, prefix=prefix, otherwise=f"leave out ~{key}")
    )


def _unknown_option(group: str, option: str) -> ConfigError:
    hint = suggest(option, groups().get(group, []), prefix=f"{group}=")
    return ConfigError(f"{group}={option}: no such option", hint=hint)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that contain a secret, even if a later override replaces them: the command line is stored.

    Raises:
        ConfigError: names the override's key.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        variable = key.removeprefix("backend.env.")
        if variable != key and is_secret_name(variable) and value not in ("", "null") and not override.startswith("~"):
            raise _named(key)
        tracking.check_notify_override(key, value)
        for error in _problem(key, override):
            raise error


def check_values(plain: dict[str, Any]) -> None:
    """Refuse composed values that contain a secret.

    Raises:
        ConfigError: names the key.
    """
    for key, text in _strings(plain, ""):
        tracking.check_notify_override(key, text)
        for error in _problem(key, text):
            raise error
    for name, value in (plain["backend"].get("env") or {}).items():
        if value is not None and is_secret_name(name):
            raise _named(f"backend.env.{name}")


def _problem(key: str, value: str) -> Iterator[ConfigError]:
    kind = secret_in(value)
    if kind and key == "tracking.mlflow_uri":
        yield ConfigError(
            f"{key}: contains {kind}, which would be written into config.yaml and the journal",
            hint="remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    elif kind:
        yield ConfigError(
            f"{key}: contains {kind}, which would be written into config.yaml and the journal",
            hint="remove it and set it in the shell that starts the run",
        )


def _named(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: has the name of a secret, and its value would be written into config.yaml and the journal",
        hint="remove it and set it in the shell that starts the run",
    )


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value


def as_experiment(overrides: Sequence[str], folder: Path, remark: str) -> str:
    """Return YAML that composes, as ``experiment=``, to the same configuration as the overrides, except ``runs_dir``.

    Args:
        folder: base of relative paths.
        remark: comment at the top of the file.

    Raises:
        ConfigError: as ``conf.compose.compose``.
    """
    import yaml

    config = dataclasses.asdict(compose(overrides, folder))
    with folders.using([], others=False):  # the file contains everything that differs from our defaults
        without = dataclasses.asdict(compose(["~experiment"], folder))
    differs = _difference(config, without)
    differs.pop("runs_dir", None)
    text = yaml.safe_dump(differs, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# {remark}\n{text}"


def _difference(value: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the items that differ from the other mapping or are missing in it."""
    differs: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and isinstance(other.get(key), dict):
            inner = _difference(item, other[key])
            if inner:
                differs[key] = inner
        elif key not in other or item != other[key]:
            differs[key] = item
    return differs
