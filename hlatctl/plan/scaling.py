"""Scaling laws: the loss by size, tokens or compute, a score by the loss, and forecasts with errors.

Two laws of the loss L:

- ``size``: L = E + A N^-alpha + B D^-beta, of N parameters and D tokens (Chinchilla, arXiv 2203.15556, approach 3).
- ``compute``: L = E + A C^-gamma, of C FLOPs. It is used where the rungs can't tell A from B: if N and D grow in
  proportion, or if there are too few rungs.

Both are fitted to log L with a Huber loss. A score follows from a loss by a sigmoid (the second step of OLMo's ladder,
arXiv 2412.04403). Errors have two parts. A parametric bootstrap: the deviations of the rungs from the law, as many as
are left after its constants are fitted, say how far a run deviates. And a jackknife: how much the forecast depends on
each size, and on each number of tokens. They don't cover a law that holds for all rungs and not for the target.

Runs of the same size and tokens, of several seeds, count once, by their mean: they share their distance from the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Share of forecasts between the bounds of an error.
COVERAGE = 0.95
#: Deviations of log L above this count in proportion, not by their squares: 1 % of the loss. Chinchilla's 0.001 makes
#: the fit of a few rungs go through some of them exactly, and says nothing about their noise.
HUBER = 1e-2
#: Draws of the bootstrap.
_DRAWS = 200
_SEED = 0
#: Powers from which a fit starts, and shares of the lowest loss that are E there.
_POWERS = (0.1, 0.3, 0.6, 1.0)
_FLOORS = (0.1, 0.5, 0.9)
#: Bounds of a power; and of E, as a share of the lowest loss.
_POWER = (0.01, 3.0)
_LEAST_FLOOR = 1e-3
#: Least rungs for which a law leaves a deviation to measure errors by.
LEAST_RUNGS = 4
#: Least rungs of the law of size and tokens: its constants, and three deviations.
_LEAST_OF_SIZE = 8
#: Sizes and tokens of each kind that the law of both needs, and the greatest correlation of their logarithms.
_LEAST_VALUES = 3
_MOST_CORRELATED = 0.95
#: Points of a curve.
_CURVE = 32
#: A score of guessing and one above it differ by this many standard errors.
_SIGNAL = 2.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Where a law is evaluated.

    Args:
        parameters: those that a token is multiplied with.
        flops: of the whole training.
    """

    parameters: float
    tokens: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number with its error.

    Args:
        low, high: bounds that contain ``COVERAGE`` of the draws; None if no deviation is left to measure an error by.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Law:
    """A fitted law of the loss.

    Args:
        name: ``size`` or ``compute``.
        why: why it isn't the law of both size and tokens; empty if it is.
        constants: log E, then for each variable the logarithm of its factor at ``centres`` and its power.
        centres: mean logarithm of each variable.
        deviation: standard deviation of log L from the law; None without a degree of freedom.
    """

    name: str
    why: str
    constants: tuple[float, ...]
    centres: tuple[float, ...]
    deviation: float | None
    freedom: int

    def loss(self, at: Size) -> float:
        """Return the loss that the law gives."""
        return float(_curve(_np().array(self.constants), _variables([at], self.name) - self.centres)[0])

    @property
    def named(self) -> dict[str, float]:
        """The constants as the law writes them."""
        named = {"E": math.exp(self.constants[0])}
        for index, (factor, power) in enumerate(_NAMES[self.name]):
            log, named[power] = self.constants[1 + 2 * index], self.constants[2 + 2 * index]
            named[factor] = math.exp(log + named[power] * self.centres[index])
        return {name: named[name] for name in ("E", *(name for pair in _NAMES[self.name] for name in pair))}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a law says of a target.

    Args:
        constants: those of the law by name.
        curve: FLOPs and loss between the smallest rung and the target.
        held_out: forecast for the rung with most compute by the law of the others; None: they are too few.
    """

    law: Law
    loss: Value
    constants: dict[str, Value]
    curve: list[tuple[float, Value]]
    held_out: float | None
    draws: Any  # of the target's loss, an array; None without errors


_NAMES = {"size": (("A", "alpha"), ("B", "beta")), "compute": (("A", "gamma"),)}


def fit(rungs: Sequence[Size], losses: Sequence[float], *, law: str | None = None, huber: float = HUBER) -> Law:
    """Fit a law of the loss.

    Args:
        law: ``size`` or ``compute``; None: of both size and tokens, if the rungs determine it.
        huber: deviation of log L from which on it counts in proportion.

    Raises:
        ValueError: fewer than three rungs with different compute, or a loss that is not positive and finite.
    """
    if len({rung.flops for rung in rungs}) < 3:
        raise ValueError("three constants need rungs of at least three different amounts of compute")
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        raise ValueError("a loss is not a positive number")
    why = "" if law == "size" else _undetermined(rungs)
    name = law or ("compute" if why else "size")
    found = _fitted(_variables(rungs, name), _np().log(_np().array(losses, dtype=float)), huber)
    return Law(name, why if name == "compute" else "", *found)


def forecast(rungs: Sequence[Size], losses: Sequence[float], target: Size, *, law: str | None = None) -> Forecast:
    """Fit a law to the final losses of rungs, and evaluate it at a target.

    Raises:
        ValueError: as :func:`fit`.
    """
    np = _np()
    rungs, losses = _merged(rungs, losses)
    fitted = fit(rungs, losses, law=law)
    path = _path(rungs, target)
    at = _variables([target, *path], fitted.name) - fitted.centres
    best = _curve(np.array(fitted.constants), at)
    names = list(fitted.named)
    if fitted.deviation is None:
        constants = {name: Value(value=value) for name, value in fitted.named.items()}
        curve = [(place.flops, Value(value=float(loss))) for place, loss in zip(path, best[1:], strict=True)]
        return Forecast(
            law=fitted, loss=Value(value=float(best[0])), constants=constants, curve=curve, held_out=None, draws=None
        )
    laws, deviations = _redrawn(fitted, _variables(rungs, fitted.name))
    curves = np.array([_curve(np.array(other.constants), at) for other in laws])
    rng = np.random.default_rng(_SEED + 1)
    # The dependence on single rungs grows from the largest one on, where the law has nothing more to hold it.
    most = max(rung.flops for rung in rungs)
    beyond = [math.log(place.flops / most) for place in (target, *path)]
    growth = np.maximum(beyond, 0.0) / max(beyond[0], 1e-9)
    curves *= np.exp(np.outer(rng.standard_normal(len(laws)), _sensitivity(fitted, rungs, losses, target) * growth))
    draws = curves[:, 0] * np.exp(deviations * rng.standard_normal(len(deviations)))  # a single run deviates too
    drawn = {name: [other.named[name] for other in laws] for name in names}
    return Forecast(
        law=fitted,
        loss=_between(float(best[0]), draws),
        constants={name: _between(fitted.named[name], np.array(drawn[name])) for name in names},
        curve=[
            (place.flops, _between(float(best[1 + index]), curves[:, 1 + index])) for index, place in enumerate(path)
        ],
        held_out=_held_out(rungs, losses, fitted.name),
        draws=draws,
    )


def _merged(rungs: Sequence[Size], losses: Sequence[float]) -> tuple[list[Size], list[float]]:
    """Return each size and number of tokens once, with the mean of its losses."""
    found = dict[Size, list[float]]()
    for rung, loss in zip(rungs, losses, strict=True):
        found.setdefault(rung, []).append(loss)
    return list(found), [math.fsum(values) / len(values) for values in found.values()]


def _sensitivity(law: Law, rungs: Sequence[Size], losses: Sequence[float], target: Size) -> float:
    """Return the standard error of the target's log L, by how much it depends on each size and each number of tokens.

    This is the jackknife over groups (Efron, 1982, section 3), once for each variable.
    """
    np = _np()
    variables, logs = _variables(rungs, law.name), np.log(np.array(losses, dtype=float))
    start, variance = [np.array(law.constants)], 0.0
    for values in variables.T:
        without = []
        for value in sorted(set(values)):
            kept = values != value
            if kept.sum() > len(law.constants):
                found = Law(law.name, "", *_fitted(variables[kept], logs[kept], HUBER, start))
                without.append(math.log(found.loss(target)))
        if len(without) > 1:
            variance += (len(without) - 1) * float(np.var(without))
    return math.sqrt(variance)


def _held_out(rungs: Sequence[Size], losses: Sequence[float], law: str) -> float | None:
    """Return the forecast for the rung with most compute by the law of the others."""
    most = max(rungs, key=lambda rung: rung.flops)
    others = [(rung, loss) for rung, loss in zip(rungs, losses, strict=True) if rung.flops < most.flops]
    if len(others) < (1 + 2 * len(_NAMES[law])) or len({rung.flops for rung, _ in others}) < 3:
        return None
    return fit([rung for rung, _ in others], [loss for _, loss in others], law=law).loss(most)


def _undetermined(rungs: Sequence[Size]) -> str:
    """Return why rungs don't determine the law of size and tokens; empty if they do."""
    np = _np()
    sizes, tokens = [rung.parameters for rung in rungs], [rung.tokens for rung in rungs]
    if len(set(sizes)) >= _LEAST_VALUES and len(set(tokens)) >= _LEAST_VALUES:
        correlation = float(np.corrcoef(np.log(sizes), np.log(tokens))[0, 1])
        if correlation > _MOST_CORRELATED:
            return "parameters and tokens grow in proportion, so the rungs can't tell alpha from beta"
    if len(rungs) < _LEAST_OF_SIZE:
        return f"the law of size and tokens has 5 constants and needs {_LEAST_OF_SIZE} rungs; there are {len(rungs)}"
    if min(len(set(sizes)), len(set(tokens))) < _LEAST_VALUES:
        return f"the law of size and tokens needs rungs of at least {_LEAST_VALUES} sizes and numbers of tokens"
    return ""


