# SPDX-License-Identifier: Apache-2.0
"""A head and its cross entropy without logits: values and gradients as with logits, on meshes, in few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import language_models as lm
import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from live_bytes import LiveBytes
from recorded_ranks import Steps, recorded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import accel
from accel.errors import ConfigError
from accel.parallel import linear_cross_entropy, vocab_cross_entropy
from accel.tensors import full_tensor
from accel.testing import Simulator

ONE = accel.single("cpu")
ROWS, WORDS, WIDTH = 13, 21, 6


def plain(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """The loss by logits, with torch's own cross entropy."""
    ignored = -100 if ignore_index is None else ignore_index
    logits = functional.linear(input, linear_weight, linear_bias).to(torch.promote_types(input.dtype, torch.float32))
    logits = logits * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    options: Any = {"weight": weight, "ignore_index": ignored, "label_smoothing": label_smoothing}
    losses = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none", **options)
    counted = (target != ignored).flatten()
    losses = losses + z_loss * logits.flatten(0, -2).logsumexp(-1).square() * counted
    each = torch.ones_like(losses) if token_weights is None else token_weights.flatten()
    losses = losses * each
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    of_class = torch.ones_like(losses) if weight is None else weight[target.flatten().masked_fill(~counted, 0)]
    return losses.sum() / (of_class * each * counted).sum()


def drawn(dtype: torch.dtype = torch.float64, rows: int = ROWS, words: int = WORDS, width: int = WIDTH) -> Any:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(each, width, generator=generator, dtype=torch.float64) for each in (rows, words))
    bias, target = torch.randn(words, generator=generator), torch.randint(words, (rows,), generator=generator)
    target[::5] = -100
    return [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)], target


