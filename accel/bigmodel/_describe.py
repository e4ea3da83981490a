# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a model: its blocks in the order of their calls, the other modules, and ties by identity."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accel.bigmodel._arguments import check_dtype, dtypes, name_of
from accel.bigmodel.plan import Segment, Skeleton, Weight
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean
from accel.parallel._blocks import Select, blocks_of, is_container, selected
from accel.parallel._modules import check_module, named_modules
from accel.tensors import local_part, packed

M = TypeVar("M", bound=nn.Module)


def call_order(model: M, modules: Mapping[str, nn.Module], call: Callable[[M], object]) -> Sequence[str]:
    """Return the names of the modules in the order of their first calls. No gradients; hooks are removed at the end.

    Modules that are not called come before the module that they preceded.
    """
    first: dict[str, int] = {}

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            _ = first.setdefault(name, len(first))

        return hook

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            _ = call(model)
    finally:
        for handle in handles:
            handle.remove()
    places: list[tuple[int, int, str]] = []
    following = len(first)
    names = list(modules)
    for at in reversed(range(len(names))):
        following = first.get(names[at], following)
        places.append((following, at, names[at]))
    return [name for _, _, name in sorted(places)]


SMALL_BYTES = 2**20  # buffers, and modules without submodules, that do not stream


class _ModelPart(NamedTuple):
    """A part of the model that becomes a segment."""

    name: str  # its path
    module: nn.Module  # the module
    whole: bool  # whether submodules belong to it, too
    aliases: list[str]  # further paths of the module


class _FoundTensor(NamedTuple):
    """A parameter, a buffer, or a part of a quantizer's parameter at one of its paths."""

    path: str  # the path
    segment: str  # name of its segment
    tensor: torch.Tensor  # the tensor
    stored: bool  # whether checkpoints hold it
    key: tuple[int, str]  # the same for each path of a tied one
    is_small: bool  # whether it stays on the segment's device, as small ones do and those that forward writes to


def describe(
    model: M,
    *,
    blocks: Select | None = None,
    dtype: torch.dtype | None = None,
    call: Callable[[M], object] | None = None,
    storage_dtype: torch.dtype | None = None,
    storage_skip: str | Collection[str] = (),
) -> Skeleton:
    """Return the skeleton of a model, which may be empty. No communication.

    Each block is a segment. So is each largest module without a block in it, and the parameters and buffers that a
    module with blocks in it has itself. Segments are in the order of registration, or of a call. A tensor
    with several paths is one weight, found by identity. Of a DTensor the part that this rank holds counts.

    Args:
        model: the model, on any device.
        blocks: modules that move together: a class or several, or a function of a module's path and the module. By
            default the repeated ones of a ModuleList, ModuleDict or Sequential, or under numbered attributes.
        dtype: dtype that floating-point weights will have; None for their own.
        call: calls the model once, as in `lambda model: model(ids)`, without gradients. Segments then stand in the
            order of their first calls, which matters if it differs from the order of registration. For an empty model,
            inputs are empty too: on "meta".
        storage_dtype: dtype of matrices at home, such as torch.float8_e4m3fn; they are cast on the way to their
            computing device, or for each call of their block if they stay there (layer-wise casting). Embeddings,
            buffers, and weights of less than two dimensions, as norms and biases have, keep theirs. None for no cast.
        storage_skip: names of further weights that keep their dtype, or patterns such as "*.router.*".

    Raises:
        ConfigError: no model, `blocks` chooses nothing, a weight has no shape yet, a dtype that cannot be stored, or a
            pattern of `storage_skip` that matches nothing, or means nothing without a storage dtype.
    """
    check_module(model, where="describe")
    check_dtype(dtype, where="describe(dtype=)")
    parts = _parts(model, _blocks(model, blocks))
    found = [each for part in parts for each in _found_in(part)]
    by_tensor: dict[tuple[int, str], list[_FoundTensor]] = {}
    for each in found:
        by_tensor.setdefault(each.key, []).append(each)
    weights: dict[str, list[Weight]] = {each.segment: [] for each in found}
    names = {known: name for name, known in dtypes().items()}
    for group in by_tensor.values():
        weights[group[0].segment].append(_weight(group, names))
    segments = {part.name: _segment(part, weights[part.name]) for part in parts if part.name in weights}
    order = list(segments)
    if call is not None:
        order = call_order(model, {part.name: part.module for part in parts if part.name in weights}, call)
    skeleton = Skeleton(segments=tuple(segments[name] for name in order))
    if dtype is not None:
        skeleton = skeleton.cast(name_of(dtype))
    skip = (storage_skip,) if isinstance(storage_skip, str) else storage_skip
    if storage_dtype is not None:
        return _store(model, skeleton, name_of(storage_dtype), skip)
    if skip:
        problem = "storage_skip= without storage_dtype="
        raise ConfigError(problem, where="describe", fix="Pass storage_dtype=torch.float8_e4m3fn.")
    return skeleton


