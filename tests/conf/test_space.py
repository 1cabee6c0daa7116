"""What is typed as a sweep: axes in Hydra's grammar, settings, extension, and one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf import folders, space
from conf.compose import compose, groups
from conf.schema import SweepConfig
from conf.space import Axis, Variations
from hlatctl.run.errors import ConfigError

HERE = Path("/somewhere")


def parse(*arguments: str) -> space.Space:
    return space.parse(arguments, HERE)


def test_the_grammar_is_hydras() -> None:
    parsed = parse(
        "experiment=quickstart",
        "optimizer.beta2=0.95,0.99",
        "precision=glob(bf16*)",
        "model.num_layers=range(1,4)",
        "optimizer.lr=tag(log,interval(1e-4,1e-3))",
        "train.seq_len=int(interval(128,512))",
        "sweep.trials=7",
        "sweep.objective=validation_loss@tokens=2M",
    )
    assert parsed.overrides == ["experiment=quickstart"]
    assert parsed.axes == [
        Axis(key="optimizer.beta2", values=["0.95", "0.99"]),
        Axis(key="precision", values=["bf16", "bf16_sr"]),
        Axis(key="model.num_layers", values=["1", "2", "3"]),
        Axis(key="optimizer.lr", values=[], low=1e-4, high=1e-3, log=True),
        Axis(key="train.seq_len", values=[], low=128.0, high=512.0, integer=True),
    ]
    assert parsed.settings == SweepConfig(trials=7, objective="validation_loss@tokens=2M")
    assert (parsed.sampler, parsed.arms, parsed.trials) == ("tpe", 7, 7)


def test_a_finite_sweep_is_a_grid_and_seeds_multiply_its_trials() -> None:
    parsed = parse("optimizer.beta2=0.95,0.99", "precision=mixed,bf16_sr", "sweep.seeds=3")
    assert (parsed.sampler, parsed.arms, parsed.trials) == ("grid", 4, 12)
    assert list(parsed.grid())[1] == {"optimizer.beta2": "0.95", "precision": "bf16_sr"}


def test_of_a_key_that_is_given_again_the_last_counts() -> None:
    assert parse("optimizer.lr=1,2", "seed=3", "seed=4,5", "optimizer.lr=0.1").axes == [
        Axis(key="seed", values=["4", "5"])
    ]


def test_what_is_kept_is_read_as_it_was_and_not_if_it_was_edited(tmp_path: Path) -> None:
    parsed, path = parse("optimizer.lr=interval(1e-4,1e-3)", "sweep.seeds=2"), tmp_path / "sweep.yaml"
    path.write_text(space.dump(parsed))
    assert space.load(path) == parsed
    path.write_text(space.dump(parsed).replace("seeds: 2", "seeds: 3"))
    with pytest.raises(ConfigError, match="is not as it was written"):
        space.load(path)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["optimizer.lr=0.1"], "nothing is swept: no argument has several values", "sweep.seeds=3"),
        (["seed=choice(1)"], "seed=choice(1): has one value, so it is not swept", "write seed=1, or more values"),
        (["optimizer.lr=choice()"], "optimizer.lr=choice(): the axis is empty", "name at least two values"),
        (["seed=range(3,1)"], "seed=range(3,1): the axis is empty", "name at least two values"),
        (["precision=glob(x*)"], "precision=glob(x*): the axis is empty", "name at least two values"),
        (["optimizer.lr=glob(*)"], "optimizer.lr=glob(*): glob() is for the options of a group", "groups: backend"),
        (["seed=1,1"], "seed=1,1: lists 1 twice", ""),
        (["seed=interval(2,1)"], "seed=interval(2,1): the interval is empty", ""),
        (
            ["seed=interval(1,2)", "sweep.sampler=grid"],
            "sweep.sampler=grid: seed is an interval from 1 to 2, which has infinitely many values",
            "sweep.sampler=tpe",
        ),
        (["seed=1,2", "sweep.trials=5"], "sweep.trials=5: a grid runs all of its 2 arms", "sweep.sampler=random"),
        (["seed=1,2", "sweep.seeds=2"], "sweep.seeds=2: seed is already an axis", "remove one of them"),
        (["seed=1,2", "sweep.prunner=asha"], "sweep.prunner: unknown key", "did you mean sweep.pruner?"),
        (["seed=1,2", "sweep.pruner=best"], "sweep.pruner=best: not known", "median, asha"),
        (["seed=1,2", "sweep.parallel=1,2"], "sweep.parallel=1,2: is a setting of the sweep, and can't be an axis", ""),
        (["seed=1,2", "sweep.parallel=0"], "sweep.parallel=0: must be greater than 0", ""),
        (["seed=1,2", "sweep.trials=many"], "sweep.trials='many': must be a whole number", ""),
        (["runs_dir=a,b"], "runs_dir=a,b: is the same for all trials of a sweep", ""),
        (["sweep=nothing"], "sweep=nothing: no such sweep", "known: "),
    ],
)
def test_each_mistake_has_one_clear_error(arguments: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_a_file_of_conf_sweep_stands_for_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "two_betas.yaml").write_text("arguments: ['optimizer.beta2=0.9,0.99', sweep.seeds=2]")
    with folders.using([tmp_path]):
        assert parse("sweep=two_betas").settings.seeds == 2
        with pytest.raises(ConfigError, match="sweep=two_beta: no such sweep") as caught:
            parse("sweep=two_beta")
    assert "did you mean sweep=two_betas?" in caught.value.hint
    assert "sweep" not in groups(), "it is no group of a run's configuration"


@pytest.mark.parametrize("name", folders.names("sweep"))
def test_every_sweep_that_is_ready_to_run_composes(name: str) -> None:
    parsed = parse(f"sweep={name}")
    variations = Variations(parsed.overrides, HERE)
    configs = [variations.compose(point) for point in parsed.grid()]
    assert len(configs) == parsed.arms >= 2
    assert all(config.total_steps * parsed.trials < 10_000 for config in configs), "minutes of two cores"
    assert parsed.settings.seeds > 1, "a difference without its error says nothing"


def test_the_papers_choices_can_be_tried() -> None:
    names = ["beta2", "document_masking", "optimizer", "precision", "scaled_initialization", "weight_decay"]
    assert folders.names("sweep") == names


def test_quick_variations_are_what_hydra_composes() -> None:
    variations = Variations(["experiment=quickstart", "train.tokens=1M"], HERE, "/runs")
    points = [
        {"optimizer.lr": "1e-3", "precision": "mixed"},
        {"optimizer.lr": "2e-3", "precision": "mixed"},
        {"optimizer.lr": "3e-3", "precision": "bf16_sr"},
        {"train.max_steps": "null", "data.skip_steps": "[1,'3-4']"},
        {"train.max_steps": "7", "data.skip_steps": "[]"},
        {"train.tokens": "2M", "optimizer.decay": "all_but_norms"},
        {"train.tokens": "3M", "optimizer.decay": "all"},
    ]
    for point in points:
        overrides = [f"{key}={value}" for key, value in point.items()]
        assert variations.compose(point) == compose(
            ["experiment=quickstart", "train.tokens=1M", *overrides, "runs_dir=/runs"], HERE
        )


def test_a_variation_that_can_not_be_is_refused_as_by_compose() -> None:
    variations = Variations([], HERE)
    variations.compose({"optimizer.lr": "0.1"})
    with pytest.raises(ConfigError, match=r"optimizer.lr=-1.0: must be greater than 0"):
        variations.compose({"optimizer.lr": "-1.0"})
    with pytest.raises(ConfigError, match=r"optimizer.beta3: unknown key"):
        variations.compose({"optimizer.beta3": "0.1"})
