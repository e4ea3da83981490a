# SPDX-License-Identifier: Apache-2.0
"""Pipelines that train: every schedule takes the steps of one process; what cannot run as stages is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises, caught
from pipelines import WORDS, Block, Words, batch_of, by_hand, differences, loss_sum, train
from planned_parts import stage_modules
from steps import begin_batch, one_sample_each
from torch import nn

import accel
from accel.errors import PrepareError, StageError, StepError
from accel.testing import Simulator

PARAMETERS, FIGURES = 1e-10, 1e-12
SCHEDULES = [
    ("GPipe", 1, 3),
    ("1F1B", 1, 4),
    ("Interleaved1F1B", 2, 4),
    ("LoopedBFS", 2, 3),
    ("InterleavedZeroBubble", 2, 4),
    ("ZBVZeroBubble", 2, 4),
    ("DualPipeV", 2, 4),
]


def assert_law(
    ranks: Simulator, count: int, plan: accel.parallel.Plan, *, tied: bool = False, accumulation: int = 1
) -> None:
    make = partial(Words, tied=tied)
    found = ranks.run(
        partial(train, make=make, plan=plan, mesh=f"pp={count}", accumulation=accumulation), count, default_group=True
    )
    parameters, figures = differences(found, by_hand(make, accumulation=accumulation))
    assert parameters < PARAMETERS
    assert figures < FIGURES


@pytest.mark.parametrize(("schedule", "per", "micro"), SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_schedule_takes_the_steps_of_one_process(
    ranks: Simulator, schedule: Any, per: int, micro: int, tied: bool
) -> None:
    plan = accel.parallel.Plan(schedule=schedule, stages_per_rank=per, micro_batches=micro)
    assert_law(ranks, 2, plan, tied=tied, accumulation=2)


class _Sum(nn.Module):
    """A vector that is the sum of two; torch gives both parameters one tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (self.first + self.second)


class _Sums(Words):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.linear = nn.Sequential(block.linear, _Sum().double())


def test_backwards_in_halves_give_each_gradient_its_own_memory(ranks: Simulator) -> None:
    plan = accel.parallel.Plan(schedule="InterleavedZeroBubble", stages_per_rank=2, micro_batches=4)
    found = ranks.run(partial(train, make=_Sums, plan=plan, mesh="pp=2"), 2, default_group=True)
    assert max(differences(found, by_hand(_Sums))) < FIGURES


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "per", "micro"), SCHEDULES)
def test_four_ranks_take_the_steps_of_one_process(ranks: Simulator, schedule: Any, per: int, micro: int) -> None:
    plan = accel.parallel.Plan(schedule=schedule, stages_per_rank=per, micro_batches=max(micro, 8))
    assert_law(ranks, 4, plan, tied=True, accumulation=3)


REPLICAS = [
    ("pp=2,dp=2", "fsdp", "1F1B", 1, True),
    ("pp=2,dp=2", "ddp", "Interleaved1F1B", 2, True),
    ("pp=2,dp=2", "fsdp", "InterleavedZeroBubble", 2, True),
    ("pp=2,dp=2", "ddp", "ZBVZeroBubble", 2, False),
    ("pp=2,dp_replicate=2,dp_shard=2", "fsdp", "1F1B", 1, True),
]


@pytest.mark.parametrize(
    ("mesh", "strategy", "schedule", "per", "tied", "accumulation"),
    [
        (*REPLICAS[0], 1),
        *(pytest.param(*each, 2, marks=pytest.mark.slow if at else ()) for at, each in enumerate(REPLICAS)),
    ],
)
def test_stages_are_sharded_and_replicated(
    ranks: Simulator, mesh: str, strategy: Any, schedule: Any, per: int, tied: bool, accumulation: int
) -> None:
    make = partial(Words, tied=tied)
    plan = accel.parallel.Plan(schedule=schedule, stages_per_rank=per, micro_batches=4)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, strategy=strategy)
        return train(ctx, make, plan, mesh=mesh, accumulation=accumulation)

    found = ranks.run(rank, 8 if "replicate" in mesh else 4, default_group=True)
    expected = by_hand(make, accumulation=accumulation)
    norms = [figure for at, figure in enumerate(expected.figures) if at % (accumulation + 1) == accumulation]
    parameters, figures = differences(found, expected._replace(figures=norms))
    assert parameters < PARAMETERS
    assert figures < FIGURES


