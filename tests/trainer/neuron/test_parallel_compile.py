"""Ahead-of-time compilation of a node: the tool's report, its failures, and what is left for the head."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from hlatctl.run import files
from hlatctl.run.errors import ERROR_FILE_ENV, CompileError, DataError, DependencyError, dump_error
from tests.trainer.neuron import samples
from tests.trainer.neuron.test_node import install, tools_on_path
from trainer.neuron import parallel_compile

pytestmark = pytest.mark.processes

__all__ = ["tools_on_path"]
NODE = f"node-{platform.node()}"


def test_the_report_is_parsed_from_the_log() -> None:
    report = parallel_compile.parse(samples.parallel_compile("/c", failed=("3+ab",)).splitlines(keepends=True))
    assert report is not None
    assert [Path(path).parent.name for path in report.compiled] == ["MODULE_1+ab", "MODULE_2+ab"]
    assert [Path(path).parent.name for path in report.failed] == ["MODULE_3+ab"]
    assert report.slowest_graph_s == 28.5


def test_a_report_whose_lines_have_the_loggers_prefix_is_parsed_too() -> None:
    text = "".join(f"INFO: {line}\n" for line in samples.parallel_compile("/c").splitlines())
    report = parallel_compile.parse(text.splitlines())
    assert report is not None
    assert (len(report.compiled), report.failed) == (2, ())


@pytest.mark.parametrize("text", ["", "Compiler status PASS\n", "INFO ||NEURON_PARALLEL_COMPILE||: {\n half"])
def test_a_log_without_a_whole_report_has_none(text: str) -> None:
    assert parallel_compile.parse(text.splitlines()) is None


def test_a_node_compiles_into_its_own_folder_and_prints_all_output(
    tools_on_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for the tool: runs the command with graphs extracted, leaves a module as compiled, and reports.
    install(
        tools_on_path,
        "neuron_parallel_compile",
        f"""NEURON_EXTRACT_GRAPHS_ONLY=1 "$@" || exit 1
module="$NEURON_COMPILE_CACHE_URL/neuronxcc-2.16.372.0+4a9b2326/MODULE_1+ab"
mkdir -p "$module"; touch "$module/model.neff" "$module/model.done"
cat <<'END'
{samples.parallel_compile("/c")}
END""",
    )
    monkeypatch.delenv(ERROR_FILE_ENV, raising=False)
    code = "import os; print('extracting', os.environ['NEURON_EXTRACT_GRAPHS_ONLY'])"
    assert parallel_compile.main(["--to", os.fspath(tmp_path), "--", sys.executable, "-c", code]) == 0
    assert "extracting 1\n" in capfd.readouterr().out
    assert files.read_json(tmp_path / NODE / "report.json")["graphs"] == 2
    with pytest.raises(CompileError, match="exit code 1"):
        parallel_compile.main(["--to", os.fspath(tmp_path), "--", sys.executable, "-c", "raise SystemExit(3)"])


def test_a_failed_graph_is_named_with_the_compilers_last_line(tools_on_path: Path, tmp_path: Path) -> None:
    module = tmp_path / "neuronxcc-2.16.372.0+4a9b2326" / "MODULE_9+ab"
    module.mkdir(parents=True)
    (module / "model.log").write_text("lowering\n[F137] neuronx-cc was forcibly killed\n\n")
    report = samples.parallel_compile(os.fspath(tmp_path), failed=("9+ab",))
    install(tools_on_path, "neuron_parallel_compile", f"cat <<'END'\n{report}\nEND")
    with pytest.raises(CompileError) as caught:
        parallel_compile.compile_node(tmp_path / "to", ["true"])
    assert caught.value.message == (
        f"neuron_parallel_compile on {platform.node()}: 1 of 3 graphs failed, the first MODULE_9+ab "
        "([F137] neuronx-cc was forcibly killed)"
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", "printed no report"),
        ("exit 7", "exit code 7"),
        (f"cat <<'END'\n{samples.parallel_compile('/c', compiled=())}\nEND", "no graph was extracted"),
    ],
)
def test_a_tool_that_fails_is_an_error(tools_on_path: Path, tmp_path: Path, script: str, message: str) -> None:
    install(tools_on_path, "neuron_parallel_compile", script)
    with pytest.raises(CompileError, match=message):
        parallel_compile.compile_node(tmp_path / "to", ["true"])


def test_the_trainers_own_error_takes_precedence(
    tools_on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tools_on_path, "neuron_parallel_compile", "exit 1")
    monkeypatch.setenv(ERROR_FILE_ENV, os.fspath(tmp_path / "error.json"))
    dump_error(DataError("dataset.json: not readable"), tmp_path / "error.json")
    assert parallel_compile.main(["--to", os.fspath(tmp_path / "to"), "--", "true"]) == DataError.exit_code


def test_a_missing_tool_is_a_missing_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(DependencyError, match="neuron_parallel_compile: not found on PATH"):
        parallel_compile.compile_node(tmp_path / "to", ["true"])
