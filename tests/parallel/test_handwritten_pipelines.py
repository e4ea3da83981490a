# SPDX-License-Identifier: Apache-2.0
"""Any hand-written model trains and evaluates in stages as in a plain loop in float64."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from catching import assert_raises
from handwritten import MODELS, WIDTH, WORDS, Handwritten, named
from handwritten._entry import cross_entropy, ids
from handwritten.manners import Block, Words
from handwritten_runs import compare, piped, plain
from tables import in_turn
from torch import Tensor, nn

import accel
from accel.errors import AccelError, StageError
from accel.parallel import Plan
from accel.testing import Simulator

# of torch, for a reentrant checkpoint in a forward without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
# Each stands for a kind: words, free parameters, frozen stages, residuals outside of modules, two inputs, skips,
# buffers, a list, attributes, hooks, a checkpoint, and calls in another order than that of registration.
FEW = (
    "nano_gpt",
    "min_gpt",
    "lora_of_last_block",
    "residuals_between",
    "dlrm",
    "unet",
    "spectral_norm",
    "listed_losses",
    "aux_attribute",
    "hooked_features",
    "reentrant",
    "backwards",
)
OUTPUTS = ("nano_gpt", "dlrm", "hooked_features")
REFUSED = {  # in four stages
    "lstm": "fewer calls of modules than stages",
    "gru": "fewer calls of modules than stages",
    "dlrm": "stages would compute too much again",
}


def assert_stages_are_the_model(ranks: Simulator, each: Handwritten, stages: int, *, evaluates: bool = True) -> None:
    micro = 3 if stages == 2 else 4
    ragged = 7 if "batch_norm" not in each.tags else 2 * micro
    plan = Plan(micro_batches=micro)

    def run(ctx: accel.DistContext) -> Any:
        return piped(ctx, each, f"pp={stages}", plan, rows=ragged, evaluates=evaluates)

    expected = plain(each, micro, rows=ragged)
    is_joint = "rows" in each.tags  # its output depends on the samples that a micro-batch has
    assert compare(ranks.run(run, stages, default_group=True), expected, outputs=not is_joint) == []


@pytest.mark.parametrize(
    "each",
    [*named(*FEW), *(pytest.param(each, marks=pytest.mark.slow) for each in named("equilibrium", "complex_states"))],
    ids=lambda each: each.name,
)
def test_two_stages_are_the_model(ranks: Simulator, each: Handwritten) -> None:
    assert_stages_are_the_model(ranks, each, 2, evaluates=each.name in OUTPUTS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("each", "stages"),
    [
        *in_turn([each for each in MODELS if each.name not in (*FEW, *REFUSED)], 2, 4),
        *((each, 4) for each in named(*{**dict.fromkeys(FEW), **REFUSED})),  # some with two by default
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_any_number_of_stages_is_the_model(ranks: Simulator, each: Handwritten, stages: int) -> None:
    if stages == 4 and each.name in REFUSED:
        with assert_raises(AccelError, problem=REFUSED[each.name]):
            assert_stages_are_the_model(ranks, each, stages)
        return
    assert_stages_are_the_model(ranks, each, stages)


class Universal(Words):
    """Calls two blocks three times each, and weighs what each round gives by a chance to halt."""

    def __init__(self) -> None:
        super().__init__(2)
        self.steps, self.halt = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total, left = torch.zeros_like(x), torch.ones_like(x[..., :1])
        for step in range(3):
            x = x + self.steps.weight[step]
            for block in self.blocks:
                x = block(x)
            chance = torch.sigmoid(self.halt(x))
            total = total + left * chance * x
            left = left * (1 - chance)
        return self.head(total + left * x)


class Remembering(Words):
    """Blocks add what they saw in the micro-batch before."""

    class kind(Block):  # noqa: N801
        memory: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            seen = x if self.memory is None or len(self.memory) != len(x) else x + 0.3 * self.memory
            self.memory = x.detach()
            return super().forward(seen)


class Reweighted(Words):
    """Calls blocks with other weights than theirs."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            centered = {name: each - each.mean() if each.ndim == 2 else each for name, each in block.named_parameters()}
            x = torch.func.functional_call(block, centered, (x,))
        return self.head(self.norm(x))


class HookedGradients(Words):
    """Hooks of blocks and of a weight change gradients."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 1.1,))
            block.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.9,))
        self.blocks[1].mix.weight.register_hook(lambda gradient: gradient * 3)


class Recurrent(Words):
    """Takes one block after another for the steps of a sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state, states = torch.zeros_like(x[:, :1]), list[Tensor]()
        for step in range(ids.shape[1]):
            state = self.blocks[step % len(self.blocks)](state + x[:, step : step + 1])
            states.append(state)
        return self.head(self.norm(torch.cat(states, 1)))


