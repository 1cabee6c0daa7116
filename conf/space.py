"""The search space of a sweep: reading, writing and extending it, its axes, and fast composition of its trials.

Axes are written in Hydra's grammar: ``a,b``, ``choice()``, ``range()``, ``glob()``, ``interval()``. The sampler
(``flows.sweep``) decides the order of the arms.

:class:`Variations` composes configurations that differ in a few overrides, with the same results as ``conf.compose``.
Composing takes a tenth of a second, mostly for the YAML groups. If only values of keys differ, the groups are composed
once and the values are inserted afterwards, which is also Hydra's last step.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from conf import folders
from conf.compose import CONF_DIR, check_size, compose, compose_plain, finish, groups
from conf.constraints import violations
from conf.load import decode_dataclass, parse_yaml
from conf.schema import Config, LadderConfig, SweepConfig
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, suggest
from hlatctl.run.files import DAMAGED, read_text, why

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


_T = TypeVar("_T")
#: Keys that can't differ between the trials of a sweep.
_COMMON = ("runs_dir", "experiment_name")
#: The key whose value may contain a "=", which Hydra requires in quotes.
_OBJECTIVE = re.compile(r"(sweep\.objective)=([^'\"].*)")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key or group, with the values to try.

    Args:
        key: as written in an override.
        values: as written in overrides; empty for an interval.
        low, high: bounds of the interval, inclusive.
        log: draw uniformly in the logarithm.
        integer: draw whole numbers.
    """

    key: str
    values: list[str]
    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False

    @property
    def is_interval(self) -> bool:
        """Whether it is an interval instead of a list of values."""
        return self.low is not None

    @property
    def example(self) -> str:
        """The first value, or the middle of the interval."""
        if self.values:
            return self.values[0]
        low, high = self.low or 0.0, self.high or 0.0
        middle = math.sqrt(low * high) if self.log else (low + high) / 2
        return str(round(middle)) if self.integer else f"{middle:g}"


def parse_override(text: str) -> Override:
    """Parse one override in Hydra's grammar.

    Raises:
        ConfigError: bad grammar, or an empty choice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    check_size(text)
    objective = _OBJECTIVE.fullmatch(text)
    try:
        return OverridesParser.create().parse_override(f"{objective[1]}='{objective[2]}'" if objective else text)
    except HydraException as error:
        if "empty choice" in str(error):
            raise _empty(text) from None
        hint = "such as optimizer.beta2=0.95,0.99 or 'optimizer.lr=interval(1e-4,1e-3)'"
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}", hint=hint) from None


def make_axis(override: Override, least: int = 2) -> Axis:
    """Return the axis of an override with several values.

    Args:
        override: a sweep in Hydra's sense.
        least: minimum number of values.

    Raises:
        ConfigError: it is empty, has too few values or a value twice, or its key must be the same for all trials.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep

    key, text, value = override.get_key_element(), str(override.input_line), override.value()
    if override.key_or_group in _COMMON:
        raise ConfigError(f"{text}: is the same for all trials of a sweep, and can't be an axis")
    if isinstance(value, IntervalSweep):
        return _interval(key, text, value)
    if isinstance(override._value, Glob):
        if override.key_or_group not in groups():
            known = ", ".join(groups())
            raise ConfigError(f"{text}: glob() is for the options of a group", hint=f"groups: {known}")
        values = override._value.filter(groups()[override.key_or_group])
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise _empty(text)
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise ConfigError(f"{text}: lists {twice} twice")
    if len(values) < least:
        raise ConfigError(f"{text}: has one value, so it is not swept", hint=f"write {key}={values[0]}, or more values")
    return Axis(key=key, values=values)


def _interval(key: str, text: str, value: Any) -> Axis:
    integer = isinstance(value.start, int) and isinstance(value.end, int)
    if not value.start < value.end:
        raise ConfigError(f"{text}: the interval is empty, its end must be above its start")
    log = "log" in value.tags
    if log and value.start <= 0:
        raise ConfigError(f"{text}: a logarithmic interval must start above 0")
    return Axis(key=key, values=[], low=float(value.start), high=float(value.end), log=log, integer=integer)


