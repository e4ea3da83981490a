# SPDX-License-Identifier: Apache-2.0
"""The description of a model that every estimate reads: its tensors and blocks, from code, headers or sizes; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from accel.storage import FLOATS, tensor_bytes
from accel.topology import CallCosts

_UNIT = re.compile(r"(?:.*?\.)?[0-9]+(?=\.)")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter or buffer.

    Attributes:
        name: name in the model.
        shape: sizes.
        dtype: safetensors' name of the dtype in training.
        file_dtype: the same for its checkpoint; None for `dtype`.
        trained: whether it has a gradient.
        stored: whether checkpoints hold it; False for a non-persistent buffer.
        looked_up: whether it is known as a lookup table, without a matmul.
        whole: whether it is known that ranks along tp hold it whole, whatever its name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    file_dtype: str | None = None
    trained: bool = True
    stored: bool = True
    looked_up: bool = False
    whole: bool = False

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
    """Tensors that a forward keeps for the backward."""

    saved: int  # bytes of tensors that depend on the inputs
    copies: int  # bytes of copies of parameters in the compute dtype


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its values.

    Attributes:
        source: origin, in words.
        parameters: each once, even if several modules share it.
        buffers: likewise.
        activations: of one step on one rank, by compute dtype; empty without inputs, and where `sizes` give them.
        sizes: of a transformer with known blocks; None for other models.
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
    """Return the sizes of a transformer; None for a model with unknown blocks."""
    return model if isinstance(model, Transformer) else model.sizes


def units_of(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    """Return parameters by the block for `fully_shard`, such as "layers.0"; "" for the others."""
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        match = _UNIT.match(parameter.name)
        units.setdefault(match[0] if match else "", []).append(parameter)
    return units


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of attention with keys and values from a latent of each token, as in DeepSeek-V2.

    Attributes:
        queries: size of the latent of queries; 0 where they come from tokens.
        keys: size of the latent of keys and values.
        rotated: part of a head of queries and keys that has a position; all heads of keys have the same.
        values: size of a head of values.
        divided: whether the tensor-parallel plan of the model divides the heads.

    Reference: DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
        arXiv:2405.04434.
    """

    queries: int
    keys: int
    rotated: int
    values: int
    divided: bool = True


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the image encoder of a decoder.

    Attributes:
        blocks: sizes of its blocks; tokens are patches that see each other, and `vocabulary` is 0.
        patch: side of a patch in pixels.
        side: side of an image in pixels; 0 for images of any size.
        merged: number of patches of a token of the decoder; 0 for an image that is one vector.
        classed: whether each image has a class token.
        taken: number of blocks with used output.
        ends: parameters before and behind the blocks.
        divided: whether the tensor-parallel plan of the model divides the blocks.
    """

    blocks: Transformer
    patch: int
    merged: int
    taken: int
    side: int = 0
    classed: bool = False
    ends: tuple[Parameter, ...] = ()
    divided: bool = False

    def patches(self, side: int) -> int:
        """Return the number of tokens of an image in the tower."""
        return (side // self.patch) ** 2 + self.classed

    def tokens(self, side: int) -> int:
        """Return the number of the decoder's tokens that an image takes."""
        return (side // self.patch) ** 2 // self.merged if self.merged else 0

    def matrices(self, side: int) -> Iterator[tuple[int, Parameter]]:
        """Yield the matrices outside of the blocks, and the number of rows of an image that each multiplies."""
        for each in self.ends:
            if len(each.shape) > 1 and not each.looked_up:
                yield self.patches(side) - self.classed if "patch" in each.name else max(1, self.tokens(side)), each


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder.

    Attributes:
        layers: number of blocks.
        width: size of a token between blocks.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_width: size of a head, of queries and keys where values have another.
        inner: size of a token inside the MLP, or inside an expert.
        vocabulary: number of token ids.
        positions: rows of a learned embedding of positions; 0 without one.
        gated: whether the MLP multiplies the outputs of two matmuls, as SwiGLU does.
        qkv_bias: whether the projections of queries, keys and values have biases.
        biases: whether all other linear layers have biases, and norms are LayerNorms.
        rms: whether norms are RMSNorms even so.
        unbiased: whether norms are LayerNorms without biases.
        fused: whether queries, keys and values are cut from the output of one matmul.
        inner_kept: number of tensors of the size `inner` that an MLP keeps for the backward.
        head_norms: whether queries and keys are normalised head by head.
        latent: sizes of latents that queries, keys and values come from; None without.
        window: number of tokens that a query of some blocks sees, itself among them; 0 without such blocks.
        windowed: number of blocks with the window.
        causal: whether a token sees earlier tokens only.
        experts: number of experts in each block; 0 for an MLP.
        experts_per_token: number of experts that a token goes to.
        shared_inner: size of a token inside the shared expert; 0 without one.
        dense: number of blocks, the first ones, with an MLP in the place of experts.
        dense_inner: size of a token inside these.
        corrected: whether routers have a stored bias for each expert, which is no parameter.
        tied: whether the head shares the embedding's weight.
        divided_ends: whether the tensor-parallel plan of the model divides embedding and head.
        compared: size of the vectors of texts and images that are compared, in the place of a head; 0 for a head.
        tower: encoder of images; None without one.
        calls: recorded calls of the forward, which stages are made of; empty for those that follow from the sizes.
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
    rms: bool = False
    unbiased: bool = False
    fused: bool = False
    inner_kept: int = 4
    head_norms: bool = False
    latent: Latent | None = None
    window: int = 0
    windowed: int = 0
    causal: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_inner: int = 0
    dense: int = 0
    dense_inner: int = 0
    corrected: bool = False
    tied: bool = False
    divided_ends: bool = True
    compared: int = 0
    tower: Tower | None = None
    calls: tuple[CallCosts, ...] = ()

    @property
    def count(self) -> int:
        """The number of elements of all parameters."""
        ends = [*self.embedding(), *self.head(), *(self.tower.ends if self.tower else ())]
        blocks = sum(each.count * times for each, times in self._repeated())
        return sum(each.count for each in ends) + blocks + (self.tower.blocks.count if self.tower else 0)

    def _repeated(self) -> Iterator[tuple[Parameter, int]]:
        """Yield the parameters of each kind of block, and the number of equal blocks."""
        first = min(self.dense, self.layers)
        for dense, times in ((True, first), (False, self.layers - first)):
            if times:
                yield from ((each, times) for each in self.block(dense=dense))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters; names of a block's parameters begin with its path."""
        found = [*self.embedding()]
        for at in range(self.layers):
            found += _inside(f"layers.{at}", self.block(dense=at < self.dense))
        if self.tower is not None:
            found += _inside("vision", self.tower.ends)
            found += _inside("vision", self.tower.blocks.parameters)
        return (*found, *self.head())

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        """All stored buffers."""
        if not self.corrected:
            return ()
        names = (f"layers.{at}.mlp.gate.e_score_correction_bias" for at in range(self.dense, self.layers))
        return tuple(Parameter(name=name, shape=(self.experts,), trained=False) for name in names)

    @property
    def value_width(self) -> int:
        """The size of a head of values."""
        return self.head_width if self.latent is None else self.latent.values

    @property
    def layer_norms(self) -> bool:
        """Whether norms are LayerNorms."""
        return self.unbiased or (self.biases and not self.rms)

    @property
    def active_count(self) -> int:
        """The number of elements of the matrices that a token is multiplied with."""
        count = self.width * self.vocabulary if not self.compared else 0
        for each, times in self._repeated():
            if len(each.shape) > 1:
                used = each.count * self.experts_per_token // self.experts if is_expert(each) else each.count
                count += times * used
        return count

    def dense_among(self, begin: int, end: int) -> int:
        """The number of blocks with an MLP in the place of experts in a range of blocks; 0 without experts."""
        return max(0, min(end, self.dense) - begin) if self.experts else 0

    def seen(self, tokens: int) -> float:
        """The number of keys that all queries of a sequence see together in a block, as the mean of the blocks."""
        if not self.causal:
            part = tokens * min(self.window, tokens)
            return tokens**2 + (part - tokens**2) * self.windowed / self.layers
        whole = tokens * (tokens + 1) / 2
        window = min(self.window, tokens)
        part = window * (window + 1) / 2 + (tokens - window) * window
        return whole + (part - whole) * self.windowed / self.layers

    def embedding(self) -> tuple[Parameter, ...]:
        """Parameters before the blocks."""
        if not self.vocabulary:
            return ()
        name = "embed_tokens.weight" if self.divided_ends else "wte.weight"
        tokens = Parameter(name=name, shape=(self.vocabulary, self.width), looked_up=not self.tied)
        if not self.positions:
            return (tokens,)
        shape = (self.positions, self.width)
        return (tokens, Parameter(name="embed_positions.weight", shape=shape, looked_up=True))

    def block(self, *, dense: bool = False) -> tuple[Parameter, ...]:
        """Parameters of one block: of the last one, or of one with an MLP in the place of experts."""
        found = [*self._norm("input_layernorm"), *self._norm("post_attention_layernorm"), *self._attention()]
        if not self.experts or dense:
            return (*found, *self._mlp("mlp", self.dense_inner if dense else self.inner))
        first = 2 * self.inner if self.gated else self.inner
        return (
            *found,
            Parameter(name="mlp.gate.weight", shape=(self.experts, self.width)),
            Parameter(name="mlp.experts.gate_up_proj", shape=(self.experts, first, self.width)),
            Parameter(name="mlp.experts.down_proj", shape=(self.experts, self.width, self.inner)),
            *(self._mlp("mlp.shared_experts", self.shared_inner) if self.shared_inner else ()),
        )

    def head(self) -> tuple[Parameter, ...]:
        """Parameters behind the blocks; without the head's weight where it is the embedding's."""
        if not self.vocabulary:
            return ()
        norm = self._norm("norm")
        if self.compared:
            shape = (self.compared, self.width)
            return (*norm, Parameter(name="text_projection.weight", shape=shape), Parameter(name="scale", shape=()))
        weight = Parameter(name="lm_head.weight", shape=(self.vocabulary, self.width))
        return (*norm, *(() if self.tied else (weight,)))

    def _attention(self) -> list[Parameter]:
        queries = self.heads * self.head_width
        keys = self.kv_heads * self.head_width
        if self.latent is not None:
            return self._from_latents(self.latent)
        found: list[Parameter] = []
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            found += self._product(f"self_attn.{name}", size, self.width, bias=self.qkv_bias)
        found += self._product("self_attn.o_proj", self.width, queries, bias=self.biases)
        if self.head_norms:
            found += [Parameter(name=f"self_attn.{each}_norm.weight", shape=(self.head_width,)) for each in "qk"]
        return found

    def _from_latents(self, latent: Latent) -> list[Parameter]:
        queries = self.heads * self.head_width
        both = self.heads * (self.head_width - latent.rotated + latent.values)
        products = {"q_proj": (queries, self.width)}
        if latent.queries:
            products = {"q_a_proj": (latent.queries, self.width), "q_b_proj": (queries, latent.queries)}
        products |= {
            "kv_a_proj_with_mqa": (latent.keys + latent.rotated, self.width),
            "kv_b_proj": (both, latent.keys),
            "o_proj": (self.width, self.heads * latent.values),
        }
        whole = set(products) if not latent.divided else {"kv_a_proj_with_mqa"} if self.corrected else set[str]()
        found = [
            Parameter(name=f"self_attn.{name}.weight", shape=shape, whole=name in whole)
            for name, shape in products.items()
        ]
        norms = {"q_a_layernorm": latent.queries, "kv_a_layernorm": latent.keys}
        return [
            *found,
            *(Parameter(name=f"self_attn.{name}.weight", shape=(size,)) for name, size in norms.items() if size),
        ]

    def _mlp(self, path: str, inner: int) -> list[Parameter]:
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        first = [each for name in names for each in self._product(f"{path}.{name}", inner, self.width)]
        return [*first, *self._product(f"{path}.down_proj", self.width, inner)]

    def _product(self, name: str, out: int, into: int, bias: bool | None = None) -> list[Parameter]:
        weight = Parameter(name=f"{name}.weight", shape=(out, into))
        has_bias = self.biases if bias is None else bias
        return [weight, Parameter(name=f"{name}.bias", shape=(out,))] if has_bias else [weight]

    def _norm(self, name: str) -> list[Parameter]:
        ends = ("weight", "bias") if self.layer_norms and not self.unbiased else ("weight",)
        return [Parameter(name=f"{name}.{end}", shape=(self.width,)) for end in ends]


def _inside(path: str, parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    return (msgspec.structs.replace(each, name=f"{path}.{each.name}") for each in parameters)


def is_expert(parameter: Parameter) -> bool:
    """Return whether a parameter of a block belongs to its experts, expert after expert along its first dimension."""
    return parameter.name.startswith("mlp.experts.")
