# SPDX-License-Identifier: Apache-2.0
"""Models in the styles in which people write them by hand train on a mesh as in one process, or are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from catching import caught
from steps import begin_batch, two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

WIDTH, HEADS, TOKENS, WORDS = 16, 4, 6, 11


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Words(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LearnedMask(nn.Module):
    """A mask for each head, made of a table and of the activations, and one of padding that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.table, self.sharp = nn.Embedding(2 * TOKENS, HEADS), nn.Linear(WIDTH, HEADS)
        self.padding = nn.Parameter(torch.linspace(-1, 1, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(TOKENS)
        sharp = self.sharp(x).transpose(1, 2)
        mask = self.table(at[:, None] - at + TOKENS).permute(2, 0, 1) * sharp[..., None]
        padding = self.padding.expand(len(x), -1)
        return x + self.attention(x, x, x, attn_mask=mask.flatten(0, 1), key_padding_mask=padding)[0]


class _OwnForward(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class WholeAttention(nn.Module):
    """An attention that is not known, whose forward reads its last projection, and lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _OwnForward(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1 + at, WIDTH)) for at in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.linspace(-1, 1, WIDTH))})
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.scales[:2]
        x = x * first + self.attention(x) * second
        return self.mlp(x) * self.scales[2] + self.named["shift"]


class Closure(nn.Module):
    """A function that holds layers, as in minGPT, and values that are no buffer, as in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})
        parts = self.parts
        self.mlp = lambda x: parts.down(functional.gelu(parts.up(x)))
        self.turn = torch.polar(torch.ones(TOKENS, WIDTH // 2), torch.rand(TOKENS, WIDTH // 2)).to(torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turn.to(x.device)
        return x + self.mlp(torch.view_as_real(turned).flatten(-2))


class Reads(Mlp):
    """A weight of one of two pairs of layers that the module around them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.other(x)) * self.body[0].weight.square().mean()


class Chance(Mlp):
    """A path by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 2 else x


class Replaced(Mlp):
    """Parameters whose data the forward replaces."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.weight.data = functional.normalize(self.norm.weight.data, dim=0)
        return super().forward(x)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class StraightThrough(Mlp):
    """A function whose backward is not the derivative of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Rounded.apply(x))


class Squares(Mlp):
    """A function whose backward is the derivative of its forward, and a number that each call sets to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = x.shape[1]
        return super().forward(_Square.apply(x)) / self.longest


class Momentum(nn.Module):
    """A teacher that follows its student in the forward, which reads both outside of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return self.mlp(x + self.student(x) - self.teacher(x))


class Bounded(Mlp):
    """A parameter that the forward bounds, as Gemma 3n's."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.weight.data.clamp_(-9, 9)
        return super().forward(x)


class Late(nn.Module):
    """Modules in another order than that of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def _make(block: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Words(block).double()


IDS = torch.randint(WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(1))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _train(ctx: accel.DistContext, block: Callable[[], nn.Module], mesh: str = "", example: Any = None) -> Any:
    """Train for two steps; return losses with norms, and parameters."""
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    model = _make(block)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "pp" in mesh:
        plan = accel.parallel.Plan(micro_batches=2)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=IDS)
        return _staged(ctx, model, optimizer), accel.get_state_dict(ctx, model, dst=None)
    model, optimizer = accel.prepare(ctx, model, optimizer, example=example)
    figures = two_steps(ctx, model, optimizer, lambda: _loss(model(IDS), IDS.roll(-1)) / IDS.numel())
    return figures, accel.get_state_dict(ctx, model, dst=None)


def _staged(ctx: accel.DistContext, model: nn.Module, optimizer: Any) -> list[tuple[float, float]]:
    figures: list[tuple[float, float]] = []
    state = accel.train_state(ctx)
    for _ in range(2):
        loss, state = accel.forward_backward(
            ctx, model, begin_batch(ctx, state), IDS, targets=IDS.roll(-1), loss_fn=_loss, weight=IDS.numel()
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        figures.append((float(loss), float(state.grad_norm)))
    return figures


def assert_law(found: list[Any], expected: Any) -> None:
    for figures, parameters in found:
        torch.testing.assert_close(torch.tensor(figures), torch.tensor(expected[0]), rtol=0, atol=1e-10)
        want: Mapping[str, Tensor] = expected[1]
        for name, each in parameters.items():
            torch.testing.assert_close(each, want[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("block", "mesh", "example"),
    [
        (LearnedMask, "tp=2", None),
        pytest.param(LearnedMask, "tp=2", IDS, marks=pytest.mark.slow),
        (WholeAttention, "tp=2", None),
        pytest.param(WholeAttention, "tp=2", IDS, marks=pytest.mark.slow),
        (Closure, "tp=2", IDS),
        pytest.param(Closure, "pp=2", None, marks=pytest.mark.slow),
        (Reads, "tp=2", None),
        (Reads, "tp=2", IDS),
        (Squares, "pp=2", None),
    ],
)
def test_a_model_written_by_hand_trains_as_in_one_process(
    ranks: Simulator, block: Callable[[], nn.Module], mesh: str, example: Any
) -> None:
    found = ranks.run(partial(_train, block=block, mesh=mesh, example=example), 2, default_group=True)
    assert_law(found, _train(accel.single(), block))


def test_torch_s_attention_is_divided_by_an_example_too() -> None:
    styles = accel.parallel.tensor_plan(_make(LearnedMask), example=[IDS])
    assert styles["blocks.*.attention"] == "multihead_attention"
    assert styles["blocks.*.attention.out_proj"] == "rowwise"


def test_an_example_that_nothing_divides_is_told_with_the_reason(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), nn.Linear(33, WIDTH))
        tied = _Tied(model)
        return caught(partial(accel.prepare, accel.replace(ctx, mesh="tp=2"), tied, example=torch.ones(2, WIDTH)))

    error = ranks.run(rank, 2, default_group=True)[0]
    assert "no tensor-parallel plan is known" in str(error)
    assert "inner: no division was found for " in str(error)
    assert "example=batch" not in str(error)


class _Tied(nn.Module):
    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.linear(self.inner(x), self.inner[2].weight.t())
        return functional.linear(hidden, self.inner[0].weight.t())


@pytest.mark.parametrize("block", [Chance, Replaced, StraightThrough])
def test_the_python_of_a_forward_runs_in_its_stage(ranks: Simulator, block: Callable[[], nn.Module]) -> None:
    """Draws of Python's module random, new data of parameters, and functions with gradients of their own."""
    expected = _train(accel.single(), block)
    assert_law(ranks.run(lambda ctx: _train(ctx, block, "pp=2"), 2, default_group=True), expected)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")  # outputs that are views
@pytest.mark.parametrize(("block", "mesh"), [(Momentum, "dp=2"), (Replaced, "dp=2"), (Replaced, "tp=2")])
def test_a_forward_whose_changes_of_parameters_would_be_lost_is_refused(
    ranks: Simulator, block: Callable[[], nn.Module], mesh: str
) -> None:
    def rank(ctx: accel.DistContext) -> BaseException | None:
        return caught(partial(_train, accel.replace(ctx, strategy="fsdp"), block, mesh))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, ConfigError)
        assert ("teacher.weight by mul_" if block is Momentum else "by data") in error.got


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")  # outputs that are views
def test_bounds_of_parameters_in_a_forward_are_warned_about_once(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _train(accel.single(), Bounded)
    work = partial(_train, block=Bounded, mesh="dp=2")
    assert_law(ranks.run(lambda ctx: work(accel.replace(ctx, strategy="fsdp")), 2, default_group=True), expected)
    assert caplog.text.count("the forward bounds parameters (blocks.0.norm.weight") == 2  # ranks


class Routed(nn.Module):
    """Converts a layer in each forward, as the routers of Switch Transformers do, to the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.to(x.dtype)(x)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")  # outputs that are views
def test_a_conversion_in_a_forward_that_changes_nothing_is_no_change_of_parameters(ranks: Simulator) -> None:
    expected = _train(accel.single(), Routed)
    work = partial(_train, block=Routed, mesh="dp=2")
    assert_law(ranks.run(lambda ctx: work(accel.replace(ctx, strategy="fsdp")), 2, default_group=True), expected)


def test_torch_s_attention_along_cp_takes_masks_by_the_number_of_tokens_and_subclasses(ranks: Simulator) -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=mask)[0]

    x = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    models = (Causal(), nn.Sequential(Own(WIDTH, HEADS, batch_first=True)))
    expected = [model(x).detach() for model in models]

    def rank(ctx: accel.DistContext) -> list[float]:
        ctx = accel.replace(ctx, mesh="cp=2")
        found: list[float] = []
        for model, out in zip(models, expected, strict=True):
            part = accel.parallel.split_sequence(ctx, {"x": x, "out": out})
            own = accel.prepare_model(ctx, copy.deepcopy(model))(part["x"])
            found.append(float((own - part["out"]).detach().abs().max()))
        return found

    assert max(max(each) for each in ranks.run(rank, 2, default_group=True)) < 1e-5


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_heads_of_the_first_gpt_are_divided_and_positions_of_yoso_begin_at_two(ranks: Simulator) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.OpenAIGPTConfig(vocab_size=WORDS, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=HEADS)
    styles = accel.parallel.tensor_plan(transformers.OpenAIGPTLMHeadModel(config))
    assert styles["transformer.h.*.attn.c_attn"] == "packed_colwise_3"
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 32}
    yoso = transformers.YosoConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes)

    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, transformers.YosoForMaskedLM(yoso))
        part = accel.parallel.split_sequence(ctx, {"ids": torch.ones(1, 8, dtype=torch.int64)})
        return str(caught(partial(model, input_ids=part["ids"], position_ids=part["position_ids"])))

    assert "positions from 2 on, as the model numbers them itself" in ranks.run(rank, 2, default_group=True)[0]
