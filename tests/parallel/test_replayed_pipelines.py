# SPDX-License-Identifier: Apache-2.0
"""Stages of encoder-decoders, U-Nets and other models take the steps of one process."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import caught
from pipelines import differences
from replayed_models import FAMILIES, by_hand, family, loss_sum, train, widen
from steps import begin_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import PrepareError
from accel.fakes import is_fake
from accel.parallel.axes.pipeline import pipeline_of
from accel.tensors import is_dtensor
from accel.testing import Simulator

PARAMETERS, FIGURES = 1e-10, 1e-10


def assert_law(ranks: Simulator, name: str, mesh: str, world: int, accumulation: int = 1, **options: Any) -> None:
    rows, pieces = (4, 4, 3), 1
    if name == "unet":  # statistics of micro-batches see copies of the last row, so there are none here
        rows, pieces = (8, 8, 4), 4 if mesh == "pp=4" else 2
    shares = 2 if "dp" in mesh else 1
    if options.get("micro"):
        options["plan"] = accel.parallel.Plan(micro_batches=options.pop("micro"))
    work = partial(train, name=name, mesh=mesh, accumulation=accumulation, rows=rows, **options)
    found = ranks.run(work, world, default_group=True)
    expected = by_hand(name, accumulation=accumulation, rows=rows, shares=shares, pieces=pieces)
    parameters, figures = differences(found, expected)
    assert parameters < PARAMETERS
    assert figures < FIGURES


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow), "unet"])
def test_a_model_takes_the_steps_of_one_process(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    widen(monkeypatch, name)
    assert_law(ranks, name, "pp=2", 2, accumulation=3)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")  # blocks of OPT
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("mesh", "world", "accumulation"), [("pp=2", 2, 3), ("pp=4", 4, 1), ("dp=2,pp=2", 4, 3)])
def test_families_take_the_steps_of_one_process(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str, mesh: str, world: int, accumulation: int
) -> None:
    widen(monkeypatch, name)
    if name == "unet" and "dp" in mesh:
        pytest.skip("statistics of batches are each rank's own")
    assert_law(ranks, name, mesh, world, accumulation)


TURNS = accel.parallel.Plan(schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4)


@pytest.mark.parametrize(
    ("name", "mesh", "accumulation"),
    [
        pytest.param("bert", "dp_replicate=2,pp=2", 1, marks=pytest.mark.slow),
        pytest.param("bert", "dp=2,pp=2", 3, marks=pytest.mark.slow),
        pytest.param("granite", "dp=2,pp=2", 1, marks=pytest.mark.slow),
        pytest.param("vit", "dp=2,pp=2", 3, marks=pytest.mark.slow),
        pytest.param("t5", "pp=2", 1, marks=pytest.mark.slow),
    ],
)
def test_several_stages_of_a_rank_take_the_steps_of_one_process(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str, mesh: str, accumulation: int
) -> None:
    widen(monkeypatch, name)
    assert_law(ranks, name, mesh, 4 if "dp" in mesh else 2, accumulation, plan=TURNS)


def test_stages_of_a_rank_without_a_module_of_their_own_are_refused_beside_dp(ranks: Simulator) -> None:
    class Mixed(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.ones(4)) for _ in range(2))
            self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.c(self.b(self.a(x) * self.one)) * self.two)

    def rank(ctx: accel.DistContext, mesh: str) -> Any:
        plan = accel.parallel.Plan(schedule="Interleaved1F1B", stages_per_rank=2, stages=BY_LAYER)
        ctx = accel.replace(ctx, mesh=mesh)
        return caught(lambda: accel.prepare_model(ctx, Mixed(), plan=plan, example=torch.ones(4, 4)))

    assert ranks.run(partial(rank, mesh="pp=2"), 2, default_group=True) == [None, None]
    for error in ranks.run(partial(rank, mesh="dp=2,pp=2"), 4, default_group=True):
        assert isinstance(error, PrepareError)
        assert "two stages of one rank read different parameters of one module" in error.problem
        assert "the model: one and two" in error.got


def _bf16(ctx: accel.DistContext, name: str, mesh: str) -> dict[str, torch.Tensor]:
    """Gradients of a batch in bf16 under autocast."""
    made, batch_of = family(name)
    inputs, targets = batch_of(4, 1)
    inputs = {key: each.float() if each.is_floating_point() else each for key, each in inputs.items()}
    ctx = accel.replace(ctx, mesh=mesh, precision="bf16", strategy="fsdp")
    plan = accel.parallel.Plan(micro_batches=2)
    model = accel.prepare_model(ctx, made(0.0).float().train(), plan=plan, example=inputs)
    given = (begin_batch(ctx), inputs)
    loss, _ = accel.forward_backward(ctx, model, *given, targets=targets, loss_fn=loss_sum, weight=5)
    named = accel.unwrap_model(model).named_parameters()
    found: dict[str, Any] = {key: each.grad for key, each in named if each.grad is not None}
    return {"loss": loss.detach()} | {
        key: each.full_tensor() if is_dtensor(each) else each for key, each in found.items()
    }


_IN_BF16 = [
    pytest.param(name, mesh, marks=() if name == "unet" else pytest.mark.slow)
    for name in ("granite", "bert", "t5", "vit", "unet")
    for mesh in ("pp=2", "dp=2,pp=2")
]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of transformers' outputs, uncut
@pytest.mark.parametrize(("name", "mesh"), _IN_BF16)
def test_a_model_computes_in_bf16_as_one_process_does(ranks: Simulator, name: str, mesh: str) -> None:
    """Stages keep autocast's casts, and the regions that leave it, such as rotary tables; beside `dp` they compute
    with parameters that are gathered in bf16, as an uncut model along `dp` does."""
    apart = "dp" in mesh
    expected, *_ = ranks.run(partial(_bf16, name=name, mesh="dp=2" if apart else ""), 1 + apart, default_group=apart)
    every = ranks.run(partial(_bf16, name=name, mesh=mesh), 4 if apart else 2, default_group=True)
    assert {key for found in every for key in found} == expected.keys()
    for found in every:
        for key, each in found.items():
            assert each.dtype == (torch.float64 if key == "loss" else torch.float32)
            limit = 2e-2 * max(float(expected[key].abs().max()), 1e-2)
            assert float((each - expected[key]).abs().max()) <= limit, key


def _prepared(ctx: accel.DistContext, model: nn.Module, example: Any, **plan: Any) -> nn.Module:
    ctx = accel.replace(ctx, mesh="pp=2")
    return accel.prepare_model(ctx, model, plan=accel.parallel.Plan(**plan), example=example)


class Steps(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * 2)


class Limit(nn.Linear):
    """Holds its weight within limits, by its data."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _ = self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(input)


