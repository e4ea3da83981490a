# SPDX-License-Identifier: Apache-2.0
"""Forms of a forward that stages replay as they are, and those that are refused with the line that helps."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial, reduce
from typing import Any, cast

import numpy
import pytest
import torch
from catching import assert_raises
from handwritten import Batch, Handwritten, tensors_of
from handwritten.manners import Block, Words
from handwritten_runs import compare, piped, plain
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint as _checkpoint

import accel
from accel.errors import PrepareError, StageError, StepError
from accel.fakes import is_fake
from accel.parallel import Plan
from accel.testing import Simulator
from accel.tree import Container

WIDTH = 16


class Short(Words):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__(2)


# --- forms that run as they are -------------------------------------------------------------------------------------


class Changed(Short):
    """Blocks change a tensor that they are given in place."""

    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            total.add_(0.1 * x.mean(1))
            return super().forward(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total = torch.zeros_like(x[:, 0])
        for block in self.blocks:
            x = block(x, total)
        return self.head(self.norm(x) + total[:, None])


class Hooked(Short):
    """Hooks of modules change inputs, outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _module, args: (args[0] * 1.1,))
            block.out.register_forward_hook(lambda _module, _args, output: output * 0.9)
            block.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))


class HookedModel(Short):
    """Hooks of the model itself change its input and its output, which one stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _module, args: ((args[0] + 1) % 32,))
        self.register_forward_hook(lambda _module, _args, output: output * 0.9)


class Caching(Short):
    """Keeps a value in an attribute without `__setattr__`, and a dictionary that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Any] = {}
        self.places["self"] = self.places

    @cached_property
    def scale(self) -> float:
        return 0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(self.norm(x))


class Traced(nn.Module):
    """A graph of torch.fx, whose class has no forward until it is made."""

    def __new__(cls) -> Any:
        return torch.fx.symbolic_trace(Short())


class Catching(Short):
    """Catches whatever a block raises."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            try:
                x = block(x)
            except:  # noqa: E722
                x = x * 0
        return self.head(self.norm(x))


class Composed(Short):
    """Calls blocks in functions of functions."""

    def forward(self, ids: Tensor) -> Tensor:
        whole = reduce(lambda inner, block: lambda x: block(inner(x)), self.blocks, self.embed)
        return self.head(self.norm(whole(ids)))


class ReadingWeights(Short):
    """Reads weights of all blocks outside of them, for a penalty."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(ids)
        penalty = sum(block.out.weight.square().sum() for block in self.blocks)
        return logits, penalty.expand(len(ids), 1)


class ReplacingBuffer(Short):
    """Puts a new tensor into a buffer, computed from activations of the first stage."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        for block in self.blocks:
            x = block(x) + self.mean
        return self.head(self.norm(x))


class HookedInside(Short):
    """A block scales the gradient of its result."""

    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
            return x


class Padded(nn.Module):
    """torch's encoder, which passes nested tensors between its layers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        padding = torch.arange(ids.shape[1]) >= ids[:, :1] % 3 + 3
        x = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return self.head(x).masked_fill(padding[..., None], 0.0)


# --- forms that are refused -----------------------------------------------------------------------------------------


class State:
    """An object of the author's own."""

    def __init__(self, x: Tensor, steps: int) -> None:
        self.x, self.steps = x, steps


STATE = Container(State, vars, lambda _old, new: State(**new))


class OwnObject(Short):
    class kind(Block):  # noqa: N801
        def forward(self, state: State) -> State:
            return State(super().forward(state.x), state.steps + 1)

    def forward(self, ids: Tensor) -> Tensor:
        state = State(self.embed(ids), 0)
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state.x)) / state.steps


class ReturningNumber(Short):
    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            x = super().forward(x)
            return x, self.size_of(x)

        def size_of(self, x: Tensor) -> Any:
            return x.detach().abs().mean().item()

    def forward(self, ids: Tensor) -> Tensor:
        x, total = self.embed(ids), 0.0
        for block in self.blocks:
            x, size = block(x)
            total = total + size
        return self.head(self.norm(x)) * (1 + 0.1 * total)


class ReturningTensor(ReturningNumber):
    class kind(ReturningNumber.kind):  # noqa: N801
        def size_of(self, x: Tensor) -> Any:
            return x.detach().abs().mean()