def _path(rungs: Sequence[Size], target: Size) -> list[Size]:
    """Return places from the smallest rung to the target, at equal steps of their logarithms."""
    least = min(rungs, key=lambda rung: rung.flops)

    def at(share: float) -> Size:
        parts = ((least.parameters, target.parameters), (least.tokens, target.tokens), (least.flops, target.flops))
        parameters, tokens, flops = (first * (last / first) ** share for first, last in parts)
        return Size(parameters=parameters, tokens=tokens, flops=flops)

    return [at(index / (_CURVE - 1)) for index in range(_CURVE)]


def _variables(at: Sequence[Size], law: str) -> Any:
    np = _np()
    if law == "compute":
        return np.log([[one.flops] for one in at])
    return np.log([[one.parameters, one.tokens] for one in at])


def _curve(constants: Any, x: Any) -> Any:
    return _np().exp(_logs(constants, x))


def _logs(constants: Any, x: Any) -> Any:
    np = _np()
    terms = constants[1::2] - x * constants[2::2]
    return np.logaddexp(constants[0], np.logaddexp.reduce(terms, axis=1))


def _fitted(
    variables: Any, logs: Any, huber: float, starts: Sequence[Any] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...], float | None, int]:
    """Return constants, centres, standard deviation and degrees of freedom of the best fit."""
    np = _np()
    from scipy.optimize import least_squares

    centres = variables.mean(axis=0)
    x = variables - centres
    lowest = float(logs.min())

    def deviations(constants: Any) -> Any:
        return _logs(constants, x) - logs

    def slopes(constants: Any) -> Any:
        total = _logs(constants, x)
        shares = np.exp(constants[1::2] - x * constants[2::2] - total[:, None])
        columns = [np.exp(constants[0] - total)]
        for index in range(x.shape[1]):
            columns += [shares[:, index], -x[:, index] * shares[:, index]]
        return np.stack(columns, axis=1)

    kinds = x.shape[1]
    bounds = ([lowest + math.log(_LEAST_FLOOR), *[-np.inf, _POWER[0]] * kinds], [lowest, *[np.inf, _POWER[1]] * kinds])
    best: Any = None
    for start in _starts(x, logs) if starts is None else starts:
        found = least_squares(
            deviations, np.clip(start, *bounds), slopes, bounds=bounds, loss="huber", f_scale=huber, x_scale="jac"
        )
        best = found if best is None or found.cost < best.cost else best
    freedom = len(logs) - len(best.x)
    deviation = math.sqrt(float((best.fun**2).sum()) / freedom) if freedom > 0 else None
    return tuple(map(float, best.x)), tuple(map(float, centres)), deviation, max(0, freedom)


