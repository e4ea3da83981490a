# SPDX-License-Identifier: Apache-2.0
"""torch.compile as users write it: around a model, around blocks, before functions, with graph breaks. Along tp and cp
steps are those of one process, and blocks without graph breaks are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.testing import Simulator

pytestmark = [
    pytest.mark.usefixtures("own_graphs"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's own, of a trace
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]

WORDS, WIDTH, LENGTH = 32, 16, 16
IDS = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
compiled: Callable[..., Any] = torch.compile(backend="aot_eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        x = x + self.out(self.attended(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.activated(self.up(x)))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def activated(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden)


class Breaks(Block):
    """Asks for a value of what ranks divide."""

    def activated(self, hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return functional.gelu(hidden)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length, half = q.shape[-2], q.shape[-1] // 2
    angles = torch.arange(length, dtype=q.dtype)[:, None] / 10
    q, k = (torch.cat((each[..., half:] * angles.cos(), each[..., :half] * angles.sin()), -1) for each in (q, k))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def activate(hidden: Tensor) -> Tensor:
    return functional.silu(hidden) * hidden


class Plain(Block):
    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    def activated(self, hidden: Tensor) -> Tensor:
        return activate(hidden)


compiled_attend, compiled_activate = compiled(attend), compiled(activate)


class Functions(Block):
    """Calls functions that torch compiles by themselves."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled_attend(q, k, v)

    def activated(self, hidden: Tensor) -> Tensor:
        return compiled_activate(hidden)


class RecomputedFunctions(Functions):
    """Calls a function that torch compiles by torch's checkpoint, with no module between."""

    def activated(self, hidden: Tensor) -> Tensor:
        return checkpoint(compiled_activate, hidden, use_reentrant=False)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.slope = slope
        return activate(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.slope(*ctx.saved_tensors), None


def slope_of(hidden: Tensor) -> Tensor:
    gate = hidden.sigmoid()
    return hidden * gate * (2 + hidden * (1 - gate))


class OwnBackward(Plain):
    """Calls a function that torch compiles only in the backward, with parts that the forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = compiled(slope_of)

    def activated(self, hidden: Tensor) -> Tensor:
        return cast(Any, _Activated).apply(hidden, self.slope)


class Decorated(Block):
    @compiled
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([block(), block()]), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.called(block, x)
        return self.head(x)

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Recomputed(Model):
    """Calls its blocks by torch's checkpoint."""

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


def around_blocks(model: Any) -> Any:
    blocks = accel.unwrap_model(model).blocks
    for at, block in enumerate(blocks):
        blocks[at] = compiled(block)
    return model


def in_place(model: Any) -> Any:
    for block in accel.unwrap_model(model).blocks:
        block.compile(backend="aot_eager")
    return model


def unchanged(model: Any) -> Any:
    return model


def train(
    ctx: accel.DistContext,
    mesh: str,
    block: type[Block],
    before: Callable[[Any], Any] = unchanged,
    after: Callable[[Any], Any] = unchanged,
    again: bool = False,
    kind: type[Model] = Model,
) -> Tensor:
    """All parameters after three steps."""
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    torch.manual_seed(0)
    net = before(kind(block).double())
    net = accel.checkpoint_activations(net, Block) if again else net
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), example=IDS)
    model = after(model)
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(IDS), batch_size=4), global_batch=4)
    state = accel.train_state(ctx)
    while state.epoch < 3:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            part = accel.parallel.split_sequence(ctx, {"ids": batch.data[0], "labels": batch.data[0]})
            tokens = (part["labels"] != -100).sum()
            with accel.accumulate(ctx, state, model):
                words = model(part["ids"]).flatten(0, 1)
                loss = functional.cross_entropy(words, part["labels"].flatten(), reduction="sum")
                state = accel.backward(ctx, loss / tokens, state, weight=tokens)
            state = accel.optimizer_step(ctx, optimizer, state)
    weights = accel.get_state_dict(ctx, model, dst=None)
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def assert_trains_as_alone(ranks: Simulator, mesh: str, block: type[Block], **options: Any) -> None:
    same = {Functions: Plain, RecomputedFunctions: Plain, OwnBackward: Plain, Decorated: Block, Breaks: Block}
    plain = same.get(block, block)
    kind = options.get("kind", Model)
    (alone,) = ranks.run(lambda ctx: train(ctx, "", plain, kind=kind), 1)
    for found in ranks.run(lambda ctx: train(ctx, mesh, block, **options), 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)


WAYS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "model": {"after": compiled},
    "blocks before": {"before": around_blocks},
    "blocks after": {"after": around_blocks},
    "blocks in place": {"before": in_place},
}
MOST = pytest.mark.nightly


