# SPDX-License-Identifier: Apache-2.0
"""Functions without a rule between split layers: kernels that get plain tensors of a rank's rows, and errors that say
how to declare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from steps import two_steps
from test_parts import Kernel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import PrepareError
from accel.parallel import Plan, local_map
from accel.parallel._modules import RANKS
from accel.tensors import is_dtensor
from accel.testing import Simulator

STYLES: dict[str, Any] = {"up": "colwise", "gate": "colwise", "down": "rowwise"}
X = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 6, 8)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return cast(Any, Kernel).apply(x, y)


def normed(x: Tensor, y: Tensor) -> Tensor:
    """Needs all features of a row."""
    return x.detach().cumsum(-1).mul(0.0).add(x / x.square().mean(-1, keepdim=True).add(1).sqrt()) * y


@torch.library.custom_op("accel_tests::relu", mutates_args=())
def relu(x: Tensor) -> Tensor:
    """Not what torch's function of this name computes."""
    return x - x.mean(-1, keepdim=True)


@torch.library.custom_op("accel_tests::doubled", mutates_args=(), tags=[torch.Tag.pointwise])
def doubled(x: Tensor) -> Tensor:
    return x * 2


def _backward_of_doubled(_: Any, grad: Tensor) -> Tensor:
    return grad * 2


cast(Any, doubled).register_autograd(_backward_of_doubled)


def of_a_gpu(*_: Tensor) -> Tensor:
    raise AssertionError


class Mlp(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self.gate(x)))


def trained(
    ctx: accel.DistContext, function: Callable[[Tensor, Tensor], Tensor], *, find: bool = False, compiled: bool = False
) -> tuple[Any, bool]:
    """Losses and parameters of two steps, and whether ranks divide the first layer."""
    model: nn.Module = Mlp(function).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ways: dict[str, Any] = {"example": [X]} if find else {"plan": Plan(tensor=STYLES)}
    if ctx.world_size > 1:
        ctx = accel.replace(ctx, mesh="tp=2")
        model, optimizer = accel.prepare(ctx, model, optimizer, **ways)
    else:
        model, optimizer = accel.prepare(ctx, model, optimizer)
    if compiled:
        accel.compile_model(model, Mlp, backend="aot_eager", fullgraph=True)
    losses = two_steps(ctx, model, optimizer, lambda: model(X).square().mean())
    divides = is_dtensor(weight := model.get_parameter("up.weight")) and weight.placements[0].is_shard()
    return (losses, accel.get_state_dict(ctx, model, dst=None)), divides


def compared(ranks: Simulator, function: Callable[[Tensor, Tensor], Tensor], **ways: bool) -> bool:
    """Train on two ranks as in one process; return whether the layers are divided."""
    want, _ = trained(accel.single(), function)
    runs = ranks.run(lambda ctx: trained(ctx, function, **ways), 2, default_group=True)
    for got, _ in runs:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    return runs[0][1]


def heads_of(x: Tensor, y: Tensor) -> Tensor:
    """A kernel of heads, [batch, tokens, heads, features], which mixes tokens and features."""
    found = local_map(lambda q, k: (q.cumsum(1) * k.sum(-1, keepdim=True)).sin(), 2)
    return found(x.view(2, 6, 4, 4), y.view(2, 6, 4, 4)).flatten(2)


def recomputed(x: Tensor, y: Tensor) -> Tensor:
    """A reentrant checkpoint of parts."""
    found: Tensor = checkpoint(lambda a, b: torch.tanh(a) * b.exp(), x, y, use_reentrant=True)
    return found


def mapped_by_torch(x: Tensor, y: Tensor) -> Tensor:
    return local_map(torch.vmap(lambda a, b: a.sin() * b), "elements")(x, y)


