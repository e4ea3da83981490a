# SPDX-License-Identifier: Apache-2.0
"""Models with layers that take what ranks divide: gathered inputs, norms of divided groups, parameters without a
layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_parts import found_plan, prove, trace
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.parallel.parts import RowCut, RowLayout
from accel.tensors import is_dtensor
from accel.testing import Simulator

WIDTH, HEADS = 16, 4


class Retention(nn.Module):
    """Heads one after another, with a weight for all of them and a group of channels for each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH // HEADS) / 4) for _ in range(3))
        self.gate, self.out = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        found: list[Tensor] = []
        for head in range(HEADS):
            q, k, v = x @ self.q[head], x @ self.k[head], x @ self.v[head]
            decay = (1 - 2.0 ** (-3 - head)) ** (at[:, None] - at) * (at[:, None] >= at)
            found.append((q @ k.transpose(1, 2)) * decay.to(x) @ v)
        joined = torch.cat(found, 2)
        normed = self.norm(joined.flatten(0, 1)).view(joined.shape)
        return x + (functional.silu(x @ self.gate) * normed) @ self.out


class Memory(nn.Module):
    """Layers, and gates of all heads, of features that it also takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.up, self.down = nn.Linear(WIDTH, 2 * inner), nn.Linear(inner, WIDTH)
        self.near = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.q, self.k, self.v = (nn.Linear(inner, inner, bias=False) for _ in range(3))
        self.gates, self.norm = nn.Linear(3 * inner, HEADS), nn.GroupNorm(HEADS, inner)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        inner, z = self.up(x).chunk(2, -1)
        near = functional.silu(self.near(inner.mT)[..., :tokens]).mT
        given = self.q(near), self.k(near), self.v(inner)
        gate = torch.sigmoid(self.gates(torch.cat(given, -1))).mT.unsqueeze(-1)
        q, k, v = (each.view(rows, tokens, HEADS, -1).transpose(1, 2) for each in given)
        mixed = (((q @ k.mT) * gate / 4).tril() @ v).transpose(1, 2).reshape(rows * tokens, -1)
        return x + self.down((self.norm(mixed).view(rows, tokens, -1) + near) * functional.silu(z))


class States(nn.Module):
    """A long convolution by parameters that no matmul takes."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(WIDTH, 6))
        self.turns = nn.Parameter(math.pi * torch.arange(6.0).repeat(WIDTH, 1))
        self.parts, self.steps = nn.Parameter(torch.randn(WIDTH, 6, 2)), nn.Parameter(torch.rand(WIDTH) - 3)
        self.out = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        each = (1j * self.turns - self.rates.exp()) * self.steps.exp()[:, None]
        powers = (each[..., None] * torch.arange(length, device=x.device)).exp()
        kernel = torch.einsum("hn,hnl->hl", torch.view_as_complex(self.parts) * (each.exp() - 1), powers).real
        spectrum = torch.fft.rfft(x.mT, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        found = torch.fft.irfft(spectrum, 2 * length)[..., :length]
        return x + self.out(functional.gelu(found + x.mT)).mT


class Codec(nn.Module):
    """Convolutions, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.back = nn.ConvTranspose1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.elu(self.back(functional.elu(self.into(x.mT))))).mT


class Mixed(nn.Module):
    """Weights that the model itself holds, and a table of positions that blocks take with their input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.before, self.after = (nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4) for _ in range(2))
        self.block = Memory()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("btd,ndf,nfo->bto", x, self.before, self.after) + self.positions[: x.shape[1]]
        return self.block(x)


SHARES: list[tuple[Callable[[], nn.Module], float]] = [
    (Retention, 0.95), (Memory, 0.95), (States, 0.9), (Codec, 0.95), (Mixed, 0.85),
]  # fmt: skip


