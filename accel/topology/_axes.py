# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh, the ranks along them, and `Plan`, how a model is spread along them; a rank's position; stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, cast, get_args

import msgspec
from msgspec import Meta

from accel.errors import AccelError, ConfigError
from accel.errors._checks import check_choice, check_kinds, check_styles, did_you_mean

Balance = Literal["blocks", "memory", "time"]
MESH_TEXT = r"^([a-z_]+=(-1|[1-9][0-9]{0,6})(,[a-z_]+=(-1|[1-9][0-9]{0,6}))*)?$"


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the axes of a mesh. Ranks are numbered in the order of the fields, neighbours along the last.

    Attributes:
        pp: pipeline stages; each rank holds the layers of one.
        dp: data parallel, where there is one way of it: replicas or shards, by the strategy.
        dp_replicate: data parallel, with `dp_shard`: along it ranks hold the same shards.
        dp_shard: data parallel, with `dp_replicate`: along it each rank holds other shards.
        cp: context parallel; ranks share the positions of a sequence. Shards are divided along it too.
        tp: tensor parallel; ranks share each layer's product.
        ep: expert parallel; each rank holds other experts. It takes its ranks from those along dp or dp_shard, cp
            and tp, neighbours first, and so is no factor of the number of ranks.

    Raises:
        ConfigError: a size below 1, `dp` together with `dp_replicate` or `dp_shard`, or an `ep` that does not divide
            the ranks that it takes.
    """

    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in AXES}
        if -1 in sizes.values():
            raise ConfigError(
                "an open size without a number of ranks",
                expected="1 or more",
                got=str(sizes),
                where="Axes",
                fix="Texts have open sizes: accel.session(mesh='dp=-1,tp=2').",
            )
        check_axes_sizes(sizes, where="Axes")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the factors of the number of ranks that are above 1, in the order of ranks; `ep` is none of them."""
        return {name: size for name in FACTORS if (size := getattr(self, name)) > 1}

    @property
    def expert_ranks(self) -> int:
        """Number of the ranks that `ep` divides: those along dp or dp_shard, cp and tp."""
        return self.dp * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        sizes = {**self.sizes, "ep": self.ep} if self.ep > 1 else self.sizes
        return ",".join(f"{name}={size}" for name, size in sizes.items())


AXES = Axes.__struct_fields__
FACTORS = tuple(name for name in AXES if name != "ep")


def mesh_sizes(text: str, *, where: str, error: type[AccelError] = ConfigError) -> dict[str, int]:
    """Return the sizes of named axes, in the order of ranks: of "tp=2,dp=-1", {"dp": -1, "tp": 2}.

    Raises `error`: an axis is repeated, unknown, or excluded by another; two sizes are -1, or the size of `ep` is.
    """
    if not isinstance(text, str) or not re.fullmatch(MESH_TEXT, text):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error(
            "the mesh is not valid", expected="a text such as dp=2,tp=2 or dp=-1,tp=4", got=repr(text), where=where
        )
    pairs = [part.split("=") for part in text.split(",") if part]
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise error("an axis is repeated", got=repr(text), where=where, fix=f"Name {name} once.")
        if name not in AXES:
            fix = did_you_mean(name, AXES) or f"Axes are {', '.join(AXES)}."
            raise error("unknown axis of a mesh", got=f"{name!r} in {text!r}", where=where, fix=fix)
    stated = {name: int(size) for name, size in pairs}
    sizes = {name: stated[name] for name in AXES if name in stated}
    if list(sizes.values()).count(-1) > 1:
        raise error("two sizes are -1", got=repr(text), where=where, fix="Let one at most be -1.")
    check_axes_sizes(sizes, where=where, error=error)
    return sizes


