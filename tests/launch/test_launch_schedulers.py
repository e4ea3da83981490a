# SPDX-License-Identifier: Apache-2.0
"""One script, unchanged, under a real mpirun and a real Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Workspace
from processes import patience
from simulated_hosts import Hosts, require_hosts
from simulated_slurm import Slurm, require_slurm

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = """
    import os, accel, torch
    with accel.session(device="cpu", timeout_s=60) as ctx:
        ranks = accel.gather(ctx, torch.tensor([ctx.rank])).tolist()
        place = f"is {ctx.rank} {ctx.world_size} {ctx.local_rank} {ctx.node_rank} {ctx.num_nodes} {ranks}\\n"
        os.write(1, place.encode())  # at once: mpirun mixes what ranks write in parts
"""


def lines(*places: tuple[int, int, int]) -> list[str]:
    """What ranks at (local rank, node rank, nodes) print."""
    ranks = list(range(len(places)))
    return [f"is {rank} {len(places)} {' '.join(map(str, place))} {ranks}" for rank, place in enumerate(places)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require_slurm()
    started = Slurm(tmp_path_factory.mktemp("slurm") / "state", nodes=2)
    yield started
    started.close()


def test_mpirun_gives_every_rank_its_place(workspace: Workspace) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun, of the package openmpi-bin")
    script = workspace.write(SCRIPT)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        ["mpirun", "-n", "2", "--oversubscribe", sys.executable, str(script)],
        env=os.environ | allowed,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == lines((0, 0, 1), (1, 0, 1)), done.stderr


def hydra() -> str:
    """The launcher of MPICH, or of Intel MPI; skips the test where there is none."""
    found = shutil.which("mpiexec.mpich") or shutil.which("mpiexec.hydra")
    return found or pytest.skip("needs mpiexec.hydra, of Debian's package mpich or PyPI's impi-rt")


def test_mpich_gives_every_rank_its_place(workspace: Workspace) -> None:
    words = [hydra(), "-n", "2", sys.executable, str(workspace.write(SCRIPT))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience(120), check=False)
    assert sorted(done.stdout.splitlines()) == lines((0, 0, 1), (1, 0, 1)), done.stderr


def test_mpich_over_two_hosts(workspace: Workspace) -> None:
    launcher = hydra()
    require_hosts()
    hosts = Hosts(2, workspace.folder)
    try:
        places = ("-launcher-exec", hosts.remote_shell(), "-hosts", "h0,h1", "-ppn", 2, "-n", 4)
        words = (launcher, *places, "-genv", "MASTER_ADDR", "h0", sys.executable, workspace.write(SCRIPT))
        started = hosts.start(0, words, folder=workspace.folder)
        out, err = started.communicate(timeout=patience(240))
    finally:
        hosts.close()
    assert sorted(out.splitlines()) == lines((0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)), err


def test_srun_gives_every_rank_its_place(slurm: Slurm, workspace: Workspace) -> None:
    script = workspace.write(SCRIPT)
    done = slurm.run("srun", "-N", "1", "-n", "2", sys.executable, script)
    assert sorted(done.stdout.splitlines()) == lines((0, 0, 1), (1, 0, 1)), done.stderr


def test_srun_over_two_nodes(slurm: Slurm, workspace: Workspace) -> None:
    words = ("srun", "-N", "2", "--ntasks-per-node", "2", sys.executable, workspace.write(SCRIPT))
    done = slurm.run(*words, MASTER_ADDR="127.0.0.1")  # both nodes are this machine
    assert sorted(done.stdout.splitlines()) == lines((0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)), done.stderr


def test_a_batch_script_without_srun_is_one_process(slurm: Slurm, workspace: Workspace) -> None:
    script = workspace.write(SCRIPT)
    job = workspace.write(f"#!/bin/bash\n#SBATCH -n 2 -o out\n{sys.executable} {script}\n", "job.sh")
    assert slurm.run("sbatch", "--wait", job, cwd=workspace.folder).returncode == 0
    assert (workspace.folder / "out").read_text() == "is 0 1 0 0 1 [0]\n"


def submitted(slurm: Slurm, folder: Path, *words: object) -> str:
    """Submit a launch, wait for its end, and return what it printed."""
    done = slurm.run(sys.executable, "-m", "accel.cli", "launch", "--slurm", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    slurm.run("srun", f"--dependency=afterany:{job}", "-n", "1", "true")
    return "".join(path.read_text() for path in folder.glob(f"slurm-{job}*.out"))


def test_a_launch_submits_itself(slurm: Slurm, workspace: Workspace) -> None:
    flags = ("--cpu", "--nproc-per-node", 2, "--prefix=false", "--slurm-options", "--job-name='a job' --time=5")
    out = submitted(slurm, workspace.folder, *flags, workspace.write(SCRIPT))
    assert sorted(line for line in out.splitlines() if line.startswith("is")) == lines((0, 0, 1), (1, 0, 1)), out


def test_a_launch_over_nodes_submits_itself_and_fails_with_a_report(slurm: Slurm, workspace: Workspace) -> None:
    script = workspace.write("import os\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\n")
    here = ("--rdzv-endpoint", "127.0.0.1:29477")  # n1 and n2 are no hosts that could be found
    out = submitted(slurm, workspace.folder, "--cpu", "--nnodes", 2, *here, script)
    assert "failed: ValueError: bad batch" in out


def test_launchers_of_a_step_that_nobody_joined_are_refused(slurm: Slurm, workspace: Workspace) -> None:
    words = ("srun", "-N", "2", "--ntasks-per-node", "1", sys.executable, "-m", "accel.cli", "launch", "--cpu")
    script = workspace.write("print('ran')")
    done = slurm.run(*words, script)
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert "--rdzv-endpoint n1:29400` for one job" in done.stderr
    done = slurm.run(*words, "--nnodes", "1", script)
    assert (done.returncode, done.stdout.split()) == (0, ["ran", "ran"]), done.stderr
