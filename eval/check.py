"""``python -m eval.check --config FILE``: whether a suite can be run, before anything is: its names, data and packages.

A built-in suite is checked without the harness; any other asks it for its definitions, which takes some seconds. With
``--run-dir`` also whether the run's frozen contract allows it; prints the contract's hash and the folder of results
inside a milestone's as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from conf.load import load
from conf.schema import Config
from eval import contract, model, plan, runners
from eval.validation import held_out
from hlatctl.run import contract as contracts
from hlatctl.run import files
from hlatctl.run.errors import DataError, run_main
from hlatctl.run.paths import RunPaths
from hlatctl.run.scratch import private_folder


def main(argv: list[str] | None = None) -> int:
    """Check the suite, its tasks and their files; 0 if all is there."""
    parser = argparse.ArgumentParser(prog="eval.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, help="whose contract would have to allow it")
    parser.add_argument("--new-contract", action="store_true", help="another one than the run has had would do")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder that is no run's: no held-out text")
    options = parser.parse_args(argv)
    config = load(options.config)
    runners.check(config.eval.runner)
    with private_folder("eval-check") as own:
        scratch = own.path
        if options.run_dir:
            model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
        made = plan.make(config.eval, scratch)
        for note in made.notes:
            print(note, file=sys.stderr)
        if options.run_dir:
            run = RunPaths(options.run_dir.absolute())
            present = _contract(run, config, made, scratch, options.model)
            folder_name = contracts.results_folder(present, contracts.check(run, present, new=options.new_contract))
            print(json.dumps({"contract": contracts.of_tasks(present), "folder": folder_name}))
    return 0


def _contract(
    run: RunPaths, config: Config, made: plan.Plan, scratch: Path, elsewhere: Path | None
) -> contracts.Fields:
    """The contract that the evaluator would come to; a run's own model is not exported yet."""
    if elsewhere:
        model.check_folder(elsewhere)
    text = held_out(run, config, from_elsewhere=elsewhere is not None) if made.validation else None
    folder = elsewhere or _tokenizer_folder(run)
    return contract.make(config, made, text, scratch, folder=folder, from_elsewhere=elsewhere is not None)


def _tokenizer_folder(run: RunPaths) -> Path:
    """Where the exported models of a run have their tokenizer from."""
    try:
        found = Path(files.read_sealed_json(run.dataset)["tokenizer"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run.dataset}: names no tokenizer ({error!r})") from None
    if not found.is_dir():
        raise DataError(
            f"{run.dataset}: tokenizer.path={found}: no such folder",
            hint="bring the folder back; another run with the same corpus and tokenizer prepares it again",
        )
    return found


if __name__ == "__main__":
    sys.exit(run_main(main))
