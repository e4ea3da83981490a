# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer from a `config.json` of Hugging Face's transformers; pure but for the file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from accel.errors import ConfigError
from accel.errors._checks import check_choice, check_count
from accel.estimate._model import Latent, Parameter, Tower, Transformer
from accel.opening import read_regular

_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
}
_DEEPSEEK = _LLAMA | {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "inner": "moe_intermediate_size",
    "dense_inner": "intermediate_size",
}
_GPT2 = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocabulary": "vocab_size"}
# Of each kind of model: the fields that it must name, and what is the same in all models of the kind.
KINDS: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "llama": (_LLAMA, {}),
    "mistral": (_LLAMA, {}),
    "qwen2": (_LLAMA, {"qkv_bias": True}),
    "qwen3": (_LLAMA, {"head_norms": True}),
    "mixtral": (_LLAMA | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}, {}),
    "qwen3_moe": (
        _LLAMA
        | {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "inner": "moe_intermediate_size"},
        {"head_norms": True},
    ),
    "deepseek_v2": (_DEEPSEEK, {}),
    "deepseek_v3": (_DEEPSEEK, {"corrected": True}),
    "gpt2": (
        _GPT2,
        {
            "gated": False,
            "qkv_bias": True,
            "biases": True,
            "divided_ends": False,
            "fused": True,
            "inner_kept": 5,
        },
    ),
}
_USUAL: Mapping[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "add_cross_attention": False, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "moe_layer_freq": 1,
}  # fmt: skip
_RENAMED = {
    "qwen3_moe": "num_experts", "deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts",
}  # fmt: skip
_DECODERS = ("ForCausalLM", "LMHeadModel")
_TIED = ("gpt2",)  # unless the configuration has another size


