# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks and masks in attention over a sequence that ranks share, against one written out."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import accel
from accel.comm import exchanged
from accel.errors import ConfigError
from accel.parallel.axes.context import _attention
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
    has_ignored: bool = False
    mask: str = ""  # "bool", "scores", "mask_mod" or "score_mod"
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
        "ignored": torch.rand(2, case.length, generator=generator) < 0.3,
        "mask": normal(1, case.heads, case.length, case.length),
    }


@functools.cache
def written_out(case: Scores) -> dict[str, Tensor]:
    """The output and gradients, position by position."""
    inputs = make_inputs(case)
    q, k, v, sinks, mask = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks", "mask"))
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
            if case.mask in ("scores", "score_mod"):
                scores = scores + mask[:, head, at, begin:end]
            if case.mask in ("bool", "mask_mod"):
                scores = scores.masked_fill(mask[:, head, at, begin:end] < -0.5, -torch.inf)
            if case.has_ignored:
                scores = scores.masked_fill(inputs["ignored"][:, begin:end], -torch.inf)
            if case.has_documents:
                same = inputs["documents"][:, begin:end] == inputs["documents"][:, at : at + 1]
                scores = scores.masked_fill(~same, -torch.inf)
            weights = scores.exp()
            total = weights.sum(1, keepdim=True) + (sinks[head].exp() if case.has_sinks else 0)
            weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0)  # none sees: 0
            rows.append((weights[..., None] * v[:, head // times, begin:end]).sum(1))
    out = torch.stack(rows, 1).unflatten(1, (case.heads, case.length))
    out.backward(inputs["grad"])
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "sinks": sinks.grad, "mask": mask.grad}
    return {name: each for name, each in found.items() if each is not None}


def difference(ranks: Simulator, size: int, case: Scores, method: Any) -> float:
    """The largest difference of all ranks' outputs and gradients; that of the sinks is a sum over ranks."""
    inputs = make_inputs(case)
    expected = written_out(case)

    def rank(ctx: accel.DistContext) -> tuple[float, Tensor]:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        names = ("q", "k", "v", "grad")
        part = accel.parallel.split_sequence(ctx, {name: inputs[name] for name in names}, dim=2)
        of_tokens = {name: inputs[name] for name in ("documents", "ignored")}
        of_tokens = accel.parallel.split_sequence(ctx, of_tokens)
        compared = {name: expected[name] for name in ("out", "q", "k", "v", "mask") if name in expected}
        own = accel.parallel.split_sequence(ctx, compared, dim=2)
        q, k, v = (part[name].clone().requires_grad_() for name in "qkv")
        mask = accel.parallel.split_sequence(ctx, {"mask": inputs["mask"]}, dim=2)["mask"].requires_grad_()
        sinks = inputs["sinks"].clone().requires_grad_()
        whole = inputs["mask"].clone().requires_grad_()
        out = accel.parallel.context_attention(
            ctx,
            q,
            k,
            v,
            causal=case.causal,
            documents=of_tokens["documents"] if case.has_documents else None,
            key_padding_mask=of_tokens["ignored"] if case.has_ignored else None,
            attn_mask={"scores": mask, "bool": mask > -0.5}.get(case.mask),
            score_mod=(lambda score, b, h, i, j: score + whole[0, h, i, j]) if case.mask == "score_mod" else None,
            mask_mod=(lambda b, h, i, j: whole[0, h, i, j] > -0.5) if case.mask == "mask_mod" else None,
            window=case.window,
            softcap=case.softcap,
            sinks=sinks if case.has_sinks else None,
            method=method,
        )
        out.backward(part["grad"])
        got = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "mask": mask.grad}
        if whole.grad is not None:
            got["mask"] = accel.parallel.split_sequence(ctx, {"mask": whole.grad}, dim=2)["mask"]
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
    Scores(has_ignored=True),
    Scores(has_ignored=True, causal=False, has_documents=True, window=9),
)
MASKS = (
    Scores(mask="scores"),
    Scores(mask="scores", causal=False),
    Scores(mask="scores", window=7, softcap=2.0, has_documents=True, has_ignored=True, has_sinks=True),
    Scores(mask="bool"),
    Scores(mask="bool", causal=False, key_heads=1),
    Scores(mask="score_mod"),
    Scores(mask="score_mod", causal=False, window=7, softcap=2.0, has_documents=True),
    Scores(mask="mask_mod"),
    Scores(mask="mask_mod", causal=False, has_sinks=True),
)


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_attention_that_is_written_out(ranks: Simulator, size: int, method: str) -> None:
    for case in CASES + MASKS if method == "gather" else CASES:
        assert difference(ranks, size, case, method) < 1e-11, case


def test_tiles_of_a_ring_cover_the_window(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "_TILE", 1)
    for case in CASES:
        if case.window is not None:
            assert difference(ranks, 3, case, "ring") < 1e-11, case