def largest(found: Any, expected: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


FACTORS = torch.linspace(0.1, 2.0, WORDS, dtype=torch.float64)
OPTIONS = st.fixed_dictionaries(
    {
        "weight": st.sampled_from([None, FACTORS]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "ignore_index": st.sampled_from([None, -100, 4]),
        "label_smoothing": st.sampled_from([0.0, 0.3, 1.0]),
        "softcap": st.sampled_from([None, 3.0]),
        "scale": st.sampled_from([1.0, 0.5]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "token_weights": st.sampled_from([None, torch.linspace(0, 1, ROWS, dtype=torch.float64)]),
    }
)


@given(OPTIONS, st.booleans(), st.sampled_from([1, 4, 13, 64]), st.sampled_from([None, True, False]), st.booleans())
def test_values_and_gradients_are_those_with_logits(
    options: Any, has_bias: bool, chunk: int, recompute: bool | None, batched: bool
) -> None:
    leaves, target = drawn()
    target = target.masked_fill(target == -100, 4) if options["ignore_index"] == 4 else target
    if options["reduction"] == "none" and recompute is False:
        recompute = None
    hidden, weight, bias = leaves
    leaves = leaves if has_bias else leaves[:2]
    if batched:
        hidden, target = hidden[None], target[None]
        options = options | {"token_weights": None}
    options = options | {"linear_bias": bias if has_bias else None}
    expected = plain(hidden, weight, target, **options)
    found = linear_cross_entropy(ONE, hidden, weight, target, chunk_size=chunk, recompute=recompute, **options)
    assert found.shape == expected.shape
    upstream = torch.linspace(0.5, 1, found.numel(), dtype=torch.float64).view(found.shape)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    assert largest([found], [expected]) < 1e-10
    assert largest(torch.autograd.grad(found, leaves, upstream), wanted) < 1e-10


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_that_is_embedding_and_head_gets_both_gradients(recompute: bool) -> None:
    (hidden, weight, _), target = drawn()
    states = torch.tanh(weight[target.clamp(min=0)] + hidden)
    wanted = torch.autograd.grad(plain(states, weight, target), (hidden, weight), retain_graph=True)
    loss = linear_cross_entropy(ONE, states, weight, target, chunk_size=4, recompute=recompute)
    assert largest(torch.autograd.grad(loss, (hidden, weight)), wanted) < 1e-10


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_compiled_without_a_break_in_the_graph(recompute: bool) -> None:
    (hidden, weight, bias), target = drawn()

    def loss(states: Tensor) -> Tensor:
        options: Any = {"softcap": 3.0, "z_loss": 1e-3, "label_smoothing": 0.1, "linear_bias": bias}
        return linear_cross_entropy(ONE, states.tanh(), weight, target, chunk_size=8, recompute=recompute, **options)

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = (hidden, weight, bias)
    assert largest(torch.autograd.grad(compiled(hidden), leaves), torch.autograd.grad(loss(hidden), leaves)) < 1e-10


def test_rows_without_targets_and_single_rows() -> None:
    (hidden, weight, _), target = drawn()
    assert linear_cross_entropy(ONE, hidden[:0], weight, target[:0], reduction="sum").item() == 0.0
    assert linear_cross_entropy(ONE, hidden, weight, torch.full_like(target, -100), reduction="sum").item() == 0.0
    assert linear_cross_entropy(ONE, hidden, weight, torch.full_like(target, -100)).isnan()
    one = linear_cross_entropy(ONE, hidden[1], weight, target[1])
    assert largest([one], [plain(hidden[1:2], weight, target[1:2])]) < 1e-10
    with torch.no_grad():
        assert largest([linear_cross_entropy(ONE, hidden, weight, target)], [plain(hidden, weight, target)]) < 1e-10


@pytest.mark.parametrize("recompute", [False, True])
def test_a_target_that_is_no_class_makes_loss_and_gradients_nan(recompute: bool) -> None:
    (hidden, weight, _), target = drawn()
    target[1] = WORDS
    loss = linear_cross_entropy(ONE, hidden, weight, target, recompute=recompute)
    assert loss.isnan()
    assert torch.autograd.grad(loss, weight)[0].isnan().any()


def test_a_retained_graph_needs_logits_again() -> None:
    (hidden, weight, _), target = drawn()
    loss = linear_cross_entropy(ONE, hidden, weight, target)
    loss.backward(retain_graph=True)
    with assert_raises(ConfigError, fix="recompute=True") as error:
        loss.backward()
    assert "a second backward" in str(error.value)
    loss = linear_cross_entropy(ONE, hidden, weight, target, recompute=True)
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    assert largest(torch.autograd.grad(loss, weight), first) == 0.0


# 16 bits: no further from float64 than the plain way


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_gradients_are_as_near_as_plain_ones(autocast: bool, recompute: bool) -> None:
    (hidden, weight, _), target = drawn(rows=256, words=64, width=32)
    exact = torch.autograd.grad(plain(hidden, weight, target), (hidden, weight))
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]

    def distance(loss: Tensor) -> list[float]:
        found = torch.autograd.grad(loss, leaves)
        assert [each.dtype for each in found] == [dtype, dtype]
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        by_logits = plain(*leaves, target)
        by_chunks = linear_cross_entropy(ONE, *leaves, target, chunk_size=64, recompute=recompute)
    assert by_chunks.dtype == torch.float32
    for found, expected in zip(distance(by_chunks), distance(by_logits), strict=True):
        assert found < 1.2 * expected


def test_float64_stays_in_autocast_as_in_torch() -> None:
    hidden, head = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randn(WORDS, WIDTH, dtype=torch.float64)
    target = torch.arange(ROWS) % WORDS
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(ONE, hidden, head, target)
        expected = functional.cross_entropy(functional.linear(hidden, head), target)
        model = accel.defer_logits(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)).double())
        logits = model(target)
    assert found.dtype == torch.float64
    assert abs(float(found - expected)) < 1e-12
    assert logits.dtype == torch.float64


def test_fp16_gradients_have_the_loss_scale_before_they_are_rounded() -> None:
    (hidden, weight, _), target = drawn()
    leaves = [(1e-3 * each.detach()).half().requires_grad_() for each in (hidden, weight)]
    exact = torch.autograd.grad(plain(*(each.double() for each in leaves), target), leaves)
    loss = linear_cross_entropy(ONE, *leaves, target) * 2.0**14 * 1e-4
    found = [each.double() / (2.0**14 * 1e-4) for each in torch.autograd.grad(loss, leaves)]
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm() / other.double().norm()) < 5e-3
    with assert_raises(ConfigError, got="loss scale"):
        linear_cross_entropy(ONE, *leaves, target, recompute=False)


# Bytes