def fit_axes(text: str, world_size: int, *, where: str, error: type[AccelError] = ConfigError) -> Axes | None:
    """Return the axes of a mesh of so many ranks: of "dp=-1,tp=2" and 8 ranks, dp=4 and tp=2. None of an empty text.

    Raises `error` where the sizes multiply to another number of ranks; or as `mesh_sizes`.
    """
    sizes = mesh_sizes(text, where=where, error=error)
    if not sizes:
        return None
    known = math.prod(size for name, size in sizes.items() if size != -1 and name != "ep")
    is_open = -1 in sizes.values()
    wanted = f"{'a multiple of ' if is_open else ''}{known}"
    if world_size % known if is_open else world_size != known:
        raise error(
            "the mesh does not fit the ranks",
            expected=f"{wanted} ranks for {text}",
            got=str(world_size),
            where=where,
            fix=f"Start {wanted} processes{'.' if is_open else ', or let one size be -1.'}",
        )
    settled = {name: world_size // known if size == -1 else size for name, size in sizes.items()}
    check_axes_sizes(settled, where=where, error=error)
    return Axes(**settled)


def check_axes_sizes(sizes: Mapping[str, int], *, where: str, error: type[AccelError] = ConfigError) -> None:
    """Raise for sizes by name that no mesh has; -1 means all ranks that the others leave."""
    for name, size in sizes.items():
        is_open = size == -1 and name != "ep"
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and not is_open):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise error("the size of an axis is not valid", expected="1 or more", got=f"{name}={size!r}", where=where)
    parts = [f"{name}={sizes[name]}" for name in ("dp_replicate", "dp_shard") if sizes.get(name, 1) != 1]
    if sizes.get("dp", 1) != 1 and parts:
        raise error(
            "two names for data parallelism",
            expected="only dp, or dp_replicate and dp_shard",
            got=f"dp={sizes['dp']} together with {' and '.join(parts)}",
            where=where,
            fix="dp means replicas or shards, by the strategy; a mesh of both names both.",
        )
    taken = [sizes.get(name, 1) for name in ("dp", "dp_shard", "cp", "tp")]
    experts = sizes.get("ep", 1)
    if -1 not in taken and math.prod(taken) % experts:
        raise error(
            "experts cannot be divided among these ranks",
            expected=f"an ep that divides {math.prod(taken)}, the ranks along dp or dp_shard, cp and tp",
            got=f"ep={experts}",
            where=where,
        )


def coordinates(axes: Axes, rank: int) -> Mapping[str, int]:
    """Return a rank's index along each axis, `ep` too."""
    found: dict[str, int] = {}
    rest = rank
    for name in reversed(FACTORS):
        rest, found[name] = divmod(rest, getattr(axes, name))
    return {**{name: found[name] for name in FACTORS}, "ep": rank % axes.expert_ranks % axes.ep}


def rank_rows(axes: Axes, *along: str) -> tuple[tuple[int, ...], ...]:
    """Return rows of ranks that only differ along some axes, one for each position on the others."""
    # "ep" divides the ranks along dp or dp_shard, cp and tp anew; "efsdp" are those with the same experts
    if {"ep", "efsdp"} & set(along):
        shape = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "efsdp": axes.expert_ranks // axes.ep, "ep": axes.ep}
    else:
        shape = {name: getattr(axes, name) for name in FACTORS}
    unknown = set(along) - shape.keys()
    assert not unknown, f"{sorted(unknown)} cannot be in one row with {along}"
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, shape.values()))):
        off = tuple(at for name, at in zip(shape, place, strict=True) if name not in along)
        rows.setdefault(off, []).append(rank)
    return tuple(map(tuple, rows.values()))


