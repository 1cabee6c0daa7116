"""Jobs that wait in the queue until a test releases them: submitted with sbatch's option ``--hold``."""

from __future__ import annotations

from dataclasses import dataclass

from tests.slurm.lab import Lab


@dataclass(frozen=True, kw_only=True)
class Held:
    """A job in the queue; the name ends with its run, its attempt and what it does."""

    number: str
    partition: str
    nodes: str
    name: str

    def of(self, run_id: str) -> bool:
        return f"/{run_id}/" in self.name


def held(lab: Lab) -> list[Held]:
    lines = lab.command("squeue", "-h", "-t", "PENDING", "-o", "%r|%i|%P|%D|%j").stdout.splitlines()
    words = [line.split("|", 4) for line in lines if line.startswith("JobHeldUser|")]
    return [Held(number=number, partition=where, nodes=nodes, name=name) for _, number, where, nodes, name in words]


def release(lab: Lab, *, but: str = "") -> bool:
    """Release every held job, but not those of one run. Never true, so that a wait can release and look."""
    for job in held(lab):
        if not (but and job.of(but)):
            lab.command("scontrol", "release", job.number)
    return False
