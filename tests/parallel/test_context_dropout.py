# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention along cp: a rank draws for its queries or heads, and gradients are of the weights that stay.
Other functions draw for all positions."""

from __future__ import annotations

import copy

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

RATE = 0.4
LENGTH = 32
BATCH, HEADS = 2, 4


def _dropped(ctx: accel.DistContext, method: accel.ContextMethod, causal: bool) -> dict[str, Tensor]:
    """The weights of all queries, [batch, heads, queries, keys], times their number of keys, and a gradient."""
    accel.seeding.set_seed(ctx, 0, data_rank=0)
    zeros = torch.zeros(BATCH, HEADS, LENGTH, 4, dtype=torch.float64)
    values = torch.eye(LENGTH, dtype=torch.float64).expand(BATCH, HEADS, -1, -1).contiguous()
    slopes = torch.linspace(-1, 1, LENGTH, dtype=torch.float64)[:, None].expand(BATCH, HEADS, -1, LENGTH).contiguous()
    whole = {"q": zeros, "k": zeros, "v": values, "slopes": slopes}
    part = accel.parallel.split_sequence(ctx, whole, dim=2)
    value = part["v"].requires_grad_()
    out = accel.parallel.context_attention(
        ctx, part["q"], part["k"], value, causal=causal, method=method, dropout_p=RATE
    )
    (out * part["slopes"]).sum().backward()
    assert value.grad is not None
    order = accel.gather(ctx, part["position_ids"][0, 0]).argsort()
    weights, gradient = (accel.gather(ctx, each.transpose(0, 2).contiguous())[order] for each in (out, value.grad))
    kept = weights.transpose(0, 2).detach()
    again = torch.rand(4)  # what the model draws next
    return {"weights": kept, "gradient": gradient.transpose(0, 2), "again": again}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_weights_are_dropped_apart_on_each_rank(ranks: Simulator, method: accel.ContextMethod, causal: bool) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        return _dropped(accel.replace(ctx, mesh="cp=2"), method, causal)

    one, other = ranks.run(rank, 2, default_group=True)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.float64)
    seen = seen.tril() if causal else seen
    kept = one["weights"] * seen.sum(1, keepdim=True) * (1 - RATE)  # 1 or 0
    torch.testing.assert_close(kept, kept.round().clamp(0, 1), rtol=0, atol=1e-12)
    share = float(kept.sum() / (seen.sum() * BATCH * HEADS))
    assert abs(share - (1 - RATE)) < 0.03
    quarters = kept.chunk(4, 2) if method == "gather" else kept.chunk(4, 1)
    assert all(not torch.equal(quarters[0], each) for each in quarters[1:])
    slopes = torch.linspace(-1, 1, LENGTH, dtype=torch.float64)
    expected = torch.einsum("bhqk,q->bhk", one["weights"], slopes)
    torch.testing.assert_close(one["gradient"], expected[..., None].expand(-1, -1, -1, LENGTH), rtol=0, atol=1e-12)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=RATE, batch_first=True) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mesh", ["cp=2", pytest.param("tp=2,cp=2", marks=pytest.mark.slow)])
def test_layers_of_torch_train_with_their_dropout(ranks: Simulator, mesh: str) -> None:
    """A recomputed block drops what it dropped before, and an evaluation equals one process."""
    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    expected = copy.deepcopy(net).eval()(x).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh)
        part = accel.parallel.split_sequence(ctx, {"x": x, "out": expected})
        found: list[list[Tensor]] = []
        for recomputes in (False, True):
            model = accel.prepare_model(ctx, copy.deepcopy(net))
            if recomputes:
                model = accel.checkpoint_activations(model, nn.TransformerEncoderLayer)
            torch.testing.assert_close(model.eval()(part["x"]), part["out"], rtol=0, atol=1e-10)
            _ = model.train()
            accel.seeding.set_seed(ctx, 1, data_rank=0)
            out = model(part["x"])
            out.square().sum().backward()
            found.append([out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
        assert len(found[0]) > 20
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
        assert not torch.allclose(found[0][0], part["out"])

    ranks.run(rank, 2 if mesh == "cp=2" else 4, default_group=True)


def test_a_dropout_that_is_no_probability_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 2)
    with assert_raises(ConfigError, problem="the dropout is not valid"):
        accel.parallel.context_attention(accel.single(), q, q, q, dropout_p=1.5)


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        heads = super().forward(input).unflatten(2, (2, 4)).transpose(1, 2)  # in another order than in memory
        heads = nn.functional.dropout(heads, RATE, self.training) + torch.randn_like(heads)
        return heads.transpose(1, 2).flatten(2)


def test_noise_and_dropout_of_a_tensor_of_positions_are_those_of_one_process(ranks: Simulator) -> None:
    x = torch.randn(2, LENGTH, 8)

    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh=f"cp={ctx.world_size}")
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, Noisy(8, 8))
        part = accel.parallel.split_sequence(ctx, {"x": x})
        torch.manual_seed(1)
        out = model(part["x"]).detach().transpose(0, 1).contiguous()
        return accel.gather(ctx, out)[accel.gather(ctx, part["position_ids"][0]).argsort()]

    expected = ranks.run(rank, 1, default_group=True)[0]
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected)
