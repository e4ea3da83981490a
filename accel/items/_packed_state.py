# SPDX-License-Identifier: Apache-2.0
"""State of optimizers that is no plain tensor by parameter: blocks of codes of torchao, shares of torch's ZeRO,
objects, and values that torch's load would change; and the change that puts a loaded state into an optimizer, which
keeps its own flags of performance."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from accel.checkpoint._records import is_record_class
from accel.errors import CheckpointError
from accel.errors._checks import import_extra
from accel.items._source import StateChange
from accel.storage import dtype_name
from accel.tensors import dtensor_like, is_dtensor, local_part, parameters_of

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# torchao exports no names of these classes.
PRIVATE: Mapping[str, str] = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KIND = "torchao"  # key of the class's name in a stored state
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_FLAT = ("codes", "scale")  # parts with an element for each element or block of the parameter, in its order


def take_apart(entries: Any, path: str) -> Any:
    """Return a parameter's state with each packed tensor as a dict of its parts. No communication."""
    if not isinstance(entries, dict):
        return entries
    return {
        key: _parts(value, f"{path}.{key}") if _is_packed(value) else value
        for key, value in cast("dict[str, Any]", entries).items()
    }


def put_together(entries: Any, parameter: torch.Tensor, path: str) -> Any:
    """Return a parameter's state with packed tensors made of their parts, this rank's share as the live parameter has
    it. No communication."""
    if not isinstance(entries, dict):
        return entries
    return {
        key: _made(cast("dict[str, Any]", value), parameter, f"{path}.{key}") if is_parts(value) else value
        for key, value in cast("dict[str, Any]", entries).items()
    }


def packed_of(entries: object) -> list[object]:
    """Return what a parameter's stored state holds in parts."""
    held = cast("dict[str, object]", entries).values() if isinstance(entries, dict) else ()
    return [value for value in held if is_parts(value)]


def is_parts(value: object) -> bool:
    """Return whether a stored value is a packed tensor's, in parts."""
    return isinstance(value, dict) and cast("dict[str, Any]", value).get(_KIND) in PRIVATE


def _is_packed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and PRIVATE.get(type(local_part(value)).__name__) is not None


def _parts(value: torch.Tensor, path: str) -> dict[str, Any]:
    part: Any = local_part(value)
    found: dict[str, Any] = {_KIND: type(part).__name__, "dtype": dtype_name(part.dtype)}
    for name in part.tensor_attrs:
        tensor: torch.Tensor = getattr(part, name)
        found[name] = _spread(tensor, value, path) if name in _FLAT and is_dtensor(value) else tensor
    return found | ({"signed": part.signed} if hasattr(part, "signed") else {})


def _spread(part: torch.Tensor, whole: Any, path: str) -> torch.Tensor:
    """Return a rank's codes or scales as its share of a tensor of all ranks."""
    ranks = _row_ranks(whole, path)
    return dtensor_like(part, whole, torch.Size((ranks * part.shape[0], *part.shape[1:])))


def _row_ranks(whole: Any, path: str) -> int:
    """Return the number of ranks that share the rows of a DTensor; raises where they do so unevenly, or in another
    way."""
    shares = [whole.device_mesh.size(at) for at, each in enumerate(whole.placements) if each.is_shard()]
    by_rows = all(each.is_replicate() or each.is_shard(0) for each in whole.placements)
    ranks = shares[0] if shares else 1
    if not by_rows or len(shares) > 1 or whole.shape[0] % ranks:
        raise CheckpointError(
            "blocks of quantized state are divided between ranks",
            expected="rows that the ranks share evenly",
            got=f"{tuple(whole.shape)} by {whole.placements}",
            where=path,
            fix="Choose sizes that the number of ranks divides, or an optimizer with a state in full precision.",
        )
    return ranks


