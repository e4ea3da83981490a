# SPDX-License-Identifier: Apache-2.0
"""Data parallel: a replica on every rank, gradients averaged by DistributedDataParallel; uneven inputs."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Generator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel.context import DistContext, context_first
from accel.errors import ConfigError, PrepareError
from accel.parallel._empty import allocate_empty, make_room, move_model
from accel.parallel._labels import label_parameters, let_step_alone_
from accel.parallel._modules import note_tensor, tensor_notes, unwrap_model, wrapped_name
from accel.parallel._refused import ModelRefusal, PrepareCall, RefusedFact, check_sparse, refused
from accel.parallel._spread import (
    ModelView,
    PendingForward,
    ReplicateOptions,
    Spread,
    begin_with_rank_0_,
    compare_models,
    replicated_tensors,
    with_gradient,
)
from accel.parallel.axes.replicate._comm_hooks import gather_sparse, register_hook
from accel.tensors import has_wide_gradient
from accel.terminal import show_names

_ddp = cast(Any, DistributedDataParallel)


class _Running:
    """Marks the replica that runs its forward: torch.compile cuts graphs at the ends of its buckets. Forwards of
    simulated ranks take turns, so they do not end in the order in which they began."""

    _running: ClassVar[list[DistributedDataParallel]] = []

    __slots__ = ("_replica",)

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = replica

    def __enter__(self) -> None:
        self._running.append(self._replica)
        _ddp._active_ddp_module = self._replica

    def __exit__(self, *_: object) -> None:
        self._running.remove(self._replica)
        _ddp._active_ddp_module = self._running[-1] if self._running else None


class _ExchangerLink:
    """A replica that a parameter's notes lead to; none after a copy, or in a file."""

    __slots__ = ("_replica",)

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica = None if replica is None else weakref.ref(replica)

    def __call__(self) -> Replica | None:
        return None if self._replica is None else self._replica()

    def __reduce__(self) -> tuple[type[_ExchangerLink], tuple[()]]:
        return _ExchangerLink, ()


class _Due:
    """Knows whether a forward awaits the backward that exchanges its gradients."""

    def __init__(self) -> None:
        self.is_due = False

    def note(self, outputs: object) -> None:
        """Note the outputs of a forward; DDP waits for a backward also where the loop has dropped them."""
        for each in with_gradient(outputs) if torch.is_grad_enabled() else ():
            self.is_due = True
            _ = cast(Any, each).register_hook(self._end)

    def _end(self, _gradient: torch.Tensor) -> None:
        self.is_due = False