def _empty(text: str) -> ConfigError:
    return ConfigError(f"{text}: the axis is empty", hint="name at least two values, such as optimizer.beta2=0.95,0.99")


#: Settings that an extended sweep may change, because they affect no trial and no comparison.
_MAY_CHANGE = ("trials", "parallel")
#: Arms to draw if `sweep.trials` is not set.
_DEFAULT_TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space of a sweep.

    Args:
        overrides: overrides of all trials.
        axes: in the given order.
        folder: base of relative paths.
        config_dirs: the user's folders of configuration; its trials are composed with them.
        points: the arms of a ladder, which has no others: its rungs by compute, and its target as the last one.
        ladder: settings of a ladder; without effect if there are no points.
    """

    overrides: list[str]
    axes: list[Axis]
    settings: SweepConfig
    folder: str
    config_dirs: list[str] = field(default_factory=list)
    points: list[dict[str, str]] = field(default_factory=list)
    ladder: LadderConfig = field(default_factory=LadderConfig)

    @property
    def target(self) -> int | None:
        """The arm of a ladder's target; None in a sweep."""
        return len(self.points) - 1 if self.points else None

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
        if self.points:
            return len(self.points) - (not self.ladder.train_target)
        if self.sampler == "grid":
            return math.prod(len(axis.values) for axis in self.axes)
        return self.settings.trials or _DEFAULT_TRIALS

    @property
    def trials(self) -> int:
        """Number of runs."""
        return sum(map(self.seeds_of, range(self.arms)))

    def seeds_of(self, arm: int) -> int:
        """Return the number of trials of an arm; a ladder's target is trained once."""
        return 1 if arm == self.target else self.settings.seeds

    def grid(self) -> Iterator[dict[str, str]]:
        """Yield every arm of finite axes; the last axis changes fastest."""
        if self.points:
            yield from self.points[: self.arms]
            return
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield {axis.key: value for axis, value in zip(self.axes, values, strict=True)}

    def example(self) -> dict[str, str]:
        """Return one arm for checks before the sweep: the first value of each axis or the middle of an interval."""
        if self.points:
            return self.points[0]
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


def expand(arguments: Sequence[str], group: str = folders.SWEEP) -> list[str]:
    """Return the arguments with ``sweep=NAME``, or another group's, replaced by the arguments in that file.

    Raises:
        ConfigError: there is no such file, or a user's folder can't be used.
    """
    folders.checked_folders()
    expanded: list[str] = []
    for text in arguments:
        if not text.startswith(f"{group}="):
            expanded.append(text)
            continue
        name, known = text.removeprefix(f"{group}="), folders.names(group)
        if name not in known:
            raise ConfigError(f"{group}={name}: no such {group}", hint=suggest(name, known, prefix=f"{group}="))
        path = folders.file_of(group, name)
        assert path is not None
        expanded += parse_yaml(read_text(path))["arguments"]
    return expanded


