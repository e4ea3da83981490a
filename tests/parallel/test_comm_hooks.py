# SPDX-License-Identifier: Apache-2.0
"""How gradients travel: options of DDP and communication hooks, against what DDP does without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from processes import job, script_ranks
from steps import begin_batch
from torch import nn

import accel
from accel.errors import CollectiveMismatch, ConfigError, PrepareError
from accel.testing import Simulator


def make() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 24))


def gradients(ctx: accel.DistContext, steps: int = 1, *, sync_each_batch: bool = False, **options: Any) -> torch.Tensor:
    """The gradients of the last of some steps; data differ by rank and not by step."""
    model = accel.prepare_model(ctx, make(), **options)
    inputs = torch.randn(6, 24, generator=torch.Generator().manual_seed(ctx.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = accel.train_state(ctx, accumulation=2, sync_each_batch=sync_each_batch)
    got = torch.empty(0)
    for _ in range(2 * steps):
        state = begin_batch(ctx, state)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, model(inputs).square().mean(), state)
        if state.sync:
            got = torch.cat([each.grad.flatten().clone() for each in model.parameters() if each.grad is not None])
            state = accel.optimizer_step(ctx, optimizer, state)
    return got


def average(group: Any, bucket: Any) -> Any:
    """A hook as a user would write it."""
    sent = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return sent.get_future().then(lambda future: future.value()[0])


FULL: dict[str, Any] = {"matrix_rank": 64, "start_step": 2, "min_compression": 0.01}
HOOKS = {
    "fp16": ("fp16", 1, 2e-3),
    "bf16": ("bf16", 1, 2e-2),
    "function": (average, 1, 1e-6),
    "before PowerSGD starts": (accel.parallel.PowerSgd(), 1, 1e-6),
    "PowerSGD of full rank": (accel.parallel.PowerSgd(**FULL), 4, 1e-4),
    "batched before it starts": (accel.parallel.PowerSgd(batched=True), 1, 1e-6),
    "batched of full rank": (accel.parallel.PowerSgd(**FULL, batched=True), 4, 1e-5),
    "batched of full rank in bf16": (accel.parallel.PowerSgd(**FULL, batched=True, wire="bf16"), 4, 1e-2),
    "PowerSGD of full rank in fp16": (accel.parallel.PowerSgd(**FULL, wire="fp16"), 4, 3e-3),
}


@pytest.mark.parametrize("name", HOOKS)
def test_gradients_are_those_without_the_hook_to_its_precision(ranks: Simulator, name: str) -> None:
    hook, steps, tolerance = HOOKS[name]
    expected = ranks.run(gradients, 2)[0]
    first, second = ranks.run(lambda ctx: gradients(ctx, steps, comm_hook=hook), 2)
    assert torch.equal(first, second)
    assert ((first - expected).norm() / expected.norm()).item() < tolerance
    assert torch.equal(first, expected) == (tolerance == 1e-6)


@pytest.mark.parametrize(
    "hook", [accel.parallel.PowerSgd(start_step=2), accel.parallel.PowerSgd(start_step=2, matrix_rank=4, batched=True)]
)
def test_power_sgd_makes_up_for_what_it_lost(ranks: Simulator, hook: accel.parallel.PowerSgd) -> None:
    """The same gradient at every step: sent at a low rank it is far off, but not so the mean over steps."""
    expected = ranks.run(gradients, 2)[0]

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        model = accel.prepare_model(ctx, make(), comm_hook=hook)
        inputs, sent = torch.randn(6, 24, generator=torch.Generator().manual_seed(ctx.rank)), []
        for _ in range(42):
            model.zero_grad()
            accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx))
            sent.append(
                torch.cat([each.grad.flatten().clone() for each in model.parameters() if each.grad is not None])
            )
        return sent[2:]

    sent = ranks.run(rank, 2)[0]
    error = [((part - expected).norm() / expected.norm()).item() for part in (sent[0], torch.stack(sent).mean(0))]
    assert error[0] > 0.2
    assert error[1] < error[0] / 4


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "bf16", None])
def test_gradients_of_zero_stay_zero(ranks: Simulator, wire: Any, batched: bool) -> None:
    def rank(ctx: accel.DistContext) -> None:
        hook = accel.parallel.PowerSgd(start_step=2, wire=wire, batched=batched)
        model = accel.prepare_model(ctx, nn.Linear(24, 24), comm_hook=hook)
        for _ in range(4):
            model.zero_grad()
            accel.backward(ctx, model(torch.ones(2, 24)).sum() * 0, begin_batch(ctx))
            assert not any(each.grad is None or each.grad.any() for each in model.parameters())

    ranks.run(rank, 2)


def regression(ctx: accel.DistContext, hook: Any) -> torch.Tensor:
    """The weights of a linear regression, whose ranks have different data."""
    generator = torch.Generator().manual_seed(7)
    truth = torch.randn(12, 16, generator=generator)
    inputs = torch.randn(ctx.world_size, 64, 16, generator=generator)[ctx.rank]
    model = nn.Linear(16, 12, bias=False)
    nn.init.zeros_(model.weight)
    model = accel.prepare_model(ctx, model, comm_hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = accel.train_state(ctx)
    for _ in range(60):
        loss = nn.functional.mse_loss(model(inputs), inputs @ truth.T)
        state = accel.backward(ctx, loss, begin_batch(ctx, state))
        state = accel.optimizer_step(ctx, optimizer, state)
    return next(model.parameters()).detach().clone()


def test_batched_power_sgd_trains_a_regression_to_within_a_hundredth(ranks: Simulator) -> None:
    """On data without low rank: rank 2 of 14, under a third of the bytes, ends where whole gradients end."""
    whole = ranks.run(lambda ctx: regression(ctx, None), 2)[0]

    def distance(**options: bool) -> float:
        hook = accel.parallel.PowerSgd(matrix_rank=2, start_step=2, batched=True, **options)
        first, second = ranks.run(lambda ctx: regression(ctx, hook), 2)
        assert torch.equal(first, second)
        return ((first - whole).norm() / whole.norm()).item()

    assert distance() < 1e-2
    assert distance(error_feedback=False) > 5e-2


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"matrix_rank": 4}, {"error_feedback": False}, {"wire": "fp16"}, {"batched": True}]
)
def test_an_overflow_stays_in_its_step(ranks: Simulator, options: dict[str, Any], at: int) -> None:
    """Also that of the first compressed step, when nothing is remembered yet."""

    def rank(ctx: accel.DistContext) -> list[bool]:
        model = accel.prepare_model(ctx, make(), comm_hook=accel.parallel.PowerSgd(start_step=2, **options))
        finite: list[bool] = []
        for step in range(7):
            model.zero_grad()
            inputs = torch.ones(6, 24) * (torch.inf if step == at and ctx.rank == 1 else 1.0 + ctx.rank)
            accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx))
            finite.append(all(each.grad is None or bool(each.grad.isfinite().all()) for each in model.parameters()))
        return finite

    assert ranks.run(rank, 2) == [[step != at for step in range(7)]] * 2


OPTIONS = [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_change_no_gradient(ranks: Simulator, options: dict[str, Any]) -> None:
    expected = ranks.run(gradients, 3)[0]
    for got in ranks.run(lambda ctx: gradients(ctx, 2, **options), 3):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_a_static_graph_exchanges_gradients_in_every_backward(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        with assert_raises(PrepareError, fix="Leave static_graph out, or use.*sync_each_batch=True"):
            gradients(ctx, static_graph=True)
        return gradients(ctx, 2, sync_each_batch=True, static_graph=True)

    expected = ranks.run(gradients, 2)[0]
    for got in ranks.run(rank, 2):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("together", [True, False])
def test_buffers_are_rank_0s_or_each_ranks_own(ranks: Simulator, together: bool) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        model = accel.prepare_model(ctx, make(), broadcast_buffers=together)
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(ctx.rank))
        model(inputs)
        model.eval()(inputs)  # buffers are sent before a forward
        return torch.cat([buffer.flatten().double() for buffer in model.buffers()])

    first, second = ranks.run(rank, 2)
    assert torch.equal(first, second) == together


@pytest.mark.parametrize("hook", ["fp16", accel.parallel.PowerSgd(start_step=2)])
def test_one_rank_has_nothing_to_send(hook: Any) -> None:
    ctx, model = accel.single(), make()
    assert accel.prepare_model(ctx, model, comm_hook=hook) is model


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "unknown hook": (
        lambda: {"comm_hook": "fp61"},
        {"expected": "one of fp16, bf16", "got": "'fp61'", "fix": "Did you mean `fp16`"},
    ),
    "both ways to find what is unused": (
        lambda: {"find_unused_parameters": True, "static_graph": True},
        {"expected": "find_unused_parameters or static_graph", "got": "both"},
    ),
    "no bucket": (lambda: {"bucket_cap_mb": 0}, {"expected": "MiB above 0"}),
    "no rank": (
        lambda: {"comm_hook": accel.parallel.PowerSgd(matrix_rank=0)},
        {"expected": "matrix_rank of at least 1"},
    ),
    "too early": (
        lambda: {"comm_hook": accel.parallel.PowerSgd(start_step=1)},
        {"expected": "start_step of at least 2"},
    ),
    "no such wire": (
        lambda: {"comm_hook": accel.parallel.PowerSgd(wire="fp32")},
        {"expected": "fp16 or bf16, or None"},
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_options_are_refused(ranks: Simulator, name: str, world_size: int) -> None:
    options, fields = REFUSED[name]

    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(ConfigError, **fields):
            accel.prepare_model(ctx, make(), **options())

    ranks.run(rank, world_size)


def test_options_that_come_too_late_are_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, make(), bucket_cap_mb=1)
        assert accel.prepare(ctx, model) is model
        with assert_raises(PrepareError, problem="would change nothing", fix="Pass them to the first prepare_model"):
            accel.prepare_model(ctx, model, comm_hook="fp16")

    ranks.run(rank, 2)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (lambda rank: {"bucket_cap_mb": 1.0 + rank}, "bucket_cap_mb=2.0"),
        (lambda rank: {"comm_hook": (None, "fp16")[rank]}, "comm_hook='fp16'"),
    ],
)
def test_ranks_with_other_options_are_told(ranks: Simulator, mine: Callable[[int], dict[str, Any]], said: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(CollectiveMismatch, got=rf"rank 1: prepare_model.*{said}"):
            accel.prepare_model(ctx, make(), **mine(ctx.rank))

    ranks.run(rank, 2)


class Odd(nn.Module):
    """Parameters without dimensions, without elements, of complex numbers, and in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wide = nn.Linear(24, 24, dtype=torch.complex64)
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.wide(x.to(torch.complex64)).abs().view(-1, 3, 4, 2)
        return self.conv(pixels).flatten(1) * self.scale + self.none.sum()


