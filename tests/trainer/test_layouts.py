"""Every parallel layout trains the same model, and resumes from any other's checkpoint. Real processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from conf.sizes import CHECKPOINT_BYTES_PER_PROCESS, checkpoint_bytes
from hlatctl.run.checkpoint import read_manifest
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, Ranks
from trainer.checkpoint.shards import read_tensors

pytestmark = pytest.mark.processes

#: Processes, and keys of ``parallel``.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp"}),
    "zero1_2": (2, {"data_parallel": "zero1"}),
    "fsdp2_tp2": (4, {"data_parallel": "fsdp", "tensor_parallel_size": 2}),
    # Combinations whose curves are compared, but whose checkpoints aren't exchanged.
    "fsdp2_tp2_sp": (4, {"data_parallel": "fsdp", "tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2_tp2_sp": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "dp2_pp2": (4, {"pipeline_parallel_size": 2}),
    "dp2_tp2": (4, {"tensor_parallel_size": 2}),
    "fsdp2_never": (2, {"data_parallel": "fsdp", "reshard_after_forward": "never"}),
    "hybrid2_2": (4, {"data_parallel": "fsdp", "fsdp_size": 2}),
    "zero1_hybrid2_tp2": (4, {"data_parallel": "zero1", "fsdp_size": 1, "tensor_parallel_size": 2}),
}
#: Layouts whose checkpoints are exchanged.
EXCHANGED = list(LAYOUTS)[:8]
#: Several documents in most sequences.
_MASKED = {"data": {"mask_across_documents": True}, "train": {"seq_len": 256, "tokens": 4 * 4 * 256}}
#: Equal rates for any max_steps.
_OPTIMIZER = {"lr": 3e-3, "warmup_steps": 1, "min_lr_fraction": 1.0, "ema_decay": 0.9}
#: Changes that are combined with layouts, and the relative difference from one process's curve that rounding allows.
#: Each kind of recomputation is in one of them.
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "mixed": ({"precision": {"name": "mixed"}}, 2e-4),
    "bf16_sr": ({"precision": {"name": "bf16_sr"}}, 2e-4),
    "masked": (_MASKED, 2e-5),
    "muon": (
        {
            "model": {"mup_base_width": 16},
            "optimizer": {**_OPTIMIZER, "name": "muon"},
            "parallel": {"activation_checkpointing": "selective"},
        },
        5e-5,
    ),
    "z_loss": ({"train": {"z_loss": 1e-2}, "parallel": {"activation_checkpointing": "full"}}, 2e-5),
}
_VARIED = ("one", "dp2", "tp2_sp", "pp2", "fsdp2")
#: Keys of small models of other families.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_scaling": "llama3",
        "rope_theta": 100.0,
        "rope_scaling_factor": 4.0,
        "rope_original_seq_len": 16,
        "tie_embeddings": True,
    },
    "qwen3": {"qk_norm": "head", "head_dim": 12, "mup_base_width": 16},
    "olmo2": {"qk_norm": "all", "norm_position": "post"},
}
_FAMILY_LAYOUTS = ("one", "dp2_tp2", "tp2_sp", "pp2", "fsdp2", "fsdp2_tp2_sp")
#: Layouts that write a family's checkpoint, and those that read it.
_FAMILY_EXCHANGES = (("dp2_tp2", "fsdp2"), ("fsdp2_tp2_sp", "dp2_tp2"), ("one", "tp2_sp"))
_EXCHANGES = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
_STEPS = 8
_VARIANT_STEPS = 4
_SAVED_STEP = 4


@pytest.fixture(scope="module")
def make_layout(make_run: MakeRun) -> Callable[..., RunPaths]:
    def make(root: Path, name: str, *, max_steps: int = _STEPS, **changes: Any) -> RunPaths:
        processes, parallel = LAYOUTS[name]
        train = {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": max_steps, **changes.pop("train", {})}
        groups: dict[str, Any] = {
            "train": train,
            "parallel": {**parallel, **changes.pop("parallel", {})},
            "cluster": {"processes_per_node": processes},
            "optimizer": _OPTIMIZER,
            "checkpoint": {"every_steps": _SAVED_STEP, "keep": 9},
            **changes,
        }
        return make_run(root / name, **groups)

    return make


@pytest.fixture(scope="module")
def train_all(ranks: Ranks) -> Callable[[list[tuple[RunPaths, int]]], None]:
    def train(jobs: list[tuple[RunPaths, int]]) -> None:
        for processes in (1, 2, 4):
            mine = [
                {"work": "train", "run": os.fspath(run.root), "attempt": attempt}
                for run, attempt in jobs
                if LAYOUTS[run.root.name][0] == processes
            ]
            if mine:
                ranks(processes, mine)

    return train


@pytest.fixture(scope="module")
def trained_all(
    tmp_path_factory: pytest.TempPathFactory, make_layout: Callable[..., RunPaths], train_all: Callable[..., None]
) -> dict[tuple[str, str], RunPaths]:
    """The runs by variant, which is empty for the plain ones, and layout."""
    root = tmp_path_factory.mktemp("layouts")
    runs = {("", layout): make_layout(root, layout) for layout in LAYOUTS}
    for variant, (changes, _) in VARIANTS.items():
        for layout in _VARIED:
            runs[variant, layout] = make_layout(root / variant, layout, max_steps=_VARIANT_STEPS, **changes)
    for family, keys in FAMILIES.items():
        for layout in _FAMILY_LAYOUTS:
            if (family, layout) != ("llama3", "pp2"):  # refused: the first and last stage would share a weight
                recomputed = {"activation_checkpointing": "selective" if layout.endswith("sp") else "none"}
                runs[family, layout] = make_layout(
                    root / family, layout, max_steps=_SAVED_STEP + 2, model=keys, parallel=recomputed
                )
    train_all([(run, 1) for run in runs.values()])
    return runs


@pytest.fixture(scope="module")
def trained(trained_all: dict[tuple[str, str], RunPaths]) -> dict[str, RunPaths]:
    """The plain runs."""
    return {layout: trained_all["", layout] for layout in LAYOUTS}


#: By layout: the rank with a fault, whom a check suspects if the fault stays, and if it was in one pass only.
_SUSPECTS: dict[str, tuple[int, list[int], list[int]]] = {
    "dp2": (1, [0, 1], [1]),
    "fsdp2": (1, [0, 1], [1]),
    "zero1_2": (0, [0, 1], [0]),
    "hybrid2_2": (2, [2], [2]),
    "dp2_pp2": (3, [2, 3], [3]),
    "fsdp2_tp2": (3, [0, 1, 2, 3], [2, 3]),
}


def test_checks_for_corruption_change_nothing_and_find_one_flipped_bit(
    tmp_path: Path, make_layout: Callable[..., RunPaths], ranks: Ranks
) -> None:
    for processes in (2, 4):
        names = [name for name in _SUSPECTS if LAYOUTS[name][0] == processes]
        jobs: list[dict[str, Any]] = []
        for name in names:
            rank = _SUSPECTS[name][0]
            faults = [[part, rank, once] for part in ("forward", "backward") for once in (False, True)]
            run = make_layout(tmp_path, name)
            jobs.append(
                {"work": "corruption", "run": os.fspath(run.root), "faults": [*faults, ["weights", rank, False]]}
            )
        for name, result in zip(names, ranks(processes, jobs), strict=True):
            rank, stays, passes = _SUSPECTS[name]
            assert result["plain"] == result["checked"], name
            *found, of_weights = result["found"]
            expected = [("forward", stays), ("forward", passes), ("backward", stays), ("backward", passes)]
            assert [(each["part"], each["ranks"]) for each in found] == expected, name
            blamed = {True: [f"node-{rank}"], False: []}
            assert [each["blamed_hosts"] for each in found] == [blamed[each["ranks"] == [rank]] for each in found], name
            if name == "hybrid2_2":
                assert of_weights["part"] == "weights", "two processes have copies of each shard"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_has_the_computed_size_in_every_layout(trained: dict[str, RunPaths], name: str) -> None:
    """Within the 64 KiB per process that random states, loaders and headers are given. Each process writes a share."""
    config = load(trained[name].config)
    estimated = config.world_size * CHECKPOINT_BYTES_PER_PROCESS
    assert len(list(trained[name].checkpoint(_STEPS).glob("*.safetensors"))) == config.world_size
    assert 0 <= checkpoint_bytes(config) - read_manifest(trained[name].checkpoint(_STEPS)).size_bytes < estimated


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_layout_gives_the_curve_of_one_process(
    layout: str, trained: dict[str, RunPaths], events_of: EventsOf
) -> None:
    ours, reference = events_of(trained[layout], "step"), events_of(trained["one"], "step")
    assert len(ours) == _STEPS
    for key in ("loss", "grad_norm", "param_norm"):
        expected = [event[key] for event in reference]
        assert [event[key] for event in ours] == pytest.approx(expected, rel=2e-5), key
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3


def test_every_layout_resumes_from_checkpoints_of_one_process_and_of_another_layout_and_one_process_from_all(
    trained_all: dict[tuple[str, str], RunPaths],
    tmp_path: Path,
    make_layout: Callable[..., RunPaths],
    train_all: Callable[..., None],
    events_of: EventsOf,
) -> None:
    following = dict(zip(EXCHANGED, [*EXCHANGED[1:], EXCHANGED[0]], strict=True))
    exchanges = [
        ("", writer, reader)
        for writer in EXCHANGED
        for reader in EXCHANGED
        if "one" in (writer, reader) or reader == following[writer]
    ]
    exchanges += [(family, writer, reader) for family in FAMILIES for writer, reader in _FAMILY_EXCHANGES]
    resumed = {}
    for family, writer, reader in exchanges:
        model = FAMILIES.get(family, {})
        run = make_layout(tmp_path / f"{family}-{writer}", reader, max_steps=_SAVED_STEP + 2, model=model)
        run.checkpoints.mkdir()
        shutil.copytree(trained_all[family, writer].checkpoint(_SAVED_STEP), run.checkpoint(_SAVED_STEP))
        resumed[family, writer, reader] = run
    train_all([(run, 2) for run in resumed.values()])
    for (family, writer, reader), run in resumed.items():
        assert events_of(run, "train_started")[0]["resumed_from_step"] == _SAVED_STEP
        whole = events_of(trained_all[family, "one"], "step")[_SAVED_STEP : _SAVED_STEP + 2]
        losses = [event["loss"] for event in events_of(run, "step")]
        assert losses == pytest.approx([event["loss"] for event in whole], rel=2e-5), (family, writer, reader)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_its_own_curve_in_every_kind_of_layout(
    family: str, trained_all: dict[tuple[str, str], RunPaths], events_of: EventsOf
) -> None:
    reference, llama = events_of(trained_all[family, "one"], "step"), events_of(trained_all["", "one"], "step")
    assert reference[-1]["grad_norm"] != pytest.approx(llama[len(reference) - 1]["grad_norm"], rel=1e-4)
    layouts = [layout for layout in _FAMILY_LAYOUTS if (family, layout) in trained_all]
    assert len(layouts) >= 5
    for layout in layouts:
        run = trained_all[family, layout]
        for key in ("loss", "grad_norm", "param_norm"):
            expected = [event[key] for event in reference]
            assert [event[key] for event in events_of(run, "step")] == pytest.approx(expected, rel=2e-5), (layout, key)
        assert not events_of(run, "alarm"), layout
        config = load(run.config)
        spare = checkpoint_bytes(config) - read_manifest(run.checkpoint(_SAVED_STEP)).size_bytes
        assert 0 <= spare < config.world_size * CHECKPOINT_BYTES_PER_PROCESS, layout


def test_checkpoints_of_muon_are_exchanged_between_layouts(
    trained_all: dict[tuple[str, str], RunPaths],
    tmp_path: Path,
    make_layout: Callable[..., RunPaths],
    train_all: Callable[..., None],
) -> None:
    """After another step, weights and moments are equal within rounding; losses alone don't show a lost moment."""
    changes, _ = VARIANTS["muon"]
    resumed = []
    for writer in ("tp2_sp", "fsdp2"):
        for reader in ("dp2", "tp2_sp", "fsdp2"):
            run = make_layout(tmp_path / writer, reader, max_steps=_VARIANT_STEPS + 1, **changes)
            run.checkpoints.mkdir()
            shutil.copytree(trained_all["muon", writer].checkpoint(_VARIANT_STEPS), run.checkpoint(_VARIANT_STEPS))
            resumed.append(run)
    train_all([(run, 2) for run in resumed])
    expected = read_tensors(resumed[0].checkpoint(_VARIANT_STEPS + 1), bool)
    for run in resumed[1:]:
        tensors = read_tensors(run.checkpoint(_VARIANT_STEPS + 1), bool)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            difference = (tensor - expected[name]).norm() / expected[name].norm()
            assert difference < 0.05, f"{run.root.name} from {run.root.parent.name}: {name}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_precision_and_recomputation_work_with_every_kind_of_layout(
    variant: str, trained_all: dict[tuple[str, str], RunPaths], events_of: EventsOf
) -> None:
    expected = [event["loss"] for event in events_of(trained_all[variant, "one"], "step")]
    assert len(expected) == _VARIANT_STEPS
    for layout in _VARIED:
        run = trained_all[variant, layout]
        losses = [event["loss"] for event in events_of(run, "step")]
        assert losses == pytest.approx(expected, rel=VARIANTS[variant][1]), layout
        assert not events_of(run, "alarm"), layout


