# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on this rank's part of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from accel.comm import (
    ThreadGroup,
    copied,
    exchanged,
    gathered,
    own_part,
    summed,
)
from accel.devices import autocast_dtype
from accel.errors import PrepareError
from accel.mixins import Mixin
from accel.parallel._labels import name_of
from accel.parallel._local import local_of
from accel.parallel._modules import RANKS, KeepsParameters, forget, note_module, notes_of
from accel.parallel._private import runs_in_backward
from accel.parallel.axes.tensor._heads import with_own_heads
from accel.parallel.axes.tensor._overlap import (
    copied_product,
    gathered_product,
    is_beside,
    scattered_product,
    summed_product,
)
from accel.parallel.axes.tensor._styles import (
    COLWISE,
    ROWWISE,
    RowExchange,
    Rule,
    is_transposed,
    output_dim,
    part_length,
    row_exchange,
)
from accel.parallel.parts import PartTensor, leave, make, plain_of
from accel.parallel.parts._layout import no_rule
from accel.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from accel.parallel.axes.tensor._tokens import SequenceRanks


class EarlyProduct(NamedTuple):
    """Outputs of a column-wise layer that are there before its call."""

    input: torch.Tensor  # of the call
    format: torch.dtype | None  # of autocast
    output: torch.Tensor | None  # to return; None after the call


class Layer:
    """The rule of a module, and the ranks along tp that it shares its work with. Copies and pickles share the mesh.

    Attributes:
        rule: of the module.
        mesh: of one axis, tp.
        group: of the ranks along tp.
        rank: of this rank along tp.
        exchange: rows to exchange before the module computes; None where it computes with those that are stored.
    """

    __slots__ = ("exchange", "group", "mesh", "rank", "rule")

    def __init__(self, rule: Rule, mesh: DeviceMesh) -> None:
        self.rule = rule
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.exchange: RowExchange | None = row_exchange(rule.rows, rule.needed, self.rank) if rule.needed else None

    @property
    def size(self) -> int:
        """Number of ranks along tp."""
        return self.group.size()

    def __deepcopy__(self, memo: object) -> Layer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Layer, (self.rule, self.mesh)


class GroupLayer(Layer):
    """A layer of a group that is no part of a mesh, of threads."""

    __slots__ = ()

    def __init__(self, rule: Rule, group: ThreadGroup) -> None:
        self.rule = rule
        self.group = cast(Any, group)
        self.rank = group.rank()
        self.exchange = row_exchange(rule.rows, rule.needed, self.rank) if rule.needed else None


