"""A ladder's rungs by its rule, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from conf.compose import compose
from conf.ladder import parse
from conf.sizes import multiplied_parameters
from conf.space import Space, Variations, dump, load
from hlatctl.run.errors import ConfigError

TARGET = ["experiment=ablation", "cluster.processes_per_node=1"]  # 4 layers of width 64 with 2 heads
WIDER = [*TARGET, "model.num_heads=8", "model.num_kv_heads=4", "train.tokens=4M"]


def configs(space: Space) -> list:  # type: ignore[type-arg]
    variations = Variations(space.overrides, Path(space.folder))
    return [variations.compose(point) for point in space.points]


def test_widths_keep_the_heads_the_proportions_and_the_tokens_of_each_parameter(tmp_path: Path) -> None:
    space = parse([*WIDER, "ladder.by=width", "ladder.sizes=[16,32,48]"], tmp_path)
    *rungs, target = configs(space)
    assert target == compose(WIDER, tmp_path), "the target is the configuration that was typed"
    assert [(c.model.hidden_size, c.model.num_heads, c.model.num_kv_heads) for c in rungs] == [
        (16, 2, 1),
        (32, 4, 2),
        (48, 6, 3),
    ]
    assert [c.model.intermediate_size for c in rungs] == [48, 88, 128], "2.75 times the width, by multiples of 8"
    assert {c.model.num_layers for c in rungs} == {4}
    most = multiplied_parameters(target.model)
    for config in rungs:
        share = multiplied_parameters(config.model) / most
        assert config.train.tokens == pytest.approx(target.total_tokens * share, abs=1)
        assert config.optimizer.lr == pytest.approx(8e-3 * share**-0.3333, rel=0.005)
        assert config.train.global_batch_size == max(1, round(8 * share**0.6667))
        assert config.optimizer.warmup_steps / config.total_steps == pytest.approx(30 / target.total_steps, abs=0.003)
    work = [config.total_tokens * multiplied_parameters(config.model) for config in (*rungs, target)]
    assert work == sorted(work)
    assert (space.arms, space.trials, space.target) == (3, 3, 3), "the target is not trained unless asked for"
    (tmp_path / "sweep.yaml").write_text(dump(space))
    assert load(tmp_path / "sweep.yaml") == space


def test_sizes_times_ratios_with_tables_seeds_and_other_values_of_the_rungs(tmp_path: Path) -> None:
    space = parse(
        [
            *WIDER,
            "ladder.sizes=[2,3]",
            "ladder.tokens_per_parameter=[4,8]",
            "ladder.lr=[0.02,0.01]",
            "ladder.batch=[2,4]",
            "ladder.set={optimizer.beta2:0.9,data.mask_across_documents:true}",
            "ladder.train_target=true",
            "sweep.seeds=3",
        ],
        tmp_path,
    )
    *rungs, target = configs(space)
    assert (space.arms, space.trials, [space.seeds_of(arm) for arm in range(5)]) == (5, 13, [3, 3, 3, 3, 1])
    shapes = [(c.model.num_layers, c.model.hidden_size, c.optimizer.lr, c.train.global_batch_size) for c in rungs]
    assert sorted(shapes) == [(2, 32, 0.02, 2)] * 2 + [(3, 48, 0.01, 4)] * 2
    ratios = [c.train.tokens / multiplied_parameters(c.model) for c in rungs]
    assert sorted(round(ratio, 2) for ratio in ratios) == [4, 4, 8, 8]
    assert {(c.optimizer.beta2, c.data.mask_across_documents) for c in rungs} == {(0.9, True)}
    assert target == compose(WIDER, tmp_path)
    assert all(a != b for a, b in itertools.pairwise(space.points))


def test_tokens_of_each_size_up_to_a_share_of_the_target_s_compute(tmp_path: Path) -> None:
    from hlatctl.plan.budget import total_flops

    sizes = ["ladder.by=width", "ladder.sizes=[16,32,48]", "ladder.tokens=[200K,400K,800K]"]
    everything = configs(parse([*WIDER, *sizes], tmp_path))
    assert len(everything) == 10
    *rungs, target = configs(parse([*WIDER, *sizes, "ladder.max_compute_fraction=0.06"], tmp_path))
    limit = 0.06 * total_flops(target)
    assert rungs == [config for config in everything[:-1] if total_flops(config) <= limit]
    assert 3 <= len(rungs) < 9
    assert {config.train.tokens for config in rungs} == {200_000, 400_000, 800_000}


def test_with_mup_one_learning_rate_and_one_batch_serve_all_widths(tmp_path: Path) -> None:
    mup = [*WIDER, "model.mup_base_width=32", "ladder.sizes=[16,32,48]"]
    *rungs, target = configs(parse([*mup, "ladder.by=width"], tmp_path))
    assert {(config.optimizer.lr, config.train.global_batch_size) for config in rungs} == {(8e-3, 8)}
    assert {config.model.mup_base_width for config in (*rungs, target)} == {32}
    *rungs, _ = configs(parse([*mup, "ladder.by=width", "ladder.batch_by_parameters=0.5"], tmp_path))
    assert len({config.train.global_batch_size for config in rungs}) > 1, "a value that is set counts"
    with pytest.raises(ConfigError, match=r"ladder\.by=shape and model\.mup_base_width=32: .* not at every depth"):
        parse([*mup[:-1], "ladder.sizes=[1,2,3]"], tmp_path)


def test_the_ready_made_ladder_has_a_target_of_thirty_times_its_rungs(tmp_path: Path) -> None:
    from hlatctl.plan.budget import total_flops

    *rungs, target = configs(parse(["ladder=tiny"], tmp_path))
    assert len(rungs) == 5
    assert total_flops(target) > 30 * max(map(total_flops, rungs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ladder.sizes=[2]"], "ladder.sizes=[2]: 1 rungs, and a law with 3 constants needs at least 3"),
        ([], "ladder.sizes=[]: 0 rungs"),
        (["ladder.sizes=[1,2,2]"], "ladder.sizes=[1, 2, 2]: lists 2 twice"),
        (["ladder.size=[1,2,3]"], "ladder.size: unknown key"),
        (["ladder.sizes=1,2,3"], "ladder.sizes=1,2,3: is a setting of the ladder, and can't be an axis"),
        (["ladder.sizes=[1,2,-3]"], "ladder.sizes[2]=-3: must be greater than 0"),
        (["ladder.sizes=[1,2,three]"], "ladder.sizes[2]='three': must be a whole number"),
        (["ladder.sizes=[1,2,8]"], "the rung of size 8 has"),
        (
            ["ladder.by=width", "ladder.sizes=[16,20,32]"],
            "ladder.sizes: 20 is not a multiple of 16, the width of 2 heads",
        ),
        (["ladder.by=height", "ladder.sizes=[1,2,3]"], "ladder.by=height: not known"),
        (["ladder.sizes=[1,2,3]", "ladder.lr=[0.1]"], "ladder.lr=[0.1]: 1 values for 3 sizes"),
        (["ladder.sizes=[1,2,3]", "ladder.tokens_per_parameter=[0]"], "ladder.tokens_per_parameter[0]=0.0: must be"),
        (["ladder.sizes=[1,2,3]", "ladder.tokens_per_parameter=[0.01]"], "it needs at least 50"),
        (["ladder.sizes=[1,2,3]", "ladder.tokens_per_parameter=[1e6]"], "the target must have more compute than every"),
        (["ladder.sizes=[1,2,3]", "ladder.set={modl.x:1}"], "ladder.set: modl.x is not a key"),
        (["ladder.sizes=[1,2,3]", "ladder.set={optimizer.lr:1}"], "optimizer.lr follows from the ladder's rule"),
        (["ladder.sizes=[1,2,3]", "optimizer.beta2=0.9,0.95"], "optimizer.beta2=0.9,0.95: has several values"),
        (["ladder.sizes=[1,2,3]", "sweep.pruner=asha"], "sweep.pruner=asha: rungs differ in size"),
        (["ladder.sizes=[1,2,3]", "train.max_steps=9"], "train.max_steps=9: a ladder can't scale it down"),
        (["ladder.sizes=[1,2,3]", "model=qwen3_moe_tiny"], "model.num_experts="),
        (["ladder=none"], "ladder=none: no such ladder"),
    ],
)
def test_a_bad_ladder_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse([*WIDER, *arguments], tmp_path)
    assert message in refused.value.message
