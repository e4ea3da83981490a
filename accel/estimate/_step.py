# SPDX-License-Identifier: Apache-2.0
"""A training step, and the parts of the parameters that a rank of its mesh holds; pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.estimate._model import Model, Parameter, Tower, Transformer, is_expert, sizes_of, units_of
from accel.formats import Precision, PrecisionName, StrategyName, precision
from accel.topology import Axes, Balance, CallCosts, Plan, begins_of, data_dimension, stages_of_rank

Engine = Literal["fully_shard", "ddp", "none"]
_COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Optimizer(NamedTuple):
    """Memory of an optimizer of torch.

    Attributes:
        values: values of state for each value of a parameter.
        counts_steps: whether each tensor has a step of 4 bytes.
        temporaries: values for each value of a parameter while `foreach` steps.
    """

    values: int
    counts_steps: bool
    temporaries: int

    def state(self, nbytes: int, tensors: int) -> int:
        """Return the bytes of the state of so many tensors."""
        return self.values * nbytes + 4 * tensors * self.counts_steps


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(2, True, 1),
    "adam": Optimizer(2, True, 1),
    "sgd": Optimizer(0, False, 0),
    "sgd-momentum": Optimizer(1, False, 0),
}


@functools.lru_cache(maxsize=64)
def formats(name: PrecisionName) -> Precision:
    """Return the dtypes of a precision."""
    return precision(name)


class EstimatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A training step.

    Attributes:
        tokens: length of a sequence, before ranks along cp divide it; of a transformer, as `rows`.
        rows: sequences of a micro-batch, on ranks that share samples.
        micro_batches: number of micro-batches of the step, on ranks that share samples.
        precision: as in `accel.formats.precision`; fp8 counts as bf16.
        optimizer: one of `OPTIMIZERS`.
        strategy: "ddp" or "fsdp", for the axis `dp`; ranks along `dp_shard` hold shards in any case.
        recompute: whether blocks only keep their inputs and recompute the rest in backward.
        keep: "products" if blocks that are recomputed keep the outputs of matmuls and attention all the same, as by
            `checkpoint_activations(keep="products")`.
        offload: whether what blocks keep, but for the last one, is in the host's memory, as by `offload_activations`.
        chunks: parts of the sequence by which MLPs run, as by `chunk_sequence`; of a transformer without experts.
        held: whether gradients wait on their rank for the last micro-batch; else each one exchanges them.
        compiled: whether `torch.compile` fuses the operators between matmuls, which only affects the time.
        dealt: whether ranks of DDP share the optimizer's state, as by `ZeroRedundancyOptimizer`.
        balance: cost by which `stage_plan` divides the blocks among the stages of a pipeline.
        images: number of images of a sequence, for models with an encoder of them.
        side: side of an image in pixels, for encoders that take images of any size.

    Raises:
        ConfigError: an unknown name, or a number below 1.
    """

    tokens: int = 4096
    rows: int = 1
    micro_batches: int = 1
    precision: PrecisionName = "bf16"
    optimizer: str = "adamw"
    strategy: StrategyName = "fsdp"
    recompute: bool = False
    keep: Literal["", "products"] = ""
    offload: bool = False
    chunks: int = 1
    held: bool = True
    compiled: bool = False
    dealt: bool = False
    balance: Balance = "time"
    images: int = 1
    side: int = 448

    def __post_init__(self) -> None:
        _ = formats(self.precision)
        check_choice(self.optimizer, list(OPTIMIZERS), "unknown optimizer", where="EstimatedStep.optimizer")
        check_choice(self.strategy, ["ddp", "fsdp"], "unknown strategy", where="EstimatedStep.strategy")
        check_choice(self.balance, get_args(Balance), "unknown balance of stages", where="EstimatedStep.balance")
        check_choice(self.keep or "products", ["products"], "unknown operators", where="EstimatedStep.keep")
        if self.keep and not self.recompute:
            raise ConfigError(
                "blocks that compute nothing again keep all", expected="recompute=True", got="False",
                where="EstimatedStep.keep",
            )  # fmt: skip
        for name in ("tokens", "rows", "micro_batches", "images", "side", "chunks"):
            if getattr(self, name) < 1:
                got = str(getattr(self, name))
                raise ConfigError(
                    "the number is not valid", expected="1 or above", got=got, where=f"EstimatedStep.{name}"
                )

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matmuls."""
        return _COMPUTE_BYTES[formats(self.precision).compute]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a value of a parameter of fp32, and of its gradient, between steps."""
        return 2 if formats(self.precision).params == "bf16" else 4

    def item_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of a value of a parameter between steps."""
        return 2 if self.stored_bytes == 2 and parameter.trained else parameter.item_bytes


class EqualRanks(NamedTuple):
    """Ranks with equal parameters: those that share their shards out, and those that repeat them."""

    engine: Engine  # "fully_shard", "ddp", or "none" where no two ranks have equal parameters
    shards: int  # number of ranks among which each parameter is divided
    replicas: int  # number of ranks with equal shards
    shard_axes: str  # names of the axes of the first, joined by "+"
    replica_axes: str  # names of the axes of the second


def copies_of(axes: Axes, strategy: StrategyName) -> EqualRanks:
    """Return which ranks of a mesh hold equal parameters of a block, by the strategy of the axis `dp`.

    DDP takes whole models. Where ranks along pp, tp or ep hold parts, `fully_shard` exchanges gradients of replicas.
    """
    names = [name for name in ("dp", "dp_replicate", "dp_shard", "cp") if getattr(axes, name) > 1]
    whole = data_dimension(strategy) == "replicate" and axes.dp_shard == 1
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
    """Return the bytes of a value between blocks: of the compute dtype, or fp32 if autocast keeps that."""
    return step.compute_bytes if engine == "fully_shard" or step.stored_bytes == 2 else 4


def tower_side(tower: Tower, step: EstimatedStep) -> int:
    """Return the side of an image in pixels: the encoder's, or without one the step's."""
    return tower.side or step.side


def has_encoder(model: Transformer, axes: Axes) -> bool:
    """Return whether the first stage has an encoder of images."""
    return model.tower is not None and axes.pp > 1


def feature_bytes(model: Transformer, axes: Axes, step: EstimatedStep) -> int:
    """Return the bytes of images sent between stages with the tokens; a linear layer gives them the compute dtype."""
    if model.tower is None or axes.pp == 1:
        return 0
    values = step.rows * step.images * model.tower.tokens(tower_side(model.tower, step)) * model.width
    return values * step.compute_bytes


def keeps_blocks(plan: Plan, axes: Axes) -> bool:
    """Return whether blocks stay gathered from forward to backward; in a pipeline they do for the full step."""
    return axes.pp > 1 or plan.reshard_after_forward is False


@functools.lru_cache(maxsize=1024)
def stage_layers(model: Transformer, stages: int, balance: Balance) -> tuple[int, ...]:
    """Return the number of blocks of each stage, as `stage_plan` divides the calls of the model. A stage with only the
    head has 0."""
    calls = model.calls or _calls_by_sizes(model)
    prices = [each.price for each in calls]
    if model.tower is not None:  # stages that are named by their blocks
        blocks = [at for at, each in enumerate(calls) if each.blocks]
        prices = [price if at in (0, *blocks[1:]) else math.inf for at, price in enumerate(prices)]
    begins = begins_of([each.cost(balance) for each in calls], stages, prices)
    spans = itertools.pairwise((*begins, len(calls)))
    return tuple(int(sum(each.blocks for each in calls[begin:end])) for begin, end in spans)


_SENT = 0.03  # price of a stage that begins between blocks, as pipelines record it


def _calls_by_sizes(model: Transformer) -> list[CallCosts]:
    """The calls of a model's forward: the encoder, the embedding, each block and the head."""
    tower = model.tower
    found = [_call(CallCosts("encoder", 0, 0, 0, 0), [*tower.ends, *tower.blocks.parameters], model)] if tower else []
    found += [CallCosts(each.name, 0.0, float(each.nbytes), 0.0, _SENT) for each in model.embedding()]
    found += [
        _call(CallCosts(f"layers.{at}", 0, 0, 1, _SENT), model.block(dense=at < model.dense), model)
        for at in range(model.layers)
    ]
    tied = model.embedding()[:1] if model.tied else ()
    return [*found, _call(CallCosts("head", 0, 0, 0, _SENT), [*model.head(), *tied], model)]


