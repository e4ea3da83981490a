# SPDX-License-Identifier: Apache-2.0
"""Forward passes of sharded experts: tokens are sent to the ranks that hold them, and outputs are sent back."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel.comm import exchanged, gathered, own_part
from accel.errors import ConfigError, PrepareError
from accel.mixins import Mixin
from accel.parallel._modules import written_class
from accel.parallel._private import outside_of_checkpoints
from accel.parallel.axes.experts._expert_plan import EP
from accel.parallel.parts._local_map import Independence, on_own_rows
from accel.random import isolated_rng
from accel.tensors import is_dtensor, is_view

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Permutation:
    """An order of rows, each source row `copies` times.

    Attributes:
        order: place of each new row among the copies.
        copies: number of copies of each source row, side by side.
        inverse: new row of each copy.
    """

    __slots__ = ("copies", "inverse", "order")

    def __init__(self, order: Tensor, copies: int, inverse: Tensor | None = None) -> None:
        self.order = order
        self.copies = copies
        if inverse is None:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
        self.inverse = inverse

    def inverted(self) -> Permutation:
        """Return the order that undoes this one, of one copy."""
        return Permutation(self.inverse, 1, self.order)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Journey:
    """An exchange of rows."""

    arrivals: Permutation  # order by expert of the rows, which came in one part a rank
    sent: Sequence[int]  # number of rows to each rank
    received: Sequence[int]  # number of rows from each rank
    group: dist.ProcessGroup  # ranks of the exchange


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchedTokens:
    """The tokens of the experts that this rank holds, and the way back.

    Attributes:
        rows: one row for each choice of one of these experts, in the experts' order, shape [rows, ...].
        counts: number of rows of each expert of this rank, in order; some may be 0.
        choices: order in which this rank's own choices left, for `combine_tokens`.
        journey: exchange that brought the rows; None if they only came from this rank.
    """

    rows: Tensor
    counts: Sequence[int]
    choices: Permutation
    journey: Journey | None = None

    @property
    def experts(self) -> Tensor:
        """The expert of each row, counted among this rank's experts: integers of shape [rows]."""
        # the host does not wait for what the device has to do before such a copy
        counts = torch.tensor(self.counts).to(self.rows.device, non_blocking=True)
        own = torch.arange(len(self.counts), device=self.rows.device)
        return own.repeat_interleave(counts, output_size=self.rows.shape[0])


def dispatch_tokens(
    tokens: Tensor, indices: Tensor, *, experts: int, group: dist.ProcessGroup | None = None
) -> DispatchedTokens:
    """Bring tokens to the ranks that hold their experts. A collective of the group, as its backward.

    Of E experts on R ranks, rank r holds those from r * E / R on. Every choice is kept, however many tokens an expert
    gets; ranks may have different numbers of tokens, or none. The host waits once for the device, for the counts.

    Args:
        tokens: this rank's, shape [tokens, ...].
        indices: experts of each token, integers of shape [tokens, k], as `route_tokens` returns them.
        experts: number of all experts; the group's size divides it.
        group: ranks that share the experts, as `accel.group_of(ctx, "ep")` returns them; None if all are here.

    Raises:
        ConfigError: an index of another shape, or a number of experts that the ranks cannot share.

    Examples:
        >>> tokens = torch.tensor([[1.0], [2.0], [3.0]])
        >>> sent = accel.parallel.dispatch_tokens(tokens, torch.tensor([[1], [0], [1]]), experts=2)
        >>> sent.rows.flatten().tolist(), sent.counts
        ([2.0, 1.0, 3.0], (1, 2))
    """
    ranks = 1 if group is None else group.size()
    _check(tokens, indices, experts, ranks)
    chosen = indices.flatten()
    choices = Permutation(chosen.argsort(stable=True), indices.shape[1])
    sent = chosen.new_zeros(experts).index_add_(0, chosen, torch.ones_like(chosen))  # bincount waits for the device
    rows = _taken(tokens, choices)
    if group is None:
        return DispatchedTokens(rows, _listed(sent), choices)
    received = torch.empty_like(sent)
    _ = cast(Any, dist).all_to_all_single(received, sent, group=group)
    own = experts // ranks
    per_rank = sent.view(ranks, own).sum(1)
    counted = _listed(torch.cat([per_rank, received]))  # the one wait for the device
    to = counted[:ranks]
    from_each = [counted[at : at + own] for at in range(ranks, len(counted), own)]
    back = tuple(map(sum, from_each))
    came = exchanged(rows, to, back, group)
    by_expert = torch.arange(own, device=chosen.device).repeat(ranks).repeat_interleave(received, output_size=sum(back))
    arrivals = Permutation(by_expert.argsort(stable=True), 1)
    counts = tuple(map(sum, zip(*from_each, strict=True)))
    return DispatchedTokens(_taken(came, arrivals), counts, choices, Journey(arrivals, to, back, group))


