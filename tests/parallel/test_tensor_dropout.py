# SPDX-License-Identifier: Apache-2.0
"""Ranks along tp drop what one process does, each its part; inside of torch's attention each draws for its heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.parallel.parts import leave
from accel.tensors import full_tensor
from accel.testing import Simulator

RATE = 0.5


class Block(nn.Module):
    """A divided pair with a dropout inside, between the column-wise layer and the row-wise one, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inside, self.behind = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.down(self.inside(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(RATE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 6)
        self.last = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


PLAN = accel.parallel.Plan(
    tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}
)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def _masks(
    ctx: accel.DistContext, make: Callable[[], nn.Module], plan: accel.parallel.Plan, *inputs: Any
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Places that each dropout of a model has dropped, of full tensors, and what the rank draws after a step."""
    ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
    model = accel.prepare_model(ctx, _made(make), plan=plan)
    masks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _module, _inputs, out, name=name: masks.update({name: leave(out) == 0}))
    accel.seeding.set_seed(ctx, 0, data_rank=0)
    out = model(*inputs)
    getattr(out, "logits", out).sum().backward()
    return masks, torch.rand(4)


def _assert_dropped_as_in_one_process(
    ranks: Simulator, make: Callable[[], nn.Module], plan: accel.parallel.Plan, *inputs: Any
) -> None:
    (expected,) = ranks.run(lambda ctx: _masks(ctx, make, plan, *inputs), 1)
    assert expected[0]
    assert all(each.any() and not each.all() for each in expected[0].values())
    for found in ranks.run(lambda ctx: _masks(ctx, make, plan, *inputs), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


X = torch.linspace(1, 2, 5 * 4 * 8, dtype=torch.float64).view(5, 4, 8)


def test_divided_layers_drop_what_one_process_does(ranks: Simulator) -> None:
    _assert_dropped_as_in_one_process(ranks, Net, PLAN, X)


def test_pairs_of_layers_drop_what_one_process_does(ranks: Simulator) -> None:
    def pairs() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(RATE), nn.Linear(16, 8), nn.Dropout(RATE))

    plan = accel.parallel.Plan(
        tensor=accel.parallel.tensor_plan(pairs())
    )  # hooks on layers of a pair are for plans that are passed
    _assert_dropped_as_in_one_process(ranks, pairs, plan, X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sequence", [False, True])
def test_a_gpt2_drops_what_one_process_does(ranks: Simulator, sequence: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make() -> nn.Module:
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        drops = {"resid_pdrop": RATE, "embd_pdrop": RATE, "attn_pdrop": 0.0, "use_cache": False}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))

    ids = torch.arange(16).view(2, 8)
    _assert_dropped_as_in_one_process(ranks, make, accel.parallel.Plan(sequence=sequence), ids)


@pytest.mark.filterwarnings("ignore")
def test_adapters_drop_what_one_process_does(ranks: Simulator) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make() -> nn.Module:
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], lora_dropout=RATE)
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)

    _assert_dropped_as_in_one_process(ranks, make, accel.parallel.Plan(), torch.arange(16).view(2, 8))


def test_heads_drop_apart(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        model = nn.Sequential(nn.MultiheadAttention(8, 4, dropout=RATE, batch_first=True)).double()
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
        accel.seeding.set_seed(ctx, 0, data_rank=0)
        return model[0](X, X, X, average_attn_weights=False)[1] == 0

    one, other = ranks.run(rank, 2, default_group=True)
    assert torch.equal(one, other)
    assert not torch.equal(one[:, :2], one[:, 2:])


@pytest.mark.filterwarnings("ignore")  # torch makes an autograd function while it traces one, and warns of it
@pytest.mark.parametrize("how", ["recomputed", "copied", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_step_drops_the_same_however_it_is_computed(ranks: Simulator, how: str) -> None:
    """Gradients of a forward that runs again in the backward are those of one that does not."""

    def rank(ctx: accel.DistContext, how: str) -> list[torch.Tensor]:
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), _made(Net), plan=PLAN)
        if how == "recomputed":
            accel.checkpoint_activations(model, Block)
        if how == "compiled":
            torch.compiler.reset()
            accel.compile_model(model, Block, backend="aot_eager")
        if how == "copied":
            model = copy.deepcopy(model)
        accel.seeding.set_seed(ctx, 0, data_rank=0)
        model(X).square().sum().backward()
        return [full_tensor(each.grad) for each in model.parameters()]

    expected = ranks.run(lambda ctx: rank(ctx, ""), 2, default_group=True)
    found = ranks.run(lambda ctx: rank(ctx, how), 2, default_group=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_an_evaluation_and_an_error_leave_the_streams_shared(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[float]:
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), _made(Net), plan=PLAN)
        accel.seeding.set_seed(ctx, 0, data_rank=0)
        model.eval()(X)
        after = float(torch.rand(()))
        model.train().blocks[0].inside.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X)
        return [after, float(torch.rand(()))]

    one, other = ranks.run(rank, 2, default_group=True)
    assert one == other
    assert one[0] != one[1]


class Shortened(Net):
    """Leaves out blocks by chance, as `layerdrop` of transformers' models does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand([]) >= RATE:
                x = block(x)
        return self.head(x)


def test_ranks_along_tp_leave_out_the_same_blocks(ranks: Simulator) -> None:
    whole = _made(Shortened).eval()

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), _made(Shortened).eval(), plan=PLAN)
        accel.seeding.set_seed(ctx, 0, data_rank=0)
        return [model(X) for _ in range(6)]

    def alone(ctx: accel.DistContext) -> list[torch.Tensor]:
        accel.seeding.set_seed(ctx, 0)
        return [whole(X) for _ in range(6)]

    (expected,) = ranks.run(alone, 1)
    assert len({float(each.detach().sum()) for each in expected}) > 2
    for found in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
