# SPDX-License-Identifier: Apache-2.0
"""Batches of later forwards along tp and pp are compared by the step, in messages that it sends anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pipelines import Words, loss_sum
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import accel
from accel.parallel._later_batches import LaterBatches, _differ  # pyright: ignore[reportPrivateUsage]
from accel.tensors import local_part
from accel.testing import Simulator

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
LATER = "different batches.*on the ranks 0, 1,.*others on rank 1 than on rank 0.*of step 2.*prepare_loader"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        return self.drop(self.body(x))


def _prepared(ctx: accel.DistContext, net: type[nn.Module] = Net) -> tuple[accel.DistContext, nn.Module, Any]:
    ctx = accel.replace(ctx, mesh="tp=2")
    model = accel.prepare_model(ctx, net())
    return ctx, model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(ctx: accel.DistContext, losses: Sequence[Tensor], optimizer: Any, accum: Any, **how: Any) -> Any:
    """One step on a window of one micro-batch."""
    scaler = accel.loss_scale(ctx)
    accum = accel.backward(ctx, torch.stack(list(losses)).sum(), scaler, accum.next(), weight=1.0)
    return accel.optimizer_step(ctx, optimizer, scaler, accum, **how).accum


def _loss(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch).square().mean()


LONG = torch.arange(12)
SLIPS: dict[str, tuple[Any, Any]] = {
    "floating": ((X,), (X.flip(0),)),
    "shape": ((X, LONG), (X, LONG[:5])),
    "one integer": ((X, LONG), (X, LONG.index_fill(0, torch.tensor(3), 0))),
    "odd bytes": ((X, LONG[:3].byte()), (X, LONG[:3].flip(0).byte())),
    "places": ((X, LONG), (X, LONG.flip(0))),
    "bool": ((X, LONG > 3), (X, LONG > 4)),
    "text": ((X, "a"), (X, "b")),
    "two in each other's place": ((X, [X, X + 1]), (X, [X + 1, X])),
    "not finite": ((X, X), (X, X.masked_fill(X[0, 0] == X, torch.nan))),
}


@pytest.mark.parametrize("how", [{}, {"nonfinite": "skip", "max_norm": 1.0}, {"norm_type": float("inf")}], ids=str)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_later_slip_is_found_by_its_step_and_changes_no_parameter(ranks: Simulator, slip: str, how: Any):
    right, wrong = SLIPS[slip]
    if how and slip != "floating":
        return

    def rank(ctx: accel.DistContext) -> bool:
        ctx, model, optimizer = _prepared(ctx)
        accum: Any = accel.Accumulation()
        for _ in range(2):
            accum = _step(ctx, [_loss(model, *right)] * 2, optimizer, accum, **how)
        before = [local_part(each.detach()).clone() for each in model.parameters()]
        losses = [_loss(model, *each) for each in (right, right if ctx.rank == 0 else wrong) if each is not None]
        with pytest.raises(accel.errors.DataError, match=LATER):
            _ = _step(ctx, losses, optimizer, accum, **how)
        return all(map(torch.equal, before, (local_part(each.detach()) for each in model.parameters())))

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def _train_words(ctx: accel.DistContext, mesh: str, shift: Callable[[int, accel.DistContext], int]) -> None:
    ctx = accel.replace(ctx, mesh=mesh)
    tensor: Any = {"blocks.*.linear": "colwise_gather_output"} if "tp" in mesh else {}
    plan = accel.parallel.Plan(micro_batches=2, tensor=tensor)
    model = accel.prepare_model(ctx, Words(4), plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation()
    for at in range(4):
        ids = (torch.arange(20).view(4, 5) + at + shift(at, ctx)) % 11
        more: Any = {"targets": ids, "loss_fn": loss_sum, "weight": 20.0}
        _, accum = accel.forward_backward(ctx, model, scaler, accum.next(), ids, **more)
        accum = accel.optimizer_step(ctx, optimizer, scaler, accum).accum


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        ("pp=2", "pp"),
        pytest.param("dp=2,pp=2", "pp", marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", "pp", marks=pytest.mark.slow),
        ("pp=2,tp=2", "tp"),
    ],
)
def test_a_later_slip_along_a_pipeline_is_found(ranks: Simulator, mesh: str, axis: str):
    def right(ctx: accel.DistContext) -> None:
        _train_words(ctx, mesh, lambda at, ctx: 3 * (ctx.axis("dp").rank if "dp" in mesh else at))

    def wrong(ctx: accel.DistContext) -> None:
        with pytest.raises(accel.errors.DataError, match=r"others on rank .* than on rank .*of step 2.*prepare_loader"):
            _train_words(ctx, mesh, lambda at, ctx: ctx.axis(axis).rank * (at == 2))

    size = 4 if "," in mesh else 2
    _ = ranks.run(right, size, default_group=True)
    _ = ranks.run(wrong, size, default_group=True)  # on every rank


def _plain(ctx: accel.DistContext) -> None:
    """A frozen encoder whose outputs differ in their last digits, ragged and empty batches, dropout."""
    ctx, model, optimizer = _prepared(ctx)
    accum: Any = accel.Accumulation()
    for at in range(5):
        hidden = torch.randn(8 + at, 4, generator=torch.Generator().manual_seed(at)) * (1 + 1e-6 * ctx.rank)
        batches = (hidden, [X[:0], torch.zeros(2), X.to_sparse()]), (hidden.bfloat16().float(), {"a": float(ctx.rank)})
        accum = _step(ctx, [_loss(model, *each) for each in batches], optimizer, accum)


def _forwards_of_one_rank(ctx: accel.DistContext) -> None:
    """A model that each rank has whole may be called by one of them, beside one that is cut."""
    ctx, model, optimizer = _prepared(ctx)
    whole = accel.parallel.Plan(tensor=dict.fromkeys(("body.0", "body.2"), "replicated"))
    other = accel.prepare_model(ctx, Net(), plan=whole)
    accum: Any = accel.Accumulation()
    _ = other(X)
    for at in range(4):
        if ctx.rank == at % 2:
            _ = other(X + at)
        accum = _step(ctx, [_loss(model, X + at)], optimizer, accum)


def _computed_again(ctx: accel.DistContext) -> None:
    """Forwards without gradients, in evaluation, and those that a backward computes again."""
    ctx, model, optimizer = _prepared(ctx)
    accum: Any = accel.Accumulation()
    for at in range(3):
        with torch.no_grad():
            _ = model(X + at)
        _ = model.eval()(X + at)
        batch = (X + at).requires_grad_()
        for reentrant in (False, True):
            out: Any = cast(Any, checkpoint)(model.train(), batch, use_reentrant=reentrant)
            accum = _step(ctx, [cast(Tensor, out).square().mean()], optimizer, accum)


def _two_models(ctx: accel.DistContext) -> None:
    """Two models that step in turn, by norms of each and under `ignore`."""
    ctx, first, one = _prepared(ctx)
    _, second, two = _prepared(ctx)
    accum: Any = accel.Accumulation()
    other: Any = accel.Accumulation()
    for at in range(3):
        accum = _step(ctx, [_loss(second, first(X + at))], one, accum)
        two.zero_grad()
        other = _step(ctx, [_loss(second, X - at)], two, other, nonfinite="ignore")
        both = _loss(second, first(X + at))
        accum = _step(ctx, [both], [one, two], accum, max_norm=[1.0, None])


def _compiled(ctx: accel.DistContext) -> None:
    ctx, model, optimizer = _prepared(ctx)
    compiled = accel.compile_model(model, backend="eager")
    accum: Any = accel.Accumulation()
    for at in range(3):
        accum = _step(ctx, [_loss(compiled, X[: 4 - at] + at)], optimizer, accum)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch, while it compiles
@pytest.mark.parametrize(
    "program",
    [_plain, _forwards_of_one_rank, _computed_again, _two_models, pytest.param(_compiled, marks=pytest.mark.slow)],
    ids=lambda each: each.__name__.strip("_"),
)
def test_right_programs_pass_and_send_nothing_more(ranks: Simulator, program: Any, monkeypatch: pytest.MonkeyPatch):
    def refused(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a message of its own")

    monkeypatch.setattr("accel.parallel._later_batches.exchange_values", refused)
    _ = ranks.run(program, 2, default_group=True)


def test_ignore_compares_nothing_and_forgets(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        ctx, model, optimizer = _prepared(ctx)
        accum: Any = accel.Accumulation()
        _ = model(X)
        for how in ({"nonfinite": "ignore", "max_norm": 1.0}, {}):
            batch = X + ctx.rank * ("nonfinite" in how)
            accum = _step(ctx, [_loss(model, batch)], optimizer, accum, **how)

    _ = ranks.run(rank, 2, default_group=True)


def _listed(tensor: Tensor) -> list[float]:
    return cast(Any, tensor).tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_figures_of_integers_differ_unless_bits_are_equal(data: Any):
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int32, torch.int64, torch.bool]))
    values = st.lists(st.integers(0, 3), min_size=5, max_size=9)
    left, right = (torch.tensor([0, *data.draw(values)]).to(dtype) for _ in range(2))
    taken: list[Tensor] = []
    for each in (left, right[1:], torch.stack([right, right], 1)[1:, 0], right):
        figures = LaterBatches(accel.single().comm, 0)
        figures.add([("a", each)])
        taken.append(figures.take(torch.device("cpu")))
    assert _differ(_listed(taken[0] + taken[3])) == (not torch.equal(left, right))
    assert not _differ(_listed(taken[1] + taken[2]))  # places in memory are no difference


def _fold(*forwards: Sequence[Tensor]) -> Tensor:
    figures = LaterBatches(accel.single().comm, 0)
    for tensors in forwards:
        figures.add([(str(at), each) for at, each in enumerate(tensors)])
    return figures.take(torch.device("cpu"))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_figures_of_large_batches_differ_unless_they_are_alike(data: Any):
    """Of any shape, and one tensor among others of other sizes and scales; rounding is no difference."""
    rows, columns = data.draw(st.sampled_from([3, 64, 1000])), data.draw(st.sampled_from([1, 7, 1024]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    others = data.draw(st.lists(st.sampled_from([0, 1, 5000]), max_size=3))
    beside = [torch.randn(each, generator=generator) * 10.0**at for at, each in enumerate(others)]
    one, two = (torch.randn(rows, columns, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    constant = torch.zeros(rows, columns, 2, dtype=torch.float64)
    constant[:, 0] = 1.0  # a column that does not tell batches apart

    def cast_to(values: Tensor) -> Tensor:
        values = torch.cat([values, constant], 1)
        return torch.view_as_complex(values.float()) if dtype.is_complex else values[..., 0].to(dtype)

    first, other, rounded = map(cast_to, (one, two, one * (1 + 1e-6)))
    assert not _differ(_listed(_fold([first, *beside]) + _fold([rounded, *beside])))
    assert _differ(_listed(_fold([first, *beside]) + _fold([other, *beside])))
    assert _differ(_listed(_fold([first], [other]) + _fold([other], [first])))


@pytest.mark.parametrize("size", [2, 2**14, 2**14 + 1, 3 * 2**14 + 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_one_element_of_many_is_found(size: int, dtype: torch.dtype):
    values = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for at in {0, 1, size // 2, size - 1}:
        changed = values.clone()
        changed[at] = 1 - int(values[at])
        assert _differ(_listed(_fold([values]) + _fold([changed])))
        assert _differ(_listed(_fold([values, X]) + _fold([changed, X])))
    swapped = torch.cat([values[1:], values[:1]])
    assert _differ(_listed(_fold([values]) + _fold([swapped]))) != torch.equal(values, swapped)
    assert not _differ(_listed(_fold([values, X]) + _fold([values.clone(), X])))


class _Kernels(TorchDispatchMode):
    """Counts operators that compute, and do not only look at the same memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if all(each.alias_info is None or each.alias_info.is_write for each in func._schema.returns):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("many", [1, 20])