def combine_tokens(outputs: Tensor, dispatched: DispatchedTokens, weights: Tensor) -> Tensor:
    """Bring outputs of experts back, and sum them by token. A collective of the dispatch's group, as its backward.

    Args:
        outputs: of the rows of `dispatched`, in their order, shape [rows, ...].
        dispatched: result of `dispatch_tokens`.
        weights: factor of each output, shape [tokens, k], as `route_tokens` returns them.

    Returns:
        The weighted sums in the dtype of `outputs`, shape [tokens, ...].

    Raises:
        ConfigError: another number of rows or weights than was dispatched.

    Examples:
        >>> sent = accel.parallel.dispatch_tokens(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), experts=2)
        >>> accel.parallel.combine_tokens(sent.rows * 10, sent, torch.tensor([[0.5], [1.0]])).flatten().tolist()
        [5.0, 20.0]
    """
    return bring_back(outputs, dispatched.choices, dispatched.journey, weights)


def bring_back(outputs: Tensor, choices: Permutation, journey: Journey | None, weights: Tensor) -> Tensor:
    """Bring outputs back and sum them, as `combine_tokens`; callers drop the dispatched rows first.

    Rows on their way have one name: each copy is freed once the next is made.
    """
    count = len((choices if journey is None else journey.arrivals).order)
    if outputs.shape[:1] != (count,) or weights.numel() != len(choices.order):
        raise ConfigError(
            "these are not outputs of the dispatched tokens",
            expected=f"{count} rows, and {len(choices.order)} weights",
            got=f"shapes {list(outputs.shape)} and {list(weights.shape)}",
            where="combine_tokens",
        )
    if journey is not None:
        outputs = _taken(outputs, journey.arrivals.inverted())
        outputs = exchanged(outputs, journey.received, journey.sent, journey.group)
    outputs = _taken(outputs, choices.inverted())
    factors = weights.reshape(*weights.shape, *[1] * (outputs.ndim - 1))
    by_token = outputs.reshape(*weights.shape, *outputs.shape[1:])
    return (by_token * factors).sum(1).to(outputs.dtype)


