# SPDX-License-Identifier: Apache-2.0
"""Time from a command to the end of two workers that do nothing, and of `accel --help`, against bare interpreters;
and of a function on two ranks, against two interpreters that import torch.

    python tests/benchmarks/launching.py --accelerate VENV/bin/python

Every round runs each command once, in turn, so that a machine whose load drifts slows all of them alike. Printed are
the median and the least wall-clock time, and the median over rounds of the difference to what it is compared with.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASES = {"accel --help": "one bare interpreter", "debug_launcher of two": "two that import torch"}


def seconds(*commands: list[str]) -> float:
    """Run commands at once; return how long it takes until all have ended."""
    began = time.perf_counter()
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    statuses = [popen.wait() for popen in started]
    assert not any(statuses), commands
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--accelerate", metavar="PYTHON", help="an interpreter that has Accelerate, to compare with")
    known = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder, "nothing.py"))
        Path(script).write_text("")
        bare = [sys.executable, script]
        accel = str(Path(sys.executable).with_name("accel"))
        importing, calling = str(Path(folder, "importing.py")), str(Path(folder, "calling.py"))
        Path(importing).write_text("import torch.distributed")
        Path(calling).write_text("import accel, accel.process; accel.debug_launcher(accel.process.wait_for_everyone)")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
        variants = {
            "one bare interpreter": [bare],
            "accel --help": [[accel, "--help"]],
            "two bare interpreters at once": [bare, bare],
            "accel launch": [[accel, "launch", "--cpu", "--nproc-per-node", "2", script]],
            "torchrun": [torchrun],
        }
        variants |= {
            "two that import torch": [[sys.executable, importing]] * 2,
            "debug_launcher of two": [[sys.executable, calling]],
        }
        if known.accelerate:
            flags = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
            variants["accelerate launch"] = [[known.accelerate, "-m", "accelerate.commands.launch", *flags, script]]
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(known.rounds):
            for name, commands in variants.items():
                times[name].append(seconds(*commands))
    for name, taken in times.items():
        base = times[BASES.get(name, "two bare interpreters at once")]
        over = statistics.median(mine - theirs for mine, theirs in zip(taken, base, strict=True))
        median = statistics.median(taken)
        print(f"{name:30}  median {median:6.3f} s  least {min(taken):6.3f} s  over its base {over:+6.3f} s")


if __name__ == "__main__":
    main()