def peaks(dtype: torch.dtype, call: Any) -> tuple[int, int]:
    """The peak of forward and backward, and bytes between them, without parameters and inputs."""
    (hidden, weight, _), target = drawn(dtype, rows=64, words=4096, width=16)
    with LiveBytes() as live:
        loss = call(ONE, hidden, weight, target)
        between = live.now
        loss.backward()
        del loss
    assert weight.grad is not None
    return live.peak, between


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_are_those_of_the_weight_gradient_and_three_chunks_of_logits(dtype: torch.dtype) -> None:
    weight, chunk, rows = 4096 * 16 * 4, 16 * 4096 * 4, 64 * 16 * 4
    small = 64 * 8 * 16  # numbers of rows
    held = 4096 * 16 * dtype.itemsize + 64 * 16 * dtype.itemsize

    def by(recompute: bool) -> Any:
        return lambda *args: linear_cross_entropy(*args, chunk_size=16, recompute=recompute)

    narrow = weight if dtype != torch.float32 else 0  # a chunk's part of the gradient in 16 bits, and the result
    peak, between = peaks(dtype, by(False))
    assert peak <= weight + narrow + 3 * chunk + rows + small
    assert held <= between <= held + small
    peak, between = peaks(dtype, by(True))
    assert peak <= weight + narrow + 3 * chunk + rows + small
    assert between <= small
    logits = 64 * 4096 * 4
    assert peaks(dtype, lambda ctx, *args: plain(*args))[0] > 2 * logits > peak


# Along tp


def split_words(ctx: accel.DistContext, options: Any, kind: str, words: int) -> tuple[Tensor, ...]:
    """Loss and gradients where each rank has its words, plain or as a DTensor."""
    ctx = accel.replace(ctx, mesh=f"tp={ctx.world_size}")
    (hidden, weight, bias), target = drawn(words=words)
    options = {**options, "linear_bias": bias}
    if options.get("weight") is not None:
        options["weight"] = FACTORS[:words]
    leaves = [hidden, weight, bias]
    expected = plain(hidden, weight, target, **options)
    upstream = torch.linspace(0.5, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    mesh = ctx.mesh["tp"]
    if kind == "plain":
        cut = [each.detach().chunk(ctx.world_size)[ctx.rank].clone().requires_grad_() for each in (weight, bias)]
    else:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        to = [Shard(0) if kind == "split" else Replicate()]
        cut = [distribute_tensor(each.detach(), mesh, to).requires_grad_() for each in (weight, bias)]
    options["linear_bias"] = cut[1]
    found = linear_cross_entropy(ctx, hidden, cut[0], target, chunk_size=4, **options)
    grads = torch.autograd.grad(found, [hidden, *cut], upstream)
    parts = [grads[0], *(each if kind == "plain" else full_tensor(each) for each in grads[1:])]
    if kind == "plain":
        wanted = (wanted[0], *(each.chunk(ctx.world_size)[ctx.rank] for each in wanted[1:]))
    return found.detach() - expected.detach(), *(a - b for a, b in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("kind", ["plain", "split", "replicated"])
@pytest.mark.parametrize("words", [20, 21])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 3.0, "z_loss": 1e-2, "label_smoothing": 0.2, "weight": FACTORS},
        {"reduction": "none", "label_smoothing": 0.2},
    ],
    ids=["default", "all", "none"],
)
def test_ranks_along_tp_compute_what_one_computes(ranks: Simulator, options: Any, kind: str, words: int) -> None:
    for each in ranks.run(lambda ctx: split_words(ctx, options, kind, words), 2, default_group=True):
        assert largest(each, [torch.zeros(())] * len(each)) < 1e-10


@pytest.mark.parametrize(("kind", "messages"), [("plain", 2), ("split", 1), ("replicated", 0)])
def test_messages_along_tp(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str, messages: int) -> None:
    def counted(ctx: accel.DistContext, steps: Steps) -> tuple[int, int]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        ctx = accel.replace(ctx, mesh="tp=2")
        (hidden, weight, _), target = drawn()
        part = weight.detach().chunk(2)[ctx.rank]
        if kind != "plain":
            part = distribute_tensor(weight.detach(), ctx.mesh["tp"], [Shard(0) if kind == "split" else Replicate()])
        _ = accel.group_of(ctx, "tp")
        accel.wait_for_everyone(ctx)
        before = len(steps[ctx.rank])
        loss = linear_cross_entropy(ctx, hidden, part.requires_grad_(), target, chunk_size=2)
        forward = len(steps[ctx.rank])
        loss.backward()
        return forward - before, len(steps[ctx.rank]) - forward

    with recorded(monkeypatch) as steps:
        counts = ranks.run(lambda ctx: counted(ctx, steps), 2, default_group=True)
    assert counts[0] == (messages, int(messages > 0))


# Models on meshes: the loss is computed in forward


