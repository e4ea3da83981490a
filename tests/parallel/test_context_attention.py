# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that ranks share equals one call of torch's, with its gradients."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from planned_parts import WRITTEN_OUT, Masked, kernel_of
from profiles import share
from torch import Tensor, nn

import accel
from accel.comm import start_shift
from accel.errors import ConfigError
from accel.parallel.axes.context import _kernels, _ring, check_context_used
from accel.testing import Simulator

METHODS = ("gather", "ring", "heads")


class Case(NamedTuple):
    """One attention: shapes, mask and the seed of its numbers."""

    length: int = 16
    batch: int = 2
    heads: int = 8
    key_heads: int = 8
    head_dim: int = 4
    value_dim: int = 4
    causal: bool = True
    documents: bool = False
    scale: float | None = None
    seed: int = 0


def make_inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Queries, keys, values, a gradient of the output, and documents of uneven lengths."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = {
        "q": (case.heads, case.head_dim),
        "k": (case.key_heads, case.head_dim),
        "v": (case.key_heads, case.value_dim),
        "grad": (case.heads, case.value_dim),
    }
    made = {
        name: torch.randn(case.batch, heads, case.length, dim, generator=generator, dtype=torch.float64).to(dtype)
        for name, (heads, dim) in shapes.items()
    }
    starts = torch.rand(case.batch, case.length, generator=generator) < 0.2
    return {**made, "documents": starts.cumsum(1)}


def alone(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and the gradients by one call of torch's."""
    q, k, v = (inputs[name].clone().requires_grad_() for name in "qkv")
    mask = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        mask = mask.tril()
    if case.documents:
        mask = mask & (inputs["documents"][:, :, None] == inputs["documents"][:, None, :])[:, None]
    times = case.heads // case.key_heads
    keys, values = (each.repeat_interleave(times, 1) for each in (k, v))
    out = nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=case.scale)
    out.backward(inputs["grad"])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}  # type: ignore[dict-item]