def _store(model: nn.Module, skeleton: Skeleton, dtype: str, skip: Collection[str]) -> Skeleton:
    names = [name for weight in skeleton.weights() for name in (weight.name, *weight.tied)]
    unmatched = [pattern for pattern in skip if not fnmatch.filter(names, pattern)]
    if unmatched:
        fix = did_you_mean(unmatched[0], names)
        raise ConfigError("no such weight", got=", ".join(map(repr, unmatched)), where="storage_skip=", fix=fix)
    kept = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for path, module in named_modules(model, every_path=True):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            kept |= {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
    return skeleton.store(dtype, skip=[*skip, *kept])


def _blocks(model: nn.Module, blocks: Select | None) -> set[int]:
    """Return the `id` of each module that moves as one."""
    if blocks is not None:
        return {id(module) for module in selected(model, blocks, "describe(blocks=)").values()}
    return {id(block.module) for block in blocks_of(model)}


def _parts(model: nn.Module, blocks: set[int]) -> Sequence[_ModelPart]:
    """Return the parts of a model in the order of registration, each once."""
    parts: dict[int, _ModelPart] = {}

    def visit(path: str, module: nn.Module) -> None:
        if id(module) in parts:
            parts[id(module)].aliases.append(path)
            return
        inner = any(id(each) in blocks for each in module.modules() if each is not module)
        whole = id(module) in blocks or not (inner or module is model or is_container(module))
        parts[id(module)] = _ModelPart(path, module, whole, [])
        if not whole:
            for name, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]
                if child is not None:
                    visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return list(parts.values())


def _found_in(part: _ModelPart) -> Iterator[_FoundTensor]:
    """Yield the tensors of a part at each of their paths."""
    modules = list(named_modules(part.module, every_path=True)) if part.whole else [("", part.module)]
    for root in (part.name, *part.aliases):
        for inner, module in modules:
            prefix = "".join(f"{each}." for each in (root, inner) if each)
            for name, tensor in module.named_parameters(recurse=False):
                weight = packed(module, name, tensor)
                if weight is None:
                    yield _FoundTensor(prefix + name, part.name, tensor, True, (id(tensor), ""), _writes(module))
                    continue
                for each, inner_tensor in weight.parts.items():
                    small = each != weight.first and inner_tensor.nbytes < SMALL_BYTES
                    yield _FoundTensor(prefix + each, part.name, inner_tensor, True, (id(tensor), each), small)
            for name, tensor in module.named_buffers(recurse=False):
                stored = name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
                small = local_part(tensor).nbytes < SMALL_BYTES
                yield _FoundTensor(prefix + name, part.name, tensor, stored, (id(tensor), ""), small)


def _weight(group: Sequence[_FoundTensor], names: Mapping[torch.dtype, str]) -> Weight:
    first = group[0]
    if is_lazy(first.tensor):
        raise ConfigError(
            "a weight without a shape",
            expected="a model with shapes for all weights",
            where=first.path,
            fix="Call the model once with a batch, so that its lazy modules become what they are.",
        )
    tensor = local_part(first.tensor)
    if tensor.dtype not in names:
        raise ConfigError(
            "a weight of a dtype that cannot be stored",
            expected=", ".join(sorted(names.values())),
            got=str(tensor.dtype),
            where=first.path,
        )
    stored = any(each.stored for each in group)
    shared = any(each.segment != first.segment for each in group)
    return Weight(
        name=first.path,
        shape=tuple(tensor.shape),
        dtype=names[tensor.dtype],
        tied=tuple(each.path for each in group[1:]),
        stored=stored,
        moves=stored and not first.is_small and not shared,
    )


def _segment(part: _ModelPart, weights: Sequence[Weight]) -> Segment:
    moving = sum(weight.memory for weight in weights if weight.moves)
    is_leaf = next(part.module.children(), None) is None
    movable = part.whole and not (is_leaf and moving < SMALL_BYTES)
    return Segment(
        name=part.name,
        weights=tuple(weights),
        movable=movable,
        rows=movable and _moves_by_rows(part.module),
        aliases=tuple(part.aliases),
    )


def _writes(module: nn.Module) -> bool:
    """Return whether a forward writes to the module's own parameters, as the norms of looked-up rows are cut."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def _moves_by_rows(module: nn.Module) -> bool:
    """Return whether a forward reads the rows of a table that are looked up, and writes none."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return is_plain and not _writes(module)


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a source.

    Attributes:
        shape: its sizes.
        dtype: safetensors' name of its dtype, such as "BF16"; "C128" for complex128.
        nbytes: bytes of its elements.
        where: the file that holds it, for errors; the first of several.
        page_offset: offset of its first byte in a page of `accel.storage.PAGE` bytes; memory at an address with the
            same offset is filled without a copy. None where no memory fits better than other memory.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str = ""
    page_offset: int | None = None


@runtime_checkable
class WeightSource(Protocol):
    """Weights by name. Its owner closes it.

    Attributes:
        entries: tensors by name, in the order in which they are stored.
    """

    @property
    def entries(self) -> Mapping[str, StoredTensor]: ...

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; return once every byte is there. Callable from several threads. Mutates the tensors.

        Args:
            targets: names, each with a contiguous CPU tensor of the stored shape and dtype, in any memory. Neighbours
                in a file are read together.

        Raises:
            CheckpointError: a file is too short, has changed since it was opened, or cannot be read; the tensors then
                hold anything.
            ConfigError: an unknown name, or a tensor that does not fit.
        """
        ...

    def close(self) -> None:
        """Close the files. A closed source reads no more."""
        ...
