# SPDX-License-Identifier: Apache-2.0
"""Models of transformers train through a pipeline as they are: hidden states travel as `inputs_embeds`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.testing import Simulator

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 64, "use_cache": False, "bos_token_id": None, "eos_token_id": None}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**SMALL, **rates, n_embd=32, n_layer=4, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _gemma3() -> nn.Module:
    """Three layers with windows of 3 tokens and one without; the windows count positions by themselves."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SMALL, **sizes, num_key_value_heads=2, head_dim=8, sliding_window=3, layer_types=kinds
    )
    return transformers.Gemma3ForCausalLM(config)


def _mistral() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.MistralConfig(**SMALL, **sizes, num_key_value_heads=2, head_dim=8, sliding_window=3)
    return transformers.MistralForCausalLM(config)


def _bloom() -> nn.Module:
    """Adds biases for each position of the mask, which is as long as the keys."""
    config = transformers.BloomConfig(
        **SMALL, hidden_size=32, n_layer=4, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    return transformers.BloomForCausalLM(config)


def _lfm2() -> nn.Module:
    """Layers of convolutions, which keep states, between layers of attention."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**SMALL, **sizes, num_key_value_heads=2, layer_types=kinds)
    )


def _bert() -> nn.Module:
    """Calls its embeddings with `inputs_embeds` and without ids behind the first stage."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes, **rates))


def _adapted() -> nn.Module:
    """One without a task, whose forward names no inputs."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(_gpt2(), peft.LoraConfig(r=2))


def _mamba() -> nn.Module:
    """Asks its head for a dtype."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, use_cache=False, **sizes))


def _loss_sum(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _train(ctx: accel.DistContext, make: Any, mesh: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeding.seeded(ctx, 0):
        model = make().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(micro_batches=3))
    figures: list[float] = []
    for step in range(2):
        ids = torch.randint(64, (5, 9), generator=torch.Generator().manual_seed(step))
        inputs = {"input_ids": ids[:, :-1], "attention_mask": torch.ones(5, 8, dtype=torch.int64)}
        state = begin_batch(ctx)
        loss, state = accel.forward_backward(
            ctx, model, state, inputs, targets=ids[:, 1:], loss_fn=_loss_sum, weight=40
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.05)
        assert state.grad_norm is not None
        figures += [float(loss), float(state.grad_norm)]
    return {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}, figures


@pytest.mark.slow
@pytest.mark.parametrize("make", [_llama, _gpt2, _bert])
def test_a_pipeline_takes_the_steps_of_one_process(ranks: Simulator, make: Any) -> None:
    whole, expected = ranks.run(partial(_train, make=make, mesh=""), 1)[0]
    found = ranks.run(partial(_train, make=make, mesh="pp=2"), 2, default_group=True)
    assert {name for parameters, _ in found for name in parameters} == whole.keys()
    for parameters, figures in found:
        assert figures == pytest.approx(expected, rel=0, abs=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10)


def _generated(
    ctx: accel.DistContext, make: Any, mesh: str, plan: accel.parallel.Plan, **options: Any
) -> tuple[torch.Tensor, list[int]]:
    """The sequences, and the number of positions of each call of a layer's feed-forward."""
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeding.seeded(ctx, 0):
        model = make().double()
    positions: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(("mlp", "feed_forward")):
            module.register_forward_pre_hook(lambda _, args: positions.append(args[0].shape[1]))
    model = accel.prepare_model(ctx, model, plan=plan)
    with accel.evaluating(model):
        ids = accel.training.generate(ctx, model, PROMPTS, max_new_tokens=6, attention_mask=MASK, **options)
    return ids, positions


PROMPTS = torch.randint(1, 64, (5, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(PROMPTS)
MASK[1, :3] = MASK[3, :1] = 0  # padding in front


@pytest.mark.nightly
@pytest.mark.parametrize("make", [_llama, _gpt2])
@pytest.mark.parametrize("eos", [None, 5])
def test_generation_with_a_cache_is_that_of_transformers(ranks: Simulator, make: Any, eos: int | None) -> None:
    plans = {
        "": accel.parallel.Plan(micro_batches=2),
        "pp=2": accel.parallel.Plan(micro_batches=3),
        "pp=2,tp=2": accel.parallel.Plan(),
    }
    if make is _llama:  # a tied parameter cannot be in two stages of one rank
        plans["pp=2,dp=1"] = accel.parallel.Plan(schedule="ZBVZeroBubble", stages_per_rank=2)
    assert_equal_runs(ranks, make, plans, eos)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_gemma3, _mistral, _bloom, _lfm2])
def test_stages_keep_windows_biases_and_states_of_their_layers(ranks: Simulator, make: Any) -> None:
    plans = {"pp=2": accel.parallel.Plan(micro_batches=3), "pp=4": accel.parallel.Plan(micro_batches=4)}
    assert_equal_runs(ranks, make, plans)


def assert_equal_runs(
    ranks: Simulator, make: Any, plans: dict[str, accel.parallel.Plan], eos: int | None = None
) -> None:
    with accel.seeding.seeded(accel.single(), 0):
        whole = make().double()
    more = {"eos_token_id": eos, "pad_token_id": eos or 0}
    expected = whole.generate(PROMPTS, attention_mask=MASK, max_new_tokens=6, do_sample=False, use_cache=True, **more)
    for mesh, plan in plans.items():
        size = 1 if not mesh else 4 if "4" in mesh or "tp" in mesh else 2
        run = partial(_generated, make=make, mesh=mesh, plan=plan, eos=eos)
        for found, positions in ranks.run(run, size, default_group=True):
            assert torch.equal(found, expected), mesh
            assert set(positions) == {1, PROMPTS.shape[1]}, mesh
            assert positions == sorted(positions, reverse=True), mesh  # the prompt, then a token at a time


@pytest.mark.slow
def test_masks_that_pad_behind_are_refused() -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    with assert_raises(accel.errors.ConfigError, fix="padding_side"):
        accel.training.generate(
            accel.single(), _llama(), ids, max_new_tokens=1, attention_mask=torch.tensor([[1, 1, 0]])
        )
