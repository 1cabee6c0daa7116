"""Words for the shell's completion: runs, sweeps, configuration groups, options, keys and values.

Only folders are listed, so thousands of runs are quick, and Hydra is not imported.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from conf import folders
from hlatctl.run.errors import HlatctlError
from hlatctl.run.runs import LATEST, list_runs, list_sweeps


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``latest`` and the ids of runs, newest first, that begin with what was typed."""
    return _beginning(incomplete, [LATEST, *(run.run_id for run in reversed(_listed(list_runs, ctx)))])


def run_or_sweep_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the same, and the ids of sweeps."""
    sweeps = _beginning(incomplete, [sweep.run_id for sweep in _listed(list_sweeps, ctx)])
    return [*run_names(ctx, incomplete), *sweeps]


def override_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return overrides that begin with what was typed: ``experiment=``, ``experiment=quickstart``, ``optimizer.lr=``.

    Bash takes ``=`` for a word of its own, and completes only what follows it; zsh and fish complete the whole word.
    """
    chosen = [Path(folder) for folder in ctx.params.get("config_dir") or []]
    with suppress(HlatctlError, OSError), folders.using(chosen):
        typed = ctx.params.get("overrides") or []
        if not incomplete and typed and "=" not in typed[-1]:  # in bash, the cursor is behind the "="
            return _values(typed[-1])
        if typed and typed[-1] == "=":
            return _beginning(incomplete, _values(typed[-2])) if len(typed) > 1 else []
        key, equals, value = incomplete.partition("=")
        if equals:
            return [f"{key}={word}" for word in _beginning(value, _values(key))]
        return _keys(incomplete, [folders.SWEEP] if ctx.info_name == "sweep" else [])
    return []


def _keys(incomplete: str, more: list[str]) -> list[str]:
    """Return the groups and keys, or only their first parts if these differ."""
    from conf.compose import groups
    from conf.reference import keys

    names = [key.name for key in keys() if "[" not in key.name and "NAME" not in key.name]
    words = _beginning(incomplete, [f"{name}=" for name in [*groups(), *more, *names]])
    tops = {_top(word) for word in words}
    if "." not in incomplete and len({top.rstrip(".=") for top in tops}) > 1:
        return sorted(tops)
    if len(words) == 1:  # with a second word the shell adds no space
        key = words[0].removesuffix("=")
        return [words[0], *(f"{key}={value}" for value in _values(key))]
    return words


def _top(word: str) -> str:
    name, dot, _ = word.partition(".")
    return f"{name}{dot}"


def _values(key: str) -> list[str]:
    """Return the options of a group, or the values of a key: its choices, or else its default."""
    from conf.compose import groups
    from conf.reference import keys

    if key in (known := groups()):
        return known[key]
    if key == folders.SWEEP:
        places = (folders.OURS, *folders.user_folders())
        return sorted({name for place in places for name in folders.options(place).get(key, [])})
    found = [entry for entry in keys() if entry.name == key.lstrip("+")]
    if not found:
        return []
    default = found[0].default
    first = [str(default)] if isinstance(default, int | float | str) and not isinstance(default, bool) else []
    return list(dict.fromkeys([*first, *found[0].choices]))


def _listed(list_folder: Any, ctx: typer.Context) -> list[Any]:
    """Return what a folder has; a folder that can't be read has nothing: completion must not print errors."""
    from conf.compose import default_runs_dir

    chosen = ctx.params.get("runs_dir")
    with suppress(OSError, HlatctlError):
        return list(list_folder(Path(chosen).expanduser() if chosen else default_runs_dir()))
    return []


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
