"""How a sweep compares its trials: the objective, signs of divergence, and Optuna's study. The only importer of Optuna.

Optuna draws arms and decides which trials fall behind. Its study is a view of the sweep's journal: every driver
rebuilds it from there, so the two never differ. The sampler is seeded again for every arm, so an interrupted sweep
draws the same arms as an uninterrupted one. A diverging run is recognized by its gradient norm and loss, as in HLAT
(arXiv 2404.10630, section 4.3).
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import token_count
from conf.schema import Config, SweepConfig
from conf.space import Axis, Space
from hlatctl.run.errors import ConfigError, DependencyError, install
from hlatctl.run.evaluations import is_better_low
from hlatctl.run.state import RunState
from hlatctl.run.sweep import SweepState, TrialState
from hlatctl.units import number

if TYPE_CHECKING:
    from optuna.trial import TrialState as OptunaState


#: Successive halving: the better half continues at each rung whose tokens are a power of two times the first's.
_REDUCTION = 2
#: Copies of each arm for fANOVA. Its trees draw samples with replacement; with one copy, most lack a third of the arms.
_COPIES = 8
#: Optuna draws with NumPy, which takes seeds below this value.
_SEEDS = 2**32


class Study:
    """The trials of a sweep as Optuna sees them, with the same numbers.

    Args:
        state: the sweep's state; its trials are added to the study.
        minimize: less is better.
        seed: seed for drawing arms.
        first_rung_tokens: tokens at the first comparison.
        path: path of its database, which is replaced; None: in memory.
    """

    def __init__(
        self, space: Space, state: SweepState, *, minimize: bool, seed: int, first_rung_tokens: int, path: Path | None
    ) -> None:
        self._optuna = _import()
        self._space, self.seed = space, seed
        self._distributions = {axis.key: self._distribution(axis) for axis in space.axes}
        if path is not None:
            path.unlink(missing_ok=True)
        self._study = self._optuna.create_study(
            storage=f"sqlite:///{path}" if path else None,
            study_name=state.sweep_id,
            direction="minimize" if minimize else "maximize",
            pruner=self._pruner(first_rung_tokens),
        )
        for _, trial in sorted(state.trials.items()):
            self._add(trial)

    def draw(self, arm: int) -> dict[str, str]:
        """Draw a new arm from the results so far; return its values by axis."""
        self._study.sampler = self._sampler((self.seed + arm) % _SEEDS)
        drawn = self._study.ask(self._distributions).params
        return {key: str(value) for key, value in drawn.items()}

    def add(self, trial: TrialState) -> None:
        """Add a trial, unless it was added when it was drawn."""
        if len(self._study.get_trials(deepcopy=False)) <= trial.number:
            self._add(trial)

    def report(self, number: int, tokens: int, value: float) -> bool:
        """Store a trial's objective at a rung; return whether to prune the trial."""
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        trial.report(value, tokens)
        return bool(trial.should_prune())

    def importances(self) -> dict[str, float]:
        """Return each axis's share of the variance between the arms' means, largest first; the sum is 1.

        Interactions between axes are not included (fANOVA: Hutter et al., ICML 2014). The result is empty if there are
        fewer than two axes, or if all means are equal.

        Raises:
            DependencyError: scikit-learn is not installed.
        """
        values: dict[tuple[Any, ...], list[float]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "COMPLETE":
                values.setdefault(tuple(trial.params[key] for key in self._distributions), []).append(trial.value)
        means = {point: statistics.fmean(results) for point, results in values.items()}
        if len(self._distributions) < 2 or len(set(means.values())) < 2:
            return {}
        study = self._optuna.create_study()
        study.add_trials(
            [
                self._optuna.trial.create_trial(
                    params=dict(zip(self._distributions, point, strict=True)),
                    distributions=self._distributions,
                    value=mean,
                )
                for point, mean in means.items()
                for _ in range(_COPIES)
            ]
        )
        evaluator = self._optuna.importance.FanovaImportanceEvaluator(seed=self.seed % _SEEDS)
        try:
            shares = self._optuna.importance.get_param_importances(study, evaluator=evaluator)
        except ImportError as error:
            raise DependencyError(f"importances of axes need scikit-learn ({error})", hint=install("head")) from None
        return {key: float(share) for key, share in shares.items()}

    def tell(self, trial: TrialState) -> None:
        """Store a trial's end."""
        state, value = self._outcome(trial)
        self._study.tell(trial.number, value if state.name == "COMPLETE" else None, state=state)

    def _add(self, trial: TrialState) -> None:
        state, value = self._outcome(trial)
        params = {axis.key: _value(axis, trial.point[axis.key]) for axis in self._space.axes}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                value=value,
                params=params,
                distributions=self._distributions,
                intermediate_values=dict(trial.rungs),
                user_attrs={"run_id": trial.run_id},
            )
        )

    def _outcome(self, trial: TrialState) -> tuple[OptunaState, float | None]:
        """Return Optuna's state and value of a trial. A trial that was ended early has its newest rung's value."""
        states = self._optuna.trial.TrialState
        if not trial.ended:
            return states.RUNNING, None
        if trial.status == "finished" and trial.value is not None and math.isfinite(trial.value):
            return states.COMPLETE, trial.value
        newest = trial.rungs[max(trial.rungs)] if trial.rungs else math.nan
        if trial.status in ("pruned", "diverged") and math.isfinite(newest):
            return states.PRUNED, newest
        return states.FAIL, None

    def _distribution(self, axis: Axis) -> Any:
        distributions = self._optuna.distributions
        if not axis.is_interval:
            return distributions.CategoricalDistribution(axis.values)
        if axis.integer:
            return distributions.IntDistribution(int(axis.low or 0), int(axis.high or 0), log=axis.log)
        return distributions.FloatDistribution(axis.low or 0.0, axis.high or 0.0, log=axis.log)

    def _sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._space.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        # constant_liar treats running trials as bad ones, so that further ones are drawn elsewhere.
        return samplers.TPESampler(seed=seed, n_startup_trials=self._space.settings.startup_trials, constant_liar=True)

    def _pruner(self, first_rung_tokens: int) -> Any:
        pruners, settings = self._optuna.pruners, self._space.settings
        if settings.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=settings.startup_trials)
        if settings.pruner == "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=first_rung_tokens, reduction_factor=_REDUCTION)
        return pruners.NopPruner()