def extend(space: Space, arguments: Sequence[str]) -> Space:
    """Return a sweep's space with more values.

    Args:
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
    if space.points:
        raise ConfigError(
            "--extend: a ladder's rungs follow from its rule, and can't be extended",
            hint="`hlatctl ladder --target LADDER` trains its target; `hlatctl ladder` starts a new ladder",
        )
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
    """Return the old axis with the values that the new one adds; refuse a new one that lacks old values."""
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


def _values(own: dict[str, Override], cls: type = SweepConfig, prefix: str = "sweep.") -> dict[str, Any]:
    known = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    for key, override in own.items():
        name = key.removeprefix(prefix)
        if name not in known:
            raise ConfigError(f"{key}: unknown key", hint=suggest(name, known, prefix=prefix))
        if override.is_sweep_override():
            text = override.input_line or ""
            hint = f"a list is written {key}=[{text.partition('=')[2]}]" if prefix != "sweep." else ""
            raise ConfigError(f"{text}: is a setting of the {prefix[:-1]}, and can't be an axis", hint=hint)
        values[name] = override.value()
    return values


def settings_of(cls: type[_T], parsed: dict[str, Override], prefix: str) -> _T:
    """Return the settings of a sweep or a ladder, decoded and checked, from the arguments that begin with a prefix.

    Raises:
        ConfigError: an unknown key, or a value of another type or out of bounds.
    """
    own = {key: override for key, override in parsed.items() if key.startswith(prefix)}
    settings = decode_dataclass(cls, _values(own, cls, prefix), prefix)
    for error in violations(settings, prefix):
        raise error
    return settings


def _settings(own: dict[str, Override]) -> SweepConfig:
    return decode_dataclass(SweepConfig, _values(own), "sweep.")


def _check(space: Space) -> None:
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


class Variations:
    """Composes one configuration after another.

    Args:
        overrides: overrides of all configurations.
        folder: base of relative paths.
        runs_dir: folder of the runs in all configurations; None: as composed.
        config_dirs: the user's folders of configuration; None: those that are in use now.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        folder: Path,
        runs_dir: str | None = None,
        config_dirs: Sequence[str] | None = None,
    ) -> None:
        self._config_dirs = [str(path) for path in folders.user_folders()] if config_dirs is None else config_dirs
        self._overrides, self._folder, self._runs_dir = list(overrides), folder, runs_dir
        #: Composed groups, by their overrides and by the other keys that differ; these keys exist.
        self._bases: dict[tuple[str, ...], dict[str, Any]] = {}
        with self._using():
            self._groups = set(groups())
            self._quick = not any(map(_refers, overrides)) and not any(map(_refers, _yaml_texts()))

    def compose(self, point: dict[str, str]) -> Config:
        """Return the configuration with these overrides, by key, and the common ones.

        Raises:
            ConfigError: as ``conf.compose.compose``.
        """
        with self._using():
            config = self._compose(point)
        return dataclasses.replace(config, runs_dir=self._runs_dir) if self._runs_dir else config

    def _using(self) -> AbstractContextManager[None]:
        return folders.using([Path(path) for path in self._config_dirs], others=False)

    def _compose(self, point: dict[str, str]) -> Config:
        texts = {key: f"{key}={value}" for key, value in point.items()}
        values = [key for key in point if self._quick and self._is_value(key, point[key])]
        kept = [text for key, text in texts.items() if key not in values]
        base = self._bases.get((*kept, *values))
        if base is None:
            config = compose([*self._overrides, *texts.values()], self._folder)
            self._bases[(*kept, *values)] = compose_plain([*self._overrides, *kept])
            return config
        plain = copy.deepcopy(base)
        for key in values:
            _put(plain, key.split("."), _parsed(texts[key]))
        return finish(plain, self._folder)

    def _is_value(self, key: str, value: str) -> bool:
        """Whether the override sets a key to a value, instead of merging a group or a mapping."""
        plain = key[0] not in "+~" and "@" not in key and key not in self._groups
        return plain and "${" not in value and not value.startswith("{")


def _refers(text: str) -> bool:
    """Whether a text refers to another key: ``${optimizer.lr}``, but not ``${oc.env:HOME}``."""
    return bool(re.search(r"\$\{[^}:]*\}", text))


def _yaml_texts() -> list[str]:
    paths = [path for folder in (CONF_DIR, *folders.checked_folders()) for path in sorted(folder.glob("*.yaml"))]
    paths += [path for folder in (CONF_DIR, *folders.user_folders()) for path in sorted(folder.glob("*/*.yaml"))]
    return [path.read_text(encoding="utf-8") for path in paths]


def _put(plain: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        plain = plain[name]
    plain[path[-1]] = value


def _parsed(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text).value()
