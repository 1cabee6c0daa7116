"""What the flow reads of a failed job's logs."""

from __future__ import annotations

from pathlib import Path

from flows.launch.base import Job, Status
from flows.runtime.jobs import job_error


def test_the_reason_is_read_from_the_log_of_the_node_to_blame(tmp_path: Path) -> None:
    job = Job(name="train", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path, nodes=3)
    job.log.write_text("[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:3\n")
    (tmp_path / "train.node-2.log").write_text("[rank5]: ValueError: the reason\n[rank4]: ended\n")
    (tmp_path / "train.node-1.log").write_text("[rank2]: KeyError: of another node\n")
    status = Status(state="failed", exit_code=1, hosts=("a", "b", "c"), blamed_hosts=("c",))
    assert job_error(job, status).message == "job train: failed with exit code 1 (ValueError: the reason)"
    alone = Status(state="failed", exit_code=1, hosts=("a",), blamed_hosts=("a",))
    assert "Connection closed by peer" in job_error(job, alone).message


def test_the_last_line_of_a_log_is_no_cause(tmp_path: Path) -> None:
    job = Job(name="eval-1", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path)
    job.log.write_text("piqa: acc 0.4 ± 0.01 (2.0 s)\n")
    lost = job_error(job, Status(state="lost")).message
    assert lost == "job eval-1: was lost (the job's process is gone and left no exit code)"
    killed = job_error(job, Status(state="failed", exit_code=137)).message
    assert killed == "job eval-1: failed with exit code 137 (the job died of signal 9)"
    failed = job_error(job, Status(state="failed", exit_code=3)).message
    assert failed == "job eval-1: failed with exit code 3 (its last output: piqa: acc 0.4 ± 0.01 (2.0 s))"
