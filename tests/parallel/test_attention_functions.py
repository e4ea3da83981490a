# SPDX-License-Identifier: Apache-2.0
"""Attention functions that a model of transformers names, and caches of its keys, where ranks along tp divide heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import accel
from accel.tensors import full_tensor
from accel.testing import Simulator

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
IDS = torch.arange(10).view(2, 5) + 1
SEEN: list[tuple[type, int]] = []


def plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Each head alone; notes the kind of tensors and the number of heads that it gets."""
    SEEN.append((type(query), query.shape[1]))
    scores = query @ key.transpose(2, 3) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _model(attention: str, dtype: torch.dtype = torch.float64, *, keys: int = 4) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=keys,
        vocab_size=32,
        attn_implementation=attention,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def _step(ctx: accel.DistContext, attention: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The sum of a model's logits and its gradients."""
    model = _model(attention, dtype)
    if ctx.world_size > 1:
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
    loss = model(IDS, use_cache=False).logits.square().sum()
    loss.backward()
    return [loss.detach(), *(full_tensor(each.grad) for each in model.parameters())]


@pytest.mark.filterwarnings("ignore")
def test_a_registered_function_gets_plain_tensors_of_this_rank_s_heads(ranks: Simulator) -> None:
    transformers.AttentionInterface.register("plain", plain_attention)
    transformers.AttentionMaskInterface.register("plain", transformers.masking_utils.eager_mask)
    expected = _step(accel.single(), "plain")
    SEEN.clear()
    for found in ranks.run(lambda ctx: _step(ctx, "plain"), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert set(SEEN) == {(Tensor, 2)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_computes_this_rank_s_heads(ranks: Simulator) -> None:
    """Only a forward, as the kernel for CPUs has no backward."""

    def logits(ctx: accel.DistContext) -> Tensor:
        model = _model("flex_attention", torch.float32)
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
        with torch.no_grad():
            return model(IDS, use_cache=False).logits

    expected = logits(accel.single())
    for found in ranks.run(logits, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_caches_of_divided_keys_give_the_tokens_of_one_process(ranks: Simulator, cache: str) -> None:
    def tokens(ctx: accel.DistContext) -> Tensor:
        model = _model("sdpa")
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
        return model.generate(
            IDS, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None, cache_implementation=cache
        )

    expected = tokens(accel.single())
    assert expected.shape == (2, 10)
    for found in ranks.run(tokens, 2, default_group=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("keys", "size"), [(2, 4), (1, 2)])
def test_a_static_cache_of_keys_that_several_ranks_hold(ranks: Simulator, keys: int, size: int) -> None:
    def tokens(ctx: accel.DistContext) -> Tensor:
        model = _model("sdpa", keys=keys)
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh=f"tp={size}"), model)
        words: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.generate(IDS, max_new_tokens=3, cache_implementation="static", **words)

    expected = tokens(accel.single())
    for found in ranks.run(tokens, size, default_group=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_cache_that_the_caller_holds_goes_on_with_the_next_call(ranks: Simulator) -> None:
    def logits(ctx: accel.DistContext) -> Tensor:
        model = _model("sdpa")
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
        with torch.no_grad():
            held = model(IDS, use_cache=True).past_key_values
            assert held.get_seq_length() == 5
            held = copy.deepcopy(held)  # as of a prompt that is used again
            return model(IDS[:, :1], past_key_values=held).logits

    expected = logits(accel.single())
    for found in ranks.run(logits, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
