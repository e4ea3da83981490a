# SPDX-License-Identifier: Apache-2.0
"""Losses of post-training: any split over ranks and micro-batches is one gradient; masks; values by plain formulas."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn

import accel
from accel import post_training as post
from accel.errors import ConfigError
from accel.testing import Simulator
from accel.training import parts

ONE = accel.single("cpu")
ROWS, TOKENS = 6, 8
AVERAGES = ["token", "sequence", 5]


def assert_near(found: Any, expected: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def drawn(seed: int) -> dict[str, Tensor]:
    """Numbers of rows of two documents and padding; the mask leaves out whole documents, too."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ends = torch.randint(1, TOKENS - 1, (ROWS, 1), generator=generator)
    documents = (torch.arange(TOKENS) >= ends).long() + (torch.arange(TOKENS) >= TOKENS - 1)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.5) & (documents < 2)
    mask[0] = False
    names = ("old", "sampler", "reference", "advantages", "returns")
    near = {name: numbers(ROWS, TOKENS) / 4 for name in names}
    return {"mask": mask, "documents": documents, "at": torch.arange(ROWS * TOKENS).view(ROWS, TOKENS), **near}


class Table(nn.Module):
    """A number for each token, one that all tokens share, and attention."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.each = nn.Parameter(torch.linspace(-1, 0.5, ROWS * TOKENS, dtype=torch.float64))
        self.all = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, at: Tensor) -> Tensor:
        x = self.each[at] * self.all.exp()
        heads = x[:, None, :, None]
        return x + accel.parallel.context_attention(self.ctx, heads, heads, heads)[:, 0, :, 0]


def sft(ctx: accel.DistContext, new: Tensor, data: dict[str, Tensor], **options: Any) -> post.LossSum:
    return post.weighted_sum(ctx, -new, data["mask"], **options)


def policy(ctx: accel.DistContext, new: Tensor, data: dict[str, Tensor], **options: Any) -> post.LossSum:
    given = {"sampler": data["sampler"], "reference": data["reference"], "beta": 0.3, "cap": 1.2}
    return post.policy_loss(ctx, new, data["old"], data["advantages"], data["mask"], **given, **options)


def sequence_policy(ctx: accel.DistContext, new: Tensor, data: dict[str, Tensor], **options: Any) -> post.LossSum:
    return policy(ctx, new, data, ratio="sequence", **options)


def values(ctx: accel.DistContext, new: Tensor, data: dict[str, Tensor], **options: Any) -> post.LossSum:
    return post.value_loss(ctx, new, data["old"], data["returns"], data["mask"], **options)


def pairs(ctx: accel.DistContext, new: Tensor, data: dict[str, Tensor], **_: Any) -> post.LossSum:
    """Each row beside one of the others that no parameter moves."""
    sums = post.sequence_sums(ctx, new, data["mask"])
    return post.dpo_loss(sums, 0.1 * sums, sums.detach() - 0.3, sums.detach() - 0.1, beta=0.7)


LOSSES: list[Callable[..., post.LossSum]] = [sft, policy, sequence_policy, values, pairs]


def step(
    ctx: accel.DistContext, loss: Callable[..., post.LossSum], split: Any, seed: int, average: Any, packed: bool
) -> Any:
    """Take a step of SGD on rows that `split` divides: a list of micro-batches for each data-parallel rank."""
    table = Table(ctx)
    model, optimizer = accel.prepare(ctx, table, torch.optim.SGD(table.parameters(), lr=1.0))
    own = split[ctx.data_parallel[0]]
    data = drawn(seed)
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation(steps=len(own))
    for rows in own:
        batch = {name: each[list(rows)] for name, each in data.items()}
        batch = accel.parallel.split_sequence(ctx, batch)
        documents = batch["documents"] if packed else None
        accum = accum.next()
        with parts.accumulate(ctx, accum, model):
            found = loss(ctx, model(batch["at"]), batch, documents=documents, average=average)
            accum = parts.backward(ctx, found.mean, scaler, accum, weight=found.weight)
    assert parts.optimizer_step(ctx, optimizer, scaler, accum).stepped
    return [each.detach().clone() for each in table.parameters()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda each: each.__name__)
def test_any_split_over_ranks_and_micro_batches_is_one_gradient(
    ranks: Simulator, loss: Callable[..., post.LossSum]
) -> None:
    @settings(max_examples=share(0.3))
    @given(st.data())
    def law(data: st.DataObject) -> None:
        seed = data.draw(st.integers(0, 99))
        packed = data.draw(st.booleans())
        average = data.draw(st.sampled_from(AVERAGES))
        expected = step(ONE, loss, [[range(ROWS)]], seed, average, packed)
        assert not torch.equal(expected[1], Table(ONE).all)
        mesh = data.draw(st.sampled_from(["dp=2", "cp=2", "dp=3", "dp=2,cp=2"]))
        world = 4 if "," in mesh else int(mesh[-1])
        groups = 1 if mesh == "cp=2" else int(mesh[3])
        micro = data.draw(st.integers(1, 3))
        places = data.draw(st.lists(st.integers(0, groups * micro - 1), min_size=ROWS, max_size=ROWS))
        split = [
            [[row for row, at in enumerate(places) if at == rank * micro + each] for each in range(micro)]
            for rank in range(groups)
        ]

        def run(ctx: accel.DistContext) -> Any:
            return step(accel.replace(ctx, mesh=mesh), loss, split, seed, average, packed)

        for found in ranks.run(run, world, default_group=True):
            assert_near(found, expected)

    law()


# Values by plain formulas

MASK = torch.tensor([[True, True, False, True], [False, True, True, False]])
NEW = torch.tensor([[-0.5, -1.0, -2.0, -0.1], [-3.0, -0.7, -0.2, -1.5]], dtype=torch.float64)
OLD = NEW + torch.tensor([[0.4, -0.6, 9.0, 0.1], [9.0, -0.1, 0.5, 9.0]], dtype=torch.float64)
GAINS = torch.tensor([1.5, -0.5], dtype=torch.float64)


def test_averages_are_those_of_tokens_sequences_and_a_constant_length() -> None:
    losses = torch.tensor([[1.0, 2.0, 100.0, 3.0], [100.0, 4.0, 8.0, 100.0]], dtype=torch.float64)
    by_token = post.weighted_sum(ONE, losses, MASK)
    assert_near((by_token.sum, by_token.weight), (double(18.0), double(5.0)))
    by_sequence = post.weighted_sum(ONE, losses, MASK, average="sequence")
    assert_near((by_sequence.mean, by_sequence.weight), (double(4.0), double(2.0)))
    constant = post.weighted_sum(ONE, losses, MASK, average=10)
    assert_near((constant.mean, constant.weight), (double(0.9), double(2.0)))
    cut = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    pieces = post.weighted_sum(ONE, losses, MASK, average="sequence", documents=cut)
    assert_near((pieces.mean, pieces.weight), (double((1.5 + 3 + 4 + 8) / 4), double(4.0)))
    factors = torch.tensor([[0.5, 0.25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    weighted = post.weighted_sum(ONE, losses, factors, average="sequence")
    assert_near((weighted.mean, weighted.weight), (double(1.0 / 0.75), double(1.0)))
    nothing = post.weighted_sum(ONE, losses, torch.zeros_like(MASK))
    assert float(nothing.mean) == float(nothing.weight) == 0.0


@pytest.mark.parametrize("average", AVERAGES)
def test_the_weight_is_known_before_the_losses(average: Any) -> None:
    for documents in (None, torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])):
        found = post.weighted_sum(ONE, NEW, MASK, average=average, documents=documents)
        assert_near(post.loss_weight(ONE, MASK, average=average, documents=documents).double(), found.weight)


def reference_policy(new: Tensor, ratio: str, sampler: Tensor | None, clip: tuple[float, float]) -> Tensor:
    """The mean over sequences of the mean over tokens, one token after the other."""
    rows: list[Tensor] = []
    for at in range(2):
        kept = MASK[at].nonzero().flatten().tolist()
        gaps = torch.stack([new[at, place] - OLD[at, place] for place in kept])
        if ratio == "sequence":
            own = gaps - gaps.detach()  # of tokens with factors of their own
            gaps = gaps.mean().expand(len(kept)) if sampler is None else gaps.mean().detach() + own
        ratios = gaps.exp()
        terms: list[Tensor] = []
        for each, place in zip(ratios, kept, strict=True):
            term = torch.minimum(each * GAINS[at], each.clamp(1 - clip[0], 1 + clip[1]) * GAINS[at])
            weight = 1.0 if sampler is None else min(2.0, float((OLD[at, place] - sampler[at, place]).exp()))
            terms.append(-weight * term)
        rows.append(torch.stack(terms).mean())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("clip", [(0.2, 0.28), (0.05, 0.05), (1.0, 9.0)])
def test_a_policy_loss_is_that_of_a_plain_loop(ratio: Any, sampled: bool, clip: tuple[float, float]) -> None:
    sampler = OLD + torch.linspace(-1.2, 1.2, 8, dtype=torch.float64).view(2, 4) if sampled else None
    new, twin = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    found = post.policy_loss(ONE, new, OLD, GAINS, MASK, clip=clip, ratio=ratio, sampler=sampler, average="sequence")
    expected = reference_policy(twin, ratio, sampler, clip)
    assert_near(found.mean, expected)
    assert_near(torch.autograd.grad(found.mean, new), torch.autograd.grad(expected, twin))
    assert float(found.tokens) == 5.0


@pytest.mark.parametrize("clip", [0.2, 5.0, 0.0, None])
def test_a_value_loss_is_half_of_the_larger_squared_error(clip: float | None) -> None:
    new, returns = NEW.clone().requires_grad_(), OLD + 0.27
    found = post.value_loss(ONE, new, OLD, returns, MASK, clip=clip)
    twin, terms = NEW.clone().requires_grad_(), list[Tensor]()
    for at in MASK.nonzero().tolist():
        value, before, wanted = (each[tuple(at)] for each in (twin, OLD, returns))
        near = value if clip is None else before + min(max(value - before, double(-clip)), double(clip))
        terms.append(max((value - wanted) ** 2, (near - wanted) ** 2) / 2)
    assert_near(found.mean, torch.stack(terms).mean())
    assert_near(torch.autograd.grad(found.mean, new), torch.autograd.grad(torch.stack(terms).mean(), twin))


def test_shares_of_a_policy_loss_count_tokens() -> None:
    sampler = OLD - torch.tensor([[1.0, 0.0, 9.0, 0.0], [9.0, 0.5, 0.0, 9.0]], dtype=torch.float64)
    reference = NEW - 0.5
    found = post.policy_loss(
        ONE, NEW, OLD, GAINS, MASK, clip=(0.2, 0.28), sampler=sampler, reference=reference, beta=0.1
    )
    # ratios exp(-0.4), exp(0.6), exp(-0.1) of a gain above 0, exp(0.1), exp(-0.5) of one below
    assert_near(found.clipped, double(2 / 5))
    assert_near(found.kl, double(-0.5).exp() - 0.5)
    assert_near(found.mismatch, double(1.5 / 5))
    assert_near(found.truncated, double(1 / 5))
    without = post.policy_loss(ONE, NEW, OLD, GAINS, MASK, clip=(0.2, 0.28), sampler=sampler)
    assert_near(found.sum - without.sum, 0.1 * 5 * found.kl)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -1e4, 1e4])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_tokens_that_do_not_count_may_have_any_number(bad: float, average: Any, ratio: Any) -> None:
    def losses(fill: float) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        new, values = (NEW.masked_fill(~MASK, fill).requires_grad_() for _ in range(2))
        old, other = OLD.masked_fill(~MASK, fill), (OLD - 0.2).masked_fill(~MASK, fill)
        policy = post.policy_loss(
            ONE, new, old, other, MASK, ratio=ratio, sampler=other, reference=other, beta=0.1, average=average
        )
        value = post.value_loss(ONE, values, old, other, MASK, average=average)
        mean = post.weighted_sum(ONE, new, MASK, average=average)
        total = policy.mean + value.mean + mean.mean + post.sequence_sums(ONE, new, MASK).sum()
        shown = [total, policy.kl, policy.clipped, policy.mismatch, post.whiten(ONE, old, MASK)]
        shown += post.gae(other, old, MASK)
        return [each.detach() for each in shown], torch.autograd.grad(total, [new, values])

    assert_near(losses(bad), losses(-0.3))


def test_losses_of_pairs_are_those_of_their_papers() -> None:
    chosen, rejected = double([-1.0, -3.0]), double([-2.0, -1.0])
    before = double([-1.5, -2.0]), double([-1.5, -2.0])
    ratio = chosen - rejected
    found = post.dpo_loss(chosen, rejected, *before, beta=0.5)
    assert_near(found.sum, (1 + (-0.5 * ratio).exp()).log().sum())
    assert_near((found.weight, found.margin), (double(2.0), double(-0.25)))
    assert float(found.accuracy) == 0.5
    assert_near(post.dpo_loss(chosen, rejected, *before, beta=0.5, kind="ipo").sum, ((ratio - 1) ** 2).sum())
    one = post.dpo_loss(chosen, rejected, *before, beta=0.5, weights=torch.tensor([True, False]))
    assert_near(one.mean, (1 + (-0.5 * ratio[0]).exp()).log())
    reward = post.reward_loss(chosen, rejected, margins=torch.full((2,), 0.5).double())
    assert_near(reward.mean, (1 + (0.5 - ratio).exp()).log().mean())
    bad = double([-1.0, float("nan")]).requires_grad_()
    placeholder = post.reward_loss(bad, rejected, weights=torch.tensor([1.0, 0.0]))
    assert_near(torch.autograd.grad(placeholder.mean, bad)[0][1], double(0.0))


def test_rewards_are_compared_with_their_group() -> None:
    rewards = double([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    found = post.group_advantages(ONE, rewards, 4, eps=0.0)
    assert_near(found[:4], double([1.0, -1, -1, 1]) * 0.75**0.5)
    assert not torch.isfinite(found[4:]).any()
    assert post.group_advantages(ONE, rewards, 4)[4:].eq(0).all()
    assert_near(post.group_advantages(ONE, rewards, 4, scale="none")[:4], double([0.5, -0.5, -0.5, 0.5]))


@pytest.mark.parametrize(("mesh", "world"), [("dp=2", 2), ("dp=3", 3), ("dp=2,tp=2", 4)])
def test_ranks_whiten_and_scale_as_one_does(ranks: Simulator, mesh: str, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator, dtype=torch.float64) * 3 + 2
    mask = torch.rand(6, 4, generator=generator) < 0.7
    kept = values[mask]
    expected = ((values - kept.mean()) / kept.std()).masked_fill(~mask, 0.0)
    rewards = values.flatten()
    scaled = (rewards.view(-1, 2) - rewards.view(-1, 2).mean(1, keepdim=True)).flatten() / rewards.std()

    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh)
        rank, size = ctx.data_parallel
        rows = slice(6 * rank // size, 6 * (rank + 1) // size)
        assert_near(post.whiten(ctx, values[rows], mask[rows], eps=0.0), expected[rows])
        shifted = post.whiten(ctx, values[rows], mask[rows], eps=0.0, shift_mean=False)
        assert_near(shifted, (expected[rows] + kept.mean()).masked_fill(~mask[rows], 0.0))
        own = values[rows].flatten()
        found = post.group_advantages(ctx, own, 2, scale="batch", eps=0.0)
        assert_near(found, scaled.view(6, 4)[rows].flatten())

    ranks.run(run, world, default_group=True)


@given(st.integers(0, 999), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_advantages_are_weighted_sums_of_errors(seed: int, discount: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 6, generator=generator) < 0.7
    documents = (torch.arange(6) >= torch.randint(1, 6, (2, 1), generator=generator)).long()
    advantages, returns = post.gae(rewards, values, mask, discount=discount, decay=decay, documents=documents)
    for row in range(2):
        for document in range(2):
            kept = [at for at in range(6) if mask[row, at] and documents[row, at] == document]
            later = [values[row, at] for at in kept[1:]] + [torch.zeros(()).double()] * bool(kept)
            errors = [rewards[row, at] + discount * v - values[row, at] for at, v in zip(kept, later, strict=True)]
            for first, at in enumerate(kept):
                sums = [(discount * decay) ** n * each for n, each in enumerate(errors[first:])]
                assert_near(advantages[row, at], torch.stack(sums).sum())
                assert_near(returns[row, at], advantages[row, at] + values[row, at])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_summed_in_32(dtype: torch.dtype) -> None:
    new = torch.full((1, 4000), -1.0, dtype=dtype)
    found = post.weighted_sum(ONE, -new, torch.ones(1, 4000, dtype=torch.bool))
    assert (found.sum.dtype, float(found.sum), float(found.weight)) == (torch.float32, 4000.0, 4000.0)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda: post.weighted_sum(ONE, NEW, MASK[:, 1:]), {"problem": "do not fit"}),
        (lambda: post.weighted_sum(ONE, NEW, MASK, average="row"), {"problem": "unknown average"}),  # type: ignore[arg-type]
        (lambda: post.weighted_sum(ONE, NEW, MASK, average=0), {"problem": "unknown average"}),
        (lambda: post.weighted_sum(ONE, NEW, MASK, average=True), {"problem": "unknown average"}),
        (lambda: post.weighted_sum(ONE, NEW, MASK, average=float("nan")), {"problem": "unknown average"}),
        (lambda: post.policy_loss(ONE, NEW, OLD, GAINS[:1].expand(3), MASK), {"problem": "do not fit"}),
        (lambda: post.policy_loss(ONE, NEW, OLD, GAINS, MASK, beta=0.1), {"problem": "no reference"}),
        (
            lambda: post.policy_loss(ONE, NEW, OLD, GAINS, MASK, documents=torch.zeros_like(MASK).long()),
            {"problem": "rows of several sequences"},
        ),
        (lambda: post.policy_loss(ONE, NEW, OLD, GAINS, MASK, clip=(-0.1, 0.2)), {"problem": "clip is out"}),
        (lambda: post.policy_loss(ONE, NEW, OLD, GAINS, MASK, cap=0.0), {"problem": "cap is out"}),
        (lambda: post.policy_loss(ONE, NEW, OLD, GAINS, MASK, clip=0.2), {"problem": "clip is no pair"}),  # type: ignore[arg-type]
        (lambda: post.value_loss(ONE, NEW, OLD, OLD, MASK, clip=-1.0), {"problem": "clip is out"}),
        (lambda: post.value_loss(ONE, NEW, OLD, OLD, MASK, clip=float("nan")), {"problem": "clip is out"}),
        (
            lambda: post.weighted_sum(ONE, NEW, torch.full((2, 4), -100)),
            {"problem": "below 0"},
        ),  # labels in the place of a mask
        (lambda: post.sequence_sums(ONE, NEW, NEW * float("nan")), {"problem": "NaN"}),
        (lambda: post.reward_loss(GAINS, GAINS, weights=-GAINS), {"problem": "below 0"}),
        (lambda: post.reward_loss(NEW, NEW), {"fix": r"outputs\[:, 0\]"}),
        (lambda: post.whiten(ONE, NEW, MASK[0]), {"problem": "do not fit"}),
        *(
            (
                lambda given=given: post.weighted_sum(ONE, NEW, MASK, average="sequence", documents=given),
                {"problem": "numbers of sequences in their rows"},
            )
            for given in (
                torch.zeros(2, 3, dtype=torch.int64),
                torch.zeros(2, dtype=torch.int64),
                torch.zeros(2, 4),
                torch.full((2, 4), -1),
                torch.full((2, 4), 4),
            )
        ),
        (
            lambda: post.gae(NEW, NEW, MASK, documents=torch.zeros(2, 5).long()),
            {"problem": "numbers of sequences in their rows"},
        ),
        (lambda: post.dpo_loss(NEW, NEW, NEW, NEW), {"problem": "do not fit"}),
        (lambda: post.dpo_loss(GAINS, GAINS, GAINS, GAINS, beta=0.0), {"problem": "beta is out"}),
        (lambda: post.reward_loss(GAINS, GAINS[:1]), {"problem": "do not fit"}),
        (lambda: post.group_advantages(ONE, torch.zeros(5), 2), {"problem": "do not form full groups"}),
        (lambda: post.group_advantages(ONE, torch.zeros(5), 1), {"problem": "do not form full groups"}),
        (lambda: post.group_advantages(ONE, torch.zeros(4), 2.0), {"problem": "do not form full groups"}),  # type: ignore[arg-type]
    ],
)
def test_slips_are_errors(call: Callable[[], object], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        _ = call()


@pytest.mark.parametrize(
    ("clip", "right"),
    [(0.1, "(0.1, 0.1)"), *((each, "(0.2, 0.2)") for each in (-1.0, 3, (0.1,), (0.1, 0.2, 0.3), "0.1", None))],
)
def test_the_fix_of_a_clip_is_a_pair_that_passes(clip: Any, right: str) -> None:
    with assert_raises(ConfigError, problem="clip is no pair") as caught:
        _ = post.policy_loss(ONE, NEW, OLD, GAINS, MASK, clip=clip)
    assert caught.value.fix == f"Pass clip={right}."
    assert post.policy_loss(ONE, NEW, OLD, GAINS, MASK, clip=ast.literal_eval(right)).sum.isfinite()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_tokens_that_do_not_count_stay_0_beside_an_inf(shift_mean: bool) -> None:
    values = torch.tensor([[1.0, 2.0, float("inf")], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    found = post.whiten(ONE, values, mask, shift_mean=shift_mean)
    assert (found[mask == 0] == 0).all()
    assert not found[0, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.bfloat16])
def test_masks_documents_and_rewards_of_any_dtype_count_alike(dtype: torch.dtype) -> None:
    cut = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    expected = post.weighted_sum(ONE, NEW, MASK, average="sequence", documents=cut)
    found = post.weighted_sum(ONE, NEW, MASK.to(dtype), average="sequence", documents=cut.int())
    assert_near(found.mean, expected.mean)
    assert post.group_advantages(ONE, torch.tensor([1, 0]).to(dtype), 2).tolist() == pytest.approx(
        post.group_advantages(ONE, [1.0, 0.0], 2).tolist()
    )


def test_no_gradient_reaches_a_reference() -> None:
    leaves = [GAINS.clone().requires_grad_() for _ in range(4)]
    post.dpo_loss(*leaves).mean.backward()
    assert [each.grad is None for each in leaves] == [False, False, True, True]
