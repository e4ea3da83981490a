# SPDX-License-Identifier: Apache-2.0
"""Experts that are modules of a list or dict: a loop above calls them one by one, on the rows that it chose.

The block's forward runs twice: first to collect the rows of all calls, then with the experts' outputs in their place.
Between the two runs rows are sent in one message, as with stacked experts. Each rank stores a part of every expert, and
gathers the parts of its experts for a forward: all ranks have the parameters of one model, by the model's names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.comm import exchanged, summed
from accel.devices import autocast_dtype
from accel.errors import PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import listed_modules, named_modules, note_module, notes_of, written_class
from accel.parallel.axes.experts._expert_plan import EP, LISTED
from accel.parallel.axes.experts._layer import Run, compared, in_parts, live, prove_once, redrawn
from accel.parallel.axes.experts._routing import DispatchedTokens, bring_back, dispatch_tokens
from accel.random import isolated_rng
from accel.tensors import is_view

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class ExpertCalls:
    """The calls of a list's experts in one forward of its block.

    Attributes:
        path: path of the list.
        phase: "collect" rows of calls, "replay" outputs to them, or "run" experts; "" outside of the block.
        rows: inputs by call.
        experts: experts by call.
        outputs: outputs that wait for their calls.
        proved: experts that compute each row alone.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.phase: Literal["", "collect", "replay", "run"] = ""
        self.rows: list[Tensor] = []
        self.experts: list[int] = []
        self.outputs: list[Tensor] = []
        self.proved: set[int] = set()

    @contextlib.contextmanager
    def during(self, phase: Literal["collect", "replay", "run"]) -> Generator[None]:
        """Set the phase for a block of code."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    def answer(self, expert: int, given: Sequence[object]) -> Tensor:
        """Note a call and return zeros, or return the output of a call that was noted."""
        rows = given[0] if given else None
        if len(given) != 1 or not isinstance(rows, Tensor) or not rows.is_floating_point() or not rows.ndim:
            raise self.refused(f"an expert that is called with {', '.join(type(each).__name__ for each in given)}")
        if self.phase == "collect":
            self.rows.append(rows)
            self.experts.append(expert)
            return rows.new_zeros(rows.shape, dtype=autocast_dtype(rows.device.type))
        if self.phase != "replay":
            raise self.refused(f"a call of expert {expert} from elsewhere")
        at = len(self.rows) - len(self.outputs)
        if not self.outputs or (self.experts[at], self.rows[at].shape) != (expert, rows.shape):
            raise self.refused(f"a call of expert {expert} on {list(rows.shape)} in the second run alone")
        return self.outputs.pop(0)

    def refused(self, got: str) -> PrepareError:
        """Make the error for a block with experts that cannot be divided."""
        return PrepareError(
            "this loop over a list of experts cannot be divided among ranks",
            expected="a forward of the module above that depends on its inputs alone, and calls each expert with a"
            " tensor of rows, for a tensor of the same shape",
            got=got,
            where=f"Plan.experts, {self.path}",
            fix="Give one module parameters of shape [experts, ...] and a forward(tokens, indices, weights).",
        )


def calls_around(module: nn.Module) -> ExpertCalls | None:
    """Return the calls of the list that a module loops over, or of an expert's list; None without one."""
    if isinstance(module, ListedBlock):
        module = getattr(module, notes_of(cast(nn.Module, module)).get("experts", ""))
    return cast("ExpertCalls | None", vars(module).get("accel_calls"))


class ListedExpert(Mixin):
    """An expert of a list. Its calls are collected."""

    accel_calls: ExpertCalls  # calls of the list's experts; of the instance

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Answer a call of the loop, or run."""
        if self.accel_calls.phase == "run":
            return super().forward(*inputs, **named)
        return self.accel_calls.answer(notes_of(cast(nn.Module, self)).get("expert", 0), (*inputs, *named.values()))


class ListedExperts(Mixin):
    """A list of experts, called with all rows of a loop."""

    accel_run: Callable[..., Tensor]  # `run_listed`, hidden from torch.compile
    accel_alike: DeviceMesh | None = None  # as in `SharedExperts`
    accel_mesh: DeviceMesh  # mesh of experts
    accel_calls: ExpertCalls  # calls of the experts; of the instance
    accel_style = LISTED

    def forward(self, rows: Tensor, indices: Tensor, called: Tensor) -> Tensor:
        """Run the experts of rows on the ranks that hold them. A collective of the mesh, as its backward along `ep`."""
        return self.accel_run(self, rows, indices, called)


class ListedBlock(Mixin):
    """A module with a forward that loops over a list of experts."""

    accel_run_block: Run  # `run_block`, hidden from torch.compile

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the loop twice, with the experts between. A collective along `ep`, as its backward."""
        return self.accel_run_block(self, super().forward, inputs, named)


