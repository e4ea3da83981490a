# SPDX-License-Identifier: Apache-2.0
"""Forward passes of sharded experts: tokens are sent to the ranks that hold them, and outputs are sent back."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, MutableSet, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.comm import Call, adopt, agreed_values, gathered, own_part
from accel.devices import get_random_state, wide_dtype
from accel.errors import PeerError, PrepareError
from accel.mixins import Mixin
from accel.parallel._calls import unchanged
from accel.parallel._modules import written_class
from accel.parallel._private import without_checkpoints
from accel.parallel.axes.experts._expert_plan import EP
from accel.parallel.axes.experts._routing import bring_back, dispatch_tokens
from accel.parallel.parts._local_map import Independence, on_own_rows
from accel.random import isolated_rng
from accel.tensors import is_dtensor, is_view

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


K = TypeVar("K")
R = TypeVar("R")
Run = Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
COUNT = "num_experts"  # attribute by which modules of transformers know the number of their experts


class SharedExperts(Mixin):
    """A module with experts that ranks share. A function runs its forward, by the style of the experts."""

    accel_proved: MutableSet[nn.Module]  # modules that compute rows and experts independently
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
    mesh, experts = _spread_of(module)
    group = mesh.get_group(EP)
    prove = partial(_prove_dispatched, module, run, rows, weights)
    prove_once(cast(Any, module).accel_proved, [module], group, rows.device, prove)
    sent = dispatch_tokens(rows, indices, experts=experts, group=group)
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
    group = mesh.get_group(EP)
    prove = partial(_prove_sorted, module, run, rows)
    prove_once(cast(Any, module).accel_proved, [module], group, rows.device, prove)
    sent = dispatch_tokens(rows, indices, experts=experts, group=group)
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
_ROWS = 64  # of a proof; a constant capacity of as many tokens of an expert is not found


def prove_once(
    proved: MutableSet[K], keys: Iterable[K], group: dist.ProcessGroup, device: torch.device, prove: Callable[[], bool]
) -> None:
    """Prove modules in their first call, and in later ones until a rank could. A collective until then.

    `prove` returns whether it could, and raises where ranks would compute something else. Its error is raised on all
    ranks, which would wait for this one in the exchange of rows.
    """
    new = [each for each in keys if each not in proved]
    if not new:
        return
    failures: list[Exception] = []

    def work() -> bool:
        try:
            return prove()
        except Exception as error:
            failures.append(error)
            raise

    try:
        with without_checkpoints(), isolated_rng(device):
            if any(agreed_values(adopt(group, device), Call("proof of experts", ordered=False), work, bool)):
                proved |= set(new)
    except PeerError:
        if failures:  # an error of the module, which means something to the code around it
            raise failures[0] from None
        raise


def compared(
    modules: Iterable[nn.Module],
    pairs: Iterable[Callable[[], tuple[Tensor, Tensor]]],
    alone: Callable[[], object],
    refused: Callable[[str], PrepareError],
) -> bool:
    """Raise the error of `refused` where two outputs differ; return whether some pair had values to compare.

    Outputs of zeros, or that are not finite, have none. Where a function draws random numbers in training, it is
    compared in evaluation. An error is the module's own if `alone` raises one, too. Functions run with gradients where
    the call does: modules may set hooks on what they compute.
    """
    modules = list(modules)
    trains = any(each.training for each in modules)
    for pair in pairs:
        try:
            verdict = _difference(*_outputs(modules, pair))
            if verdict and trains and _draws(modules, pair):
                verdict = _difference(*_outputs(modules, pair, trains=False))
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            _ = _outputs(modules, lambda: alone())
            raise refused(f"{type(error).__name__}: {error}") from error
        if verdict:
            raise refused("outputs that differ")
        if verdict is not None:
            return True
    return False


def _outputs(modules: Sequence[nn.Module], run: Callable[[], R], *, trains: bool = True) -> R:
    with unchanged(nn.ModuleList(modules), is_seen=False):
        if not trains:
            _ = [each.eval() for each in modules]
        return run()


def _draws(modules: Sequence[nn.Module], pair: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Whether functions draw random numbers: they move a stream, or compute something else in a second call."""
    states: list[Tensor] = []
    outputs: list[Tensor] = []
    with unchanged(nn.ModuleList(modules), is_seen=False):
        for _ in range(2):
            states.append(torch.get_rng_state())
            outputs.append(pair()[0].detach())
            device = outputs[-1].device
            states.append(torch.get_rng_state() if device.type == "cpu" else get_random_state(device))
    return (
        not torch.equal(states[0], states[2])
        or not torch.equal(states[1], states[3])
        or not torch.equal(*(each.nan_to_num() for each in outputs))
    )


