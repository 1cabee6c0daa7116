"""Folders with the user's configuration: options of groups, experiments and sweeps in addition to the built-in ones.

``--config-dir`` and ``$HLATCTL_CONFIG_DIR`` name them; ``./conf`` is one if it contains ``hlatctl.yaml``. Nothing is
read from a folder that another user can write to, because a configuration names programs to run.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlatctl.cache.trust import require_own
from hlatctl.run.errors import ConfigError, StorageError, suggest
from hlatctl.run.files import read_bytes, why

OURS = Path(__file__).parent
ENV = "HLATCTL_CONFIG_DIR"
#: Marks ``./conf`` as a folder of configuration, and contains the settings for every run of a project.
PROJECT_FILE = "hlatctl.yaml"
SWEEP, LADDER, SIMULATION = "sweep", "ladder", "simulation"
#: Groups that are no part of a run's configuration.
APART = (SIMULATION, SWEEP, LADDER)
#: Those of them whose options are lists of arguments.
OF_ARGUMENTS = (SWEEP, LADDER)
_MAX_BYTES = 2**20
_OPTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RULE = "a configuration names programs to run, so no other user may be able to write to it"
#: Folders of the current ``with using(...)``, and whether the environment and the working directory name more.
_chosen: ContextVar[tuple[tuple[Path, ...], bool]] = ContextVar("_chosen", default=((), True))


@dataclass(frozen=True, kw_only=True)
class ProjectFile:
    """The content of ``hlatctl.yaml``.

    Args:
        runs_dir: folder of the runs, unless ``$HLATCTL_RUNS_DIR`` is set; relative to the working directory.
        overrides: apply to every run, as if they were typed first.
        hosts: machines for `hlatctl --host NAME`, each as [USER@]HOST[:VENV].
    """

    runs_dir: str | None = None
    overrides: list[str] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)


@contextmanager
def using(folders: Sequence[Path], *, others: bool = True) -> Iterator[None]:
    """Use these folders of configuration in this block.

    Args:
        folders: the first one wins.
        others: also use those that the environment and the working directory name, after these.
    """
    token = _chosen.set((tuple(folders), others))
    try:
        yield
    finally:
        _chosen.reset(token)


def user_folders() -> list[Path]:
    """Return the user's folders, unchecked: --config-dir, $HLATCTL_CONFIG_DIR, ./conf; the first wins."""
    chosen, others = _chosen.get()
    folders = list(chosen)
    if others:
        folders += [Path(text) for text in os.environ.get(ENV, "").split(os.pathsep) if text]
        if os.path.lexists(Path("conf", PROJECT_FILE)):
            folders.append(Path("conf"))
    return list(dict.fromkeys(Path(os.path.abspath(folder.expanduser())) for folder in folders))


def checked_folders() -> list[Path]:
    """Return the user's folders after checking every file in them that could be used.

    Raises:
        ConfigError: a folder or file is missing, unsafe or damaged, or has the name of a built-in one.
    """
    folders = user_folders()
    for folder in folders:
        _check_folder(folder)
    return folders


def require_options(files: Sequence[Path]) -> None:
    """Refuse files of the user's folders that aren't options of a group, because they are not checked.

    Raises:
        ConfigError: names the first one.
    """
    for folder in user_folders():
        for path in files:
            if path.is_relative_to(folder) and not path.is_relative_to(OURS) and path.parent.parent != folder:
                raise ConfigError(
                    f"{_shown(path)}: only GROUP/OPTION.yaml in {folder} can be used",
                    hint=f"move it to {folder}/experiment, or rename it",
                )


def options(folder: Path) -> dict[str, list[str]]:
    """Return the groups of a folder of configuration with their options, ``APART`` included."""
    found = {}
    for group in group_names():
        names = [entry.name[: -len(".yaml")] for entry in _entries(folder / group) if entry.name.endswith(".yaml")]
        if names:
            found[group] = sorted(names)
    return found


def group_names() -> list[str]:
    """Return the names of all groups, ``APART`` included."""
    return sorted(entry.name for entry in _entries(OURS) if entry.is_dir() and _has_options(Path(entry.path)))


def names(group: str) -> list[str]:
    """Return the options of a group: the built-in ones and the user's."""
    return sorted({name for place in (OURS, *user_folders()) for name in options(place).get(group, [])})


def file_of(group: str, option: str) -> Path | None:
    """Return the file of an option; None if there is no such option."""
    for folder in (OURS, *user_folders()):
        if option in options(folder).get(group, []):
            return folder / group / f"{option}.yaml"
    return None


def project_file(folder: Path) -> ProjectFile:
    """Return the content of a folder's ``hlatctl.yaml``; the defaults if it has none.

    Raises:
        ConfigError: an unknown key or a wrong value, or the file can't be used.
    """
    from conf.load import decode_dataclass

    path = folder / PROJECT_FILE
    if not os.path.lexists(path):
        return ProjectFile()
    _check_file(path, folder)
    values = _mapping(path)
    try:
        content = decode_dataclass(ProjectFile, values, "")
    except ConfigError as error:
        known = (
            "its keys are runs_dir (text), overrides (list of texts, such as cluster=slurm), and hosts (such as "
            "lumi: me@lumi.example:/home/me/hlatctl/.venv)"
        )
        raise ConfigError(f"{path}: {error.message}", hint=error.hint or known) from None
    for text in content.overrides:
        key = text.partition("=")[0].lstrip("+~")
        if key == "runs_dir":
            raise ConfigError(f"{path}: overrides: {text}: runs_dir is a key of this file", hint="write runs_dir: DIR")
    return content


