"""Axes of a sweep, in Hydra's grammar: ``a,b``, ``choice()``, ``range()``, ``glob()``, ``interval()``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.compose import check_size, groups
from hlatctl.run.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: Keys that can't differ between the trials of a sweep.
_COMMON = ("runs_dir", "experiment_name")
#: Its value may contain a "=", which Hydra requires in quotes.
_OBJECTIVE = re.compile(r"(sweep\.objective)=([^'\"].*)")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key or group, with the values to try.

    Args:
        key: as written in an override.
        values: as written in overrides; empty for an interval.
        low, high: bounds of the interval, both included.
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
        ConfigError: it is empty, has too few values or one twice, or its key must be the same for all trials.
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
