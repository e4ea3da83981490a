# SPDX-License-Identifier: Apache-2.0
"""One loop that trains under ddp and under each stage of DeepSpeed: `deepspeed_runs.py PART FOLDER`.

The part "killed" holds the stages against ddp, and ends all ranks in the middle of a window; "resumed" goes on.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from deepspeed_cases import arranged, grouped, left_out, micro_batches
from safetensors.torch import load_file, save_file
from steps import begin_batch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import accel

KINDS = ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
STAGES = KINDS[:3]
RESUMED = ("ddp", *STAGES, "zero2-offload")
ROWS = torch.linspace(-1, 1, 88).view(22, 4)  # batches of 4: the last is ragged, and rank 1 has fewer samples


class Net(nn.Module):
    """A model with a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.body[2].weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.tied(self.body(x)))) * self.scale


def objects(ctx: accel.DistContext) -> dict[str, Any]:
    """The items of a checkpoint, and the loader."""
    with accel.seeding.seeded(ctx, 0):
        net = Net()
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=1e-2)
    loader = accel.prepare_loader(ctx, DataLoader(ROWS, batch_size=4, shuffle=True), global_batch=4)
    scheduler = StepLR(optimizer, 3, 0.5)
    model, optimizer, scheduler, loader = accel.prepare(ctx, net, optimizer, scheduler, loader)
    items = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return items | {"state": accel.train_state(ctx, accumulation=2), "loader": loader}


def train(ctx: accel.DistContext, parts: dict[str, Any], epochs: int, leaves: Path | None = None) -> dict[str, Any]:
    """Train to that epoch; return losses, norms and the weights.

    Given a folder, save the first step of the epoch's three there, and leave the next window in its middle.
    """
    items = dict(parts)
    loader = items.pop("loader")
    state = items["state"]
    norms: list[float] = []
    losses: list[float] = []
    while state.epoch < epochs:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, items["model"]):
                with accel.autocast(ctx):
                    loss = items["model"](batch.data).float().square().mean()
                state = accel.backward(ctx, loss, state)
            losses.append(loss.item())
            if leaves is not None and state.updates == 1:
                return {}
            if state.sync:
                state = accel.optimizer_step(ctx, items["optimizer"], state, scheduler=items["scheduler"], max_norm=0.5)
                norms.append(float(state.grad_norm))
                if leaves is not None:
                    accel.save_state(ctx, leaves, items | {"state": state}, step=1)
    items["state"] = state
    weights = accel.get_state_dict(ctx, items["model"], dst=None)
    rate = items["scheduler"].get_last_lr()[0]
    return {"items": items, "norms": norms, "losses": losses, "weights": weights, "rate": rate}


def settings_of(kind: str, precision: Any) -> dict[str, Any]:
    """Settings of a session."""
    if not kind.startswith("zero"):
        return {"strategy": kind, "precision": precision}
    offload = "cpu" if kind.endswith("offload") else None
    record = accel.engines.deepspeed.DeepSpeed(stage=int(kind[4]), offload_optimizer=offload)  # type: ignore[arg-type]
    return {"strategy": "deepspeed", "deepspeed": record, "precision": precision}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of weights, relative to the largest weight."""
    assert one.keys() == other.keys()
    return max(float((a.float() - other[name].float()).abs().max() / a.abs().max()) for name, a in one.items())


def beside(ctx: accel.DistContext, straight: dict[str, Any]) -> dict[str, Any]:
    """What other models and wrong gradients do: a frozen one, one built in shards, bf16, a window given up."""
    from accel.engines.deepspeed import build_sharded, gathered

    found: dict[str, Any] = {}
    third = accel.replace(ctx, **settings_of("zero3", "fp32"))
    with accel.seeding.seeded(ctx, 0):
        plain = Net()
    with accel.seeding.seeded(ctx, 0):
        teacher = accel.prepare(third, Net().requires_grad_(False))
    found["teacher"] = float((teacher(ROWS) - plain(ROWS)).abs().max())
    with accel.seeding.seeded(ctx, 0):
        built = build_sharded(third, Net)
    first = built.body[0].weight
    found["held"] = first.numel()
    with gathered(third, [first]):
        found["whole"] = list(first.shape)
    model, _ = accel.prepare(third, built, torch.optim.SGD(built.head.parameters(), lr=0.1))
    try:
        _ = accel.training.Ema(model)
    except accel.errors.PrepareError as error:
        found["averaged"] = error.fix
    found["built"] = float((model(ROWS) - plain(ROWS)).abs().max())

    second = accel.replace(ctx, **settings_of("zero2", "bf16"))
    run = train(second, objects(second), 2)
    found["bf16"] = distance(straight["weights"], run["weights"])

    parts = objects(accel.replace(ctx, **settings_of("zero2", "fp32")))
    second = accel.replace(ctx, **settings_of("zero2", "fp32"))
    before = accel.get_state_dict(second, parts["model"], dst=None)
    loss = parts["model"](ROWS).square().mean() * float("inf")
    state = accel.backward(second, loss, begin_batch(second))
    try:
        _ = accel.optimizer_step(second, parts["optimizer"], state)
    except accel.errors.NonFiniteError as error:
        found["refused"] = type(error).__name__
    found["kept"] = distance(before, accel.get_state_dict(second, parts["model"], dst=None))
    accel.training.clear_gradients(parts["model"])
    accel.backward(second, parts["model"](ROWS).square().sum(), begin_batch(second))  # of a window that is given up
    parts["state"] = accel.training.discard(parts["state"], parts["model"])
    found["after"] = distance(straight["weights"], train(second, parts, 2)["weights"])
    accel.backward(second, parts["model"](ROWS).square().sum(), begin_batch(second))
    try:
        _ = train(second, parts | {"state": accel.train_state(second, accumulation=2)}, 1)
    except accel.errors.StepError as error:
        found["leftover"] = type(error).__name__
    return found


def against_ddp(ctx: accel.DistContext, straight: dict[str, Any], out: Path) -> dict[str, Any]:
    """Hold each stage against ddp; exchange their checkpoints."""
    found: dict[str, Any] = {}
    half = train(ctx, objects(ctx), 1)
    accel.save_state(ctx, out / "ddp", half["items"], step=1)
    for kind in KINDS:
        under = accel.replace(ctx, **settings_of(kind, "fp32"))
        run = train(under, objects(under), 2)
        keep(ctx, run["weights"], out / f"{kind}-whole")
        found[kind] = {
            "weights": distance(straight["weights"], run["weights"]),
            "norms": max(abs(a / b - 1) for a, b in zip(straight["norms"], run["norms"], strict=True)),
            "rate": run["rate"] - straight["rate"],
        }
        first = train(under, objects(under), 1)
        accel.save_state(under, out / kind, first["items"], step=1)
        accel.save_model(under, first["items"]["model"], out / f"{kind}-model")
    pairs = [(source, kind) for source in ("ddp", *STAGES) for kind in ("ddp", "zero1", "zero3")]
    pairs += [pair for kind in KINDS if kind not in STAGES for pair in ((kind, "ddp"), ("ddp", kind))]
    for source, kind in pairs:
        run = go_on(accel.replace(ctx, **settings_of(kind, "fp32")), out / source)
        found[f"{source} to {kind}"] = distance(straight["weights"], run["weights"])
    return found


def go_on(under: accel.DistContext, folder: Path) -> dict[str, Any]:
    """Load a checkpoint, and train to the end."""
    parts = objects(under)
    items = {name: each for name, each in parts.items() if name != "loader"}
    state = accel.load_state(under, folder, items)["state"]
    return train(under, parts | {"state": state}, 2)


def keep(ctx: accel.DistContext, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write weights for the processes that come later."""
    if ctx.is_main_process:
        save_file({name: each.clone() for name, each in weights.items()}, path)