Patterns = tuple[str, ...]
Count = Annotated[int, Meta(ge=1)]
FromModel = Literal["model"]
ContextMethod = Literal["gather", "ring", "heads"]
WireDtype = Literal["auto", "fp32", "bf16", "fp16"]
TensorStyle = Literal[
    "colwise",
    "colwise_gather_output",
    "packed_colwise_2",
    "packed_colwise_3",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "multihead_attention",
    "replicated",
    "replicated_with_grad_allreduce",
    "replicated_local",
    "copy_input",
]
HeadStyle = Literal["colwise", "colwise_gather_output"]
Logits = Literal["full", "deferred"]
# Bytes of parameters, over all ranks with parts of them, that `Plan(offload="optimizer")` steps at a time.
STATE_BUCKET = 64 * 2**20
ExpertStyle = Literal["dispatch", "local", "sorted"]
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Styles, stages and units by which a model is spread along the axes of a mesh.

    Fields of an axis of one rank have no effect, so one plan and one script serve all meshes. Patterns are paths
    of modules in the model, where `*` is one component, as in "layers.*.mlp.up".

    Raises:
        ConfigError: unknown names, or values of another kind than a field's own, when the plan is made.

    Attributes:
        tensor: tensor-parallel styles by pattern; "model" for what `tensor_plan` finds in the model. Modules that no
            pattern names are replicated, so an empty mapping leaves the model whole on every rank along tp.
        head: style of the layer that computes the logits, with `tensor="model"`. With "colwise" no rank gathers them:
            each returns the logits of its words, for `vocab_cross_entropy`. A model of transformers computes the loss
            of its `labels=` by it.
        logits: "deferred" lets losses be computed without logits, by `defer_logits`; "full" makes them.
        sequence: whether ranks along tp share the tokens between the layers that they divide (sequence parallelism).
        overlap: whether layers that ranks along tp divide send the messages of their inputs and outputs in chunks, each
            during the matmul of the next chunk.
        context: method by which ranks along cp see each other's keys and values: "gather" all at once, "ring" one
            rank's after another's, or "heads" of the whole sequence for some of the heads each.
        stages: paths of modules of each pipeline stage, which begins where the forward first calls one of them; None
            for a division by the FLOPs of a recorded forward, or of an unknown one behind the model's blocks.
        cut: refused, as there is one way to cut a model.
        schedule: order in which a pipeline runs its stages and micro-batches.
        stages_per_rank: number of stages on each rank along pp.
        micro_batches: number of micro-batches that `forward_backward` makes of a batch; None for the number of stages,
            1 without a pipeline.
        experts: expert-parallel styles by pattern; "model" for the model's own declaration.
        units: modules that `fully_shard` shards one by one: "auto" for the repeated blocks and what the model names in
            `_no_split_modules`; patterns or class names; or the least number of parameters of a module.
        together: patterns or class names of modules without units inside, for parts that only some ranks run; the unit
            around them gathers their parameters.
        ignored: patterns of modules that are not sharded; every rank along dp holds them in full.
        reshard_after_forward: whether the parameters of a unit are resharded after its forward; a number for the ranks
            that share the parts then; None for True in all units but the last.
        gather_dtype: dtype in which sharded parameters are gathered; "auto" for the context's compute dtype.
        reduce_dtype: dtype in which gradients are summed over ranks; "auto" for fp32.
        prefetch: number of FSDP units to gather ahead; None for torch's choice.
        offload: tensors that are in the host's memory between uses. True moves sharded parameters, gradients and
            optimizer state, and the host steps. "optimizer" only moves the optimizer's state, on any mesh, and each
            step copies it to the device and back.
        methods: methods of the model, and paths of its submodules, that the script calls besides `model(...)`, as in
            ("encode", "model.encoder"). Each call gathers parameters and exchanges gradients as a forward does.
    """

    tensor: Mapping[str, TensorStyle] | FromModel = "model"
    head: HeadStyle | None = None
    logits: Logits = "full"
    sequence: bool = False
    overlap: bool = False
    context: ContextMethod = "gather"
    stages: tuple[Patterns, ...] | None = None
    cut: None = None
    schedule: Schedule = "1F1B"
    stages_per_rank: Count = 1
    micro_batches: Count | None = None
    experts: Mapping[str, str] | FromModel = "model"
    units: Literal["auto"] | Patterns | Count = "auto"
    together: Patterns = ()
    ignored: Patterns = ()
    reshard_after_forward: bool | Count | None = None
    gather_dtype: WireDtype = "auto"
    reduce_dtype: WireDtype = "auto"
    prefetch: Count | None = None
    offload: bool | Literal["optimizer"] = False
    methods: Patterns = ()

    def __post_init__(self) -> None:
        check_styles(self.tensor, get_args(TensorStyle), where="plan.tensor")
        if self.head is not None:
            check_choice(self.head, get_args(HeadStyle), "the style of the head is unknown", where="plan.head")
        check_choice(self.logits, get_args(Logits), "the form of the logits is unknown", where="plan.logits")
        check_styles(self.experts, get_args(ExpertStyle), where="plan.experts")
        check_choice(
            self.context, get_args(ContextMethod), "unknown method of context parallelism", where="plan.context"
        )
        if cast(object, self.cut) is not None:
            raise self._refused_cut()
        check_choice(self.schedule, get_args(Schedule), "unknown schedule of a pipeline", where="plan.schedule")
        for name, dtype in (("gather_dtype", self.gather_dtype), ("reduce_dtype", self.reduce_dtype)):
            check_choice(dtype, get_args(WireDtype), "unknown format", where=f"plan.{name}")
        check_kinds(self, _TYPES, _KINDS, where="plan")

    def _refused_cut(self) -> ConfigError:
        given = {each.name: (getattr(self, each.name), each.default) for each in msgspec.structs.fields(type(self))}
        fields = [f"{name}={value!r}" for name, (value, default) in given.items() if name != "cut" and value != default]
        return ConfigError(
            "there is one way to cut a model into stages, which replay the model's own forward",
            expected="a plan without cut",
            got=repr(self.cut),
            where="plan.cut",
            fix=f"accel.parallel.Plan({', '.join(fields)})",
        )


_TYPES: Mapping[str, object] = {each.name: each.type for each in msgspec.structs.fields(Plan)}
_KINDS: Mapping[str, str] = {  # of fields that have no choices
    **dict.fromkeys(("sequence", "overlap"), "True or False"),
    "offload": 'True, False or "optimizer"',
    **dict.fromkeys(("micro_batches", "prefetch"), "an integer from 1, or None"),
    "stages": "tuples of paths, one for each stage, or None",
    "stages_per_rank": "an integer from 1",
    "units": '"auto", a tuple of patterns, or an integer from 1',
    **dict.fromkeys(("together", "ignored"), "a tuple of patterns"),
    "methods": "a tuple of names of methods and paths of submodules",
    "reshard_after_forward": "a bool, an integer from 1, or None",
}


Dimension = Literal["data", "replicate", "shard", "expert", "tensor", "context", "sequence", "pipeline"]

# Names of a mesh's axes by what their ranks do; along "data" ranks hold replicas or shards, by the strategy. A
# text only knows the first of each: the others are names in meshes that other frameworks make.
AXIS_NAMES: Mapping[Dimension, tuple[str, ...]] = {
    "data": ("dp", "data", "data_parallel", "hsdp"),
    "replicate": ("dp_replicate", "replicate", "ddp"),
    "shard": ("dp_shard", "shard", "fsdp"),
    "expert": ("ep", "expert", "expert_parallel"),
    "tensor": ("tp", "tensor", "tensor_parallel"),
    "context": ("cp", "context", "context_parallel"),
    "sequence": ("sp", "sequence", "sequence_parallel"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel"),
}
# What an axis such as "dp" is for under each strategy that spreads plain models.
STRATEGY_DIMENSION: Mapping[str, Dimension] = {"ddp": "replicate", "fsdp": "shard"}
_DATA: tuple[Dimension, ...] = ("data", "replicate", "shard", "expert")  # along these, ranks have different samples
_DIMENSION_OF: Mapping[str, Dimension] = {name: dimension for dimension, names in AXIS_NAMES.items() for name in names}
DATA_DIMS = tuple(name for name, dimension in _DIMENSION_OF.items() if dimension in _DATA)
SHARED_DIMS = tuple(name for name in _DIMENSION_OF if name not in DATA_DIMS)


class Axis(NamedTuple):
    """A rank's index along an axis of a mesh, and the axis's size."""

    rank: int
    size: int


def data_dimension(strategy: str) -> Dimension:
    """Return the dimension of an axis such as "dp" under a strategy: replicas or shards; "data" under an engine."""
    return STRATEGY_DIMENSION.get(strategy, "data")


def dimension_of(name: str) -> Dimension | None:
    """Return the dimension of an axis's name; None for a name that only its user knows."""
    return _DIMENSION_OF.get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class MeshPosition:
    """A rank's coordinate on a mesh.

    Attributes:
        data: index among the shares of the samples, and their number.
        axes: index and size along each named axis, in the mesh's order; not part of equality, as the mesh is not.
        opened: whether a text such as "dp=2,cp=2" named the mesh, so that its axes are used by their names; a mesh of
            the user's may serve other ends. Not part of equality.
        data_dims: numbers of the mesh's dimensions along which ranks have different samples. Not part of equality.
    """

    data: tuple[int, int]
    axes: tuple[tuple[str, Axis], ...] = dataclasses.field(compare=False)
    opened: bool = dataclasses.field(default=False, compare=False)
    data_dims: tuple[int, ...] = dataclasses.field(default=(), compare=False)