def test_held_back_gradients_travel_once_a_window(ranks: Simulator) -> None:
    counts: list[int] = []
    name = "reduce_scatter_single" if hasattr(torch.distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce_scatter: Any = getattr(torch.distributed, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(1)
        return reduce_scatter(*args, **kwargs)

    def rank(ctx: accel.DistContext, accumulation: int) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        _ = train(
            ctx, Words, accel.parallel.Plan(micro_batches=4), mesh="pp=2,dp=2", accumulation=accumulation, rows=(8,)
        )

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, name, counted)
        for accumulation in (1, 3):
            counts.clear()
            _ = ranks.run(partial(rank, accumulation=accumulation), 4, default_group=True)
            found.append(len(counts))
    assert found[0] == found[1] > 0


def test_a_tied_parameter_of_two_sharded_stages_of_a_rank_is_refused(ranks: Simulator) -> None:
    plan = accel.parallel.Plan(schedule="ZBVZeroBubble", stages_per_rank=2)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2,dp=2")
        return caught(lambda: accel.prepare_model(ctx, Words(tied=True), plan=plan))

    for error in ranks.run(rank, 4, default_group=True):
        assert isinstance(error, PrepareError)
        assert "embed.weight, head.weight" in str(error)


def test_stages_by_name_need_no_order_of_length(ranks: Simulator) -> None:
    stages = [["embed"], [f"blocks.{at}" for at in range(8)] + ["norm", "head"]]
    assert_law(ranks, 2, accel.parallel.Plan(stages=stages), tied=True)


def assert_two_stages(ranks: Simulator, make: Callable[[], Words]) -> None:
    found = ranks.run(partial(train, make=make, mesh="pp=2"), 2, default_group=True)
    parameters, figures = differences(found, by_hand(make))
    assert parameters < PARAMETERS
    assert figures < FIGURES


def _one_norm() -> Words:
    model = Words()
    for block in list(model.blocks)[1:]:
        block.norm = model.blocks[0].norm
    return model


def test_a_module_in_blocks_of_several_stages_is_tied(ranks: Simulator) -> None:
    assert_two_stages(ranks, _one_norm)


def _hooked() -> Words:
    model = Words()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
        block.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    return model


def test_hooks_run_where_their_module_is(ranks: Simulator) -> None:
    assert_two_stages(ranks, _hooked)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("count", "micro"), [(1, 3), (2, 3), (2, 1)])
def test_without_a_pipeline_micro_batches_run_one_after_another(
    ranks: Simulator, strategy: Any, count: int, micro: int
) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        return train(
            accel.replace(ctx, strategy=strategy), Words, accel.parallel.Plan(micro_batches=micro), accumulation=2
        )

    parameters, norms = _without_losses(ranks.run(rank, count, default_group=True), by_hand(Words, accumulation=2))
    assert parameters < PARAMETERS
    assert norms < FIGURES


def _without_losses(found: list[Any], expected: Any) -> tuple[float, float]:
    """Differences where each rank's losses are those of its own rows: of parameters and norms."""
    norms = [figure for at, figure in enumerate(expected.figures) if at % 3 == 2]
    if len(found) == 1:
        return differences(found, expected)
    return differences(found, expected._replace(figures=norms))


