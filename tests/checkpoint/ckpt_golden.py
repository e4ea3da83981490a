# SPDX-License-Identifier: Apache-2.0
"""Writes the golden checkpoint of the current format, once per format: `python ckpt_golden.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from ckpt_helpers import FORMAT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel.context import DistContext
from accel.testing import simulate

HERE = Path(__file__).parent / "golden"
RECORDS = 4  # the first format that holds records within values, and values of numpy


class Progress(msgspec.Struct, frozen=True):
    epoch: int = 0
    best: float | None = None
    window: torch.Tensor | None = None


def start() -> dict[str, Any]:
    """The live objects that a golden checkpoint fits, with other values in them."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].tied_bias = model[2].bias
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return {"model": model, "optimizer": optimizer, "progress": Progress(), "extra": {}}


def filled(number: int, spread: Callable[[nn.Module], object] = lambda model: model) -> dict[str, Any]:
    """What a golden checkpoint holds: numbers that arithmetic gives, whatever the version of torch."""
    items = start()
    model = items["model"]
    with torch.no_grad():
        for at, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) / 8 + at)
    spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for at, parameter in enumerate(model.parameters()):
        moments = {"exp_avg": parameter.detach() / 2, "exp_avg_sq": parameter.detach() / 4}
        optimizer.state[parameter] = {"step": torch.tensor(float(at + 3)), **moments}
    extra = {"pair": (1, 2.5), "flags": torch.tensor([True, False]), "none": None, 7: b"\x00\xff", "nan": float("inf")}
    extra |= {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "wide": torch.tensor([1 + 2j, 3j]).to(torch.complex128),
    }
    if number >= RECORDS:
        extra |= {"records": [accel.Cursor(1, 2, 3), {"window": accel.Accumulation(4, updates=5)}]}
        extra |= {"score": numpy.float64(0.5), "table": numpy.arange(6.0).reshape(2, 3), "path": Path("runs")}
    return items | {
        "optimizer": optimizer,
        "progress": Progress(4, 0.25, torch.tensor([1.0, 2.0]).double()),
        "extra": extra,
    }


def make(ctx: DistContext) -> Path:
    """Save the golden checkpoint, of a model that two ranks share."""
    items = filled(FORMAT, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    _ = torch.manual_seed(40 + ctx.rank)  # pyright: ignore[reportUnknownMemberType]
    return accel.save_state(ctx, HERE / "making", items, step=12)


if __name__ == "__main__":
    target = HERE / f"format-{FORMAT}"
    made = simulate(make, 2, default_group=True)[0]
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    shutil.rmtree(HERE / "making")