def test_blocks_of_a_window_are_computed_again_in_a_checkpoint_too(ranks: Simulator) -> None:
    whole = torch.randn(1, 2, 24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = accel.parallel.split_sequence(ctx, {"x": whole}, dim=2)["x"]

        def attention(x: Tensor) -> Tensor:
            return accel.parallel.context_attention(ctx, x, x, x.sin(), window=5, method="ring")

        def recomputed(x: Tensor) -> Tensor:
            return checkpoint(attention, x, use_reentrant=False)

        gradients: list[Tensor] = []
        for each in (attention, recomputed):
            x = own.clone().requires_grad_()
            each(x).square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
        return gradients

    for one, other in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("window", "causal", "messages"),
    [
        # 4 ranks, pieces of 3 positions: pairs of ranks, by the positions whose keys travel from one to the other
        (1, True, {}),
        (2, True, {(0, 1): 1, (1, 2): 1, (2, 3): 1, (1, 0): 1, (2, 1): 1, (3, 2): 1}),
        (4, True, {(0, 1): 3, (1, 2): 3, (2, 3): 3, (1, 0): 3, (2, 1): 3, (3, 2): 3}),
        (2, False, {(0, 1): 2, (1, 2): 2, (2, 3): 2, (1, 0): 2, (2, 1): 2, (3, 2): 2}),
    ],
)
def test_no_key_travels_that_a_window_does_not_need(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, window: int, causal: bool, messages: dict[tuple[int, int], int]
) -> None:
    sent: list[tuple[tuple[int, int], int]] = []

    def counted(rows: Tensor, to: list[int], back: list[int], group: Any) -> Tensor:
        messages = [((group.rank(), other), count) for other, count in enumerate(to) if other != group.rank() and count]
        sent.extend(messages)
        return exchanged(rows, to, back, group)

    monkeypatch.setattr(_attention, "exchanged", counted)
    whole = torch.zeros(1, 2, 24, 4)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=4")
        part = accel.parallel.split_sequence(ctx, {"x": whole}, dim=2)["x"].requires_grad_()
        out = accel.parallel.context_attention(ctx, part, part, part, window=window, causal=causal, method="ring")
        out.sum().backward()

    ranks.run(rank, 4, default_group=True)
    assert sorted(sent) == sorted(messages.items())


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
@pytest.mark.parametrize("size", [2, 4])
def test_queries_of_another_sequence_see_the_keys_of_all_ranks(ranks: Simulator, size: int, method: Any) -> None:
    """Cross-attention: 16 queries, 24 keys of which some are padding."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 4, 16, 4), "grad": (2, 4, 16, 4), "k": (2, 2, 24, 4), "v": (2, 2, 24, 4)}
    given = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    ignored = torch.arange(24) >= torch.tensor([[24], [17]])
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    keys, values = (each.repeat_interleave(2, 1) for each in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, ~ignored[:, None, None])
    out.backward(given["grad"])
    expected = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=f"cp={size}")

        def cut(name: str, whole: Any) -> Tensor:
            dim = 1 if name == "ignored" else 2
            return accel.parallel.split_sequence(ctx, {name: whole}, dim=dim)[name]

        q, k, v = (cut(name, given[name]).clone().requires_grad_() for name in "qkv")
        padding = cut("ignored", ignored)
        facts: Any = {"causal": False, "key_padding_mask": padding, "method": method}
        out = accel.parallel.context_attention(ctx, q, k, v, **facts)
        out.backward(cut("grad", given["grad"]))
        got = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
        with assert_raises(ConfigError, problem="a window of two sequences"):
            accel.parallel.context_attention(ctx, q, k, v, window=3, **facts)
        differences = [each - cut(name, expected[name]) for name, each in got.items() if each is not None]
        return max(each.abs().max().item() for each in differences)

    assert max(ranks.run(rank, size, default_group=True)) < 1e-12


@settings(max_examples=share(0.3))
@given(
    st.sampled_from(["gather", "ring", "heads"]),
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
        has_ignored=st.booleans(),
        seed=st.integers(0, 99),
    ),
)
def test_equals_attention_that_is_written_out_for_drawn_cases(ranks: Simulator, method: str, case: Scores) -> None:
    assert difference(ranks, 2, case, method) < 1e-11


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"attn_mask": torch.zeros(6, 12), "method": "ring"}, {"fix": r'Use Plan\(context="gather"\)'}),
        ({"mask_mod": lambda b, h, i, j: i < j, "method": "heads"}, {"got": "mask_mod with the method 'heads'"}),
        ({"attn_mask": torch.zeros(6, 6)}, {"expected": r"expands to \[1, 4, 6, 12\]"}),
        ({"attn_mask": torch.zeros(6, 12, dtype=torch.int64)}, {"fix": r"mask\.bool\(\)"}),
        ({"key_padding_mask": torch.zeros(1, 6)}, {"expected": "True for a key to ignore"}),
        ({"window": 0}, {"expected": "1 position or more"}),
        ({"softcap": 0.0}, {"expected": "above 0"}),
        ({"sinks": torch.zeros(3)}, {"expected": r"\[4\]", "got": r"\[3\]"}),
    ],
)
def test_what_an_attention_does_not_have_is_refused(
    ranks: Simulator, options: dict[str, Any], fields: dict[str, str]
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        q = torch.zeros(1, 4, 6, 8)
        with assert_raises(ConfigError, **fields):
            accel.parallel.context_attention(ctx, q, q, q, **options)

    ranks.run(rank, 2, default_group=True)
