# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel styles: how each divides a module's parameters, and the problems of a module with it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec
from torch import Tensor, nn

from accel.errors._checks import with_article
from accel.parallel.parts import RowCut, RowLayout, rows_of
from accel.parallel.parts._layout import even
from accel.topology import TensorStyle


class RowExchange(NamedTuple):
    """The message of a rank, as of all, that turns the rows that it stores into those that it needs.

    The needed rows are in their order in the whole. Rows are pieces of one split: no index is copied to the device, and
    backward is a concatenation.
    """

    sizes: Sequence[int]  # of the pieces of the stored rows, in order
    kept: Sequence[int]  # numbers of the pieces that this rank needs, lowest rows first
    sent: Sequence[Sequence[int]]  # numbers of the pieces for each other rank; a piece may go to several
    back: Sequence[int]  # number of rows from each other rank

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the pieces of stored rows, [rows, ...]."""
        return cast(Any, rows).split_with_sizes(self.sizes)


def row_exchange(cut: RowCut, rank: int, size: int) -> RowExchange:
    """Return the exchange of one rank, from rows stored in equal parts in order to the rows of a cut."""
    part = cut.total // size
    needed = [rows_of(cut, each, size) for each in range(size)]
    own = [[row - rank * part for row in rows if row // part == rank] for rows in needed]
    # pieces end where the rows of a rank begin and end
    borders = {0, part}.union(*(set(rows) ^ {row + 1 for row in rows} for rows in own))
    ends = sorted(borders)
    number = {start: at for at, start in enumerate(ends[:-1])}
    sizes = [stop - start for start, stop in itertools.pairwise(ends)]
    pieces = [[number[row] for row in rows if row in number] for rows in own]
    back = [sum(row // part == source != rank for row in needed[rank]) for source in range(size)]
    return RowExchange(sizes, pieces[rank], [*pieces[:rank], [], *pieces[rank + 1 :]], back)


STYLES: tuple[str, ...] = get_args(TensorStyle)
COLWISE = frozenset({
    "colwise", "colwise_gather_output", "packed_colwise_2", "packed_colwise_3",
})  # fmt: skip
_PACKS: Mapping[str, int] = {"packed_colwise_2": 2, "packed_colwise_3": 3}
ROWWISE = frozenset({"rowwise", "rowwise_split_input"})


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The computation of one module on the ranks along tp."""

    style: TensorStyle  # of the module
    # Dimension along which each parameter is split, by name; those not named are replicated.
    dims: Mapping[str, int] = {}
    summands: bool = False  # whether the gradients of its replicated parameters are summands, one on each rank
    fresh: bool = False  # whether its backward computes these gradients in memory of their own
    overlap: bool = False  # whether messages overlap with the module's matmuls
    layouts: Mapping[str, RowLayout] = {}  # layouts of its parameters that are parts in a forward, by name
    # Parts that are made whole in its outputs, where modules in it compute with parts: of "features", or "all".
    ends: Literal["", "features", "all"] = ""
    # Numbers of words: this rank's part of so many logits leaves the module, a head or the model.
    words: tuple[int, ...] = ()
    tokens: bool = False  # whether each rank has its tokens around it


# Layouts of parameters by path, in the module around them that returns full tensors, by its path.
Regions = Mapping[str, Mapping[str, RowLayout]]


# norms with kernels that sum the gradients over rows
_FRESH = {nn.LayerNorm.forward, nn.RMSNorm.forward, nn.GroupNorm.forward}


_IN_PARTS = COLWISE | ROWWISE | {"embedding_colwise", "embedding_rowwise"}


def rule_for(module: nn.Module, style: TensorStyle, ways: int) -> Rule:
    """Return the rule of a module without a problem, by which its outputs have as many pieces as `ways`."""
    dims = _dims(module, style)
    return Rule(
        style=style,
        dims=dims,
        # its own parameters see a part of the heads on each rank
        summands=style == "replicated_with_grad_allreduce",
        fresh=type(module).forward in _FRESH,
        layouts={} if style not in _IN_PARTS else _layouts(module, dims, _PACKS.get(style, 1), ways),
        ends="features" if style == "colwise_gather_output" else "",
    )