class _Taken(torch.autograd.Function):
    """Rows in another order. Its gradient is a read too; the gradient of an index adds in no fixed order on GPUs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return rows.index_select(0, permutation.order // permutation.copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        permutation = ctx.permutation
        grad = grad_outputs[0].index_select(0, permutation.inverse)
        if permutation.copies > 1:
            sources = grad.shape[0] // permutation.copies
            grad = grad.reshape(sources, permutation.copies, *grad.shape[1:]).sum(1)
        return grad, None


def _taken(rows: Tensor, permutation: Permutation) -> Tensor:
    return cast(Any, _Taken).apply(rows, permutation)


def _listed(counts: Tensor) -> tuple[int, ...]:
    return tuple(cast("list[int]", cast(Any, counts).tolist()))


def _check(tokens: Tensor, indices: Tensor, experts: int, ranks: int) -> None:
    if indices.ndim != 2 or indices.shape[0] != tokens.shape[0] or indices.is_floating_point():
        raise ConfigError(
            "the experts do not fit the tokens",
            expected=f"integers of shape [{tokens.shape[0]}, k]",
            got=f"{indices.dtype} of shape {list(indices.shape)}",
            where="dispatch_tokens",
        )
    if experts < 1 or experts % ranks:
        raise ConfigError(
            "the experts cannot be divided among the ranks",
            expected=f"a multiple of {ranks}",
            got=f"{experts} experts",
            where="dispatch_tokens",
            fix="Use an ep that divides the number of experts.",
        )


Run = Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
COUNT = "num_experts"  # attribute by which modules of transformers know the number of their experts


class SharedExperts(Mixin):
    """A module with experts that ranks share. A function runs its forward, by the style of the experts."""

    accel_proved: set[type]  # classes that compute rows and experts independently
    accel_run: Run  # one of `RUNS`, hidden from torch.compile
    accel_style: str
    # Mesh of the ranks that hold the same tokens and dispatch a part of them each; None where no other rank holds them.
    accel_alike: DeviceMesh | None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the experts of tokens on the ranks that hold them. A collective along `ep`, as its backward; none of the
        style "local", where the forward itself brings tokens to others."""
        return self.accel_run(self, super().forward, inputs, named)


