# SPDX-License-Identifier: Apache-2.0
"""Sizes of a decoder of repeated blocks, and the step that is estimated on a mesh; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from accel.errors import ConfigError, check_choice
from accel.estimate._plan import COMPUTE_BYTES, OPTIMIZERS, Parameter
from accel.formats import PrecisionName, StrategyName, precision
from accel.topology import Axes, Plan

_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
}
_GPT2 = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocabulary": "vocab_size"}
# Of each kind of model: the fields that it must name, and what is the same in all models of the kind.
_KINDS: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
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
_TIED = ("gpt2",)  # unless the configuration says otherwise


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
    def active_count(self) -> int:
        """The number of elements of the matrices that a token is multiplied with."""
        matrices = [each for each in self.block() if len(each.shape) > 1]
        block = sum(each.count for each in matrices if not is_expert(each))
        block += (
            sum(each.count for each in matrices if is_expert(each)) * self.experts_per_token // max(self.experts, 1)
        )
        return self.layers * block + self.width * self.vocabulary

    def embedding(self) -> tuple[Parameter, ...]:
        """Parameters before the blocks."""
        name = "embed_tokens.weight" if self.divided_ends else "wte.weight"
        tokens = Parameter(name=name, shape=(self.vocabulary, self.width))
        if not self.positions:
            return (tokens,)
        return (tokens, Parameter(name="embed_positions.weight", shape=(self.positions, self.width)))

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


def is_expert(parameter: Parameter) -> bool:
    """Return whether a parameter of a block is that of its experts, expert after expert along its first dimension."""
    return parameter.name.startswith("mlp.experts.")


def read_transformer(path: Path) -> Transformer:
    """Return the sizes in a `config.json` of Hugging Face's transformers.

    Args:
        path: the file, or a folder with one.

    Raises:
        ConfigError: the file is missing, the model type is unknown, or a size is missing or invalid.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        expected = "a config.json of Hugging Face's transformers, or a folder with one"
        raise ConfigError("there is no such file", expected=expected, got=repr(str(path))) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("the file cannot be read", expected="JSON", got=str(error), where=str(path)) from error
    return transformer_from(fields, where=str(path))


def transformer_from(fields: Mapping[str, Any], *, where: str) -> Transformer:
    """Return the sizes in a configuration.

    Args:
        fields: as transformers names them.
        where: origin of the fields, for errors.

    Raises:
        ConfigError: as `read_transformer`.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("not a model's configuration", expected="`model_type`", got="none", where=where)
    check_choice(kind, list(_KINDS), "the blocks of this kind of model are not known", where=where)
    names, same = _KINDS[kind]
    sizes = {field: _size(fields, name, where) for field, name in names.items()}
    heads, width = sizes["heads"], sizes["width"]
    if width % heads and not fields.get("head_dim"):
        raise ConfigError("heads of no size", expected=f"a width that {heads} divides", got=str(width), where=where)
    optional: dict[str, Any] = {
        "kv_heads": _size(fields, "num_key_value_heads", where, heads),
        "head_width": _size(fields, "head_dim", where, width // heads),
        "tied": bool(fields.get("tie_word_embeddings", kind in _TIED)),
    }
    if kind == "gpt2":
        optional["inner"] = _size(fields, "n_inner", where, 4 * width)
        optional["positions"] = _size(fields, "n_positions", where, 1024)
    if fields.get("attention_bias"):
        raise ConfigError("the blocks of this model are not known", got="attention_bias", where=where)
    return Transformer(**sizes, **optional, **same)


def _size(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        got = "none" if value is None else repr(value)
        raise ConfigError("not a size of a model", expected="1 or above", got=got, where=f"{where}, {name}")
    return value


Engine = Literal["fully_shard", "ddp", "none"]
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class EstimatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A training step of a transformer.

    Attributes:
        tokens: length of a sequence, before ranks along cp divide it.
        rows: sequences of a micro-batch, on ranks that share samples.
        micro_batches: number of micro-batches of the step, on ranks that share samples.
        precision: as in `accel.formats.precision`; fp8 counts as bf16.
        optimizer: one of `OPTIMIZERS`.
        strategy: "ddp" or "fsdp", for the axis `dp`; ranks along `dp_shard` hold shards in any case.
        recompute: whether blocks keep their inputs alone and compute the rest again in backward.
        held: whether gradients wait on their rank for the last micro-batch; else each one exchanges them.

    Raises:
        ConfigError: an unknown name, or a number below 1.
    """

    tokens: int
    rows: int = 1
    micro_batches: int = 1
    precision: PrecisionName = "bf16"
    optimizer: str = "adamw"
    strategy: StrategyName = "fsdp"
    recompute: bool = False
    held: bool = True

    def __post_init__(self) -> None:
        _ = precision(self.precision)
        check_choice(self.optimizer, list(OPTIMIZERS), "unknown optimizer", where="EstimatedStep.optimizer")
        check_choice(self.strategy, ["ddp", "fsdp"], "unknown strategy", where="EstimatedStep.strategy")
        for name in ("tokens", "rows", "micro_batches"):
            if getattr(self, name) < 1:
                got = str(getattr(self, name))
                raise ConfigError(
                    "nothing would be computed", expected="1 or above", got=got, where=f"EstimatedStep.{name}"
                )

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in products."""
        return COMPUTE_BYTES[precision(self.precision).compute]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a value of a parameter, and of its gradient, between steps."""
        return 2 if precision(self.precision).params == "bf16" else 4