def test_a_state_is_carried_as_by_backward(ranks: Simulator) -> None:
    rows = torch.arange(22.0, dtype=torch.float64).view(11, 2) / 20

    def rank(ctx: accel.DistContext, mesh: str) -> list[torch.Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)
        model, optimizer, loader = accel.prepare(
            ctx, model, optimizer, loader, plan=accel.parallel.Plan(micro_batches=2)
        )
        state = accel.train_state(ctx, accumulation=2)
        losses = []
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            loss, state = accel.forward_backward(ctx, model, state, batch.data, loss_fn=lambda out: out.square().sum())
            losses.append(loss)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
        return [*losses, *(each.detach() for each in model.parameters())]

    alone = ranks.run(partial(rank, mesh=""), 1)[0]
    first, second = ranks.run(partial(rank, mesh="pp=2"), 2, default_group=True)
    torch.testing.assert_close([*first, *second[3:]], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(second[:3], alone[:3], rtol=0, atol=1e-12)


class Scaled(Words):
    """Computes between its modules."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * (2 if not ids.is_floating_point() else 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)) * 2


class Pairs(Words):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _module, _inputs, output: (output, None))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(self.norm(hidden))


class Late(Words):
    """Calls its norm and its head, which are defined before the blocks, behind them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


class GatedBlock(Block):
    def forward(self, hidden: torch.Tensor, gate: Any = 1) -> torch.Tensor:
        return super().forward(hidden) * gate


class Gated(Words):
    """Gives its blocks what it computes from the ids, in whose place later stages have hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(8)).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        gate, hidden = 1 + ids.double().abs().mean(1)[:, None, None], self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, gate)
        return self.head(self.norm(hidden))


class ReadsHead(Words):
    """Computes with the weight of a module that it does not call."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), self.head.weight)


class Listed(Words):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(8, dtype=torch.float64) for _ in range(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            hidden = block(hidden * scale)
        return self.head(self.norm(hidden))


class Flattened(Words):
    """Uses its first input itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, _ = ids.shape
        return super().forward(ids.view(rows, -1))


class Ahead(Words):
    """Computes in front of its blocks with what the last stage has."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.embed(ids)).unflatten(-1, (1, WORDS))
        return super().forward(ids) + scores.sum()


class Questions(Words):
    """Asks modules of other stages what it needs not."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.head.bias is None
        assert self.head.weight is None or self.head.weight.ndim == 2
        return super().forward(ids)


class FailingBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + None  # pyright: ignore[reportOperatorIssue]


class FailsInside(Questions):
    """Fails in a block for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = FailingBlock().double()


class FailingLaterBlock(Block):
    """Fails on values, which its forward has where it is no record."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and type(hidden) is torch.Tensor and hidden.requires_grad:
            raise ValueError("no such thing")
        return super().forward(hidden)


class Failing(Words):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[7] = FailingLaterBlock().double()


def _forward_backward(ctx: accel.DistContext, make: Any, loss_fn: Any = loss_sum) -> Any:
    ctx = accel.replace(ctx, mesh="pp=2")
    model = accel.prepare_model(ctx, make(), plan=accel.parallel.Plan(micro_batches=2))
    ids, targets = batch_of(0, 4)
    return accel.forward_backward(ctx, model, begin_batch(ctx), ids, targets=targets, loss_fn=loss_fn, weight=1)


@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Pairs, Late, Gated, Flattened)),
        ReadsHead,
        Listed,
        Ahead,
    ],
)
def test_a_forward_of_any_kind_takes_the_steps_of_one_process(ranks: Simulator, make: Any) -> None:
    work = partial(train, make=make, mesh="pp=2", example=batch_of(0, 4)[0])
    parameters, figures = differences(ranks.run(work, 2, default_group=True), by_hand(make))
    assert parameters < PARAMETERS
    assert figures < FIGURES


@pytest.mark.parametrize("cut", ["chain", "trace", "replay"])
def test_a_way_to_cut_is_refused_with_the_line_to_write(cut: Any) -> None:
    given = caught(lambda: accel.parallel.Plan(cut=cut, micro_batches=4, stages=(("a",), ("b",))))
    assert isinstance(given, accel.errors.ConfigError)
    assert eval(given.fix) == accel.parallel.Plan(micro_batches=4, stages=(("a",), ("b",)))


def test_a_forward_may_look_at_modules_of_other_stages(ranks: Simulator) -> None:
    assert_two_stages(ranks, Questions)


def _failing_loss(_output: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    raise TypeError("NoneType")


@pytest.mark.parametrize(("make", "loss_fn"), [(FailsInside, loss_sum), (Questions, _failing_loss)])
def test_an_error_of_a_block_or_of_the_loss_is_told_as_it_is(ranks: Simulator, make: Any, loss_fn: Any) -> None:
    """What the forward has looked at before has nothing to do with it."""
    with assert_raises(StageError, problem="TypeError"):
        ranks.run(lambda ctx: _forward_backward(ctx, make, loss_fn), 2, default_group=True)


@pytest.mark.parametrize(("schedule", "per", "micro"), SCHEDULES)
def test_outputs_are_those_of_the_whole_model_on_every_rank(
    ranks: Simulator, schedule: Any, per: int, micro: int
) -> None:
    ids, targets = batch_of(0, 6)

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        ctx = accel.replace(ctx, mesh="pp=2")
        plan = accel.parallel.Plan(schedule=schedule, stages_per_rank=per, micro_batches=micro)
        model = accel.prepare_model(ctx, Words(), plan=plan)
        before = accel.training.forward(ctx, model, {"ids": ids})
        state = accel.train_state(ctx)
        _ = accel.forward_backward(
            ctx, model, begin_batch(ctx, state), ids, targets=targets, loss_fn=loss_sum, weight=1
        )
        return [before, accel.training.forward(ctx, model, (ids[:5],), select=lambda output: output.argmax(-1))]

    whole = Words()(ids).detach()
    for before, chosen in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(before, whole, rtol=0, atol=1e-12)
        assert torch.equal(chosen, whole[:5].argmax(-1))


@dataclasses.dataclass
class Logits:
    """An output with its logits in a container of its own."""

    name: str
    inner: Any


class Record(msgspec.Struct):
    logits: Any


class Own:
    """A container that only its description takes apart."""

    def __init__(self, values: Any) -> None:
        self.values = values


OWN = accel.tree.Container(Own, lambda old: {"values": old.values}, lambda old, new: Own(new["values"]))
KINDS: dict[str, tuple[Any, Any]] = {
    "a dataclass": (lambda x: Logits("", x), lambda out: out.inner),
    "a Struct": (Record, lambda out: out.logits),
    "a described kind": (Own, lambda out: out.values),
    "a mapping": (lambda x: {"name": "", "logits": x}, lambda out: out["logits"]),
    "nested ones": (lambda x: [Logits("", (None, Record(x)))], lambda out: out[0].inner[1].logits),
    "a tensor behind a container": (lambda x: Logits([x[:1]], x), lambda out: out.inner),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize(("kind", "mesh"), [*((kind, "pp=2") for kind in KINDS), ("a described kind", "")])
def test_outputs_may_be_of_any_kind_that_collectives_take(ranks: Simulator, kind: str, mesh: str) -> None:
    pack, unpack = KINDS[kind]
    ids, targets = batch_of(0, 5)

    class Packed(Words):
        def forward(self, ids: torch.Tensor) -> Any:
            return pack(super().forward(ids))

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        ctx = accel.replace(ctx, mesh=mesh, containers=[OWN])
        model = accel.prepare_model(ctx, Packed(), plan=accel.parallel.Plan(micro_batches=2))
        outputs = accel.training.forward(ctx, model, ids)
        loss, _ = accel.forward_backward(
            ctx,
            model,
            begin_batch(ctx),
            ids,
            targets=targets,
            loss_fn=lambda out, targets: loss_sum(unpack(out), targets),
            weight=1,
        )
        tokens = accel.training.generate(ctx, model, ids[:2, :3], max_new_tokens=2)
        return [outputs, loss, tokens]

    whole = Words()
    expected = whole(ids).detach()
    tokens = accel.training.generate(accel.single(), whole, ids[:2, :3], max_new_tokens=2)
    for outputs, loss, found in ranks.run(rank, 2 if mesh else 1, default_group=True):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(loss, loss_sum(expected, targets))
        assert torch.equal(found, tokens)


def test_a_mode_is_that_of_every_module_of_the_stages(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[set[bool]]:
        plan = accel.parallel.Plan(schedule="Interleaved1F1B", stages_per_rank=2)
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), Words(), plan=plan)

        def modes() -> set[bool]:
            return {module.training for stage in stage_modules(model) for module in stage.modules()}

        with accel.evaluating(model):
            within = modes()
        return [within, modes()]

    assert ranks.run(rank, 2, default_group=True) == [[{False}, {True}]] * 2


def test_outputs_without_a_pipeline_and_those_without_rows(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = accel.prepare_model(ctx, Words(), plan=accel.parallel.Plan(micro_batches=3))
        ids, _ = batch_of(0, 4)
        found = accel.training.forward(ctx, model, ids)
        assert not found.requires_grad
        return found, caught(lambda: accel.training.forward(ctx, model, ids, select=torch.sum))

    found, error = ranks.run(rank, 1)[0]
    torch.testing.assert_close(found, Words()(batch_of(0, 4)[0]).detach(), rtol=0, atol=1e-12)
    assert isinstance(error, accel.errors.ConfigError)
    assert "a tensor of 2 rows, got shape []" in str(error)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2")
        model: Any = Words()
        model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        ids, targets = batch_of(0, 4)
        state = accel.train_state(ctx)
        _, state = accel.forward_backward(
            ctx, model, begin_batch(ctx, state), ids, targets=targets, loss_fn=loss_sum, weight=1
        )
        if ctx.rank == 1:
            model.head.weight.grad[0, 0] = torch.nan
        return caught(lambda: accel.optimizer_step(ctx, optimizer, state))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, accel.errors.NonFiniteError)
        assert error.where.startswith("head.weight")


def test_an_error_names_stage_micro_batch_and_rank(ranks: Simulator) -> None:
    with pytest.raises(StageError) as told:
        ranks.run(partial(_forward_backward, make=Failing), 2, default_group=True)
    assert "ValueError: no such thing" in str(told.value)
    assert told.value.where.startswith("blocks.7 at test_pipelines.py:")
    assert told.value.where.endswith("in forward, stage 1 of 2, micro-batch 1 of 2, rank 1")


def test_a_pipelined_model_is_not_called(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), Words())
        assert type(model).__name__ == "Words"
        return caught(lambda: model(batch_of(0, 2)[0]))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, StageError)
        assert "accel.forward_backward" in str(error)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (accel.parallel.Plan(stages=[["embed"]]), "another number of stages"),
        (accel.parallel.Plan(stages=[["embed"], ["blocks.99"]]), "'blocks.99' is no module of the model"),
        (accel.parallel.Plan(stages=[["blocks.1"], ["blocks.0"]]), "modules of the stages in their order"),
        (accel.parallel.Plan(schedule="ZBVZeroBubble"), "stages_per_rank"),
        (accel.parallel.Plan(micro_batches=1), "micro_batches"),
    ],
)
def test_plans_that_do_not_fit_are_refused_before_anything_moves(ranks: Simulator, plan: Any, told: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = Words()
        error = caught(lambda: accel.prepare_model(accel.replace(ctx, mesh="pp=2"), model, plan=plan))
        return error, [name for name, _ in model.named_parameters()] == [name for name, _ in Words().named_parameters()]

    for error, untouched in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, PrepareError | accel.errors.ConfigError)
        assert told in str(error)
        assert untouched


def test_stages_without_peers_take_the_options_of_stages_with_peers(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2")
        _ = accel.prepare_model(ctx, Words(), find_unused_parameters=True, broadcast_buffers=False)
        return caught(lambda: accel.prepare_model(ctx, Words(), bucket_cap_mb=1.0))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, accel.errors.ConfigError)
        assert "on a sharded model" in str(error)
        assert "fully_shard exchanges gradients under the strategy ddp too" in str(error)


def test_memory_of_other_stages_is_freed_and_optimizers_leave_them_out(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int, list[int]]:
        model: Any = Words()
        whole = list(model.parameters())
        decayed = [each for each in whole if each.ndim > 1]
        groups = [{"params": decayed}, {"params": [each for each in whole if each.ndim == 1], "weight_decay": 0}]
        model, optimizer = accel.prepare(accel.replace(ctx, mesh="pp=2"), model, torch.optim.AdamW(groups))
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        sizes = [each.numel() for each in whole if all(each is not own for own in model.parameters())]
        return held, len(list(model.parameters())), sizes

    for held, own, sizes in ranks.run(rank, 2, default_group=True):
        assert held == own < 35
        assert set(sizes) == {0}


class Shaped(nn.Linear):
    """Prints by its weight, as norms of transformers do."""

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"


def test_a_model_prints_with_the_modules_of_other_stages(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[str]:
        model = nn.Sequential(*(nn.Sequential(Shaped(2, 2), nn.ReLU()) for _ in range(4)))
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), model)
        inside = [repr(each) for each in model.modules() if isinstance(each, Shaped)]
        return [*repr(model).splitlines(), *inside]

    first, last = ranks.run(rank, 2, default_group=True)
    own = [
        line
        for at in range(2)
        for line in (f"  ({at}): Sequential(", "    (0): Shaped((2, 2))", "    (1): ReLU()", "  )")
    ]
    other = [f"  ({at}): Sequential(of another stage)" for at in range(2, 4)]
    held, freed = ["Shaped((2, 2))"] * 2, ["Shaped(of another stage)"] * 2
    assert first == ["Sequential(", *own, *other, ")", *held, *freed]
    assert last[-4:] == [*freed, *held]


def test_a_weight_is_needed_where_no_state_knows_it(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        run: Any = accel.training.parts.forward_backward
        return [
            caught(lambda: run(ctx, Words(), accel.loss_scale(ctx), None, batch_of(0, 2)[0], loss_fn=torch.sum)),
            caught(lambda: run(ctx, Words(), accel.loss_scale(ctx), batch_of(0, 2)[0], loss_fn=torch.sum, weight=1)),
            caught(
                lambda: run(
                    ctx, Words(), accel.loss_scale(ctx), None, batch_of(0, 2)[0], loss_fn=lambda out: out, weight=1
                )
            ),
        ]

    no_weight, no_accum, no_scalar = ranks.run(rank, 1)[0]
    assert isinstance(no_weight, accel.errors.ConfigError)
    assert "weight=" in str(no_weight)
    assert isinstance(no_accum, accel.errors.ConfigError)
    assert isinstance(no_scalar, StepError)
    assert "loss.sum()" in str(no_scalar)


@pytest.mark.parametrize("mesh", ["", "pp=2"])
def test_a_batch_without_units_adds_nothing(ranks: Simulator, mesh: str) -> None:
    def rank(ctx: accel.DistContext) -> tuple[float, float]:
        ctx = accel.replace(ctx, mesh=mesh)
        model = accel.prepare_model(ctx, Words())
        ids, targets = batch_of(0, 4)
        loss, _ = accel.forward_backward(ctx, model, begin_batch(ctx), ids, targets=targets, loss_fn=loss_sum, weight=0)
        return float(loss), max(float(each.grad.abs().max()) for each in model.parameters() if each.grad is not None)

    assert ranks.run(rank, 2 if mesh else 1, default_group=True) == [(0.0, 0.0)] * (2 if mesh else 1)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_loss_may_be_a_view_and_have_hooks(ranks: Simulator, scale: float) -> None:
    """Schedules detach what backward runs from; its gradient is a factor, which hooks of the loss see and change."""
    seen = list[float]()

    def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_sum(output, targets)
        if loss.requires_grad:
            _ = loss.register_hook(lambda grad: (seen.append(float(grad)), 2 * grad)[1])
        return loss.view(1)[0]

    def rank(ctx: accel.DistContext, loss_fn: Any = loss_of) -> float:
        ctx = accel.replace(ctx, mesh="pp=2" if ctx.world_size > 1 else "")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = accel.prepare_model(ctx, Words(), plan=accel.parallel.Plan(micro_batches=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        state = accel.train_state(ctx, scaler=accel.LossScale(scale=scale))
        state = state.next(one_sample_each(ctx, state.cursor))
        ids, targets = batch_of(0, 8)
        _, state = accel.forward_backward(ctx, model, state, ids, targets=targets, loss_fn=loss_fn)
        norm = accel.optimizer_step(ctx, optimizer, state, max_norm=1e9).grad_norm
        assert norm is not None
        return float(norm)

    [alone] = ranks.run(partial(rank, loss_fn=loss_sum), 1)
    for norm in ranks.run(rank, 2, default_group=True):
        assert norm == pytest.approx(2 * alone, rel=1e-10)
    assert seen == [scale, scale]


def _loss_of_changed(ctx: accel.DistContext, change: Callable[[Any], None], order: str) -> float:
    ctx = accel.replace(ctx, mesh="pp=2") if ctx.world_size > 1 else ctx
    model: Any = Words(2)
    inputs, targets = batch_of(0, 4)

    def batch() -> float:
        state = accel.train_state(ctx).next()
        loss, state = accel.forward_backward(ctx, model, state, inputs, targets=targets, loss_fn=loss_sum, weight=20)
        accel.training.discard(state, model)
        return float(loss)

    if order == "change, prepare":
        change(model)
        model = accel.prepare_model(ctx, model)  # the line of the error
    else:
        model = accel.prepare_model(ctx, model)
        if order == "prepare, batch, change":
            _ = batch()
        change(model)
    return batch()


def _new_head(model: Any) -> None:
    model.head = nn.Linear(8, 11, bias=False).double()
    nn.init.constant_(model.head.weight[:5], 0.5)
    nn.init.constant_(model.head.weight[5:], -0.5)


def _tie(model: Any) -> None:
    model.head.weight = model.embed.weight


@pytest.mark.parametrize(("change", "name"), [(_new_head, "head, now of Linear"), (_tie, "head.weight")])
def test_what_is_replaced_after_the_stages_are_cut_is_refused(
    ranks: Simulator, change: Callable[[Any], None], name: str
) -> None:
    for order in ("prepare, change", "prepare, batch, change"):
        with assert_raises(StageError, got=name, fix=re.escape("model = accel.prepare_model(ctx, model)")):
            ranks.run(partial(_loss_of_changed, change=change, order=order), 2, default_group=True)
    alone = _loss_of_changed(accel.single(), change, "prepare, change")
    found = ranks.run(lambda ctx: _loss_of_changed(ctx, change, "change, prepare"), 2, default_group=True)
    assert found == [pytest.approx(alone, rel=1e-12)] * 2


def test_a_head_may_be_compiled_after_the_stages_are_cut(ranks: Simulator) -> None:
    def compiled(model: Any) -> None:
        model.head = torch.compile(model.head, backend="eager")

    alone = _loss_of_changed(accel.single(), lambda _: None, "prepare, change")
    found = ranks.run(lambda ctx: _loss_of_changed(ctx, compiled, "prepare, change"), 2, default_group=True)
    assert found == [pytest.approx(alone, rel=1e-12)] * 2


@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_loads_its_part_of_a_plain_state_dict(ranks: Simulator, tied: bool) -> None:
    whole = {name: value + 1 for name, value in Words(2, tied=tied).state_dict().items()}

    def load(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        ctx = accel.replace(ctx, mesh="pp=2")
        model = accel.prepare_model(ctx, Words(2, tied=tied))
        with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
            model.load_state_dict(whole | {"other": torch.ones(1)})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"embed.weight": whole["embed.weight"]})
        assert not any(model.load_state_dict(whole))
        return accel.get_state_dict(ctx, model, dst=None)

    for each in ranks.run(load, 2, default_group=True):
        torch.testing.assert_close(each, whole, rtol=0, atol=0)