class Collecting(Short):
    """Blocks append to a list of their owner, which they know."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = [self]

    class kind(Block):  # noqa: N801
        owner: Sequence[Any]

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.owner[0].found.append(x.mean(1))
            return x

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.found: list[Tensor] = []
        logits = super().forward(ids)
        return logits, torch.stack(self.found).sum(0)


class CollectingBetween(Short):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, found = self.embed(ids), []
        for block in self.blocks:
            x = block(x)
            found.append(x.mean(1))
        return self.head(self.norm(x)), torch.stack(found).sum(0)


class HookedBetween(Short):
    """Scales the gradient of each hidden state, which two stages have at their boundary."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.head(self.norm(x))


class Bare(nn.Module):
    """No module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(32, WIDTH)), nn.Parameter(torch.randn(WIDTH, 32))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.table[ids]) @ self.out


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids)))


class TyingLater(Short):
    """Shares a parameter in its forward."""

    def forward(self, ids: Tensor) -> Tensor:
        self.head.weight = self.embed.weight
        return super().forward(ids)


class Tying(Short):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class FailingBackward(Short):
    """Changes in place what a backward needs."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        y = self.blocks[1](self.blocks[0](x))
        return self.head(torch.tanh(y).mul_(2).exp_().add_(1))


WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda tensor: tensor.div_(2),
    lambda tensor: tensor.data.mul_(0.75),
    lambda tensor: tensor.__setitem__(0, 0.25),
    lambda tensor: tensor.__setitem__((1, 2), 0.5),
    lambda tensor: tensor.t().add_(0.01),
    lambda tensor: tensor.detach().view(-1)[3:5].fill_(0.3),
    lambda tensor: torch.add(tensor, 0.01, out=tensor),
    lambda tensor: tensor.__iadd__(0.01),
    lambda tensor: torch._foreach_mul_([tensor], 0.9),
    lambda tensor: tensor.copy_(torch.full_like(tensor, 0.5) * tensor),
    lambda tensor: F.relu(tensor, inplace=True),
    lambda tensor: nn.init.constant_(tensor[:1], 0.1),
)


class WritingWeights(Short):
    """Changes weights and buffers of all blocks in place, once in each mode, as models scaled for evaluation do."""

    mode: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("seen", torch.zeros(3, 3))

    def forward(self, ids: Tensor) -> Tensor:
        if self.mode is not self.training:
            with torch.no_grad():
                for block in self.blocks:
                    for write in WRITES:
                        write(block.out.weight)
                        write(block.seen)
            self.mode = self.training
        return super().forward(ids)


READS: tuple[Callable[[Tensor], object], ...] = (
    lambda x: bool(torch.isfinite(x).all()),
    lambda x: not torch.isnan(x).any().item(),
    lambda x: not torch.isnan(x.sum()),
    lambda x: x.abs().max() < 1e9,
    lambda x: torch.allclose(x, x),
    lambda x: len(torch.nonzero(x > -1e9)),
)


class ReadingValues(Short):
    """Reads values of hidden states in Python, to check them and to compute with them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            for read in READS:
                assert read(x.detach())
            x = x / (1 + abs(x.detach().mean().item()))
        assert torch.isfinite(x).all()
        return self.head(self.norm(x))


class Formatting(Short):
    """Formats a hidden value, which a placeholder does not have."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        self.text = f"{x.mean():.2f}"
        return self.head(self.norm(self.blocks[1](x)))


