"""The program that keeps the nodes of a Slurm job, with Slurm's commands replaced by their answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hlatctl.allocation import Order, Round, asked_from_outside, ended_file, rounds
from hlatctl.run import files, memory
from hlatctl.run.paths import RunPaths

#: What Slurm's commands answer in a job of three nodes, one of which is down.
ANSWERS = {"squeue": "n[1-3]", "scontrol": "n1\nn2\nn3", "sinfo": "n1|allocated\nn2|down*\nn3|allocated"}


def order(script: Path = Path("/s/try.sh"), **values: object) -> Order:
    return Order(**{"script": os.fspath(script), "token": "t", "nodes": 2, **values})  # type: ignore[arg-type]


def test_a_round_gets_the_first_nodes_that_can_be_used_and_suspects_last() -> None:
    hosts = ("n1", "n2", "n3", "n4")
    assert order().choose(hosts) == ["n1", "n2"]
    assert order().choose(hosts, {"n1"}) == ["n2", "n3"]
    assert order(excluded=("n1", "n2")).choose(hosts) == ["n3", "n4"]
    assert order(avoided=("n2",)).choose(hosts) == ["n1", "n3"]
    assert order(avoided=("n2", "n3"), excluded=("n4",)).choose(hosts) == ["n1", "n2"]
    assert order(all_nodes=True, avoided=("n2",)).choose(hosts, {"n4"}) == ["n1", "n2", "n3"]
    assert order(all_nodes=True, nodes=3, excluded=("n1", "n2")).choose(hosts) == []


def test_an_order_is_either_taken_or_withdrawn(tmp_path: Path) -> None:
    round_ = Round(folder=tmp_path, number=1)
    round_.write(order(excluded=("n7",)))
    assert (round_.waits, round_.order()) == (True, order(excluded=("n7",)))
    assert round_.move("withdrawn")
    assert not round_.move("taken")
    assert (round_.waits, round_.taken, rounds(tmp_path)) == (False, False, [round_])


def test_only_a_stop_that_no_driver_ordered_is_from_outside(tmp_path: Path) -> None:
    base = tmp_path / "train"
    files.write_json(tmp_path / "train.node-1.exit_code", {"asked_to_stop": True})
    assert asked_from_outside(base)
    assert not asked_from_outside(base, 2), "the node without a record has failed"
    files.write_json(tmp_path / "train.exit_code", {"asked_to_stop": False})
    assert not asked_from_outside(base), "srun asked the others because this one failed"
    files.write_json(tmp_path / "train.exit_code", {"asked_to_stop": True})
    files.write_json(tmp_path / "train.orders", {"what": "stop", "id": "1"})
    assert not asked_from_outside(base)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch program."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, answer in ANSWERS.items():
        (commands / name).write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
        (commands / name).chmod(0o755)
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}


def program(folder: Path, idle_s: float, env: dict[str, str]) -> None:
    words = (sys.executable, "-m", "hlatctl.allocation", os.fspath(folder), str(idle_s))
    assert subprocess.run(words, env=env, check=False).returncode == 0


@pytest.mark.processes
def test_the_program_runs_rounds_on_usable_nodes_and_ends_when_it_is_idle(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    folder, script = tmp_path / "allocation-0001", tmp_path / "try.sh"
    script.write_text(f'echo "$HLATCTL_TOKEN $HLATCTL_NODE_LIST" >>{tmp_path}/out; exit 3\n')
    first, second = (Round(folder=folder, number=number) for number in (1, 2))
    first.write(order(script))
    second.write(order(script, nodes=1, excluded=("n1",)))
    program(folder, 0.1, slurm)
    assert (tmp_path / "out").read_text() == "t n1,n3\nt n3\n"
    assert (first.hosts(), second.hosts()) == (("n1", "n3"), ("n3",))
    assert files.read_json(ended_file(tmp_path / "try"))["code"] == 3, "the script left no end of its own"
    assert (folder / "closed").exists()


@pytest.mark.processes
def test_the_program_ends_with_too_few_nodes_and_after_a_stop_from_outside(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    script = tmp_path / "try.sh"
    script.write_text(
        f"echo '{{\"asked_to_stop\": true}}' | tee {tmp_path}/try.exit_code >{tmp_path}/try.node-1.exit_code\n"
    )
    few, stopped = tmp_path / "few", tmp_path / "stopped"
    for folder, nodes in ((few, 3), (stopped, 2)):
        for number in (1, 2):
            Round(folder=folder, number=number).write(order(script, nodes=nodes))
        program(folder, 600, slurm)
        assert [each.waits for each in rounds(folder)] == [False, True], "the second order is left to the driver"
    assert (Round(folder=few, number=1).hosts(), Round(folder=stopped, number=1).hosts()) == ((), ("n1", "n3"))


@pytest.mark.processes
def test_released_nodes_take_no_order(tmp_path: Path, slurm: dict[str, str]) -> None:
    round_ = Round(folder=tmp_path, number=1)
    round_.write(order())
    tmp_path.joinpath("released").touch()
    program(tmp_path, 600, slurm)
    assert round_.waits
    assert (tmp_path / "closed").exists()


@pytest.mark.processes
def test_at_its_end_it_removes_the_copies_of_steps_from_the_memory_of_all_usable_nodes(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    """As after a driver that died. A node that is down would keep srun waiting."""
    command = tmp_path / "bin" / "srun"
    command.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/srun\nfor copies; do :; done; rm -rf "$copies"\n')
    command.chmod(0o755)
    run = RunPaths(tmp_path / "run")
    copies = memory.of_run(run)
    copies.joinpath("n1").mkdir(parents=True)
    folder = run.root / "launch" / "allocation-0001"
    folder.mkdir(parents=True)
    try:
        program(folder, 0.1, slurm)
        assert not copies.exists()
    finally:
        memory.remove_all(run)
    assert "--nodelist=n1,n3" in tmp_path.joinpath("srun").read_text().split()


@pytest.mark.processes
def test_a_damaged_order_is_withdrawn_and_does_not_hold_the_nodes(tmp_path: Path, slurm: dict[str, str]) -> None:
    tmp_path.joinpath("round-0001.order").touch()
    tmp_path.joinpath("round-1x.order").touch()
    program(tmp_path, 0.1, slurm)
    assert tmp_path.joinpath("round-0001.withdrawn").exists()


@pytest.mark.processes
def test_processes_wait_on_all_usable_nodes_and_serve_rounds_with_the_same_imports(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    folder, scripts = tmp_path / "allocation-0001", [tmp_path / f"{number}.sh" for number in range(1, 5)]
    for script, imports in zip(scripts, ("torch", "torch", "", "torch"), strict=True):
        end = f'echo \'{{"host": "n3", "warm": false}}\' >{script.with_suffix(".node-1.exit_code")}'
        script.write_text(
            'if [ "$HLATCTL_STARTS_WARM" ]; then\n'
            f'echo "$HLATCTL_WARM" >{script}.started-$HLATCTL_NODE_LIST; exec sleep 600\n'
            f'fi; echo "$HLATCTL_WARM $HLATCTL_WARM_IS_NEW" >{script}.ran; {end if script is scripts[0] else ":"}\n'
        )
        Round(folder=folder, number=scripts.index(script) + 1).write(order(script, nodes=1, imports=imports))
    program(folder, 0.1, slurm)
    started = {path.name: path.read_text().strip() for path in tmp_path.glob("*.started-*")}
    assert sorted(started) == ["1.sh.started-n1,n3", "2.sh.started-n3", "4.sh.started-n1,n3"]
    assert started["1.sh.started-n1,n3"] == started["2.sh.started-n3"], "none was found on n3"
    ran = [Path(f"{script}.ran").read_text().split() for script in scripts]
    assert ran == [[started["1.sh.started-n1,n3"], "1"]] * 2 + [[], [started["4.sh.started-n1,n3"], "1"]]
    assert len(set(started.values())) == 2