class Replica(DistributedDataParallel):
    """DDP that knows which parameters it exchanges, and whether all of them must take part in every backward.

    Attributes:
        exchanged, frozen: the parameters that were trainable when it was made and the others, by name.
        unstepped: the parameters that the first step compares between ranks, by name; none after it.
        uses_all: whether every one of them must take part in every backward.
        bare: whether DDP has nothing to do in a forward under `no_sync`, unless buffers are due; never
            where it moves inputs to a device, nor after `join_hook`.
    """

    def __init__(self, view: ModelView, *, find_unused_parameters: bool, static_graph: bool, **options: Any) -> None:
        cast(Any, super()).__init__(
            view.model, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **options
        )
        named = tuple(view.parameters.items())
        self.exchanged = tuple((name, parameter) for name, parameter in named if parameter.requires_grad)
        self.frozen = tuple((name, parameter) for name, parameter in named if not parameter.requires_grad)
        alike = [(name, each) for name, each in named if name not in cast(Any, self).parameters_to_ignore]
        self.unstepped = [(name, each) for name, each in alike if type(each) is nn.Parameter and not each.is_meta]
        self.uses_all = not find_unused_parameters and not static_graph
        self.bare = self.uses_all and not options.get("device_ids")
        if any(has_wide_gradient(parameter) for _, parameter in self.exchanged):
            # all gradients are taken and exchanged in this dtype, from the next arrangement of buckets on
            cast(Any, self).reducer._set_mixed_precision_param_dtype(torch.float32)
        self._has_buffers = bool(view.buffers)
        self._pending = PendingForward()
        self._due = _Due()
        self._rivals: list[_ExchangerLink] = []  # replicas with some of the same trainable parameters
        for _, parameter in self.exchanged:
            known: _ExchangerLink = tensor_notes(parameter).get("exchanger", _ExchangerLink())
            rival = known()
            if rival is not None and all(each() is not rival for each in self._rivals):
                self._rivals.append(_ExchangerLink(rival))
                rival._rivals.append(_ExchangerLink(self))
            note_tensor(parameter, exchanger=_ExchangerLink(self))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; without DDP's own forward where that would only look, at the cost of a small layer."""
        if not (self._has_buffers or self._rivals) or torch.compiler.is_compiling():
            return self._run(*inputs, **kwargs)
        exchanges_shared = bool(self._rivals) and self.require_backward_grad_sync and torch.is_grad_enabled()
        if exchanges_shared:
            self._refuse_rivals()
        if self._has_buffers and self._pending.keeps_buffers():
            self.require_forward_param_sync = False  # DDP sets it again behind a forward that exchanges gradients
        outputs = self._run(*inputs, **kwargs)
        self._pending.note(outputs)
        if exchanges_shared:
            self._due.note(outputs)
        return outputs

    def _refuse_rivals(self) -> None:
        """Refuse a backward through two replicas with one parameter: each would sum its gradient and write its own
        sum."""
        for each in self._rivals:
            rival = each()
            if rival is None or not (self.gradient_as_bucket_view or rival.gradient_as_bucket_view):
                continue  # without views both take the rank's gradient before either writes the sum
            if rival._due.is_due:
                ids = {id(parameter) for _, parameter in rival.exchanged}
                names = [name for name, parameter in self.exchanged if id(parameter) in ids]
                raise PrepareError(
                    "two prepared models share parameters, and one backward would exchange their gradients twice",
                    expected="one prepared model, or a backward for each before the next forward",
                    got=f"a forward of both, with {show_names(names)} in both",
                    where=f"{_inner_name(self)}, after {_inner_name(rival)}",
                    fix="Put both into one module with one forward, and prepare that; or prepare both with"
                    " gradient_as_bucket_view=False. A forward without a backward belongs into torch.no_grad().",
                )

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        buffers_due = self._has_buffers and self.require_forward_param_sync
        if not self.bare or self.require_backward_grad_sync or buffers_due or torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)  # pyright: ignore - torch leaves its type open
        if torch.is_grad_enabled():
            self.rebuild_buckets()  # raises if the exchange before did not end
        with _Running(self):
            return cast(Any, self).module(*inputs, **kwargs)

    def rebuild_buckets(self) -> None:
        """Arrange buckets as at a forward; a `RuntimeError` counts gradients that are awaited, "for rank N: ..."."""
        cast(Any, self).reducer._rebuild_buckets()

    def _inside_ddp_forward(self) -> Any:
        """Mark the forward for torch.compile, without torch's own generator, which takes twice as long."""
        return super()._inside_ddp_forward() if torch.compiler.is_compiling() else _Running(self)

    def join_hook(self, **kwargs: Any) -> Any:
        """Announce every forward from now on, so that ranks without inputs can answer it; they take fewer steps."""
        self.bare = False
        let_step_alone_(parameter for _, parameter in self.exchanged)
        return cast(Any, super()).join_hook(**kwargs)


def _inner_name(replica: Replica) -> str:
    return type(cast(Any, replica).module).__name__


class _Touch(nn.Module):
    """A forward that uses every trainable parameter of a model, with zero gradients."""

    def __init__(self, view: ModelView) -> None:
        super().__init__()
        self.model = view.model  # a submodule, because DDP looks for the buffers to synchronise
        self._trained = [each for each in view.parameters.values() if each.requires_grad]
        self._tables = {id(each) for each in view.tables.values()}

    def forward(self, _: None) -> torch.Tensor:
        return torch.stack([_touched(each, sparse=id(each) in self._tables) for each in self._trained]).sum()


