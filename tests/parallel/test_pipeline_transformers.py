# SPDX-License-Identifier: Apache-2.0
"""Models of transformers train through a pipeline as they are: hidden states travel as `inputs_embeds`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
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


def _loss_sum(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _train(ctx: accel.DistContext, make: Any, mesh: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeded(ctx, 0):
        model = make().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.Plan(micro_batches=3))
    figures: list[float] = []
    for step in range(2):
        ids = torch.randint(64, (5, 9), generator=torch.Generator().manual_seed(step))
        inputs = {"input_ids": ids[:, :-1], "attention_mask": torch.ones(5, 8, dtype=torch.int64)}
        scaler, accum = accel.loss_scale(ctx), accel.Accumulation().next()
        loss, accum = accel.forward_backward(
            ctx, model, scaler, accum, inputs, targets=ids[:, 1:], loss_fn=_loss_sum, weight=40
        )
        result = accel.optimizer_step(ctx, optimizer, scaler, accum, max_norm=0.05)
        assert result.grad_norm is not None
        figures += [float(loss), float(result.grad_norm)]
    return {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}, figures


@pytest.mark.slow
@pytest.mark.parametrize("make", [_llama, _gpt2])
def test_a_pipeline_takes_the_steps_of_one_process(ranks: Simulator, make: Any) -> None:
    whole, expected = ranks.run(partial(_train, make=make, mesh=""), 1)[0]
    found = ranks.run(partial(_train, make=make, mesh="pp=2"), 2, default_group=True)
    assert {name for parameters, _ in found for name in parameters} == whole.keys()
    for parameters, figures in found:
        assert figures == pytest.approx(expected, rel=0, abs=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10)