def by_operator(x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.accel_tests.doubled(x) * cast(Any, doubled)(y)


def energy(x: Tensor, y: Tensor) -> Tensor:
    """A gradient by torch.func of each element alone."""
    return local_map(lambda a, b: torch.func.grad(lambda given: (given.sin() * b).sum())(a), "elements")(x, y)


RUNNING = {
    "transform of torch.func": energy,
    "elements": local_map(gated, "elements"),
    "heads": heads_of,
    "reentrant checkpoint": recomputed,
    "vmap": mapped_by_torch,
    "pointwise operator": by_operator,
}


@pytest.mark.parametrize("name", RUNNING)
def test_declared_functions_train_as_in_one_process(ranks: Simulator, name: str) -> None:
    assert compared(ranks, RUNNING[name])


@pytest.mark.slow
def test_a_found_plan_divides_layers_around_a_kernel_and_refuses_a_false_declaration(ranks: Simulator) -> None:
    assert compared(ranks, local_map(of_a_gpu, "elements", on_cpu=lambda x, y: x.sin() * y), find=True)
    with assert_raises(PrepareError, problem="no tensor-parallel plan is known"):
        _ = compared(ranks, local_map(normed, "elements"), find=True)


@pytest.mark.slow
@pytest.mark.usefixtures("own_graphs")
def test_torch_compile_traces_a_declared_function(ranks: Simulator) -> None:
    assert compared(ranks, local_map(lambda x, y: x.sin() * y, "elements"), compiled=True)


REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "a kernel": ("numpy", gated),
    "an operator with the name of a function of torch": ("relu", lambda x, y: torch.ops.accel_tests.relu(x) * y),
    "an operator without a tag": ("relu", lambda x, y: cast(Any, relu)(x) * y),
    "vmap, which would see features of this rank": ("vmap", lambda x, y: torch.vmap(lambda r: r - r.mean(-1))(x) * y),
}
FALSE: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "rows that ranks divide": ("rows", local_map(normed, "rows")),
    "another dimension": ("dimension 1", local_map(gated, 1)),
    "a result of another shape": ("result", local_map(lambda x, y: (x * y).mean(-1), "elements")),
    "one number for two tensors": ("2 tensors", local_map(gated, (2,))),
    "rows of a rank from elsewhere": ("8 rows", lambda x, y: x * torch.ones(8, dtype=torch.float64) * y),
}


@pytest.mark.parametrize("name", [*REFUSED, *FALSE])
def test_what_is_not_declared_or_declared_falsely_is_an_error(ranks: Simulator, name: str) -> None:
    word, function = (REFUSED | FALSE)[name]

    def rank(ctx: accel.DistContext) -> PrepareError:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, Mlp(function).double(), plan=Plan(tensor=STYLES))
        with torch.no_grad(), pytest.raises(PrepareError) as caught:
            model(X)
        return caught.value

    for error in ranks.run(rank, 2, default_group=True):
        assert word in error.got
        assert ("accel.parallel.local_map" in error.fix) == (name in REFUSED)
        assert ("over= and out=" in error.fix) == ("local_map " in error.got)
        assert "tensor_plan" in error.fix