def _difference(found: Tensor, expected: Tensor) -> bool | None:
    """Whether outputs differ by more than rounding; None of those without a finite value but zeros."""
    found = found.detach()
    expected = expected.detach()
    finite = found.isfinite() & expected.isfinite()
    one, other = (torch.where(finite, each, 0).to(wide_dtype(each.device)) for each in (found, expected))
    largest = torch.stack([one.abs().sum(), other.abs().sum()]).amax()
    off, size = (float(each.square().sum().sqrt()) for each in ((one - other) / largest, one / largest))
    return off > _LARGEST_DIFFERENCE * size if math.isfinite(size) else None


def _prove_dispatched(module: nn.Module, run: Callable[..., Any], tokens: Tensor, weights: Tensor) -> bool:
    """Raise `PrepareError` if a module computes with other rows or experts than those of a choice, or with weights in
    another way than as factors: ranks would have other outputs than one process. No communication.

    A few rows, with the weights of tokens, are computed by all of four experts, and half of the choices at a time by
    two of them, without weights. Rows are drawn; if outputs of those are not finite, they are tokens.
    """
    run_few = _with_few(module, run, tokens)
    if run_few is None:
        return True
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(_ROWS, tokens.shape[1], generator=random).to(tokens)
    keys = torch.rand(_ROWS, len(_FACTORS), generator=random) + torch.arange(len(_FACTORS)) / 2  # most choose few
    indices = keys.argsort(1)[:, : weights.shape[1]].to(tokens.device)
    chosen = indices.flatten()
    places = torch.arange(_ROWS, device=tokens.device) % max(len(tokens), 1)
    given = [drawn, tokens.detach()[places]] if len(tokens) else [drawn]

    def pair(rows: Tensor) -> tuple[Tensor, Tensor]:
        few = _few_weights(weights.detach(), *indices.shape)
        found = run_few(0, len(_FACTORS), rows, indices, few)
        single = found.new_zeros(len(chosen), found.shape[-1])
        for begin in range(0, len(_FACTORS), 2):
            order = chosen.argsort(stable=True)
            order = order[(chosen[order] >= begin) & (chosen[order] < begin + 2)]
            for some in (order[::2], order[1::2]):
                own, ones = chosen[some, None] - begin, few.new_ones(len(some), 1)
                single[some] = run_few(begin, begin + 2, rows[some // indices.shape[1]], own, ones).detach()
        return found, (single.view(*indices.shape, -1) * few[..., None]).sum(1)

    def alone() -> object:
        with _local_parts(module, _all_experts(module)):
            given = live(drawn, tokens).clone()
            return run(given, indices, weights.new_full(indices.shape, 1 / indices.shape[1]))

    return compared([module], [partial(pair, rows) for rows in given], alone, partial(_dependent, module, _DISPATCHED))


def _prove_sorted(module: nn.Module, run: Callable[..., Any], tokens: Tensor) -> bool:
    """Raise `PrepareError` if a module computes with other rows or experts than a row's own, or gives something else
    than zeros for rows of zeros. No communication.

    Rows of four experts, some of them zeros, are computed together, and the others by two experts in another order.
    """
    run_few = _with_few(module, run, tokens)
    if run_few is None:
        return True
    drawn = torch.randn(len(_FACTORS), 3, tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(tokens)
    drawn[:, 1] = 0

    def pair() -> tuple[Tensor, Tensor]:
        found = run_few(0, len(_FACTORS), drawn.flatten(0, 1)).view(*drawn.shape[:2], -1)
        expected = torch.zeros_like(found)
        for begin in range(0, len(_FACTORS), 2):
            rows = drawn[begin : begin + 2, [2, 0]].flatten(0, 1)
            expected[begin : begin + 2, [2, 0]] = run_few(begin, begin + 2, rows).detach().view(2, 2, -1)
        return found, expected

    def alone() -> object:
        parts = _all_experts(module)
        with _local_parts(module, parts):
            return run(live(drawn.flatten(0, 1)[: next(iter(parts.values())).shape[0]], tokens).clone())

    return compared([module], [pair], alone, partial(_dependent, module, _SORTED))


def _with_few(module: nn.Module, run: Callable[..., Any], tokens: Tensor) -> Callable[..., Tensor] | None:
    """Return a function that runs a module with some of four experts; None if their parameters can't be scaled."""
    held = _parts_of(module)
    if not held or not all(each.is_floating_point() for each in held.values()):
        return None
    random = torch.Generator().manual_seed(1)
    few: dict[str, Tensor] = {}

    def run_few(begin: int, end: int, rows: Tensor, *given: Tensor) -> Tensor:
        for name, each in held.items() if not few else ():
            few[name] = _few_experts(each.detach(), random, trains=module.get_parameter(name).requires_grad)
        parts = {name: live(each[begin:end], held[name]) for name, each in few.items()}
        with _local_parts(module, parts):
            return run(live(rows, tokens).clone(), *given)

    return run_few


def _few_experts(part: Tensor, random: torch.Generator, *, trains: bool) -> Tensor:
    """Return the values of four experts, from those of some; drawn ones for zeros that a step will change."""
    wide = part.float() if part.dtype.itemsize == 1 else part  # torch has no arithmetic in 8 bits
    factors = torch.tensor(_FACTORS).to(wide).view(-1, *[1] * (part.ndim - 1))
    few = wide[torch.arange(len(_FACTORS), device=part.device) % len(part)] * factors
    return (redrawn(few, random) if trains else few).to(part.dtype)


def redrawn(values: Tensor, random: torch.Generator) -> Tensor:
    """Return drawn values in the place of zeros, as a layer that is initialised to zeros computes nothing."""
    if not values.numel() or bool(values.any()):
        return values
    return (torch.randn(values.shape, generator=random) / max(values.shape[-1], 1) ** 0.5).to(values)


def live(values: Tensor, like: Tensor) -> Tensor:
    """Return values as a view with a gradient if another tensor has one in this block; of values without one, else."""
    needed = torch.is_grad_enabled() and like.requires_grad
    return values.detach().requires_grad_(needed).view_as(values)  # autocast keeps copies of what is no view


def _all_experts(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters with as many experts as all ranks hold, each of them this rank's first, in no memory."""
    count = _spread_of(module)[1]
    return {
        name: live(each.detach()[:1].expand(count, *each.shape[1:]), each) for name, each in _parts_of(module).items()
    }


def _few_weights(weights: Tensor, rows: int, choices: int) -> Tensor:
    """Return the largest weights of tokens; those of fewer choices have the same sum."""
    if not len(weights):
        return weights.new_full((rows, choices), 1 / choices)
    largest = weights.abs().sum(1).argsort(descending=True)
    some = weights[largest[torch.arange(rows, device=weights.device) % len(weights)]]
    few = some[:, :choices]
    return few if few.shape == some.shape else few * (some.sum(1) / few.sum(1))[:, None]


_DISPATCHED = (
    "a forward(tokens, indices, weights) that takes the number of experts from its parameters, and multiplies each "
    "output by its weight"
)
_SORTED = "a forward(rows) that takes the number of experts from its parameters, and gives zeros for rows of zeros"


def _dependent(module: nn.Module, expected: str, got: str) -> PrepareError:
    return PrepareError(
        "experts do not compute each row by its expert alone, so ranks would have other outputs than one process",
        expected=expected,
        got=f"{got}, of some experts and rows instead of all",
        where=f"forward of {written_class(module).__name__}, Plan.experts",
        fix="Drop tokens, mix rows, add tokens to outputs, and change weights in the module that calls the experts, or "
        "leave ep out of the mesh.",
    )