class Scaled(Short):
    """Calls modules without a keyword, if they do not take it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for each in (self.embed, *self.blocks, self.norm, self.head):
            try:
                x = each(x, scale=2.0)
            except TypeError:
                x = each(x)
        return x


class ScaledByClass(Short):
    """Chooses the arguments before the call."""

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for each in (self.embed, *self.blocks, self.norm, self.head):
            takes = "scale" in inspect.signature(each.forward).parameters
            x = each(x, scale=2.0) if takes else each(x)
        return x


def _ids(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = torch.randint(32, (rows, length), generator=generator)
    return Batch(drawn, drawn)


def _loss(output: Any, targets: Tensor) -> Tensor:
    logits, *others = tensors_of(output)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss + sum(0.1 * each.square().sum() for each in others)


def _run(ranks: Simulator, kind: type[nn.Module], containers: Sequence[Container] = ()) -> list[str]:
    each = Handwritten(kind.__name__, kind, _ids, _loss)

    def run(ctx: accel.DistContext) -> Any:
        evaluates = kind in (Padded, WritingWeights)
        ctx = accel.replace(ctx, containers=containers)
        return piped(ctx, each, "pp=2", Plan(micro_batches=2), rows=4, evaluates=evaluates)

    return compare(ranks.run(run, 2, default_group=True), plain(each, 2, rows=4))


@pytest.mark.parametrize(
    "kind",
    [
        Changed,
        Hooked,
        HookedModel,
        Caching,
        Traced,
        Catching,
        Composed,
        ReadingWeights,
        ReplacingBuffer,
        HookedInside,
        Padded,
        WritingWeights,
        ReadingValues,
    ],
)
def test_a_form_runs_in_stages_as_it_is(ranks: Simulator, kind: type[nn.Module]) -> None:
    assert _run(ranks, kind) == []


@pytest.mark.parametrize(
    ("kind", "told", "named", "helps", "containers"),
    [
        (OwnObject, "object with unknown tensors", "State of blocks.0", OwnObject, [STATE]),
        (ReturningNumber, "a Python number that it reads", "of blocks.0", ReturningTensor, []),
        (Collecting, "reaches code outside by another way", "blocks.0", CollectingBetween, []),
        (HookedBetween, "registers a hook on a tensor that several stages have", "blocks.0", HookedInside, []),
        (Bare, "fewer calls of modules than stages", "got none", Divided, []),
        (TyingLater, "the forward replaces parameters of the model", "self.head.weight = self.embed.weight", Tying, []),
        (Scaled, "a module's call raises an error, which the forward catches", "call of embed", ScaledByClass, []),
        (Formatting, "the forward fails where it is recorded: TypeError", "test_replayed_forms.py:", ReadingValues, []),
    ],
)
def test_a_form_that_cannot_be_replayed_is_refused_with_what_helps(
    ranks: Simulator, kind: type[nn.Module], told: str, named: str, helps: type[nn.Module], containers: list[Container]
) -> None:
    expected = PrepareError if kind is Bare else StageError  # too few modules for any stages, as of `stage_plan`
    with assert_raises(expected, problem=told) as caught:
        _ = _run(ranks, kind)
    assert named in str(caught.value)
    assert caught.value.fix
    assert _run(ranks, helps, containers) == []


class Compiled(Words):
    """Blocks in the wrapper of torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        for at, block in enumerate(self.blocks):
            self.blocks[at] = cast(nn.Module, torch.compile(block, backend="eager"))


@pytest.mark.slow
def test_stages_of_one_rank_run_blocks_that_torch_has_wrapped(ranks: Simulator) -> None:
    each = Handwritten("Compiled", Compiled, _ids, _loss)
    plan = Plan(schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=2)
    found = ranks.run(lambda ctx: piped(ctx, each, "pp=2", plan, rows=4), 2, default_group=True)
    assert compare(found, plain(each, 2, rows=4)) == []


class Keeping(Short):
    """Blocks keep a loss, which the loop adds."""

    class kind(Block):  # noqa: N801 - what `Short` makes
        def forward(self, x: Tensor) -> Tensor:
            self.loss = x.square().mean(1).sum()
            return super().forward(x)


def test_a_loss_that_reads_what_modules_of_another_stage_keep_takes_the_line_to_write(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext, kind: type[Keeping]) -> float:
        ctx = accel.replace(ctx, mesh="pp=2" if ctx.world_size > 1 else "")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = kind().double()
        batch = _ids(torch.Generator().manual_seed(0), 4, 6)
        model = accel.prepare_model(ctx, net, plan=Plan(micro_batches=2), example=batch.inputs)

        def loss_fn(output: Any, targets: Tensor) -> Tensor:
            if isinstance(output, tuple):
                return _loss(output[0], targets) + output[1]
            return _loss(output, targets) + torch.stack([block.loss for block in net.blocks]).sum()

        state = begin_batch(ctx)
        loss, _ = accel.forward_backward(
            ctx, model, state, batch.inputs, targets=batch.targets, loss_fn=loss_fn, weight=4
        )
        return float(loss)

    with assert_raises(StepError, problem="a tensor of a module in another stage") as caught:
        _ = ranks.run(partial(run, kind=Keeping), 2, default_group=True)
    line = "return logits, torch.stack([block.loss for block in self.blocks]).sum()"
    assert line in str(caught.value)
    scope: dict[str, Any] = {"torch": torch, "Short": Short}
    exec("def forward(self, ids):\n    logits = Short.forward(self, ids)\n    " + line, scope)
    mended = type("Returning", (Keeping,), {"forward": scope["forward"]})
    [alone] = ranks.run(partial(run, kind=Keeping), 1)
    assert ranks.run(partial(run, kind=mended), 2, default_group=True) == pytest.approx([alone, alone], rel=1e-10)


