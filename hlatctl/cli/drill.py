"""`hlatctl drill`, `verify-resume` and `doctor`: check recovery from faults, resuming, and the machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import (
    ConfigDirs,
    Json,
    Overrides,
    RunName,
    RunsDir,
    Yes,
    columns,
    confirm,
    find_run,
    print_json,
    say,
    with_runs_dir,
    write,
)
from hlatctl.run.checks import Check
from hlatctl.run.errors import ConfigError, PreflightError, StoppedError, TrainingError
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    from conf.schema import Config
    from flows.drill.pool import Fault
    from flows.verify_resume import Comparison


_EXPERIMENT = "experiment="


def drill(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="Fault to inject; can be repeated.  [default: those that `--list` marks]")
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults, without injecting any.")] = False,
    yes: Yes = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Inject faults into a short run and check that it recovers.

    `--list` shows all faults, each with the cause, the node and the decision that must follow. Without --fault, it
    injects one fault after another: processes killed, stopped, slowed and preempted; data, checkpoints and memory
    damaged; trackers, driver and disk lost; on Slurm, also a node's program killed and the job cancelled. At the end
    every loss must equal that of an undisturbed run: bit by bit on a CPU, within rounding on other devices. All files
    are in a new folder under the runs folder, and other runs are not changed. Takes a few minutes. The exit code is 20
    if a recovery failed.
    """
    from conf.compose import compose
    from flows.drill.exercise import check_names, exercise, new_folder, not_injected
    from flows.drill.pool import offered
    from flows.runtime.spending import of_training

    if list_faults:
        _list_faults(as_json=as_json)
        return
    check_names(fault or [])
    chosen = with_runs_dir(overrides, runs_dir)
    if not any(override.lstrip("+").startswith(_EXPERIMENT) for override in chosen):
        chosen = [f"{_EXPERIMENT}drill", *chosen]
    config = compose(chosen, to_start=False)  # refuse what can't be drilled before anything else
    faults = fault or offered(config)
    not_injected(config, faults)
    confirm(of_training(config, typed=chosen), config.cluster, "the drill's run", yes=yes)
    folder = new_folder(Path(config.runs_dir))
    try:
        run = exercise(config, folder, faults, argv=sys.argv, say=say)
    except KeyboardInterrupt:
        raise StoppedError(
            f"the drill was interrupted; its files are in {folder}", hint="`hlatctl drill` begins a new one"
        ) from None
    show(run, as_json=as_json)


def _list_faults(*, as_json: bool) -> None:
    from flows.drill.pool import FAULTS

    faults = {name: FAULTS[name] for name in FAULTS}
    if as_json:
        listed = [
            {
                "fault": name,
                "title": fault.title,
                "by_default": fault.standard,
                "needs": _needs(fault),
                **dataclasses.asdict(fault.expects),
            }
            for name, fault in faults.items()
        ]
        print_json({"faults": listed})
        return
    header = ["FAULT", "", "WHAT", "CAUSE", "NODE", "DECISION", "NEEDS"]
    rows = [
        [
            name,
            "*" if fault.standard else "",
            fault.title,
            fault.expects.cause or "training continues",
            "blamed" if fault.expects.blames_node else "–",
            fault.expects.action.replace("_", " ") or "–",
            _needs(fault) or "–",
        ]
        for name, fault in faults.items()
    ]
    write(columns([header, *rows]) + "\n")
    say("*: injected without --fault. A drill can't inject a fault that needs hardware or an administrator.")


def _needs(fault: Fault) -> str:
    known = {fault.needs: True, "a scheduler": fault.scheduler and not fault.needs, "bubblewrap": fault.small_disk}
    return ", ".join(need for need, is_needed in known.items() if need and is_needed)


def show(run: RunPaths, *, as_json: bool) -> None:
    """Print the results of a drill; TrainingError if the run did not recover from every fault."""
    from hlatctl.report import drill as report

    results = report.drill(report.read(run))
    assert results is not None  # exercise has just written it
    if as_json:
        print_json(
            {
                "run": str(run.root),
                "steps": results.steps,
                "cold_start_s": results.cold_start_s,
                "killed_to_step_s": results.killed_to_step_s,
                "outcomes": results.outcomes,
            }
        )
    else:
        write(columns([[cell.upper() for cell in report.HEADER], *report.rows(results)]) + "\n")
        write(columns([list(fact) for fact in report.facts(results)]))
    say(f"report: {run.report / 'index.html'}")
    if results.failed:
        raise TrainingError(
            f"the run did not recover from: {'; '.join(results.failed)}",
            hint=f"the runs and their logs are in {run.root.parent}",
        )


