# SPDX-License-Identifier: Apache-2.0
"""Models of transformers run with their blocks elsewhere; blocks compile to one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from catching import assert_raises
from safetensors.torch import save_file
from streamed import Block, make_net, streamed_map, token_ids
from torch import nn
from torch.nn import functional

import accel
from accel.bigmodel.run import dispatch_model

IDS = torch.tensor([[1, 5, 9, 3], [2, 7, 1, 8]])
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **experts))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, pad_token_id=0)
    )


def t5() -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0, eos_token_id=63)
    )


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    )


def dispatched(model: nn.Module, slots: int = 2) -> Any:
    return dispatch_model(model, streamed_map(model, "cpu", slots))


@pytest.mark.parametrize("make", [llama, mixtral, gpt2, t5])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"cache_implementation": "static"}],
    ids=["dynamic", "beams", "static"],
)
def test_generation_is_that_of_the_whole_model(make: Callable[[], Any], options: dict[str, Any]) -> None:
    if make in (t5, gpt2, mixtral) and "cache_implementation" in options:
        pytest.skip("one model shows the static cache")
    torch.manual_seed(0)
    model = make().eval()
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS), **options}
    expected = model.generate(IDS, **options)
    with dispatched(model, slots=1 if options.get("num_beams") else 2) as run:
        assert torch.equal(run.model.generate(IDS, **options), expected)
        assert run.stats().moved_bytes
        assert not run.stats().fetches
        assert model.device == IDS.device
    assert torch.equal(model.generate(IDS, **options), expected)


def test_save_pretrained_is_refused_with_the_way_to_a_folder_for_from_pretrained(tmp_path: Path) -> None:
    model: Any = llama()
    with dispatched(model):
        with assert_raises(accel.errors.StreamError, problem="save_pretrained") as caught:
            model.save_pretrained(tmp_path / "refused")
        assert "accel.save_model(ctx, model, folder)" in caught.value.fix
        assert not list((tmp_path / "refused").glob("*.safetensors"))
        accel.save_model(accel.single("cpu"), model, tmp_path / "saved")
        model.config.save_pretrained(tmp_path / "saved")
    again: Any = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("home", "slots"), [("cpu", 1), ("mmap", 2), ("disk", 3)])
def test_a_vision_model_and_its_convolution_class_token_and_positions_used_alone(
    home: str, slots: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = vit().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    twin = copy.deepcopy(model)
    images = {size: torch.randn(2, 3, size, size) for size in (16, 24)}  # the larger ones interpolate the positions

    def used_alone(model: Any) -> torch.Tensor:
        embeddings = model.vit.embeddings
        conv = embeddings.patch_embeddings.projection
        by_conv = functional.conv2d(images[16], conv.weight, conv.bias, stride=4).flatten(2).transpose(1, 2)
        patches = functional.unfold(images[16], 4, stride=4).transpose(1, 2)
        by_matrix = functional.linear(patches, conv.weight.flatten(1), conv.bias)
        first = embeddings.cls_token.expand(2, -1, -1) + embeddings.position_embeddings[:, :1]
        return torch.cat([first, by_conv, by_matrix], dim=1)

    device_map = streamed_map(model, home, slots)
    with dispatch_model(model, device_map, source=tmp_path / "model.safetensors") as run:
        moving = {"vit.embeddings", *(f"vit.layers.{at}" for at in range(3))}
        assert {each.name for each in run.stats().segments} == moving
        with torch.no_grad():
            for size, interpolate in ((16, False), (24, True), (16, True)):
                found, expected = (
                    each(images[size], interpolate_pos_encoding=interpolate).logits for each in (run.model, twin)
                )
                assert torch.equal(found, expected)
            assert not run.stats().fetches
            assert torch.equal(used_alone(run.model), used_alone(twin))
        for each in (run.model, twin):
            (each(images[16], labels=torch.tensor([1, 4])).loss + used_alone(each).square().mean()).backward()
        named = dict(run.model.named_parameters())
        for name, parameter in twin.named_parameters():
            assert named[name].grad is not None, name
            torch.testing.assert_close(named[name].grad, parameter.grad)


def test_training_of_a_llama_gives_the_gradients_of_the_whole_model() -> None:
    torch.manual_seed(0)
    model = llama()
    model(IDS, labels=IDS).loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    with dispatched(model) as run:
        run.model.activation_checkpointing_enable()
        run.model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():  # closed: the gradients are with the weights
        torch.testing.assert_close(parameter.grad, expected[name])


def test_blocks_compile_to_one_graph() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    net = make_net()
    expected = net(token_ids())
    with dispatched(net) as run, torch.no_grad():
        for block in run.model.blocks:
            assert isinstance(block, Block)
            block.compile(backend=backend)
        for _ in range(3):
            torch.testing.assert_close(run.model(token_ids()), expected)
    assert len(graphs) == 1, graphs
    assert graphs[0] >= 5
    torch._dynamo.reset()