class Sending(Words):
    """A generator gives its layers and is sent what they return."""

    def layers(self, x: Tensor) -> Generator[nn.Module, Tensor, Tensor]:
        for at, block in enumerate(self.blocks):
            x = (yield block) * (1 + at / 10)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        layers = self.layers(x)
        try:
            layer = next(layers)
            while True:
                x = layer(x)
                layer = layers.send(x)
        except StopIteration as end:
            return self.head(self.norm(end.value))


FORMS = (Universal, Remembering, Reweighted, HookedGradients, Recurrent, Sending)
CELLS = [
    ("pp=2", Plan(micro_batches=2)),
    ("pp=4", Plan(micro_batches=4, schedule="GPipe")),
    ("pp=2", Plan(micro_batches=4, schedule="Interleaved1F1B", stages_per_rank=2)),
    ("pp=2", Plan(micro_batches=4, schedule="InterleavedZeroBubble", stages_per_rank=2)),
    ("pp=2", Plan(micro_batches=4, schedule="ZBVZeroBubble", stages_per_rank=2)),
]


@pytest.mark.parametrize(
    ("kind", "mesh", "plan"),
    [
        *(pytest.param(kind, *CELLS[0], marks=pytest.mark.slow) for kind in FORMS),
        *(pytest.param(kind, *cell, marks=pytest.mark.nightly) for kind, cell in in_turn(FORMS, *CELLS[1:])),
        *(pytest.param(kind, *cell, marks=pytest.mark.nightly) for kind, cell in in_turn(FORMS, *CELLS[1:], begin=2)),
    ],
)
def test_schedules_run_other_forms_as_the_model(ranks: Simulator, kind: type[nn.Module], mesh: str, plan: Plan) -> None:
    each = Handwritten(kind.__name__, kind, ids, cross_entropy)
    assert plan.micro_batches is not None
    found = ranks.run(
        lambda ctx: piped(ctx, each, mesh, plan, rows=8, evaluates=False), int(mesh[-1]), default_group=True
    )
    assert compare(found, plain(each, plan.micro_batches, rows=8)) == []


class ChosenRows(Words):
    """Computes the tokens that hidden values choose, between modules."""

    def layer(self, block: Any, x: Tensor) -> Tensor:
        keep = x.mean(-1) > 0
        new = x.clone()
        new[keep] = x[keep] + torch.tanh(block.out(block.mix(torch.cat([block.norm(x[keep])] * 2, -1))))
        return new

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.layer(block, x)
        return self.head(self.norm(x))


class MaskedRows(ChosenRows):
    def layer(self, block: Any, x: Tensor) -> Tensor:
        new = x + torch.tanh(block.out(block.mix(torch.cat([block.norm(x)] * 2, -1))))
        return torch.where(x.mean(-1, keepdim=True) > 0, new, x)


class MappedBlocks(Words):
    """Maps blocks over samples."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.func.vmap(lambda row, block=block: block(row[None])[0])(x)
        return self.head(self.norm(x))


class MappingBlocks(Words):
    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            plain = super().forward
            return torch.func.vmap(lambda row: plain(row[None])[0])(x)


class Packed(nn.Module):
    """Packs sequences whose lengths follow from their words; the packed rows are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.one, self.two = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids > 9).sum(1).clamp(min=1)
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        x, _ = self.one(pack(self.embed(ids), lengths, batch_first=True, enforce_sorted=False))
        x, _ = self.two(x)
        return self.out(pad(x, batch_first=True, total_length=ids.shape[1])[0])


class Unpacked(Packed):
    def forward(self, ids: Tensor) -> Tensor:
        real = (ids > 9)[..., None]
        return self.out(torch.where(real, self.two(torch.where(real, self.one(self.embed(ids))[0], 0.0))[0], 0.0))


@pytest.mark.parametrize(
    ("kind", "told", "named", "helps"),
    [
        (
            ChosenRows,
            "the shape of a tensor that is sent to the next stage depends on values",
            "torch.where",
            MaskedRows,
        ),
        (MappedBlocks, "the forward fails where it is recorded", "torch.func.vmap within the forward", MappingBlocks),
        pytest.param(Packed, "the shape of a tensor that is sent", "torch.where", Unpacked, marks=pytest.mark.slow),
    ],
)
def test_shapes_and_transforms_that_stages_cannot_follow_are_refused(
    ranks: Simulator, kind: type[nn.Module], told: str, named: str, helps: type[nn.Module]
) -> None:
    def wrong(made: type[nn.Module]) -> list[str]:
        each = Handwritten(made.__name__, made, ids, cross_entropy)
        plan = Plan(micro_batches=2)
        found = ranks.run(lambda ctx: piped(ctx, each, "pp=2", plan, rows=6), 2, default_group=True)
        return compare(found, plain(each, 2, rows=6))

    with assert_raises(StageError, problem=told) as caught:
        _ = wrong(kind)
    assert named in caught.value.fix
    assert wrong(helps) == []
