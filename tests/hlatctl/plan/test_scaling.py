"""Scaling laws: published laws from published points, what few rungs don't determine, and errors."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest

from hlatctl.plan import scaling
from hlatctl.plan.scaling import Size, fit, fit_sigmoid, forecast, forecast_score

CHINCHILLA = Path(__file__).parent / "chinchilla_points.csv"
#: OLMo's ladder (arXiv 2412.04403, data of github.com/allenai/OLMo-ladder): parameters, tokens, loss on C4's validation
#: set, bits per byte and accuracy of HellaSwag (5 shots, validation set) at the end of each run.
OLMO = [
    (190_354_176, 3_812_622_336, 3.6010, 0.9800, 0.3052),
    (190_354_176, 7_619_477_504, 3.4965, 0.9428, 0.3202),
    (190_354_176, 19_041_091_584, 3.3905, 0.9113, 0.3527),
    (190_354_176, 38_076_416_000, 3.3367, 0.8948, 0.3713),
    (371_262_464, 7_433_355_264, 3.3943, 0.9170, 0.3502),
    (371_262_464, 14_858_846_208, 3.2879, 0.8819, 0.3882),
    (371_262_464, 37_134_532_608, 3.1880, 0.8531, 0.4361),
    (371_262_464, 74_260_414_464, 3.1326, 0.8362, 0.4684),
    (758_220_288, 15_178_137_600, 3.2020, 0.8592, 0.4192),
    (758_220_288, 30_343_168_000, 3.1043, 0.8333, 0.4695),
    (758_220_288, 75_835_637_760, 3.0045, 0.8017, 0.5323),
    (758_220_288, 151_658_168_320, 2.9549, 0.7910, 0.5687),
    (1_279_395_840, 25_604_653_056, 3.0631, 0.8175, 0.4964),
    (1_279_395_840, 51_192_004_608, 2.9712, 0.7927, 0.5538),
    (1_279_395_840, 127_955_632_128, 2.8785, 0.7695, 0.6132),
    (1_279_395_840, 255_895_535_616, 2.8323, 0.7587, 0.6450),
]
#: The same of OLMo 2 7B and 13B, which the paper forecasts.
OLMO_TARGETS = [
    (6_887_575_552, 3_945_065_873_408, 2.4829, 0.6732, 0.8135),
    (13_202_396_160, 5_000_088_518_656, 2.4376, 0.6599, 0.8337),
]

#: Marin's mixtures of experts, the best run of each budget (github.com/marin-community/marin, v16 in
#: experiments/grug/moe/README.md): FLOPs, macro loss on Paloma, bits per byte on C4.
MARIN = [
    (1e18, 3.5273, 1.0658),
    (3e18, 3.3398, 1.0122),
    (1e19, 3.1494, 0.9541),
    (3e19, 3.0066, 0.9123),
    (1e20, 2.8509, 0.8665),
    (3e20, 2.7222, 0.8289),
]


def size(parameters: float, tokens: float) -> Size:
    return Size(parameters=parameters, tokens=tokens, flops=6 * parameters * tokens)


def law(at: Size) -> float:
    """Return Chinchilla's law as Besiroglu et al. fitted it (arXiv 2404.10102)."""
    return 1.8172 + float(482.01 / at.parameters**0.3478 + 2085.43 / at.tokens**0.3658)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_DRAWS", 40)


def test_chinchillas_points_give_the_law_that_was_published_for_them() -> None:
    lines = [line for line in CHINCHILLA.read_text().splitlines() if not line.startswith("#")]
    points = [(float(row["parameters"]), float(row["flops"]), float(row["loss"])) for row in csv.DictReader(lines)]
    points.sort(key=lambda point: point[1] / point[0] ** 2)
    points = points[5:]  # Besiroglu et al. leave out the five with fewest tokens per parameter
    runs = [Size(parameters=n, tokens=flops / 6 / n, flops=flops) for n, flops, _ in points]
    found = fit(runs, [loss for *_, loss in points], huber=1e-3).named
    assert found["E"] == pytest.approx(1.8172, abs=0.001)
    assert [found["alpha"], found["beta"]] == pytest.approx([0.3478, 0.3658], abs=0.002)
    assert [found["A"], found["B"]] == pytest.approx([482.01, 2085.43], rel=0.04)


def test_marins_budgets_give_the_law_that_was_published_for_them_and_forecast_the_next_one() -> None:
    runs = [Size(parameters=math.sqrt(flops), tokens=math.sqrt(flops) / 6, flops=flops) for flops, *_ in MARIN]
    next_one = Size(parameters=math.sqrt(1e21), tokens=math.sqrt(1e21) / 6, flops=1e21)
    bits = forecast(runs, [row[2] for row in MARIN], next_one)
    assert bits.law.name == "compute"
    published = {"E": 0.4814, "gamma": 0.0915}
    for name, value in published.items():
        constant = bits.constants[name]
        assert constant.low is not None
        assert constant.high is not None
        assert constant.low < value < constant.high, name
    assert bits.loss.value == pytest.approx(0.7923, rel=0.001), "measured at 1e21 FLOPs"
    loss = forecast(runs, [row[1] for row in MARIN], next_one).loss.value
    assert loss == pytest.approx(2.599, rel=0.001), "measured at 1e21 FLOPs; their law, with E set to 1.6, says 2.606"


