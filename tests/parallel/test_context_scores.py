# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps and sinks in attention over a sequence that ranks share, against one written out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import accel
from accel.errors import ConfigError
from accel.testing import Simulator


class Scores(NamedTuple):
    """A case: its sizes, and what its attention does beside the softmax."""

    length: int = 24
    heads: int = 4
    key_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_documents: bool = False
    causal: bool = True
    seed: int = 0


def make_inputs(case: Scores) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys = (2, case.key_heads, case.length, 4)
    starts = torch.rand(2, case.length, generator=generator) < 0.2
    return {
        "q": normal(2, case.heads, case.length, 4) * 2,
        "k": normal(*keys) * 2,
        "v": normal(*keys),
        "grad": normal(2, case.heads, case.length, 4),
        "sinks": normal(case.heads),
        "documents": starts.cumsum(1),
    }


def written_out(case: Scores, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and gradients, position by position."""
    q, k, v, sinks = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks"))
    times = case.heads // case.key_heads
    rows = list[Tensor]()
    for head in range(case.heads):
        for at in range(case.length):
            window = case.length if case.window is None else case.window
            begin = max(0, at - window + 1)
            end = at + 1 if case.causal else min(case.length, at + window)
            scores = (k[:, head // times, begin:end] * q[:, head, at : at + 1]).sum(-1) / 2
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if case.has_documents:
                same = inputs["documents"][:, begin:end] == inputs["documents"][:, at : at + 1]
                scores = scores.masked_fill(~same, -torch.inf)
            weights = scores.exp()
            total = weights.sum(1, keepdim=True) + (sinks[head].exp() if case.has_sinks else 0)
            rows.append(((weights / total)[..., None] * v[:, head // times, begin:end]).sum(1))
    out = torch.stack(rows, 1).unflatten(1, (case.heads, case.length))
    out.backward(inputs["grad"])
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "sinks": sinks.grad}
    return {name: each for name, each in found.items() if each is not None}


def difference(ranks: Simulator, size: int, case: Scores, method: Any) -> float:
    """The largest difference of all ranks' outputs and gradients; that of the sinks is a sum over ranks."""
    inputs = make_inputs(case)
    expected = written_out(case, inputs)

    def rank(ctx: accel.DistContext) -> tuple[float, Tensor]:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        names = ("q", "k", "v", "grad")
        part = accel.parallel.split_sequence(ctx, {name: inputs[name] for name in names}, dim=2)
        documents = accel.parallel.split_sequence(ctx, {"documents": inputs["documents"]})["documents"]
        own = accel.parallel.split_sequence(
            ctx, {name: expected[name] for name in ("out", "q", "k", "v")}, dim=2, shift=()
        )
        q, k, v = (part[name].clone().requires_grad_() for name in "qkv")
        sinks = inputs["sinks"].clone().requires_grad_()
        out = accel.parallel.context_attention(
            ctx,
            q,
            k,
            v,
            causal=case.causal,
            documents=documents if case.has_documents else None,
            window=case.window,
            softcap=case.softcap,
            sinks=sinks if case.has_sinks else None,
            method=method,
        )
        out.backward(part["grad"])
        got = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
        off = max((each - own[name]).abs().max().item() for name, each in got.items() if each is not None)
        return off, torch.zeros(case.heads) if sinks.grad is None else sinks.grad

    found = ranks.run(rank, size, default_group=True)
    worst = max(off for off, _ in found)
    if case.has_sinks:
        total = torch.stack([each for _, each in found]).sum(0)
        worst = max(worst, (total - expected["sinks"]).abs().max().item())
    return worst


CASES = (
    Scores(window=1),
    Scores(window=5),
    Scores(window=23, has_documents=True),
    Scores(softcap=1.5),
    Scores(softcap=1.5, causal=False),
    Scores(window=5, causal=False),
    Scores(window=9, causal=False, has_documents=True, has_sinks=True),
    Scores(has_sinks=True, window=4),
    Scores(has_sinks=True, has_documents=True, causal=False),
    Scores(window=6, softcap=2.0, has_sinks=True, has_documents=True, key_heads=4),
)


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_attention_that_is_written_out(ranks: Simulator, size: int, method: str) -> None:
    for case in CASES:
        assert difference(ranks, size, case, method) < 1e-11, case


@settings(max_examples=15)
@given(
    st.sampled_from(["gather", "heads"]),
    st.builds(
        Scores,
        length=st.sampled_from([4, 8, 12]),
        heads=st.just(4),
        key_heads=st.sampled_from([1, 2, 4]),
        causal=st.booleans(),
        window=st.none() | st.integers(1, 12),
        softcap=st.none() | st.floats(0.2, 8.0),
        has_sinks=st.booleans(),
        has_documents=st.booleans(),
        seed=st.integers(0, 99),
    ),
)
def test_equals_attention_that_is_written_out_for_drawn_cases(ranks: Simulator, method: str, case: Scores) -> None:
    assert difference(ranks, 2, case, method) < 1e-11


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 4, "method": "ring"}, 'expected method "gather" or "heads", got window'),
        ({"softcap": 2.0, "method": "ring"}, "got softcap"),
        ({"window": 0}, "1 position or more"),
        ({"softcap": 0.0}, "above 0"),
        ({"sinks": torch.zeros(3)}, r"expected \[4\], got \[3\]"),
    ],
)
def test_what_an_attention_does_not_have_is_refused(ranks: Simulator, options: dict[str, Any], words: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        q = torch.zeros(1, 4, 6, 8)
        with pytest.raises(ConfigError, match=words):
            accel.parallel.context_attention(ctx, q, q, q, **options)

    ranks.run(rank, 2, default_group=True)
