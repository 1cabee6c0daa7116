"""Trainium through the flow: launch environments as golden files, collisions told, compile, coverage gate, refusals."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import Config
from flows import pretrain
from flows.describe import describe
from flows.launch.base import Job
from flows.launch.local import LocalLauncher
from flows.simulation.cluster import Script, SimulatedCluster
from flows.simulation.jobs import SCRIPTS
from flows.stages.attempt import training_job
from flows.stages.compile import merge_nodes
from hlatctl.run import files
from hlatctl.run.errors import CompileError, DependencyError, dump_error
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from tests.flows.conftest import Recorder

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parents[1] / "golden" / "neuron"
#: Set to write the golden files anew; look at the difference before it is committed.
UPDATE = "HLATCTL_UPDATE_GOLDEN"


def nxd(config: Config, **backend: Any) -> Config:
    composed = compose(["backend=nxd", "cluster=simulated"]).backend
    return dataclasses.replace(config, backend=dataclasses.replace(composed, **backend))


@pytest.mark.parametrize("name", ["hlat_7b", "hlat_70b"])
def test_the_launch_environment_is_the_golden_one(name: str) -> None:
    config = compose([f"experiment={name}", "cluster.worker_cache_dir=/var/tmp/hlatctl"])
    job = training_job(config, RunPaths(Path(f"/runs/{name}")), 1)
    graphs = Path(job.env["NEURON_COMPILE_CACHE_URL"]).name  # holds this machine's versions
    script = LocalLauncher().render(job).script.replace(sys.executable, "PYTHON").replace(graphs, "FINGERPRINT")
    path = GOLDEN / f"{name}.sh"
    if os.environ.get(UPDATE):
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")


def test_what_the_shell_has_otherwise_is_told_in_the_plan_and_in_the_journal(
    simulated_config: Config, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_FUSE_SOFTMAX", "0")
    told = "NEURON_FUSE_SOFTMAX: is '0' in this environment; the configuration's value is used: '1'"
    config = nxd(simulated_config)
    assert describe(config).collisions == [told]
    assert "export NEURON_FUSE_SOFTMAX=1\n" in describe(config).launch_script
    assert "\nunset XLA_USE_BF16\n" in describe(config).launch_script
    run = pretrain.create(config, argv=[])
    state = pretrain.drive(run, recorder)
    assert told in recorder.messages
    (event,) = (event for event in read_events(run) if event["kind"] == "environment_collision")
    assert (event["name"], event["configured"], event["found"]) == ("NEURON_FUSE_SOFTMAX", "1", "0")
    assert told in state.warnings


def test_a_dry_run_compiles_under_the_neuron_compiler_and_passes_the_gate(simulated_config: Config) -> None:
    run = pretrain.create(nxd(simulated_config), argv=[])
    state = pretrain.drive(run)
    assert (state.status, state.stages["coverage"].status) == ("finished", "finished")
    script = (run.launch(0) / "compile.sh").read_text()
    assert " -m trainer.neuron.parallel_compile --to " in script
    assert script.index("parallel_compile") < script.index("torch.distributed.run") < script.index("--compile-only")
    assert "NEURON_FUSE_SOFTMAX=1" in (run.launch(0) / "preflight.sh").read_text()
    assert "NEURON_FUSE_SOFTMAX" not in (run.launch(0) / "warm-cache.sh").read_text(), "no device is used there"


def test_a_missing_graph_ends_the_run_before_training(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks_one(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        dump_error(CompileError("graphs that a short attempt needs and the cache lacks: 1"), job.error_file)
        return CompileError.exit_code

    run = pretrain.create(nxd(simulated_config), argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "coverage", lacks_one)
        with pytest.raises(CompileError, match="the cache lacks: 1"):
            pretrain.drive(run)
    assert not fold(read_events(run)).attempts
    assert pretrain.drive(run).stages["coverage"].status == "finished"


def test_the_gate_is_passed_once_a_run_and_only_where_it_is_asked_for(simulated_config: Config) -> None:
    from flows.runtime.context import open_context
    from flows.stages.compile import check_coverage

    run = pretrain.create(nxd(simulated_config), argv=[])
    pretrain.drive(run)
    ctx = open_context(run)
    check_coverage(ctx)
    assert ctx.state.stages["coverage"].message == "every graph was found before"
    ctx.close()
    assert describe(simulated_config).stages[6].why == "backend.coverage_gate=false"


def test_on_a_cpu_nothing_is_compiled_ahead_for_torch_xla(simulated_config: Config) -> None:
    config = nxd(simulated_config, device="cpu")
    why = "backend.device=cpu: torch-xla keeps no compiled graphs there"
    planned = {stage.name: stage for stage in describe(config).stages}
    state = pretrain.drive(pretrain.create(config, argv=[]))
    for name in ("compile", "warm_cache", "coverage"):
        assert (planned[name].will_run, planned[name].why) == (False, why)
        assert (state.stages[name].status, state.stages[name].message) == ("skipped", why)
    assert state.status == "finished"


def test_the_wrong_neuron_stack_is_refused_before_anything_is_made(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.stages.validate.package_versions", lambda names: {"torch-neuronx": "2.14.3.0"})
    with pytest.raises(DependencyError, match=r"torch-neuronx 2\.14\.3\.0 is installed, which is TorchNeuron"):
        pretrain.create(nxd(simulated_config), argv=[])
    assert not Path(simulated_config.runs_dir).exists()


def module(folder: Path, name: str, *, done: bool = True, content: str = "") -> None:
    path = folder / name
    path.mkdir(parents=True)
    (path / "model.neff").write_text(content)
    if done:
        (path / "model.done").write_text("")


def test_the_nodes_graphs_become_one_cache_of_what_is_complete(tmp_path: Path) -> None:
    for node, names in (("node-a", ("MODULE_1+f", "MODULE_2+f")), ("node-b", ("MODULE_2+f", "MODULE_3+f"))):
        for name in names:
            module(tmp_path / node / "neuronxcc-2.16+4a", name, content=node)
        files.write_json(tmp_path / node / "report.json", {"slowest_graph_s": len(node) + ord(node[-1])})
    module(tmp_path / "node-b" / "neuronxcc-2.16+4a", "MODULE_4+f", done=False)
    assert merge_nodes(tmp_path) == {"graphs": 3, "nodes": 2, "slowest_graph_s": 6 + ord("b")}
    merged = tmp_path / "neuronxcc-2.16+4a"
    assert sorted(path.name for path in merged.iterdir()) == ["MODULE_1+f", "MODULE_2+f", "MODULE_3+f"]
    assert (merged / "MODULE_2+f" / "model.neff").read_text() == "node-a"
    assert not list(tmp_path.glob("node-*"))
    listed = [entry["path"] for entry in files.read_json(tmp_path / "cache_manifest.json")["files"]]
    assert "neuronxcc-2.16+4a/MODULE_3+f/model.done" in listed
    assert len(listed) == 6


def test_nodes_with_different_compilers_are_told_apart(tmp_path: Path) -> None:
    module(tmp_path / "node-a" / "neuronxcc-2.16", "MODULE_1+f")
    module(tmp_path / "node-b" / "neuronxcc-2.17", "MODULE_1+f")
    with pytest.raises(CompileError, match=r"compilers of 2 nodes: neuronxcc-2\.16, neuronxcc-2\.17; all nodes must"):
        merge_nodes(tmp_path)
