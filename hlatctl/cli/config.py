"""`hlatctl config`: shows what can be configured, and what a set of overrides results in."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf import folders
from hlatctl.cli.app import App
from hlatctl.cli.common import ConfigDirs, Json, Overrides, place, print_json, write
from hlatctl.run.errors import ConfigError, suggest

if TYPE_CHECKING:
    from conf.other_projects import Imported
    from conf.schema import Config

app = App("List options and keys, and show what overrides result in.")
_WIDEST = 120


@app.command("list")
def list_options(
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Show this group only.")] = None,
    config_dir: ConfigDirs = None,
    as_json: Json = False,
) -> None:
    """List groups, their options and the experiments.

    `GROUP=OPTION` selects an option, such as cluster=slurm; `*` marks the options that are used if none is given. Only
    dry runs and forecasts take simulation=OPTION, only sweeps sweep=OPTION, and only ladders
    ladder=OPTION.
    """
    from conf.compose import default_options, groups

    folders.checked_folders()
    known = groups() | {name: folders.names(name) for name in folders.APART}
    if group is not None and group not in known:
        raise ConfigError(f"{group}: no such group", hint=suggest(group, list(known)))
    shown = {name: options for name, options in known.items() if group in (None, name)}
    rows = {name: {option: remark_of(name, option) for option in options} for name, options in shown.items()}
    if as_json:
        print_json(rows)
        return
    used = default_options()
    for name, options in rows.items():
        write(name)
        widest = max(map(len, options))
        for option, remark in options.items():
            mark = "*" if used.get(name) == option else " "
            write(_wrapped(remark, f"{mark} {option:{widest}}  "))


@app.command()
def keys(
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Part of a key, or such as 'optimizer.*'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show keys with their defaults, what they accept and what they mean.

    Defaults are the schema's; options and experiments set others. Names end with their unit, such as _s (seconds).
    """
    from conf.reference import keys as find_keys

    found = find_keys(pattern)
    if as_json:
        print_json([dataclasses.asdict(key) for key in found])
        return
    for key in found:
        write(f"{key.name}={_text(key.default)}  ({key.accepts})")
        write(_wrapped(key.meaning, "    "))


@app.command()
def show(overrides: Overrides = None, config_dir: ConfigDirs = None, as_json: Json = False) -> None:
    """Show the configuration that overrides result in.

    Prints the keys that differ from those without overrides, and then, as YAML, all of them. With an engine that has a
    configuration of its own (backend=torchtitan), this follows where the engine is installed.
    """
    from conf.compose import compose
    from conf.load import dump, flatten
    from conf.origins import SCHEMA, origins

    config = compose(overrides or [])
    without, values = flatten(compose([])), flatten(config)
    differ = {key: [without.get(key), values.get(key)] for key in {**without, **values}}
    differ = {key: pair for key, pair in differ.items() if pair[0] != pair[1]}
    known = origins(overrides or [], config)
    engine = _of_engine(config)
    if as_json:
        own = {config.backend.name: engine} if engine else {}
        shown = {"config": dataclasses.asdict(config), "differs": differ, "origins": dataclasses.asdict(known)}
        print_json({**shown, **own})
        return
    for key, (before, after) in differ.items():
        write(f"# {key}: {_text(after)}, not {_text(before)} ({known.keys.get(key, SCHEMA)})")
    write(dump(config), nl=False)
    if engine:
        import yaml

        write(f"\n# {config.backend.name}'s own configuration, which follows:")
        write(yaml.safe_dump({config.backend.name: engine}, sort_keys=False), nl=False)


@app.command("import")
def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="TOML or Python of torchtitan, a config.json, or the folder of one.", parser=place
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Configuration in a Python file of torchtitan, such as llama3_8b.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert another project's configuration into an experiment.

    Reads torchtitan's TOML or config_registry.py, or a config.json of OLMo-core or Hugging Face (the model's shape),
    without executing anything. Prints YAML for conf/experiment/NAME.yaml of your own folder. What could not be carried
    over is listed in its comments, so read them before you train.
    """
    from conf.other_projects import Imported, read

    if file.is_dir():
        file = file / "config.json"
    found = read(file, name)
    if found is None:
        from flows.runtime.programs import ask

        keys: dict[str, Any] = json.loads(ask("trainer.convert.hugging_face", str(file.absolute())))
        found = Imported(kind="Hugging Face", keys={f"model.{key}": value for key, value in keys.items()})
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    usual = file.absolute().parent.name if file.name == "config.json" else file.stem
    write(_experiment(name or usual, file, found), nl=False)


def _experiment(name: str, file: Path, found: Imported) -> str:
    """Return an experiment's YAML: options of groups as defaults, then the keys, then what was not carried over."""
    import yaml

    groups = {key: value for key, value in found.keys.items() if "." not in key and key != "seed"}
    values: dict[str, Any] = {}
    for key, value in found.keys.items():
        if key not in groups:
            *sections, last = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
    defaults = [{f"override /{group}": option} for group, option in groups.items()]
    text = f"# @package _global_\n# Imported from {file.name} of {found.kind}.\n"
    text += yaml.safe_dump({"defaults": defaults}, sort_keys=False) if defaults else ""
    text += yaml.safe_dump({"experiment_name": name, **values}, sort_keys=False)
    text += "# Data, tokenizer, cluster and evaluation are yours to choose.\n"
    if found.dropped:
        text += "# Not carried over:\n"
        text += "".join(f"#   {line!r}\n" if not line.isprintable() else f"#   {line}\n" for line in found.dropped)
    return text


def _of_engine(config: Config) -> dict[str, Any]:
    from conf.environment import can_train
    from flows.runtime.programs import ask_about

    module = config.backend.kind.own_settings
    if not module or not can_train(config):
        return {}
    settings: dict[str, Any] = json.loads(ask_about(module, config))
    return settings


def remark_of(group: str, option: str) -> str:
    """Return an option's description, and its folder unless the option is built in."""
    path = folders.file_of(group, option)
    assert path is not None
    where = "" if path.is_relative_to(folders.OURS) else f"[{path.parent.parent}]"
    return f"{_first_remark(path)} {where}".strip()


def _first_remark(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package")]
    remark = []
    for line in lines:
        if not line.startswith("#"):
            break
        remark.append(line.lstrip("# "))
    sentence, found, _ = " ".join(remark).partition(". ")
    return sentence + "." * bool(found)


def _wrapped(text: str, before: str) -> str:
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    return textwrap.fill(text, width, initial_indent=before, subsequent_indent=" " * len(before))


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
