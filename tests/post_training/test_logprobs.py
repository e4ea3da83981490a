# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens: those of log_softmax and gather on every mesh; packed rows are equal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch._dynamo  # with it, models tell torch.compile where their backwards begin and end
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from live_bytes import LiveBytes
from planned_parts import notes_of
from profiles import share
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.data import DataLoader

import accel
from accel import post_training as post
from accel.errors import ConfigError
from accel.tensors import full_tensor
from accel.testing import Simulator

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
import language_models as lm

ONE = accel.single("cpu")


def plain(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    every = (logits / temperature).log_softmax(-1)
    counted = targets != -100
    chosen = every.gather(-1, targets.masked_fill(~counted, 0)[..., None])[..., 0]
    return chosen.masked_fill(~counted, 0.0), torch.special.entr(every.exp()).sum(-1)


def assert_near(found: Any, expected: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Capped(torch.nn.Module):
    """A head whose logits are scaled and capped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, 11, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.head(self.embed(ids).tanh()) * 2 / 3).tanh() * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_deferred_logits_give_the_same_scores(temperature: float, entropy: bool) -> None:
    ids = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[1, 2] = -100
    found: list[Any] = []
    for deferred in (False, True):
        torch.manual_seed(0)
        model = Capped()
        model = accel.defer_logits(model) if deferred else model
        logits = model(ids)[:, :-1]
        scores: Any = post.token_logprobs(ONE, logits, targets, temperature=temperature, entropy=entropy)
        scores = scores if entropy else (scores,)
        (scores[0].square().sum() + sum(each.sum() for each in scores)).backward()
        found.append([*scores, *(each.grad for each in model.parameters())])
        assert not deferred or not logits.is_made  # type: ignore[attr-defined]
    assert_near(*found)
    with torch.no_grad():
        model.train(False)
        scores = post.token_logprobs(ONE, logits, targets, temperature=temperature, entropy=entropy)
        assert_near([*(scores if entropy else (scores,))], [each.detach() for each in found[0][: 1 + entropy]])
        assert not logits.is_made  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
def test_deferred_logits_of_many_words_take_two_chunks_and_the_gradient_of_the_head(entropy: bool) -> None:
    words, tokens, width = 131_072, 2_048, 32
    head = accel.defer_logits(torch.nn.Sequential(torch.nn.Embedding(words, width), torch.nn.Linear(width, words)))[1]
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    with LiveBytes() as live:
        found: Any = post.token_logprobs(ONE, head(hidden), torch.zeros(1, tokens, dtype=torch.int64), entropy=entropy)
        (found[0] + found[1] if entropy else found).sum().backward()
    assert head.weight.grad is not None
    assert live.peak < 330e6 < words * tokens * 4


@settings(max_examples=share(1.5))
@given(st.integers(0, 99), st.sampled_from([0.3, 1.0, 2.5]), st.integers(1, 9), st.booleans())
def test_scores_are_those_of_log_softmax(seed: int, temperature: float, words: int, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(2, 3, words, generator=generator, dtype=torch.float64)
    targets = torch.randint(words, (2, 3), generator=generator)
    targets[0, 0] = -100
    upstream = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    own, twin = (logits.clone().requires_grad_() for _ in range(2))
    expected = plain(twin, targets, temperature)
    if entropy:
        found: Any = post.token_logprobs(ONE, own, targets, temperature=temperature, entropy=True)
    else:
        found = (post.token_logprobs(ONE, own, targets, temperature=temperature),)
    expected = expected[: len(found)]
    assert_near(found, expected)
    grads = [
        torch.autograd.grad([*each], leaf, [*upstream[: len(found)]]) for each, leaf in ((found, own), (expected, twin))
    ]
    assert_near(*grads)


def test_words_without_probability_have_no_entropy_and_no_gradient() -> None:
    logits = torch.tensor([[[0.0, -float("inf"), 1.0], [-2000.0, 0.0, 1.0]]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = post.token_logprobs(ONE, logits, torch.tensor([[0, 1]]), entropy=True)
    assert_near(entropy, torch.tensor([[0.5822033, 0.5822033]], dtype=torch.float64), 1e-6)
    (logprobs + entropy).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 0, 1] == logits.grad[0, 1, 0] == 0


def test_16_bits_are_scored_in_32_and_no_class_is_nan() -> None:
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = post.token_logprobs(ONE, logits, torch.tensor([[4, 5]]))
    assert_near(found[0, 0], logits.float().log_softmax(-1)[0, 0, 4], 1e-6)
    assert found[0, 1].isnan()


def test_slips_are_errors() -> None:
    logits, ids = torch.zeros(1, 4, 5), torch.zeros(1, 4, dtype=torch.int64)
    with assert_raises(ConfigError, problem="logits and targets do not fit") as caught:
        _ = post.token_logprobs(ONE, logits, ids[:, 1:])
    assert "token_logprobs(ctx, logits[:, :-1], ids[:, 1:])" in str(caught.value)
    assert post.token_logprobs(ONE, logits[:, :-1], ids[:, 1:]).shape == (1, 3)
    with assert_raises(ConfigError, problem="temperature"):
        _ = post.token_logprobs(ONE, logits, ids, temperature=0.0)
    for wrong in (ids.float(), ids.bool()):
        with assert_raises(ConfigError, problem="no classes"):
            _ = post.token_logprobs(ONE, logits, wrong)
    outputs = SimpleNamespace(logits=logits)
    with assert_raises(ConfigError, fix=r"token_logprobs\(ctx, outputs.logits, targets\)"):
        _ = post.token_logprobs(ONE, outputs, ids)  # type: ignore[arg-type]
    assert torch.equal(post.token_logprobs(ONE, outputs.logits, ids.int()), post.token_logprobs(ONE, logits, ids))


def test_a_dtensor_is_refused_with_the_line_that_scores_its_part(ranks: Simulator) -> None:
    whole = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.randint(8, (2, 3), generator=torch.Generator().manual_seed(1))

    def lines(ctx: accel.DistContext, placement: Placement) -> list[tuple[Tensor, Tensor]]:
        ctx = accel.replace(ctx, mesh="tp=2")
        mesh = DeviceMesh("cpu", [0, 1])
        part = whole.chunk(2, -1)[ctx.rank] if placement.is_shard() else whole
        leaf = part.clone().requires_grad_()
        names: dict[str, Any] = {"ctx": ctx, "targets": labels, "logits": DTensor.from_local(leaf, mesh, [placement])}
        names |= {"token_logprobs": post.token_logprobs, "vocab_cross_entropy": accel.parallel.vocab_cross_entropy}
        calls = ["token_logprobs", *(["vocab_cross_entropy"] if placement.is_shard() else [])]
        found: list[tuple[Tensor, Tensor]] = []
        for call in calls:
            with assert_raises(ConfigError, problem="logits are a DTensor") as caught:
                names[call](ctx, names["logits"], labels)
            assert caught.value.fix is not None
            scores = eval(caught.value.fix, names)
            [grad] = torch.autograd.grad(scores.sum(), leaf)
            sign = 1 if call == "token_logprobs" else -1
            found.append((sign * scores.sum(), sign * grad))
        return found

    twin = whole.clone().requires_grad_()
    total = plain(twin, labels)[0].sum()
    [grad] = torch.autograd.grad(total, twin)
    for placement in (Replicate(), Shard(2)):
        runs = ranks.run(lambda ctx, placement=placement: lines(ctx, placement), 2, default_group=True)
        for rank, found in enumerate(runs):
            for each in found:
                assert_near(each, (total, grad.chunk(2, -1)[rank] if placement.is_shard() else grad))


# Meshes


def train(
    ctx: accel.DistContext, mesh: str, strategy: Any, *, by_hand: bool, head: str, experts: int, logits: Any = "full"
) -> dict[str, Tensor]:
    """Take three steps on batches of sequences, with tokens that do not count; return the full parameters."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    model, optimizer = lm.make_objects(ctx, experts=experts)
    plan = lm.plan_of(experts)
    if head != "colwise":
        plan = accel.parallel.Plan(tensor={**lm.STYLES, "head": head})
    plan = msgspec.structs.replace(plan, logits=logits)
    loader = accel.prepare_loader(ctx, DataLoader(lm.rows(), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    parallel = head == "colwise" and "tp" in mesh
    state = accel.train_state(ctx, accumulation=1)

    def score(logits: Tensor, targets: dict[str, Tensor]) -> post.LossSum:
        if by_hand:
            logprobs, entropy = plain(logits, targets["labels"], 0.7)
        else:
            logprobs, entropy = post.token_logprobs(
                ctx, logits, targets["labels"], temperature=0.7, entropy=True, vocab_parallel=parallel
            )
        return post.weighted_sum(ctx, -logprobs - 0.1 * entropy, targets["mask"], average="sequence")

    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        labels = batch.data.masked_fill(batch.data == 3, -100)
        labels[int(batch.valid) :] = -100
        part = accel.parallel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
        wanted = {"labels": part.pop("labels")}
        wanted["mask"] = wanted["labels"] != -100
        if "pp" in mesh:
            weight = post.loss_weight(ctx, wanted["mask"], average="sequence")
            _, state = accel.forward_backward(
                ctx, model, state, part, targets=wanted, loss_fn=lambda *given: score(*given).sum, weight=weight
            )
        else:
            with accel.accumulate(ctx, state, model):
                loss = score(model(**part), wanted)
                state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
        state = accel.optimizer_step(ctx, optimizer, state)
    plain_model = accel.unwrap_model(model)
    assert not any("reported" in notes_of(each) for each in plain_model.modules())  # by logits that are made
    return {name: full_tensor(each).detach() for name, each in plain_model.named_parameters()}


@pytest.mark.parametrize("head", ["colwise", "colwise_gather_output"])
def test_deferred_logits_refuse_the_flag_of_another_head(ranks: Simulator, head: str) -> None:
    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh="tp=2")
        model, _ = lm.make_objects(ctx, experts=0)
        plan = accel.parallel.Plan(tensor={**lm.STYLES, "head": head}, logits="deferred")
        model = accel.prepare_model(ctx, model, plan=plan)
        ids = torch.arange(8).view(1, 8)
        logits = model(**accel.parallel.split_sequence(ctx, {"ids": ids}))
        with pytest.raises(ConfigError) as caught:
            post.token_logprobs(ctx, logits, ids, vocab_parallel=head != "colwise")
        options: dict[str, Any] = {}
        exec(caught.value.fix.removeprefix("Pass ").rstrip("."), {}, options)
        return post.token_logprobs(ctx, logits, ids, **options).detach()

    model, _ = lm.make_objects(accel.single(), experts=0)
    ids = torch.arange(8).view(1, 8)
    expected, _ = plain(model(**accel.parallel.split_sequence(accel.single(), {"ids": ids})), ids)
    for found in ranks.run(rank, 2, default_group=True):
        assert_near(found, expected.detach())


@pytest.mark.parametrize(
    ("mesh", "world", "strategy", "options"),
    [
        ("dp=2", 2, "ddp", {}),
        pytest.param("", 1, "ddp", {}, marks=pytest.mark.slow),
        ("dp=2", 2, "fsdp", {}),
        ("dp_replicate=2,dp_shard=2", 4, "fsdp", {}),
        ("tp=2", 2, "ddp", {}),
        ("tp=2", 2, "ddp", {"head": "colwise_gather_output"}),
        pytest.param("dp=2,tp=2", 4, "fsdp", {}, marks=pytest.mark.slow),
        ("cp=2", 2, "ddp", {}),
        ("pp=2", 2, "ddp", {}),
        ("dp=2,ep=2", 2, "ddp", {"experts": 4}),
        pytest.param("pp=2,tp=2", 4, "ddp", {}, marks=pytest.mark.slow),
        pytest.param("cp=2,tp=2", 4, "ddp", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("logits", ["full", pytest.param("deferred", marks=pytest.mark.slow)])
def test_every_mesh_trains_as_one_rank_does(
    ranks: Simulator, mesh: str, world: int, strategy: Any, options: dict[str, Any], logits: Any
) -> None:
    options = {"head": "colwise", "experts": 0, **options}
    expected = train(ONE, "", "ddp", by_hand=True, **options)
    options["logits"] = logits
    runs = ranks.run(lambda ctx: train(ctx, mesh, strategy, by_hand=False, **options), world, default_group=True)
    for found in runs:
        assert found
        for name, each in found.items():
            assert_near(each, expected[name])


# Packed rows

SIZE = 16


def documents() -> list[post.TokenRow]:
    generator = torch.Generator().manual_seed(3)
    found: list[post.TokenRow] = []
    for _ in range(12):
        count = int(torch.randint(2, 11, (), generator=generator))
        prompt = int(torch.randint(1, count, (), generator=generator))
        ids = torch.randint(64, (count,), generator=generator)
        weights = torch.rand(count, generator=generator).masked_fill(torch.arange(count) < prompt, 0.0)
        found.append(post.TokenRow(ids, weights))
    return found


def fit(ctx: accel.DistContext, how: str, mesh: str, average: Any) -> dict[str, Tensor]:
    """Take a step on all documents: packed, each in a row with padding, or each in a row of its length."""
    transformers = pytest.importorskip("transformers")
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with accel.seeding.seeded(ctx, 0):
        config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **sizes)
        net = transformers.LlamaForCausalLM(config).double()
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.5))
    rows: Any = documents()
    if how == "packed":
        rows = [*post.pack(rows, SIZE)]
    else:
        rows = [each for row in rows for each in post.pack([row], SIZE if how == "padded" else len(row.ids))]
    each = ctx.data_parallel[1] * (1 if how == "alone" else 2)
    loader = accel.prepare_loader(ctx, DataLoader(rows, batch_size=each), global_batch=each)
    state = accel.train_state(ctx, accumulation=100)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        part = accel.parallel.split_sequence(ctx, batch.data._asdict())
        real = torch.arange(len(part["ids"]))[:, None] < int(batch.valid)
        with accel.accumulate(ctx, state, model):
            logits = model(input_ids=part["ids"], position_ids=part["position_ids"]).logits
            logprobs = post.token_logprobs(ctx, logits, part["targets"])
            loss = post.weighted_sum(
                ctx, -logprobs, part["loss_weights"] * real, average=average, documents=part["documents"]
            )
            state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
    state = accel.optimizer_step(ctx, optimizer, state)
    held = accel.unwrap_model(model).named_parameters()
    return {name: full_tensor(each).detach() for name, each in held}


@pytest.mark.parametrize(
    ("how", "mesh", "average"),
    [
        ("padded", "", "token"),
        ("alone", "", "sequence"),
        ("packed", "dp=2", "sequence"),
        ("padded", "dp=2", "token"),
        ("alone", "dp=2", 7),
        pytest.param(*("packed", "tp=2", "token"), marks=pytest.mark.slow),
        pytest.param(*("padded", "tp=2", "sequence"), marks=pytest.mark.slow),
        ("packed", "cp=2", "sequence"),
        ("padded", "cp=2", "token"),
    ],
)
def test_packed_is_padded_is_alone(ranks: Simulator, how: str, mesh: str, average: Any) -> None:
    expected = fit(ONE, "packed", "", average)
    runs = (
        ranks.run(lambda ctx: fit(ctx, how, mesh, average), 2, default_group=True)
        if mesh
        else [fit(ONE, how, "", average)]
    )
    for found in runs:
        for name, each in found.items():
            assert_near(each, expected[name])
