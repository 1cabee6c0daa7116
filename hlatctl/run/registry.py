"""Tables of what a configuration can name: built-in rows, and rows that other installed packages add by entry points.

A row has what others need to know of a thing before its code is imported, and where this code is. Foreign packages are
looked for only when a name is not built in, or when names are listed. Standard library only.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hlatctl.run.errors import ConfigError, DependencyError, HlatctlError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a registry; registries add fields for the capabilities.

    Args:
        code: ``package.module:attribute``, called to make the thing; imported when it is needed.
    """

    code: str


_Row = TypeVar("_Row", bound=Row)


class Registry(Generic[_Row]):
    """The rows that a key of the configuration can name.

    Iteration and ``in`` see built-in names and those of other packages, and import none of these packages. Where both
    have a name, the built-in row counts.

    Args:
        key: the key of the configuration, such as ``cluster.launcher``.
        group: group of entry points, such as ``hlatctl.launchers``. Each refers to an instance of ``row``.
        row: the class of the rows.
        built_in: the rows of this project by name.
    """

    def __init__(self, key: str, group: str, row: type[_Row], built_in: Mapping[str, _Row]) -> None:
        self.key, self.group = key, group
        self.built_in, self._row = built_in, row
        self._loaded: dict[EntryPoint, _Row] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._foreign()

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from sorted(set(self._foreign()) - set(self.built_in))

    def __getitem__(self, name: str) -> _Row:
        """Return the row of a name.

        Raises:
            ConfigError: no row has the name.
            DependencyError: the package that adds it can't be used.
        """
        if name in self.built_in:
            return self.built_in[name]
        if name not in self:
            error = self.unknown(name)
            error.hint += ", or install the package that adds it on this machine"
            raise error
        entry = self._entry(name)
        if entry not in self._loaded:
            try:
                row = entry.load()
            except (Exception, SystemExit) as error:
                raise self._broken(name, entry, error) from error
            if not isinstance(row, self._row):
                wanted = f"{self._row.__module__}.{self._row.__qualname__}"
                raise self._broken(name, entry, TypeError(f"{entry.value} must be an instance of {wanted}"))
            self._loaded[entry] = row
        return self._loaded[entry]

    def part(self, name: str, field: str = "code") -> Any:
        """Import what a field of a row refers to; None if the field is empty.

        Raises:
            ConfigError: no row has the name.
            DependencyError: the package that adds it can't be used.
        """
        reference: str = getattr(self[name], field)
        try:
            return pkgutil.resolve_name(reference) if reference else None
        except (Exception, SystemExit) as error:
            if name in self.built_in:
                raise
            raise self._broken(name, self._entry(name), error) from error

    def create(self, name: str, *args: Any, **options: Any) -> Any:
        """Import a row's code and call it with these arguments.

        Raises:
            ConfigError: no row has the name.
            DependencyError: the package that adds it can't be used, or its code failed.
        """
        code = self.part(name)
        try:
            return code(*args, **options)
        except HlatctlError:
            raise
        except (Exception, SystemExit) as error:
            if name in self.built_in:
                raise
            raise self._broken(name, self._entry(name), error) from error

    def unknown(self, value: object, key: str = "") -> ConfigError:
        """Return the error for a value that no row has as its name.

        Args:
            key: the key that has the value, if it isn't the registry's own.
        """
        return ConfigError(f"{key or self.key}={value}: not known", hint=f"use one of: {', '.join(self)}")

    def package(self, name: str) -> dict[str, str]:
        """Return the version of the package that adds a row, by its name; empty for a built-in row."""
        package = None if name in self.built_in else self._entry(name).dist
        return {package.name: package.version} if package else {}

    def _foreign(self) -> dict[str, list[EntryPoint]]:
        return _entry_points(tuple(_searched())).get(self.group, {})

    def _entry(self, name: str) -> EntryPoint:
        entries = self._foreign()[name]
        if len(entries) > 1:
            packages = " and ".join(map(_package, entries))
            raise DependencyError(
                f"{self.key}={name}: {packages} both add this name (entry points {self.group})",
                hint="uninstall one of these packages",
            )
        return entries[0]

    def _broken(self, name: str, entry: EntryPoint, error: BaseException) -> DependencyError:
        return DependencyError(
            f"{self.key}={name}: {_package(entry)} adds it (entry point {name} = {entry.value} of {self.group}), and "
            f"failed: {type(error).__name__}: {error}",
            hint=f"repair or update this package, or use one of: {', '.join(self.built_in)}",
        )


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist else "a package"


def _searched() -> list[str]:
    """Return the folders of installed packages: Python's path without the folder that it was started in.

    ``python -m`` puts that folder first, and an empty part of $PYTHONPATH means it too; anyone may have written there.
    """
    here = ""
    with suppress(OSError):  # the folder was removed
        here = os.path.realpath(os.getcwd())
    return [folder for folder in sys.path if folder and os.path.realpath(folder) != here]


@functools.cache
def _entry_points(folders: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """Return this project's groups of entry points: of each name the entry points of all packages that add it.

    A package whose files are damaged adds nothing, so that it doesn't keep users of other packages from working.
    """
    from importlib import metadata  # a tenth of a second that few programs need

    found: dict[str, dict[str, list[EntryPoint]]] = {}
    seen = set()
    for package in metadata.distributions(path=list(folders)):
        try:
            if "[hlatctl." not in (package.read_text("entry_points.txt") or "") or package.name in seen:
                continue  # of two versions of a package, Python imports the first
            seen.add(package.name)
            entries = [entry for entry in package.entry_points if entry.name]
        except (OSError, TypeError, ValueError):  # TypeError: a line without "="
            continue
        for entry in entries:
            found.setdefault(entry.group, {}).setdefault(entry.name, []).append(entry)
    return found
