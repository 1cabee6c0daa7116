"""The Slurm launcher with recorded answers of Slurm's commands; ``tests/slurm`` runs it on a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, SlurmConfig
from flows.launch.base import Handle, Status
from flows.launch.endings import token_file
from flows.launch.slurm import commands, launcher, script
from flows.launch.slurm.commands import Accounting
from flows.launch.slurm.launcher import SlurmLauncher
from hlatctl import node
from hlatctl.allocation import ended_file
from hlatctl.run.errors import LaunchError

TOKEN = "7587f0ef921d469aa8e402c224c4feb4"
Answers = dict[str, str]
Ask = Callable[[Answers], Status]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return the state of a job of two nodes, by the answers to the beginnings of commands."""
    handle = Handle(launcher="slurm", name="train", launch_dir=str(tmp_path))
    token_file(tmp_path / "train").write_text(f"{TOKEN}\n")

    def state(answers: Answers) -> Status:
        def slurm(*words: str) -> str:
            command = " ".join(words)
            for beginning, answer in answers.items():
                if command.startswith(beginning):
                    return answer.replace("NAME", script.job_name(str(tmp_path), "train"))
            raise LaunchError(f"{command}: refused")

        for module in (commands, launcher):
            monkeypatch.setattr(module, "slurm", slurm)
        monkeypatch.setattr(commands, "sacct", lambda *words: (0, slurm("sacct", *words)))
        commands.hosts_of.cache_clear()
        return SlurmLauncher(ClusterConfig(launcher="slurm", slurm=SlurmConfig(partition="gpu"))).status(handle)

    return state


#: Of Slurm 22.05 with slurmdbd and MariaDB, for a job in the queue, one that ran, and an older one of the same name.
ACCOUNTED = """\
14003|CANCELLED by 0|None||None assigned|2026-11-22T13:46:19|NAME
"""
RAN = """\
14001|FAILED|None||n[1-2]|2026-11-22T13:40:10|NAME
14002|CANCELLED by 0|None||n[1-2]|2026-11-22T13:46:10|NAME
"""


def ended(base: Path, code: int, *, ran_s: float) -> None:
    """Write the records of two nodes that were asked to stop."""
    for rank, host in enumerate(("n1", "n2")):
        node.record(base, "pid", rank).write_text(json.dumps({"host": host, "time_unix_s": 1000.0}))
        end = {"code": code, "time_unix_s": 1000.0 + ran_s, "oom_kills": 0, "asked_to_stop": True}
        node.record(base, "exit_code", rank).write_text(json.dumps({"host": host, **end}))
    ended_file(base).write_text(json.dumps({"v": 1, "code": code}))


def test_an_end_before_the_partitions_own_limit_is_a_time_limit(ask: Ask, tmp_path: Path) -> None:
    # squeue and scontrol of Slurm 22.05, the latter in part.
    answers = {
        "squeue": f"17805|FAILED|NonZeroExitCode|{TOKEN}|n[1-2]|2026-11-22T13:37:01|n1|30:00|NAME\n",
        "scontrol show hostnames": "n1\nn2\n",
        "scontrol --oneliner show job": "JobId=17805 JobState=FAILED TimeLimit=01:00:00 TimeMin=N/A PreemptTime=None",
        "sinfo": "n1|idle\nn2|idle\n",
    }
    ended(tmp_path / "train", 75, ran_s=3310.0)
    assert ask(answers).verdict == "time_limit"
    ended(tmp_path / "train", 75, ran_s=1800.0)
    assert ask(answers).verdict == ""
    answers["scontrol --oneliner show job"] = "TimeLimit=UNLIMITED PreemptTime=2026-11-22T13:37:19"
    assert ask(answers).verdict == "preempted"


def test_a_pre_emption_that_slurm_calls_a_time_out_is_a_pre_emption(ask: Ask, tmp_path: Path) -> None:
    answers = {
        "squeue": f"17805|TIMEOUT|TimeLimit|{TOKEN}|n[1-2]|2026-11-22T13:37:01|n1|0:00|NAME\n",
        "scontrol show hostnames": "n1\nn2\n",
        "scontrol --oneliner show job": "JobId=17805 JobState=TIMEOUT PreemptTime=2026-11-22T13:37:19",
        "sinfo": "n1|idle\nn2|idle\n",
    }
    assert ask(answers).verdict == "preempted"
    answers["scontrol --oneliner show job"] = "JobId=17805 JobState=TIMEOUT PreemptTime=None"
    assert ask(answers).verdict == "time_limit"
    del answers["scontrol --oneliner show job"]
    assert ask(answers).verdict == "time_limit", "Slurm has forgotten the job meanwhile"


def test_the_end_of_a_job_that_the_scheduler_has_forgotten_is_in_its_accounting(ask: Ask, tmp_path: Path) -> None:
    queued = ask({"squeue": "", "sacct": ACCOUNTED})
    assert (queued.state, queued.verdict, queued.hosts) == ("lost", "cancelled", ())
    ended(tmp_path / "train", 143, ran_s=100.0)
    answers = {"squeue": "", "scontrol show hostnames": "n1\nn2\n", "sinfo": "n1|idle\nn2|idle\n", "sacct": RAN}
    assert ask(answers).verdict == "cancelled", "and no node's process was killed"
    assert ask({**answers, "sacct": ""}).verdict == ""


def test_a_cluster_without_accounting_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(1, "sacct: error: Connection refused\n"), (1, "Slurm accounting storage is disabled\n")]
    remaining = iter(answers)
    monkeypatch.setattr(commands, "sacct", lambda *_: next(remaining))
    accounts = Accounting()
    for _ in range(3):
        assert accounts.job("hlatctl:/runs/a/train", TOKEN, 1e9) is None
    assert next(remaining, None) is None


def test_without_its_command_there_is_no_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_program(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("subprocess.run", no_such_program)
    assert Accounting().job("hlatctl:/runs/a/train", TOKEN, 1e9) is None