class Lossy(lm.LanguageModel):
    """Returns the sum of losses with logits or without, or the states that the loop computes it from."""

    def __init__(self, ctx: accel.DistContext, way: str, **options: Any) -> None:
        super().__init__(ctx, **options)
        self.ctx, self.way = ctx, way

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        hidden = self.embed(ids, position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        if self.way == "in the loop":
            return hidden * 1.0
        if self.way == "logits":
            logits = self.head(hidden).flatten(0, 1)
            losses = functional.cross_entropy(logits, labels.flatten(), reduction="none")
            return (losses * token_weights.flatten()).sum()
        return self.loss_of(hidden, labels, token_weights)

    def loss_of(self, hidden: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        options: Any = {"token_weights": token_weights, "reduction": "sum", "chunk_size": 3}
        return linear_cross_entropy(self.ctx, hidden, self.head.weight, labels, **options)


def trained(ctx: accel.DistContext, mesh: str, strategy: str, way: str, *, tied: bool) -> dict[str, Tensor]:
    """Train with accumulation, token weights and clipping; return the parameters."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    with accel.seeding.seeded(ctx, 0):
        model: nn.Module = Lossy(ctx, way, tied=tied).double()
    optimizer = lm.STEEPEST(model.parameters())
    loader = accel.prepare_loader(ctx, DataLoader(lm.rows(), batch_size=4), global_batch=4)
    styles = {key: each for key, each in lm.STYLES.items() if not (tied and key in ("head", "embed.tokens"))}
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(tensor=styles))
    state = accel.train_state(ctx, accumulation=2)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        labels = batch.data.masked_fill(batch.data == 3, -100)
        labels[int(batch.valid) :] = -100
        part = accel.parallel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
        each = 0.5 + 0.1 * part["labels"].clamp(min=0).double()
        weights = each * (part["labels"] != -100)
        with accel.accumulate(ctx, state, model):
            total = model(**part, token_weights=weights)
            if way == "in the loop":
                total = accel.unwrap_model(model).loss_of(total, part["labels"], weights)
            count = weights.sum()
            state = accel.backward(ctx, total / count.clamp(min=1e-9), state, weight=count)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    held = accel.unwrap_model(model).named_parameters()
    return {name: full_tensor(each) for name, each in held}


MESHES = {
    "ddp": ("dp=2", "ddp", 2),
    "fsdp": ("dp=2", "fsdp", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", "fsdp", 4),
    "tp": ("tp=2", "ddp", 2),
    "fsdp x tp": ("dp=2,tp=2", "fsdp", 4),
    "cp": ("cp=2", "ddp", 2),
    "cp x fsdp": ("cp=2,dp=2", "fsdp", 4),
}


@pytest.mark.parametrize(("way", "tied"), [("in forward", True), ("in the loop", False)])
@pytest.mark.parametrize("name", MESHES)
def test_training_on_meshes_is_that_of_one_rank_with_logits(ranks: Simulator, name: str, tied: bool, way: str) -> None:
    mesh, strategy, size = MESHES[name]
    one = ranks.run(lambda ctx: trained(ctx, "dp=1", "ddp", "logits", tied=tied), 1, default_group=True)
    expected = one[0]
    runs = ranks.run(lambda ctx: trained(ctx, mesh, strategy, way, tied=tied), size, default_group=True)
    for run in runs:
        assert largest([run[key] for key in expected], expected.values()) < 1e-10


# Slips


def test_arguments_that_do_not_fit_are_refused() -> None:
    (hidden, weight, _), target = drawn()
    slips: Any = (
        ({"input": hidden[:-1]}, {"problem": "do not fit"}),
        ({"linear_weight": weight[:, :-1]}, {"problem": "do not fit"}),
        ({"target": torch.rand(ROWS, WORDS)}, {"problem": "probabilities"}),
        ({"token_weights": torch.ones(2)}, {"problem": "token weights"}),
        ({"token_weights": torch.ones(ROWS).requires_grad_()}, {"fix": 'reduction="none"'}),
        ({"reduction": "most"}, {"problem": "reduction"}),
        ({"label_smoothing": 1.5}, {"problem": "label_smoothing"}),
        ({"softcap": 0.0}, {"problem": "softcap"}),
        ({"chunk_size": 0}, {"problem": "chunk_size"}),
        ({"reduction": "none", "recompute": False}, {"fix": "Leave recompute=False out"}),
    )
    for slip, fields in slips:
        arguments = {"input": hidden, "linear_weight": weight, "target": target, **slip}
        with assert_raises(ConfigError, **fields):
            linear_cross_entropy(ONE, **arguments)


def test_a_weight_that_fsdp_holds_apart_is_refused_with_the_line_to_write(ranks: Simulator) -> None:
    class Model(nn.Module):
        def __init__(self, ctx: accel.DistContext) -> None:
            super().__init__()
            self.ctx, self.head = ctx, nn.Linear(WIDTH, WORDS, bias=False).double()

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(self.ctx, hidden, self.head.weight, target)

    def rank(ctx: accel.DistContext, mesh: str) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        styles: Any = {"head": "colwise"} if "tp" in mesh else {}
        plan = accel.parallel.Plan(tensor=styles, reshard_after_forward=True)
        model: Any = accel.prepare_model(ctx, Model(ctx), plan=plan)
        (hidden, _, _), target = drawn()
        assert model(hidden, target).isfinite()
        with assert_raises(ConfigError, fix="in the forward of the model"):
            linear_cross_entropy(ctx, hidden, accel.unwrap_model(model).head.weight, target)

    ranks.run(lambda ctx: rank(ctx, "dp=2"), 2, default_group=True)
    ranks.run(lambda ctx: rank(ctx, "dp=2,tp=2"), 4, default_group=True)


def test_the_loss_by_logits_of_own_words_is_the_same(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="tp=2")
        (hidden, weight, _), target = drawn()
        own, hidden = weight.detach().chunk(2)[ctx.rank], hidden.detach()
        other = vocab_cross_entropy(ctx, hidden @ own.t(), target)
        return float(linear_cross_entropy(ctx, hidden, own, target, reduction="sum") - other)

    assert max(map(abs, ranks.run(rank, 2, default_group=True))) < 1e-10


class ReadHead(nn.Module):
    """A divided block, and a head that the forward reads without calling it."""

    def __init__(self, ctx: accel.DistContext, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.ctx, self.read = ctx, read
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        hidden = hidden + self.down(self.up(hidden).relu())
        weight = self.read(self)
        return linear_cross_entropy(self.ctx, hidden.to(weight.dtype), weight, target)


READ: dict[str, Callable[[Any], Tensor]] = {
    "as it is": lambda model: model.head.weight,
    "float32": lambda model: model.head.weight.float(),
    "bfloat16": lambda model: model.head.weight.bfloat16(),
    "scaled": lambda model: model.head.weight * 1.5,
    "by a parameter": lambda model: model.head.weight * model.gain,
    "detached": lambda model: model.head.weight.detach(),
}


@pytest.mark.parametrize(
    ("style", "read"),
    [
        *(("replicated", read) for read in READ),
        *((style, read) for style in ("replicated_local", "colwise_gather_output") for read in ("as it is", "float32")),
    ],
)
@pytest.mark.parametrize("mode", ["trained", "frozen", "no_grad"])
def test_a_head_that_the_forward_of_a_divided_model_reads(ranks: Simulator, style: Any, mode: str, read: str) -> None:
    (hidden, _, _), target = drawn()

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            plain = ReadHead(ctx, READ[read]).double()
        _ = plain.head.weight.requires_grad_(mode != "frozen")
        styles: Any = {"up": "colwise", "down": "rowwise", "head": style}
        model = accel.prepare_model(ctx, plain, plan=accel.parallel.Plan(tensor=styles))
        with torch.set_grad_enabled(mode != "no_grad"):
            loss = model(hidden.detach(), target)
        if mode != "no_grad":
            loss.backward()
        grads = [each.grad for each in accel.unwrap_model(model).parameters() if each.grad is not None]
        return [loss.detach(), *map(full_tensor, grads)]

    expected = rank(ONE)
    close = {"float32": 1e-5, "bfloat16": 2e-2}.get(read, 1e-10)
    for found in ranks.run(lambda ctx: rank(accel.replace(ctx, mesh="tp=2")), 2, default_group=True):
        assert len(found) == len(expected)
        assert largest(found, expected) < close


@pytest.mark.parametrize("own", ["zeros", "parameter"])
def test_equal_weights_that_may_be_parts_are_refused(ranks: Simulator, own: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        (hidden, weight, _), target = drawn()
        part = torch.zeros(10, WIDTH).double() if own == "zeros" else weight.detach()[:10].requires_grad_()
        with assert_raises(ConfigError, expected="other values on each rank", fix="Pass the parameter itself"):
            linear_cross_entropy(ctx, hidden, part, target)

    ranks.run(rank, 2, default_group=True)