def _starts(x: Any, logs: Any) -> list[Any]:
    """Return starts of a fit: for some powers and shares of E, the factors that fit best."""
    np = _np()
    import itertools

    from scipy.optimize import nnls

    losses, found = np.exp(logs), []
    for powers in itertools.product(_POWERS, repeat=x.shape[1]):
        for share in _FLOORS:
            floor = share * losses.min()
            factors, _ = nnls(np.exp(-x * powers), losses - floor)
            factors = np.log(np.maximum(factors, 1e-3 * floor))
            found.append(
                np.array([np.log(floor), *(v for pair in zip(factors, powers, strict=True) for v in pair)], dtype=float)
            )
    return found


def _redrawn(law: Law, variables: Any) -> tuple[list[Law], Any]:
    """Return laws that are fitted to losses drawn around a law, and the standard deviation of each draw.

    The deviation is itself uncertain with few rungs, so each draw has its own, by the distribution of its estimate.
    """
    np = _np()
    assert law.deviation is not None
    rng = np.random.default_rng(_SEED)
    fitted = _logs(np.array(law.constants), variables - law.centres)
    deviations = law.deviation * np.sqrt(law.freedom / rng.chisquare(law.freedom, _DRAWS))
    start = [np.array(law.constants)]
    laws = []
    for deviation in deviations:
        logs = fitted + deviation * rng.standard_normal(len(fitted))
        laws.append(Law(law.name, "", *_fitted(variables, logs, HUBER, start)))
    return laws, deviations