def test_weights_are_gathered_and_gradients_summed_only_as_often_as_a_layout_needs(
    tmp_path: Path, make_layout: Callable[..., RunPaths], ranks: Ranks
) -> None:
    """Copies of the shards exchange gradients once a step, which has three micro-batches.

    The embedding, two layers, and the final norm with the head are gathered each on its own; layers again for the
    backward pass.
    """
    batch = {"global_batch_size": 6, "micro_batch_size": 1}
    tied = {"tie_embeddings": True}
    runs = [make_layout(tmp_path, name, train=batch) for name in ("fsdp2", "fsdp2_never", "zero1_2")]
    runs.append(make_layout(tmp_path / "tied", "fsdp2", train=batch, model=tied))
    hybrid = make_layout(tmp_path, "hybrid2_2", train={**batch, "global_batch_size": 12})
    counts = ranks(2, [{"work": "exchanges", "run": os.fspath(run.root)} for run in runs])
    counts += ranks(4, [{"work": "exchanges", "run": os.fspath(hybrid.root)}])
    found = [tuple(each.get(name, 0) for name in _EXCHANGES) for each in counts]
    assert found == [
        (3 * (4 + 2), 3 * 4, 0),
        (4, 3 * 4, 0),
        (4, 4, 0),
        (3 * (3 + 2), 3 * 3, 0),
        (3 * (4 + 2), 3 * 4, 4),
    ]