@pytest.mark.parametrize(
    ("mesh", "block", "way"),
    [
        ("tp=2", Breaks, "model"),
        ("tp=2", Breaks, "blocks before"),
        ("cp=2", Block, "blocks before"),
        ("cp=2", Breaks, "blocks after"),
        *[
            pytest.param(mesh, block, way, marks=MOST)
            for mesh in ("tp=2", "cp=2")
            for block in (Block, Breaks)
            for way in WAYS
        ],
    ],
)
def test_compiled_models_and_blocks_train_as_alone(ranks: Simulator, mesh: str, block: type[Block], way: str) -> None:
    assert_trains_as_alone(ranks, mesh, block, **WAYS[way])


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
@pytest.mark.parametrize(
    ("block", "again"),
    [
        (Functions, False),
        (OwnBackward, False),
        pytest.param(Functions, True, marks=MOST),
        pytest.param(Decorated, False, marks=MOST),
        pytest.param(Decorated, True, marks=MOST),
    ],
)
def test_functions_that_torch_compiles_run_on_parts(
    ranks: Simulator, mesh: str, block: type[Block], again: bool
) -> None:
    assert_trains_as_alone(ranks, mesh, block, again=again)


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
@pytest.mark.parametrize(
    ("block", "kind"), [(RecomputedFunctions, Model), pytest.param(Functions, Recomputed, marks=MOST)]
)
def test_a_checkpoint_by_hand_computes_compiled_functions_again(
    ranks: Simulator, mesh: str, block: type[Block], kind: type[Model]
) -> None:
    assert_trains_as_alone(ranks, mesh, block, kind=kind)


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("cp=2", marks=MOST)])
def test_a_checkpoint_by_hand_computes_compiled_blocks_again(ranks: Simulator, mesh: str) -> None:
    """Their graphs are those of the forward, as torch's checkpoint compares."""
    assert_trains_as_alone(ranks, mesh, Block, before=around_blocks, kind=Recomputed)


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_a_backward_compiles_again_what_is_before_a_model(ranks: Simulator, mesh: str) -> None:
    """Also if a model of parts is called before, too, with the same outputs and inputs between."""

    def gradient(ctx: accel.DistContext, mesh: str, kind: type[Block]) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
        torch.manual_seed(0)
        layer, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
        model = accel.prepare_model(ctx, kind().double(), example=x)
        step = compiled(lambda each: activate(layer(each)).sin())
        hidden = accel.parallel.split_sequence(ctx, {"x": x})["x"]
        for _ in range(2):
            hidden = model(model(checkpoint(step, hidden, use_reentrant=False)))
        hidden.square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    expected = gradient(accel.single(), "", Plain)
    found = ranks.run(lambda ctx: gradient(ctx, mesh, Functions), 2, default_group=True, timeout_s=300)
    total = found[0] + found[1] if "cp" in mesh else found[0]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_functions_are_compiled_again_after_a_backward_that_fails(ranks: Simulator, mesh: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh)
        model = accel.prepare_model(ctx, Recomputed(Functions).double(), example=IDS)
        part = accel.parallel.split_sequence(ctx, {"ids": IDS})["ids"]
        model(part).sum().backward()

        def fail(_gradient: Tensor) -> None:
            raise RuntimeError("in a backward")

        hook = next(model.parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="in a backward"):
            model(part).sum().backward()
        hook.remove()
        accel.wait_for_everyone(ctx)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        _ = compiled(lambda x: ctx.rank + x)(torch.ones(3))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before

    ranks.run(rank, 2, default_group=True, timeout_s=300)


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_blocks_in_wrappers_are_compiled(ranks: Simulator, mesh: str) -> None:
    """Functions that torch compiles are part of a compiled block's graph."""

    def rank(ctx: accel.DistContext) -> tuple[bool, list[str]]:
        ctx = accel.replace(ctx, mesh=mesh)
        net = around_blocks(Model(Functions).double())
        model = accel.prepare_model(ctx, net, example=IDS)
        part = accel.parallel.split_sequence(ctx, {"ids": IDS})["ids"]
        for _ in range(2):
            model(part).sum().backward()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, list(
            accel.get_state_dict(ctx, model, dst=None)
        )

    names = list(Model(Functions).state_dict())
    for is_compiled, found in ranks.run(rank, 2, default_group=True, timeout_s=300):
        assert is_compiled
        assert found == names


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_hooks_of_wrappers_stay(ranks: Simulator, mesh: str) -> None:
    """A block with hooks of its wrapper runs as it is, with them."""

    def hooked(model: Any) -> Any:
        model = around_blocks(model)
        model.blocks[0].register_forward_hook(lambda _module, _given, output: output * 2)
        return model

    (alone,) = ranks.run(lambda ctx: train(ctx, "", Block, before=hooked), 1)
    for found in ranks.run(lambda ctx: train(ctx, mesh, Block, before=hooked), 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)


def test_sizes_of_plain_tensors_are_split_in_one_graph(ranks: Simulator) -> None:
    """A block in which attention stays whole, by `unflatten`, compiles with fullgraph=True."""

    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh="tp=2")
        torch.manual_seed(0)
        net = Model(Block).double()
        expected = net(IDS).detach()
        styles = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        model = accel.prepare_model(ctx, net, plan=accel.parallel.Plan(tensor=styles))
        accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=True)
        return model(IDS) - expected

    for difference in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-12)


def test_a_stance_of_torch_compile_stays(ranks: Simulator) -> None:
    """A forward along tp sets none for others, and respects the user's."""

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, Model(Block).double(), example=IDS)
        accel.compile_model(model, "repeated", backend="aot_eager")
        with torch.compiler.set_stance("force_eager"):
            model(IDS)
            assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
        accel.wait_for_everyone(ctx)
        double = compiled(lambda x: 2 * x)
        model(IDS)
        _ = double(torch.ones(3))

    ranks.run(rank, 2, default_group=True, timeout_s=300)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
