# SPDX-License-Identifier: Apache-2.0
"""Train the digits of `digits.py` as ranks on a Ray cluster, each attempt from the last checkpoint.

    python examples/digits_on_ray.py --nproc 2
    python examples/digits_on_ray.py --nproc 16 --gpus 1 --address auto --out /shared/digits

`--address auto` is the cluster that this machine belongs to; without it Ray starts only on this machine. On several
hosts `--out` must be a folder that all of them share.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ray
from digits import Settings, main as train

import accel
from accel.engines import ray as on_ray


def launch(settings: Settings, *, nproc: int, gpus: int = 0, attempts: int = 3) -> None:
    """Train on this many ranks. If a rank, its actor or its host is lost, resume from the last checkpoint."""
    for left in reversed(range(attempts)):
        try:
            on_ray.launch(train, (settings,), nproc=nproc, gpus=gpus)
            return
        except accel.errors.LaunchError as error:
            if not left:
                raise
            print(f"{error}\nattempts left: {left}", file=sys.stderr)


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--gpus", type=int, default=0, choices=(0, 1), help="GPUs of each rank")
    parser.add_argument("--attempts", type=int, default=3, help="how often the ranks are started at most")
    parser.add_argument("--address", help="of the cluster, such as auto; else one on this machine")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument("--out", default="runs/digits-on-ray", help="folder of the checkpoints and the metrics")
    given = parser.parse_args()
    ray.init(address=given.address, log_to_driver=False)
    settings = Settings(epochs=given.epochs, out=str(Path(given.out).resolve()))
    launch(settings, nproc=given.nproc, gpus=given.gpus, attempts=given.attempts)


if __name__ == "__main__":
    main()
