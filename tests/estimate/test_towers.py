# SPDX-License-Identifier: Apache-2.0
"""Encoders of images beside decoders: the parameters, operations and activations of transformers' own models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from estimates import kept_by_forward, memory_by_moment
from fake_ranks import Counted, Live, fake_rank
from model_configs import transformer_of
from small_llamas import attend_as_on_gpus
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import accel
from accel.errors import ConfigError
from accel.estimate import (
    EstimatedStep,
    Hosts,
    Job,
    Transformer,
    choose_meshes,
    mesh_problem,
    rank_memory,
    step_time,
    step_traffic,
)
from accel.estimate._build import as_on_gpus
from accel.tensors import local_part
from accel.topology import Axes, Plan

WORDS = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 200, "use_cache": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
TEXT = {
    "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200,
    "max_position_embeddings": 32, "eos_token_id": 199, "bos_token_id": 0,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
QWEN = {"depth": 3, "num_heads": 4, "patch_size": 14}
IMAGE = 199  # the token in the place of an image's
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **WORDS}, "image_token_index": IMAGE,
            "vision_config": {"model_type": "clip_vision_model", **CLIP},
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": WORDS | SECTIONS, "image_token_id": IMAGE,
            "vision_config": QWEN | {"embed_dim": 128, "hidden_size": 256},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": WORDS | SECTIONS, "image_token_id": IMAGE,
            "vision_config": QWEN
            | {
                "hidden_size": 128, "intermediate_size": 192, "out_hidden_size": 256, "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    "clip": ("CLIPModel", {"text_config": TEXT, "vision_config": CLIP, "projection_dim": 24}),
}  # fmt: skip
SIDE = 112
TOKENS = {"clip": 24}


def sizes_of(kind: str) -> Transformer:
    return transformer_of({"model_type": kind, **CONFIGS[kind][1]})


def made(kind: str, attention: str = "eager") -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    name, fields = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._attn_implementation = attention
    return getattr(transformers, name)(config)


def inputs_of(kind: str, rows: int) -> Mapping[str, torch.Tensor]:
    """Sequences with an image each."""
    tower = sizes_of(kind).tower
    assert tower is not None
    ids = torch.randint(1, 198, (rows, TOKENS.get(kind, 40)))
    if kind == "clip":
        ids[:, -1] = IMAGE
    if tower.merged:
        ids[:, : tower.tokens(tower.side or SIDE)] = IMAGE
    if kind in ("llava", "clip"):
        return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 28, 28)}
    grid = torch.tensor([[1, SIDE // 14, SIDE // 14]] * rows)
    return {
        "input_ids": ids, "image_grid_thw": grid, "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


def loss_of(kind: str, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if kind == "clip":
        return model(**inputs, return_loss=True).loss
    return model(**inputs, labels=inputs["input_ids"]).loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_the_model_of_transformers(kind: str) -> None:
    model = made(kind)
    seen = [name for name, _ in model.named_parameters() if "vis" in name or "projector" in name]
    sizes = sizes_of(kind)
    assert sizes.count == sum(each.numel() for each in model.parameters())
    tower = sum(each.count for each in sizes.parameters if each.name.startswith("vision."))
    assert tower == sum(model.get_parameter(name).numel() for name in seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_operations_are_those_of_the_model_of_transformers(kind: str) -> None:
    sizes, model, inputs = sizes_of(kind), made(kind), inputs_of(kind, 2)
    with FlopCounterMode(display=False) as counted:
        loss_of(kind, model, inputs).backward()
    operations = counted.get_flop_counts()["Global"]
    attention = operations.pop(torch.ops.aten.bmm)
    step = EstimatedStep(tokens=inputs["input_ids"].shape[1], rows=2, precision="fp32", side=SIDE)
    time = step_time(sizes, Axes(), step, Plan(), Hosts(flops=1.0))
    compared = 3 * 2 * 2 * 2 * sizes.compared  # vectors of two texts and two images
    assert time.products + compared == sum(operations.values())
    assert 0.5 * attention < time.attention < attention


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_activations_are_those_of_the_model_of_transformers(kind: str) -> None:
    sizes, model, inputs = sizes_of(kind), made(kind, "sdpa"), inputs_of(kind, 2)
    names = [*inputs]

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return loss_of(kind, self.model, dict(zip(names, tensors, strict=True)))

    with as_on_gpus():
        kept = kept_by_forward(Called(), [*inputs.values()])
    step = EstimatedStep(tokens=inputs["input_ids"].shape[1], rows=2, precision="fp32", side=SIDE)
    loss = next(each for each in memory_by_moment(sizes, Axes(), step, Plan(), 0))
    assert loss.activations == pytest.approx(kept.saved, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(reshard_after_forward=False)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_of_a_spread_llava_is_as_estimated(plan: Plan, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With images of 64 patches, on one of 64 ranks."""
    _ = pytest.importorskip("transformers", minversion="5.0")
    vision = CLIP | {"hidden_size": 512, "intermediate_size": 2048, "image_size": 56, "num_hidden_layers": 4}
    words = WORDS | {"hidden_size": 512, "intermediate_size": 1408}
    fields = CONFIGS["llava"][1] | {
        "text_config": {"model_type": "llama", **words},
        "vision_config": {"model_type": "clip_vision_model", **vision},
    }
    sizes = transformer_of({"model_type": "llava", **fields})
    step = EstimatedStep(tokens=256, rows=4, recompute=recompute)
    with fake_rank(monkeypatch, Axes(dp=64), strategy="fsdp") as ctx:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model = llava(fields)
        if recompute:
            accel.checkpoint_activations(model)
        model = accel.prepare_model(ctx, model, plan=plan)
        known = [local_part(each) for each in model.parameters()]
        with fake, Counted(Axes(dp=64)) as counted, Live([*known, *model.buffers()]) as live:
            train(model, step, live, counted)
    assert rank_memory(sizes, Axes(dp=64), step, plan).total == pytest.approx(live.peak, rel=0.1)
    traffic = step_traffic(sizes, Axes(dp=64), step, plan)
    for each in traffic:
        key = each.axis, each.operation
        # the embeddings of the encoder are a unit of their own, and the norm behind the unused block has no gradient
        again = 2 if each.operation == "all-gather" and plan.reshard_after_forward is None else 1
        assert counted.calls[key] == each.calls + again
        assert counted.bytes[key] == pytest.approx(each.bytes, rel=0.02)