def _made(stored: dict[str, Any], parameter: torch.Tensor, path: str) -> torch.Tensor:
    kind = stored[_KIND]
    local = local_part(parameter)
    parts = {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
    dtype = getattr(torch, str(stored.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or any(name not in parts or not parts[name].dim() for name in _FLAT):
        raise CheckpointError(f"the parts of {kind} are not valid", got=", ".join(sorted(stored)), where=path)
    if is_dtensor(parameter):
        place, ranks = _row_place(parameter, path)
        parts = {name: _share(value, place, ranks, path) if name in _FLAT else value for name, value in parts.items()}
    parts = {name: local_part(value).to(local.device) for name, value in parts.items()}
    facts: list[object] = [dtype]
    if "signed" in stored:
        facts = [stored["signed"], *([local.shape] if kind == "OptimState4bit" else []), *facts]
    try:
        made = _class_of(kind).__tensor_unflatten__(parts, facts)
    except (TypeError, ValueError, KeyError, AssertionError, ArithmeticError) as error:
        raise CheckpointError(f"the parts of {kind} are not valid: {error}", where=path) from error
    return made if not is_dtensor(parameter) else dtensor_like(made, parameter, parameter.shape)


def _row_place(parameter: Any, path: str) -> tuple[int, int]:
    """Return this rank's place among those that share a parameter's rows, and their number."""
    ranks = _row_ranks(parameter, path)
    coordinate = parameter.device_mesh.get_coordinate()
    dims = [at for at, each in enumerate(parameter.placements) if each.is_shard()]
    return (coordinate[dims[0]] if dims else 0), ranks


def _share(tensor: torch.Tensor, place: int, ranks: int, path: str) -> torch.Tensor:
    """Return a rank's part of codes or scales, which may be its part already."""
    if is_dtensor(tensor) and any(each.is_shard() for each in tensor.placements):
        return tensor
    whole = local_part(tensor)
    if whole.shape[0] % ranks:
        raise CheckpointError(
            "blocks of quantized state are divided between ranks",
            expected=f"a number of blocks that {ranks} ranks divide",
            got=f"{whole.shape[0]}",
            where=path,
            fix="Load on a number of ranks that divides it, or leave out the optimizer with None.",
        )
    return whole.chunk(ranks)[place].clone()


def _class_of(kind: str) -> Any:
    package = import_extra(PRIVATE[kind], "quantized optimizer state", extra="torchao", where="load_state")
    return getattr(package, kind)


_OBJECT = "accel.object"  # key of the class's name in the stored fields of an object
_FIELDS = "fields"
_SEQUENCES: frozenset[type[Any]] = frozenset((list, tuple))

Classes = Mapping[str, type]


def classes_of(optimizer: object) -> dict[str, type]:
    """Return the classes that an optimizer's own modules define or import, by name: its state holds objects of them."""
    found = dict[str, type]()
    for kind in reversed(type(optimizer).__mro__):
        if kind.__module__ != "builtins" and not kind.__module__.startswith("torch."):
            held = vars(sys.modules[kind.__module__]).values() if kind.__module__ in sys.modules else ()
            found |= {each.__qualname__: each for each in held if isinstance(each, type)}
    return found


def flatten_objects(value: Any, classes: Classes) -> Any:
    """Return a state with each object of a plain class among `classes` as a dict of its fields and its class's name."""
    kind = cast("type[Any]", type(value))
    if kind is dict:
        return {key: flatten_objects(each, classes) for key, each in value.items()}
    if kind in _SEQUENCES:
        return kind(flatten_objects(each, classes) for each in value)
    if classes.get(kind.__qualname__) is kind and is_plain(kind):
        return {_OBJECT: kind.__qualname__, _FIELDS: flatten_objects(vars(value), classes)}
    return value


def objects_together(value: Any, classes: Classes, path: str) -> Any:
    """Return a state with the objects that `flatten_objects` flattened, made without a call of their constructor."""
    kind = cast("type[Any]", type(value))
    if kind in _SEQUENCES:
        return kind(objects_together(each, classes, path) for each in value)
    if kind is not dict:
        return value
    made = {key: objects_together(each, classes, path) for key, each in value.items()}
    if made.keys() != {_OBJECT, _FIELDS}:
        return made
    found = classes.get(str(made[_OBJECT]))
    if found is None or not is_plain(found) or not isinstance(made[_FIELDS], dict):
        raise CheckpointError(
            "the state holds an object of a class that is not known",
            expected=f"a class {made[_OBJECT]} in the module of the optimizer",
            got="no such class",
            where=path,
            fix="Import the class in the module that defines the optimizer.",
        )
    new: Any = object.__new__(cast("type[Any]", found))
    new.__dict__.update(made[_FIELDS])
    return new


def objects_in(value: object, keys: Set[object] = frozenset({_OBJECT})) -> list[object]:
    """Return the objects flattened in a state, or in an encoded one; or dicts with one of other keys."""
    if isinstance(value, dict):
        held = cast("dict[object, object]", value)
        return [value] if keys & held.keys() else [found for each in held.values() for found in objects_in(each, keys)]
    listed = cast("list[object]", value) if isinstance(value, list | tuple) else []
    return [found for each in listed for found in objects_in(each, keys)]


def unspread_in(encoded: object) -> list[object]:
    """Return the parts of an encoded state with tensors that are never sharded as a parameter: objects, numpy arrays,
    states of generators."""
    return objects_in(encoded, frozenset({_OBJECT, "$array", "$generator"}))


def is_plain(kind: type) -> bool:
    """Return whether an object of a class is its `__dict__`, also for python's `copy`."""
    methods = ("__reduce_ex__", "__reduce__", "__new__", "__getstate__", "__setstate__", "__del__")
    inherited = all(getattr(kind, name, None) is getattr(object, name, None) for name in methods)
    slots = any(getattr(each, "__slots__", ()) for each in kind.__mro__)
    return inherited and not slots and kind.__dictoffset__ != 0 and not is_record_class(kind)


class _Uncast:
    """A value that torch's `load_state_dict` passes on, as it is neither a tensor nor iterable."""

    def __init__(self, value: object) -> None:
        self.value = value


def uncast(value: Any) -> Any:
    """Return a state for torch's `load_state_dict`, which would make another text of a text, and fails for arrays."""
    kind = cast("type[Any]", type(value))
    if value is None or isinstance(value, torch.Tensor | bool | int | float | complex):
        return cast(Any, value)
    if kind is dict:
        return {key: uncast(each) for key, each in value.items()}
    if kind in _SEQUENCES:
        return kind(uncast(each) for each in cast("list[Any]", value))
    return _Uncast(value)


def restored(value: Any, live: Any) -> Any:
    """Return a loaded state with the values of `uncast`, and with its dtypes: torch casts floating state to the
    parameter's dtype, which loses bits."""
    if isinstance(value, _Uncast):
        return value.value
    if isinstance(value, torch.Tensor):
        narrowed = isinstance(live, torch.Tensor) and live.dtype != value.dtype
        return value.to(cast(torch.Tensor, live).device) if narrowed else live
    kind = cast("type[Any]", type(value))
    if type(live) is not kind:
        return live
    if kind is dict:
        return {key: restored(value.get(key, each), each) for key, each in live.items()}
    if kind in _SEQUENCES and len(live) == len(value):
        return kind(restored(*pair) for pair in zip(value, live, strict=True))
    return live


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether an optimizer is a `ZeroRedundancyOptimizer`. No communication."""
    module = sys.modules.get(_ZERO)  # its import takes long
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with the state: inside a `ZeroRedundancyOptimizer` this rank's, else the optimizer
    itself."""
    if not is_zero(optimizer):
        return optimizer
    if optimizer._overlap_with_ddp:
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be saved or loaded",
            fix="Build it without overlap_with_ddp, or shard the model by fully_shard.",
        )
    return optimizer.optim


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state in torch's form, of all groups and of this rank's parameters."""
    local = local_optimizer(optimizer)
    packed = local.state_dict()
    place = _places(optimizer)
    mine = [place[id(parameter)] for parameter in parameters_of([local])]
    return packed | {
        "state": {mine[at]: entries for at, entries in packed["state"].items()},
        "param_groups": _indexed(optimizer.param_groups, place),
    }


def load_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load this rank's part of a state in torch's form. Mutates the optimizer; groups are replaced."""
    local = local_optimizer(optimizer)
    params = parameters_of([optimizer])
    place = _places(local)
    entries = cast("dict[int, Any]", state["state"])
    options = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    mine = {place[id(params[at])]: each for at, each in entries.items() if id(params[at]) in place}
    groups = [old | new for old, new in zip(_indexed(local.param_groups, place), options, strict=True)]
    local.load_state_dict(state | {"state": mine, "param_groups": groups})
    optimizer.param_groups = [old | new for old, new in zip(optimizer.param_groups, options, strict=True)]


def _places(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {id(parameter): at for at, parameter in enumerate(parameters_of([optimizer]))}


def _indexed(groups: list[dict[str, Any]], place: dict[int, int]) -> list[dict[str, Any]]:
    params = [group["params"] for group in groups]
    return [group | {"params": [place[id(each)] for each in of]} for group, of in zip(groups, params, strict=True)]


# They choose a kernel and not a result, so that they are the script's.
_FLAGS = ("fused", "foreach", "capturable", "differentiable")


def with_own_flags(live: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a state in torch's form with the live groups' flags of performance, and a line for each difference."""
    lines = dict[str, None]()
    groups = list[dict[str, Any]]()
    for stored, group in zip(state["param_groups"], live.param_groups, strict=True):
        own = {key: group[key] for key in _FLAGS if key in group}
        for key, value in own.items():
            if key in stored and stored[key] != value:
                lines[f"{key}={value} of the script stays; the checkpoint has {stored[key]}"] = None
        groups.append({**stored, **own})
    return {**state, "param_groups": groups}, list(lines)


def optimizer_change(
    where: str, live: torch.optim.Optimizer, wrapper: torch.optim.Optimizer, state: dict[str, Any]
) -> StateChange:
    """Return the change that puts a state in torch's form into an optimizer; `live` is the one inside of the passed
    `wrapper`."""
    states = cast("dict[Any, Any]", state["state"])
    # torch casts the state of parameters alone, which has their positions
    entries = {key: uncast(each) if type(key) is int else each for key, each in states.items()}
    guarded = state | {"state": entries}
    both = {id(each): each for each in (live, local_optimizer(live))}.values()
    before = [(each, {"state": each.state, "param_groups": each.param_groups}) for each in both]

    def apply() -> None:
        if is_zero(live):
            load_state_dict(live, guarded)
        else:
            live.load_state_dict(guarded)
        _restore_values(live, entries)
        _follow(wrapper)

    def undo() -> None:
        for optimizer, held in before:  # a load replaces these, and never changes them
            optimizer.__dict__.update(held)
        _follow(wrapper)

    return StateChange(where, apply, undo)


def _restore_values(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """Restore what torch's load changed, and what `uncast` kept from it. Mutates the state."""
    params = dict(enumerate(parameters_of([optimizer])))
    held = local_optimizer(optimizer).state
    for index, entries in state.items():
        if (parameter := params.get(index)) is not None and parameter in held:  # else another rank holds it
            held[parameter] = restored(entries, held[parameter])


def _follow(wrapper: object) -> None:
    """Update references of an optimizer's wrappers to its state. Mutates them."""
    held = getattr(wrapper, "optimizer", None)
    if isinstance(wrapper, torch.optim.Optimizer) and isinstance(held, torch.optim.Optimizer):
        _follow(held)
        for name in vars(wrapper).keys() & {"state", "param_groups"}:
            vars(wrapper)[name] = getattr(held, name)
