"""Signs that a run diverges."""

from __future__ import annotations

from flows.sweep.signs import divergence
from hlatctl.run.state import AttemptState, RunState
from tests.flows.sweep.test_objective import run_of


def test_a_loss_above_its_start_has_diverged_and_noise_has_not() -> None:
    assert divergence(run_of([5.0 + 0.1 * (n % 3) for n in range(60)])) == ""
    rises = [5.0 + 0.1 * (n % 3) for n in range(30)] + [6.0 + 0.1 * n for n in range(30)]
    assert divergence(run_of(rises)) == (
        "the loss of the last 20 steps, 7.950, is above that of the first, at most 5.200"
    )


def test_a_gradient_norm_that_keeps_growing_has_diverged_and_a_spike_has_not() -> None:
    growing = run_of([5.0] * 30, [1.0] * 5 + [1.5 + 0.1 * n for n in range(25)])
    growing.spikes = [{"kind": "gradient_spike", "step": 6, "grad_norm": 1.5, "mean": 1.0}]
    assert divergence(growing) == ("the gradient norm has grown for 24 steps, from a mean of 1 before step 6 to 3.9")
    growing.spikes = [{**growing.spikes[0], "length_steps": 3}]
    assert divergence(growing) == "", "it has ended"


def test_a_run_that_fails_at_a_loss_that_is_not_finite_has_diverged() -> None:
    state = RunState(status="failed", attempts=[AttemptState(1, {}, 0.0, cause="nonfinite", evidence="step 7: nan")])
    assert divergence(state) == "step 7: nan"
    state.status = "running"
    assert divergence(state) == "", "a rollback continues"