def _value(axis: Axis, text: str) -> Any:
    if not axis.is_interval:
        return text
    return int(text) if axis.integer else float(text)


def _import() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise DependencyError(
            f"a sweep needs optuna, which can't be imported ({error})", hint=install("head")
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


#: The training loss is averaged over this many steps, because the loss of a single batch is noisy.
WINDOW_STEPS = 20
LOSS = "loss"
_VALIDATION = "validation_loss"
#: The task of held-out text.
_HELD_OUT = "validation"
_NAME = re.compile(r"(loss|validation_loss|eval\.([\w./-]+))(?:@tokens=(\w[\w.]*))?")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The number by which trials are compared.

    Args:
        name: as in ``sweep.objective``.
        score: its name among an evaluation's scores; empty for the training loss.
        at_tokens: number of tokens at which it is final; None: at the end.
        minimize: less is better.
    """

    name: str
    score: str
    at_tokens: int | None
    minimize: bool

    def rungs(self, config: Config, parts: int) -> list[int]:
        """Return the numbers of tokens at which runs are compared; at the last one the value is final.

        Args:
            parts: number of rungs of the training loss; scores have one rung per milestone.
        """
        last = self.at_tokens or config.total_tokens
        if self.score:
            return [tokens for tokens in sorted(config.milestones.values()) if tokens <= last]
        return sorted({math.ceil(last * part / parts) for part in range(1, parts + 1)})

    def values(self, state: RunState, rungs: list[int]) -> dict[int, float]:
        """Return the objective by tokens, at the rungs that the run has reached; NaN if it is not finite."""
        if not self.score:
            return _losses(state, rungs)
        reached = [tokens for tokens in rungs if tokens in state.milestones]
        scores = {tokens: state.milestones[tokens].scores.get(self.score) for tokens in reached}
        return {tokens: number(score, "value") for tokens, score in scores.items() if score is not None}


def objective(settings: SweepConfig, config: Config) -> Objective:
    """Return the objective that a sweep's settings name, checked against one of its runs.

    Raises:
        ConfigError: the name is unknown, or no run reports it.
    """
    name = settings.objective or (_VALIDATION if config.eval.enabled else LOSS)
    match = _NAME.fullmatch(name)
    if not match:
        raise ConfigError(
            f"sweep.objective={name}: not known",
            hint="loss, validation_loss, eval.TASK, each with @tokens=N for the value there",
        )
    kind, task, at = match.groups()
    at_tokens = None if at is None else token_count(at, "sweep.objective@tokens")
    aim = Objective(
        name=name,
        score="" if kind == LOSS else task or _VALIDATION,
        at_tokens=at_tokens,
        minimize=(settings.direction or ("max" if task and not is_better_low(task) else "min")) == "min",
    )
    check(aim, config)
    return aim


def check(aim: Objective, config: Config) -> None:
    """Check that a run of this configuration reports an objective.

    Raises:
        ConfigError: the run is not evaluated, or not at these tokens.
    """
    if aim.score and not config.eval.enabled:
        raise ConfigError(
            f"sweep.objective={aim.name}: no trial reports it, because eval.enabled=false",
            hint="sweep.objective=loss, or eval.enabled=true",
        )
    if aim.score.startswith("validation_") and config.eval.tasks and _HELD_OUT not in config.eval.tasks:
        raise ConfigError(
            f"sweep.objective={aim.name}: no trial reports it, because eval.tasks lacks {_HELD_OUT}",
            hint=f"eval.tasks=[{','.join([_HELD_OUT, *config.eval.tasks])}], or another sweep.objective",
        )
    at = aim.at_tokens
    if at is None:
        return
    if not aim.score and at > config.total_tokens:
        raise ConfigError(
            f"sweep.objective={aim.name}: no trial reports it, they end at {config.total_tokens:,} tokens"
        )
    if aim.score and at not in config.milestones.values():
        raise ConfigError(
            f"sweep.objective={aim.name}: no trial reports it, there is no milestone of {at:,} tokens",
            hint=f"milestones: {', '.join(map(str, config.milestones.values()))}; eval.every_tokens sets them",
        )


def _losses(state: RunState, rungs: list[int]) -> dict[int, float]:
    losses = {}
    for rung in rungs:
        window = [number(step, "loss") for step in state.steps.until(rung, WINDOW_STEPS)]
        if window:
            losses[rung] = math.fsum(window) / len(window) if all(map(math.isfinite, window)) else math.nan
    return losses


#: A spike of the gradient norm that lasts this many steps counts as growth: the running mean has risen with it.
GROWTH_STEPS = 20
#: The norm must also exceed this multiple of the mean before the spike.
GROWTH_FACTOR = 2.0
#: Steps at the start and at the end of a run whose losses are compared.


def divergence(state: RunState) -> str:
    """Return why a run has diverged, in a sentence; empty if it has not."""
    return _not_finite(state) or _growing(state) or _above_start(state)


def _not_finite(state: RunState) -> str:
    """Return why training ended at a step that was not finite; ``train.on_nonfinite`` decides whether it ends."""
    attempt = state.attempt
    return attempt.evidence if attempt and attempt.cause == "nonfinite" and state.status == "failed" else ""


def _growing(state: RunState) -> str:
    spike = state.spikes[-1] if state.spikes else None
    if spike is None or "length_steps" in spike:
        return ""
    began, mean = int(spike["step"]), number(spike, "mean")
    now = number(state.last_step or {}, "grad_norm")
    if state.step - began < GROWTH_STEPS or not now > GROWTH_FACTOR * mean:
        return ""
    return (
        f"the gradient norm has grown for {state.step - began} steps, from a mean of {mean:.3g} before step {began} to "
        f"{now:.3g}"
    )


def _above_start(state: RunState) -> str:
    """Return a sentence if the mean of the newest losses exceeds all first ones, which noise alone can't cause."""
    if len(state.steps) < 2 * WINDOW_STEPS:
        return ""
    worst = max(number(event, "loss") for event in state.steps.first(WINDOW_STEPS))
    newest = [number(event, "loss") for event in state.steps.last(WINDOW_STEPS)]
    mean = math.fsum(newest) / WINDOW_STEPS
    if not mean > worst:
        return ""
    return f"the loss of the last {WINDOW_STEPS} steps, {mean:.3f}, is above that of the first, at most {worst:.3f}"
