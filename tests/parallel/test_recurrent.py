# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of torch on meshes with `tp`: whole on each rank, trained as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.parallel import Plan
from accel.testing import Simulator

DATA = torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 3, 4)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "deep": lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(8, 16, proj_size=8, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "without biases": lambda: nn.RNN(8, 8, bias=False, batch_first=True),
}
CASES = [
    ("LSTM", "dp=2,tp=2", "ddp", None),
    ("LSTM", "tp=2", "ddp", Plan(tensor={})),
    ("LSTM", "dp=2,tp=2", "fsdp", Plan(tensor={"1": "replicated"})),
    *((name, "dp=2,tp=2", "fsdp", None) for name in LAYERS),
]


class Net(nn.Sequential):
    """A recurrent layer between layers that tensor parallelism divides."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, recurrent, last = self
        outputs, _ = recurrent(first(inputs))
        return torch.tanh(last(outputs))


def _train(ctx: accel.DistContext, name: str, plan: Plan | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(nn.Linear(4, 8), LAYERS[name](), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))).double()
    model, sgd = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), plan=plan)
    state = accel.train_state(ctx)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(DATA, batch_size=4), global_batch=4)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, model(batch.data).square().mean(), state)
        state = accel.optimizer_step(ctx, sgd, state, max_norm=0.5)
    if ctx.strategy == "ddp":
        copy.deepcopy(accel.unwrap_model(model)[1])  # no list of the forward's tensors is left behind
    return accel.get_state_dict(ctx, model, dst=None)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "plan"),
    [pytest.param(*case, marks=[] if at < 2 else [pytest.mark.slow]) for at, case in enumerate(CASES)],
)
def test_a_recurrent_layer_trains_as_on_one_process(
    ranks: Simulator, name: str, mesh: str, strategy: Any, plan: Plan | None
) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        return _train(accel.replace(ctx, mesh=mesh, strategy=strategy), name, plan)

    alone = _train(accel.single(), name, plan)
    for found in ranks.run(rank, 4 if "dp" in mesh else 2, default_group=True):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
