# SPDX-License-Identifier: Apache-2.0
"""A step of a model that `prepare_model` has spread, on a fake rank of a mesh: its peak of memory, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_ranks import Counted, Live, fake_rank
from small_llamas import attend_as_on_gpus
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

import accel
from accel.estimate import EstimatedStep
from accel.tensors import local_part
from accel.topology import Axes, Plan


def train(model: Any, axes: Axes, step: EstimatedStep, live: Live, counted: Counted) -> None:
    """Two steps; the second is measured, as it has a state of the optimizer from its start."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on GPUs
    tokens = step.tokens // axes.cp
    ids = torch.zeros(step.rows, tokens, dtype=torch.long)
    places = torch.arange(tokens).expand(step.rows, tokens)
    for _ in range(2):
        live.restart()
        counted.bytes.clear()
        counted.calls.clear()
        for batch in range(step.micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(not step.held or batch == step.micro_batches - 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, shift_labels=ids, position_ids=places).loss
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Any, _seen: Any) -> torch.Tensor:
    """Attend as context parallelism does, without its mask: torch's causal bias cannot be made without memory."""
    times = q.shape[1] // k.shape[1]
    k, v = (each if times == 1 else each.repeat_interleave(times, 1) for each in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=terms.scale)


def trained(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Any],
    axes: Axes,
    step: EstimatedStep,
    plan: Plan,
    rank: int = 0,
) -> tuple[int, Mapping[Any, int], Mapping[Any, int]]:
    """The peak of a rank, and bytes and calls by axis and operation, of a model that `prepare_model` spreads."""
    monkeypatch.setattr("accel.parallel.axes.context._attention.attend", attend)
    with fake_rank(monkeypatch, axes, rank, strategy=step.strategy) as ctx:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model = make()
        if hasattr(model, "config"):
            attend_as_on_gpus(model)
        if step.recompute:
            accel.checkpoint_activations(model, keep=step.keep or ())
        model = accel.prepare_model(ctx, model, plan=plan)
        if axes.cp > 1:
            _ = accel.parallel.sequence_positions(ctx, step.tokens)  # the batches are of a rank's
        known = [local_part(each) for each in model.parameters()]
        with fake, Counted(axes, rank) as counted, Live([*known, *model.buffers()]) as live:
            train(model, axes, step, live, counted)
    return live.peak, counted.bytes, counted.calls