def project_overrides(typed: Sequence[str]) -> dict[str, Path]:
    """Return the overrides that apply to every run, in order, with the file of each.

    Args:
        typed: the overrides of the command line, which win.

    Raises:
        ConfigError: as :func:`project_file`.
    """
    taken = {_key(text) for text in typed}
    found: dict[str, Path] = {}
    for folder in user_folders():  # the first one wins
        own = {_key(text): text for text in project_file(folder).overrides if _key(text) not in taken}
        taken |= set(own)
        found = {**dict.fromkeys(own.values(), folder / PROJECT_FILE), **found}
    return found


def project_runs_dir() -> str | None:
    """Return the folder of runs that a ``hlatctl.yaml`` names.

    Raises:
        ConfigError: as :func:`project_file`, or the folder is not safe.
    """
    for folder in user_folders():
        _check_own(folder)
        if named := project_file(folder).runs_dir:
            return named
    return None


def project_hosts() -> dict[str, str]:
    """Return the machines that the ``hlatctl.yaml`` files name; the first folder's win.

    Raises:
        ConfigError: as :func:`project_file`, or a folder is not safe.
    """
    found: dict[str, str] = {}
    for folder in reversed(user_folders()):
        _check_own(folder)
        found |= project_file(folder).hosts
    return found


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _has_options(folder: Path) -> bool:
    return any(entry.name.endswith(".yaml") for entry in _entries(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is this package itself, in a clone of the repository."""
    return os.path.realpath(folder) == os.path.realpath(OURS)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder of configuration", hint=f"name a folder: --config-dir, ${ENV}")
    if not _is_ours(folder) and all((folder / name).is_file() for name in ("compose.py", "config.yaml")):
        raise ConfigError(
            f"{folder}: belongs to another copy of hlatctl than the one that runs ({OURS}), so its options can differ",
            hint="keep your options in a folder of your own, such as ~/my-project/conf, and remove "
            f"{folder / PROJECT_FILE}; or run this clone's own hlatctl",
        )
    _check_own(folder)
    project_file(folder)
    known, ours = group_names(), options(OURS)
    for entry in _entries(folder):
        if entry.name.startswith((".", "__")) or not entry.is_dir():
            continue
        group = Path(entry.path)
        if entry.name not in known:
            if _has_options(group):
                hint = suggest(entry.name, known, otherwise=f"groups: {', '.join(known)}")
                raise ConfigError(f"{_shown(group)}: contains options, but there is no such group", hint=hint)
            continue
        _check_inside(group, folder)
        _check_own(group)
        for option in _entries(group):
            if option.name.endswith(".yaml"):
                _check_option(Path(option.path), folder, ours[entry.name])


def _check_option(path: Path, folder: Path, ours: list[str]) -> None:
    if not _OPTION.fullmatch(path.stem):
        raise ConfigError(
            f"{_shown(path)}: an option's name has letters, digits and _ . - only", hint="rename the file"
        )
    _check_file(path, folder)
    group = path.parent.name
    if path.stem in ours and not os.path.samefile(path, OURS / group / path.name):
        raise ConfigError(
            f"{path}: {group}={path.stem} is one of hlatctl's options, whose meaning must not depend on the folder",
            hint=f"rename the file, such as to my_{path.name}, and use {group}=my_{path.stem}",
        )
    values = _mapping(path)
    if path.parent.name in OF_ARGUMENTS:
        arguments = values.get("arguments")
        if (
            set(values) != {"arguments"}
            or not isinstance(arguments, list)
            or not all(isinstance(text, str) for text in arguments)
        ):
            hint = "write arguments: [optimizer.lr=1e-3, 'optimizer.beta2=0.95,0.99']"
            raise ConfigError(f"{path}: a {path.parent.name}'s file has one key, arguments, a list of texts", hint=hint)


def _check_file(path: Path, folder: Path) -> None:
    try:
        _check_inside(path, folder)
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                f"{_shown(path)}: is not a regular file", hint="remove it, or replace it with a YAML file"
            )
    except OSError as error:
        raise ConfigError(f"{_shown(path)}: can't be read ({why(error)})", hint="remove or replace it") from None
    _check_own(path)


def _check_inside(path: Path, folder: Path) -> None:
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(folder)):
        raise ConfigError(f"{_shown(path)}: is a link out of {folder}", hint="replace it with a copy of its target")


def _check_own(path: Path) -> None:
    # Programs already run from a clone's own folder. A clone made with umask 002 gives its group the right to write.
    if path.resolve().is_relative_to(OURS.resolve()) and not path.stat().st_mode & stat.S_IWOTH:
        return
    hint = f"if you trust its contents: `chmod -R go-w {shlex.quote(os.fspath(path))}`, or copy it to a folder of yours"
    try:
        require_own(path, _RULE, hint)
    except StorageError as error:
        raise ConfigError(error.message, hint=error.hint) from None


def _mapping(path: Path) -> dict[str, Any]:
    from conf.load import parse_yaml

    hint = f"write YAML of at most {_MAX_BYTES >> 20} MiB, such as `optimizer: {{lr: 1.0e-3}}`"
    try:
        values = parse_yaml(read_bytes(path, _MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({why(error)})", hint=hint) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: contains {type(values).__name__}, expected a mapping", hint=hint)
    return values or {}


def _shown(path: Path) -> str:
    """Return a path that can be printed, even if its name is not UTF-8."""
    return os.fspath(path).encode(errors="backslashreplace").decode()