def _touched(parameter: nn.Parameter, *, sparse: bool) -> torch.Tensor:
    """Return 0 as a function of a parameter; a sparse gradient has no rows then."""
    if sparse:
        none = torch.empty(0, dtype=torch.long, device=parameter.device)
        used = nn.functional.embedding(none, parameter, sparse=True)
    else:
        used = parameter.flatten()[:1]
    real = torch.view_as_real(used) if used.is_complex() else used
    return real.sum().double() * 0


def _is_done(_ctx: DistContext, view: ModelView) -> bool:
    return replica_of(view.model) is not None or view.is_sharded


def _masters_unused(asked: PrepareCall) -> RefusedFact | None:
    # DDP arranges its buckets in float32 before the first step, and then needs to know that every parameter takes part
    passes = asked.options.find_unused_parameters or asked.options.static_graph
    return RefusedFact("both") if passes and asked.ctx.precision.master_weights is not None else None


_REFUSED = (
    ModelRefusal(
        "DDP does not exchange float32 gradients of 16-bit parameters so",
        _masters_unused,
        expected="master weights, or find_unused_parameters and static_graph",
        fix='Keep parameters in float32 instead: precision="bf16" computes in bf16.',
        error=ConfigError,
    ),
)


def _spread(ctx: DistContext, view: ModelView, options: ReplicateOptions, *, is_empty: bool) -> nn.Module:
    if is_empty:  # DDP looks at values when it is made
        allocate_empty(view.model, ctx.device)
        view = view.after()
    make_room([*view.parameters.values(), *view.buffers.values()], ctx.device)
    move_model(view, ctx.streams)
    view = view.after()
    uses_all = not options.find_unused_parameters and not options.static_graph
    label_parameters(view.parameters, needed=uses_all, viewed=options.gradient_as_bucket_view)
    if not any(parameter.requires_grad for parameter in view.parameters.values()):
        begin_with_rank_0_(ctx, replicated_tensors(view))
        return view.model
    return _replicate(ctx, view, options)


def _replicate(ctx: DistContext, view: ModelView, options: ReplicateOptions) -> Replica:
    trained = {name: each for name, each in view.parameters.items() if each.requires_grad}
    compare_models(ctx, options, trained)
    replica = Replica(
        view,
        device_ids=None if ctx.device.type in ("cpu", "xla") else [ctx.device],
        process_group=ctx.comm.group,
        find_unused_parameters=options.find_unused_parameters,
        bucket_cap_mb=options.bucket_cap_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **_buffer_options(ctx, view, options),
        **_initial_options(ctx, view),
    )
    hook = options.comm_hook
    # NCCL does not even sum the rows of no sample
    is_early = ctx.backend == "nccl" and bool(view.tables)
    if is_early:
        register_hook(replica, ctx.comm.group, hook or gather_sparse)
    if not options.find_unused_parameters and not options.static_graph:
        _fix_buckets(replica, view)
    if hook is not None and not is_early:
        register_hook(replica, ctx.comm.group, hook)
    return replica


def _buffer_options(ctx: DistContext, view: ModelView, options: ReplicateOptions) -> dict[str, bool]:
    """Return this torch's option to leave buffers out of forward. At the start they are rank 0's in any case."""
    if options.broadcast_buffers:
        return {}
    begin_with_rank_0_(ctx, view.buffers.values())
    new = "forward_sync_buffers"  # of torch 2.13, which warns about the old name
    known = inspect.signature(cast(Any, DistributedDataParallel)).parameters
    return {new if new in known else "broadcast_buffers": False}


def _initial_options(ctx: DistContext, view: ModelView) -> dict[str, bool]:
    """Begin with rank 0's tensors without DDP where it cannot send them: integers of 64 bits on XLA, parts of
    quantizers' weights."""
    if ctx.device.type != "xla" and not view.packed:
        return {}
    begin_with_rank_0_(ctx, replicated_tensors(view))
    return {"init_sync": False}


