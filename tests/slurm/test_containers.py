"""Jobs in containers, modules and a set-up script, on a real Slurm.

Debian 12 has neither Apptainer nor pyxis. Where there is no `apptainer`, a stand-in for `apptainer exec` makes the
image's folder the root, with bubblewrap. A stand-in for srun with pyxis moves the options of pyxis to that program.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, ContainerConfig, SlurmConfig
from flows.launch.slurm.launcher import SlurmLauncher
from tests.flows.launch.contract import end_of, python_job, submit
from tests.slurm.lab import Lab

pytestmark = pytest.mark.processes

#: An image's variables win over those of the host, and those named APPTAINERENV_ over both (Apptainer's manual).
APPTAINER = """#!/bin/bash
shift
while [[ $1 == --* ]]; do
  if [[ $1 == --bind=* ]]; then
    IFS=: read -r from to mode <<<"${1#--bind=}"
    [[ $mode == ro ]] && mounts+=(--ro-bind "$from" "$to") || mounts+=(--bind "$from" "$to")
  fi
  shift
done
image=$1; shift
. "$image/.singularity.d/env/90-environment.sh"
while IFS= read -r name; do export "${name#APPTAINERENV_}=${!name}"; done < <(compgen -e APPTAINERENV_)
exec bwrap --bind "$image" / --dev-bind /dev /dev --bind /proc /proc --tmpfs /tmp "${mounts[@]}" -- "$@"
"""
#: pyxis's args.c: mounts are separated by commas, and --container-env names variables of the job that win.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in
  --container-image=*) image=${1#*=} ;;
  --container-mounts=*) IFS=, read -ra binds <<<"${1#*=}" ;;
  --container-env=*) IFS=, read -ra names <<<"${1#*=}" ;;
  *) options+=("$1") ;;
  esac
  shift
done
for name in "${names[@]}"; do export "APPTAINERENV_$name=${!name}"; done
[[ $image ]] && container=(apptainer exec "${binds[@]/#/--bind=}" "$image")
exec /usr/bin/srun "${options[@]}" "${container[@]}" "$@"
"""
CODE = "import os; print('root:', sorted(os.listdir('/')), os.environ['COLOUR'], os.path.exists('/var/lib/dpkg'))"


def programs(folder: Path, **texts: str) -> str:
    """Return a PATH that begins with a folder of these programs."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_job_runs_in_a_container_with_its_own_root_and_mounts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    image, repository = tmp_path / "image", Path(__file__).parents[2]
    for name in ("dev", "etc", "proc", "root", "sys", "tmp", "usr", "var/tmp", "of-the-image", ".singularity.d/env"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        (image / "etc" / name).touch()
    (image / ".singularity.d/env/90-environment.sh").write_text("export COLOUR=of-the-image\n")
    (image / ".singularity.d/env/99-base.sh").touch()  # after it, Apptainer sets the variables of the job
    mounts = [f"{path}:{path}:ro" for path in ("/usr", sys.base_prefix, sys.prefix, repository)]
    container = ContainerConfig(image=str(image), runtime=runtime, mounts=mounts, python=sys.executable)  # type: ignore[arg-type]
    stand_in = {} if shutil.which("apptainer") else {"apptainer": APPTAINER}
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", srun=SRUN, **stand_in))
    lab.wait_until_idle()
    launcher = SlurmLauncher(ClusterConfig(launcher="slurm", nodes=2, container=container))
    job = python_job(tmp_path / "runs" / "run", CODE, nodes=2, COLOUR="of-the-job")
    end = end_of(launcher, submit(launcher, job))
    log = "".join(path.read_text() for path in job.log_dir.iterdir())
    assert end.state == "succeeded", log
    roots = [line for line in log.splitlines() if line.startswith("root:")]
    assert len(roots) == 2
    assert all("'of-the-image'" in line and line.endswith("of-the-job False") for line in roots)


def test_a_job_loads_modules_and_sources_the_set_up_script_before_its_own_variables(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = tmp_path / "environment.sh"
    setup.write_text('export SITE="$LOADED" COLOUR=of-the-site\n')
    # As Lmod does, a shell function that the environment passes on.
    monkeypatch.setenv(
        "BASH_FUNC_module%%", '() { [ "$2" != no ] && export LOADED="$*" || { echo no module; return 1; } }'
    )
    code = "import os; print('site:', os.environ['SITE'], os.environ['COLOUR'])"
    for modules, state in ((["CUDA/12.9", "NCCL"], "succeeded"), (["no"], "failed")):
        settings = SlurmConfig(modules=modules, setup_script=str(setup))
        launcher = SlurmLauncher(ClusterConfig(launcher="slurm", slurm=settings))
        job = python_job(tmp_path / state, code, COLOUR="of-the-job")
        assert end_of(launcher, submit(launcher, job)).state == state
        log = job.log.read_text()
        assert ("site: load CUDA/12.9 NCCL of-the-job" in log) == (state == "succeeded"), log
    assert "no module" in log
