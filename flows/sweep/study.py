"""Optuna's part of a sweep: it draws arms and decides which trials fall behind. The only importer of Optuna.

The study is a view of the sweep's journal. Every driver rebuilds it from there, so that the two never differ. The
sampler is seeded again for every arm, so that an interrupted sweep draws the same arms as an uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.axes import Axis
from conf.space import Space
from hlatctl.run.errors import DependencyError
from hlatctl.run.sweep import SweepState, TrialState

if TYPE_CHECKING:
    from optuna.trial import TrialState as OptunaState

#: Successive halving: the better half continues at each rung whose tokens are a power of two times the first's.
_REDUCTION = 2
#: Copies of each arm for fANOVA. Its trees draw samples with replacement; with one copy, most lack a third of the arms.
_COPIES = 8
#: NumPy, which Optuna uses to draw, takes seeds below this.
_SEEDS = 2**32


class Study:
    """The trials of a sweep as Optuna sees them, by the same numbers.

    Args:
        space: the search space.
        state: the sweep's; its trials become the study's.
        minimize: less is better.
        seed: for drawing arms.
        first_rung_tokens: tokens at the first comparison.
        path: of its database, which is replaced; None: in memory.
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
        """Draw a new arm from the results so far; returns its values by axis."""
        self._study.sampler = self._sampler((self.seed + arm) % _SEEDS)
        drawn = self._study.ask(self._distributions).params
        return {key: str(value) for key, value in drawn.items()}

    def add(self, trial: TrialState) -> None:
        """Add a trial, unless drawing it has added it."""
        if len(self._study.get_trials(deepcopy=False)) <= trial.number:
            self._add(trial)

    def report(self, number: int, tokens: int, value: float) -> bool:
        """Store a trial's objective at a rung; returns whether to prune the trial."""
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        trial.report(value, tokens)
        return bool(trial.should_prune())

    def importances(self) -> dict[str, float]:
        """Return each axis's share of the variance between the arms' means, largest first; the sum is 1.

        Interactions between axes are not included (fANOVA: Hutter et al., ICML 2014). Empty if there are fewer than two
        axes, or if all means are equal.

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
            raise DependencyError(
                f"importances of axes need scikit-learn ({error})", hint="pip install 'hlatctl[head]'"
            ) from None
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
        """Return state and value in Optuna. A trial that was ended early has its newest rung's value."""
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
            f"a sweep needs optuna, which can't be imported ({error})", hint="pip install 'hlatctl[head]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