def read_transformer(path: Path) -> Transformer:
    """Return the sizes in a `config.json` of Hugging Face's transformers, given the file or its folder.

    Raises:
        ConfigError: no such file, or a kind of model with unknown blocks.
    """
    path = path / "config.json" if path.is_dir() else path
    return transformer_from(read_fields(path), where=str(path))


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a `config.json`; sizes that no model can have are refused."""
    try:
        fields = msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except FileNotFoundError as error:
        expected = "a config.json of Hugging Face's transformers, or a folder with one"
        raise ConfigError("there is no such file", expected=expected, got=repr(str(path))) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("the file cannot be read", expected="JSON", got=str(error), where=str(path)) from error
    _check_fields(fields, str(path))
    return fields


# A model has at least one of each; transformers builds one with -5 layers as if it had none.
_NEEDED = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|hidden_size|n_embd|num_attention_heads|n_heads?|vocab_size"
)
_LAYERS = re.compile(r".*(layers?|depths?|blocks?|stages)")
_PARTS = re.compile(r".*(experts|heads?)")
_SIZE = re.compile(r"(num|n)_.*|.*_(size|dim|rank)")
_NUMBER = re.compile(r"(num|n)_.*(layers?|depths?|blocks?|stages|experts|heads?)")
_MOST: Mapping[re.Pattern[str], int] = {_LAYERS: 4096, _PARTS: 2**16, _SIZE: 2**40}


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuse sizes of no model, which would take forever to build, or are built as if they were others."""
    names = fields.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(each, str) for each in cast(Any, names))):
        raise ConfigError(
            "the names of classes are not valid",
            expected="a list",
            got=str(fields["architectures"])[:80],
            where=f"{where}, architectures",
        )
    waiting: list[tuple[str, object]] = [("", fields)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += cast("Mapping[str, object]", value).items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in cast("list[object]", value)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least = 1 if _NEEDED.fullmatch(name) else 0 if _NUMBER.fullmatch(name) else -math.inf
            most = next((most for names, most in _MOST.items() if names.fullmatch(name)), math.inf)
            if not least <= value <= most or (least == 1 and type(value) is not int):
                expected = f"a whole number from {least} to {most}"
                raise ConfigError(
                    "the size of the model is not valid",
                    expected=expected,
                    got=str(value)[:80],
                    where=f"{where}, {name}",
                )


def transformer_from(fields: Mapping[str, Any], *, where: str) -> Transformer:
    """Return the sizes in a configuration with transformers' names; `where` is its origin, for errors."""
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(
            "the file is not a configuration of a model", expected="`model_type`", got="none", where=where
        )
    check_choice(kind, [*KINDS, *_SEEING], "the blocks of this kind of model are not known", where=where)
    return _with_tower(fields, kind, where) if kind in _SEEING else _decoder(fields, kind, where)


def _decoder(fields: Mapping[str, Any], kind: str, where: str) -> Transformer:
    names, same = KINDS[kind]
    if kind in _RENAMED and _RENAMED[kind] not in fields:  # transformers 5 stores it by a common name
        other = fields.get("num_local_experts", fields.get("num_experts"))
        fields = {**fields, _RENAMED[kind]: other}
    sizes = {field: _size(fields, name, where) for field, name in names.items()}
    heads, width = sizes["heads"], sizes["width"]
    if width % heads and not fields.get("head_dim") and "dense_inner" not in names:
        raise ConfigError("heads of no size", expected=f"a width that {heads} divides", got=str(width), where=where)
    optional: dict[str, Any] = {
        "kv_heads": _size(fields, "num_key_value_heads", where, heads),
        "head_width": _size(fields, "head_dim", where, width // heads),
        "tied": bool(fields.get("tie_word_embeddings", kind in _TIED)),
    }
    optional |= _windows(fields, kind, sizes["layers"], where)
    if "dense_inner" in names:
        optional |= _latents(fields, kind, sizes, where)
    if kind == "gpt2":
        optional["inner"] = _size(fields, "n_inner", where, 4 * width)
        optional["positions"] = _size(fields, "n_positions", where, 1024)
    if named := [name for name, usual in _USUAL.items() if fields.get(name, usual) not in (usual, None)]:
        raise ConfigError("the blocks of this model are not known", got=", ".join(named), where=where)
    classes: list[str] = fields.get("architectures") or []
    if classes and not classes[0].endswith(_DECODERS):
        expected = " or ".join(f"a class ...{each}" for each in _DECODERS)
        raise ConfigError("the model is not a causal language model", expected=expected, got=classes[0], where=where)
    return Transformer(**sizes, **optional, **same)


# Of DeepSeek-V2 and V3 where a file leaves them out, as transformers has them.
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_SHARED = {"deepseek_v2": 2, "deepseek_v3": 1}
_FIRST_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3}


def _latents(fields: Mapping[str, Any], kind: str, sizes: Mapping[str, int], where: str) -> dict[str, Any]:
    """Sizes of attention through latents, and of separate blocks and experts."""
    queries = 0 if fields.get("q_lora_rank", 1536) is None else _size(fields, "q_lora_rank", where, 1536)
    found = {name: _size(fields, name, where, usual) for name, usual in _LATENTS.items()}
    dense = fields.get("first_k_dense_replace", _FIRST_DENSE[kind])
    named = f"{where}, first_k_dense_replace"
    check_count(dense, "the number of blocks is not valid", least=0, expected="0 or above", where=named)
    rotated = found["qk_rope_head_dim"]
    return {
        "latent": Latent(queries=queries, keys=found["kv_lora_rank"], rotated=rotated, values=found["v_head_dim"]),
        "kv_heads": sizes["heads"],
        "head_width": found["qk_nope_head_dim"] + rotated,
        "shared_inner": sizes["inner"] * _size(fields, "n_shared_experts", where, _SHARED[kind]),
        "dense": min(dense, sizes["layers"]),
    }


def _windows(fields: Mapping[str, Any], kind: str, layers: int, where: str) -> dict[str, int]:
    """The window of attention and the number of blocks that have it, with transformers' defaults."""
    if kind.startswith(("llama", "gpt2", "deepseek")) or (
        kind.startswith("qwen") and not fields.get("use_sliding_window")
    ):
        return {}
    usual = None if kind == "mixtral" else 4096
    if fields.get("sliding_window", usual) is None:
        return {}
    kinds = fields.get("layer_types")
    first = _size(fields, "max_window_layers", where, 28) if kind in ("qwen2", "qwen3") else 0
    count = max(0, layers - first)
    if isinstance(kinds, list):
        count = cast("list[object]", kinds).count("sliding_attention")
    return {"window": _size(fields, "sliding_window", where, usual), "windowed": count} if count else {}


def _size(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value: object = fields.get(name)
    if value is None and default is not None:
        return default
    check_count(value, "the size of the model is not valid", expected="1 or above", where=f"{where}, {name}")
    return cast(int, value)


# Of each kind of model with an encoder of images: the kind of its decoder, and transformers' sizes of the encoder, and
# of the decoder, where a file leaves them out.
_CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32,
}  # fmt: skip
_QWEN = {"depth": 32, "num_heads": 16, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_SEEING: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llava": (
        "llama",
        _CLIP,
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "qwen2_vl": ("qwen2", _QWEN | {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}, {}),
    "qwen2_5_vl": (
        "qwen2",
        _QWEN | {"hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584, "window_size": 112},
        {},
    ),
    "clip": (
        "clip",
        _CLIP,
        {
            "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
            "vocab_size": 49408, "max_position_embeddings": 77,
        },
    ),
}  # fmt: skip
_KEPT = {"quick_gelu": 3, "gelu": 2}  # tensors inside an MLP, by its activation
_PIXELS = 3


def _with_tower(fields: Mapping[str, Any], kind: str, where: str) -> Transformer:
    """Return the sizes of a decoder with an encoder of images."""
    inner, usual, words = _SEEING[kind]
    vision = {**usual, **_nested(fields, "vision_config", where)}
    text = {**words, **(_nested(fields, "text_config", where) if "text_config" in fields else fields)}
    classes: list[str] = fields.get("architectures") or []
    if classes and not classes[0].endswith(("ForConditionalGeneration", "CLIPModel")):
        expected = "a class ...ForConditionalGeneration, or CLIPModel"
        raise ConfigError("the model does not take texts and images", expected=expected, got=classes[0], where=where)
    if kind == "clip":
        return _compared(fields, text, vision, where)
    named = str(text.get("model_type") or inner).removesuffix("_text")
    named = inner if named == kind else named
    check_choice(named, list(KINDS), "the blocks of this decoder are not known", where=f"{where}, text_config")
    text = {"tie_word_embeddings": fields.get("tie_word_embeddings", False), **text, "architectures": None}
    decoder = _decoder(text, named, f"{where}, text_config")
    make = _clip_tower if kind == "llava" else _qwen_tower
    return replace(decoder, tower=make(fields, vision, decoder.width, f"{where}, vision_config"))


def _nested(fields: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = fields.get(name)
    if not isinstance(found, Mapping):
        raise ConfigError(
            "the configuration has no such part", expected="an object", got=repr(found), where=f"{where}, {name}"
        )
    return cast("Mapping[str, Any]", found)


def _compared(fields: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any], where: str) -> Transformer:
    """Sizes of CLIP: two encoders, and the vectors that they compare."""
    size = _size(fields, "projection_dim", where, 512)
    projection = Parameter(name="visual_projection.weight", shape=(size, _size(vision, "hidden_size", where)))
    tower = _clip_blocks(vision, f"{where}, vision_config")
    return replace(
        _clip_encoder(text, f"{where}, text_config"),
        vocabulary=_size(text, "vocab_size", where),
        positions=_size(text, "max_position_embeddings", where),
        causal=True,
        divided_ends=False,
        compared=size,
        tower=replace(tower, ends=(*tower.ends, projection), divided=True),
    )


def _clip_tower(fields: Mapping[str, Any], vision: Mapping[str, Any], width: int, where: str) -> Tower:
    """Sizes of LLaVA's encoder, and of the layers that make its outputs tokens."""
    kind = vision.get("model_type", "clip_vision_model")
    check_choice(kind, ["clip_vision_model"], "the blocks of this encoder are not known", where=where)
    taken = fields.get("vision_feature_layer", -2)
    chosen = fields.get("vision_feature_select_strategy", "default")
    if type(taken) is not int or chosen != "default":
        raise ConfigError(
            "the features of images are not known", expected='one layer, and the strategy "default"',
            got=f"{taken}, {chosen}", where=where,
        )  # fmt: skip
    tower = _clip_blocks(vision, where)
    layers = tower.blocks.layers
    own = tower.blocks.width
    ends = [*_linear("linear_1", width, own), *_linear("linear_2", width, width)]
    used = taken if taken >= 0 else layers + 1 + taken
    return replace(tower, merged=1, taken=min(layers, max(0, used)), ends=(*tower.ends, *ends))


def _clip_blocks(vision: Mapping[str, Any], where: str) -> Tower:
    blocks = _clip_encoder(vision, where)
    width = blocks.width
    patch, side = (_size(vision, name, where) for name in ("patch_size", "image_size"))
    norms = [
        Parameter(name=f"{name}.{end}", shape=(width,))
        for name in ("pre_layrnorm", "post_layernorm")
        for end in ("weight", "bias")
    ]
    ends = (
        Parameter(name="class_embedding", shape=(width,)),
        Parameter(name="patch_embedding.weight", shape=(width, _PIXELS, patch, patch)),
        Parameter(name="position_embedding.weight", shape=((side // patch) ** 2 + 1, width), looked_up=True),
        *norms,
    )
    return Tower(
        blocks=blocks, patch=patch, side=side, merged=0, classed=True, taken=blocks.layers, ends=ends,
    )  # fmt: skip


def _clip_encoder(fields: Mapping[str, Any], where: str) -> Transformer:
    width, heads = (_size(fields, name, where) for name in ("hidden_size", "num_attention_heads"))
    return Transformer(
        layers=_size(fields, "num_hidden_layers", where),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        inner=_size(fields, "intermediate_size", where),
        vocabulary=0,
        gated=False,
        qkv_bias=True,
        biases=True,
        inner_kept=_KEPT.get(str(fields.get("hidden_act", "quick_gelu")), 3),
        causal=False,
    )


def _qwen_tower(_: Mapping[str, Any], vision: Mapping[str, Any], width: int, where: str) -> Tower:
    """Return the sizes of the encoder of Qwen2-VL, or of Qwen2.5-VL: blocks of a Llama with windows."""
    gated = "embed_dim" not in vision
    own = _size(vision, "hidden_size" if gated else "embed_dim", where)
    depth, heads, patch = (_size(vision, name, where) for name in ("depth", "num_heads", "patch_size"))
    merged = _size(vision, "spatial_merge_size", where) ** 2
    pixels = _PIXELS * _size(vision, "temporal_patch_size", where) * patch**2
    whole: Any = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    blocks = Transformer(
        layers=depth,
        width=own,
        heads=heads,
        kv_heads=heads,
        head_width=own // heads,
        inner=_size(vision, "intermediate_size", where) if gated else own * _size(vision, "mlp_ratio", where),
        vocabulary=0,
        gated=gated,
        qkv_bias=True,
        biases=True,
        rms=gated,
        fused=True,
        inner_kept=4 if gated else 3,
        causal=False,
        window=(_size(vision, "window_size", where) // patch) ** 2 if gated else 0,
        windowed=sum(at not in whole for at in range(depth)) if gated else 0,
    )
    norms = [Parameter(name=f"ln_q.{end}", shape=(own,)) for end in (("weight",) if gated else ("weight", "bias"))]
    ends = [
        Parameter(name="patch_embedding.weight", shape=(own, pixels)),
        *norms,
        *_linear("up_proj", own * merged, own * merged),
        *_linear("down_proj", width, own * merged),
    ]
    return Tower(blocks=blocks, patch=patch, merged=merged, taken=depth, ends=tuple(ends))


def _linear(name: str, out: int, into: int) -> list[Parameter]:
    return [
        Parameter(name=f"projector.{name}.weight", shape=(out, into)),
        Parameter(name=f"projector.{name}.bias", shape=(out,)),
    ]
