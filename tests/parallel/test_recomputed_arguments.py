# SPDX-License-Identifier: Apache-2.0
"""Recomputed blocks see their arguments as they were: caches of transformers, and whatever else a block may change."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

transformers = pytest.importorskip("transformers")

IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
_SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
_ENCODER = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
_DECODER = {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_SIZES, **_HEADS}),
    "mistral": ("Mistral", {**_SIZES, **_HEADS, "sliding_window": 4}),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0}),
    "qwen2": ("Qwen2", {**_SIZES, **_HEADS}),
    "qwen3": ("Qwen3", {**_SIZES, **_HEADS, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_SIZES, **_HEADS, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3", {**_SIZES, **_HEADS, "head_dim": 8, "sliding_window": 4}),
    "mixtral": ("Mixtral", {**_SIZES, **_HEADS, **_EXPERTS}),
    "gpt_neox": ("GPTNeoX", {**_SIZES, "num_attention_heads": 2}),
    "mamba": ("Mamba", _MAMBA),
    "bart": ("Bart", {"vocab_size": 64, **_ENCODER, **_DECODER, "pad_token_id": 0}),
}
_DEFAULT = ("llama", "mistral")


def _made(family: str, attention: str = "sdpa") -> Any:
    name, sizes = FAMILIES[family]
    config = getattr(transformers, "Gemma3TextConfig" if family == "gemma3" else f"{name}Config")(**sizes)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(config).train()


def _gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model(input_ids=IDS, **inputs).logits.square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", [each if each in _DEFAULT else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_causal_models_recompute_as_they_come(family: str, attention: str, masked: bool) -> None:
    if family in ("mamba", "gemma2") and attention == "sdpa":
        pytest.skip("the family has none")
    inputs: dict[str, Any] = {"attention_mask": MASK} if masked else {}
    for more in ({}, {"use_cache": True}, {"use_cache": False}):
        expected = _gradients(_made(family, attention), **inputs, **more)
        assert_same(_gradients(accel.checkpoint_activations(_made(family, attention)), **inputs, **more), expected)


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
@pytest.mark.parametrize("twice", [False, True])
def test_a_cache_with_entries_is_restored(family: str, twice: bool) -> None:
    """As in prefix tuning: trained keys and values stand before the tokens."""

    def gradients(*, recomputes: bool) -> dict[str, torch.Tensor]:
        model = _made(family)
        if recomputes:
            accel.checkpoint_activations(model)
        torch.manual_seed(3)
        prefix = nn.ParameterList([nn.Parameter(torch.randn(2, 2, 3, 8)) for _ in range(4)])
        cache = transformers.DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
        loss = model(input_ids=IDS, past_key_values=cache).logits.square().mean()
        assert cache.get_seq_length() == 3 + IDS.shape[1]  # the caller's cache is filled
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        named = [*model.named_parameters(), *prefix.named_parameters("prefix")]
        return {name: each.grad for name, each in named}

    found = gradients(recomputes=True)
    assert_same(found, gradients(recomputes=False))
    assert all(found[f"prefix.{at}"].abs().sum() > 0 for at in range(4))


def test_an_emptied_cache_says_so_where_it_would_be_missed() -> None:
    model = accel.checkpoint_activations(_made("llama"))
    own = transformers.DynamicCache(config=model.config)
    for cache in (model(input_ids=IDS).past_key_values, own):
        _ = model(input_ids=IDS, past_key_values=own) if cache is own else None
        with assert_raises(ConfigError, problem="keep no keys and values") as raised:
            _ = model(input_ids=IDS, past_key_values=cache)
        names: dict[str, Any] = {"torch": torch, "model": model, "ids": IDS}
        exec(raised.value.fix.partition(": ")[2], names)
        assert names["cache"].get_seq_length() == IDS.shape[1]
        model(input_ids=IDS, past_key_values=names["cache"]).logits.mean().backward()


def test_models_generate_with_their_cache_as_before() -> None:
    model = accel.checkpoint_activations(_made("llama")).eval()
    with torch.no_grad():
        found = model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).tolist()
        assert found == _made("llama").eval().generate(input_ids=IDS, max_new_tokens=3, do_sample=False).tolist()


def _along_cp(ctx: accel.DistContext, family: str, *, recomputes: bool) -> Any:
    ctx = accel.replace(ctx, mesh="cp=2")
    net = _made(family)
    model = accel.prepare_model(ctx, accel.checkpoint_activations(net) if recomputes else net)
    part = accel.parallel.split_sequence(ctx, {"input_ids": IDS})
    torch.manual_seed(1)
    model(**part).logits.square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_blocks_recompute_along_cp(ranks: Simulator, family: str) -> None:
    found = ranks.run(lambda ctx: _along_cp(ctx, family, recomputes=True), 2, default_group=True)
    plain = ranks.run(lambda ctx: _along_cp(ctx, family, recomputes=False), 2, default_group=True)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other)


class Block(nn.Module):
    """A block that does something with an argument, `change`."""

    def __init__(self, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.change = change

    def forward(self, hidden: torch.Tensor, extra: Any = None, *, more: Any = None) -> torch.Tensor:
        out = self.line(hidden).tanh()
        _ = self.change(more if extra is None else extra, out)
        return out


class Items:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.count = 0

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return torch.ones(4)


def _count(items: Items, _out: torch.Tensor) -> None:
    items.count += 1


# an argument, what a block does with it, and where the error says that it changed
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], object], str]] = {
    "list": (list, lambda each, out: each.append(out), ""),
    "list, replaced": (lambda: [torch.ones(4)], lambda each, out: each.__setitem__(0, out), ""),
    "deque": (lambda: deque([1]), lambda each, out: each.append(out), ""),
    "dict": (dict, lambda each, out: each.update(key=out), ""),
    "dict, popped": (lambda: {"a": 1}, lambda each, _out: each.pop("a"), ""),
    "set": (set, lambda each, _out: each.add(1), ""),
    "object": (Items, _count, ""),
    "list of an object": (Items, lambda each, out: each.seen.append(out), ".seen"),
    "namespace in a dict": (
        lambda: {"a": SimpleNamespace(n=0)},
        lambda each, _out: vars(each["a"]).update(n=1),
        "['a']",
    ),
    "tensor": (lambda: torch.zeros(4), lambda each, out: each.add_(out.detach().mean()), ""),
    "tensor in a tuple": (lambda: (torch.zeros(4),), lambda each, _out: each[0].fill_(1), "[0]"),
    "view of a tensor": (lambda: torch.zeros(4), lambda each, _out: each[:2].fill_(1), ""),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_an_argument_that_a_block_changes_is_named(change: str, named: bool) -> None:
    make, act, path = CHANGES[change]
    block = accel.checkpoint_activations(Block(act), Block)
    hidden = torch.randn(3, 4)
    with assert_raises(ConfigError, problem="changes one of its arguments") as raised:
        _ = block(hidden, more=make()) if named else block(hidden, make())
    assert raised.value.got.startswith(f"{'more' if named else 'extra'}{path}, ")
    line = raised.value.fix.partition("parts of it: ")[2].rstrip(".")
    parts = Block(act)
    eval(line, {"accel": accel, "model": parts})
    _ = parts(hidden, make()).sum().backward()  # the block runs once, and only its layer again
    with torch.no_grad():  # nothing is recomputed
        _ = block(hidden, make())


def _reads(each: Any, out: torch.Tensor) -> object:
    return each if each is None else str(type(each))


KEEPS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], object]]] = {
    "nothing": (lambda: None, _reads),
    "a tensor": (lambda: torch.ones(4), lambda each, out: out + each),
    "a list": (lambda: [torch.ones(4), 1], lambda each, out: out + each[0]),
    "a copy": (lambda: [1], lambda each, out: [*each].append(out)),
    "a property that is kept": (Items, lambda each, out: out * each.mask),
    "a module": (lambda: nn.BatchNorm1d(4), lambda each, out: each(out)),
    "a config": (lambda: transformers.LlamaConfig(), _reads),
    "slots": (lambda: range(3), lambda each, _out: list(each)),
    "changed and put back": (lambda: {"a": 1}, lambda each, _out: (each.update(b=2), each.pop("b"))),
}


@pytest.mark.parametrize("kept", KEEPS)
def test_arguments_that_stay_are_accepted(kept: str) -> None:
    make, act = KEEPS[kept]
    hidden = torch.randn(3, 4)
    found: list[torch.Tensor | None] = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        block = Block(act)
        if recomputes:
            accel.checkpoint_activations(block, Block)
        block(hidden, make()).sum().backward()
        found.append(block.line.weight.grad)
    torch.testing.assert_close(*found)


def test_an_argument_that_changes_after_the_block_is_the_callers() -> None:
    """A list that grows between blocks: each block saw its own tensors."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Joined() for _ in range(3)])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.line(hidden)

    torch.manual_seed(0)
    model = Dense()
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    accel.checkpoint_activations(model)
    found = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [None, "repeated"])
def test_compiled_models_with_a_cache_recompute(regions: Any) -> None:
    expected = _gradients(_made("llama"), use_cache=False)
    model = accel.checkpoint_activations(_made("llama"))
    accel.compile_model(model, regions, backend="aot_eager")
    assert_same(_gradients(model, use_cache=False), expected)