def names_of(axes: Sequence[tuple[str, Axis]], name: str, strategy: str) -> tuple[str, ...]:
    """Return a mesh's own names of an axis, which may be others of the same dimension; none without one.

    "dp" is an axis of replicas or of shards by the strategy. An unknown name is a `ConfigError`.
    """
    names = [own for own, _ in axes]
    if name in names:
        return (name,)
    if name not in _DIMENSION_OF:
        known = (*names, *_DIMENSION_OF)
        raise ConfigError("unknown axis of a mesh", got=repr(name), fix=did_you_mean(str(name), known))
    dimensions = [_DIMENSION_OF.get(own) for own in names]
    wanted = _DIMENSION_OF[name]
    if wanted == data_dimension(strategy) and wanted not in dimensions and "data" in dimensions:
        wanted = "data"
    if wanted in dimensions:
        return (names[dimensions.index(wanted)],)
    both = zip(names, dimensions, strict=True) if wanted == "data" else ()
    return tuple(own for own, dimension in both if dimension in ("replicate", "shard"))


@functools.lru_cache(maxsize=256)  # each step asks for a few
def axis_of(axes: tuple[tuple[str, Axis], ...], name: str, strategy: str) -> Axis:
    """Return index and size along an axis, (0, 1) if the mesh has none; arguments and errors as in `names_of`."""
    own = names_of(axes, name, strategy)
    return _joint(axis for each, axis in axes if each in own)