def test_olmos_rungs_forecast_the_loss_and_the_accuracy_of_models_with_hundreds_of_times_their_compute() -> None:
    runs = [size(parameters, tokens) for parameters, tokens, *_ in OLMO]
    bits, accuracy = [row[3] for row in OLMO], [row[4] for row in OLMO]
    for parameters, tokens, _, true_bits, true_accuracy in OLMO_TARGETS:
        of_target = forecast(runs, bits, size(parameters, tokens))
        assert of_target.law.name == "size"
        assert of_target.loss.value == pytest.approx(true_bits, rel=0.04)
        score = forecast_score(bits, accuracy, of_target, chance=0.25)
        assert score.value == pytest.approx(true_accuracy, abs=0.05)
        assert score.low is not None
        assert score.high is not None
        assert score.low < score.value < score.high <= 1


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_family_of_one_ratio_has_a_law_of_compute_alone_and_says_why(noise: float) -> None:
    draw = random.Random(3)
    rungs = [size(n, 20 * n) for n in (1e8, 2e8, 4e8, 8e8, 1.6e9)]
    target = size(9e9, 20 * 9e9)
    losses = [law(rung) * math.exp(draw.gauss(0, noise)) for rung in rungs]
    found = forecast(rungs, losses, target)
    assert (found.law.name, list(found.constants)) == ("compute", ["E", "A", "gamma"])
    assert found.law.why == "parameters and tokens grow in proportion, so the rungs can't tell alpha from beta"
    assert found.loss.value == pytest.approx(law(target), rel=0.003 + 5 * noise)
    assert found.loss.low is not None
    assert found.loss.high is not None
    if noise:
        assert found.loss.low < law(target) < found.loss.high
    assert found.held_out == pytest.approx(losses[-1], rel=0.002 + 3 * noise)
    flops, last = found.curve[-1]
    assert [flops, last.value] == pytest.approx([target.flops, found.loss.value])


def test_sizes_times_ratios_determine_the_law_of_both() -> None:
    rungs = [size(n, ratio * n) for n in (1e8, 2e8, 4e8) for ratio in (5, 20, 80)]
    found = fit(rungs, [law(rung) for rung in rungs])
    assert (found.name, found.why) == ("size", "")
    assert found.loss(size(7e9, 2e12)) == pytest.approx(law(size(7e9, 2e12)), rel=0.002)
    few = fit(rungs[2:], [law(rung) for rung in rungs[2:]])
    assert few.why == "the law of size and tokens has 5 constants and needs 8 rungs; there are 7"


def test_several_seeds_of_a_rung_count_once_and_do_not_narrow_the_bounds() -> None:
    draw = random.Random(3)
    rungs = [size(n, ratio * n) for n in (1e8, 2e8, 4e8) for ratio in (5, 20, 80)]
    losses = [law(rung) * math.exp(draw.gauss(0, 0.003)) for rung in rungs]
    once, thrice = (forecast(rungs * times, losses * times, size(7e9, 2e11)) for times in (1, 3))
    one, three = ([each.loss.value, each.loss.low, each.loss.high, each.held_out] for each in (once, thrice))
    assert three == pytest.approx(one, rel=1e-3)


def test_the_bounds_contain_what_leaving_out_a_size_changes() -> None:
    """The smallest models gain less from tokens than the law says, which bends the law of all."""
    rungs = [size(n, tokens) for n in (1e8, 2e8, 4e8, 8e8) for tokens in (5e8, 2e9, 8e9)]
    losses = [law(rung) * (1 + 0.01 * (rung.parameters == 1e8) * math.log(rung.tokens / 5e8)) for rung in rungs]
    target = size(6e9, 1e10)
    found = forecast(rungs, losses, target)
    assert abs(found.loss.value / law(target) - 1) > 0.02, "bent"
    assert found.loss.low is not None
    assert found.loss.high is not None
    assert found.loss.low < law(target) < found.loss.high


def test_three_rungs_give_a_value_without_an_error() -> None:
    rungs = [size(n, 20 * n) for n in (1e8, 2e8, 4e8)]
    found = forecast(rungs, [law(rung) for rung in rungs], size(1e9, 2e10))
    assert found.loss.value == pytest.approx(law(size(1e9, 2e10)), rel=0.02)
    assert (found.loss.low, found.loss.high, found.held_out, found.draws) == (None, None, None, None)


def test_what_can_not_be_fitted_is_refused() -> None:
    rungs = [size(n, 20 * n) for n in (1e8, 2e8, 4e8)]
    with pytest.raises(ValueError, match="at least three different amounts of compute"):
        fit([*rungs[:2], rungs[0]], [3.0, 2.9, 3.0])
    with pytest.raises(ValueError, match="not a positive number"):
        fit(rungs, [3.0, math.nan, 2.8])


def test_scores_of_guessing_are_not_forecast() -> None:
    rungs = [size(n, 20 * n) for n in (1e8, 2e8, 4e8, 8e8)]
    losses = [law(rung) for rung in rungs]
    of_target = forecast(rungs, losses, size(1e10, 2e11))
    with pytest.raises(ValueError, match=r"all scores are within 2 standard errors of guessing \(0.25\)"):
        forecast_score(losses, [0.26, 0.24, 0.25, 0.28], of_target, chance=0.25, stderr=0.02)
    with pytest.raises(ValueError, match="at least four scores"):
        fit_sigmoid([3.0, 2.9], [0.3, 0.4])