def verify_resume(
    run: RunName,
    steps: Annotated[int, typer.Option(help="Steps to train again, at most.", min=1)] = 10,
    step: Annotated[
        int | None,
        typer.Option(help="The checkpoint's step.  [default: the newest with a checkpoint or steps after it]", min=0),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Check that resuming reproduces the original run.

    Trains the steps after it again, on this machine or cluster, and compares each loss and gradient norm with the
    journal. If the run has a checkpoint of one of these steps, compares all weights and moments with it too. The run
    itself is only read. The exit code is 20 if they differ by more than rounding.
    """
    from flows.verify_resume import verify

    paths = find_run(run, runs_dir)
    found = verify(paths, most_steps=steps, step=step, say=say)
    if as_json:
        print_json({**dataclasses.asdict(found), "holds": found.holds})
    else:
        for condition in found.conditions:
            say(f"another condition: {condition}")
        _show(found)
    if not found.holds:
        raise TrainingError(
            f"run {paths.run_id}: the checkpoint of step {found.from_step} does not continue as the run did "
            f"({_failure(found)})",
            hint="check the machine (`hlatctl doctor`), the code and the data; `hlatctl show` has what the run used",
        )


def _show(found: Comparison) -> None:
    write(f"{found.equal} of {found.steps} steps are equal, to the last bit, after step {found.from_step}")
    if found.first_different is not None:
        write(f"the first that differs is step {found.first_different}")
        write(f"largest relative difference of a loss: {found.largest:.2g}, of a norm: {found.largest_norm:.2g}")
    if found.tensors_at is None:
        write("weights and moments were not compared: there is no checkpoint of these steps to compare with")
        return
    counted = f"{found.equal_tensors} of {found.tensors} tensors"
    write(f"{counted} are equal, to the last bit, after step {found.tensors_at}")
    if found.first_tensor is not None:
        write(f"the first that differs is {found.first_tensor}")
        write(f"largest relative difference of a tensor: {found.largest_tensor:.2g}")


def _failure(found: Comparison) -> str:
    from conf.training_rules import LOSS_TOLERANCE, NORM_TOLERANCE, TENSOR_TOLERANCE

    if found.must_equal:
        first = found.first_different
        what = f"step {first} differs" if first is not None else f"tensor {found.first_tensor} differs"
        return f"{what}; must be equal to the last bit"
    limits = {"a loss": LOSS_TOLERANCE, "a gradient norm": NORM_TOLERANCE, "a tensor": TENSOR_TOLERANCE}
    measured = zip(limits, (found.largest, found.largest_norm, found.largest_tensor), strict=True)
    return "; ".join(
        f"{what} differs by {value:.2g}, must be within {limits[what]:g}"
        for what, value in measured
        if value > limits[what]
    )


def doctor(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    neuron: Annotated[bool, typer.Option("--neuron", help="Also check a Trainium node; takes up to an hour.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also check the Slurm or Kubernetes cluster: commands, rights, limits.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Check this machine, and explain how to fix what is missing.

    Changes nothing. GPUs are checked where their driver is loaded, or with backend.device=cuda: PyTorch, driver,
    memory, links, clocks, faults. --neuron checks devices, software, error counters, network and kernel settings with
    the Neuron tools. Then it compiles, trains, kills and resumes a small model in a temporary folder, with backend=nxd
    unless OVERRIDES name another. --cluster asks Slurm's commands or kubectl and submits nothing, with cluster=slurm
    unless OVERRIDES name another. The exit code is 15 if a check fails.
    """
    from conf.compose import compose

    chosen = with_runs_dir(overrides, runs_dir)
    if neuron and not any(override.startswith(("backend=", "backend.name=")) for override in chosen):
        chosen.insert(0, "backend=nxd")
    if cluster and not any(override.startswith("cluster=") for override in chosen):
        chosen.insert(0, "cluster=slurm")
    config = compose(chosen)
    checks = []
    for check in _checks(config, chosen, neuron=neuron, cluster=cluster):
        checks.append(check)
        if not as_json:
            write(f"{check.status}  {check.name}: {check.shows}")
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        raise PreflightError(
            f"{len(failed)} of {len(checks)} checks failed; the first: {failed[0].name}: {failed[0].shows}",
            hint=f"run `{failed[0].command}` to see the problem" if failed[0].command else "",
        )


def _checks(config: Config, overrides: list[str], *, neuron: bool, cluster: bool) -> Iterator[Check]:
    from hlatctl import machine_checks

    yield from machine_checks.look(config)
    from flows.cluster_checks import check_devices, check_node

    yield from check_devices(config)
    if neuron:
        yield from check_node(config, overrides)
    if cluster:
        from conf.registries import LAUNCHERS

        check = LAUNCHERS.part(config.cluster.launcher, "check")
        if check is None:
            raise ConfigError(
                f"cluster.launcher={config.cluster.launcher}: has no checks of a cluster",
                hint="use cluster=slurm or cluster=kubernetes, or leave --cluster out",
            )
        yield from check(config)
