# SPDX-License-Identifier: Apache-2.0
"""What a run under DeepSpeed may meet: layers that a window leaves out, and a configuration that contradicts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import accel


class Fork(nn.Module):
    """Two layers, of which a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(x)


def left_out(under: accel.DistContext) -> dict[str, bool]:
    """Return whether windows leave alone the layer that they leave out, and move the other one as torch does."""
    with accel.seeded(under, 0):
        net, plain = Fork(), Fork()
    plain.load_state_dict(net.state_dict())
    model, optimizer = accel.prepare(under, net, torch.optim.SGD(net.parameters(), lr=0.1))
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows = torch.linspace(-1, 1, 16).view(4, 4)
    untouched = alike = True
    for way, other in (("left", "right"), ("right", "left"), ("left", "right")):
        before = accel.get_state_dict(under, model, dst=None)
        scaler, window = accel.loss_scale(under), accel.Accumulation(steps=2)
        for _ in range(2):
            window = window.next()
            with accel.accumulate(under, window, model):
                loss = model(rows[under.rank :: 2], way).square().mean()
                window = accel.backward(under, loss, scaler, window, weight=2.0)
        _ = accel.optimizer_step(under, optimizer, scaler, window)
        by_hand.zero_grad()
        plain(rows, way).square().mean().backward()
        by_hand.step()
        after = accel.get_state_dict(under, model, dst=None)
        untouched &= all(torch.equal(each, before[name]) for name, each in after.items() if other in name)
        alike &= all(torch.allclose(each, after[name], atol=1e-6) for name, each in plain.state_dict().items())
    return {"untouched": untouched, "alike": alike}


def micro_batches(ctx: accel.DistContext, run: Callable[[accel.DistContext], dict[str, Any]]) -> dict[str, Any]:
    """Return what a loop of 2 micro-batches a step gets from JSONs that say 2 and 4, and from a context that says 2."""

    def under(steps: int, **settings: Any) -> accel.DistContext:
        config = accel.read_deepspeed({"gradient_accumulation_steps": steps, "zero_optimization": {"stage": 2}})
        return accel.replace(ctx, strategy="deepspeed", deepspeed=config, **settings)

    found: dict[str, Any] = {"2": run(under(2))["weights"]}
    for name, settings in (("4", {}), ("4 in a context of 2", {"accumulation": 2})):
        try:
            _ = run(under(4, **settings))
        except accel.ConfigError as error:
            found[name] = f"{error.where}: {error.got}"
    return found