class Limited(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.b = Limit(4, 4)


STAGES = (("a",), ("b",))
BY_LAYER = (("a",), ("b",), ("c",), ("d",))


class Sized(Steps):
    """A path by the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x) if x.shape[0] > 2 else self.a(-x)
        return self.b(hidden)


def test_a_path_by_the_number_of_rows_is_that_of_each_batch(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[float]:
        with accel.seeding.seeded(ctx, 0):
            model = Sized()
        whole = copy.deepcopy(model)
        model = _prepared(ctx, model, torch.ones(4, 4), stages=STAGES, micro_batches=2)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        found = []
        for rows in (8, 4, 8, 2):
            expected = torch.cat([whole(half) for half in inputs[:rows].chunk(2)])
            found.append(float((accel.training.forward(ctx, model, inputs[:rows]) - expected).detach().abs().max()))
        return found

    for found in ranks.run(rank, 2, default_group=True):
        assert max(found) < 1e-6


class Streams(Steps):
    """A product that is larger than its factors, one of them a parameter that the first stage reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x * self.scale.mean((0, 1)))[:, None] * self.scale.mean(0)).sum(1)


@pytest.mark.parametrize("sizes", [(24, 4, 24), (4, 24, 4)])
def test_batches_of_any_size_read_what_stages_hold(ranks: Simulator, sizes: tuple[int, ...]) -> None:
    """The first is the size of the example. The product is sent for small batches, its factors for large ones."""

    def rank(ctx: accel.DistContext) -> float:
        with accel.seeding.seeded(ctx, 0):
            model = Streams()
        whole = copy.deepcopy(model)
        model = _prepared(ctx, model, torch.ones(sizes[0], 4), stages=STAGES, micro_batches=2)
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        found = [accel.training.forward(ctx, model, inputs[:rows]) - whole(inputs[:rows]) for rows in sizes]
        return max(float(each.detach().abs().max()) for each in found)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6


