"""The search space of a sweep: its axes, settings and common overrides; reading, writing and extending it.

The order of the arms is decided by the sampler (``flows.sweep``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from conf import folders
from conf.axes import Axis, make_axis, parse_override
from conf.constraints import violations
from conf.load import decode_dataclass, parse_yaml
from conf.schema import SweepConfig
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.reading import DAMAGED, read_text, why
from hlatctl.run.suggest import suggest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: Settings that an extended sweep may change, because they affect no trial and no comparison.
_MAY_CHANGE = ("trials", "parallel", "confirm_above_usd")
#: Arms to draw if `sweep.trials` is not set.
_DEFAULT_TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space of a sweep.

    Args:
        overrides: common to all trials.
        axes: in the order given.
        settings: of the sweep.
        folder: base of relative paths.
        config_dirs: the user's folders of configuration; its trials are composed with them.
    """

    overrides: list[str]
    axes: list[Axis]
    settings: SweepConfig
    folder: str
    config_dirs: list[str] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether no axis is an interval."""
        return not any(axis.is_interval for axis in self.axes)

    @property
    def sampler(self) -> str:
        """The configured sampler, or `grid` for a finite space and `tpe` otherwise."""
        return self.settings.sampler or ("grid" if self.is_finite else "tpe")

    @property
    def arms(self) -> int:
        """Number of arms."""
        if self.sampler == "grid":
            return math.prod(len(axis.values) for axis in self.axes)
        return self.settings.trials or _DEFAULT_TRIALS

    @property
    def trials(self) -> int:
        """Number of runs."""
        return self.arms * self.settings.seeds

    def grid(self) -> Iterator[dict[str, str]]:
        """Yield every arm of finite axes; the last axis changes fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield {axis.key: value for axis, value in zip(self.axes, values, strict=True)}

    def example(self) -> dict[str, str]:
        """Return one arm, for checks before the sweep: the first value of each axis, the middle of an interval."""
        return {axis.key: axis.example for axis in self.axes}


def parse(arguments: Sequence[str], folder: Path) -> Space:
    """Parse the arguments of a sweep.

    Args:
        arguments: ``sweep=NAME`` stands for those in ``conf/sweep/NAME.yaml``; the last argument of a key counts.
        folder: base of relative paths.

    Raises:
        ConfigError: bad grammar, an empty axis, an axis with one value, no axis, or an invalid setting.
    """
    parsed: dict[str, Override] = {}
    for text in expand(arguments):
        override = parse_override(text)
        parsed.pop(override.key_or_group, None)
        parsed[override.key_or_group] = override
    own = {key: override for key, override in parsed.items() if key.startswith("sweep.")}
    axes = [make_axis(o) for key, o in parsed.items() if o.is_sweep_override() and key not in own]
    overrides = [str(o.input_line) for key, o in parsed.items() if not o.is_sweep_override() and key not in own]
    dirs = [str(path) for path in folders.checked_folders()]
    space = Space(overrides=overrides, axes=axes, settings=_settings(own), folder=str(folder), config_dirs=dirs)
    _check(space)
    return space