def _with_part(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    return model.down(hidden * torch.func.grad(lambda given: (given * hidden.mean(-1)).sum())(x[..., 0])[..., None])


def _mapped_with_part(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    return model.down(torch.vmap(lambda given: given * hidden)(x[0, :, :1]))


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a value of a gradient": lambda m, x: m.down(torch.func.grad_and_value(lambda a: a.mean())(m.up(x))[1] * m.up(x)),
    "a mean of features": lambda m, x: m.down(torch.func.vjp(lambda a: a.mean(-1, keepdim=True), m.up(x))[0] + m.up(x)),
    "a gradient": lambda m, x: m.down(torch.func.grad(lambda a: a.exp().mean())(m.up(x))),
    "rows of a gradient": lambda m, x: m.down(torch.func.jacrev(lambda a: a.sum() ** 2)(m.up(x))),
    "a part from outside": _with_part,
    "a mapped part from outside": _mapped_with_part,
    "layers": lambda m, x: torch.func.vjp(lambda a: m.down(m.up(a)), x)[1](x)[0],
    "mapped layers": lambda m, x: torch.vmap(lambda a: m.down(m.up(a)))(x),
    "a layer that gathers": lambda m, x: m.down(m.gate(x) + torch.func.grad(lambda a: m.gate(a).mean())(x).mean()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_with_a_part_is_an_error(ranks: Simulator, name: str) -> None:
    """It would compute with this rank's features, and gives no error where it reduces them."""

    class Transformed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return TRANSFORMS[name](self, x)

    def rank(ctx: accel.DistContext) -> PrepareError:
        ctx = accel.replace(ctx, mesh="tp=2")
        plan = Plan(tensor=STYLES | {"gate": "colwise_gather_output"})
        model = accel.prepare_model(ctx, Transformed(torch.mul).double(), plan=plan)
        with pytest.raises(PrepareError) as caught:
            model(X)
        return caught.value

    assert Transformed(torch.mul).double()(X).isfinite().all()
    for error in ranks.run(rank, 2, default_group=True):
        assert error.got.endswith("in a transform of torch.func")
        assert ("accel.parallel.local_map" in error.fix) != error.got.startswith("a layer")


AROUND: dict[str, Callable[[Any, Tensor], Any]] = {
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "vmap": lambda model, x: torch.vmap(model)(x),
    "functional_call": lambda model, x: torch.func.grad(
        lambda given: torch.func.functional_call(model, dict(model.named_parameters()), (given,)).sum()
    )(x),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch, in jacfwd
@pytest.mark.parametrize("name", AROUND)
def test_lines_of_the_error_for_a_transform_around_the_model_run(ranks: Simulator, name: str) -> None:
    x = X[0]
    plan = Plan(tensor=STYLES)
    expected = AROUND[name](Mlp(torch.mul).double(), x)
    by_autograd: Any = torch.autograd.functional.jacobian(Mlp(torch.mul).double(), x)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, Mlp(torch.mul).double(), plan=plan)
        with pytest.raises(PrepareError) as caught:
            AROUND[name](model, x)
        assert "torch.autograd.functional.jacobian(model, x)" in caught.value.fix
        assert "plan=accel.parallel.Plan(tensor={})" in caught.value.fix
        torch.testing.assert_close(torch.autograd.functional.jacobian(model, x), by_autograd)
        model = accel.prepare_model(ctx, Mlp(torch.mul).double(), plan=Plan(tensor={}))
        torch.testing.assert_close(AROUND[name](model, x), expected)

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("over", ["each", "element", True, None, (), (None,), 1.0, ("1",)])
def test_a_declaration_that_is_none_is_an_error(over: Any) -> None:
    with assert_raises(PrepareError, where="local_map"):
        local_map(gated, over)


class Marked(Tensor):
    """A class of tensors of the user's."""


def test_one_head_a_rank_next_to_a_tensor_of_one_row_needs_none_in_over(ranks: Simulator) -> None:
    """A result of one row may be of either; the error's line says which word makes it known."""

    def of_heads(over: Any) -> Callable[[Tensor, Tensor], Tensor]:
        mapped = local_map(torch.mul, over)
        return lambda x, _: mapped(x.view(2, 6, 2, 8), torch.full((1, 1, 1, 8), 3.0, dtype=torch.float64)).flatten(2)

    with assert_raises(PrepareError, got="a part and a full tensor", fix="None in over= .* that has one row"):
        _ = compared(ranks, of_heads(2))
    assert compared(ranks, of_heads((2, None)))


@dataclasses.dataclass
class Pair:
    """Two tensors, in an object that torch does not flatten."""

    one: Tensor
    other: Tensor


def test_a_function_of_an_object_computes_with_the_parts_that_it_holds(ranks: Simulator) -> None:
    mapped = local_map(lambda pair: pair.one * torch.sigmoid(pair.other), "elements")
    assert compared(ranks, lambda x, y: mapped(Pair(x, y)))


def test_a_call_with_other_tensors_is_a_call() -> None:
    found = local_map(gated, "elements")(X, X)
    assert type(found) is Tensor
    torch.testing.assert_close(found, X * X.sigmoid())
    marked = X.as_subclass(Marked)
    seen = local_map(lambda x: (type(x), type(x + x)), "rows")(marked)
    assert seen == (Marked, Marked)


def test_layers_that_a_backward_computes_again_hold_no_tensors_of_former_steps(ranks: Simulator) -> None:
    class Recomputed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x * 1.5, use_reentrant=False)

    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, Recomputed(torch.mul).double(), plan=Plan(tensor=STYLES))
        held: list[int] = []
        for _ in range(3):
            model(X.clone().requires_grad_()).sum().backward()
            held.append(len(vars(model.get_submodule("up"))[RANKS]._entered))
        return held

    for first, *others in ranks.run(rank, 2, default_group=True):
        assert others == [first, first]
