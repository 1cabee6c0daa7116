"""The packages that the validate stage asks before anything is created."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config
from flows import pretrain
from flows.runtime.context import open_context
from flows.stages import validate
from hlatctl.run.errors import ConfigError, DataError, DependencyError, StorageError
from tests.flows.conftest import Recorder


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], []),
        (["eval.tasks=[smoke_mmlu]"], ["eval.check"]),
        (["eval=hlat"], ["eval.check"]),
        (["eval.runner=vllm"], ["eval.check"]),
        (["eval.items={smoke_mmlu:[1]}"], ["eval.check"]),
        (["eval.include_path=[mine]"], ["eval.check"]),
        (["eval=hlat", "eval.enabled=false"], []),
        (["backend.device=cuda"], ["trainer.device_check"]),
        (["backend.device=cuda", "cluster=slurm", "cluster.nodes=2"], []),
    ],
)
def test_the_evaluator_is_asked_if_the_suite_may_miss_something(
    overrides: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(validate, "ask_about", lambda module, config, timeout_s: calls.append(module))
    validate.check(compose(overrides))
    assert calls == asked


def test_versions_are_checked_before_a_start_only_where_training_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "ask_about", lambda module, config, timeout_s: None)
    on_neuron = ["backend=torchtitan_neuron", "parallel=fsdp", "precision=mixed"]
    with pytest.raises(DependencyError, match=r"torchtitan 0\.3\.0 is installed; AWS's torchtitan-neuron 0\.2\.2"):
        validate.check(compose(on_neuron))
    validate.check(compose([*on_neuron, "cluster=slurm", "cluster.nodes=2"]))
    validate.check(compose([*on_neuron, "cluster=simulated"]))


def test_training_needs_pytorch_only_where_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="needs PyTorch, which is not installed"):
        validate.check(compose([]))
    validate.check(compose(["cluster=simulated"]))
    validate.check(compose(["cluster=slurm", "cluster.nodes=2"]))


def test_a_chat_template_needs_a_tokenizer_that_has_one() -> None:
    with pytest.raises(ConfigError, match=r"eval\.chat_template=True: a tokenizer that hlatctl trains has no chat"):
        validate.check(compose(["eval.chat_template=true"]))


def test_a_folder_of_tasks_that_others_can_write_to_is_refused_in_a_dry_run_too(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    overrides = [f"eval.include_path=[{shared}]", "cluster=simulated"]
    with pytest.raises(StorageError, match=r"shared: other users may write there .mode 0777.; the task's templates"):
        validate.check(compose(overrides))
    validate.check(compose([*overrides, "eval.enabled=false"]))
    validate.check(compose(["eval.include_path=[only-on-the-cluster]", "cluster=simulated"]))


def test_all_reasons_to_refuse_a_start_are_found_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str, config: Config, timeout_s: float) -> None:
        assert config.runs_dir != str(tmp_path / "runs"), "a listing of objects would be kept there"
        raise DataError(f"{module} refuses")

    monkeypatch.setattr(validate, "ask_about", refuse)
    monkeypatch.delenv("NOT_SET", raising=False)
    overrides = ["data.path=s3://bucket/corpus", "train.init_from=nowhere", "notify.urls=[env:NOT_SET]"]
    config = compose([*overrides, f"runs_dir={tmp_path}/runs"], to_start=False)
    reasons = "; ".join(error.message for error in validate.refused(config))
    assert all(
        each in reasons for each in ("nowhere: no such", "trainer.data.prepare refuses", "NOT_SET: the variable")
    )
    assert not (tmp_path / "runs").exists()


def test_all_missing_inputs_are_named_before_a_program_looks_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ids.idx").write_bytes(b"")
    monkeypatch.setattr(validate, "ask_about", lambda *_, **__: pytest.fail("a program was asked"))
    sources = f"data.sources=[{{path: {tmp_path}/a}},{{path: s3://bucket/b}},{{path: {tmp_path}/ids}}]"
    config = compose([sources, f"tokenizer.path={tmp_path}/c", "eval.enabled=false"])
    with pytest.raises(DataError) as caught:
        validate.check(config)
    named = f"data.sources[0].path={tmp_path}/a, tokenizer.path={tmp_path}/c: no such file or folder"
    assert caught.value.message == named


def test_a_run_says_once_which_tasks_this_machine_will_skip(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hlatctl.machine_checks._sandbox_problem", lambda: "bwrap: not found")
    monkeypatch.setattr(validate, "check", lambda config, begun: None)
    run = pretrain.create(compose(["cluster=local", "tracking=none", f"runs_dir={tmp_path / 'runs'}"]), argv=[])
    with closing(open_context(run, recorder)) as ctx:
        validate.validate(ctx)
        (warning,) = ctx.refresh().warnings
        assert warning.startswith("smoke_humaneval: will be skipped, because ")
        assert recorder.messages.count(warning) == 1
