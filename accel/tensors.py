# SPDX-License-Identifier: Apache-2.0
"""Tensors of special classes: DTensors and what this rank holds of them, weights elsewhere, quantizers' weights; the
tensors of models and optimizers; and sums of bits, for ranks to compare.

Nothing here imports torch.distributed.tensor, which takes most of a second, before there is a DTensor. A quantizer's
weight is split into plain tensors by the engine for its package, which is imported when such a weight is met.
"""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Package of a weight's class: module and function, which takes a module, the name of its parameter and the parameter,
# and returns a `Packed`; None for a weight that it does not split.
FORMATS: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": ("accel.engines.quantized._describe", "take_apart"),
    "torchao": ("accel.engines.quantized._describe", "take_apart"),
}
MARK = "accel_packed"  # attribute of a parameter of another class in place of a packed weight
_COLUMNS, _ROWS = 2**12, 16  # of words that a checksum weights together on a CPU: they fit its cache
_LOWER = 2**32 - 1  # the lower half of a word

Make = Callable[[Mapping[str, torch.Tensor]], nn.Parameter]


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor. No communication."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing the module
    return kind is not None and isinstance(tensor, kind)


def is_half(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are floating-point numbers of 16 bits."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def has_wide_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a 16-bit parameter has its gradients in float32, as master weights need them."""
    return is_half(parameter) and parameter.grad_dtype == torch.float32


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another, as gradients in DDP's buckets are."""
    return tensor._is_view()  # pyright: ignore[reportPrivateUsage]


def is_in_base(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another and has its memory, which it leaves by `tensor.data = values`."""
    base = tensor._base
    return base is not None and (
        base.data_ptr() + (tensor.storage_offset() - base.storage_offset()) * tensor.element_size() == tensor.data_ptr()
    )


class Memory:
    """A tensor's storage, in a note of this tensor. The note says nothing of a copy, which has other memory.

    Attributes:
        owner: id of the tensor.
        storage: held, so that no later storage has its id.
    """

    __slots__ = ("owner", "storage")

    def __init__(self, owner: int, storage: torch.UntypedStorage) -> None:
        self.owner = owner
        self.storage = storage

    def __deepcopy__(self, memo: object) -> Memory:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def is_left(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has got another storage since."""
        return self.owner == id(tensor) and tensor.untyped_storage() is not self.storage


class _SameMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def same_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor that is no view, in the memory of another: changes in place count for both, and gradients
    flow back."""
    return cast(Any, _SameMemory).apply(x) if x.requires_grad else x.detach()


class _Weighted(torch.autograd.Function):
    """The tensor unchanged; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def weighted(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor unchanged; its gradient is multiplied by a factor."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(weighted, (x,), x, factor)
    return cast(Any, _Weighted).apply(x, factor)


class AbsentWeight(Protocol):
    """A weight that is not in memory: a tensor of a class with `stored`."""

    def stored(self) -> torch.Tensor:
        """Return the values on the host: memory that has them already, a mapped file, or else a copy."""
        ...


def is_absent(tensor: object) -> bool:
    """Return whether a tensor, or this rank's part of a DTensor, is a weight that is not in memory."""
    if is_dtensor(tensor):
        tensor = local_part(tensor)
    return type(tensor) is not torch.Tensor and hasattr(type(tensor), "stored")


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight that is not in memory, on the host or its mesh's device; others as they are."""
    if not is_absent(tensor):
        return tensor
    stored = cast("AbsentWeight", local_part(tensor)).stored()
    return dtensor_of(stored, tensor) if is_dtensor(tensor) else stored


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds: the same memory, without autograd's record. No communication."""
    if is_dtensor(tensor):
        with torch.no_grad():  # or the part would be a new tensor, and a step in the graph
            tensor = tensor.to_local()
    if type(tensor) is torch.Tensor and not tensor.requires_grad:  # the usual case, found fast
        return tensor
    return tensor.detach() if tensor.requires_grad or isinstance(tensor, nn.Parameter) else tensor


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the local part of each tensor; a sequence without DTensors as it is. No communication."""
    return [local_part(each) for each in tensors] if any(map(is_dtensor, tensors)) else tensors


def integers(tensor: torch.Tensor) -> list[int]:
    """Return the elements of an integer tensor of shape [n]. Waits for its device."""
    return cast(Any, tensor).tolist()


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor; None of a plain tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def placements_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the placements of a DTensor, one a dimension of its mesh; none of a plain tensor."""
    return tuple(tensor.placements) if is_dtensor(tensor) else ()


def is_offloaded(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a DTensor is on the CPU while its ranks compute on devices of another type."""
    return is_dtensor(tensor) and tensor.device.type == "cpu" and tensor.device_mesh.device_type == device.type


def split_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which ranks hold different elements or summands."""
    mesh = tensor.device_mesh
    split = (at for at, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple(at for at in split if mesh.size(at) > 1)


def is_partial(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank holds a summand, as tensor parallelism leaves some gradients."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def summed(tensor: DTensor) -> DTensor:
    """Sum the summands that ranks hold, or take their mean; each then has the result. A collective of the mesh."""
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():  # one after another: torch warns where it is to take several at once
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole and without autograd's record. A collective of the mesh for a DTensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    spread = cast("DTensor", stored_values(tensor).detach())
    kind = spread.device_mesh.device_type
    if spread.device.type != kind:  # offloaded, while its ranks communicate through their devices
        spread = cast("DTensor", spread.to(kind))
    return _unstrided(spread).full_tensor()


def _unstrided(tensor: DTensor) -> DTensor:
    """Gather what `fully_shard` cut again after tensor parallelism had cut it.

    These parts are not contiguous in the full tensor, so torch always gathers them separately, and warns if it has
    others to gather.
    """
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    for dim, placement in enumerate(placements):
        if not (placement.is_replicate() or placement.is_shard() or placement.is_partial()):
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor


def dtensor_of(part: torch.Tensor, template: DTensor) -> DTensor:
    """Make a DTensor of this rank's part, with the mesh, placements and shape of another. No communication.

    A part on the meta device, or of the mesh's device type, becomes the DTensor's memory; else it is copied.
    """
    from torch.distributed.tensor import DTensor

    shape, stride = template.shape, template.stride()
    return DTensor.from_local(
        part, template.device_mesh, template.placements, run_check=False, shape=shape, stride=stride
    )


def dtensor_around(part: torch.Tensor, template: DTensor) -> DTensor:
    """Make a DTensor of a part of the template's dtype and strides: the tensor itself, on any device, without the view
    that torch's `from_local` takes."""
    return cast(Any, type(template))(part, copy.copy(cast(Any, template)._spec), requires_grad=False)


def dtensor_like(part: torch.Tensor, template: DTensor, shape: torch.Size | None = None) -> DTensor:
    """Make a DTensor of local parts, on the mesh and the device of another one. No communication.

    `shape` is the full shape; None for a part that is the full tensor, the same on every rank.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = template.device_mesh
    placements = [Replicate()] * mesh.ndim if shape is None else template.placements
    shape = part.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    device = local_part(template).device
    if device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(part.to(device), mesh, placements, run_check=False, shape=shape, stride=stride)
    # offloaded: torch would move the part to the mesh's devices
    like = DTensor.from_local(part.to("meta"), mesh, placements, run_check=False, shape=shape, stride=stride)
    made = cast("DTensor", torch.empty_like(like, device=device))
    _ = local_part(made).copy_(part)
    return made


class Packed(NamedTuple):
    """A weight as plain tensors."""

    # The tensors by name in the module, such as "weight" and "weight.absmax"; the first holds the elements. They share
    # their memory with the weight.
    parts: Mapping[str, torch.Tensor]
    # The recipe: puts a parameter together from parts by these names, as views on them. A part may be on another
    # device, in a slot, or nowhere.
    make: Make
    # Gives further tensors of a checkpoint from the parts, which determine how these are read.
    constants_of: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

    @property
    def first(self) -> str:
        """Name of the part that holds the elements."""
        return next(iter(self.parts))

    def constants(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a checkpoint that determine how the parts are read."""
        return self.constants_of(self.parts)

    def replaced(self, part: str, tensor: torch.Tensor) -> Packed:
        """Return it with another tensor for a part."""
        return self._replace(parts={**self.parts, part: tensor})


def packed(module: nn.Module, key: str, tensor: object) -> Packed | None:
    """Return a module's parameter as plain tensors; None if it is no packed weight. No communication."""
    kind = type(tensor)
    if kind in (torch.Tensor, nn.Parameter) or not isinstance(tensor, torch.Tensor):
        return None
    if (mark := vars(tensor).get(MARK)) is not None:
        return cast(Packed, mark)
    engine = FORMATS.get(kind.__module__.partition(".")[0])
    if engine is None:
        return None
    return getattr(importlib.import_module(engine[0]), engine[1])(module, key, tensor)


def packed_weights(model: nn.Module | Iterable[tuple[str, nn.Module]]) -> dict[str, Packed]:
    """Return the packed weights of a model, or of modules by all paths: one with several paths under each of them."""
    found: dict[str, Packed] = {}
    known: dict[int, Packed | None] = {}
    if isinstance(model, nn.Module):
        model = cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    for path, module in model:
        for key, tensor in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if tensor is None or type(tensor) is nn.Parameter:
                continue
            if id(tensor) not in known:
                known[id(tensor)] = packed(module, key, tensor)
            if (weight := known[id(tensor)]) is not None:
                found[f"{path}.{key}" if path else key] = weight
    return found


def part_names(model: nn.Module) -> set[str]:
    """Return the names of all parts and constants of packed weights, as `state_tensors` has them."""
    return {name for tensors in _named_parts(packed_weights(model)).values() for name in tensors}


def state_tensors(model: nn.Module) -> dict[str, object]:
    """Return `model.state_dict(keep_vars=True)` with the parts and constants of each packed weight in its place."""
    weights = packed_weights(model)
    found = cast("dict[str, object]", model.state_dict(keep_vars=True))
    if not weights:
        return found
    own = _named_parts(weights)
    replaced = {name for tensors in own.values() for name in tensors}
    state: dict[str, object] = {}
    for name, value in found.items():
        if name in own:
            state |= own[name]
        elif name not in replaced:
            state[name] = value
    return state


def _named_parts(weights: Mapping[str, Packed]) -> dict[str, dict[str, torch.Tensor]]:
    """Return parts and constants by their names in the model, by path of the weight."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path, weight in weights.items():
        root, dot, _ = path.rpartition(".")
        tensors = {**weight.parts, **weight.constants()}
        found[path] = {root + dot + name: tensor for name, tensor in tensors.items()}
    return found


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """List the optimizers' parameters, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the memory, device and dtype of another of its class; the other is lost.

    The tensor keeps its identity, its attributes and the weak references to it, as RNNs have.
    """
    vars(other).update(vars(tensor))
    if weakref.getweakrefs(tensor) and type(tensor) is type(other) and not is_dtensor(tensor):
        cast(Any, torch)._C._swap_tensor_impl(tensor, other)  # swap_tensors refuses weak references
    else:
        cast(Any, torch.utils).swap_tensors(tensor, other)


class WordLayers(NamedTuple):
    """The layers of a model that map words to vectors and back, by path."""

    tables: Mapping[str, nn.Module]  # embeddings
    # The layer that the model's `get_output_embeddings` returns; else the linear layers that share a table's
    # weight; else those with as many outputs as a table has rows.
    heads: Mapping[str, nn.Module]
    sized: Mapping[str, nn.Module]  # all linear layers with as many outputs as a table has rows


def word_layers(model: nn.Module) -> WordLayers:
    """Return the embeddings of a model, and the layers that give its logits. No communication."""
    modules: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    tables = {path: each for path, each in modules.items() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    weights = {id(each.weight) for each in tables.values()}
    rows = {each.weight.shape[0] for each in tables.values()}
    linear = {path: each for path, each in modules.items() if isinstance(each, nn.Linear)}
    sized = {path: each for path, each in linear.items() if _outputs_of(each) in rows}
    tied = {path: each for path, each in linear.items() if not _makes_weight(each) and id(each.weight) in weights}
    ask: Any = getattr(model, "get_output_embeddings", None)
    named: object = ask() if callable(ask) else None
    declared = {path: each for path, each in modules.items() if each is named and _has_matrix(each)}
    return WordLayers(tables, declared or tied or sized, sized)


def _makes_weight(module: nn.Module) -> bool:
    """Whether a module makes its weight when it is read: of the layer that it adapts, or by a parametrization, which
    may change buffers."""
    return isinstance(getattr(type(module), "weight", None), property)


def _outputs_of(layer: nn.Linear) -> int:
    return layer.out_features if _makes_weight(layer) else layer.weight.shape[0]


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module has a `weight` of two dimensions itself, unlike an adapter around a layer."""
    if _makes_weight(module):
        return False
    weight: object = getattr(module, "weight", None)  # also one of another stage
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Sum the bits of tensors to an integer of 64 bits, for ranks to compare. Waits for each device once."""
    sums = checksums(tensors)
    # odd weights by position: values that two tensors have swapped do not cancel
    return sum(sums[name] * (2 * at + 1) for at, name in enumerate(sorted(sums))) % 2**64 - 2**63


def checksums(tensors: Mapping[str, torch.Tensor], *, by_position: bool = False) -> dict[str, int]:
    """Sum the bits of each tensor; see `checksum`. With `by_position`, which takes four times as long, a sum also
    depends on the order of the elements."""
    words = [_bits(tensor) for tensor in tensors.values()]
    if by_position:
        columns = {device: _weights(0, _COLUMNS, device) for device in {each.device for each in words}}
        sums = [_weighted_sum(each, columns[each.device]) for each in words]
    else:
        sums = [each.sum(dtype=torch.int64) for each in words]
    kinds: dict[torch.device, list[int]] = {}
    for at, each in enumerate(sums):
        kinds.setdefault(each.device, []).append(at)
    found = [0] * len(sums)
    for places in kinds.values():
        # one wait for each device, however many tensors it has
        values = integers(torch.stack([sums[at] for at in places]))
        for at, value in zip(places, values, strict=True):
            found[at] = value
    return dict(zip(tensors, found, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if tensor.device.type == "xla":  # TPUs have no words of 64 bits
        tensor = tensor.cpu()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.nbytes % 8 == 0:  # eight times as fast as words that have to be widened
        aligned = flat.storage_offset() * flat.element_size() % 8 == 0
        return (flat if aligned else flat.clone()).view(torch.int64)
    return flat.view(words.get(flat.element_size(), torch.int64))


def _weighted_sum(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sum words times weights of their positions, which are products of a row's and a column's weight."""
    even = len(words) - len(words) % _COLUMNS
    most = _ROWS if words.device.type == "cpu" else 64 * _ROWS  # fewer calls
    pieces = [*torch.split(words[:even].view(-1, _COLUMNS), most), words[None, even:]]
    # of all pieces: new memory would take most of the time
    shape = max(1, min(most, even // _COLUMNS)), min(_COLUMNS, len(words))
    memory = torch.empty(shape, dtype=torch.int64, device=words.device)
    sums = torch.cat([_weighted(each, columns, memory).sum(1) for each in pieces])
    return (sums * _weights(_COLUMNS, len(sums), words.device)).sum()


def _weighted(words: torch.Tensor, columns: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Multiply words by weights. The upper half of a word of 64 bits first changes the lower one, because a product
    loses most of the upper bits."""
    rows, width = words.shape
    out = memory[:rows, :width]
    if words.dtype != torch.int64:
        return torch.mul(words, columns[:width], out=out)
    torch.bitwise_right_shift(words, 32, out=out)
    return out.bitwise_and_(_LOWER).bitwise_xor_(words).mul_(columns[:width])


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits for positions, mixed so that two sums of some of them hardly ever agree."""
    mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47  # as splitmix64
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1
