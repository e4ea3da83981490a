# SPDX-License-Identifier: Apache-2.0
"""Experts by grouped matmuls along tp: each rank has some hidden features of every expert."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from planned_parts import found_plan
from steps import two_steps
from test_part_plans import divided_share
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.comm import ThreadGroup, run_in_threads
from accel.parallel.parts import NoRuleError, Ranks, RowLayout, leave, make
from accel.parallel.parts._layout import even
from accel.testing import Simulator

WIDTH = 16
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # torch has no grouped matmul in float64


class Experts(nn.Module):
    def __init__(self, experts: int = 4, hidden: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.gate, self.up = (nn.Parameter(0.2 * torch.randn(experts, hidden, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(0.2 * torch.randn(experts, WIDTH, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.histc(chosen.flatten().float(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens[order // 2]
        gate = functional.silu(functional.grouped_mm(mat_b=self.gate.mT, mat_a=rows, offs=ends))
        inner = gate * torch._grouped_mm(rows, mat2=self.up.mT, offs=ends)
        made = functional.grouped_mm(inner, self.down.mT, offs=ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // 2, made).view(x.shape)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return Mixture()


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(40, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def trained(ctx: accel.DistContext, mesh: str, *, sequence: bool) -> tuple[object, float]:
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    model = mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = accel.parallel.Plan(sequence=True) if sequence else None
    model, optimizer = accel.prepare(ctx, model, optimizer, example=[ids(1, 4)], plan=plan)
    batch = ids(2, 8)
    losses = two_steps(ctx, model, optimizer, lambda: functional.cross_entropy(model(batch).mT, batch))
    return (losses, accel.get_state_dict(ctx, model, dst=None)), divided_share(model)


@pytest.mark.parametrize(
    ("size", "sequence"), [(2, False), (2, True), pytest.param(4, False, marks=pytest.mark.slow), (4, True)]
)
def test_grouped_experts_train_as_in_one_process(ranks: Simulator, size: int, sequence: bool) -> None:
    want, _ = trained(accel.single(), "", sequence=False)
    for got, share in ranks.run(lambda ctx: trained(ctx, f"tp={size}", sequence=sequence), size, default_group=True):
        torch.testing.assert_close(got, want, **NEAR)
        assert share > 0.95


def test_the_plan_divides_hidden_features_of_each_expert() -> None:
    plan = found_plan(mixture().bfloat16(), 2, [ids(1, 4)])
    layouts = {name: layout.dim for own in plan.regions.values() for name, layout in own.items()}
    assert layouts == {
        f"blocks.{at}.{name}": dim for at in (0, 1) for name, dim in [("gate", 1), ("up", 1), ("down", 2)]
    }


ENDS = torch.tensor([1, 4, 4, 16], dtype=torch.int32)
SHAPES = {
    "rows": ((16, 32), (4, 32, 48), ENDS),
    "columns": ((4, 16, 32), (32, 16), ENDS),
    "gradients": ((32, 16), (16, 48), ENDS),
    "equal groups": ((4, 16, 32), (4, 32, 48), None),
}
OF_GROUPS = {
    ("rows", 0, 0),
    ("rows", 1, 0),
    ("columns", 0, 0),
    ("columns", 1, 1),
    ("gradients", 0, 1),
    ("gradients", 1, 0),
}


def produced(shapes: Sequence[tuple[int, ...]], ends: Tensor | None, which: int, dim: int) -> list[Tensor]:
    """Outputs and gradients of a grouped matmul where ranks divide one of its tensors, or none for `which` -1."""
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(shape, generator=draw) for shape in shapes]

    def work(group: ThreadGroup) -> list[Tensor]:
        ranks = Ranks(group)
        leaves = [each.clone().requires_grad_() for each in whole]
        given: list[Tensor] = [*leaves]
        if which >= 0:
            given[which] = make(
                leaves[which].chunk(2, dim)[group.rank()], RowLayout(dim, even(leaves[which].shape[dim], 2)), ranks
            )
        found = leave(functional.grouped_mm(*given, offs=ends))
        (found * found.detach().cos()).sum().backward()
        return [found.detach(), *(each.grad for each in leaves if each.grad is not None)]

    runs = run_in_threads(2, work)
    if which < 0:
        return runs[0]
    grads = [
        one if at != which else one + other
        for at, (one, other) in enumerate(zip(*(run[1:] for run in runs), strict=True))
    ]
    return [runs[0][0], *grads]


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("name", SHAPES)
def test_a_grouped_matmul_of_parts_is_that_of_the_whole_or_is_refused(name: str, which: int, dim: int) -> None:
    *shapes, ends = SHAPES[name]
    if dim >= len(shapes[which]):
        pytest.skip("no such dimension")
    if (name, which, dim) in OF_GROUPS:
        with pytest.raises(NoRuleError, match="groups"):
            produced(shapes, ends, which, dim)
        return
    torch.testing.assert_close(produced(shapes, ends, which, dim), produced(shapes, ends, -1, 0), **NEAR)


def test_features_that_the_kernels_cannot_take_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(40, WIDTH), Experts(hidden=24)).bfloat16()
    plan = found_plan(model, 2, [ids(1, 4)])
    cuts = {layout.cut.total for own in plan.regions.values() for layout in own.values()}
    assert cuts
    assert 24 not in cuts
