"""Backend nxd on a CPU as a person meets it: the flow, a stop, the short attempt, what its checkpoints are good for."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conf.compose import compose
from conf.load import load
from flows import pretrain
from flows.pretrain import PlainCaller
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from tests.nxd.test_training import Events, begin_from, launch, make_layout, reference  # noqa: F401 (fixtures are found by their names here)
from trainer.convert.export import export, read_weights
from trainer.model.decoder import Llama

pytestmark = pytest.mark.processes

#: Processes, keys of ``parallel``, and of other groups: what tests/nxd/test_training.py has none of.
_MASK = {"data": {"mask_across_documents": True}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp4": (4, {"tensor_parallel_size": 4}, {"model": {"num_kv_heads": 4}}),
    "masked_tp2_sp": (
        2,
        {"tensor_parallel_size": 2, "sequence_parallel": True, "activation_checkpointing": "full"},
        _MASK,
    ),
    "masked_dp2": (2, {"data_parallel": "zero1", "activation_checkpointing": "selective"}, _MASK),
}
_TOLERANCE = {"loss": 2e-6, "grad_norm": 1e-4, "param_norm": 1e-6}
_TP2: dict[str, Any] = {"processes": 2, "parallel": {"tensor_parallel_size": 2}, "backend": {"name": "nxd"}}
_STOPPED_AFTER = 8


@pytest.fixture(scope="module")
def tp2(
    tmp_path_factory: pytest.TempPathFactory,
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
) -> RunPaths:
    """A run of two tensor-parallel processes from its own initial weights, undisturbed."""
    run = make_layout(tmp_path_factory.mktemp("tp2") / "run", **_TP2)
    finish(launch(run, 1))
    return run


def largest_difference(key: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Relative, of the same steps."""
    assert ours
    assert [event["step"] for event in ours] == [event["step"] for event in theirs]
    worst: float = max(abs(a[key] - b[key]) / b[key] for a, b in zip(ours, theirs, strict=True))
    return worst


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_four_slices_and_masked_documents_go_on_with_the_curve_of_torch_native(
    layout: str,
    reference: Callable[..., RunPaths],
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
    events_of: Events,
    tmp_path: Path,
) -> None:
    processes, parallel, changes = LAYOUTS[layout]
    run = make_layout(tmp_path / layout, processes=processes, parallel=parallel, backend={"name": "nxd"}, **changes)
    begin_from(reference(**changes), run)
    finish(launch(run, 1))
    ours = events_of(run, "step")
    expected = events_of(reference(**changes), "step")[-len(ours) :]
    for key, tolerance in _TOLERANCE.items():
        differ = largest_difference(key, ours, expected)
        print(f"{layout}: {key} differs by at most {differ:.1e}")
        assert differ <= tolerance, key
    if changes is _MASK:
        unmasked = events_of(reference(), "step")[-len(ours) :]
        assert largest_difference("loss", ours, unmasked) > 1e-3, "the mask does something"


def test_a_request_to_stop_loses_no_step(
    tp2: RunPaths,
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
    events_of: Events,
    tmp_path: Path,
) -> None:
    # No checkpoint is due on the way, so what is there at the end was written because of the request.
    run = make_layout(tmp_path / "run", **_TP2, checkpoint={"every_steps": 100})
    process = launch(run, 1)
    while len(events_of(run, "step")) < _STOPPED_AFTER:
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)  # torchrun hands it on to its processes
    process.communicate()
    (stopped,), (written,) = events_of(run, "train_stopped"), events_of(run, "checkpoint_written")
    assert stopped["reason"] == written["reason"] == "stop"
    last = stopped["step"]
    assert (written["step"], len(events_of(run, "step"))) == (last, last)
    finish(launch(run, 2))
    assert events_of(run, "train_started", 2)[0]["resumed_from_step"] == last
    told = ("step", "tokens", "loss", "grad_norm", "param_norm", "lr")
    ours, undisturbed = ([[event[key] for key in told] for event in events_of(one, "step")] for one in (run, tp2))
    assert ours == undisturbed, "every step once, and to the last bit"


