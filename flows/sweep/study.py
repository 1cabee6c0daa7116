"""What Optuna does for a sweep: it draws arms and says which trials fall behind. The only importer of Optuna.

The study is a view of the sweep's journal: every head makes it anew from there, so that it can't differ from it
whatever has died in between. A sampler holds nothing besides the study: it is seeded anew for every arm, so that a
sweep which was interrupted draws what it would have drawn.
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

#: Of successive halving: the better half goes on at each rung whose tokens are a power of two times the first's.
_REDUCTION = 2
#: Of each arm for fANOVA, whose trees see samples with repetition: with one, most would lack a third of the arms.
_COPIES = 8
#: NumPy, which Optuna draws with, takes seeds below this.
_SEEDS = 2**32


class Study:
    """The trials of a sweep as Optuna sees them, by the same numbers.

    Args:
        space: what is swept.
        state: of the sweep; its trials are the study's.
        minimize: less is better.
        seed: that arms are drawn with.
        first_rung_tokens: of the first comparison.
        path: of its database, which is replaced; None: it is kept in memory.
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
        """A new arm, as the sampler draws it from what is known by now; by axis."""
        self._study.sampler = self._sampler((self.seed + arm) % _SEEDS)
        drawn = self._study.ask(self._distributions).params
        return {key: str(value) for key, value in drawn.items()}

    def add(self, trial: TrialState) -> None:
        """A trial that was asked for; one that was drawn has been added by that."""
        if len(self._study.get_trials(deepcopy=False)) <= trial.number:
            self._add(trial)

    def report(self, number: int, tokens: int, value: float) -> bool:
        """A trial's objective at a rung; whether it shall be pruned."""
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        trial.report(value, tokens)
        return bool(trial.should_prune())

    def importances(self) -> dict[str, float]:
        """Share of each axis in how the means of arms differ, the greatest first; together 1.

        Each axis by itself, without what it does together with others (fANOVA: Hutter et al., ICML 2014). Empty where
        that says nothing: fewer than two axes, or no two arms that differ.

        Raises:
            DependencyError: scikit-learn is not installed.
        """
        values: dict[tuple[Any, ...], list[float]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "COMPLETE":
                values.setdefault(tuple(trial.params[key] for key in self._distributions), []).append(trial.value)
        means = {point: statistics.fmean(found) for point, found in values.items()}
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
        """How a trial has ended."""
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
        """A trial that ended early counts with its newest rung; one without a number has failed."""
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
        # Trials that run count as bad ones, so that those beside them are drawn elsewhere.
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
