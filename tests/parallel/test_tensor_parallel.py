# SPDX-License-Identifier: Apache-2.0
"""Training with a tensor-parallel plan is training in one process, to the last digits but a few."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from fake_ranks import Counted, fake_rank
from handwritten import named
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from tensor_models import ENDS, TOKENS, WIDTH, loader, made, plans, shares_tokens, total_loss, train, whole
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.errors import PrepareError
from accel.testing import Simulator
from accel.topology import Axes

TOLERANCE = {"rtol": 0, "atol": 1e-10}
NORMS = {"rtol": 0, "atol": 1e-12}


def _alone(model: dict[str, Any], samples: int, per_step: int, steps: int) -> Any:
    ctx, net = accel.single(), made(**model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer, data = accel.prepare(ctx, net, optimizer, loader(samples, per_step))
    return train(ctx, net, optimizer, data, steps, divided=False), whole(net)


def assert_trains_as_one_process(
    ranks: Simulator,
    mesh: str,
    size: int,
    plan: accel.parallel.Plan,
    model: dict[str, Any],
    *,
    divided: bool = False,
    samples: int = 7,
    steps: int = 2,
    strategy: Any = "ddp",
) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        net = made(seed=1 + ctx.rank, **model)  # all begin with rank 0's
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        batch = 4 // ctx.data_parallel[1]
        net, optimizer, data = accel.prepare(ctx, net, optimizer, loader(samples, batch), plan=plan)
        assert all(isinstance(each, DTensor) for each in net.parameters())
        return train(ctx, net, optimizer, data, steps, divided=divided), whole(net)

    norms, parameters = _alone(model, samples, 4, steps)
    for got_norms, got in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, parameters, **TOLERANCE)
        torch.testing.assert_close(got_norms, norms, **NORMS)


MODELS = st.fixed_dictionaries(
    {
        "heads_of_keys": st.sampled_from([4, 2, 1]),
        "fused": st.booleans(),
        "tied": st.booleans(),
        "frozen": st.booleans(),
    }
)
UNEVEN = {"classes": 11, "hidden": 23}  # of a vocabulary and an MLP that no number of ranks divides


@settings(max_examples=share(0.08), deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    model=MODELS,
    name=st.sampled_from(sorted(plans(fused=False))),
    samples=st.integers(5, 9),
    steps=st.integers(1, 3),
    uneven=st.booleans(),
)
def test_every_plan_trains_as_one_process(ranks, size, model, name, samples, steps, uneven):
    styles = plans(fused=model["fused"])[name]
    if uneven:
        model = model | UNEVEN | ({"hidden": 24} if name == "gathered" else {})
    if model["tied"] and "head" not in styles:
        styles = styles | ENDS
    divided = styles.get("head") == "colwise"
    plan = accel.parallel.Plan(tensor=styles, sequence=shares_tokens(name))
    assert_trains_as_one_process(ranks, f"tp={size}", size, plan, model, divided=divided, samples=samples, steps=steps)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_data_parallelism_on_top_trains_as_one_process(ranks, strategy):
    model = {"heads_of_keys": 1, "tied": True, **UNEVEN}
    plan = accel.parallel.Plan(tensor=plans(fused=False)["sequence, ends"], sequence=True)
    assert_trains_as_one_process(ranks, "dp=2,tp=2", 4, plan, model, divided=True, strategy=strategy)


class Method(nn.Module):
    """Calls a layer of its first block from the second forward on, which no hook of `fully_shard` sees."""

    times = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return self.blocks[1](x) + (self.blocks[0] if self.times == 1 else self.blocks[0][0])(x).mean()


def test_a_shard_that_nobody_has_gathered_is_not_computed_with(ranks):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, Method(), plan=accel.parallel.Plan(tensor={}))
        _ = model(torch.ones(2, 4))
        with assert_raises(PrepareError, problem="not gathered along dp", got=r"blocks\.0\.0\.weight"):
            model(torch.ones(2, 4))

    ranks.run(rank, 4, default_group=True)


class Reads(nn.Module):
    """Asks a layer for its dtype, as CLIP does, and computes with its weight if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))
        self.computes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0][0].weight
        x = x.to(weight.dtype).to(weight.device)
        x = x * weight.mean() if self.computes else x
        return self.blocks[1](self.blocks[0](x))