def follow_calls(block: nn.Module, listed: nn.Module, name: str, path: str) -> None:
    """Let a block's forward collect the calls of a list of experts in it. Mutates both."""
    calls = ExpertCalls(path)
    note_module(block, experts=name)
    vars(listed)["accel_calls"] = calls
    experts = listed_modules(listed)
    add_mixin(experts, ListedExpert)
    for at, each in enumerate(experts):
        vars(each)["accel_calls"] = calls
        note_module(each, expert=at)


def run_block(block: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run a block's forward to collect rows, the experts on them, and the forward again with their outputs."""
    listed = getattr(block, notes_of(block).get("experts", ""))
    calls: ExpertCalls = listed.accel_calls
    tensors = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor) and each.is_floating_point()]
    if not tensors:
        raise calls.refused("a module that is called without a tensor")
    calls.rows, calls.experts = [], []
    with _unchanged(block, tensors, calls), isolated_rng(tensors[0].device), calls.during("collect"):
        try:
            _ = run(*inputs, **named)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of shapes, where outputs would have others than the rows
            raise calls.refused(f"{type(error).__name__}: {error}") from error
    shapes = [each.shape for each in calls.rows]
    width = shapes[0][-1] if shapes else tensors[0].shape[-1]
    flat = [each.reshape(-1, width) for each in calls.rows]
    rows = torch.cat(flat) if flat else tensors[0].reshape(-1, width)[:0]
    counts = [len(each) for each in flat]
    chosen = torch.tensor(calls.experts, dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    called = torch.zeros(len(listed), dtype=torch.int64)
    called[calls.experts] = 1
    outputs = listed(rows, chosen[:, None].to(rows.device), called.to(rows.device))
    if outputs.shape != rows.shape:
        raise calls.refused(f"outputs of {outputs.shape[-1]} columns for rows of {width}")
    parts = zip(torch.split(outputs, counts), shapes, strict=True) if counts else ()
    calls.outputs = [part.reshape(shape).clone() for part, shape in parts]  # separate memory, for operations in place
    if not counts:  # the exchanges' backward takes part in the loss on this rank, too
        tied = tensors[0] + outputs.sum()
        inputs = [tied if each is tensors[0] else each for each in inputs]
        named = {name: tied if each is tensors[0] else each for name, each in named.items()}
    with calls.during("replay"):
        result = run(*inputs, **named)
    if calls.outputs:
        raise calls.refused(f"{len(calls.outputs)} calls in the first run alone")
    calls.rows, calls.experts = [], []
    return result


@contextlib.contextmanager
def _unchanged(block: nn.Module, tensors: Iterable[Tensor], calls: ExpertCalls) -> Generator[None]:
    """Raise where a forward changes its inputs or a buffer, as it runs twice."""
    watched = [("an input", each) for each in tensors] + [
        (f"the buffer {name}", each) for name, each in _buffers(block)
    ]
    before = [each._version for _, each in watched]
    yield
    changed = [what for (what, each), version in zip(watched, before, strict=True) if each._version != version]
    if changed:
        raise calls.refused(f"a forward that changes {', '.join(changed)}")


def _buffers(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return (each for each in block.named_buffers() if not each[1].is_inference())


def run_listed(listed: Any, rows: Tensor, indices: Tensor, called: Tensor) -> Tensor:
    """Run the experts of this rank on the rows of all ranks; return the outputs of this rank's rows.

    `called`: 1 for the experts that the loop has called on this rank, shape [experts]. Those that no rank calls get no
    gradient, as in one process.
    """
    calls: ExpertCalls = listed.accel_calls
    experts = listed_modules(listed)
    group: dist.ProcessGroup = listed.accel_mesh.get_group(EP)
    own = len(experts) // group.size()
    used = _used(called, listed.accel_mesh)
    # before the rows, so after them in the backward
    weights, tie = _own_weights([_named(each) if at in used else [] for at, each in enumerate(experts)], group)
    alike = None if listed.accel_alike is None else listed.accel_alike.get_group()

    first = own * group.rank()
    held = sorted(used & set(range(first, first + own)))

    def prove() -> bool:
        new = [at for at in held if at not in calls.proved]
        found = [_prove(calls, at, experts[at], weights[at - first], rows) for at in new]
        return any(found)

    prove_once(calls.proved, used, group, rows.device, prove)

    def run_own(sent: DispatchedTokens) -> Tensor:
        parts = cast("tuple[Tensor, ...]", cast(Any, torch).split(sent.rows, list(sent.counts)))
        outputs: list[Tensor] = []
        for at in held:
            part = parts[at - first]
            with calls.during("run"), _with_weights(weights[at - first]):
                # a row of ones, with its output dropped: parameters take part in the backward
                given = part if len(part) else part.sum(0, keepdim=True) + 1
                outputs.append(cast(Tensor, experts[at](given))[: len(part)])
        return torch.cat(outputs) if outputs else sent.rows + tie

    def computed(rows: Tensor, indices: Tensor, factors: Tensor) -> Tensor:
        sent = dispatch_tokens(rows, indices, experts=len(experts), group=group)
        choices, journey = sent.choices, sent.journey
        outputs = run_own(sent)
        del sent
        return bring_back(outputs, choices, journey, factors)

    outputs = in_parts(computed, (rows, indices, rows.new_ones(indices.shape)), alike)
    return outputs.clone() if is_view(outputs) else outputs  # an operation in place on a view would lose FSDP's hooks


def _prove(
    calls: ExpertCalls, at: int, expert: nn.Module, weights: Sequence[tuple[nn.Module, str, Tensor]], rows: Tensor
) -> bool:
    """Raise `PrepareError` if an expert computes with other rows than a row's own, which ranks run together. No
    communication.

    Rows as the loop gives them, but drawn ones, are computed together, and then two parts of them alone.
    """
    shape = max((each.shape for each in calls.rows), key=len, default=rows.shape)
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn((2, *shape[1:]) if len(shape) > 2 else (6, rows.shape[-1]), generator=random).to(rows)

    def run(given: Tensor) -> Tensor:
        values = [
            live(redrawn(each.detach(), random) if module.get_parameter(name).requires_grad else each, each)
            for module, name, each in weights
        ]
        own = [(module, name, value) for (module, name, _), value in zip(weights, values, strict=True)]
        with calls.during("run"), _with_weights(own):
            return cast(Any, expert).forward(live(given, rows).clone())

    def pair() -> tuple[Tensor, Tensor]:
        _ = random.manual_seed(1)
        found = run(drawn)
        flat = drawn.flatten(0, -2)
        parts: list[Tensor] = []
        for part in (flat[:2], flat[2:]):
            _ = random.manual_seed(1)  # of the same weights
            parts.append(run(part))
        return found, torch.cat(parts).view(*drawn.shape[:-1], -1)

    def refused(got: str) -> PrepareError:
        return PrepareError(
            "an expert of a list does not compute each row alone, so ranks would have other outputs than one process",
            expected="an expert whose outputs for some rows are these rows of its outputs for all",
            got=f"{got}, of some rows of expert {at} instead of all",
            where=f"forward of {written_class(expert).__name__}, Plan.experts, {calls.path}",
            fix="Drop tokens and mix rows in the module that calls the experts, or leave ep out of the mesh.",
        )

    return compared([expert], [pair], lambda: run(drawn), refused)


def _used(called: Tensor, mesh: DeviceMesh) -> set[int]:
    """Return the experts that some rank has called. A collective, for which the host waits."""
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            called = summed(called, mesh.get_group(dim))
    return {at for at, each in enumerate(cast("list[int]", cast(Any, called).tolist())) if each}


class _Weight(NamedTuple):
    """A parameter of an expert."""

    module: nn.Module  # module that has it
    name: str  # name in the module
    spread: DTensor  # its parts on all ranks


def _named(expert: nn.Module) -> list[_Weight]:
    return [
        _Weight(module, name, cast(Any, each))
        for _, module in named_modules(expert)
        for name, each in module.named_parameters(recurse=False)
    ]


def _own_weights(
    experts: Sequence[Sequence[_Weight]], group: dist.ProcessGroup
) -> tuple[list[list[tuple[nn.Module, str, Tensor]]], Tensor]:
    """Return the whole weights of the experts that this rank computes, and a zero by which the exchange takes part in
    the backward. A collective, as its backward.

    `experts`: the weights of each; none for those that stay where they are.
    """
    ranks = group.size()
    own = len(experts) // ranks
    found: list[list[tuple[nn.Module, str, Tensor]]] = [[] for _ in range(own)]
    tie = torch.zeros(())
    for kind in dict.fromkeys(each.spread.dtype for expert in experts for each in expert):
        local = [[each.spread.to_local() for each in expert if each.spread.dtype == kind] for expert in experts]
        flat = torch.cat([part.reshape(-1) for parts in local for part in parts])
        sizes = [
            sum(part.numel() for parts in local[at : at + own] for part in parts) for at in range(0, own * ranks, own)
        ]
        size = sizes[group.rank()]
        received = exchanged(flat, sizes, [size] * ranks, group).view(ranks, size)
        tie = received[:, :0].sum().to(tie.dtype) + tie.to(flat.device)
        at = 0
        for place, expert in enumerate(experts[own * group.rank() : own * (group.rank() + 1)]):
            for weight in (each for each in expert if each.spread.dtype == kind):
                part = weight.spread.to_local()
                pieces = received[:, at : at + part.numel()].reshape(ranks, *part.shape)
                dim = cast(Any, weight.spread.placements[-1]).dim
                found[place].append((weight.module, weight.name, torch.cat(list(pieces.unbind(0)), dim)))
                at += part.numel()
    return found, tie


@contextlib.contextmanager
def _with_weights(weights: Iterable[tuple[nn.Module, str, Tensor]]) -> Generator[None]:
    """Let modules find whole weights in the place of their parameters."""
    given = list(weights)
    for module, name, each in given:
        vars(module)[name] = each
    try:
        yield
    finally:
        for module, name, _ in given:
            del vars(module)[name]
