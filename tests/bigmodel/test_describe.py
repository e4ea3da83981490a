# SPDX-License-Identifier: Apache-2.0
"""Skeletons of models: blocks and what lies beside them, ties by identity, sizes of every tensor once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.bigmodel.plan import Segment, Skeleton

transformers = pytest.importorskip("transformers")


def tiny_gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=2000))


def tiny_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, vocab_size=8000, **sizes))


def tiny_mixtral() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=2, vocab_size=800, **sizes))


def tiny_t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=2, d_model=64, d_kv=8, d_ff=96, num_heads=2, vocab_size=8000)
    )


def tiny_resnet() -> nn.Module:
    return transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    )


def segments(skeleton: Skeleton) -> dict[str, Segment]:
    return {segment.name: segment for segment in skeleton.segments}


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_mixtral, tiny_t5, tiny_resnet])
def test_every_tensor_is_one_weight_with_all_its_paths(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    skeleton = accel.bigmodel.describe(model)
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    assert skeleton.nbytes == sum(each.nbytes for each in tensors)
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    paths = [path for weight in skeleton.weights() for path in (weight.name, *weight.tied)]
    assert sorted(paths) == sorted(name for name, _ in every)
    stored = {path for weight in skeleton.weights() if weight.stored for path in (weight.name, *weight.tied)}
    assert stored == set(model.state_dict())
    half = accel.bigmodel.describe(model, dtype=torch.bfloat16)
    floats = sum(each.nbytes for each in tensors if each.dtype == torch.float32)
    assert half.nbytes == skeleton.nbytes - floats // 2
    assert accel.infer_device_map(skeleton, {0: skeleton.memory}).order == ()


def test_blocks_move_and_what_stands_beside_them_moves_where_it_may() -> None:
    found = segments(accel.bigmodel.describe(tiny_llama()))
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    assert list(found) == names
    assert [found[name].movable for name in names] == [True, True, True, False, False, True]
    assert [name for name in names if found[name].rows] == ["model.embed_tokens"]
    assert (found["model.rotary_emb"].fixed, found["model.layers.0"].fixed) == (512 * 2, 0)


def test_tied_weights_stay_and_their_users_compute_on_one_device() -> None:
    skeleton = accel.bigmodel.describe(tiny_gpt2())
    table = segments(skeleton)["transformer.wte"]
    assert [(each.tied, each.moves) for each in table.weights] == [(("lm_head.weight",), False)]
    assert skeleton.tied_segments() == (("transformer.wte", "lm_head"),)
    found = accel.infer_device_map(skeleton, {0: skeleton.memory * 2 // 3, 1: skeleton.memory * 2 // 3})
    assert found.runs["lm_head"] == found.runs["transformer.wte"] == "cuda:0"
    assert set(found.runs.values()) == {"cuda:0", "cuda:1"}


class Parent(nn.Module):
    """Parameters of its own beside blocks, one of which stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([block, nn.Sequential(nn.Linear(8, 8), nn.ReLU()), block])
        self.last = self.blocks[1]
        self.register_buffer("mask", torch.ones(2**19), persistent=False)
        self.register_buffer("large", torch.ones(2**18))


def test_parameters_of_a_parent_never_move_and_a_module_in_two_places_is_one_segment() -> None:
    skeleton = accel.bigmodel.describe(Parent())
    root, first, second = skeleton.segments
    assert (root.name, root.movable, root.moving) == ("", False, 0)
    assert {weight.name: (weight.stored, weight.moves) for weight in root.weights} == {
        "scale": (True, True),
        "mask": (False, False),
        "large": (True, True),
    }
    assert (first.aliases, second.aliases) == (("blocks.2",), ("last",))
    assert first.weights[0].tied == ("blocks.2.0.weight",)
    assert first.movable
    assert (first.nbytes, first.moving) == (288, 1024)
    assert skeleton.segment_of("last.0.weight") == "blocks.1"


def test_blocks_may_be_chosen() -> None:
    model = tiny_llama()
    by_class = accel.bigmodel.describe(model, blocks=nn.Linear)
    assert "model.layers.0.mlp.up_proj" in segments(by_class)
    assert by_class.nbytes == accel.bigmodel.describe(model).nbytes
    by_path = accel.bigmodel.describe(model, blocks=lambda path, _module: path == "model")
    assert list(segments(by_path)) == ["model", "lm_head"]
    with assert_raises(
        accel.errors.ConfigError, problem="no part of the model is chosen", where=r"describe\(blocks=\)"
    ):
        accel.bigmodel.describe(model, blocks=nn.Conv2d)


def test_tables_whose_look_up_is_more_than_rows_take_slots() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.weight[input] * 2

    for make, rows in (
        (nn.Embedding, True),
        (Scaled, False),
        (lambda *sizes: nn.Embedding(*sizes, max_norm=1.0), False),
    ):
        model = nn.Sequential(make(4096, 64), nn.Linear(64, 2))
        assert accel.bigmodel.describe(model).segments[0].rows is rows


def test_weights_without_a_shape_or_a_stored_dtype_are_refused() -> None:
    with assert_raises(
        accel.errors.ConfigError, problem="a weight without a shape", where=r"0\.weight", fix="Call the model once"
    ):
        accel.bigmodel.describe(nn.Sequential(nn.LazyLinear(3)))
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.empty(2, dtype=torch.bits8))
    with assert_raises(accel.errors.ConfigError, problem="cannot be stored", got="torch.bits8", where="phase"):
        accel.bigmodel.describe(model)


def test_available_memory_leaves_a_reserve() -> None:
    free = accel.bigmodel.available_memory("cpu", reserve=0)
    assert 0 < accel.bigmodel.available_memory("cpu", reserve="1MB") < free + 2**30
    with assert_raises(accel.errors.ConfigError, problem="takes all of the memory"):
        accel.bigmodel.available_memory("cpu", reserve="1000TB")
    for device in ("meta", "nothing"):
        with assert_raises(accel.errors.DeviceError, problem=r"no such device|without memory"):
            accel.bigmodel.available_memory(device, reserve=0)


class Backwards(nn.Module):
    """Blocks that are called in another order than they are registered in; one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.late = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.unused = nn.Linear(8, 8)
        self.early = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.early, *reversed(self.late), *self.early):
            x = block(x) * self.scale
        return x


def test_a_call_gives_the_order_of_execution() -> None:
    with torch.device("meta"):
        model = Backwards()
    registered = ["", "late.0", "late.1", "unused", "early.0", "early.1"]
    assert list(segments(accel.bigmodel.describe(model))) == registered
    found = accel.bigmodel.describe(model, call=lambda model: model(torch.ones(2, 8, device="meta")))
    assert list(segments(found)) == ["", "unused", "early.0", "early.1", "late.1", "late.0"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="same reduction dim"):
        accel.bigmodel.describe(model, call=lambda model: model(torch.ones(2, 3, device="meta")))
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.device("meta"):
        llama = tiny_llama()
    called = accel.bigmodel.describe(llama, call=lambda model: model(torch.ones(1, 8, dtype=torch.long, device="meta")))
    assert [segment.name for segment in called.segments][:3] == [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.0",
    ]
