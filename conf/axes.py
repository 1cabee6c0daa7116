"""What an override sweeps over, in Hydra's grammar: ``a,b``, ``choice()``, ``range()``, ``glob()``, ``interval()``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.compose import groups
from hlatctl.run.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: What all trials of a sweep have in common by its nature.
_COMMON = ("runs_dir", "experiment_name")
#: Its value holds a "=", which Hydra wants quoted.
_OBJECTIVE = re.compile(r"(sweep\.objective)=([^'\"].*)")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key, or one group, with what it is tried with.

    Args:
        key: as an override spells it.
        values: texts of overrides; empty where an interval is given instead.
        low, high: of the interval, both within it.
        log: drawn evenly in its logarithm.
        integer: whole numbers only.
    """

    key: str
    values: list[str]
    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False

    @property
    def is_interval(self) -> bool:
        """It has no list of values."""
        return self.low is not None

    @property
    def example(self) -> str:
        """One of its values: the first, or the middle of the interval."""
        if self.values:
            return self.values[0]
        low, high = self.low or 0.0, self.high or 0.0
        middle = math.sqrt(low * high) if self.log else (low + high) / 2
        return str(round(middle)) if self.integer else f"{middle:g}"


def parse_override(text: str) -> Override:
    """One override as Hydra understands it.

    Raises:
        ConfigError: bad grammar, or a choice of nothing.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    objective = _OBJECTIVE.fullmatch(text)
    try:
        return OverridesParser.create().parse_override(f"{objective[1]}='{objective[2]}'" if objective else text)
    except HydraException as error:
        if "empty choice" in str(error):
            raise _empty(text) from None
        hint = "such as optimizer.beta2=0.95,0.99 or 'optimizer.lr=interval(1e-4,1e-3)'"
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}", hint=hint) from None


def make_axis(override: Override, least: int = 2) -> Axis:
    """The axis that an override makes.

    Args:
        override: a sweep in Hydra's sense.
        least: values that it must have.

    Raises:
        ConfigError: it is empty, or has fewer values, or one twice, or its key is common to all trials.
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
        raise ConfigError(f"{text}: names {twice} twice")
    if len(values) < least:
        raise ConfigError(f"{text}: has one value, so it is not swept", hint=f"write {key}={values[0]}, or more values")
    return Axis(key=key, values=values)


def _interval(key: str, text: str, value: Any) -> Axis:
    integer = isinstance(value.start, int) and isinstance(value.end, int)
    if not value.start < value.end:
        raise ConfigError(f"{text}: the interval is empty, its end must be above its beginning")
    log = "log" in value.tags
    if log and value.start <= 0:
        raise ConfigError(f"{text}: a logarithmic interval must begin above 0")
    return Axis(key=key, values=[], low=float(value.start), high=float(value.end), log=log, integer=integer)


def _empty(text: str) -> ConfigError:
    return ConfigError(f"{text}: the axis is empty", hint="name at least two values, such as optimizer.beta2=0.95,0.99")