def test_a_forward_reads_the_dtype_of_a_layer_that_nobody_has_gathered(ranks):
    torch.manual_seed(0)
    whole, x = Reads().double(), torch.ones(2, 4)
    want = whole(x).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2", strategy="fsdp")
        plan = accel.parallel.Plan(units=("Sequential",))
        model = accel.prepare_model(ctx, copy.deepcopy(whole), plan=plan, example=x)
        torch.testing.assert_close(model(x).detach(), want)
        accel.unwrap_model(model).computes = True
        with pytest.raises(PrepareError):
            model(x)

    ranks.run(rank, 4, default_group=True)


@pytest.mark.nightly
@settings(max_examples=share(0.18), deadline=None)
@given(
    mesh=st.sampled_from(["dp=2,tp=2", "dp=2,tp=4", "dp_replicate=2,dp_shard=2,tp=2", "dp=4,tp=2"]),
    strategy=st.sampled_from(["ddp", "fsdp"]),
    model=MODELS,
    name=st.sampled_from(["copies", "gathered", "sequence"]),
    steps=st.integers(1, 3),
)
def test_every_mesh_trains_as_one_process(ranks, mesh, strategy, model, name, steps):
    sizes = [int(part.split("=")[1]) for part in mesh.split(",")]
    styles = plans(fused=model["fused"])[name]
    if model["tied"] and "head" not in styles:
        styles = styles | {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
    size = int(torch.tensor(sizes).prod())
    strategy = "fsdp" if "dp_shard" in mesh else strategy
    plan = accel.parallel.Plan(tensor=styles, sequence=shares_tokens(name))
    assert_trains_as_one_process(ranks, mesh, size, plan, model, steps=steps, strategy=strategy, samples=9)


@pytest.mark.parametrize("name", ["layers", "copies"])
def test_a_block_sums_activations_four_times(ranks, monkeypatch, name):
    """Two sums forward and two backward: the gradient of an input that layers share is summed once."""
    calls: list[str] = []
    for function in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        inner = getattr(dist, function)

        def counted(*args: Any, inner: Any = inner, function: str = function, **options: Any) -> Any:
            calls.append(function)
            return inner(*args, **options)

        monkeypatch.setattr(dist, function, counted)

    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=2")
        net = accel.prepare(ctx, made(), plan=accel.parallel.Plan(tensor=plans(fused=False)[name]))
        accel.wait_for_everyone(ctx)
        if ctx.is_main_process:
            calls.clear()
        accel.wait_for_everyone(ctx)
        ids = torch.zeros(2, 4, dtype=torch.int64)
        net(ids).sum().backward()
        accel.wait_for_everyone(ctx)

    ranks.run(rank, 2, default_group=True)
    blocks, size = 2, 2
    assert calls.count("all_reduce") == 4 * blocks * size
    assert {*calls} == {"all_reduce"}


def test_ranks_hold_their_part_and_the_whole_is_freed(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=4")
        net = made()
        before = dict(net.named_parameters())
        plan = accel.parallel.Plan(tensor=plans(fused=False)["ends"])
        net = accel.prepare(ctx, net, plan=plan)
        split = [name for name, each in net.named_parameters() if not each.placements[0].is_replicate()]
        assert "blocks.0.mlp.up.weight" in split
        assert "norm.weight" not in split
        assert "blocks.0.mlp.down.bias" not in split
        for name, each in net.named_parameters():
            assert each.to_local().numel() * (4 if name in split else 1) == each.numel()
            assert before[name].numel() == (0 if name in split else each.numel())
        return list(net.state_dict()) == list(made().state_dict())

    assert ranks.run(rank, 4, default_group=True) == [True] * 4


@settings(max_examples=share(0.14), deadline=None)
@given(
    rows=st.integers(1, 5),
    ignored=st.booleans(),
    size=st.sampled_from([1, 2, 3]),
    half=st.booleans(),
    classes=st.sampled_from([5, 6]),
)
def test_the_loss_of_divided_classes_is_cross_entropy(ranks, rows, ignored, size, half, classes):
    dtype = torch.bfloat16 if half else torch.float64
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(2, rows, classes, generator=generator, dtype=torch.float64) * 30).to(dtype)
    targets = torch.randint(0, classes, (2, rows), generator=generator)
    if ignored:
        targets[0] = 99

    def rank(ctx):
        if size > 1:
            ctx = accel.replace(ctx, mesh=f"tp={size}")
        own = logits.chunk(size, -1)[ctx.rank].clone().requires_grad_()
        loss = accel.parallel.vocab_cross_entropy(ctx, own, targets, ignore_index=99)
        (loss * 3).backward()
        return loss.detach(), own.grad

    plain = logits.double().clone().requires_grad_()
    expected = nn.functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), ignore_index=99, reduction="sum")
    (expected * 3).backward()
    got = ranks.run(rank, size, default_group=True)
    close = {"rtol": 1e-2, "atol": 1e-2} if half else NORMS
    for loss, _ in got:
        torch.testing.assert_close(loss.double(), expected.detach(), **close)
    torch.testing.assert_close(torch.cat([grad for _, grad in got], -1).double(), plain.grad, **close)