@functools.lru_cache(maxsize=64)  # each step asks
def has_unknown_axis(axes: tuple[tuple[str, Axis], ...]) -> bool:
    """Return whether several ranks are along an axis with a name that only its user knows."""
    return any(axis.size > 1 and dimension_of(name) is None for name, axis in axes)


def without_mesh(rank: int, size: int) -> MeshPosition:
    """Return a rank's position where no mesh is known: on one axis "dp" of all ranks."""
    return MeshPosition((rank, size), (("dp", Axis(rank, size)),))


def mesh_position(
    names: Sequence[str] | None,
    shape: Sequence[int],
    coordinate: Sequence[int],
    data_dims: Sequence[str] | None = None,
) -> MeshPosition:
    """Return a rank's position on a mesh. Ranks that differ in a data dimension have different samples.

    Shares are numbered in the order of the mesh. Without `data_dims`, the axes' names say which are data dimensions.
    """
    data = _known(names, len(shape)) if data_dims is None else _stated(names or (), len(shape), data_dims)
    axes = tuple(Axis(here, size) for here, size in zip(coordinate, shape, strict=True))
    own = tuple(at for at, is_data in enumerate(data) if is_data)
    share = _joint(axes[at] for at in own)
    named = ("dp",) * len(own) if names is None else tuple(names)
    return MeshPosition((share.rank, share.size), tuple(zip(named, axes, strict=False)), data_dims=own)


def axes_position(axes: Axes, names: Iterable[str], rank: int) -> MeshPosition:
    """Return a rank's position on a mesh of axes, with `names` listed in their order."""
    at = coordinates(axes, rank)
    listed = tuple((name, Axis(at[name], getattr(axes, name))) for name in names)
    own = ("dp", "dp_replicate", "dp_shard")
    share = _joint(axis for name, axis in listed if name in own)
    factors = [name for name, _ in listed if name in FACTORS]  # `ep` is no dimension of the mesh
    data_dims = tuple(number for number, name in enumerate(factors) if name in own)
    return MeshPosition((share.rank, share.size), listed, opened=True, data_dims=data_dims)


def _joint(axes: Iterable[Axis]) -> Axis:
    """Return the place along several axes, the last fastest."""
    rank = 0
    count = 1
    for axis in axes:
        rank = rank * axis.size + axis.rank
        count *= axis.size
    return Axis(rank, count)


def _known(names: Sequence[str] | None, ndim: int) -> list[bool]:
    """Return the data dimensions, by their names."""
    if names is None:
        if ndim > 1:
            raise ConfigError(
                "the mesh's names do not show which of its ranks share samples",
                expected="a name for each dimension, or only one dimension",
                got=f"{ndim} dimensions without names",
                where="mesh=",
                fix='Name them: init_device_mesh(..., mesh_dim_names=("dp", "tp")).',
            )
        return [True] * ndim
    if unknown := [name for name in names if name not in DATA_DIMS + SHARED_DIMS]:
        raise ConfigError(
            "a mesh dimension of unknown meaning: its ranks may share samples or not",
            expected=f"{', '.join(DATA_DIMS)} where they do not; {', '.join(SHARED_DIMS)} where they do",
            got=", ".join(map(repr, unknown)),
            where="mesh=",
            fix="Name all dimensions where they do not: data_dims=(...).",
        )
    return [name in DATA_DIMS for name in names]


def _stated(names: Sequence[str], ndim: int, data_dims: Sequence[str]) -> list[bool]:
    """Return the data dimensions that the user names."""
    if isinstance(data_dims, str) or len(set(data_dims)) < len(data_dims) or not set(data_dims) <= set(names):
        raise ConfigError(
            "the data dimensions do not fit the mesh",
            expected=f"a tuple of some of {', '.join(map(repr, names))}" if names else "a mesh with named dimensions",
            got=repr(data_dims),
            where="data_dims=",
        )
    return [name in data_dims for name in names] or [False] * ndim