def _call(call: CallCosts, parameters: Sequence[Parameter], model: Transformer) -> CallCosts:
    """A call that multiplies tokens with some parameters."""
    time = sum(_multiplied(each, model) for each in parameters)
    return call._replace(time=time, memory=float(sum(each.nbytes for each in parameters)))


def _multiplied(parameter: Parameter, model: Transformer) -> float:
    """The number of a parameter's elements that a token is multiplied with."""
    count = parameter.count if len(parameter.shape) > 1 else 0
    return count * model.experts_per_token / model.experts if is_expert(parameter) else count


def busy_ranks(model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan) -> Sequence[int]:
    """Return ranks along pp, among them those that need most memory and most time: the first two, the last one, and the
    first of those with most blocks, as later ones hold no more micro-batches."""
    found = [0, min(1, axes.pp - 1), axes.pp - 1]
    sizes = sizes_of(model)
    if sizes is not None and axes.pp > 1:
        layers = stage_layers(sizes, axes.pp * plan.stages_per_rank, step.balance)
        found.append(max(range(axes.pp), key=lambda rank: sum(layers[at] for at in rank_stages(plan, axes.pp, rank))))
    return tuple(dict.fromkeys(found))


def rank_stages(plan: Plan, pp: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along pp."""
    return stages_of_rank(plan.schedule, pp, pp * plan.stages_per_rank, rank)


def divides_logits(plan: Plan) -> bool:
    """Return whether a plan divides the head's outputs for `vocab_cross_entropy`; what models declare gathers them."""
    if plan.tensor == "model":
        return plan.head == "colwise"
    return any(name.split(".")[-1] == "lm_head" and style == "colwise" for name, style in plan.tensor.items())


_COLWISE = (
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "lm_head",
    "embed_tokens",
)  # fmt: skip
_ROWWISE = ("o_proj.weight", "down_proj.weight")


class Unit(NamedTuple):
    """Parameters that `fully_shard` gathers together, as numbers of elements on one rank."""

    whole: int = 0  # of the parts that this rank computes with
    matrices: int = 0  # of the parameters of two dimensions and more that autocast converts
    shards: int = 0  # of its shards, each as long as the longest
    experts: int = 0  # of the shards of experts
    gradients: int = 0  # of the trained ones of `whole`
    tensors: int = 0  # number of trained parameters
    stored: int = 0  # bytes of the shards
    trained: int = 0  # bytes of those with a gradient


class HeldParameters(NamedTuple):
    """The parameters of one rank."""

    root: Unit  # unit of what is outside of the blocks
    block: Unit  # unit of the largest block
    inside: Unit  # sum of the units of blocks
    every: Unit  # sum of all units
    blocks: Sequence[int]  # elements of each block, `whole` of its unit, the largest first
    layers: Sequence[int]  # number of blocks of each stage of the rank; an encoder of images is no stage
    dense: Sequence[int]  # number of those among them with an MLP in the place of experts
    is_first: bool  # whether the rank has the embedding
    is_last: bool  # whether the rank has the head
    idle: int = 0  # number of an encoder's blocks with unused output, and so without a backward
    idle_shards: int = 0  # elements of their shards


def held_by(
    model: Model | Transformer, axes: Axes, plan: Plan, step: EstimatedStep, copies: EqualRanks, rank: int
) -> HeldParameters:
    """Return the parameters of the rank at an index along pp.

    A model without sizes only has meshes of data parallelism; others are a `ConfigError`.
    """
    if (sizes := sizes_of(model)) is not None:
        return _held_by_sizes(
            sizes, axes, axes.pp * plan.stages_per_rank, rank_stages(plan, axes.pp, rank), step, copies
        )
    if axes.pp * axes.cp * axes.tp * axes.ep > 1:
        expected = "a mesh of dp, dp_replicate and dp_shard, or the sizes of a transformer"
        raise ConfigError("the blocks of this model are not known", expected=expected, got=str(axes))
    parts = units_of(model.parameters)
    root = _unit(parts.pop("", ()), axes, step, copies)
    blocks = sorted((_unit(each, axes, step, copies) for each in parts.values()), key=lambda each: -each.whole)
    inside = _sum(blocks)
    largest = blocks[0] if blocks else Unit()
    every = _sum([root, inside])
    return HeldParameters(root, largest, inside, every, [each.whole for each in blocks], [len(blocks)], [0], True, True)


def _sum(units: Iterable[Unit]) -> Unit:
    return Unit(*map(sum, zip(Unit(), *units, strict=True)))


@functools.lru_cache(maxsize=16)  # time, traffic and memory of a mesh ask one after another
def _held_by_sizes(
    model: Transformer, axes: Axes, stages: int, own: tuple[int, ...], step: EstimatedStep, copies: EqualRanks
) -> HeldParameters:
    layers = stage_layers(model, stages, step.balance)
    is_first, is_last = 0 in own, stages - 1 in own
    ends = [*(model.embedding() if is_first else ()), *(model.head() if is_last else ())]
    if model.tied and is_last and not is_first:
        ends += model.embedding()[:1]  # both ends have a copy
    tower = model.tower if is_first else None
    if tower is not None:
        ends += tower.ends
    root = _unit(ends, axes, step, copies)
    block = _unit(model.block(), axes, step, copies)
    upto = list(itertools.accumulate(layers))
    idle = idle_shards = 0
    dense = [model.dense_among(upto[at] - layers[at], upto[at]) for at in own]
    units = [block] * sum(layers[at] - some for at, some in zip(own, dense, strict=True))
    if any(dense):
        units += [_unit(model.block(dense=True), axes, step, copies)] * sum(dense)
    if tower is not None:
        parts = axes if tower.divided else msgspec.structs.replace(axes, tp=1, ep=1)
        seeing = _unit(tower.blocks.block(), parts, step, copies)
        units += [seeing] * tower.blocks.layers
        idle = tower.blocks.layers - tower.taken
        idle_shards = idle * seeing.shards
    units.sort(key=lambda each: -each.whole)
    inside = _sum(units)
    every = _sum([root, inside])
    sizes = [each.whole for each in units]
    blocks = [layers[at] for at in own]
    largest = units[0] if units else Unit()
    return HeldParameters(root, largest, inside, every, sizes, blocks, dense, is_first, is_last, idle, idle_shards)


def part_shape(parameter: Parameter, axes: Axes) -> list[int]:
    """Return the shape of the largest part of a parameter along tp and ep, which the first rank has."""
    shape = list(parameter.shape)
    if axes.tp == axes.ep == 1 or parameter.whole:
        return shape
    if is_expert(parameter):
        shape[0] //= axes.ep
        return shape
    if parameter.name.rpartition(".")[0].rpartition(".")[2] in _COLWISE:
        shape[0] = -(-shape[0] // axes.tp)
    if parameter.name.endswith(_ROWWISE):
        shape[1] = -(-shape[1] // axes.tp)
    return shape


def _unit(parameters: Iterable[Parameter], axes: Axes, step: EstimatedStep, copies: EqualRanks) -> Unit:
    whole = matrices = shards = experts = gradients = tensors = stored = trained = 0
    for parameter in parameters:
        shape = part_shape(parameter, axes)
        count = math.prod(shape)
        shard = shard_count(shape, expert_shards(axes, copies) if is_expert(parameter) else copies.shards)
        item_bytes = step.item_bytes(parameter)
        whole += count
        is_converted = len(shape) > 1 and not parameter.looked_up and item_bytes > step.compute_bytes
        matrices += count if is_converted else 0
        shards += shard
        experts += shard if is_expert(parameter) else 0
        stored += shard * item_bytes
        if parameter.trained:
            gradients += count
            tensors += 1
            trained += shard * item_bytes
    return Unit(whole, matrices, shards, experts, gradients, tensors, stored, trained)


def divides_heads(model: Transformer) -> bool:
    """Return whether the tensor-parallel plan of a model divides the heads of its attention."""
    return model.latent is None or model.latent.divided


def own_heads(model: Transformer, axes: Axes) -> tuple[int, int]:
    """Return the numbers of heads of queries and of keys that a rank computes."""
    if not divides_heads(model):
        return model.heads, model.kv_heads
    return model.heads // axes.tp, max(1, model.kv_heads // axes.tp)


def divides_latents(model: Transformer) -> bool:
    """Return whether the tensor-parallel plan of a model divides the layer that makes the latents of keys: that of V2
    does; that of V3, whose router has corrections, declares nothing of attention."""
    return model.latent is not None and model.latent.divided and not model.corrected


def enters_attention(model: Transformer) -> bool:
    """Return whether layers that ranks divide take the tokens that attention gets: ranks sum gradients of these."""
    return model.latent is None or not model.latent.queries or divides_latents(model)


def latent_messages(
    model: Transformer, axes: Axes, step: EstimatedStep, stream: int
) -> Iterator[tuple[Literal["all-reduce", "all-gather"], int, int]]:
    """Yield operations of attention through latents along tp, how many a block has, and their bytes together: sums of
    the gradients of latents and of keys; and latents and keys of all heads, which each rank joins with positions."""
    latent = model.latent
    if latent is None:
        return
    again, size = int(step.recompute), step.compute_bytes
    tokens = step.rows * step.tokens // axes.cp
    summed = (latent.queries + latent.keys) * stream + model.heads * model.head_width * size
    yield "all-reduce", 2 + bool(latent.queries), tokens * summed
    made = latent.keys + latent.rotated if divides_latents(model) else 0
    gathered = (made + model.heads * (model.head_width - latent.rotated)) * size
    yield "all-gather", (1 + bool(made)) * (1 + again), tokens * gathered * (1 + again)


def shard_count(shape: Sequence[int], ranks: int) -> int:
    """Return the elements in the largest shard of a tensor, split along its first dimension."""
    return -(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1


def expert_shards(axes: Axes, copies: EqualRanks) -> int:
    """Return the number of ranks among which the parts of experts are divided."""
    if axes.ep == 1 or copies.shards == 1:
        return copies.shards
    return copies.shards * axes.tp // axes.ep