def expand(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``sweep=NAME`` replaced by the arguments in that file.

    Raises:
        ConfigError: there is no such file, or a folder of the user's can't be used.
    """
    folders.checked_folders()
    expanded: list[str] = []
    for text in arguments:
        if not text.startswith("sweep="):
            expanded.append(text)
            continue
        name, known = text.removeprefix("sweep="), sweep_files()
        if name not in known:
            raise ConfigError(f"sweep={name}: no such sweep", hint=suggest(name, known, prefix="sweep="))
        path = folders.file_of(folders.SWEEP, name)
        assert path is not None
        expanded += parse_yaml(read_text(path))["arguments"]
    return expanded


def sweep_files() -> list[str]:
    """Return the names of the predefined sweeps, ours and the user's."""
    places = (folders.OURS, *folders.user_folders())
    return sorted({name for place in places for name in folders.options(place).get(folders.SWEEP, [])})


def extend(space: Space, arguments: Sequence[str]) -> Space:
    """Return a sweep's space with more values.

    Args:
        space: of the sweep.
        arguments: axes with all of their values, old and new, and settings that may change.

    Raises:
        ConfigError: another setting has changed, or an old value is missing.
    """
    old_axes = {axis.key: axis for axis in space.axes}
    typed = [parse_override(text) for text in arguments]
    own = {o.key_or_group: o for o in typed if o.key_or_group.startswith("sweep.")}
    axes = dict(old_axes)
    for override in typed:
        key = override.get_key_element()
        if override.key_or_group in own:
            continue
        if key not in old_axes:
            raise _changed(f"{override.input_line}", f"its axes are {', '.join(old_axes) or 'none'}")
        if not override.is_sweep_override():
            raise _changed(f"{override.input_line}", f"it has tried {', '.join(old_axes[key].values) or 'an interval'}")
        axes[key] = _more(old_axes[key], make_axis(override, least=1))
    given = _values(own)
    for name in given:
        if name not in _MAY_CHANGE:
            raise _changed(f"sweep.{name}={given[name]}", f"it was created with {getattr(space.settings, name)}")
    settings = decode_dataclass(SweepConfig, {**asdict(space.settings), **given}, "sweep.")
    extended = replace(space, axes=list(axes.values()), settings=settings)
    _check(extended)
    if extended.arms < space.arms:
        raise _changed(f"sweep.trials={settings.trials}", f"it has {space.arms} arms, and can't have fewer")
    return extended


def dump(space: Space) -> str:
    """Return a space as sealed YAML."""
    text = yaml.safe_dump(asdict(space), sort_keys=False, allow_unicode=True)
    return files.seal_lines(text)


def load(path: Path) -> Space:
    """Read a space from a file with the text of :func:`dump`.

    Raises:
        ConfigError: the file is missing or has changed.
    """
    try:
        text, _ = files.unseal_lines(read_text(path))
        return decode_dataclass(Space, dict(parse_yaml(text)), "")
    except (OSError, *DAMAGED) as error:
        raise ConfigError(f"{path}: not readable ({why(error)})") from None


def _more(old: Axis, new: Axis) -> Axis:
    """Return the old axis with the new one's added values; refuse missing ones."""
    missing = [value for value in old.values if value not in new.values]
    if missing:
        raise _changed(
            f"{new.key}={','.join(new.values)}", f"it has tried {', '.join(missing)} too, which is missing here"
        )
    if old.is_interval and old != new:
        raise _changed(new.key, f"its interval is {old.low:g} to {old.high:g}")
    added = [value for value in new.values if value not in old.values]
    return old if old.is_interval else Axis(key=old.key, values=[*old.values, *added])


def _changed(what: str, rule: str) -> ConfigError:
    hint = "an extended sweep keeps its values and adds new ones to its axes; `hlatctl sweep` starts a new sweep"
    return ConfigError(f"{what}: changes the sweep's search space: {rule}", hint=hint)


def _values(own: dict[str, Override]) -> dict[str, Any]:
    """Return the values of ``sweep.*`` by name."""
    known = [field.name for field in fields(SweepConfig)]
    values: dict[str, Any] = {}
    for key, override in own.items():
        name = key.removeprefix("sweep.")
        if name not in known:
            raise ConfigError(f"{key}: unknown key", hint=suggest(name, known, prefix="sweep."))
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: is a setting of the sweep, and can't be an axis")
        values[name] = override.value()
    return values


def _settings(own: dict[str, Override]) -> SweepConfig:
    return decode_dataclass(SweepConfig, _values(own), "sweep.")


def _check(space: Space) -> None:
    """Raise an error for the first broken rule of settings and axes."""
    settings = space.settings
    for error in violations(settings, "sweep."):
        raise error
    if not space.axes and settings.seeds == 1:
        raise ConfigError(
            "nothing is swept: no argument has several values",
            hint="give several values, such as optimizer.beta2=0.95,0.99, or sweep.seeds=3",
        )
    interval = next((axis for axis in space.axes if axis.is_interval), None)
    if space.sampler == "grid" and interval:
        raise ConfigError(
            f"sweep.sampler=grid: {interval.key} is an interval from {interval.low:g} to {interval.high:g}, which has "
            "infinitely many values",
            hint=f"list them, {interval.key}={interval.low:g},{interval.high:g}, or use sweep.sampler=tpe",
        )
    if space.sampler == "grid" and settings.trials is not None:
        raise ConfigError(
            f"sweep.trials={settings.trials}: a grid runs all of its {space.arms} arms",
            hint="remove it, or use sweep.sampler=random",
        )
    if settings.seeds > 1 and any(axis.key.lstrip("+") == "seed" for axis in space.axes):
        raise ConfigError(f"sweep.seeds={settings.seeds}: seed is already an axis", hint="remove one of them")