def test_the_short_attempt_leaves_nothing_and_the_gate_needs_no_counts(
    tp2: RunPaths, start: Callable[..., Any], finish: Callable[..., str], events_of: Events, tmp_path: Path
) -> None:
    before = sorted(path.name for path in tp2.root.iterdir())
    steps = len(events_of(tp2, "step"))
    argv = ("-m", "trainer", "--run-dir", os.fspath(tp2.root), "--attempt", "0")
    extracting = {"NEURON_EXTRACT_GRAPHS_ONLY": "1", "NEURON_COMPILE_CACHE_URL": os.fspath(tmp_path)}
    finish(start(*argv, "--compile-only", processes=2, **extracting))  # as neuron_parallel_compile calls it
    assert [path.name for path in tmp_path.iterdir()] == ["cache_manifest.json"]
    assert sorted(path.name for path in tp2.root.iterdir()) == before
    finish(start(*argv, "--check-coverage", processes=2))
    record = files.read_json(tp2.coverage)
    assert (record["misses"], [process["rank"] for process in record["processes"]]) == (0, [0, 1])
    tp2.coverage.unlink()
    assert len(events_of(tp2, "step")) == steps, "the run itself is not touched"


def test_what_it_trained_is_the_same_model_in_transformers(tp2: RunPaths, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, target = load(tp2.config), tmp_path / "hf"
    step = export(config, tp2, None, target)["step"]
    ours = Llama(config.model, config.train.seq_len)
    ours.load_state_dict(read_weights(tp2, step))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.randint(config.model.vocab_size, (2, config.train.seq_len))
    with torch.no_grad():
        torch.testing.assert_close(F.linear(ours(tokens), ours.output_weight), theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("writer", ["nxd", "torch_native"])
def test_a_run_begins_from_the_other_backends_weights(
    writer: str,
    tp2: RunPaths,
    reference: Callable[..., RunPaths],
    make_layout: Callable[..., RunPaths],
    launch: Callable[..., Any],
    finish: Callable[..., str],
    events_of: Events,
    tmp_path: Path,
) -> None:
    written = tp2 if writer == "nxd" else reference()
    train = {"init_from": os.fspath(written.checkpoint(25)), "max_steps": 5}
    layouts: dict[str, dict[str, Any]] = {
        "native": {},
        "zero1": {"processes": 2, "parallel": {"data_parallel": "zero1"}, "backend": {"name": "nxd"}},
    }
    steps = {}
    for name, keys in layouts.items():
        run = make_layout(tmp_path / name, train=train, **keys)
        finish(launch(run, 1))
        assert len(events_of(run, "initial_weights")) == 1
        steps[name] = events_of(run, "step")
    for key, tolerance in _TOLERANCE.items():
        assert largest_difference(key, steps["zero1"], steps["native"]) <= tolerance, key
    assert steps["zero1"][0]["loss"] < events_of(written, "step")[0]["loss"] - 0.5, "it begins with what was learnt"


def test_the_flow_goes_from_preflight_to_the_report_and_compiles_nothing_ahead_on_a_cpu(
    make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the report's figures are the head's: pip install matplotlib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.fspath(Path(__file__).parents[2]), os.environ["PYTHONPATH"])))
    monkeypatch.setenv("XLA_USE_BF16", "1")
    config = make_config(
        runs_dir=os.fspath(tmp_path / "runs"),
        parallel={"tensor_parallel_size": 2},
        cluster={"processes_per_node": 2, "worker_cache_dir": os.fspath(tmp_path / "worker")},
        train={"max_steps": 6, "global_batch_size": 4, "micro_batch_size": 1},
        preflight={"timeout_s": 600},  # two processes import the library on a busy machine
        tracking={"enabled": False},
    )
    config = replace(config, backend=compose(["backend=nxd", "backend.device=cpu"]).backend)
    run = pretrain.create(config, argv=[])
    state = pretrain.drive(run, caller_of=lambda ctx: PlainCaller(ctx.clock))
    assert (state.status, state.step) == ("finished", 6)
    why = "backend.device=cpu: torch-xla keeps no compiled graphs there"
    for stage in ("compile", "warm_cache", "coverage"):
        assert (state.stages[stage].status, state.stages[stage].message) == ("skipped", why)
    assert state.warnings == ["XLA_USE_BF16: is '1' in this environment; the configuration's value is used: unset"]
    assert json.loads(run.preflight.read_text())["ok"] is True
    assert (run.report / "index.html").is_file()
