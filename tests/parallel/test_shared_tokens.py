# SPDX-License-Identifier: Apache-2.0
"""Ranks along tp share the tokens of hand-written models: they train as one process does, with smaller activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from catching import assert_raises
from handwritten import MODELS, Handwritten, named
from recorded_ranks import recorded
from steps import two_steps
from tables import in_turn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel.axes.tensor import _found_plan
from accel.parallel.parts import NoRuleError
from accel.tensors import full_tensor
from accel.testing import Simulator

SHARED = Plan(sequence=True)


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def trained(ctx: accel.DistContext, entry: Handwritten, mesh: str = "") -> Any:
    """Losses and parameters after two clipped steps, with batches of other sizes than the example."""
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    model = entry.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    plan = SHARED if mesh else None
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=entry.batch(1, 2).inputs)
    batch = entry.batch(2, 3, 9)
    losses = two_steps(ctx, model, optimizer, lambda: entry.loss(called(model, batch.inputs), batch.targets))
    state = accel.get_state_dict(ctx, model, dst=None)
    return losses, {name: each for name, each in state.items() if each.is_floating_point()}


# Without tokens, or refused by name, on some mesh.
NO_TOKENS = frozenset({
    "lstm", "gru", "dlrm", "gnn", "unet_batch_norm", "unet", "vae", "resnet", "hooked_features", "energies",
    "reentrant",  # a reentrant checkpoint compares shapes
    "nested_checkpoints",  # an inner one forgets what it saved
})  # fmt: skip
# Fewer latents than ranks; parts of a block that are called one by one, of a unit of fsdp.
REFUSED_ON = frozenset({("perceiver", "tp=4"), ("called_by_parts", "dp=2,tp=2")})
SEQUENCES = [each for each in MODELS if "random" not in each.tags and each.name not in NO_TOKENS]


def assert_law(ranks: Simulator, entry: Handwritten, mesh: str, size: int) -> None:
    want = trained(accel.single(), entry)
    for got in ranks.run(lambda ctx: trained(ctx, entry, mesh), size, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "entry",
    [
        *named("in_place", "mapping", "batched_experts"),  # of which a bias beside the sums of tokens stays whole
        *(pytest.param(each, marks=pytest.mark.slow) for each in named("llama", "moe", "t5", "torch_transformer")),
    ],
    ids=lambda each: each.name,
)
def test_a_model_trains_with_shared_tokens_as_in_one_process(ranks: Simulator, entry: Handwritten) -> None:
    assert_law(ranks, entry, "tp=2", 2)


def test_a_large_model_is_proved_block_by_block(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    units: list[str] = []

    def noted(self: Any, unit: str, *args: Any, inner: Any = _found_plan._Proofs.verdict, **kwargs: Any) -> Any:
        units.append(unit)
        return inner(self, unit, *args, **kwargs)

    monkeypatch.setattr(_found_plan, "LARGEST", 100)
    monkeypatch.setattr(_found_plan._Proofs, "verdict", noted)
    (entry,) = named("nano_gpt")
    assert_law(ranks, entry, "tp=2", 2)
    assert units == ["transformer.h.0", "transformer.h.1", "transformer.h.2", "transformer.h.3"]


ON_MESHES = in_turn(SEQUENCES, "tp=4", "dp=2,tp=2", "tp=2")
ON_MESHES += [(*named(name), mesh) for name, mesh in sorted(REFUSED_ON) if (*named(name), mesh) not in ON_MESHES]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(("entry", "mesh"), ON_MESHES, ids=lambda each: getattr(each, "name", each))
def test_each_model_with_a_sequence_trains_as_in_one_process(ranks: Simulator, entry: Handwritten, mesh: str) -> None:
    size = 2 if mesh == "tp=2" else 4
    if (entry.name, mesh) in REFUSED_ON:
        with pytest.raises((PrepareError, NoRuleError)):
            assert_law(ranks, entry, mesh, size)
    else:
        assert_law(ranks, entry, mesh, size)


@pytest.mark.parametrize("name", ["lstm", "resnet", "dlrm"])
def test_a_model_without_tokens_to_share_is_refused(ranks: Simulator, name: str) -> None:
    (entry,) = named(name)
    with assert_raises(PrepareError, problem="tensor-parallel plan|tokens of this model"):
        _ = ranks.run(lambda ctx: trained(ctx, entry, "tp=2"), 2, default_group=True)


class Block(nn.Module):
    """Counts its heads in a mapping; its norms and sums are what ranks share by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.settings = {"heads": 4}

    def attention(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (each.view(rows, tokens, self.settings["heads"], -1) for each in self.qkv(x).split(width, 2))
        weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
        return self.out((weights @ v.transpose(1, 2)).transpose(1, 2).reshape(rows, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Stacked(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared(ctx: accel.DistContext, model: nn.Module, plan: Plan | None = SHARED) -> nn.Module:
    """The model, divided for an example of 8 tokens."""
    ctx = accel.replace(ctx, mesh="tp=2")
    return accel.prepare_model(ctx, model.double(), plan=plan, example=[torch.zeros(1, 8, dtype=torch.long)])


def test_a_rank_holds_its_tokens_between_divided_layers(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[Any]:
        model: Any = prepared(ctx, Stacked())
        seen: list[Any] = []

        def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                seen.append(list(output.shape))

        for block in model.blocks:
            block.first.register_forward_hook(note)
            block.register_forward_hook(note)
        for tokens in (8, 9, 1):
            assert list(model(torch.zeros(2, tokens, dtype=torch.long)).shape) == [2, tokens, 32]
        return seen

    for seen in ranks.run(rank, 2, default_group=True):
        assert seen == [[2, own, 8] for own in (4, 5, 1) for _ in range(4)]


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.5, self.training)
        return functional.dropout(super().forward(x), 0.3, self.training)


def test_dropout_of_a_rank_s_tokens_is_that_of_one_process(ranks: Simulator) -> None:
    ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model = Stacked(Dropping)
        model = prepared(ctx, model) if ctx.world_size > 1 else model.double()
        torch.manual_seed(5)
        return model(ids).detach()

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_block_gathers_and_scatters_twice_in_each_pass(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of one block more; those of parameters are the step's."""

    def counts(blocks: int) -> Counter[str]:
        begun = 0

        def rank(ctx: accel.DistContext) -> None:
            nonlocal begun
            model = prepared(ctx, Stacked(blocks=blocks))
            accel.wait_for_everyone(ctx)
            begun = len(steps[0])
            model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()

        with recorded(monkeypatch) as steps:
            _ = ranks.run(rank, 2, default_group=True)
        return Counter(each.what.partition("(")[0] for step in steps[0][begun:] for each in step)

    more = counts(2) - counts(1)
    # rows of the fused layer that another rank stores, weight and bias in one message
    assert more.pop("all_to_all_single") == 2
    assert more == {"all_gather_single": 4, "reduce_scatter_single": 4}


class Taken(Block):
    """Changes some tokens by a view that nobody writes back."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        first = x[:, :1]
        first += 1
        return x


class Mixed(Block):
    """Needs the tokens of other ranks outside of divided layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x[:, 0] += x.mean(1)
        return x + torch.cumsum(x, 1).flip(1) * torch.arange(x.shape[1]).to(x.dtype)[:, None]


def test_tokens_that_are_changed_by_a_view_alone_are_refused(ranks: Simulator) -> None:
    with assert_raises(PrepareError, got="a change in place of some tokens"):
        _ = ranks.run(lambda ctx: prepared(ctx, Stacked(Taken)), 2, default_group=True)


class Leaky(Block):
    """Changes its tokens by a function that torch has for changes in place alone."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu_(super().forward(x), 0.1)


class Flat(Block):
    """Views its tokens as those of one row, as layers of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        return super().forward(super().forward(x).view(-1, width).view(rows, tokens, width))


@pytest.mark.parametrize("kind", [Leaky, Flat])
def test_tokens_are_changed_in_place_and_viewed_as_whole_tensors(ranks: Simulator, kind: type[nn.Module]) -> None:
    ids = torch.arange(16).view(2, 8)

    def rank(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model = Stacked(kind)
        return (prepared(ctx, model) if ctx.world_size > 1 else model.double())(ids).detach()

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_deferred_logits_and_those_that_stay_split_take_all_tokens(ranks: Simulator) -> None:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    plans = {"": None, "deferred": Plan(sequence=True), "split": Plan(sequence=True, head="colwise")}

    def rank(ctx: accel.DistContext, kind: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model: Any = Stacked()
        model = prepared(ctx, model, plans[kind]) if kind else model.double()
        logits = (accel.defer_logits(model) if kind == "deferred" else model)(ids)
        assert (type(logits) is not Tensor) == (kind == "deferred")
        if kind == "split":
            loss = accel.parallel.vocab_cross_entropy(accel.replace(ctx, mesh="tp=2"), logits, ids)
        else:
            loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
        loss.backward()
        return loss.detach(), full_tensor(model.blocks[0].second.weight.grad)

    want = rank(accel.single(), "")
    for kind in ("deferred", "split"):
        for got in ranks.run(lambda ctx, kind=kind: rank(ctx, kind), 2, default_group=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of a trace
@pytest.mark.parametrize(("kind", "fullgraph", "lengths"), [(Block, True, (9,)), (Mixed, False, (8, 9))])
def test_compiled_blocks_share_tokens_in_one_graph_or_run_uncompiled(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, kind: type[nn.Module], fullgraph: bool, lengths: tuple[int, ...]
) -> None:
    def rank(ctx: accel.DistContext, *, compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = prepared(ctx, Stacked(kind))
        if compiles:
            accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=fullgraph)
        for tokens in lengths:
            model(torch.arange(2 * tokens).view(2, tokens)).square().sum().backward()
        return [full_tensor(each.grad) for each in model.parameters()]

    torch.compiler.reset()
    eager, compiled = (
        ranks.run(lambda ctx, on=on: rank(ctx, compiles=on), 2, default_group=True, timeout_s=300)
        for on in (False, True)
    )
    torch.compiler.reset()
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-10)
    assert ("Mixed: a module that computes with parts of tensors stays uncompiled" in caplog.text) == (kind is Mixed)


def test_functions_of_all_tokens_gather_them_and_are_logged(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model = Stacked(Mixed)
        return (prepared(ctx, model) if ctx.world_size > 1 else model.double())(ids).detach()

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert "with shared tokens (gathered for" in caplog.text
    assert "cumsum" in caplog.text


@dataclass
class Output:
    """What a model returns."""

    hidden: Tensor


class Returns(Stacked):
    def forward(self, ids: Tensor) -> tuple[int, Output, Any]:
        x = self.blocks[0](self.embed(ids))
        return 1, Output(x), type("Box", (), {"value": x})


def test_what_a_model_returns_is_whole_and_a_rank_s_own_tokens_are_refused_outside(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        _, output, kept = prepared(ctx, Returns())(torch.zeros(2, 8, dtype=torch.long))
        assert type(output.hidden) is Tensor
        assert output.hidden.shape == (2, 8, 8)
        with assert_raises(NoRuleError, got="outside of the model"):
            _ = kept.value.square().sum()

    _ = ranks.run(rank, 2, default_group=True)


class Routed(Block):
    """Keeps a loss of all tokens in an attribute, as experts keep the balance of their load."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.balance = x.softmax(-1).cumsum(1).square().mean()
        return x


@pytest.mark.parametrize("way", ["a sum", "another backward"])
def test_a_loss_that_a_module_keeps_in_an_attribute_is_that_of_one_process(ranks: Simulator, way: str) -> None:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Stacked(Routed)
        model = prepared(ctx, model) if ctx.world_size > 1 else model.double()
        loss = model(ids).square().mean()
        kept = [block.balance for block in model.blocks]
        if way == "a sum":
            (loss + sum(kept)).backward()
        else:
            for each in (loss, *kept):
                each.backward(retain_graph=True)
        return [full_tensor(each.grad) for each in model.parameters()]

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


class Recomputed(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_forward_that_is_computed_again_leaves_nothing_behind(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model: Any = prepared(ctx, Stacked(Recomputed))
        model(torch.zeros(2, 7, dtype=torch.long)).sum().backward()
        held = model.accel_ranks
        assert held.scatters > 0
        assert (held._gathered, held._entered, held.depth) == ([], {}, 0)

    _ = ranks.run(rank, 2, default_group=True)
