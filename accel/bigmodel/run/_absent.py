# SPDX-License-Identifier: Apache-2.0
"""A weight that is not in memory: a tensor of true shape, dtype and device that fetches itself where it is used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only  # pyright: ignore[reportUnknownVariableType]

from accel.comm import fills
from accel.errors import StreamError
from accel.tensors import dtensor_of, is_absent, is_dtensor


def refuse_copy(name: str) -> NoReturn:
    """Raise `StreamError` for the copy of a model; `name` is a weight or block that is not in memory."""
    raise StreamError(
        "a weight that is not in memory cannot be copied with its model",
        where=name,
        fix="Copy the model before dispatch_model or after run.close(); weight.clone() copies one weight.",
    )


def refuse_pickle(name: str, what: str = "a weight that is not in memory") -> NoReturn:
    """Raise `StreamError` for the pickle of a model; `what` is the part of it that is met first."""
    raise StreamError(
        f"{what} cannot be pickled",
        where=name,
        fix="Save with accel.save_model(ctx, run.model, folder), or the tensors of run.tensors() one by one.",
    )


_STATISTICS = ("running_mean", "running_var")  # arguments that batch norms update, and that no schema marks
_APPLY_DEPTH = 8  # frames between an operator and the `Module._apply` that asks for it, and some to spare

_Kind = Literal["compute", "view", "views", "alias", "write", "statistics", "collective"]


class Origin(Protocol):
    """The place that an absent weight's values come from."""

    name: str

    @property
    def is_closed(self) -> bool:
        """Whether the model is no longer dispatched."""
        ...

    def values(self) -> torch.Tensor:
        """Return the values on the computing device; the memory may last no longer than the block that now runs."""
        ...

    def rows(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return rows, of shape [*index.shape, *weight.shape[1:]]; None where the whole weight is to be fetched."""
        ...

    def stored(self) -> torch.Tensor:
        """Return the values on the host: the memory that has them, or a copy."""
        ...


class AbsentTensor(torch.Tensor):
    """A tensor without memory; an operator that reads it gets the values, and a view of it is absent too.

    What autograd saves of such a view holds no memory either, and the backward pass fetches the values again.
    """

    origin: Origin  # the place of the values
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]  # the views that lead from the weight to this tensor

    # torch's default would turn the results of functions into this class
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(
        cls: type[AbsentTensor],
        like: torch.Tensor,
        origin: Origin,
        device: torch.device,
        steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
    ) -> AbsentTensor:
        made = cast(Any, torch.Tensor)._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
            requires_grad=like.requires_grad,
        )
        cast(Any, torch)._C._set_throw_on_mutable_data_ptr(made)  # kernels that no method leads to would read address 0
        made.origin = origin
        made.steps = steps
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"AbsentTensor({self.origin.name!r}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same tensor, unknown to autograd."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Refuse other values, which torch would drop silently; `module.to()` to the same device gives these."""
        if not isinstance(values, AbsentTensor) or (values.origin, values.steps) != (self.origin, self.steps):
            _refuse_write("an assignment to .data", self)

    def present(self) -> torch.Tensor:
        """Return the values; the memory may last no longer than the block that now runs."""
        return _apply(self.steps, self.origin.values())

    def stored(self) -> torch.Tensor:
        """Return the values on the host: the memory that has them, or a copy."""
        return _apply(self.steps, self.origin.stored())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "write":
            _refuse_writes(func, args, kwargs)
        elif kind == "statistics":
            _refuse_statistics(func, args, kwargs)
        elif kind == "collective" and fills(func, args):
            _refuse_write(func, args[0])
        # A view needs no values: it is noted, and repeated on them when something reads it.
        elif kind == "view" and isinstance(args[0], AbsentTensor):
            return _view(func, args[0], args[1:], kwargs)
        elif kind == "views" and isinstance(args[0], AbsentTensor):
            return _views(func, args[0], args[1:], kwargs)
        elif func is torch.ops.aten.embedding.default:
            rows = _gathered(args[0], args[1])
            if rows is not None:
                return rows
        elif func in (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default):
            _refuse_apply(args[0])
            if _is_cast_by_autocast(func, args, kwargs):
                return _view(func, args[0], (), kwargs)
        # a result that shares the slot's memory would change with it, and a send may read it after the call
        fetch = _own if kind in ("alias", "collective") else AbsentTensor.present
        found_args, found_kwargs = cast(Any, tree_map_only)(AbsentTensor, fetch, (args, kwargs))
        return func(*found_args, **found_kwargs)

    def untyped_storage(self) -> NoReturn:
        """Refuse: safetensors and save_pretrained of transformers ask for it."""
        self._refuse()

    def storage(self) -> NoReturn:
        """Refuse, as `untyped_storage`."""
        self._refuse()

    def data_ptr(self) -> NoReturn:
        """Refuse: a kernel would be given the address 0."""
        self._refuse()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the array would have no memory."""
        self._refuse()

    def tolist(self) -> NoReturn:
        """Refuse, as `numpy`."""
        self._refuse()

    def __dlpack__(self, **_: object) -> NoReturn:
        """Refuse: `from_dlpack` of torch and others would read the address 0."""
        self._refuse()

    def __dlpack_device__(self) -> NoReturn:
        """Refuse, as `__dlpack__`."""
        self._refuse()

    def _use_count(self) -> NoReturn:
        """Refuse: torch.utils.swap_tensors asks for it, before it gives the weight another class and other values."""
        raise StreamError(
            "a weight that is not in memory cannot be swapped with another tensor",
            got="torch.utils.swap_tensors",
            where=self.origin.name,
            fix="Keep its segment on the device that computes, or change the model before dispatch_model.",
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self.origin.name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(self.origin.name)

    def _refuse(self) -> NoReturn:
        raise StreamError(
            "a weight that is not in memory has no address, as save_pretrained, save_file and kernels want it",
            where=self.origin.name,
            fix="weight.detach().clone() has memory. Save with accel.save_model(ctx, model, folder) and "
            "model.config.save_pretrained(folder), which from_pretrained reads.",
        )


def absent_parameter(like: torch.Tensor, origin: Origin, device: torch.device) -> torch.Tensor:
    """Return an absent tensor of a weight's shape, dtype and strides, a Parameter where the weight is one."""
    absent = AbsentTensor(like, origin, device)
    if not isinstance(like, nn.Parameter):
        return absent
    return nn.Parameter(absent, requires_grad=like.requires_grad)


def in_form_of(before: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form of another: this rank's part as a DTensor, and as a Parameter."""
    if is_dtensor(before) and not is_dtensor(tensor):
        tensor = dtensor_of(tensor, before)
    if isinstance(before, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=before.requires_grad)
    return tensor


def may_hold_statistics(tensor: torch.Tensor) -> bool:
    """Return whether a batch norm may update a tensor: a vector that is no parameter."""
    return tensor.dim() == 1 and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


def refuse_load(module: nn.Module, state_dict: Mapping[str, object], prefix: str, *_: object) -> None:
    """Refuse a state dict with values for absent weights; a hook of torch's, called before `load_state_dict`."""
    absent = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if is_absent(tensor) and f"{prefix}{name}" in state_dict
    ]
    if absent:
        raise StreamError(
            "weights that are not in memory cannot be loaded into",
            got=f"values for {len(absent)} of them",
            where=f"load_state_dict, {prefix}{absent[0]}",
            fix="Load before dispatch_model or after run.close(), or give the values as dispatch_model(source=...).",
        )


def _view(func: Any, absent: AbsentTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbsentTensor:
    """Return the view that an operator makes, absent; shape and strides are found without memory."""
    if func is torch.ops.aten.detach.default:  # as for each Parameter: all of it, in its own shape
        with torch.inference_mode(
            False
        ):  # torch gives it the version counter of the weight, which is no inference tensor
            return AbsentTensor(_blank(absent), absent.origin, absent.device, absent.steps)
    blank = _blank(absent)
    step = functools.partial(_call, func, tuple(args), dict(kwargs))
    return AbsentTensor(func(blank, *args, **kwargs), absent.origin, absent.device, (*absent.steps, step))


def _views(func: Any, absent: AbsentTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[AbsentTensor]:
    """Return the views that an operator such as `split` makes, absent, so that writes to them are refused too."""

    def step(at: int, tensor: torch.Tensor) -> torch.Tensor:
        return func(tensor, *args, **kwargs)[at]

    parts = cast("list[torch.Tensor]", func(_blank(absent), *args, **kwargs))
    return [
        AbsentTensor(each, absent.origin, absent.device, (*absent.steps, functools.partial(step, at)))
        for at, each in enumerate(parts)
    ]


def _blank(absent: AbsentTensor) -> torch.Tensor:
    return torch.empty_strided(absent.shape, absent.stride(), dtype=absent.dtype, device="meta")


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    return func(tensor, *args, **kwargs)


def _apply(steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], tensor: torch.Tensor) -> torch.Tensor:
    for step in steps:
        tensor = step(tensor)
    return tensor


def _own(absent: AbsentTensor) -> torch.Tensor:
    return absent.present().clone()


def _gathered(table: object, index: object) -> torch.Tensor | None:
    """Return rows of an absent table, without moving the rest; None where all of it is needed."""
    if isinstance(table, AbsentTensor) and not table.steps and isinstance(index, torch.Tensor):
        return table.origin.rows(index)
    return None


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator that changes an absent tensor in place: the change would be lost."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[at] if at < len(args) else kwargs.get(argument.name)
        _refuse_write(func, target)


def _refuse_statistics(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an update of running statistics that are absent, which torch's schemas do not declare as a write."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("training", True):
        for name in _STATISTICS:
            _refuse_write(func, given.get(name))


def _refuse_write(func: object, target: object) -> None:
    if isinstance(target, list | tuple):  # operators on lists of tensors, such as optimizers' with foreach= or fused=
        for each in cast("Sequence[object]", target):
            _refuse_write(func, each)
    if isinstance(target, AbsentTensor):
        raise StreamError(
            "a weight that is not in memory cannot be changed in place",
            got=str(func),
            where=target.origin.name,
            fix="Keep its segment on the device that computes, or change the model before dispatch_model.",
        )


def _refuse_apply(absent: object) -> None:
    """Refuse `module.to()` and its like, which would fetch a whole model and keep it; one weight may be copied."""
    # An operator does not know its caller, so `Module._apply` is looked for in the frames above.
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    moves = cast(Any, nn.Module)._apply.__code__
    for _ in range(_APPLY_DEPTH):
        if frame.f_code is moves and isinstance(absent, AbsentTensor):
            raise StreamError(
                "a model with weights elsewhere cannot be moved or cast",
                where=absent.origin.name,
                fix="Give devices and dtypes by the device map, or change the model before dispatch_model.",
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _is_cast_by_autocast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether autograd or the cache of autocast would keep a cast, and so one of each weight of the model."""
    alone = isinstance(args[0], AbsentTensor) and [*kwargs] == ["dtype"] and func is torch.ops.aten._to_copy.default
    if not alone or not torch.is_grad_enabled():
        return False
    depth = cast(int, cast(Any, torch).autocast_increment_nesting())  # no other way to ask below autocast
    cast(Any, torch).autocast_decrement_nesting()
    return depth > 1


@functools.lru_cache(maxsize=1024)
def _kind(func: Any) -> _Kind:
    """Return the way in which an operator treats the memory of its arguments."""
    # Asked for every operator of every call, hence cached; schemas do not change.
    schema = func._schema
    if schema.is_mutable:
        return "write"
    if schema.name.startswith("c10d::"):  # their schemas mark nothing that they write
        return "collective"
    if func is torch.ops.aten._unsafe_view.default:  # shares memory, although it reports that it does not
        return "view"
    if _STATISTICS[0] in [each.name for each in schema.arguments] and not schema.name.endswith("_backward"):
        return "statistics"
    if all(each.alias_info is None for each in schema.returns):
        return "compute"
    kinds: dict[str, _Kind] = {"Tensor": "view", "List[Tensor]": "views"}
    return kinds.get(str(schema.returns[0].type), "alias") if len(schema.returns) == 1 else "alias"