def llava(fields: Mapping[str, Any]) -> Any:
    """A LLaVA without the search for the places of images, which needs values."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**fields))
    attend_as_on_gpus(model.model.language_model)
    model.model.vision_tower.config._attn_implementation = "sdpa"
    model.model.get_placeholder_mask = lambda ids, inputs_embeds, image_features: torch.ones_like(
        inputs_embeds[:, : image_features.shape[1]], dtype=torch.bool
    )
    return model


def train(model: Any, step: EstimatedStep, live: Live, counted: Counted) -> None:
    """Two steps; the second is measured, as it has a state of the optimizer from its start."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.zeros(step.rows, step.tokens, dtype=torch.long)
    pixels = torch.zeros(step.rows, 3, 56, 56)
    for _ in range(2):
        live.restart()
        counted.bytes.clear()
        counted.calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, pixel_values=pixels, labels=ids).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    # of the pages of the models on the Hub
    "LLaVA 1.5 7B": (
        {
            "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064},
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14,
            },
        },
        7.06e9,
    ),
    "Qwen2.5-VL 7B": (
        {
            "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
        },
        8.29e9,
    ),
    "CLIP ViT-B/32": ({"model_type": "clip", "text_config": {}, "vision_config": {}, "projection_dim": 512}, 151.3e6),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    fields, count = PUBLISHED[name]
    assert transformer_of(fields).count == pytest.approx(count, rel=0.002)


@pytest.mark.parametrize(
    ("kind", "axes", "told"),
    [
        ("llava", Axes(dp=4, pp=2), ""),
        ("llava", Axes(dp=2, pp=2, tp=2), ""),
        ("llava", Axes(pp=2, cp=2), "estimates of stages with an encoder do not know cp"),
        ("clip", Axes(dp=4, pp=2), "all texts and images of a batch are compared"),
        ("qwen2_vl", Axes(dp=4, pp=2), "images of any size cannot be split into micro-batches"),
        ("clip", Axes(dp=4, cp=2), "texts that are compared with images are not split"),
        ("clip", Axes(tp=8), "heads cannot be divided along tp"),
        ("llava", Axes(dp=2, tp=2), ""),
        ("llava", Axes(dp=2, cp=2), ""),
        ("clip", Axes(dp=2, tp=2), ""),
    ],
)
def test_what_two_lists_of_blocks_demand_is_named(kind: str, axes: Axes, told: str) -> None:
    problem = mesh_problem(axes, sizes_of(kind), Plan(), tokens=32)
    assert told in str(problem) if told else problem is None


def test_ranks_along_tp_compute_an_encoder_whole_that_no_plan_divides() -> None:
    step, hosts = EstimatedStep(tokens=32), Hosts(flops=1.0)
    llava, clip = sizes_of("llava"), sizes_of("clip")
    alone = msgspec.structs.replace(llava, tower=None)
    own = [
        step_time(llava, axes, step, Plan(), hosts).products - step_time(alone, axes, step, Plan(), hosts).products
        for axes in (Axes(), Axes(tp=2))
    ]
    assert own[0] == own[1] > 0
    whole, half = (step_time(clip, axes, step, Plan(), hosts).attention for axes in (Axes(), Axes(tp=2)))
    assert half == whole / 2


@pytest.mark.parametrize(
    ("kind", "changes", "fields"),
    [
        ("llava", {"tokens": 15}, {"expected": "16 tokens or more, for 1 of 16 each", "got": "^15$"}),
        ("llava", {"tokens": 40, "images": 3}, {"expected": "48 tokens or more, for 3 of 16 each"}),
        ("qwen2_vl", {"side": 100}, {"expected": "a multiple of 28 pixels", "got": "^100$"}),
        ("clip", {"tokens": 77}, {"expected": "32 tokens at most", "got": "^77$"}),
    ],
)
def test_images_that_do_not_fit_are_refused(kind: str, changes: dict[str, int], fields: dict[str, str]) -> None:
    job = Job(ranks=2, memory=10**12, **{"tokens": 32, **changes})
    with assert_raises(ConfigError, **fields):
        _ = choose_meshes(sizes_of(kind), job)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"vision_config": None}, {"where": "vision_config"}),
        (
            {"vision_config": {"model_type": "siglip_vision_model"}},
            {"problem": "the blocks of this encoder are not known"},
        ),
        ({"vision_feature_select_strategy": "full"}, {"problem": "the features of images are not known"}),
        ({"text_config": {"model_type": "gemma"}}, {"problem": "the blocks of this decoder are not known"}),
        ({"architectures": ["LlavaModel"]}, {"problem": "the model does not take texts and images"}),
    ],
)
def test_what_is_no_known_encoder_is_refused(changes: dict[str, Any], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        _ = transformer_of({"model_type": "llava", **CONFIGS["llava"][1], **changes})