def killed(ctx: accel.DistContext, out: Path) -> dict[str, Any]:
    """Train under each kind to the end, and again into the second window."""
    straight = train(ctx, objects(ctx), 2)
    keep(ctx, straight["weights"], out / "ddp-whole")
    found = against_ddp(ctx, straight, out) | beside(ctx, straight)
    for kind in KINDS:
        found[f"left out of {kind}"] = left_out(accel.replace(ctx, **settings_of(kind, "fp32")))
    asked = micro_batches(ctx, lambda under: train(under, objects(under), 2))
    found["micro-batches"] = asked | {"2": distance(straight["weights"], asked["2"])}
    for kind in RESUMED:
        under = accel.replace(ctx, **settings_of(kind, "fp32"))
        _ = train(under, objects(under), 2, leaves=out / f"{kind}-left")
    return found


def resumed(ctx: accel.DistContext, out: Path) -> dict[str, Any]:
    """Go on from what the killed processes saved in mid-epoch; hold the end against the run that was not killed."""
    found: dict[str, Any] = {}
    for kind in RESUMED:
        run = go_on(accel.replace(ctx, **settings_of(kind, "fp32")), out / f"{kind}-left")
        whole = load_file(out / f"{kind}-whole")
        same = all(torch.equal(each, whole[name]) for name, each in run["weights"].items())
        found[kind] = {"same bits": same, "weights": distance(whole, run["weights"])}
    del os.environ["LOCAL_RANK"]  # as without a launcher
    try:
        _ = objects(accel.replace(ctx, strategy="deepspeed"))
    except accel.errors.ConfigError as error:
        found["without"] = error.expected
    return found


def trainable(ctx: accel.DistContext, out: Path) -> dict[str, Any]:
    """Save the parameters that train alone, and go on from them."""
    straight, kinds = train(ctx, objects(ctx), 2)["weights"], ("ddp", *STAGES)
    for kind in kinds:
        under = accel.replace(ctx, **settings_of(kind, "fp32"))
        items = train(under, objects(under), 1)["items"]
        accel.save_state(under, out / kind, items | {"model": accel.items.TrainableOnly(items["model"])}, step=1)
    found: dict[str, Any] = {}
    for source, kind in [*zip(kinds, kinds, strict=True), ("ddp", "zero3"), ("zero3", "zero2"), ("zero2", "ddp")]:
        under = accel.replace(ctx, **settings_of(kind, "fp32"))
        parts = objects(under)
        items = {name: each for name, each in parts.items() if name != "loader"}
        loaded = accel.load_state(under, out / source, items | {"model": accel.items.TrainableOnly(items["model"])})
        run = train(under, parts | {"state": loaded["state"]}, 2)
        found[f"{source} to {kind}"] = distance(straight, run["weights"])
    return found


def layouts(ctx: accel.DistContext, out: Path) -> dict[str, Any]:
    """Hold whole weights against the live ones under each key that arranges them otherwise."""
    return arranged(ctx)


def main(part: str, out: Path) -> None:
    """Run a part, and print a line of JSON on rank 0."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
    with accel.session(device="cpu", strategy="deepspeed") as opened:
        ctx = accel.replace(opened, strategy="ddp")
        parts = {"killed": killed, "resumed": resumed, "trainable": trainable, "arranged": layouts, "grouped": grouped}
        found = parts[part](ctx, out)
        accel.print(ctx, "found:", json.dumps(found), flush=True)
        if part == "killed":
            accel.wait_for_everyone(ctx)
            os._exit(9)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
