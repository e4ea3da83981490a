# SPDX-License-Identifier: Apache-2.0
"""Modules that run on parts of a sequence: the same gradients, one for each parameter, and less memory."""

from __future__ import annotations

import copy
from typing import Any

import language_models as lm
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import ConfigError
from accel.parallel.parts import plain_of
from accel.testing import Simulator


class Mlp(nn.Module):
    """Two layers around a nonlinearity, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.dropout(nn.functional.gelu(self.up(x)))) * scale


def make(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Mlp(dropout), nn.Linear(16, 16))


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [each.grad.double() for each in model.parameters()]  # type: ignore[union-attr]


@settings(max_examples=share(0.3), deadline=None)
@given(
    dim=st.sampled_from([0, 1, -2]),
    parts=st.integers(1, 25),
    frozen=st.sampled_from(["", "0", "1.up", "1"]),
    x_trains=st.booleans(),
)
def test_gradients_are_the_same(dim: int, parts: int, frozen: str, x_trains: bool) -> None:
    plain = make().double()
    if frozen:
        _ = plain.get_submodule(frozen).requires_grad_(False)
    model = copy.deepcopy(plain)
    assert accel.chunk_sequence(model, Mlp, dim=dim, parts=parts) is model
    found = []
    for each in (plain, model):
        x = rows().requires_grad_(x_trains)
        each(x).square().mean().backward()
        found.append([x.grad, *(parameter.grad for parameter in each.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(rows()), plain(rows()), rtol=1e-12, atol=1e-12)


def test_each_parameter_gets_one_gradient() -> None:
    model = accel.chunk_sequence(make().double(), Mlp, parts=5)
    counts = dict[str, int]()
    for name, each in model.named_parameters():
        _ = each.register_post_accumulate_grad_hook(lambda _, name=name: counts.update({name: counts.get(name, 0) + 1}))
    _ = gradients(model, rows())
    assert counts == {name: 1 for name, _ in model.named_parameters()}


@pytest.mark.parametrize("parts", [1, 4])
def test_dropout_draws_the_same_numbers_again(parts: int) -> None:
    """The gradient of a sum of x * mask is the mask. Numbers that are drawn later do not depend on the backward."""

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5)

    model = accel.chunk_sequence(nn.Sequential(Mask()), Mask, parts=parts)
    x = rows().requires_grad_()
    output = model(x)
    after = torch.get_rng_state()
    _ = torch.rand(3)
    output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, output)
    torch.set_rng_state(after)
    first = torch.rand(3)
    torch.set_rng_state(after)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("weights", ["bf16", "autocast"])
def test_gradients_in_16_bits_are_as_exact_as_without_parts(weights: str) -> None:
    """Checkpoints of 64 parts round each part's gradient into the weight's, which is several times worse."""
    torch.manual_seed(0)
    exact = Mlp().double()
    x = torch.randn(2, 512, 16, dtype=torch.float64)
    slope = torch.randn(2, 512, 16, dtype=torch.float64)

    def run(module: nn.Module, call: Any) -> list[Tensor]:
        dtype = torch.bfloat16 if weights == "bf16" else torch.float32
        module = module.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=weights == "autocast"):
            output = call(module, x.to(dtype))
        output.backward(slope.to(output.dtype))
        return [each.grad.double() for each in module.parameters()]  # type: ignore[union-attr]

    exact(x).backward(slope)
    wanted = [each.grad for each in exact.parameters()]
    chunked = accel.chunk_sequence(nn.Sequential(copy.deepcopy(exact)), Mlp, parts=64)
    errors = {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True) if b is not None)
        for name, found in {
            "plain": run(copy.deepcopy(exact), lambda module, x: module(x)),
            "chunked": run(chunked, lambda module, x: module(x)),
            "parts": run(
                copy.deepcopy(exact),
                lambda module, x: torch.cat(
                    [checkpoint(module, each, use_reentrant=False) for each in x.chunk(64, 1)], 1
                ),
            ),
        }.items()
    }
    assert errors["chunked"] < 1.5 * errors["plain"]
    if weights == "bf16":
        assert errors["parts"] > 2 * errors["chunked"]


def test_the_input_alone_is_kept() -> None:
    kept = list[int]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    model = accel.chunk_sequence(nn.Sequential(Mlp()), Mlp, parts=4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model(rows(torch.float32)).sum()
    assert kept == [3 * 20 * 16]


def test_what_is_no_map_of_positions_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, other: Any = None) -> Any:
            return (x, x) if other is None else x + other if isinstance(other, Tensor) else x[:, :1]

    model = accel.chunk_sequence(Two(), Two, parts=2)
    for arguments, got in (((), "^tuple"), ((rows(),), "^2 tensors"), ((3,), r"^\[3, 1, 16\] for a part")):
        with assert_raises(ConfigError, got=got):
            _ = model(rows(), *arguments)
    with assert_raises(ConfigError, expected="at least 1"):
        _ = accel.chunk_sequence(make(), Mlp, parts=0)


def test_other_arguments_are_passed_on_and_copies_work() -> None:
    plain = Mlp()
    model = copy.deepcopy(accel.chunk_sequence(copy.deepcopy(plain), Mlp, parts=3))
    x = rows(torch.float32)
    torch.testing.assert_close(model(x, scale=2.0), plain(x, scale=2.0))
    assert isinstance(model, Mlp)


@pytest.mark.slow
def test_compiled_blocks_and_recomputed_ones() -> None:
    expected = gradients(make().double(), rows())
    for recompute in (False, True):
        for compiled in (False, True):
            model = accel.chunk_sequence(make().double(), Mlp, parts=3)
            if recompute:
                model = accel.checkpoint_activations(model, Mlp)
            if compiled:
                model = accel.compile_model(model, backend="aot_eager")
            for got, want in zip(gradients(model, rows()), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


MESHES = [
    ("dp=2", "ddp", 2),
    ("dp=2", "fsdp", 2),
    ("tp=2", "ddp", 2),
    ("cp=2", "ddp", 2),
    ("tp=2,cp=2", "ddp", 4),
    ("pp=2", "ddp", 2),
    ("dp=2,tp=2", "fsdp", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["", "recompute", "offload", "both"])
@pytest.mark.parametrize(("mesh", "strategy", "size"), MESHES)
def test_meshes_train_as_without(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, mesh: str, strategy: Any, size: int, beside: str
) -> None:
    check(ranks, monkeypatch, mesh, strategy, size, beside)


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_ranks_run_on_parts_of_their_own_rows(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    """Ranks along tp share the tokens between layers, and ranks along cp the positions."""
    lengths = list[int]()
    forward = lm.Mlp.forward

    def watched(self: lm.Mlp, x: Tensor) -> Tensor:
        lengths.append(plain_of(x).shape[1])
        return forward(self, x)

    monkeypatch.setattr(lm.Mlp, "forward", watched)
    check(ranks, monkeypatch, mesh, "ddp", 2, "", lm.plan_of(sequence=True))
    assert set(lengths[-8:]) == {2}  # of 4 rows of a rank, in the last backward too


def check(
    ranks: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    mesh: str,
    strategy: Any,
    size: int,
    beside: str,
    plan: accel.parallel.Plan | None = None,
) -> None:
    make_objects = lm.make_objects

    def with_chunks(ctx: accel.DistContext, **options: Any) -> Any:
        model, optimizer = make_objects(ctx, **options)
        model = accel.chunk_sequence(model, lm.Mlp, parts=3)
        if beside in ("recompute", "both"):
            model = accel.checkpoint_activations(model)
        if beside in ("offload", "both"):
            model = accel.offload_activations(model, min_bytes=1)
        return model, optimizer

    (one,) = ranks.run(lambda ctx: lm.train(ctx, "dp=1", accumulation=2), 1, default_group=True)
    monkeypatch.setattr(lm, "make_objects", with_chunks)
    for run in ranks.run(
        lambda ctx: lm.train(ctx, mesh, strategy=strategy, accumulation=2, plan=plan), size, default_group=True
    ):
        for name, each in run.parameters.items():
            assert (each - one.parameters[name]).abs().max() < 1e-10, name


def test_units_inside_are_refused(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.chunk_sequence(make(), Mlp, parts=2)
        model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(units=("1.up",)))
        with assert_raises(ConfigError, got="the unit up"):
            _ = model(rows(torch.float32))

    _ = ranks.run(run, 2, default_group=True)