def _between(value: float, draws: Any) -> Value:
    np = _np()
    low, high = np.quantile(draws, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Value(value=value, low=float(min(low, value)), high=float(max(high, value)))


@dataclass(frozen=True)
class Sigmoid:
    """A score by a loss: guessing + (top - guessing) / (1 + exp((loss - middle) / width))."""

    chance: float
    top: float
    middle: float
    width: float

    def score(self, loss: Any) -> Any:
        """Return the score at a loss, or at an array of them."""
        np = _np()
        steps = np.clip((loss - self.middle) / self.width, -60, 60)
        return self.chance + (self.top - self.chance) / (1 + np.exp(steps))


def fit_sigmoid(
    losses: Sequence[float], scores: Sequence[float], chance: float = 0.0, near: Sigmoid | None = None
) -> Sigmoid:
    """Fit a sigmoid of a score that is at most 1.

    Args:
        chance: the score of guessing, which the highest losses have.
        near: where to begin; None: at many places.

    Raises:
        ValueError: fewer than four points.
    """
    np = _np()
    from scipy.optimize import least_squares

    if len(losses) < LEAST_RUNGS:
        raise ValueError("three constants of a sigmoid need at least four scores")
    x, y = np.array(losses, dtype=float), np.array(scores, dtype=float)
    spread = float(x.max() - x.min()) or 1.0
    top = min(1.0, max(float(y.max()), chance + 0.05))
    bounds = ([chance, x.min() - 10 * spread, spread / 50], [1.0, x.max() + 10 * spread, 10 * spread])
    starts = (
        [[near.top, near.middle, near.width]]
        if near
        else [
            [first, x.min() + share * spread, spread * width]
            for first in (top, 1.0)
            for share in (-0.5, 0.0, 0.5, 1.0)
            for width in (0.1, 0.4, 1.0)
        ]
    )

    def deviations(constants: Any) -> Any:
        return Sigmoid(chance, *constants).score(x) - y

    found = [least_squares(deviations, np.clip(start, *bounds), bounds=bounds) for start in starts]
    best = min(found, key=lambda one: float(one.cost))
    return Sigmoid(chance, *map(float, best.x))


def forecast_score(
    losses: Sequence[float], scores: Sequence[float], of_target: Forecast, chance: float = 0.0, stderr: float = 0.0
) -> Value:
    """Forecast a score from that of its loss.

    Args:
        losses, scores: pairs of all milestones.
        of_target: the forecast of the target's loss.
        stderr: standard error of a single score.

    Raises:
        ValueError: too few pairs, or all scores are those of guessing.
    """
    np = _np()
    if max(scores, default=0.0) <= chance + _SIGNAL * stderr:
        raise ValueError(f"all scores are within {_SIGNAL:g} standard errors of guessing ({chance:.3g})")
    curve = fit_sigmoid(losses, scores, chance)
    value = float(curve.score(of_target.loss.value))
    if of_target.draws is None:
        return Value(value=value)
    x, y = np.array(losses, dtype=float), np.array(scores, dtype=float)
    freedom = max(1, len(y) - 3)
    deviation = max(stderr, math.sqrt(float(((curve.score(x) - y) ** 2).sum()) / freedom))
    rng = np.random.default_rng(_SEED)
    draws = []
    for loss in of_target.draws[: _DRAWS // 2]:
        again = list(curve.score(x) + deviation * rng.standard_normal(len(y)))
        other = fit_sigmoid(losses, again, chance, near=curve)
        draws.append(float(other.score(loss)) + deviation * rng.standard_normal())
    return _between(value, np.clip(draws, 0.0, 1.0))


def _np() -> Any:
    import numpy  # late: plans need only arithmetic

    return numpy
