"""``python -m eval.check --config FILE``: check a suite's names, data and packages before anything runs.

A built-in suite is checked without the harness; for others, the harness reads their definitions, which takes some
seconds. ``--model`` and ``--run-dir`` also make the contracts, and compare those of a run with the accepted ones. Then
the command prints JSON: a hash of all contracts of the evaluation, and the hash of each task and group by number.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from conf.load import load
from conf.schema import Config
from eval import contract
from eval.serving import model, runners
from eval.tasks import plan
from eval.validation import held_out
from hlatctl.run import contract as contract_record
from hlatctl.run import files
from hlatctl.run.contract import OWN, Contracts, digest
from hlatctl.run.errors import DataError, run_main
from hlatctl.run.files import private_folder
from hlatctl.run.paths import RunPaths


def main(argv: list[str] | None = None) -> int:
    """Check the suite, its tasks and their files; return 0 if nothing is missing."""
    parser = argparse.ArgumentParser(prog="eval.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, help="also check this run's contract")
    parser.add_argument("--new-contract", action="store_true", help="allow a contract that differs from the run's")
    parser.add_argument("--model", type=Path, help="Hugging Face folder of an external model: no held-out text")
    options = parser.parse_args(argv)
    config = load(options.config)
    runners.check(config.eval.runner)
    with private_folder("eval-check") as own:
        scratch = own.path
        if options.run_dir or options.model:
            model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
        planned = plan.make(config.eval, scratch)
        for note in planned.notes:
            print(note, file=sys.stderr)
        run = RunPaths(options.run_dir.absolute()) if options.run_dir else None
        if run or options.model:
            present = _contract(run, config, planned, scratch, options.model)
            numbers = _numbers(run, present, new=options.new_contract)
            by_number: dict[str, dict[str, str]] = {}
            for name, contract_hash in present.hashes.items():
                by_number.setdefault(str(numbers[name]), {})[name] = contract_hash
            print(json.dumps({"contract": digest(present.hashes), "contracts": by_number}))
    return 0


def _numbers(run: RunPaths | None, present: Contracts, *, new: bool) -> dict[str, int]:
    if not run:
        return dict.fromkeys(present.hashes, OWN)
    accepted = contract_record.check_record(run, present, new=new)
    if accepted.dropped:
        print(accepted.dropped, file=sys.stderr)
    return accepted.numbers


def _contract(
    run: RunPaths | None, config: Config, planned: plan.EvaluationPlan, scratch: Path, external: Path | None
) -> Contracts:
    """Return the contracts of an evaluation of a run or an external model; the run's model needs no export for it."""
    if external:
        model.check_folder(external)
    text = held_out(None if external else run, config) if planned.validation else None
    folder, elsewhere = external or _tokenizer_folder(run), external is not None
    devices = _recorded_devices(run)
    return contract.make(config, planned, text, scratch, folder=folder, from_elsewhere=elsewhere, devices=devices)


def _recorded_devices(run: RunPaths | None) -> dict[str, str]:
    """Return the devices that evaluated a run, by kind: a login node, where this check runs, may have none of them."""
    tasks = contract_record.read_record(run).tasks.values() if run else ()
    names = [str(fields["device"]) for known in tasks for fields in known if "device" in fields]
    return {name.partition(":")[0]: name for name in reversed(names)}


def _tokenizer_folder(run: RunPaths | None) -> Path:
    assert run is not None, "asked without --model"
    try:
        folder = Path(files.read_sealed_json(run.dataset)["tokenizer"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run.dataset}: names no tokenizer ({error!r})") from None
    if not folder.is_dir():
        raise DataError(
            f"{run.dataset}: tokenizer.path={folder}: no such folder",
            hint="restore the folder; another run with the same corpus and tokenizer prepares it again",
        )
    return folder


if __name__ == "__main__":
    sys.exit(run_main(main))
