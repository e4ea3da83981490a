# SPDX-License-Identifier: Apache-2.0
"""One small GPT under every strategy: its losses, its weights, and checkpoints that each strategy loads of each other.

    accel launch --cpu --nproc-per-node 2 tests/benchmarks/strategies.py --picture docs/engines.png

All strategies train `examples/engines.py` from one seed, one after another in one job. Printed are the largest
distances to `ddp`: of a loss, relative, and of a weight, as a part of the largest weight. Then each strategy goes on
for some steps from the checkpoint of each other one; printed is the largest relative distance of a loss to `ddp` that
goes on from its own checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import accel

sys.path.append(str(Path(__file__).parents[2] / "examples"))
Curve = list[float]


def run_all(
    ctx: accel.DistContext, names: list[str], *, steps: int, further: int, out: Path, ring: bool
) -> dict[str, Any]:
    """Return losses by strategy, distances of weights to the first one's, and losses after loads, by "from to"."""
    from engines import STRATEGIES, train

    settings = {name: accel.replace(ctx, **STRATEGIES[name]) for name in names}
    for name in names:
        train(settings[name], steps=steps, out=str(out / name))
    after: dict[str, Curve] = {}
    for at, source in enumerate(names):
        for name in [names[0], names[(at + 1) % len(names)]] if ring else names:
            folder = out / f"{source}-{name}"
            if folder.exists():
                continue
            train(settings[name], steps=steps + further, out=str(folder), start_from=str(out / source))
            after[f"{source} {name}"] = losses(folder)
    weights = {name: load_file(out / name / "weights" / "model.safetensors") for name in names}
    return {
        "losses": {name: losses(out / name) for name in names},
        "weights": {name: distance(weights[name], weights[names[0]]) for name in names},
        "after": after,
    }


def losses(folder: Path) -> Curve:
    """Return the loss of each step of a run."""
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def distance(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two weights, as a part of the largest weight."""
    assert these.keys() == those.keys()
    largest = max(float(each.abs().max()) for each in those.values())
    return max(float((these[name] - those[name]).abs().max()) for name in those) / largest


def apart(curve: Curve, other: Curve) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(left - right) / right for left, right in zip(curve, other, strict=True))


def table(found: dict[str, Any]) -> str:
    """Return the distances as text."""
    names = list(found["losses"])
    first = names[0]
    sources = "  ".join(f"{'from ' + name:>10}" for name in names)
    lines = [f"{'':8} last loss  losses apart  weights apart   {sources}"]
    for name in names:
        curve = found["losses"][name]
        own = found["after"][f"{first} {first}"]
        loads = "  ".join(_after(found, f"{source} {name}", own) for source in names)
        far = apart(curve, found["losses"][first])
        lines.append(f"{name:8} {curve[-1]:9.4f}  {far:12.1e}  {found['weights'][name]:13.1e}   {loads}")
    return "\n".join(lines)


def _after(found: dict[str, Any], pair: str, own: Curve) -> str:
    return f"{apart(found['after'][pair], own):10.1e}" if pair in found["after"] else f"{'':10}"


def draw(found: dict[str, Any], path: str) -> None:
    """Draw all curves in one picture, and below how far each is from the first one."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6.5), height_ratios=(2, 1), sharex=True)
    first, reference = next(iter(found["losses"].items()))
    for at, (name, curve) in enumerate(found["losses"].items()):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, label=name, linewidth=9 - 1.7 * at, alpha=0.75)  # so that none hides another
        if name != first:
            gaps = [abs(left - right) / right or float("nan") for left, right in zip(curve, reference, strict=True)]
            below.plot(steps, gaps, color=f"C{at}", linewidth=1.2)
    above.set_ylabel("loss, nats a byte")
    above.set_title("One GPT, one seed, one script: 2 processes, fp32, AdamW")
    above.legend(title="strategy")
    below.set_yscale("log")
    below.set_ylabel(f"relative distance\nto {first}")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def skip_compilation() -> None:
    """Let DeepSpeed reduce through gloo: its own operator for CPUs takes minutes to compile on its first use."""
    if importlib.util.find_spec("deepspeed") is not None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="ddp,fsdp,zero1,zero2,zero3", help="names, the first to compare with")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--further", type=int, default=3, help="optimizer steps after a load")
    parser.add_argument(
        "--ring", action="store_true", help="load each checkpoint by the first and the next strategy alone"
    )
    parser.add_argument("--out", default="runs/engines", help="folder of all runs; must not be there")
    parser.add_argument("--picture", help="file for the curves, such as engines.png")
    parser.add_argument("--json", help="file for all figures")
    given = parser.parse_args()
    skip_compilation()
    with accel.session() as ctx:
        names = given.strategies.split(",")
        found = run_all(ctx, names, steps=given.steps, further=given.further, out=Path(given.out), ring=given.ring)
        accel.print(ctx, table(found), flush=True)
        if ctx.is_main_process and given.json:
            _ = Path(given.json).write_text(json.dumps(found))
        if ctx.is_main_process and given.picture:
            draw(found, given.picture)


if __name__ == "__main__":
    main()
