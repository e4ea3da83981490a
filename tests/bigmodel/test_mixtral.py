# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of transformers: from the hub's layout to the model as it runs, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from safetensors import safe_open

import accel
from accel.bigmodel.load._targets import _recipes_of_experts
from accel.testing import simulate

RECIPES = accel.bigmodel.expert_recipes(stored_block="block_sparse_moe", gate="w1", up="w3", down="w2")


@pytest.fixture(scope="module")
def original() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM  # takes seconds, which a collection need not

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


@pytest.fixture(scope="module")
def folder(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    original.save_pretrained(folder, max_shard_size="30KB")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return found


def test_a_checkpoint_of_the_hub_becomes_the_model_and_the_model_the_checkpoint(
    original: Any, folder: Path, tmp_path: Path
) -> None:
    ctx = accel.single("cpu")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in tensors(folder)
    reference = type(original).from_pretrained(folder)
    model = accel.init_empty_weights(lambda: type(original)(original.config))
    assert model.model.layers[0].mlp.experts.gate_up_proj.is_meta
    accel.bigmodel.load_checkpoint_in_model(ctx, model, folder, rename=RECIPES)
    state = model.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name
    ids = torch.arange(10).view(1, -1)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, reference.eval()(ids).logits)
    accel.save_model(ctx, model, tmp_path / "out", rename=RECIPES, max_shard_size="30KB")
    written, read = tensors(tmp_path / "out"), tensors(folder)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)


def test_ranks_of_a_sharded_model_save_the_checkpoint_of_the_hub(original: Any, folder: Path, tmp_path: Path) -> None:
    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.init_empty_weights(lambda: type(original)(original.config))
        model = accel.prepare_model(ctx, model)
        accel.bigmodel.load_checkpoint_in_model(ctx, model, folder, rename=RECIPES)
        accel.save_model(ctx, model, tmp_path, rename=RECIPES, max_shard_size="30KB")

    simulate(run, 2, default_group=True)
    written, read = tensors(tmp_path), tensors(folder)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)


def test_an_empty_mixtral_names_the_recipes_that_load_it(original: Any, folder: Path) -> None:
    ctx = accel.single("cpu")
    model = accel.prepare_model(ctx, accel.init_empty_weights(lambda: type(original)(original.config)))
    with assert_raises(accel.errors.PrepareError, fix="expert_recipes"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(accel.errors.CheckpointError) as caught:
        accel.bigmodel.load_checkpoint_in_model(ctx, model, folder)
    line = caught.value.fix.removeprefix("The model stacks its experts: pass rename=").removesuffix(".")
    assert eval(line, {"accel": accel}) == RECIPES
    accel.bigmodel.load_checkpoint_in_model(ctx, model, folder, rename=eval(line, {"accel": accel}))
    assert torch.equal(model.state_dict()["lm_head.weight"], original.state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("missing", "unused", "fix"),
    [
        ("mlp.experts.gate_up_proj", ["a.mlp.experts.3.{}.weight"], "expert_recipes()."),
        ("a.moe.experts.gate_up_proj", ["a.moe.experts.3.{}.weight"], 'expert_recipes(block="moe").'),
        ("a.mlp.experts.gate_up_proj", ["a.mlp.experts.0.fc.weight"], "expert_recipes(gate=, up=, down=)."),
        ("a.mlp.experts.gate_up_proj", ["a.mlp.fc.weight"], ""),
        ("a.mlp.gate.weight", ["a.mlp.experts.3.{}.weight"], ""),
    ],
)
def test_recipes_follow_from_the_names(missing: str, unused: list[str], fix: str) -> None:
    names = [each.format(name) for each in unused for name in ("gate_proj", "up_proj", "down_proj")]
    found = _recipes_of_experts([missing], names)
    assert found.endswith(fix)
    assert bool(found) == bool(fix)