def shared(ctx: accel.DistContext, case: Case, method: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the same."""
    part = accel.parallel.split_sequence(ctx, {name: inputs[name] for name in ("q", "k", "v", "grad")}, dim=2)
    documents = accel.parallel.split_sequence(ctx, {"documents": inputs["documents"]})["documents"]
    q, k, v = (part[name].clone().requires_grad_() for name in "qkv")
    out = accel.parallel.context_attention(
        ctx,
        q,
        k,
        v,
        causal=case.causal,
        documents=documents if case.documents else None,
        scale=case.scale,
        method=method,
    )
    out.backward(part["grad"])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}  # type: ignore[dict-item]


def largest_difference(
    ranks: Simulator, size: int, case: Case, method: str, dtype: torch.dtype = torch.float64, mesh: str = ""
) -> float:
    inputs = make_inputs(case, dtype)
    expected = alone(case, inputs)

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=mesh or f"cp={size}")
        own = accel.parallel.split_sequence(ctx, expected, dim=2, shift=())
        got = shared(ctx, case, method, inputs)
        return max((got[name] - own[name]).abs().max().item() for name in got)

    return max(ranks.run(rank, size, default_group=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_one_call_of_torchs(ranks: Simulator, size: int, method: str, causal: bool) -> None:
    for key_heads, documents in ((8, False), (2, False), (8, True), (1, True)):
        case = Case(length=48, causal=causal, key_heads=key_heads, documents=documents)
        assert largest_difference(ranks, size, case, method) < 1e-12, case


@settings(max_examples=share(0.48))
@given(data=st.data())
def test_equals_one_call_for_every_shape(ranks: Simulator, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([2, 3, 4]), "size")
    key_heads = data.draw(st.integers(1, 3), "key heads")
    case = Case(
        length=2 * size * data.draw(st.integers(1, 4), "positions of a piece"),
        batch=data.draw(st.integers(1, 2), "batch"),
        heads=key_heads * size * data.draw(st.integers(1, 2), "times"),
        key_heads=key_heads,
        head_dim=data.draw(st.sampled_from([1, 3, 8]), "head dim"),
        value_dim=data.draw(st.sampled_from([2, 8]), "value dim"),
        causal=data.draw(st.booleans(), "causal"),
        documents=data.draw(st.booleans(), "documents"),
        scale=data.draw(st.sampled_from([None, 0.5]), "scale"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    method = data.draw(st.sampled_from(METHODS), "method")
    assert largest_difference(ranks, size, case, method) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_other_axes_have_sequences_of_their_own(ranks: Simulator, method: str) -> None:
    assert largest_difference(ranks, 4, Case(), method, mesh="dp=2,cp=2") < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_smaller_dtypes_keep_their_precision(ranks: Simulator, method: str, dtype: torch.dtype, most: float) -> None:
    assert largest_difference(ranks, 4, Case(length=64, key_heads=2), method, dtype) < most


@pytest.mark.parametrize("method", METHODS)
def test_autocast_has_its_dtype_before_anything_travels(ranks: Simulator, method: Any) -> None:
    inputs = make_inputs(Case(), torch.float32)

    def rank(ctx: accel.DistContext) -> tuple[torch.dtype, torch.dtype | None]:
        ctx = accel.replace(ctx, mesh="cp=2", precision="bf16")
        part = accel.parallel.split_sequence(ctx, {name: inputs[name] for name in "qkv"}, dim=2)
        q = part["q"].clone().requires_grad_()
        with accel.autocast(ctx):
            out = accel.parallel.context_attention(ctx, q, part["k"], part["v"].bfloat16(), method=method)
        out.sum().backward()
        return out.dtype, q.grad.dtype  # type: ignore[union-attr]

    assert ranks.run(rank, 2, default_group=True) == [(torch.bfloat16, torch.float32)] * 2


@pytest.mark.parametrize(
    ("method", "terms"),
    [
        pytest.param(method, terms, marks=[pytest.mark.slow] * (method != "ring" or bool(terms)))
        for method in METHODS
        for terms in ({}, {"causal": False}, {"window": 5}, {"softcap": 2.0, "documents": True})
    ],
)
@pytest.mark.usefixtures("own_graphs")
def test_compiled_layers_are_one_graph(ranks: Simulator, method: Any, terms: Any) -> None:
    inputs = make_inputs(Case(key_heads=2))

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {name: inputs[name] for name in ("q", "k", "v", "grad")}, dim=2)
        given = accel.parallel.split_sequence(ctx, {"documents": inputs["documents"]}) if "documents" in terms else {}
        given = terms | {name: each for name, each in given.items() if name == "documents"}

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return accel.parallel.context_attention(ctx, q.sin(), k.cos(), v, method=method, **given).tanh()

        def gradients(function: Any) -> list[Tensor]:
            leaves = [part[name].clone().requires_grad_() for name in "qkv"]
            out = function(*leaves)
            out.backward(part["grad"])
            return [out.detach(), *(each.grad for each in leaves)]

        compiled = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True))
        check_context_used(ctx)  # the graph has noted it
        return max((a - b).abs().max().item() for a, b in zip(compiled, gradients(layer), strict=True))

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


def test_keys_travel_while_a_block_is_computed(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of events on rank 0 in a forward: a message begins, a block is computed, the message is waited for."""
    events: list[str] = []

    def noting_shift(*arguments: Any) -> Any:
        wait = start_shift(*arguments)
        rank = arguments[2].rank()
        events.append(f"{rank} sends")
        return lambda: (events.append(f"{rank} waits"), wait())[1]

    def noting_kernel(*arguments: Any) -> Any:
        kernel = kernel_of(*arguments)

        def forward(q: Tensor, *rest: Any) -> Any:
            events.append(f"{threading.current_thread().name} computes")
            return kernel.forward(q, *rest)

        return kernel._replace(forward=forward)

    monkeypatch.setattr(_ring, "start_shift", noting_shift)
    monkeypatch.setattr(_ring, "kernel_of", noting_kernel)
    x = torch.zeros(1, 1, 2, 8)

    def rank(ctx: accel.DistContext) -> None:
        threading.current_thread().name = str(ctx.rank)
        accel.parallel.context_attention(accel.replace(ctx, mesh="cp=3"), x, x, x, method="ring")

    ranks.run(rank, 3, default_group=True)
    for at in range(3):
        own = [each.partition(" ")[2] for each in events if each.startswith(f"{at} ")]
        assert own == ["sends", "computes", "waits", "sends", "computes", "waits", "computes"]


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_activations_have_the_same_gradients(ranks: Simulator, method: Any) -> None:
    case = Case(key_heads=2)
    inputs = make_inputs(case)
    expected = alone(case, inputs)

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, inputs | {"documents": inputs["grad"]}, dim=2)
        q, k, v = (part[name].clone().requires_grad_() for name in "qkv")
        out = torch.utils.checkpoint.checkpoint(
            lambda *each: accel.parallel.context_attention(ctx, *each, method=method), q, k, v, use_reentrant=False
        )
        out.backward(part["grad"])
        own = accel.parallel.split_sequence(ctx, expected, dim=2)
        return max((each.grad - own[name]).abs().max().item() for name, each in zip("qkv", (q, k, v), strict=True))

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