def _layouts(module: nn.Module, dims: Mapping[str, int], packs: int, ways: int) -> dict[str, RowLayout]:
    """Layouts of a layer's parameters: equal packs, each in as many pieces."""
    lengths = {name: module.get_parameter(name).shape[dim] for name, dim in dims.items()}
    return {name: RowLayout(dim, RowCut(packs, ((lengths[name] // packs, ways),))) for name, dim in dims.items()}


def heads_in(around: nn.Module, outputs: int) -> int:
    """Return the number of heads in the outputs of a layer, by the size of a head that the module around it names; 0
    where it names none."""
    width: object = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    return outputs // width if type(width) is int and outputs % width == 0 else 0


def problems_of(module: nn.Module, style: TensorStyle, size: int) -> Iterator[str]:
    """Yield the reasons why a module cannot have a style on so many ranks."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if style == "copy_input" and names:
        yield f"{style} is of modules without parameters of their own, and it has {', '.join(names)}"
    if isinstance(module, nn.RNNBase) and style not in ("replicated", "replicated_with_grad_allreduce"):
        yield f'a recurrent layer of torch is whole on each rank: its style is "replicated", not "{style}"'
    if isinstance(module, nn.ParameterList | nn.ParameterDict) and names and style != "replicated_local":
        yield "a container of parameters has no forward: replicated_local is its only style"
    if style in COLWISE | ROWWISE:
        yield from _linear_problems(module, style, size)
    elif style in ("embedding_rowwise", "embedding_colwise"):
        yield from _embedding_problems(module, style, size)
    elif style == "multihead_attention":
        yield from _attention_problems(module, size)


def part_length(length: int, size: int) -> int:
    """Return the length of each rank's part of a dimension but the last's, which may be shorter, as torch divides."""
    return -(-length // size)


def leaves_ranks_out(length: int, size: int) -> bool:
    """Return whether a dimension is too short for each rank to have a part of it."""
    return part_length(length, size) * (size - 1) >= length


def uneven_heads(heads: int, size: int) -> str:
    """Return the problem of heads that ranks cannot share, with the numbers of ranks that could."""
    able = [str(each) for each in range(2, heads + 1) if heads % each == 0]
    way = f"; tp={' or '.join(able)} divides them" if able else ""
    return f"{heads} head{'s' * (heads != 1)}, not a multiple of tp={size}{way}"


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as [in, out], as Conv1D of transformers does."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def output_dim(module: nn.Module) -> int:
    """Return the output dimension of a linear layer's weight."""
    return 1 if is_transposed(module) else 0


def is_linear(module: nn.Module) -> bool:
    """Return whether a module has a linear layer's parameters: `weight` of two dimensions, and `bias` or none."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    is_product = weight is not None and weight.ndim == 2 and own.keys() <= {"weight", "bias"}
    return is_product and not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _dims(module: nn.Module, style: TensorStyle) -> dict[str, int]:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if style in COLWISE:
        return {name: dim for name, dim in (("weight", output_dim(module)), ("bias", 0)) if name in own}
    if style in ROWWISE:
        return {"weight": 1 - output_dim(module)}
    if style in ("embedding_rowwise", "embedding_colwise"):
        return {"weight": int(style == "embedding_colwise")}
    return {}


def layouts_of_attention(module: nn.MultiheadAttention, size: int) -> dict[str, RowLayout]:
    """Return layouts of an attention's parameters by which each rank computes some heads, by name."""
    of_each = even(cast(int, cast(Any, module).embed_dim), size)
    found: dict[str, RowLayout] = {"out_proj.weight": RowLayout(1, of_each)}
    for name, _ in module.named_parameters(recurse=False):
        if name.startswith("in_proj"):  # of queries, keys and values
            found[name] = RowLayout(0, RowCut(3, of_each.segments))
        else:  # an added key or value is [1, 1, features]
            found[name] = RowLayout(2 if name in ("bias_k", "bias_v") else 0, of_each)
    return found


def _linear_problems(module: nn.Module, style: TensorStyle, size: int) -> Iterator[str]:
    if not is_linear(module):
        yield f"{style} is of linear layers, with a weight of two dimensions and a bias, and it is {_named(module)}"
        return
    weight = module.get_parameter("weight")
    dim = _dims(module, style)["weight"]
    packs = _PACKS.get(style, 1)
    length = weight.shape[dim]
    what = "outputs" if dim == output_dim(module) else "inputs"
    if packs > 1 or style == "rowwise_split_input" or is_transposed(module):
        if length % (packs * size):
            times = f"{packs} packs of " if packs > 1 else ""
            yield f"{length} {what}, not a multiple of {times}tp={size}"
    elif leaves_ranks_out(length, size):
        yield f"{length} {what}, too few for the last of tp={size}"


def _embedding_problems(module: nn.Module, style: TensorStyle, size: int) -> Iterator[str]:
    if not isinstance(module, nn.Embedding):
        yield f"{style} is of nn.Embedding, and it is {_named(module)}"
        return
    if style == "embedding_colwise":
        if module.embedding_dim % size:
            yield f"{module.embedding_dim} features, not a multiple of tp={size}"
    elif leaves_ranks_out(module.num_embeddings, size):
        yield f"{module.num_embeddings} embeddings, too few for the last of tp={size}"
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            yield f"an embedding with {option}, for which a rank needs all rows"


def _attention_problems(module: nn.Module, size: int) -> Iterator[str]:
    if not isinstance(module, nn.MultiheadAttention):
        yield f"multihead_attention is of nn.MultiheadAttention, and it is {_named(module)}"
        return
    heads = cast(int, cast(Any, module).num_heads)
    if heads % size:
        yield uneven_heads(heads, size)


def _named(module: nn.Module) -> str:
    return with_article(type(module).__name__)


_UNKNOWN = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def with_lora(model: nn.Module, styles: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Return the styles, with the styles of an adapted layer's parts in place of the layer's. Adapters that cannot be
    divided are added to `problems`."""
    found: dict[str, str] = {}
    for path, style in styles.items():
        module = model.get_submodule(path)
        if (copies := _trained_copies(module)) is not None:
            found |= {f"{path}.{copy}": style for copy in copies}
            continue
        if not is_adapted(module):
            found[path] = style
            continue
        problems += [f"{path}: {each}" for each in _problems(module, style)]
        found |= {f"{path}.{part}": each for part, each in _parts(module, style)}
    return found


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module holds a layer and its adapters, as peft puts it in the place of the layer."""
    children = dict(module.named_children())
    return {"base_layer", "lora_A", "lora_B"} <= children.keys()


def _trained_copies(module: nn.Module) -> list[str] | None:
    """Return the names of a layer and its trained copies, as peft's `modules_to_save` keeps them; None for others."""
    children = dict(module.named_children())
    if children.keys() != {"original_module", "modules_to_save"}:
        return None
    return ["original_module", *(f"modules_to_save.{name}" for name, _ in children["modules_to_save"].named_children())]


def _parts(module: nn.Module, style: str) -> Iterator[tuple[str, str]]:
    yield "base_layer", style
    # of a column-wise layer the second factor is divided as the layer is; of a row-wise one the first, with few outputs
    if style in COLWISE:
        first, second = "replicated_with_grad_allreduce", style
    else:
        first, second = style, "replicated"
    for name, of_each in (("lora_A", first), ("lora_B", second)):
        for key, _ in module.get_submodule(name).named_children():
            yield f"{name}.{key}", of_each


def is_foreign(module: nn.Module, style: str) -> bool:
    """Return whether a layer with adapters is of another kind than its style."""
    if "base_layer" not in dict(module.named_children()):
        return False
    return not is_adapted(module) or any(_problems(module, style))


ADAPTER = "an adapter"  # as problems of adapters begin


def _problems(module: nn.Module, style: str) -> Iterator[str]:
    if style not in COLWISE | ROWWISE:
        yield f"{ADAPTER} of a layer of style {style}"
    for name in _UNKNOWN:
        part = getattr(module, name, None)
        if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
            yield f"{ADAPTER} with {name}"