def test_the_data_of_a_parameter_is_changed_in_the_stage_that_holds_it(ranks: Simulator) -> None:
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))

    def made(ctx: accel.DistContext) -> tuple[nn.Module, Any]:
        with accel.seeding.seeded(ctx, 0):
            model = Limited()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def rank(ctx: accel.DistContext) -> float:
        whole, plain = made(ctx)
        model, optimizer = made(ctx)
        assert float(model.b.weight.detach().abs().max()) > 0.1
        plan = accel.parallel.Plan(stages=STAGES, micro_batches=2)
        ctx = accel.replace(ctx, mesh="pp=2")
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=torch.ones(4, 4))
        state = accel.train_state(ctx)
        for rows in inputs.chunk(3):
            whole(rows).square().mean().backward()
            plain.step()
            plain.zero_grad()
            _, state = accel.forward_backward(
                ctx, model, begin_batch(ctx, state), rows, loss_fn=lambda out: out.square().sum(), weight=rows.numel()
            )
            state = accel.optimizer_step(ctx, optimizer, state)
        found = accel.get_state_dict(ctx, model, dst=None)
        return max(float((found[key] - each).abs().max()) for key, each in whole.state_dict().items())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6


def _lose_ties(model: nn.Module) -> None:
    pipeline_of(model).ties = ()


@pytest.mark.slow
def test_the_law_notices_a_lost_tie(ranks: Simulator) -> None:
    with pytest.raises(AssertionError):
        assert_law(ranks, "bert", "pp=2", 2, change=_lose_ties)


@pytest.mark.slow
def test_tokens_are_those_of_one_process(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext, mesh: str) -> torch.Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        model = family("granite").make(0.0)
        prompts = torch.randint(3, 60, (4, 5), generator=torch.Generator().manual_seed(0))
        plan = accel.parallel.Plan(micro_batches=2)
        model = accel.prepare_model(ctx, model, plan=plan, example=prompts)
        with accel.evaluating(model):
            return accel.training.generate(ctx, model, prompts, max_new_tokens=3, cache=False)

    alone = ranks.run(partial(rank, mesh=""), 1)[0]
    assert all(torch.equal(each, alone) for each in ranks.run(partial(rank, mesh="pp=2"), 2, default_group=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "unet"])
def test_checkpoints_of_stages_load_on_one_rank_and_back(ranks: Simulator, tmp_path: Path, name: str) -> None:
    """Names, ties and buffers are those of the whole model, and each tensor is saved once."""
    made, batch_of = family(name)

    def save(ctx: accel.DistContext) -> None:
        model = _prepared(ctx, made(0.0), batch_of(4, 0)[0], micro_batches=2)
        assert accel.save_state(ctx, tmp_path / "stages", {"model": model}, step=1)

    def load(ctx: accel.DistContext) -> float:
        model = _prepared(ctx, made(0.0), batch_of(4, 0)[0], micro_batches=2)
        with torch.no_grad():
            for each in model.parameters():
                _ = each.zero_()
        _ = accel.load_state(ctx, tmp_path / "stages", {"model": model})
        whole = made(0.0)
        own = dict(model.named_parameters())
        return max(float((each - whole.get_parameter(name)).detach().abs().max()) for name, each in own.items())

    _ = ranks.run(save, 2, default_group=True)
    whole = made(0.0)
    expected = {key: each.clone() for key, each in whole.state_dict().items()}
    with torch.no_grad():
        for each in whole.parameters():
            _ = each.zero_()
    _ = accel.load_state(accel.single(), tmp_path / "stages", {"model": whole})
    assert expected.keys() == whole.state_dict().keys()
    assert all(torch.equal(each, expected[key]) for key, each in whole.state_dict().items())
    assert ranks.run(load, 2, default_group=True) == [0.0, 0.0]