class EqualRanks(NamedTuple):
    """Ranks with equal parameters: those that share their shards out, and those that repeat them.

    Attributes:
        engine: "fully_shard", "ddp", or "none" where no two ranks have equal parameters.
        shards: number of ranks among which each parameter is divided.
        replicas: number of ranks with equal shards.
        shard_axes: names of the axes of the first, joined by "+".
        replica_axes: names of the axes of the second.
    """

    engine: Engine
    shards: int
    replicas: int
    shard_axes: str
    replica_axes: str


def copies_of(axes: Axes, strategy: StrategyName) -> EqualRanks:
    """Return which ranks of a mesh hold equal parameters of a block.

    DDP takes whole models. Where ranks along pp, tp or ep hold parts, `fully_shard` exchanges gradients of replicas.

    Args:
        axes: of the mesh.
        strategy: of the axis `dp`.
    """
    names = [name for name in ("dp", "dp_replicate", "dp_shard", "cp") if getattr(axes, name) > 1]
    whole = strategy == "ddp" and axes.dp_shard == 1
    repeated = [name for name in names if whole or name == "dp_replicate"]
    shared = [name for name in names if name not in repeated]
    parts = axes.pp * axes.tp * axes.ep > 1
    engine: Engine = "none" if not names and axes.ep == 1 else "fully_shard" if shared or parts else "ddp"
    shards = replicas = 1
    for name in shared:
        shards *= getattr(axes, name)
    for name in repeated:
        replicas *= getattr(axes, name)
    return EqualRanks(engine, shards, replicas, "+".join(shared), "+".join(repeated))


def wire_bytes(step: EstimatedStep, plan: Plan) -> tuple[int, int]:
    """Return the bytes of a value of a parameter that `fully_shard` gathers, and of a gradient that it reduces."""
    gathered = step.compute_bytes if plan.gather_dtype == "auto" else _WIRE_BYTES[plan.gather_dtype]
    reduced = 4 if plan.reduce_dtype == "auto" else _WIRE_BYTES[plan.reduce_dtype]
    return gathered, reduced


def stream_bytes(step: EstimatedStep, engine: Engine) -> int:
    """Return the bytes of a value between blocks: of the compute format, or fp32 where autocast leaves it."""
    return step.compute_bytes if engine == "fully_shard" or step.stored_bytes == 2 else 4


def keeps_blocks(plan: Plan, axes: Axes) -> bool:
    """Return whether blocks stay gathered from forward to backward; those of a pipeline do for the whole step."""
    return axes.pp > 1 or plan.reshard_after_forward is False


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of blocks of each stage: equal, or earlier stages one more."""
    return [layers // stages + (at < layers % stages) for at in range(stages)]


def rank_stages(plan: Plan, pp: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along pp: in a V for schedules that need one, else round and round."""
    stages = pp * plan.stages_per_rank
    if plan.schedule in ("ZBVZeroBubble", "DualPipeV") and pp > 1:
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, pp))


def divides_logits(plan: Plan) -> bool:
    """Return whether a plan divides the head's outputs for `vocab_cross_entropy`; what models declare gathers them."""
    if plan.tensor == "model":
        return False
    return any(name.split(".")[-1] == "lm_head" and style == "colwise" for name, style in plan.tensor.items())