def test_an_error_of_a_backward_names_the_stage_and_the_reason(ranks: Simulator) -> None:
    told = "the backward of a pipeline stage failed: RuntimeError: one of the variables needed"
    with assert_raises(StageError, problem=told) as caught:
        _ = _run(ranks, FailingBackward)
    assert "blocks.1 to head" in caught.value.where
    assert "stage 1 of 2, micro-batch 1 of 2, rank 1" in caught.value.where
    assert "torch.autograd.set_detect_anomaly(True)" in caught.value.fix
    shows = pytest.warns(UserWarning, match="Error detected")
    with torch.autograd.set_detect_anomaly(True), shows as warned, assert_raises(StageError, problem=told):
        _ = _run(ranks, FailingBackward)
    assert any("torch.tanh(y).mul_(2).exp_()" in str(each.message) for each in warned)


def _fail(tensor: Tensor) -> Tensor:
    if tensor.is_meta or is_fake(tensor):
        return tensor
    raise ValueError("no such thing")  # the user's line


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's own way
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _fail(*gradients)


def _twice(block: Any, x: Tensor) -> Tensor:
    """Fails where a checkpoint calls again, with the same values."""
    if torch.is_grad_enabled() and not is_fake(x):
        if (value := float(x.detach().sum())) in block.values:
            return _fail(x)
        block.values.append(value)
    return torch.tanh(x)