def test_targets_that_are_no_class_make_the_loss_nan_and_shapes_must_fit(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=2")
        assert accel.parallel.vocab_cross_entropy(ctx, torch.zeros(1, 3), torch.tensor([6])).isnan()
        uneven = torch.zeros(1, 3 - ctx.rank)  # five classes
        assert accel.parallel.vocab_cross_entropy(ctx, uneven, torch.tensor([5])).isnan()
        assert not accel.parallel.vocab_cross_entropy(ctx, uneven, torch.tensor([4])).isnan()
        assert not accel.parallel.vocab_cross_entropy(ctx, torch.zeros(1, 3), torch.tensor([5])).isnan()
        with assert_raises(accel.errors.ConfigError, expected=r"targets of shape \[1\]", got=r"shape \[2\]"):
            accel.parallel.vocab_cross_entropy(ctx, torch.zeros(1, 3), torch.tensor([1, 1]))
        return True

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def test_ranks_share_any_number_of_tokens_in_evaluation(ranks):
    ids = torch.arange(8)[None] % 7
    lengths = (8, 6, 3)  # of four ranks

    def logits(net: Any) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [net(ids[:, :length]).clone() for length in lengths]

    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=4")
        styles = plans(fused=False)["sequence"]
        return logits(accel.prepare(ctx, made(), plan=accel.parallel.Plan(tensor=styles, sequence=True)))

    expected = logits(made())
    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, expected, **NORMS)


