# SPDX-License-Identifier: Apache-2.0
"""The most bytes of a step along cp, beside loops by hand: by keys gathered, heads exchanged and a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import Loop, peak
from steps import one_sample_each
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.testing import simulate_groups

BLOCKS, WIDTH, HEADS, ROWS, LENGTH, RANKS = 1, 64, 4, 4, 256, 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(nn.Module):
    """Attention of a block's own queries to all keys, and an MLP."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).transpose(1, 3)
        mixed = self.attention(*heads.unbind(2))
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def make_model(attention: Attention) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attention) for _ in range(BLOCKS)))


def make_batch(rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the rank's positions, which are an early piece and a late one."""
    whole = torch.randn(2, ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    pieces = whole.chunk(2 * RANKS, 2)
    inputs, targets = torch.cat((pieces[rank], pieces[2 * RANKS - 1 - rank]), 2)
    return inputs.clone(), targets.clone()


class _Gathered(torch.autograd.Function):
    """Keys or values of all positions, [batch, heads, positions, width], early and late halves in order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        first = own.movedim(2, 0).contiguous()
        found = first.new_empty(2 * RANKS, len(first) // 2, *first.shape[1:])
        _ = dist.all_gather([*found.flatten(0, 1).chunk(RANKS)], first, group=group)
        return found[ORDER].flatten(0, 1).movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        by_rank = grads[0].movedim(2, 0).unflatten(0, (2 * RANKS, -1))[BACK].flatten(0, 1)
        own = by_rank.new_empty(len(by_rank) // RANKS, *by_rank.shape[1:])
        _ = dist.reduce_scatter(own, [*by_rank.chunk(RANKS)], group=ctx.group)
        return own.movedim(0, 2), None


ORDER = [0, 2, 3, 1]  # rank 0 has the first and the last quarter
BACK = [0, 3, 1, 2]


def gather_by_hand(group: Any) -> Attention:
    pieces = (group.rank(), 2 * RANKS - 1 - group.rank())

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (_Gathered.apply(each, group) for each in (k, v))
        own = q.shape[2] // 2
        outputs = list[Tensor]()
        for half, piece in zip(q.chunk(2, 2), pieces, strict=True):
            seen = (piece + 1) * own
            # torch's causal_lower_right, which needs no memory on GPUs, cannot be made while tensors are counted
            mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
            outputs.append(scaled_dot_product_attention(half, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask))
        return torch.cat(outputs, 2)

    return attention


class _Exchanged(torch.autograd.Function):
    """An all-to-all of equal parts, whose backward is the one back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchanged.apply(grads[0], ctx.group), None


def heads_by_hand(group: Any) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = torch.stack((q, k, v)).unflatten(2, (RANKS, -1)).movedim(2, 0)
        parts = _Exchanged.apply(parts, group).movedim(0, 3)  # three, batch, heads, ranks, positions, width
        parts = parts.unflatten(4, (2, -1)).flatten(3, 4)[:, :, :, ORDER].flatten(3, 4)
        out = scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        out = out.unflatten(2, (2 * RANKS, -1))[:, :, BACK].flatten(2, 3)
        out = _Exchanged.apply(out.unflatten(2, (RANKS, -1)).movedim(2, 0), group)
        return out.movedim(0, 1).flatten(1, 2)

    return attention


def shift(sent: Tensor, group: Any) -> Callable[[], Tensor]:
    """Send a tensor to the next rank; return a function that waits for that of the rank before."""
    found = torch.empty_like(sent)
    to, source = (group.rank() + 1) % RANKS, (group.rank() - 1) % RANKS
    pair = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, found, group=group, group_peer=source),
    ]
    works = dist.batch_isend_irecv(pair)

    def wait() -> Tensor:
        for each in works:
            each.wait()
        return found

    return wait


def block_of(source: int, rank: int, own: int) -> tuple[slice, slice, bool]:
    """Own queries and a rank's keys to multiply, and whether by their places."""
    half = own // 2
    if source == rank:
        return slice(own), slice(own), True
    return (slice(own), slice(half), False) if source < rank else (slice(half, own), slice(own), False)


