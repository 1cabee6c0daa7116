"""Task definitions of lm-evaluation-harness: find them by name, expand groups, and report errors in the user's.

The harness has some 14,000 definitions and takes long to interpret them all. So :class:`Definitions` searches the files
as text for the folders in which the names occur, those of ``eval.include_path`` included, and :class:`Catalog` lets the
harness interpret only these. Neither reads a model or data. ``reading_own_code`` and ``running_own_code`` turn failures
in the user's definitions, whose functions the harness calls inside this process, into errors that name the definition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.serving.model import missing_package, package_folder
from eval.tasks import core, suites
from eval.tasks.suites import Task
from hlatctl.run.errors import ConfigError, EvaluationError, HlatctlError, suggest
from hlatctl.run.files import files_below, open_regular, read_bytes
from hlatctl.units import size

_NAME = re.compile(r"""^["']?(?:task|group)["']?:[ \t]*["']?([^\s"'\[{#]+)""", re.MULTILINE)
_TAG = re.compile(r"""^["']?tag["']?:((?:[ \t]*[^\n]*)(?:\n[ \t]*-[^\n]*)*)""", re.MULTILINE)
_INCLUDE = re.compile(r"""^["']?include["']?:((?:[ \t]*[^\n]*)(?:\n[ \t]*-[^\n]*)*)""", re.MULTILINE)
_WORD = re.compile(r"""[^\s"'\[\],]+""")
#: A folder of definitions has fewer files, also with its data; a whole disk is a mistake.
MAX_OWN_FILES, MAX_OWN_BYTES = 50_000, 256 << 20
#: A larger file without a suffix is data.
_MAX_BYTES = 16 << 20


class Definitions:
    """The files of some folders.

    Args:
        roots: the folders; a file with a syntax error is found here and refused when it is interpreted.
        own: the user chose the folders, so they can be any.
    """

    def __init__(self, roots: tuple[Path, ...], *, own: bool = False) -> None:
        self.roots = roots
        self._own = own

    @cached_property
    def texts(self) -> dict[Path, str]:
        """The text of every YAML file, including templates, which have no suffix."""
        files = [path for root in self.roots for path in self._below(root) if path.suffix in (".yaml", "")]
        try:
            sizes = {path: path.stat().st_size for path in files if path.is_file()}
            small = [path for path, length in sizes.items() if length <= _MAX_BYTES]
            if self._own and sum(sizes[path] for path in small) > MAX_OWN_BYTES:
                raise _too_large(self.roots[0], f"has more than {size(MAX_OWN_BYTES)} in files that can be definitions")
            return {path: _definitions_text(path) for path in small}
        except OSError as error:
            raise ConfigError(
                f"eval.include_path: {error.filename}: can't be read ({error.strerror})",
                hint="give yourself the right to read it, or move it elsewhere",
            ) from None

    def _below(self, root: Path) -> list[Path]:
        if not self._own:
            return sorted(root.rglob("*"))
        try:
            return files_below(root, most=MAX_OWN_FILES)
        except ValueError as error:
            raise _too_large(root, str(error)) from None

    @cached_property
    def defined(self) -> dict[str, list[Path]]:
        """Every task's and group's name, with the files that define it."""
        found: dict[str, list[Path]] = defaultdict(list)
        for path, text in self.texts.items():
            for name in _NAME.findall(text):
                found[name].append(path)
        return dict(found)

    @cached_property
    def tags(self) -> dict[str, Path]:
        """Every tag, with a file that has it."""
        return {tag: path for path, text in self.texts.items() for line in _TAG.findall(text) for tag in _tags(line)}

    @cached_property
    def _included(self) -> dict[Path, set[str]]:
        """The file names, without folders, that each file includes."""
        return {path: {Path(name).name for name in _includes(text)} for path, text in self.texts.items()}

    def folders(self, name: str) -> set[Path]:
        """Return the folders of the files that define a name, or else of the files that have it as a tag."""
        if name in self.defined:
            return {path.parent for path in self.defined[name]}
        word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        tagged = {path for path, text in self.texts.items() if name in text and word.search(text)}
        # A file's tag also applies to the files that include it, in any folder.
        templates = {path.name for path in tagged}
        heirs = {path for path, included in self._included.items() if included & templates}
        return {path.parent for path in tagged | heirs}


@functools.cache
def of_harness() -> Definitions:
    """Return the harness's definitions."""
    return Definitions((package_folder("lm_eval", "lm-eval") / "tasks",))


def own_definitions(folders: tuple[Path, ...]) -> Definitions:
    """Return the definitions of ``eval.include_path``, whose names must be new, else ConfigError."""
    for folder in folders:
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
            why = "can't be read" if folder.is_dir() else "no such folder"
            raise ConfigError(f"eval.include_path={folder}: {why}", hint="name a folder with *.yaml files of tasks")
    found = Definitions(folders, own=True)
    for folder in folders:
        if not any(path.is_relative_to(folder) for paths in found.defined.values() for path in paths):
            raise ConfigError(
                f"eval.include_path={folder}: has no task definition",
                hint="a definition is a file NAME.yaml with the key `task`; see docs/evaluation.md",
            )
    _refuse_known_names(found)
    return found


def _refuse_known_names(found: Definitions) -> None:
    harness = of_harness()
    elsewhere = {name: "lm-evaluation-harness" for names in (harness.defined, harness.tags) for name in names}
    elsewhere |= {name: f"the suite {suite}" for suite, names in suites.known().items() for name in names}
    elsewhere |= dict.fromkeys(core.TASKS, "the suite core")
    places = [(name, path) for name, paths in found.defined.items() for path in paths]
    places += list(found.tags.items())
    for name, path in places:
        if name in elsewhere:
            raise ConfigError(
                f"{path}: {name} is also a name of {elsewhere[name]}, and a score must not be mistaken for its",
                hint=f"rename it, such as my_{name}",
            )
    for name, paths in found.defined.items():
        if len(paths) > 1 or name in found.tags:
            other = paths[1] if len(paths) > 1 else found.tags[name]
            raise ConfigError(f"{other}: {name} is also defined in {paths[0]}", hint="give each its own name")


def _definitions_text(path: Path) -> str:
    """Return a file's text; at most its first 16 MiB, because special files of the kernel have no known size."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return (file.read(_MAX_BYTES) or b"").decode(errors="replace")
    except OSError as error:
        error.filename = os.fspath(path)  # an error while reading doesn't name the file
        raise


def _too_large(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"eval.include_path={folder}: {why}", hint="name a folder that has only task definitions")


def _includes(text: str) -> list[str]:
    """Return the paths of the files that a definition includes."""
    return [name for line in _INCLUDE.findall(text) for name in _tags(line)]


def _check_includes(path: Path, seen: set[Path]) -> None:
    """Check that a definition and all files that it includes can be read as a whole, or raise an OSError."""
    if path not in seen:
        seen.add(path)
        for name in _includes(read_bytes(path, _MAX_BYTES).decode(errors="replace")):
            _check_includes((path.parent / name).resolve(), seen)


def _tags(line: str) -> list[str]:
    """Return the words of a key's text: one word, a list in brackets, or a list of lines."""
    lines = (part.partition("#")[0].strip().removeprefix("-") for part in line.splitlines())
    return [word for part in lines for word in _WORD.findall(part)]


#: Keys that name a member of a group; every other key changes the member's definition.
_MEMBER_KEYS = {"task", "group", "task_alias", "group_alias"}
#: Keys of a group's file that concern the group; every other key changes its tasks' definitions.
_GROUP_KEYS = _MEMBER_KEYS | {"aggregate_metric_list", "metadata", "tag", "include", "task_list"}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One task as the harness defines it.

    Args:
        config: the file with its includes; functions are names, not imported.
        changes: keys that a group replaces.
        own: the folder of ``eval.include_path`` that contains it; None for any other definition.
        place: the file of its items below ``eval.data_dir``, if it names one; None if they are a dataset of the hub.
    """

    name: str
    path: Path
    config: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    own: Path | None = None
    place: str | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, with the group's changes; None if the key is missing."""
        return self.changes.get(key, self.config.get(key))


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of tasks with one combined score; ``aggregate`` is its ``aggregate_metric_list``."""

    name: str
    tasks: tuple[str, ...]
    aggregate: list[dict[str, Any]]


class Catalog:
    """The definitions of some names and of everything they contain.

    Args:
        own: definitions in addition to the harness's.
    """

    def __init__(self, names: Collection[str], own: Definitions | None = None) -> None:
        """Find the names' folders and let the harness read them, until every member of a group is known."""
        self._own = own
        self._built_in = {name: _built_in(name) for name in names if name in core.TASKS}
        asked = [name for name in dict.fromkeys(names) if name not in self._built_in]
        for name in asked:
            if not is_known(name, own):
                raise unknown_task(name)
        folders: set[Path] = set()
        self._index: dict[str, Any] = {}
        reached = asked
        while more := {folder for name in reached for folder in _folders(name, own)} - folders:
            folders |= more
            self._index = _read(folders, own)
            seen: set[str] = set()
            reached = [name for start in asked for name in self._reachable(start, seen)]
        for name in reached:
            if name not in self._index:
                raise unknown_task(name)
        for name in asked if own else ():
            self._refuse_circle(name, ())

    def tasks(self, name: str) -> list[Definition]:
        """Return the tasks of a name in the harness's order; ConfigError if a group changes them with code."""
        return [self._built_in[name]] if name in self._built_in else list(self._tasks(name, {}))

    def groups(self, name: str) -> list[Group]:
        """Return the group of this name and the groups in it, inner ones first; only those with a combined score."""
        if not self._is_group(name):
            return []
        config = self._index[name].cfg
        inner = [group for child, _ in self._members(name) for group in self.groups(child)]
        aggregate = config.get("aggregate_metric_list") or []
        if isinstance(aggregate, dict):
            aggregate = [aggregate]
        own = Group(name=name, tasks=tuple(task.name for task in self.tasks(name)), aggregate=aggregate)
        return [*inner, own] if aggregate else inner

    def _members(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a group's members and the keys that it changes in each; an inline group gets a new name."""
        members = self._index[name].cfg.get("task") or []
        for member in [members] if isinstance(members, str) else members:
            if isinstance(member, str):
                yield member, {}
                continue
            inner = str(member.get("group") or member["task"])
            if "group" in member and inner not in self._index and inner not in of_harness().defined:
                inner = f"{name}::{inner}"
                self._index[inner] = dataclasses.replace(self._index[name], name=inner, cfg=member)
                yield inner, {}
            else:
                yield inner, {key: value for key, value in member.items() if key not in _MEMBER_KEYS}

    def _refuse_circle(self, name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ConfigError(
                f"eval.include_path: the group {name} contains itself ({' > '.join([*above, name])})",
                hint=f"remove {name} from the group {above[-1]}",
            )
        for child, _ in self._members(name) if self._is_group(name) else ():
            self._refuse_circle(child, (*above, name))

    def _is_group(self, name: str) -> bool:
        return name in self._index and self._index[name].kind.name == "GROUP"

    def _reachable(self, name: str, seen: set[str]) -> Iterator[str]:
        if name in seen:
            return
        seen.add(name)
        yield name
        if self._is_group(name):
            for child, _ in self._members(name):
                yield from self._reachable(child, seen)

    def _tasks(self, name: str, changes: dict[str, Any]) -> Iterator[Definition]:
        entry = self._index[name]
        match entry.kind.name:
            case "GROUP":
                of_group = {key: value for key, value in entry.cfg.items() if key not in _GROUP_KEYS}
                for child, of_child in self._members(name):
                    yield from self._tasks(child, {**of_group, **changes, **of_child})
            case "TAG":
                for task in sorted(entry.tags):
                    yield from self._tasks(task, changes)
            case _:
                path = Path(entry.yaml_path)
                _refuse_functions(name, changes, self._own)
                yield Definition(name=name, path=path, config=entry.cfg, changes=changes, own=_root(path, self._own))


def is_known(name: str, own: Definitions | None = None) -> bool:
    """Return whether a name occurs in the harness's definitions, in the user's, or is a task of CORE."""
    return name in core.TASKS or bool(_folders(name, own))


def _built_in(name: str) -> Definition:
    row = core.TASKS[name]
    shared = {"metric_list": [{"metric": metric} for metric in core.METRICS], "test_split": "test"}
    return Definition(name=name, path=core.DEFINITION, config=shared, changes=row.definition(), place=row.place)


def unknown_task(name: str, *, suite: str = "", also: Iterable[str] = ()) -> ConfigError:
    """Return the error for an unknown name; its hint suggests the nearest name of the suite or the harness."""
    of_suite = f"of suite {suite}, nor " if suite else ""
    known = [*also, *core.TASKS, *sorted(of_harness().defined)]
    hint = suggest(name, known, otherwise="`lm_eval ls tasks` lists the harness's tasks")
    return ConfigError(f"eval.tasks: {name} is no task or group {of_suite}of lm-evaluation-harness", hint=hint)


def _refuse_functions(name: str, changes: dict[str, Any], own: Definitions | None) -> None:
    roots = tuple(f"{root}/" for source in _sources(own) for root in source.roots)
    functions = [key for key, value in changes.items() if isinstance(value, str) and value.startswith(roots)]
    if functions:
        raise ConfigError(
            f"eval.tasks: {name} is changed by its group with code ({functions[0]}), which is not supported",
            hint=f"name {name} itself",
        )


def _read(folders: set[Path], own: Definitions | None) -> dict[str, Any]:
    """Return the harness's index of some folders, built in the order of paths, as the harness does for all.

    Its TaskManager is not used: if a tag occurs in several folders, it keeps only the last folder's tasks.
    """
    try:
        from lm_eval.tasks._index import TaskIndex
        from lm_eval.tasks._yaml_loader import load_yaml
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    # It warns about names that are defined twice; the first counts.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    index: dict[str, Any] = {}
    for path in (path for source in _sources(own) for path in sorted(source.texts, key=Path.as_posix)):
        if path.suffix == ".yaml" and path.parent in folders:
            try:
                if own and path in own.texts:
                    _check_includes(path, set())
                TaskIndex.process_cfg(load_yaml(path, resolve_func=False), path, index)
            except ValueError:  # neither task nor group: a part of other files; the harness ignores it too
                continue
            except Exception as error:  # YAML written by a user: bad syntax, a missing include, a list as a name
                if own is None or path not in own.texts:
                    raise
                why = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(f"{path}: is no task definition ({why})", hint="correct or remove the file") from None
    return index


def _sources(own: Definitions | None) -> list[Definitions]:
    return [of_harness(), own] if own else [of_harness()]


def _folders(name: str, own: Definitions | None) -> set[Path]:
    is_own = own is not None and (name in own.defined or name in own.tags)
    return (own if own and is_own else of_harness()).folders(name)


def _root(path: Path, own: Definitions | None) -> Path | None:
    return next((root for root in own.roots if path.is_relative_to(root)), None) if own else None


#: Exceptions that the harness and this module raise for values of a wrong type.
_WRONG_VALUE = (TypeError, AttributeError, KeyError, ValueError, IndexError)


@contextlib.contextmanager
def reading_own_code(own: Path | None) -> Iterator[None]:
    """Turn errors of types in definitions of a folder of ``eval.include_path`` into a ConfigError; None: no folder."""
    try:
        yield
    except _WRONG_VALUE as error:
        if own is None:
            raise
        raise ConfigError(
            f"eval.include_path={own}: a definition has a key with a value of a wrong type ({_own_code_text(error)})",
            hint=f"`{sys.executable} -m lm_eval validate --include_path {own} --tasks NAME` checks a definition",
        ) from error


@contextlib.contextmanager
def running_own_code(task: Task, *, everything: bool = True) -> Iterator[None]:
    """Report errors of a user's task definition and its functions as such; what they print goes to stderr.

    Args:
        everything: attribute every error to the definition; otherwise only those raised by code of its folder.
    """
    if task.own is None:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except HlatctlError:
        raise
    except (Exception, SystemExit) as error:
        if not everything and not _is_from(error, task.own):
            raise
        raise EvaluationError(
            f"{task.definition}: {task.name} can't be evaluated ({_own_code_text(error)})",
            hint="correct the definition, its data or its functions",
        ) from error


def _is_from(error: BaseException, folder: Path) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).is_relative_to(folder) for frame in frames)


def _own_code_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