IN_FORWARD, IN_BACKWARD = "a pipeline stage failed", "the backward of a pipeline stage failed"
FAILURES: dict[str, tuple[str, Callable[[nn.Module, Tensor], Tensor]]] = {
    "forward": (IN_FORWARD, lambda _, x: _fail(x)),
    "function": (IN_BACKWARD, lambda _, x: cast(Any, Failing).apply(x)),
    "checkpoint": (
        IN_BACKWARD,
        lambda block, x: cast(Any, _checkpoint.checkpoint(_twice, block, x, use_reentrant=False)),
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_error_of_a_models_own_names_module_and_line(ranks: Simulator, kind: str) -> None:
    told, fails = FAILURES[kind]

    class Fails(Short):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].mix = Inner()

    class Inner(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2 * WIDTH, WIDTH)
            self.values = list[float]()

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(fails(self, input))

    with assert_raises(StageError, problem=f"{told}: ValueError: no such thing") as caught:
        _ = _run(ranks, Fails)
    where = caught.value.where
    assert where.startswith("blocks.0.mix at" if kind != "function" else "blocks.0 at"), where
    assert re.search(r"at test_replayed_forms.py:\d+ in _fail, stage 0 of 2, micro-batch 1 of 2, rank 0", where)


def test_changes_of_weights_count_once_for_stages_of_one_rank(ranks: Simulator) -> None:
    each = Handwritten("WritingWeights", WritingWeights, _ids, _loss)
    plan = Plan(schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4)
    found = ranks.run(lambda ctx: piped(ctx, each, "pp=2", plan, rows=4), 2, default_group=True)
    assert compare(found, plain(each, 4, rows=4)) == []


class Late(Short):
    """Counts steps behind the blocks, and scales the first hidden state by their number in the next forward."""

    kind_of_state = "number"

    def __init__(self) -> None:
        super().__init__()
        if self.kind_of_state == "number":
            self.steps: Any = 0
        else:
            self.register_buffer("steps", torch.zeros(()))
        self.memory: list[Tensor] = []

    def scaled(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * (1 + 0.1 * self.steps)

    def count(self, out: Tensor) -> None:
        self.steps = self.steps + 1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(ids)
        for block in self.blocks:
            x = block(x)
        out = self.head(self.norm(x))
        if self.training:
            self.count(out)
        return out


class LateBuffer(Late):
    kind_of_state = "buffer"


class LateInPlace(LateBuffer):
    def count(self, out: Tensor) -> None:
        self.steps.add_(1)


class LateValue(LateBuffer):
    def count(self, out: Tensor) -> None:
        self.steps = 0.9 * self.steps + out.detach().abs().mean()


class LateList(Late):
    """Keeps a tensor of this forward for the next one, as memories of segments do."""

    def scaled(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.memory[0] if self.memory else x

    def count(self, out: Tensor) -> None:
        self.memory[:] = [out.detach().mean()]


class LateStream(Late):
    """Draws from a generator that it holds, behind each block."""

    stream: Any

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * (1 + self.drawn())
        return self.head(self.norm(x))


class LateTorchStream(LateStream):
    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator().manual_seed(3)

    def drawn(self) -> Any:
        return torch.rand((), generator=self.stream, dtype=torch.float64)


class LatePythonStream(LateStream):
    def __init__(self) -> None:
        super().__init__()
        self.stream = random.Random(3)

    def drawn(self) -> Any:
        return self.stream.random()


class LateNumpyStream(LatePythonStream):
    def __init__(self) -> None:
        super().__init__()
        self.stream = numpy.random.default_rng(3)


class LateOlderNumpyStream(LateNumpyStream):
    def __init__(self) -> None:
        super().__init__()
        self.stream = numpy.random.RandomState(3)


class EarlyStream(LateTorchStream):
    """Draws before the first module is called."""

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1 + self.drawn() if self.training else 1.0
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * scale
        return self.head(self.norm(x)) * scale


class Early(Late):
    """Counts before the first module is called: each stage counts."""

    def scaled(self, ids: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
        return super().scaled(ids)

    def count(self, out: Tensor) -> None:
        pass


class EarlyBuffer(Early):
    kind_of_state = "buffer"


class Unread(LateBuffer):
    """Counts at the end, and reads the number nowhere."""

    def scaled(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class Fresh(Late):
    """Begins to count anew in each forward."""

    def scaled(self, ids: Tensor) -> Tensor:
        self.steps = 0
        self.memory = []
        self.steps += 1
        return super().scaled(ids)


@pytest.mark.parametrize(
    "kind",
    [
        LateTorchStream,
        LateOlderNumpyStream,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (LatePythonStream, LateNumpyStream)),
    ],
)
def test_a_generator_of_which_stages_would_draw_different_numbers_of_times_is_refused(
    ranks: Simulator, kind: type[nn.Module]
) -> None:
    with assert_raises(StageError, problem="a value that the next one reads, in a stage that ends before") as caught:
        _ = _run(ranks, kind)
    assert "got stream, behind the call of blocks." in str(caught.value)
    assert "Change it before the first module is called" in str(caught.value)  # by which EarlyStream runs


@pytest.mark.parametrize("kind", [Late, LateBuffer, LateInPlace, LateValue, LateList])
def test_a_value_that_reaches_the_next_forward_of_some_stages_only_is_refused(
    ranks: Simulator, kind: type[nn.Module]
) -> None:
    with assert_raises(StageError, problem="a value that the next one reads, in a stage that ends before") as caught:
        _ = _run(ranks, kind)
    name = "memory" if kind is LateList else "steps"
    assert f"{name}, behind the call of head" in str(caught.value)
    assert "Change it before the first module is called" in str(caught.value)


@pytest.mark.parametrize("kind", [Early, EarlyBuffer, EarlyStream, Unread, Fresh])
def test_a_value_that_each_stage_sees_changes_as_in_one_process(ranks: Simulator, kind: type[nn.Module]) -> None:
    assert _run(ranks, kind) == []


def test_a_buffer_that_each_stage_of_a_rank_would_change_is_refused(ranks: Simulator) -> None:
    each = Handwritten("EarlyBuffer", EarlyBuffer, _ids, _loss)
    plan = Plan(schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4)
    with assert_raises(StageError, problem="each stage of a rank would change again") as caught:
        _ = ranks.run(lambda ctx: piped(ctx, each, "pp=2", plan, rows=4), 2, default_group=True)
    assert 'Plan(schedule="1F1B")' in str(caught.value)  # by which the test above runs
    number = Handwritten("Early", Early, _ids, _loss)
    found = ranks.run(lambda ctx: piped(ctx, number, "pp=2", plan, rows=4), 2, default_group=True)
    assert compare(found, plain(number, 4, rows=4)) == []