def _fix_buckets(replica: DistributedDataParallel, view: ModelView) -> None:
    """Let DDP lay out its buckets now, in an order that is the same in every run."""
    # DDP lays its buckets out anew after the first backward, in the order in which gradients came. A gradient's place
    # in its bucket decides the order in which ranks are summed, so a resumed run would differ in the last bits.
    replica.module = _Touch(view)
    try:
        with torch.enable_grad():
            for _ in range(2):  # the first backward finds the order, the next forward lays the buckets out
                replica(None).backward()  # DDP with a device fails without any input
    finally:
        replica.module = view.model
    for parameter in view.parameters.values():
        parameter.grad = None


def replica_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP around a model, torch.compile outside or inside of it; None if there is none."""
    while not isinstance(model, DistributedDataParallel):
        name = wrapped_name(model)
        if name is None:
            return None
        model = getattr(model, name)
    return model


REPLICATE = Spread(
    dimension="replicate",
    options_from=lambda _plan, keywords, _view: keywords,
    keywords=ReplicateOptions.__struct_fields__,
    is_done=_is_done,
    refusals=lambda ctx, view, options: refused(PrepareCall(ctx, view, options=options), _REFUSED),
    spread=_spread,
    replaces=False,
    takes_sparse=True,
)


@context_first
@contextlib.contextmanager
def join_uneven_inputs(
    ctx: DistContext, *models: nn.Module | Joinable, divide_by_initial_world_size: bool = True
) -> Generator[None]:
    """Let ranks take different numbers of steps in this block, on any device. A collective at its end.

    A rank that reaches the end answers the exchanges of the others' backward passes by zeros, and takes over the
    parameters of a rank that went on longest; its optimizer has then seen fewer steps. In the block make no other call
    that ranks make together: leave `weight=` out of `backward`, and gather nothing. `accel.batches` needs none of this:
    it gives every rank equally many batches, and placeholders count as nothing.

    Args:
        ctx: the context.
        models: from `prepare_model`; all that the block trains. Further objects of torch's `Joinable` join with them,
            such as a `ZeroRedundancyOptimizer`: a rank without inputs answers their exchanges by their own hooks.
        divide_by_initial_world_size: whether gradients are divided by all ranks, so that every sample counts the same,
            or by those that still have inputs, so that every step has the same size.

    Raises:
        ConfigError: no models.
        PrepareError: a model with sparse gradients; on more ranks than one also a model that DDP does not wrap, or
            something else that does not join.

    Reference: torch.distributed.algorithms.Join.
    """
    ctx.comm.check_open()
    if not models:
        raise ConfigError("nothing to join", expected="the models that the block trains", got="none")
    for each in models:
        if isinstance(each, nn.Module):
            check_sparse(ModelView(unwrap_model(each)), {"ranks that run out of inputs": True}, "join_uneven_inputs")
    if ctx.world_size == 1:
        yield
        return
    replicas = cast("list[Any]", [_joinable(each) for each in models])
    options = {"divide_by_initial_world_size": divide_by_initial_world_size}
    join = Join(replicas, **options)
    try:
        yield
        with warnings.catch_warnings():  # torch would leave the filters changed
            join.__exit__(None, None, None)
    finally:
        _ = Join(replicas, enable=False, **options)  # or every later forward would still notify the other ranks
        for each in models:
            if isinstance(each, nn.Module):
                let_step_alone_(each.parameters(), alone=False)
        for each in replicas:
            if isinstance(each, Replica):
                each.unstepped.clear()  # a rank without inputs has not stepped, and has another's parameters now


def _joinable(model: nn.Module | Joinable) -> Joinable:
    if isinstance(model, Joinable) and not isinstance(model, nn.Module):
        return model
    replica = replica_of(model) if isinstance(model, nn.Module) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if replica is None:
        raise PrepareError(
            "only DDP answers for ranks that have no inputs left",
            expected="a model from accel.prepare_model, or another of torch's Joinable",
            got=f"a {type(model).__name__} that DDP does not wrap",
            where="join_uneven_inputs",
        )
    return replica