def test_keys_travel_before_they_are_repeated(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that one rank sends in a forward: keys and values once, whatever the number of heads."""
    sent: list[int] = []
    for name in ("_attention.gathered_summed", "_ring.start_shift"):
        whole = f"accel.parallel.axes.context.{name}"
        original = getattr(__import__(whole.rpartition(".")[0], fromlist=["x"]), name.partition(".")[2])

        def count(x: Any, *rest: Any, original: Any = original) -> Any:
            sent.append(sum(each.numel() for each in (x if isinstance(x, list) else [x])))
            return original(x, *rest)

        monkeypatch.setattr(whole, count)

    def rank(ctx: accel.DistContext, method: Any) -> None:
        ctx = accel.replace(ctx, mesh="cp=4")
        part = accel.parallel.split_sequence(ctx, {name: each for name, each in inputs.items() if name in "qkv"}, dim=2)
        with torch.no_grad():
            accel.parallel.context_attention(ctx, part["q"], part["k"], part["v"], method=method)

    case = Case(length=16, key_heads=2)
    inputs = make_inputs(case)
    own = 2 * case.batch * case.key_heads * case.length // 4 * case.head_dim
    for method, times in (("gather", 1), ("ring", 3)):
        sent.clear()
        ranks.run(lambda ctx, method=method: rank(ctx, method), 4, default_group=True)
        assert sent == [own] * times * 4


@pytest.mark.parametrize("masked", ["causal", "all", "mask"])
def test_kernels_agree_on_outputs_sums_and_gradients(masked: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(2, 3, 6, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    seen = torch.rand(2, 1, 6, 6, generator=generator) < 0.5
    seen |= torch.eye(6, dtype=torch.bool)
    mask = Masked(masked == "causal", seen if masked == "mask" else None)
    kernel = kernel_of(q, k, v, mask)
    assert kernel is not WRITTEN_OUT
    fused = kernel.forward(q, k, v, mask, 0.3)
    written = WRITTEN_OUT.forward(q, k, v, mask, 0.3)
    torch.testing.assert_close(fused.out, written.out, rtol=0, atol=1e-13)
    torch.testing.assert_close(fused.lse, written.lse, rtol=0, atol=1e-13)
    fused = fused._replace(lse=fused.lse.contiguous())
    for mine, theirs in zip(
        kernel.backward(grad, q, k, v, fused, mask, 0.3),
        WRITTEN_OUT.backward(grad, q, k, v, written, mask, 0.3),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_a_row_that_sees_no_key_of_a_block_has_no_weight_in_the_merge() -> None:
    q = k = v = torch.ones(1, 1, 2, 8)
    mask = Masked(causal=False, mask=torch.tensor([[[[True, False], [False, False]]]]))
    for kernel in (kernel_of(q, k, v, mask), WRITTEN_OUT):
        out, lse, _ = kernel.forward(q, k, v, mask, 1.0)
        assert out.isfinite().all()
        assert math.isfinite(lse[0, 0, 0])
        assert lse[0, 0, 1] < -1e29


@pytest.mark.parametrize("device", ["meta"])
def test_devices_without_a_fused_kernel_write_scores_out(device: str) -> None:
    q = torch.empty(1, 2, 4, 8, device=device)
    assert kernel_of(q, q, q, Masked(causal=True)) is _kernels.WRITTEN_OUT


@pytest.mark.parametrize("causal", [True, False])
def test_one_rank_takes_keys_from_a_cache(causal: bool) -> None:
    inputs = make_inputs(Case(causal=causal))
    whole = alone(Case(causal=causal), inputs)["out"]
    last = accel.parallel.context_attention(
        accel.single(), inputs["q"][:, :, -3:], inputs["k"], inputs["v"], causal=causal
    )
    assert (last - whole[:, :, -3:]).abs().max().item() < 1e-12


def test_a_module_that_holds_a_context_can_be_copied(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        return copy.deepcopy([ctx])[0] is ctx

    assert all(ranks.run(rank, 2, default_group=True))


def test_tensors_of_the_meta_device_have_the_shape_of_the_output() -> None:
    q, k, v = (each.to("meta") for each in _qkv(v=(2, 2, 6, 5)))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which the meta device does not know
        assert accel.parallel.context_attention(accel.single(), q, k, v).shape == (2, 4, 6, 5)


class Attending(nn.Module):
    """A block that attends along cp itself, and a pair of layers that tp divides."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        mixed = accel.parallel.context_attention(self.ctx, heads, heads, heads).transpose(1, 2).flatten(2)
        return self.down(self.up(mixed).relu()) + x


def test_a_plan_is_found_for_a_model_that_attends_along_cp_itself(ranks: Simulator) -> None:
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Attending(accel.single()).double()
    expected = made(x).detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2,tp=2")
        model = Attending(ctx).double()
        _ = model.load_state_dict(made.state_dict())
        part = accel.parallel.split_sequence(ctx, {"x": x, "out": expected})
        model = accel.prepare_model(ctx, model, example=x)
        assert accel.unwrap_model(model).up.weight.to_local().shape == (16, 8)
        return float((model(part["x"]) - part["out"]).detach().abs().max())

    assert max(ranks.run(rank, 4, default_group=True)) < 1e-12


class DividedHeads(nn.Module):
    """Attends along cp with heads that ranks along tp divide."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(2, (4, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return self.o(accel.parallel.context_attention(self.ctx, *heads).transpose(1, 2).flatten(2))


def test_divided_heads_of_a_plan_attend_in_the_order_of_the_sequence(ranks: Simulator) -> None:
    """The first call of a mesh with cp is proved, and later ones compute with other parts."""
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = DividedHeads(accel.single()).double()
    expected = made(x).detach()
    plan = accel.parallel.Plan(tensor={"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"})

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2,tp=2")
        model = DividedHeads(ctx).double()
        _ = model.load_state_dict(made.state_dict())
        part = accel.parallel.split_sequence(ctx, {"x": x, "out": expected})
        model = accel.prepare_model(ctx, model, plan=plan)
        return max(float((model(part["x"]) - part["out"]).detach().abs().nan_to_num(1).max()) for _ in range(3))

    assert max(ranks.run(rank, 4, default_group=True)) < 1e-12


class OfPositions(nn.Module):
    """Computes with positions one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def test_ranks_share_the_tokens_of_a_model_without_attention(ranks: Simulator) -> None:
    plan = accel.parallel.Plan(tensor={"up": "colwise", "down": "rowwise"}, sequence=True)
    made = OfPositions()
    x = torch.randn(2, 8, 8)
    expected = made(x).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2,tp=2")
        part = accel.parallel.split_sequence(ctx, {"x": x, "out": expected})
        model = accel.prepare_model(ctx, copy.deepcopy(made), plan=plan)
        torch.testing.assert_close(model(part["x"]), part["out"])

    ranks.run(rank, 4, default_group=True)


def _qkv(q: tuple[int, ...] = (2, 4, 6, 8), k: tuple[int, ...] = (2, 2, 6, 8), v: tuple[int, ...] | None = None) -> Any:
    return torch.zeros(q), torch.zeros(k), torch.zeros(v or k)


@pytest.mark.parametrize(
    ("tensors", "options", "problem"),
    [
        (_qkv(q=(4, 6, 8)), {}, "do not fit together"),
        (_qkv(k=(2, 3, 6, 8)), {}, "do not fit together"),
        (_qkv(k=(2, 0, 6, 8)), {}, "do not fit together"),
        (_qkv(k=(1, 2, 6, 8)), {}, "do not fit together"),
        (_qkv(k=(2, 2, 6, 4)), {}, "do not fit together"),
        (_qkv(v=(2, 1, 6, 8)), {}, "do not fit together"),
        (_qkv(k=(2, 2, 9, 8)), {}, "use_cache=False"),
        ((*_qkv()[:2], torch.zeros(2, 2, 6, 8, dtype=torch.float64)), {}, "q, k and v differ"),
        (_qkv(q=(2, 4, 5, 8), k=(2, 2, 5, 8)), {}, "no rank of cp has"),
        (_qkv(), {"documents": torch.zeros(2, 5, dtype=torch.int64)}, "the documents do not fit"),
        (_qkv(), {"documents": torch.zeros(2, 6)}, "the documents do not fit"),
        (_qkv(), {"method": "rings"}, "unknown method"),
        (_qkv(q=(2, 3, 6, 8), k=(2, 3, 6, 8)), {"method": "heads"}, "'gather' or 'ring'"),
    ],
)
def test_refused_before_anything_is_sent(ranks: Simulator, tensors: Any, options: Any, problem: str) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="cp=2")
        with pytest.raises(ConfigError) as caught:
            accel.parallel.context_attention(ctx, *tensors, **options)
        return str(caught.value)

    assert all(problem in said for said in ranks.run(rank, 2, default_group=True))