class Beside(nn.Module):
    """A value that leaves its stage and that a layer of the stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.b(torch.tanh(self.a(x)))
        return self.e(torch.tanh(self.d(self.c(first)) * first))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", pytest.param("DualPipeV", marks=pytest.mark.slow)])
def test_gradients_of_weights_come_behind_those_of_inputs(ranks: Simulator, schedule: Any) -> None:
    """Schedules detach in place what a stage has passed on before its weights have their gradients."""
    inputs = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)

    def gradients(ctx: accel.DistContext, mesh: str) -> dict[str, torch.Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: nn.Module = Beside()
        plan = accel.parallel.Plan(
            schedule=schedule, stages_per_rank=2, stages=(("a",), ("b",), ("d",), ("e",)), micro_batches=4
        )
        model = accel.prepare_model(ctx, model, plan=plan, example=inputs)
        _ = accel.forward_backward(
            ctx, model, begin_batch(ctx), inputs, loss_fn=lambda output: output.square().sum(), weight=8
        )
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    (expected,) = ranks.run(partial(gradients, mesh=""), 1)
    found = ranks.run(partial(gradients, mesh="pp=2"), 2, default_group=True)
    assert {name for own in found for name in own} == expected.keys()
    for own in found:
        torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=0, atol=1e-12)


class Counting(TorchDispatchMode):
    """Counts draws of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "bernoulli" in str(func)
        return func(*args, **(kwargs or {}))


def _recomputed(ctx: accel.DistContext, name: str, how: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and the number of draws in forward and backward."""
    made, batch_of = family(name)
    model: Any = made(0.1).train()
    if how == "transformers":
        model.activation_checkpointing_enable()
    elif how == "accel":
        _ = accel.checkpoint_activations(model)
    model = _prepared(ctx, model, batch_of(4, 0)[0], micro_batches=2)
    inputs, targets = batch_of(4, 1)
    given = (begin_batch(ctx), inputs)
    with accel.seeding.seeded(ctx, 1), Counting() as counting:
        _ = accel.forward_backward(ctx, model, *given, targets=targets, loss_fn=loss_sum, weight=5)
    named = accel.unwrap_model(model).named_parameters()
    return {key: each.grad.clone() for key, each in named if each.grad is not None}, counting.count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "t5"])
@pytest.mark.parametrize("how", ["accel", "transformers"])
def test_checkpointed_blocks_run_again_with_the_same_draws(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    widen(monkeypatch, name)
    plain = ranks.run(partial(_recomputed, name=name, how=""), 2, default_group=True)
    again = ranks.run(partial(_recomputed, name=name, how=how), 2, default_group=True)
    for (expected, before), (found, after) in zip(plain, again, strict=True):
        assert found.keys() == expected.keys()
        assert max(float((each - expected[key]).abs().max()) for key, each in found.items()) < 1e-12
        assert after > before > 0


class Counts(nn.Linear):
    """Notes its calls on tensors with values, in an object that no look at shapes puts back, as it does lists."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls: deque[int] = deque()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not is_fake(self.weight):
            self.calls.append(len(input))
        return super().forward(input)


class Counted(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Counts(), Counts()


def test_a_new_shape_costs_one_forward_of_a_micro_batch_with_values(ranks: Simulator) -> None:
    """The other forward of a new shape is the record, without memory."""

    def rank(ctx: accel.DistContext) -> list[int]:
        model = _prepared(ctx, Counted(), torch.ones(4, 4), stages=STAGES, micro_batches=2)
        own: Any = accel.unwrap_model(model).a if ctx.rank == 0 else accel.unwrap_model(model).b
        found: list[int] = []
        for rows in (8, 8, 4, 8):
            own.calls.clear()
            _ = accel.training.forward(ctx, model, torch.ones(rows, 4))
            found.append(len(own.calls))
        return found

    assert ranks.run(rank, 2, default_group=True) == [[3, 2, 3, 2]] * 2