def run_local(module: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run a module's own forward with this rank's parts of its parameters."""
    with _local_parts(module):
        return run(*inputs, **named)


def run_dispatched(module: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Run a module's own forward with the tokens of this rank's experts; return the outputs of the rank's own
    tokens."""
    tokens, indices, weights = _routed(run, inputs, named)
    rows = tokens.reshape(-1, tokens.shape[-1])
    indices = indices.reshape(rows.shape[0], indices.shape[-1])
    weights = weights.reshape(indices.shape)
    alike = None if module.accel_alike is None else module.accel_alike.get_group()

    def run_rows(*own: Tensor) -> Tensor:
        return in_parts(lambda *part: _dispatched(module, run, *part), cast(Any, own), alike)

    outputs = on_own_rows(run_rows, Independence(0, (0,)), (rows, indices, weights), {})
    shaped = outputs if tokens.ndim == 2 else outputs.view(*tokens.shape[:-1], outputs.shape[-1])
    return shaped.clone() if is_view(shaped) else shaped  # an operation in place on a view would lose FSDP's hooks


def _dispatched(module: nn.Module, run: Callable[..., Any], rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    if type(module) not in cast(Any, module).accel_proved:
        with outside_of_checkpoints():
            _prove(module, run, rows, weights)
        cast(Any, module).accel_proved.add(type(module))
    mesh, experts = _spread_of(module)
    sent = dispatch_tokens(rows, indices, experts=experts, group=mesh.get_group(EP))
    choices, journey = sent.choices, sent.journey
    own = sent.experts[:, None]
    came = sent.rows
    del sent
    with _local_parts(module):
        if came.shape[0]:
            outputs = run(came, own, weights.new_ones(own.shape))
        else:  # a row of ones, with its outputs dropped: parameters take part in the backward, as on other ranks
            stand_in = came.sum(0, keepdim=True) + 1
            outputs = run(stand_in, own.new_zeros(1, 1), weights.new_ones(1, 1))[:0]
    del came
    return bring_back(outputs, choices, journey, weights)


def run_sorted(module: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Run a module's own forward with the rows of this rank's experts that are not zeros; return outputs of the rank's
    own rows, zeros for rows of zeros."""
    given = (*inputs, *named.values())
    experts = _spread_of(module)[1]
    rows = given[0]
    if len(given) != 1 or not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[0] % experts:
        raise PrepareError(
            "experts of sorted tokens are called with something else",
            expected=f"forward(rows), of shape [{experts} * tokens, width], the rows of one expert side by side",
            got=", ".join(str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in given),
            where="Plan.experts",
            fix='Use the style "dispatch" for a forward(tokens, indices, weights).',
        )
    chosen = rows.detach().ne(0).any(-1).nonzero().flatten()  # the host waits for the number
    indices = (chosen // max(rows.shape[0] // experts, 1))[:, None]
    alike = None if module.accel_alike is None else module.accel_alike.get_group()
    part = (rows.index_select(0, chosen), indices, rows.new_ones(indices.shape))
    outputs = in_parts(lambda *own: _dispatched_sorted(module, run, *own), part, alike)
    return outputs.new_zeros(rows.shape[0], outputs.shape[-1]).index_copy(0, chosen, outputs)


def _dispatched_sorted(
    module: nn.Module, run: Callable[..., Any], rows: Tensor, indices: Tensor, weights: Tensor
) -> Tensor:
    mesh, experts = _spread_of(module)
    sent = dispatch_tokens(rows, indices, experts=experts, group=mesh.get_group(EP))
    most = max(*sent.counts, 1)
    firsts = torch.tensor([most * at - sum(sent.counts[:at]) for at in range(len(sent.counts))])
    firsts = firsts.to(rows.device, non_blocking=True)
    places = torch.arange(sent.rows.shape[0], device=rows.device) + firsts[sent.experts]
    filled = sent.rows.new_zeros(most * len(sent.counts), sent.rows.shape[-1]).index_copy(0, places, sent.rows)
    choices, journey = sent.choices, sent.journey
    del sent
    with _local_parts(module):
        outputs = run(filled)
    del filled
    outputs = outputs.index_select(0, places)
    return bring_back(outputs, choices, journey, weights)


RUNS: Mapping[str, Run] = {"local": run_local, "dispatch": run_dispatched, "sorted": run_sorted}  # by style


def _routed(run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return tokens, indices and weights from a call of the module."""
    given = tuple(inspect.signature(run).bind(*inputs, **named).arguments.values()) if named else tuple(inputs)
    if len(given) != 3 or not all(isinstance(each, Tensor) for each in given) or given[1].is_floating_point():
        raise PrepareError(
            "experts to dispatch tokens to are called with something else",
            expected="forward(tokens, indices, weights), of shapes [tokens, width], [tokens, k] and [tokens, k]",
            got=", ".join(type(each).__name__ for each in given),
            where="Plan.experts",
            fix='Name another module, or take the style "local" for one that dispatches tokens itself.',
        )
    return given


def in_parts(
    run: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], alike: dist.ProcessGroup | None
) -> Tensor:
    """Run a function of tokens that several ranks have, each rank on its part; None for tokens of one rank."""
    if alike is None:
        return run(*inputs)
    count = inputs[0].shape[0]
    most = -(-count // alike.size())
    short = most * alike.size() - count
    padded = [nn.functional.pad(each, (0, 0, 0, short)) for each in inputs]
    own = min(most, max(count - most * alike.rank(), 0))
    rows, weights = (own_part(each, 0, alike)[:own] for each in (padded[0], padded[2]))
    indices = padded[1].chunk(alike.size())[alike.rank()][:own]
    outputs = run(rows, indices, weights)
    filled = nn.functional.pad(outputs, (0, 0, 0, most - own))
    return gathered(filled, 0, alike)[:count]


def _spread_of(module: nn.Module) -> tuple[DeviceMesh, int]:
    """Return the mesh and the number of a module's experts."""
    spread = next(each for each in module.parameters(recurse=False) if is_dtensor(each))
    return spread.device_mesh, spread.shape[0]


def _parts_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.to_local() for name, each in module.named_parameters(recurse=False) if is_dtensor(each)}


@contextlib.contextmanager
def _local_parts(module: nn.Module, parts: Mapping[str, Tensor] | None = None) -> Generator[None]:
    """Let a module find this rank's parts, or other ones, in the place of its parameters, and their number as its
    number of experts."""
    seen = vars(module)
    parts = _parts_of(module) if parts is None else parts
    count = seen.get(COUNT)
    seen.update(cast("dict[str, Any]", parts))
    if isinstance(count, int) and parts:
        seen[COUNT] = next(iter(parts.values())).shape[0]
    try:
        yield
    finally:
        for name in parts:
            del seen[name]
        if count is not None:
            seen[COUNT] = count


_FACTORS = (1.0, -0.75, 0.5, -1.25)  # of the experts in a proof, so that they differ
_LARGEST_DIFFERENCE = 0.02  # of the outputs' norm; formats of 16 bits round by less


def _prove(module: nn.Module, run: Callable[..., Any], tokens: Tensor, weights: Tensor) -> None:
    """Raise `PrepareError` if a module computes with other rows or experts than those of a choice, or with weights in
    another way than as factors: ranks would have other outputs than one process. No communication.

    A few rows, with the weights of tokens, are computed by all of four experts, and each choice by two of them, without
    its weight.
    """
    held = _parts_of(module)
    if not held or not all(each.is_floating_point() for each in held.values()):
        return
    few = {name: _few_experts(each.detach()) for name, each in held.items()}
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * len(_FACTORS), tokens.shape[1], generator=random).to(tokens)
    keys = torch.rand(len(rows), len(_FACTORS), generator=random) + torch.arange(len(_FACTORS)) / 2  # most choose few
    indices = keys.argsort(1)[:, : weights.shape[1]].to(tokens.device)
    weights = _few_weights(weights.detach(), *indices.shape)
    chosen = indices.flatten()

    def outputs(begin: int, end: int, *given: Tensor) -> Tensor:
        with _local_parts(module, {name: each[begin:end] for name, each in few.items()}):
            return run(*given)

    with torch.no_grad(), isolated_rng(tokens.device), _unchanged(module):
        try:
            found = outputs(0, len(_FACTORS), rows, indices, weights)
            single = found.new_zeros(len(chosen), found.shape[-1])
            for begin in range(0, len(_FACTORS), 2):
                order = chosen.argsort(stable=True)
                order = order[(chosen[order] >= begin) & (chosen[order] < begin + 2)]
                own, ones = chosen[order, None] - begin, weights.new_ones(len(order), 1)
                single[order] = outputs(begin, begin + 2, rows[order // indices.shape[1]], own, ones)
        except Exception as error:
            raise _dependent(module, f"{type(error).__name__}: {error}") from error
        difference = (single.view(*indices.shape, -1) * weights[..., None]).sum(1) - found
        if bool(difference.float().square().sum() > _LARGEST_DIFFERENCE**2 * found.float().square().sum()):
            raise _dependent(module, "outputs that differ")


def _few_weights(weights: Tensor, rows: int, choices: int) -> Tensor:
    """Return the weights of some tokens; those of fewer choices have the same sum."""
    if not len(weights):
        return weights.new_full((rows, choices), 1 / choices)
    some = weights[torch.arange(rows, device=weights.device) % len(weights)]
    few = some[:, :choices]
    return few if few.shape == some.shape else few * (some.sum(1) / few.sum(1))[:, None]


def _few_experts(part: Tensor) -> Tensor:
    factors = torch.tensor(_FACTORS).to(part).view(-1, *[1] * (part.ndim - 1))
    return part[torch.arange(len(_FACTORS), device=part.device) % len(part)] * factors


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Generator[None]:
    """Let a module compute as in evaluation, and put back its modes and buffers afterwards."""
    modes = {each: each.training for each in module.modules()}
    buffers = [(each, each.clone()) for each in module.buffers()]
    _ = module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
        for each, values in buffers:
            _ = each.copy_(values)


def _dependent(module: nn.Module, got: str) -> PrepareError:
    return PrepareError(
        "experts do not compute each row by its expert alone, so ranks would have other outputs than one process",
        expected="a forward(tokens, indices, weights) that takes the number of experts from its parameters, and "
        "multiplies each output by its weight",
        got=f"{got}, of some experts and rows instead of all",
        where=f"forward of {written_class(module).__name__}, Plan.experts",
        fix="Drop tokens, mix rows, add tokens to outputs, and change weights in the module that calls the experts, or "
        "leave ep out of the mesh.",
    )
