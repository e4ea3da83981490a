# SPDX-License-Identifier: Apache-2.0
"""Tokens that are routed to experts on other ranks and back, and the balance loss of all ranks."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn

import accel
from accel.errors import ConfigError
from accel.testing import simulate

WIDTH = 3


def experts_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(count, 4, WIDTH, generator=generator, dtype=torch.float64)
    return up, torch.randn(count, WIDTH, 4, generator=generator, dtype=torch.float64)


def tokens_of(count: int, experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, torch.randn(count, experts, generator=generator, dtype=torch.float64)


def dense(tokens: Tensor, logits: Tensor, k: int, up: Tensor, down: Tensor) -> Tensor:
    """Every expert of every token, masked: the plainest mixture of experts."""
    routing = accel.parallel.route_tokens(logits, k)
    gates = torch.zeros_like(logits).scatter(1, routing.indices, routing.weights)
    outputs = torch.einsum("ewh,nhe->nwe", down, torch.einsum("ehw,nw->nhe", up, tokens).tanh())
    return (outputs * gates[:, None, :]).sum(-1)


def dispatched(tokens: Tensor, logits: Tensor, k: int, up: Tensor, down: Tensor, group: object = None) -> Tensor:
    routing = accel.parallel.route_tokens(logits, k)
    sent = accel.parallel.dispatch_tokens(tokens, routing.indices, experts=logits.shape[1], group=group)
    parts = [
        (rows @ one.T).tanh() @ other.T
        for rows, one, other in zip(sent.rows.split(list(sent.counts)), up, down, strict=True)
    ]
    return accel.parallel.combine_tokens(torch.cat(parts), sent, routing.weights)


def gradients_of(outputs: Tensor, *leaves: Tensor) -> list[Tensor]:
    loss = (outputs * torch.arange(1.0, WIDTH + 1, dtype=outputs.dtype)).square().sum()
    return list(torch.autograd.grad(loss, leaves))


@settings(max_examples=share(0.16))
@given(
    ranks=st.sampled_from([1, 2, 4]),
    own=st.integers(1, 2),
    counts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    data=st.data(),
)
def test_outputs_and_gradients_are_those_of_all_experts_in_one_place(ranks, own, counts, data):
    experts = ranks * own
    k = data.draw(st.integers(1, experts))
    counts = counts[:ranks]
    tokens, logits = tokens_of(sum(counts), experts)
    up, down = experts_of(experts)
    wanted = [each.clone().requires_grad_() for each in (tokens, logits, up, down)]
    expected = dense(wanted[0], wanted[1], k, wanted[2], wanted[3])
    grads = gradients_of(expected, *wanted)

    def run(ctx: accel.DistContext) -> tuple[Tensor, list[Tensor]]:
        group = accel.group_of(ctx, "dp")
        leaves = [each.split(counts)[ctx.rank].clone().requires_grad_() for each in (tokens, logits)]
        leaves += [each.split(own)[ctx.rank].clone().requires_grad_() for each in (up, down)]
        outputs = dispatched(leaves[0], leaves[1], k, leaves[2], leaves[3], group)
        return outputs.detach(), gradients_of(outputs, *leaves)

    outputs, found = zip(*simulate(run, ranks), strict=True)
    torch.testing.assert_close(torch.cat(outputs), expected.detach(), rtol=0, atol=1e-12)
    for one, grad in zip(zip(*found, strict=True), grads, strict=True):
        torch.testing.assert_close(torch.cat(one), grad, rtol=0, atol=1e-11)


def test_each_rank_gets_the_tokens_of_its_experts_and_of_no_other():
    # rank 0 has 3 tokens, rank 1 none; expert 3 is never chosen
    index = [torch.tensor([[2, 0], [2, 1], [0, 2]]), torch.empty(0, 2, dtype=torch.long)]

    def run(ctx: accel.DistContext) -> tuple[list[float], tuple[int, ...], list[int]]:
        tokens = torch.tensor([[1.0], [2.0], [3.0]])[: len(index[ctx.rank])]
        sent = accel.parallel.dispatch_tokens(tokens, index[ctx.rank], experts=4, group=accel.group_of(ctx, "dp"))
        return sent.rows.flatten().tolist(), tuple(sent.counts), sent.experts.tolist()

    assert simulate(run, 2) == [
        ([1.0, 3.0, 2.0], (2, 1), [0, 0, 1]),
        ([1.0, 2.0, 3.0], (3, 0), [0, 0, 0]),
    ]


def test_outputs_have_the_dtype_of_the_experts():
    sent = accel.parallel.dispatch_tokens(torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([[0], [1]]), experts=2)
    assert accel.parallel.combine_tokens(sent.rows, sent, torch.ones(2, 1)).dtype == torch.bfloat16
    routing = accel.parallel.route_tokens(torch.zeros(2, 4, dtype=torch.bfloat16), 2)
    assert (routing.weights.dtype, routing.probabilities.dtype) == (torch.bfloat16, torch.float32)


def test_weights_of_a_token_sum_to_1_or_are_its_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    routing = accel.parallel.route_tokens(logits, 2)
    assert routing.indices.tolist() == [[2, 1]]
    assert float(routing.weights.sum()) == pytest.approx(1.0, abs=1e-15)
    as_they_are = accel.parallel.route_tokens(logits, 2, normalize=False)
    assert torch.equal(as_they_are.weights, logits.softmax(-1)[:, [2, 1]])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: accel.parallel.route_tokens(torch.zeros(3, 2), 3), "k=3"),
        (lambda: accel.parallel.route_tokens(torch.zeros(3), 1), r"shape \[3\]"),
        (
            lambda: accel.parallel.dispatch_tokens(torch.zeros(3, 2), torch.zeros(2, 1).long(), experts=2),
            r"shape \[2, 1\]",
        ),
        (lambda: accel.parallel.dispatch_tokens(torch.zeros(3, 2), torch.zeros(3, 1), experts=2), "torch.float32"),
        (lambda: accel.parallel.balance_loss(accel.single(), torch.zeros(3, 2), torch.zeros(2, 1).long()), r"\[2, 1\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, told):
    with assert_raises(ConfigError, got=told):
        call()


def test_outputs_of_other_rows_are_refused():
    sent = accel.parallel.dispatch_tokens(torch.zeros(3, 2), torch.zeros(3, 1).long(), experts=2)
    with assert_raises(ConfigError, expected="3 rows, and 3 weights"):
        _ = accel.parallel.combine_tokens(sent.rows[:2], sent, torch.ones(3, 1))


def test_experts_that_ranks_cannot_share_evenly_are_refused():
    def run(ctx: accel.DistContext) -> None:
        group = accel.group_of(ctx, "dp")
        with assert_raises(ConfigError, expected="a multiple of 2", got="3 experts"):
            _ = accel.parallel.dispatch_tokens(torch.zeros(1, 2), torch.zeros(1, 1).long(), experts=3, group=group)

    _ = simulate(run, 2)


@settings(max_examples=share(0.12))
@given(st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any), st.booleans())
def test_the_balance_loss_and_its_gradients_are_those_of_one_process(counts, masked):
    experts, k = 4, 2
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(sum(counts), experts, generator=generator, dtype=torch.float64)
    mask = (torch.rand(sum(counts), generator=generator) < 0.7) if masked else None
    weights = [float(1 + at) for at in range(4)]  # of the ranks' losses, as `backward(weight=)` has them

    def loss_of(ctx: accel.DistContext, logits: Tensor, mask: Tensor | None) -> Tensor:
        routing = accel.parallel.route_tokens(logits, k)
        return accel.parallel.balance_loss(ctx, routing.probabilities, routing.indices, mask=mask)

    whole = logits.clone().requires_grad_()
    expected = loss_of(accel.single(), whole, mask)
    (wanted,) = torch.autograd.grad(expected * sum(weights), whole)

    def run(ctx: accel.DistContext) -> tuple[float, Tensor]:
        own = logits.split(counts)[ctx.rank].clone().requires_grad_()
        loss = loss_of(ctx, own, None if mask is None else mask.split(counts)[ctx.rank])
        (loss * weights[ctx.rank]).backward()
        assert own.grad is not None
        return float(loss.detach()), own.grad

    losses, grads = zip(*simulate(run, 4), strict=True)
    assert losses == pytest.approx([float(expected.detach())] * 4, abs=1e-13)
    torch.testing.assert_close(torch.cat(grads), wanted, rtol=0, atol=1e-12)


def test_the_mean_of_the_ranks_balance_losses_would_be_another_number():
    logits = [torch.tensor([[4.0, 0.0]] * 2), torch.tensor([[0.0, 4.0]] * 2)]  # each rank busies one expert alone

    def run(ctx: accel.DistContext) -> tuple[float, float]:
        routing = accel.parallel.route_tokens(logits[ctx.rank], 1)
        alone = accel.parallel.balance_loss(accel.single(), routing.probabilities, routing.indices)
        return float(alone), float(accel.parallel.balance_loss(ctx, routing.probabilities, routing.indices))

    for alone, together in simulate(run, 2):
        assert alone == pytest.approx(1.964, abs=1e-3)
        assert together == pytest.approx(1.0)


def test_ranks_along_tp_count_their_common_tokens_once():
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def run(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2")
        routing = accel.parallel.route_tokens(logits[ctx.axis("dp").rank], 2)
        return float(accel.parallel.balance_loss(ctx, routing.probabilities, routing.indices))

    routing = accel.parallel.route_tokens(logits.flatten(0, 1), 2)
    expected = float(accel.parallel.balance_loss(accel.single(), routing.probabilities, routing.indices))
    assert simulate(run, 4, default_group=True) == pytest.approx([expected] * 4, abs=1e-13)


def test_no_token_anywhere_is_a_loss_of_0():
    loss = accel.parallel.balance_loss(accel.single(), torch.zeros(0, 2), torch.zeros(0, 1).long())
    assert float(loss) == 0.0


def test_a_rank_without_tokens_takes_part_in_the_backward():
    """Its outputs are empty, and other ranks wait for it in the backward's all-to-all."""

    def run(ctx: accel.DistContext) -> float:
        up = nn.Parameter(torch.ones(1, WIDTH))
        tokens = torch.ones(2 if ctx.rank == 0 else 0, WIDTH)
        index = torch.ones(len(tokens), 1).long()  # all go to rank 1
        sent = accel.parallel.dispatch_tokens(tokens, index, experts=2, group=accel.group_of(ctx, "dp"))
        accel.parallel.combine_tokens(sent.rows * up, sent, torch.ones(len(tokens), 1)).sum().backward()
        return 0.0 if up.grad is None else float(up.grad.sum())

    assert simulate(run, 2) == [0.0, 2.0 * WIDTH]