class LocalParameters(KeepsParameters):
    """Computes with the local parts of its parameters."""

    accel_layer: Layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        rule = self.accel_layer.rule
        if rule.shares:
            args, kwargs = with_own_heads(rule, self.accel_layer.group, args, kwargs)
        if rule.summands:
            args = tuple(_divided(self, each) for each in args)
        own = cast(Any, self).__dict__
        stored = own["_parameters"]
        own["_parameters"] = self.parameters_here(stored)
        try:
            return super().forward(*args, **kwargs)
        finally:
            own["_parameters"] = stored

    def __getattr__(self, name: str) -> Any:
        """Return a local part in the place of a parameter that is read outside of the forward."""
        value = cast(Any, super().__getattr__(name))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if isinstance(value, nn.Parameter) and self.is_read_local(value):
            return self.parameters_here({name: value})[name]
        return value

    def is_read_local(self, parameter: nn.Parameter) -> bool:
        """Return whether who reads a parameter outside of the forward gets its local part.

        A backward does, as a checkpoint runs a method of the module again; its hooks, without gradients, do not.
        `fully_shard` asks for what it has sharded.
        """
        return _is_along_one_axis(parameter) and is_computed_again()

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return the tensors that forward uses in place of the parameters."""
        rule = self.accel_layer.rule
        return {name: None if each is None else local(each, rule) for name, each in stored.items()}


class ReadParameters(LocalParameters):
    """A module with parameters that others read without calling it."""

    def is_read_local(self, parameter: nn.Parameter) -> bool:
        """Return whether `fully_shard` has not sharded it."""
        return _is_along_one_axis(parameter)


class ReadList(ReadParameters):
    """A list of parameters. torch would make its slices lists of copies."""

    def __getitem__(self, index: Any) -> Any:
        """Return the tensor at an index, or a list of the tensors of a slice."""
        own: Any = super()
        if isinstance(index, slice):
            return [own.__getitem__(at) for at in range(*index.indices(len(cast(Any, self))))]
        return own.__getitem__(index)


class Colwise(LocalParameters):
    """A column-parallel linear layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's outputs, or all of them where the style gathers them."""
        layer = self.accel_layer
        if is_beside(layer.rule):
            output = self._beside(_first(layer.rule, args, kwargs))
        else:
            change = partial(_divided if layer.rule.copied else entered, self)
            args, kwargs = _with_first(layer.rule, args, kwargs, change)
            output = super().forward(*args, **kwargs)
        if layer.rule.style != "colwise_gather_output":
            return output
        if not layer.rule.uneven:
            return gathered(output, -1, layer.group).contiguous()  # as models expect of their layers
        missing = part_length(layer.rule.uneven, layer.size) - output.shape[-1]
        padded = functional.pad(output, (0, missing))  # the last rank's, as messages are of one length
        return gathered(padded, -1, layer.group)[..., : layer.rule.uneven].contiguous()

    def _beside(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs, with messages that overlap with the matmuls."""
        if not self.accel_layer.rule.copied:
            return entered_product(self, x, *self.operands())[0]
        early: EarlyProduct | None = notes_of(cast(nn.Module, self)).get("early")
        if (
            early is None
            or early.output is None
            or early.input is not x
            or early.format != autocast_dtype(x.device.type)
        ):
            return super().forward(_divided(self, x))
        output = early.output
        note_module(cast(nn.Module, self), early=early._replace(output=None))
        return output

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight, [outputs, inputs], and bias of the rows that this rank computes with."""
        here = self.parameters_here(cast(Any, self)._parameters)
        weight = cast(torch.Tensor, here["weight"])
        return weight.t() if is_transposed(cast(nn.Module, self)) else weight, here.get("bias")

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return this rank's rows, after an exchange where it stores others than it needs."""
        layer = self.accel_layer
        here = super().parameters_here(stored)
        if layer.exchange is None:
            return here
        dim = output_dim(cast(nn.Module, self))
        weight = cast(torch.Tensor, here["weight"]).movedim(dim, 0)
        bias = here.get("bias")
        if bias is not None:
            weight = torch.cat([weight, bias[:, None]], 1)  # one message for both
        weight = needed_rows(weight, layer, layer.exchange)
        if bias is not None:
            here["bias"] = weight[:, -1]
            weight = weight[:, :-1]
        here["weight"] = weight.movedim(0, dim)
        return here


class Rowwise(LocalParameters):
    """A row-parallel linear layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the ranks' outputs: of all tokens, or of this rank's where ranks share them."""
        layer = self.accel_layer
        change = self._own_features if layer.rule.style == "rowwise_split_input" else partial(_divided, self)
        args, kwargs = _with_first(layer.rule, args, kwargs, change)
        ranks = _ranks_of_tokens(self)
        if is_beside(layer.rule):
            output = self._beside(_first(layer.rule, args, kwargs), ranks)
        else:
            output = super().forward(*args, **kwargs)
            output = summed(output, layer.group) if ranks is None else ranks.ended(output)
        bias = cast(Any, self)._parameters.get("bias")
        if bias is None:
            return output
        # the gradient is a sum over rows; for a single row it is the output's gradient itself
        is_sum = output.numel() > bias.numel()
        if ranks is None:
            return output + local_of(bias, summands=False, fresh=is_sum).to(output.dtype)
        own = local_of(bias, summands=True, fresh=is_sum).to(plain_of(output).dtype)
        return output + make(own, None, ranks)

    def _own_features(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.accel_layer
        is_part = isinstance(x, PartTensor) and x.ranks.group is layer.group  # others are parts of positions
        return own_part(leave(x) if is_part else x, -1, layer.group)

    def _beside(self, x: torch.Tensor, ranks: SequenceRanks | None) -> torch.Tensor:
        """The sum of the ranks' outputs, with messages that overlap with the matmul."""
        group = self.accel_layer.group
        weight = self._weight()
        if ranks is None:
            return summed_product(x, weight, group)
        shape = (*x.shape[:-1], len(weight))
        if ranks.scatters_evenly(shape):
            return ranks.scattered(shape, scattered_product(x, weight, group))
        return ranks.ended(functional.linear(x, weight))

    def _weight(self) -> torch.Tensor:
        """This rank's part of the weight, [outputs, inputs]."""
        weight = local(cast(Any, self)._parameters["weight"], self.accel_layer.rule)
        return weight.t() if is_transposed(cast(nn.Module, self)) else weight

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, torch.Tensor | None]:
        """Return the local parts without the bias, which is added to the sum."""
        bias = stored.get("bias")
        here = super().parameters_here({name: each for name, each in stored.items() if name != "bias"})
        if bias is not None and not isinstance(self, nn.Linear):
            return {**here, "bias": torch.zeros_like(local_part(bias))}  # others need not know of layers without one
        return {**here, "bias": None} if "bias" in stored else here


class Embedding(LocalParameters):
    """A row-sharded embedding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Return the embeddings of all ids on every rank."""
        layer = self.accel_layer
        ranks = _ranks_of_tokens(self)
        input = input if ranks is None else ranks.entered_whole(input)
        first, rows = _rows_here(cast(nn.Embedding, self), layer)
        at = input - first
        others = (at < 0) | (at >= rows)
        own = super().forward(at.masked_fill(others, 0))
        summand = own.masked_fill(others.unsqueeze(-1), 0)
        return summed(summand, layer.group) if ranks is None else ranks.ended(summand)

    @property
    def padding_idx(self) -> int | None:
        """The row without gradients among this rank's rows."""
        own = cast(Any, self).__dict__["padding_idx"]
        first, rows = _rows_here(cast(nn.Embedding, self), self.accel_layer)
        return own - first if own is not None and first <= own < first + rows else None


class Recurrent(LocalParameters):
    """A recurrent layer of torch, which computes with a list of its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward."""
        own = vars(self)
        stored = {name: own[name] for name in ("_parameters", "_flat_weights", "_flat_weight_refs")}
        here = self.parameters_here(stored["_parameters"])
        listed = [here.get(name) for name in own["_flat_weights_names"]]
        # without references torch does not make the list anew, which moves the memory of parameters on CUDA
        own.update(_parameters=here, _flat_weights=listed, _flat_weight_refs=[None] * len(listed))
        try:
            return super(LocalParameters, self).forward(*args, **kwargs)
        finally:
            own.update(stored)


class Around(Mixin):
    """A module that prepares its input for the modules inside of it."""

    accel_layer: Layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        layer = self.accel_layer
        if layer.rule.shares:
            args, kwargs = with_own_heads(layer.rule, layer.group, args, kwargs)
        first = self._first_product(_first(layer.rule, args, kwargs)) if is_beside(layer.rule) else None
        if first is None:
            if not layer.rule.copied:
                args, kwargs = _with_first(layer.rule, args, kwargs, lambda x: entered(self, x))
            return super().forward(*args, **kwargs)
        return self._beside(first, args, kwargs)

    def _first_product(self, x: torch.Tensor) -> Colwise | None:
        """The layer that overlaps its matmul with the messages of the input; None if no layer takes features of the
        input's width."""
        path = self.accel_layer.rule.early
        found = cast(Any, self).get_submodule(path) if path else None
        return found if found is not None and found.weight.shape[1 - output_dim(found)] == x.shape[-1] else None

    def _beside(self, first: Colwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward on an input with the first matmul already computed."""
        layer = self.accel_layer
        output, x = entered_product(self, _first(layer.rule, args, kwargs), *first.operands())
        args, kwargs = _with_first(layer.rule, args, kwargs, lambda _: x)
        layer = cast(nn.Module, first)
        note_module(layer, early=EarlyProduct(x, autocast_dtype(x.device.type), output))
        try:
            result = super().forward(*args, **kwargs)
            is_taken = cast(EarlyProduct, notes_of(layer).get("early")).output is None
        finally:
            forget(layer, "early")
        if not is_taken:
            raise _other_input(first)
        return result


def _divided(module: Any, x: Any) -> Any:
    """An input of a layer between others that divide the features: plain along tp, and not a part of tokens, as
    gradients of the layer's parameters would be summed twice. A part of positions along cp stays one."""
    if not isinstance(x, PartTensor) or x.ranks.group is not module.accel_layer.group:
        return x
    if x.division is not None:
        raise no_rule("a layer of divided features, of this rank's tokens")
    return plain_of(x)


def entered(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of divided layers as a plain tensor of all tokens; its gradient is summed over ranks."""
    ranks = _ranks_of_tokens(module)
    return copied(x, module.accel_layer.group) if ranks is None else ranks.entered_whole(x)


def entered_product(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's outputs of a layer, and its input as `entered` gives it, by messages that overlap with the
    matmul."""
    group = module.accel_layer.group
    ranks = _ranks_of_tokens(module)
    if ranks is None:
        return copied_product(x, weight, bias, group)
    rows = ranks.even_rows(x)
    if rows is not None:
        return gathered_product(rows, weight, bias, group)
    whole = ranks.entered_whole(x)
    return functional.linear(whole, weight, bias), whole


def _ranks_of_tokens(module: Any) -> SequenceRanks | None:
    """The ranks that share the tokens around a layer, while the model runs; None where each has all of them."""
    ranks: SequenceRanks | None = getattr(module, RANKS) if module.accel_layer.rule.tokens else None
    return ranks if ranks is not None and ranks.runs else None


def is_computed_again() -> bool:
    """Return whether a checkpoint computes a forward again, in a backward."""
    return runs_in_backward() and torch.is_grad_enabled()


def _is_along_one_axis(parameter: torch.Tensor) -> bool:
    return is_dtensor(parameter) and parameter.device_mesh.ndim == 1


def local(parameter: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return this rank's part of a parameter, from which gradients flow back to the whole."""
    return local_of(parameter, summands=rule.summands, fresh=rule.fresh)


def needed_rows(stored: torch.Tensor, layer: Layer, exchange: RowExchange) -> torch.Tensor:
    """Return the rows, [rows, ...], that this rank computes with, from those that ranks store. A collective, as its
    backward."""
    sent = torch.cat(exchange.sent.of(stored))
    rows = exchanged(sent, exchange.to, exchange.back, layer.group)
    return rows if exchange.places is None else torch.cat(exchange.places.of(rows))


def _other_input(first: Colwise) -> PrepareError:
    weight = cast(Any, first)._parameters["weight"]
    return PrepareError(
        "a layer does not take the input of the module around it, so its matmul cannot overlap that module's messages",
        expected="the first argument of the module, unchanged",
        got=f"another tensor or dtype, or no call, for the layer of {name_of(weight) or type(first).__name__}",
        where="forward, plan.overlap",
        fix="Leave overlap out: plan=accel.parallel.Plan(overlap=False).",
    )


def mixin_for(rule: Rule) -> type[LocalParameters | Around]:
    """Return the class to put before the class of a module with a rule."""
    if rule.style in COLWISE:
        return Colwise
    if rule.style in ROWWISE:
        return Rowwise
    return {
        "embedding_rowwise": Embedding,
        "replicated_local": ReadParameters,
        "copy_input": Around,
    }.get(rule.style, LocalParameters)


def _rows_here(embedding: nn.Embedding, layer: Layer) -> tuple[int, int]:
    """This rank's first row, and the number of its rows."""
    most = part_length(embedding.num_embeddings, layer.size)
    return layer.rank * most, min(most, embedding.num_embeddings - layer.rank * most)


def _first(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs[rule.first]


def _with_first(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with another first one."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, rule.first: change(kwargs[rule.first])}