@pytest.mark.parametrize("batched", [False, True])
def test_power_sgd_takes_parameters_of_any_kind(ranks: Simulator, batched: bool) -> None:
    def rank(ctx: accel.DistContext, hook: Any) -> torch.Tensor:
        model = accel.prepare_model(ctx, Odd(), comm_hook=hook)
        inputs = torch.randn(6, 24, generator=torch.Generator().manual_seed(ctx.rank))
        for _ in range(3):
            model.zero_grad()
            accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx))
        real = [
            torch.view_as_real(each) if each.is_complex() else each for each in (p.grad for p in model.parameters())
        ]
        return torch.cat([each.flatten() for each in real])

    expected = ranks.run(lambda ctx: rank(ctx, None), 2)[0]
    hook = accel.parallel.PowerSgd(**FULL, batched=batched)
    first, second = ranks.run(lambda ctx: rank(ctx, hook), 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def tiny_buckets(ctx: accel.DistContext) -> None:
    """Compress more buckets than gloo has threads."""
    expected, options = gradients(ctx), {"bucket_cap_mb": 0.0001}
    for batched in (False, True):
        got = gradients(ctx, 4, comm_hook=accel.parallel.PowerSgd(**FULL, warm_start=False, batched=batched), **options)
        assert (got - expected).norm() / expected.norm() < 1e-4


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, accel
from test_comm_hooks import FULL, gradients, tiny_buckets
torch.set_num_threads(1)
with accel.session(device="cpu") as ctx:
    expected = gradients(ctx)
    for hook, steps, tolerance in (("fp16", 1, 2e-3), ("bf16", 1, 2e-2), (accel.parallel.PowerSgd(**FULL), 4, 1e-4)):
        error = (gradients(ctx, steps, comm_hook=hook) - expected).norm() / expected.norm()
        assert error < tolerance, (hook, error)
    tiny_buckets(ctx)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_hooks_in_real_processes(tmp_path: Path) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    with script_ranks(script, job(2), Path(__file__).parent, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
