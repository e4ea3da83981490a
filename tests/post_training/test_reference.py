# SPDX-License-Identifier: Apache-2.0
"""A model with adapters is its own reference: on every mesh, without a trace behind the block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel import post_training as post
from accel.errors import ConfigError
from accel.tensors import full_tensor
from accel.testing import Simulator

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of names of transformers

ONE = accel.single("cpu")
IDS = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))


def make_model(ctx: accel.DistContext, *, kind: str) -> tuple[nn.Module, nn.Module]:
    """A base, and a copy of it with adapters and dropout."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with accel.seeding.seeded(ctx, 0):
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes)).double()
        targets = ["q_proj", "v_proj"]
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
        adapted = copy.deepcopy(base)
        if kind == "trained head":
            config.modules_to_save = ["lm_head"]
        if kind == "native":
            adapted.add_adapter(config)
        else:
            adapted = peft.get_peft_model(adapted, config)
    return base, adapted.double()


def train(ctx: accel.DistContext, mesh: str, strategy: Any, *, kind: str, by_copy: bool) -> list[Tensor]:
    """Take two steps of DPO, the second after the reference was off in the first; return the adapters."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    base, net = make_model(ctx, kind=kind)
    trained = [each for each in net.parameters() if each.requires_grad]
    assert 0 < len(trained) < len([*net.parameters()])
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(trained, lr=0.5))
    frozen = accel.prepare_model(ctx, base.requires_grad_(False)) if by_copy else model
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(IDS, batch_size=2), global_batch=2)
    state = accel.train_state(ctx, accumulation=1)

    def score(model: nn.Module, ids: Tensor) -> Tensor:
        logprobs = post.token_logprobs(ctx, model(input_ids=ids[:, :-1]).logits, ids[:, 1:])
        return post.sequence_sums(ctx, logprobs, torch.ones_like(ids[:, 1:]))

    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with post.reference(ctx, frozen) as before, torch.enable_grad() if by_copy else torch.no_grad():
            assert before is frozen
            first, second = score(before, batch.data), score(before, batch.data.flip(1))
        with accel.accumulate(ctx, state, model):
            loss = post.dpo_loss(score(model, batch.data), score(model, batch.data.flip(1)), first, second)
            state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
        state = accel.optimizer_step(ctx, optimizer, state)
    plain = accel.unwrap_model(model)
    assert [each.requires_grad for each in plain.parameters()] == [each.requires_grad for each in net.parameters()]
    assert all(each.training for each in plain.modules())
    return [full_tensor(each).detach() for each in plain.parameters() if each.requires_grad]


@pytest.mark.parametrize("kind", ["peft", "native", pytest.param("trained head", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("dp=2", "ddp"),
        ("dp=2", "fsdp"),
        pytest.param("tp=2", "ddp", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_adapters_off_are_a_frozen_copy(ranks: Simulator, mesh: str, strategy: Any, kind: str) -> None:
    expected = train(ONE, "", "ddp", kind=kind, by_copy=True)
    runs = ranks.run(
        lambda ctx: train(ctx, mesh, strategy, kind=kind, by_copy=False), 4 if "," in mesh else 2, default_group=True
    )
    for found in [train(ONE, "", "ddp", kind=kind, by_copy=False), *runs]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_block_leaves_everything_as_it_was_even_after_an_error() -> None:
    base, net = make_model(ONE, kind="peft")
    needs = [each.requires_grad for each in net.parameters()]
    adapted = net(input_ids=IDS).logits

    def fails() -> None:
        with post.reference(ONE, net) as model:
            torch.testing.assert_close(model(input_ids=IDS).logits, base(input_ids=IDS).logits, rtol=0, atol=1e-12)
            assert not model.training
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert torch.equal(net(input_ids=IDS).logits, adapted)
    assert not torch.allclose(adapted, base(input_ids=IDS).logits)
    assert [each.requires_grad for each in net.parameters()] == needs


def test_a_model_that_trains_needs_a_frozen_copy() -> None:
    model, ctx = nn.Linear(2, 2), ONE
    with assert_raises(ConfigError, problem="no reference of itself") as caught, post.reference(ctx, model):
        pass
    line = "frozen = accel.prepare_model(ctx, copy.deepcopy(model).requires_grad_(False))"
    assert line in str(caught.value)
    names: dict[str, Any] = {"accel": accel, "copy": copy, "ctx": ctx, "model": model}
    exec(line, names)
    with post.reference(ctx, names["frozen"]) as frozen:
        assert not frozen(torch.ones(1, 2)).requires_grad
