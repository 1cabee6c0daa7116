"""Jobs that wait in the queue until a test releases them: submitted with sbatch's option ``--hold``."""

from __future__ import annotations

from tests.slurm.lab import Lab


def held(lab: Lab, of: str = "") -> list[tuple[str, str, str]]:
    """Partition, nodes and name of each held job whose name contains a text."""
    return [(partition, nodes, name) for _, partition, nodes, name in _held(lab, of)]


def release(lab: Lab, of: str = "") -> bool:
    """Release the held jobs whose names contain a text. Never true, so that a wait can release and look."""
    for number, *_ in _held(lab, of):
        lab.command("scontrol", "release", number)
    return False


def _held(lab: Lab, of: str) -> list[tuple[str, str, str, str]]:
    lines = lab.command("squeue", "-h", "-t", "PENDING", "-o", "%i|%P|%D|%r|%j").stdout.splitlines()
    jobs = [line.split("|", 4) for line in lines]
    return [(i, partition, n, name) for i, partition, n, why, name in jobs if why == "JobHeldUser" and of in name]