def around(k: Tensor, v: Tensor, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Ranks with their keys and values; the next ones travel meanwhile."""
    held = torch.stack((k, v))
    for step in range(RANKS):
        wait = shift(held, group) if step + 1 < RANKS else None
        yield (group.rank() - step) % RANKS, held
        held = wait() if wait else held


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        total = list[Tensor]()
        for source, held in around(k, v, group):
            rows, columns, causal = block_of(source, group.rank(), q.shape[2])
            found = _flash(q[:, :, rows], *held[:, :, :, columns], 0.0, causal)
            if not total:
                total = [*found]
                continue
            out, lse = total[0][:, :, rows], total[1][:, :, rows]
            both = torch.logaddexp(lse, found[1])
            _ = out.mul_((lse - both).exp().unsqueeze(-1)).add_(found[0] * (found[1] - both).exp().unsqueeze(-1))
            _ = lse.copy_(both)
        ctx.save_for_backward(q, k, v, *total)
        ctx.group = group
        return total[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        passed: Callable[[], Tensor] | None = None
        for source, held in around(k, v, ctx.group):
            rows, columns, causal = block_of(source, ctx.group.rank(), q.shape[2])
            own, *more = _flash_backward(
                grads[0][:, :, rows], q[:, :, rows], *held[:, :, :, columns],
                out[:, :, rows], lse[:, :, rows].contiguous(), 0.0, causal,
            )  # fmt: skip
            grad_q[:, :, rows] += own
            if passed is None:
                shares = torch.stack(more)
            else:
                shares = passed()
                for each, part in zip(shares, more, strict=True):
                    each[:, :, columns] += part
            del own, more
            passed = shift(shares, ctx.group)
        assert passed is not None
        return grad_q, *passed(), None


def ring_by_hand(group: Any) -> Attention:
    return lambda q, k, v: _Ring.apply(q, k, v, group)


HANDS = {"gather": gather_by_hand, "heads": heads_by_hand, "ring": ring_by_hand}


def by_hand(method: str, ctx: accel.DistContext) -> Loop:
    group = ctx.comm.group
    spread = DistributedDataParallel(
        make_model(HANDS[method](group)), process_group=group, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(spread.parameters(), foreach=True)
    inputs, targets = make_batch(group.rank())

    def step() -> None:
        nn.functional.mse_loss(spread(inputs), targets).backward()
        _ = nn.utils.clip_grad_norm_(spread.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return [*spread.parameters()], step


def by_accel(method: Any, ctx: accel.DistContext) -> Loop:
    ctx = accel.replace(ctx, mesh="cp=2")
    model = make_model(lambda q, k, v: accel.parallel.context_attention(ctx, q, k, v, method=method))
    model = accel.prepare_model(ctx, model)
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), foreach=True))
    inputs, targets = make_batch(ctx.rank)
    _ = accel.parallel.sequence_positions(ctx, LENGTH)  # the data are cut already
    carried = [accel.train_state(ctx)]

    def step() -> None:
        state = carried[0].next(one_sample_each(ctx, carried[0].cursor))
        state = accel.backward(ctx, nn.functional.mse_loss(model(inputs), targets), state)
        carried[0] = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)

    return [*model.parameters()], step


@pytest.mark.parametrize(
    "method", [pytest.param("gather", marks=pytest.mark.slow), pytest.param("heads", marks=pytest.mark.slow), "ring"]
)
def test_a_step_along_cp_holds_no_more_than_the_loop_by_hand(method: str) -> None:
    def on_rank(make: Callable[[str, accel.DistContext], Loop]) -> Callable[[Any], tuple[int, list[Tensor]]]:
        def run(group: Any) -> tuple[int, list[Tensor]]:
            loop = make(method, accel.from_group(group))
            return peak(loop), [each.detach().clone() for each in loop[0]]

        return run

    ours, hand = (simulate_groups(on_rank(make), RANKS, default_group=True) for make in (by_accel, by_hand))
    for (own, trained), (least, expected) in zip(ours, hand, strict=True):
        assert own <= 1.02 * least, f"{own / least:.3f} of {least} bytes"
        torch.testing.assert_close(trained, expected)