def test_layers_compute_in_the_same_number_formats_in_every_layout(
    tmp_path: Path, make_layout: Callable[..., RunPaths], ranks: Ranks
) -> None:
    """The rotary tables stay FP32: in BF16 a position is off by up to 1/256 of a turn's radian."""
    found: dict[str, dict[str, list[str]]] = {}
    for processes in (1, 2, 4):
        names = [name for name in LAYOUTS if LAYOUTS[name][0] == processes]
        runs = [make_layout(tmp_path, name, precision={"name": "mixed"}) for name in names]
        jobs = [{"work": "formats", "run": os.fspath(run.root)} for run in runs]
        found |= dict(zip(names, ranks(processes, jobs), strict=True))
    assert found["one"]["layer"] == found["one"]["attention"] == ["bfloat16 float32 float32"]
    for layout, formats in found.items():
        assert formats == found["one"], layout


def test_each_process_draws_only_its_part_of_the_weights_with_the_same_bits_in_every_layout(
    tmp_path: Path, make_layout: Callable[..., RunPaths], ranks: Ranks
) -> None:
    for processes in (1, 2, 4):
        names = [name for name in LAYOUTS if LAYOUTS[name][0] == processes]
        jobs = [{"work": "weights", "run": os.fspath(make_layout(tmp_path, name).root)} for name in names]
        for name, (drawn, size) in zip(names, ranks(processes, jobs), strict=True):
            assert drawn == size, name


def test_drifting_replicas_of_a_weight_are_detected(
    tmp_path: Path, make_layout: Callable[..., RunPaths], ranks: Ranks
) -> None:
    runs = [make_layout(tmp_path, name) for name in ("dp2", "tp2", "tp2_sp")]
    for before, after in ranks(2, [{"work": "drift", "run": os.fspath(run.root)} for run in runs]):
        assert before == 0.0
        assert 0.009 < after < 0.011
