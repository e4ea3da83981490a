# SPDX-License-Identifier: Apache-2.0
"""The self-check as a program: `python -m accel.testing.selfcheck`, `torchrun -m accel.testing.selfcheck`."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch

from accel.context import DistContext, session
from accel.devices import untried_torch
from accel.process import print as print_once
from accel.run_folder import write_json
from accel.testing.selfcheck._checks import Outcome, run_checks


def main() -> None:
    """Run the checks; without `--report`, leave with status 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m accel.testing.selfcheck", description=__doc__)
    _ = parser.add_argument(
        "--folder", help="where to try checkpoints; all hosts share it (default: temporary, on one host)"
    )
    _ = parser.add_argument("--report", default="", help="file for the outcomes; each host writes its own")
    known = parser.parse_args()
    logging.getLogger("accel.checkpoint").addHandler(logging.NullHandler())  # else each load is printed
    with session() as ctx:
        print_once(ctx, _head(ctx), flush=True)
        if remark := untried_torch():
            print_once(ctx, f"torch is {remark}", flush=True)

        def note(outcomes: list[Outcome]) -> None:
            if outcomes[-1].state != "running":
                print_once(ctx, outcomes[-1], flush=True)
            if known.report and ctx.is_local_main_process:
                write_json(known.report, outcomes)

        folder = known.folder or (tempfile.gettempdir() if ctx.num_nodes == 1 else None)
        outcomes = run_checks(ctx, Path(folder) if folder else None, note)
        states = [outcome.state for outcome in outcomes]
        skipped = f", {states.count('skipped')} skipped" if "skipped" in states else ""
        print_once(ctx, f"{states.count('ok')} of {len(states)} checks passed{skipped}.", flush=True)
    if not known.report and "failed" in states:
        sys.exit(1)


def _head(ctx: DistContext) -> str:
    ranks = f"{ctx.world_size} rank{'s' if ctx.world_size > 1 else ''}"
    hosts = f"{ctx.num_nodes} host{'s' if ctx.num_nodes > 1 else ''}"
    return f"{ranks} on {hosts}, {ctx.device.type}, {ctx.backend}, {ctx.precision.compute}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
