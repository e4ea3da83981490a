# SPDX-License-Identifier: Apache-2.0
"""The description of a model that every estimate reads: its tensors and blocks, from code, headers or sizes; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.storage import FLOATS, tensor_bytes

_UNIT = re.compile(r"(?:.*?\.)?[0-9]+(?=\.)")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter or buffer.

    Attributes:
        name: name in the model.
        shape: sizes.
        dtype: safetensors' name of the dtype in training.
        file_dtype: that of the dtype in its checkpoint; None for `dtype`.
        trained: whether it has a gradient.
        stored: whether checkpoints hold it; False for a non-persistent buffer.
        looked_up: whether it is known as a table whose rows are read, without a product.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    file_dtype: str | None = None
    trained: bool = True
    stored: bool = True
    looked_up: bool = False

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element in training."""
        return tensor_bytes((), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in training."""
        return tensor_bytes(self.shape, self.dtype)

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes in a checkpoint; floating-point values of 16 to 64 bits in `dtype`, if given."""
        own = self.file_dtype or self.dtype
        return tensor_bytes(self.shape, dtype if dtype is not None and own in FLOATS else own) if self.stored else 0


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that a forward keeps for the backward.

    Attributes:
        saved: bytes of tensors that depend on the inputs.
        copies: bytes of copies of parameters in the compute format.
    """

    saved: int
    copies: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its values.

    Attributes:
        source: origin, in words.
        parameters: each once, even if several modules share it.
        buffers: likewise.
        activations: of one step on one rank, by compute format; empty without inputs, and where `sizes` give them.
        sizes: of a transformer whose blocks are known; None for other models.
    """

    source: str
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...] = ()
    activations: Mapping[str, Activations] = {}
    sizes: Transformer | None = None

    @property
    def count(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def knows_activations(self) -> bool:
        """Whether a step's activations are known."""
        return self.sizes is not None or bool(self.activations)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(each.nbytes for each in self.buffers)

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes in a checkpoint, buffers included; floats of 16 to 64 bits in `dtype`, if given."""
        return sum(each.weight_bytes(dtype) for each in (*self.parameters, *self.buffers))


def sizes_of(model: Model | Transformer) -> Transformer | None:
    """Return the sizes of a transformer; None for a model whose blocks are not known."""
    return model if isinstance(model, Transformer) else model.sizes


def units_of(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    """Return parameters by the block for `fully_shard`, such as "layers.0"; "" for the others."""
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        match = _UNIT.match(parameter.name)
        units.setdefault(match[0] if match else "", []).append(parameter)
    return units


_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
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
    "gpt2": (_GPT2, {"gated": False, "qkv_bias": True, "biases": True, "divided_ends": False}),
}
_USUAL: Mapping[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "add_cross_attention": False, "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}  # fmt: skip
_DECODERS = ("ForCausalLM", "LMHeadModel")
_TIED = ("gpt2",)  # unless the configuration has a size of its own


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder.

    Attributes:
        layers: number of blocks.
        width: size of a token between blocks.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_width: size of a head.
        inner: size of a token inside the MLP, or inside an expert.
        vocabulary: number of token ids.
        positions: rows of a learned embedding of positions; 0 without one.
        gated: whether the MLP multiplies two products, as SwiGLU does.
        qkv_bias: whether the products of queries, keys and values have biases.
        biases: whether all other products have biases, and norms are LayerNorms.
        head_norms: whether queries and keys are normalised head by head.
        window: number of tokens that a query of some blocks sees, itself among them; 0 without such blocks.
        windowed: number of blocks whose attention has the window.
        experts: number of experts in each block; 0 for an MLP.
        experts_per_token: number of experts that a token goes to.
        tied: whether the head's weight is that of the embedding.
        divided_ends: whether the tensor-parallel plan of the model divides embedding and head.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    positions: int = 0
    gated: bool = True
    qkv_bias: bool = False
    biases: bool = False
    head_norms: bool = False
    window: int = 0
    windowed: int = 0
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    divided_ends: bool = True

    @property
    def count(self) -> int:
        """The number of elements of all parameters."""
        ends = sum(each.count for each in (*self.embedding(), *self.head()))
        return ends + self.layers * sum(each.count for each in self.block())

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, those of a block with the block's path before their names."""
        block = self.block()
        blocks = (_inside(f"layers.{at}", block) for at in range(self.layers))
        return (*self.embedding(), *(each for found in blocks for each in found), *self.head())

    @property
    def active_count(self) -> int:
        """The number of elements of the matrices that a token is multiplied with."""
        matrices = [each for each in self.block() if len(each.shape) > 1]
        block = sum(each.count for each in matrices if not is_expert(each))
        block += (
            sum(each.count for each in matrices if is_expert(each)) * self.experts_per_token // max(self.experts, 1)
        )
        return self.layers * block + self.width * self.vocabulary

    def seen(self, tokens: int) -> float:
        """The number of keys that all queries of a sequence see together in a block, as the mean of the blocks."""
        whole = tokens * (tokens + 1) / 2
        window = min(self.window, tokens)
        part = window * (window + 1) / 2 + (tokens - window) * window
        return whole + (part - whole) * self.windowed / self.layers

    def embedding(self) -> tuple[Parameter, ...]:
        """Parameters before the blocks."""
        name = "embed_tokens.weight" if self.divided_ends else "wte.weight"
        tokens = Parameter(name=name, shape=(self.vocabulary, self.width), looked_up=not self.tied)
        if not self.positions:
            return (tokens,)
        shape = (self.positions, self.width)
        return (tokens, Parameter(name="embed_positions.weight", shape=shape, looked_up=True))

    def block(self) -> tuple[Parameter, ...]:
        """Parameters of one block."""
        queries = self.heads * self.head_width
        keys = self.kv_heads * self.head_width
        found = [*self._norm("input_layernorm"), *self._norm("post_attention_layernorm")]
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            found += self._product(f"self_attn.{name}", size, self.width, bias=self.qkv_bias)
        found += self._product("self_attn.o_proj", self.width, queries, bias=self.biases)
        if self.head_norms:
            found += [Parameter(name=f"self_attn.{each}_norm.weight", shape=(self.head_width,)) for each in "qk"]
        if not self.experts:
            return (*found, *self._mlp())
        first = 2 * self.inner if self.gated else self.inner
        return (
            *found,
            Parameter(name="mlp.gate.weight", shape=(self.experts, self.width)),
            Parameter(name="mlp.experts.gate_up_proj", shape=(self.experts, first, self.width)),
            Parameter(name="mlp.experts.down_proj", shape=(self.experts, self.width, self.inner)),
        )

    def head(self) -> tuple[Parameter, ...]:
        """Parameters behind the blocks; without the head's weight where it is the embedding's."""
        weight = Parameter(name="lm_head.weight", shape=(self.vocabulary, self.width))
        return (*self._norm("norm"), *(() if self.tied else (weight,)))

    def _mlp(self) -> list[Parameter]:
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        first = [each for name in names for each in self._product(f"mlp.{name}", self.inner, self.width)]
        return [*first, *self._product("mlp.down_proj", self.width, self.inner)]

    def _product(self, name: str, out: int, into: int, bias: bool | None = None) -> list[Parameter]:
        weight = Parameter(name=f"{name}.weight", shape=(out, into))
        has_bias = self.biases if bias is None else bias
        return [weight, Parameter(name=f"{name}.bias", shape=(out,))] if has_bias else [weight]

    def _norm(self, name: str) -> list[Parameter]:
        ends = ("weight", "bias") if self.biases else ("weight",)
        return [Parameter(name=f"{name}.{end}", shape=(self.width,)) for end in ends]


def _inside(path: str, parameters: Iterable[Parameter]) -> Iterable[Parameter]:
    return (msgspec.structs.replace(each, name=f"{path}.{each.name}") for each in parameters)


def is_expert(parameter: Parameter) -> bool:
    """Return whether a parameter of a block is that of its experts, expert after expert along its first dimension."""
    return parameter.name.startswith("mlp.experts.")


def read_transformer(path: Path) -> Transformer:
    """Return the sizes in a `config.json` of Hugging Face's transformers, given the file or its folder.

    Raises:
        ConfigError: no such file, or a kind of model whose blocks are not known.
    """
    path = path / "config.json" if path.is_dir() else path
    return transformer_from(read_fields(path), where=str(path))


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a `config.json`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        expected = "a config.json of Hugging Face's transformers, or a folder with one"
        raise ConfigError("there is no such file", expected=expected, got=repr(str(path))) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("the file cannot be read", expected="JSON", got=str(error), where=str(path)) from error


def transformer_from(fields: Mapping[str, Any], *, where: str) -> Transformer:
    """Return the sizes in a configuration with transformers' names; `where` is its origin, for errors."""
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("not a model's configuration", expected="`model_type`", got="none", where=where)
    check_choice(kind, list(KINDS), "the blocks of this kind of model are not known", where=where)
    names, same = KINDS[kind]
    if kind == "qwen3_moe" and "num_experts" not in fields:  # transformers 5 stores it by its common name
        fields = {**fields, "num_experts": fields.get("num_local_experts")}
    sizes = {field: _size(fields, name, where) for field, name in names.items()}
    heads, width = sizes["heads"], sizes["width"]
    if width % heads and not fields.get("head_dim"):
        raise ConfigError("heads of no size", expected=f"a width that {heads} divides", got=str(width), where=where)
    optional: dict[str, Any] = {
        "kv_heads": _size(fields, "num_key_value_heads", where, heads),
        "head_width": _size(fields, "head_dim", where, width // heads),
        "tied": bool(fields.get("tie_word_embeddings", kind in _TIED)),
    }
    optional |= _windows(fields, kind, sizes["layers"], where)
    if kind == "gpt2":
        optional["inner"] = _size(fields, "n_inner", where, 4 * width)
        optional["positions"] = _size(fields, "n_positions", where, 1024)
    if named := [name for name, usual in _USUAL.items() if fields.get(name, usual) not in (usual, None)]:
        raise ConfigError("the blocks of this model are not known", got=", ".join(named), where=where)
    classes: list[str] = fields.get("architectures") or []
    if classes and not classes[0].endswith(_DECODERS):
        expected = " or ".join(f"a class ...{each}" for each in _DECODERS)
        raise ConfigError("not a causal language model", expected=expected, got=classes[0], where=where)
    return Transformer(**sizes, **optional, **same)


def _windows(fields: Mapping[str, Any], kind: str, layers: int, where: str) -> dict[str, int]:
    """The window of attention and the number of blocks that have it, with transformers' defaults."""
    if kind in ("llama", "gpt2") or (kind.startswith("qwen") and not fields.get("use_sliding_window")):
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
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        got = "none" if value is None else repr(value)
        raise ConfigError("not a size of a model", expected="1 or above", got=got, where=f"{where}, {name}")
    return value