def test_divided_logits_send_three_numbers_for_a_token_and_not_a_row(monkeypatch):
    """Elements of all collectives of a step of one rank."""
    batch, classes, size = 4, 211, 4
    tokens = batch * TOKENS

    def sent(head):
        with fake_rank(monkeypatch, Axes(tp=size)) as ctx:
            model = made(tied=True, classes=classes)
            model = accel.prepare_model(
                ctx, model, plan=accel.parallel.Plan(tensor=accel.parallel.tensor_plan(model, head=head))
            )
            ids, labels = (torch.stack(each) for each in zip(*loader(batch, batch).dataset, strict=True))
            with Counted(Axes(tp=size)) as counted:
                total_loss(ctx, model(ids), labels, divided=head == "colwise").backward()
        return {operation: count // 8 for (_, operation), count in counted.bytes.items()}

    ends = 2 * tokens * WIDTH  # the embedding's sum, and that of the gradient of the head's input
    marks = 4  # numbers of the comparison of logits
    assert sent("colwise") == {"all-reduce": ends + 3 * (tokens + 1) + marks}
    assert sent("colwise_gather_output") == {"all-reduce": ends, "all-gather": tokens * 53 * size}


class Places(nn.Module):
    """Parameters that a batch of one row gives one gradient, or parts of one."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.places, self.more = (
                nn.Parameter(torch.randn(1, tokens, WIDTH, dtype=torch.float64)) for tokens in (1, 4, 4)
            )
            self.up, self.down, self.side = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + (self.places + self.more)
        hidden = torch.tanh(self.up(hidden[0].mean(0)))  # one row, whose gradient no bias sums
        return self.down(hidden) + self.side(hidden)


def test_gradients_of_whole_parameters_share_no_memory(ranks):
    def rank(ctx: accel.DistContext, mesh: str) -> Any:
        ctx = accel.replace(ctx, mesh=mesh)
        net = Places()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        plan = accel.parallel.Plan(tensor={"up": "colwise", "down": "rowwise", "side": "rowwise"})
        net, optimizer = accel.prepare(ctx, net, optimizer, plan=plan)
        state = accel.train_state(ctx, accumulation=2)
        for rows in torch.randn(2, 1, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64):
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, net):
                state = accel.backward(ctx, net(rows).square().mean(), state, weight=1)
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        return [state.grad_norm], whole(net)

    (expected,) = ranks.run(lambda ctx: rank(ctx, ""), 1)
    for found in ranks.run(lambda ctx: rank(ctx, "tp=2"), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", ["model", {"head": "colwise_gather_output"}], ids=["found", "given"])
def test_a_recomputed_method_reads_parameters_of_its_module(ranks, plan):
    (entry,) = named("checkpointed_methods")
    ids, targets = entry.batch(1, 2)
    plain = entry.make()
    entry.loss(plain(ids), targets).backward()

    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, entry.make(), plan=accel.parallel.Plan(tensor=plan), example=(ids,))
        _ = accel.backward(ctx, entry.loss(model(ids), targets), begin_batch(ctx), weight=1)
        grads = {name: each.grad for name, each in model.named_parameters()}
        return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}

    for grads in ranks.run(rank, 2, default_group=True):
        for name, each in plain.named_parameters():
            torch.testing.assert_close(grads[name], each.grad, rtol=0, atol=1e-12)


class Differentiated(nn.Module):
    """Adds what its layers send back for ones: a transform of torch.func in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, back = torch.func.vjp(lambda given: self.down(torch.tanh(self.up(given))), x)
        return self.head(x + y + back(torch.ones_like(y))[0])


def test_replicated_layers_run_in_transforms_of_functions(ranks):
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    torch.manual_seed(3)
    plain = Differentiated().double()
    plain(x).square().sum().backward()

    def rank(ctx):
        ctx = accel.replace(ctx, mesh="tp=2")
        plan = accel.parallel.Plan(tensor={"head": "colwise_gather_output"})
        model = accel.prepare_model(ctx, copy.deepcopy(plain), plan=plan)
        model.zero_grad()
        _ = accel.backward(ctx, model(x).square().sum(), begin_batch(ctx), weight=1)
        grads = {name: each.grad for name, each in model.named_parameters()}
        return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}

    for grads in ranks.run(rank, 2, default_group=True):
        for name, each in plain.named_parameters():
            torch.testing.assert_close(grads[name], each.grad, rtol=0, atol=1e-12)


def test_a_hook_of_a_backward_gets_the_parameters_themselves(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[bool]:
        ctx = accel.replace(ctx, mesh="tp=2")
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = accel.prepare_model(ctx, net, plan=accel.parallel.Plan(tensor={"0": "colwise", "1": "rowwise"}))
        found: list[bool] = []
        for each in (net[0], net[1]):
            _ = each.register_full_backward_hook(lambda module, *_: found.append(isinstance(module.weight, DTensor)))
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        return found

    assert ranks.run(rank, 2, default_group=True) == [[True, True]] * 2