def test_a_forward_is_folded_by_a_few_kernels_for_all_tensors_together(many: int):
    figures = LaterBatches(accel.single().comm, 0)
    leaves = [(str(at), each) for at in range(many) for each in (torch.randn(5, at + 1), torch.arange(at + 3))]
    figures.add(leaves)  # makes the constants
    _ = figures.take(torch.device("cpu"))
    with _Kernels() as counted:
        figures.add(leaves)
    assert len(counted.names) <= 6, counted.names
    with _Kernels() as counted:
        _ = figures.take(torch.device("cpu"))
    assert len(counted.names) <= 10, counted.names


def test_a_run_that_reads_none_notes_none_and_one_that_does_notes_all(ranks: Simulator):
    """Optimizers that step in turn, under two policies: each window of the one that reads is compared."""

    def rank(ctx: accel.DistContext) -> list[bool]:
        ctx, model, optimizer = _prepared(ctx)
        accum: Any = accel.Accumulation()
        wanted = list[bool]()
        [figures] = cast("dict[Any, LaterBatches]", ctx.comm.later_batches).values()
        for how in ({"nonfinite": "ignore"}, {"nonfinite": "ignore"}, {}, {"nonfinite": "ignore"}):
            accum = _step(ctx, [_loss(model, X)], optimizer, accum, **how)
            wanted.append(figures.is_wanted)
        with pytest.raises(accel.errors.DataError, match="different batches"):
            _ = _step(ctx, [_loss(model, X + ctx.rank)], optimizer, accum)
        return wanted

    assert ranks.run(rank, 2, default_group=True) == [[False, False, True, True]] * 2