def _share(model: nn.Module) -> float:
    divided = [each for each in model.parameters() if is_dtensor(each) and each.placements[-1].is_shard()]
    return sum(each.numel() for each in divided) / sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("make", "least", "mesh", "sequence"),
    [
        *((*each, "tp=2", False) for each in SHARES),
        *(pytest.param(*each, "tp=4", False, marks=pytest.mark.slow) for each in SHARES),
        # the others have no layer that returns sums of tokens
        *(pytest.param(*SHARES[1], mesh, True, marks=pytest.mark.slow) for mesh in ("tp=2", "tp=4")),
        *(pytest.param(*SHARES[4], mesh, True, marks=pytest.mark.slow) for mesh in ("tp=2", "tp=4")),
    ],
)
def test_most_of_a_model_is_divided_and_trains_as_in_one_process(
    ranks: Simulator, make: Callable[[], nn.Module], least: float, mesh: str, *, sequence: bool
) -> None:
    x = torch.linspace(-1, 1, 4 * 9 * WIDTH, dtype=torch.float64).sin().view(4, 9, WIDTH)

    def rank(ctx: accel.DistContext) -> Any:
        is_one = ctx.world_size == 1
        ctx = ctx if is_one else accel.replace(ctx, mesh=mesh)
        torch.manual_seed(0)
        model: Any = make().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        plan = accel.parallel.Plan(sequence=sequence and not is_one)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=[x[:2, :6]])
        losses = two_steps(ctx, model, optimizer, lambda: model(x).square().mean())
        return losses, accel.get_state_dict(ctx, model, dst=None), 1.0 if is_one else _share(model)

    *want, _ = rank(accel.single())
    for *got, share in ranks.run(rank, int(mesh[-1]), default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert share > least


def test_a_parameter_that_blocks_would_gather_stays_whole() -> None:
    plan = found_plan(Mixed(), 2, [torch.empty(2, 6, WIDTH)])
    divided = {name for layouts in plan.regions.values() for name in layouts}
    assert {"before", "after", "block.up.weight"} <= divided
    assert "positions" not in divided


def test_a_divided_layer_with_a_divided_input_is_right_and_the_search_does_not_try_it() -> None:
    """Ranks could divide the features between all layers of a model, and gather them before each."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    (call,) = [each for each in trace(model, [torch.empty(2, 3, 8)]).calls if not each.path]
    regions = {"": {"0.weight": RowLayout(0, RowCut(1, ((16, 2),))), "1.weight": RowLayout(0, RowCut(1, ((8, 2),)))}}
    assert prove(model, call, {}, 2, regions=regions).problem == ""
    refused = prove(model, call, {}, 2, regions=regions, gathers_inputs=False).problem
    assert refused == "no rule for linear, a matmul over dimension 2 of [2, 3, 16], which ranks would have to gather"


def test_a_matmul_of_parts_that_do_not_fit_names_their_shapes_and_dimensions() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model[0].forward = lambda x: nn.functional.linear(x, model[0].weight).transpose(1, 2)
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight[:, :3])
    (call,) = [each for each in trace(model, [torch.empty(2, 3, 8)]).calls if not each.path]
    regions = {"": {"0.weight": RowLayout(0, RowCut(1, ((16, 2),))), "1.weight": RowLayout(0, RowCut(1, ((8, 2),)))}}
    refused = prove(model, call, {}, 2, regions=regions).problem
    assert "along different dimensions: [2, 16, 3] along 1 and [8, 3] along 0" in refused


class Keeping(nn.Module):
    """Keeps the values of a parameter for the next forward, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale, self.kept = nn.Parameter(torch.ones(WIDTH)), None

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if self.kept is None else self.kept
        self.kept = scale.detach()
        return self.down(functional.gelu(self.up(x * scale)))


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.down(functional.gelu(self.up(x)))


class Biased(nn.Module):
    """An attention with a bias for each head, by an MLP that ranks divide by its inner features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1]).to(x)
        bias = self.bias((at[:, None] - at)[..., None]).permute(2, 0, 1)
        q, k, v = self.up(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.down(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("make", [Keeping, InPlace, Biased])
def test_a_pair_of_layers_is_divided_whatever_its_module_keeps_changes_or_holds(make: Callable[[], nn.Module]) -> None:
    plan = found_plan(nn.Sequential(nn.LayerNorm(WIDTH), make()), 2, [torch.empty(2, 3, WIDTH)])
    divided = {name: each.dim for name, each in plan.regions["1"].items()}
    assert (divided["1.up.weight"], divided["1.down.weight"]) == (0, 1)
    assert not plan.left
