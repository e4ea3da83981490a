# SPDX-License-Identifier: Apache-2.0
"""`prepare_model`: a model is spread along each dimension of the context's mesh, in one order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from accel.context import DistContext, context_first
from accel.errors import ConfigError, PrepareError
from accel.errors._checks import check_kind
from accel.formats import Compile
from accel.parallel._brought_shards import check_divided, sum_each_backward
from accel.parallel._compile import compile_model
from accel.parallel._empty import allocate_empty, expect_values, move_model, stays_empty
from accel.parallel._engines import engine_of
from accel.parallel._entries import add_entries, check_methods, lead_entries
from accel.parallel._labels import (
    keep_state_on_host_,
    label_parameters,
    name_of,
    refuse_assigned_in_forwards,
)
from accel.parallel._modules import note_prepared, notes_of, sharded_units, unwrap_model
from accel.parallel._offload import use_streams
from accel.parallel._private import compile_in_place, is_compiled, is_wrapper
from accel.parallel._refused import (
    FORMS,
    HOOKED,
    INFERENCE,
    MODELS,
    PrepareCall,
    check_sparse,
    check_unallocated,
    raised,
    refuse_foreign,
    refused,
    report,
)
from accel.parallel._same_batches import SHARING, compare_batches
from accel.parallel._sharded import check_adopted, check_replicated, note_shards
from accel.parallel._spread import ModelView, ReplicateOptions, Spread, SpreadOptions, stage_comm
from accel.parallel._watches import log_changed_buffers, watch_autocast
from accel.parallel.axes.context import ALL_POSITIONS, CONTEXT
from accel.parallel.axes.experts import EXPERT
from accel.parallel.axes.pipeline import PIPELINE
from accel.parallel.axes.replicate._comm_hooks import CommHook, check_hook
from accel.parallel.axes.replicate._ddp import REPLICATE, Replica, replica_of
from accel.parallel.axes.shard import SHARD
from accel.parallel.axes.tensor import TENSOR
from accel.parallel.logits._deferred import DefersLogits, deferral_after
from accel.topology import Dimension, Plan, data_dimension, dimension_of

# Stages are cut first, since every other dimension divides what one stage holds. Data parallelism comes last: it takes
# the parameters as the others have left them. `fully_shard` exchanges along replicas too, so a mesh of both is SHARD's.
_ORDER: tuple[Dimension, ...] = ("pipeline", "expert", "tensor", "context", "sequence", "shard", "replicate")
_BUILT = (PIPELINE, EXPERT, TENSOR, CONTEXT, SHARD, REPLICATE)
_SPREADS: Mapping[Dimension, Spread] = {each.dimension: each for each in _BUILT}


def composition(ctx: DistContext) -> Sequence[Spread]:
    """Return the spreads of a model over the ranks of a context, in their order; along other dimensions ranks hold
    replicas, or the user's own parts."""
    asked = {dimension_of(name) for name, axis in ctx.position.axes if axis.size > 1}
    # DDP only takes full models of plain parameters; `fully_shard` has replicas of parts of models too.
    divides_model = asked & {"pipeline", "tensor", "expert"}
    wanted = {*asked - {"data", "replicate", "shard"}, "shard" if divides_model else data_dimension(ctx.strategy)}
    if asked == {"pipeline"}:  # every rank has another stage, and no peer with the same one
        wanted = {"pipeline"}
    return [_SPREADS[dimension] for dimension in _ORDER if dimension in wanted and dimension in _SPREADS]


def unspread(ctx: DistContext, view: ModelView) -> Sequence[Spread]:
    """Return what `prepare_model` would apply to a model; nothing on one rank. No communication."""
    return [each for each in composition(ctx) if ctx.world_size > 1 and not each.is_done(ctx, view)]


def check_axes(ctx: DistContext, *, spreads: bool = True) -> None:
    """Raise `PrepareError` for a pipeline or expert axis of ranks that would hold replicas.

    `spreads`: the model is about to be spread along the known axes.
    """
    for name, axis in ctx.position.axes:
        dimension = dimension_of(name)
        known = spreads and dimension in _SPREADS
        if axis.size == 1 or dimension not in ("pipeline", "expert") or known:
            continue
        held = "stage" if dimension == "pipeline" else "experts"
        # names and shapes of stages and experts are often equal, so nothing later would notice
        raise PrepareError(
            f"every rank would begin with rank 0's {held}, and average gradients with all others",
            expected="a mesh without pipeline and expert dimensions of more than one rank",
            got=f"{name}={axis.size}",
            where="prepare_model, ctx.mesh",
            fix=f"Leave {name} out of the mesh, or keep the model out of prepare and exchange its gradients.",
        )


@context_first
def prepare_model(
    ctx: DistContext,
    model: nn.Module,
    *,
    find_unused_parameters: bool = False,
    bucket_cap_mb: float = 25.0,
    static_graph: bool = False,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
    comm_hook: CommHook | None = None,
    plan: Plan | None = None,
    example: Any = None,
    allocate: bool = True,
) -> nn.Module:
    """Move the model to the context's device, and spread it over the ranks by the context's strategy. A collective.

    Under `ddp` every rank has a replica, which DDP wraps. Under `fsdp` every rank has a part of each parameter: the
    blocks of the model, then the rest, are sharded in place by `fully_shard`, along the context's mesh or over all
    ranks; build the optimizer from the parameters that the model has then, or pass it to `prepare` too. One rank keeps
    the model as it is, under either.

    Every rank begins with rank 0's parameters and buffers, also with an empty model on the meta device. Where no
    rank has values each gives its part memory, for a load or an initialisation to fill before the first forward.

    A model that is wrapped or spread over all ranks already is returned unchanged; under `ddp` also one without
    trainable parameters. The setting `compile` is applied to models without a compiled part.

    Args:
        ctx: the context.
        model: on the CPU, on the context's device, or without values on the meta device. Mutated.
        find_unused_parameters: lets parameters stay out of a loss. One that no rank used has no gradient then, and no
            optimizer moves it. Sharded models exchange a bit for each parameter before a step; blocks that only some
            ranks run are beyond them.
        broadcast_buffers: whether rank 0's buffers replace the others' before each forward.
        bucket_cap_mb, static_graph, gradient_as_bucket_view: as in DistributedDataParallel, under `ddp` only; the
            bucket's unit is MiB.
        comm_hook: dtype of the messages with gradients, under `ddp` only: "fp16" or "bf16" sends them in that dtype,
            a `PowerSgd` as thin matrices; or a function for DDP's register_comm_hook, with the process group as its
            state. None sends them as they are.
        plan: styles, stages and units for the mesh's axes of several ranks; None for `ctx.plan`, else `Plan()`.
        example: a batch as `forward_backward` takes its inputs, for stages along pp, and for the styles along
            tp of a model that declares none; without effect elsewhere. Any number of rows; values do not matter.
        allocate: whether a model that is empty on every rank gets memory. False leaves this rank's part of it empty,
            for `load_checkpoint_and_dispatch`.

    Returns:
        The model to call in the training loop.

    Raises:
        DeviceError: a parameter or buffer on another device; named. Or a GPU that is not the current one, for `fsdp`.
        PrepareError: not a module, a model that is already wrapped or sharded together with options that it would need
            to be wrapped with, one with a wrapper inside, a sharded one with gradients that would not reach every rank,
            parts of one tensor on ranks that get different samples, a model that the plan cannot shard,
            `allocate=False` together with replicas or shards, or a model that `fully_shard` does not accept.
        StageError: a module does what stages cannot play back, such as a result with unknown tensors.
        ConfigError: options outside their range, that contradict each other, or that the strategy does not have.
        MissingExtraError: PowerSGD without numpy.
        CollectiveMismatch: ranks passed other options, or models of other parameters.
    """
    ctx.comm.check_open()
    check_kind(
        model,
        nn.Module,
        "the model is not a module",
        expected="a torch.nn.Module",
        where="prepare_model",
        error=PrepareError,
    )
    keywords = ReplicateOptions(
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
        comm_hook=comm_hook,
    )
    keywords.check()
    if comm_hook is not None:
        check_hook(comm_hook)
    if not allocate:
        check_unallocated(ctx)
    return prepare_view(ctx, ModelView(model, example), ctx.plan if plan is None else plan, keywords, allocate=allocate)


def prepare_view(
    ctx: DistContext,
    view: ModelView,
    plan: Plan | None,
    keywords: ReplicateOptions | None = None,
    *,
    allocate: bool = True,
) -> nn.Module:
    """Prepare a model that is described already, as `prepare_model`. A collective."""
    keywords = keywords or ReplicateOptions()
    engine = engine_of(ctx)
    report(refused(PrepareCall(ctx, view), [HOOKED, INFERENCE]), "prepare_model")
    if engine is not None:
        _check_for_engine(ctx, view, plan, keywords)
        compile_as_set(ctx, view.model)
        return engine.prepare(ctx, [view.model])[0]
    if _divides_modules(ctx) and any(map(is_wrapper, view.modules.values())) and compile_in_place(view.model):
        view = ModelView(view.model, view.example)
    with _deferral(ctx, view, plan, keywords):
        prepared = _spread_alike(ctx, view, plan, keywords, allocate=allocate)
    compile_as_set(ctx, prepared)
    return prepared


def _divides_modules(ctx: DistContext) -> bool:
    """Return whether modules compute with parts of tensors, by mixins of their classes."""
    return not {each.dimension for each in composition(ctx)}.isdisjoint(("tensor", "context", "expert"))


def _deferral(
    ctx: DistContext, view: ModelView, plan: Plan | None, keywords: ReplicateOptions
) -> AbstractContextManager[None]:
    """Keep a model's deferred logits in front of what this block puts before the class of its head."""
    asked = _checked_plan(plan).logits == "deferred"
    if not asked and not any(isinstance(each, DefersLogits) for each in view.modules.values()):
        return nullcontext()
    passes = keywords.find_unused_parameters or keywords.static_graph
    replicated = ctx.world_size > 1 and composition(ctx)[-1] is REPLICATE
    obstacle = "DDP with find_unused_parameters or static_graph, which reads outputs" if passes and replicated else ""
    return deferral_after(view.model, asked=asked, obstacle=obstacle)


def _spread_alike(
    ctx: DistContext, view: ModelView, plan: Plan | None, keywords: ReplicateOptions, *, allocate: bool
) -> nn.Module:
    """Spread a model along every dimension, or adopt one that is spread. A collective."""
    model = view.model
    spreads = composition(ctx)
    _check_used(ctx, keywords, spreads)
    waiting = check_model(ctx, view, plan, keywords)
    options = [_resolved(ctx, view, each, own) for each, own in waiting]
    prepared = model
    if spreads[-1].is_done(ctx, view):  # data parallelism, which comes last
        _check_free_of_options(keywords)
        _adopt(ctx, view)
    elif ctx.world_size == 1:
        move_model(view, ctx.streams)
        label_parameters(view.parameters)
    is_empty = _is_empty(ctx, view, [each.dimension for each, _ in waiting])
    if ctx.world_size > 1:
        prepared = _spread(ctx, view, options, plan, is_empty=is_empty)
    if is_empty and allocate:
        inner = unwrap_model(prepared)
        allocate_empty(inner, ctx.device)
        expect_values(stage_comm(ctx), inner)
    if plan is not None and plan.micro_batches is not None:
        note_prepared(unwrap_model(prepared), micro_batches=plan.micro_batches)
    if plan is not None and plan.offload == "optimizer":
        keep_state_on_host_(prepared.parameters())
    _watch(ctx, view, prepared)
    return prepared


def _watch(ctx: DistContext, view: ModelView, model: nn.Module) -> None:
    """Look at the model's first forwards: whether autocast is on, and which buffers change. Let all refuse assigned
    shards."""
    refuse_assigned_in_forwards(unwrap_model(model), view.parameters.values())
    if "precision" in ctx.launched and ctx.precision.compute in ("bf16", "fp16") and ctx.precision.params is None:
        watch_autocast(model, ctx.device.type, ctx.precision.compute)
    if view.buffers:
        log_changed_buffers(ctx, model)
    if any("offload" in notes_of(each) for each in view.modules.values()):
        use_streams(model, ctx.streams)


def _check_for_engine(ctx: DistContext, view: ModelView, plan: Plan | None, keywords: ReplicateOptions) -> None:
    """Raise the errors of a model that an engine prepares."""
    if view.holds_dtensors:
        check_divided(ctx, view.model)
    _check_used(ctx, keywords, ())
    refuse_plan(ctx, plan)
    check_sparse(view, {f"the engine {ctx.settings.strategy}": True}, "prepare_model")


def _resolved(
    ctx: DistContext, view: ModelView, spread: Spread, options: SpreadOptions
) -> tuple[Spread, SpreadOptions]:
    """A spread with the options that ranks decide on together. A collective for some models."""
    if spread.resolve is None:
        return spread, options
    with ALL_POSITIONS.begun(ctx):  # a single rank that tries plans must not wait for others along cp
        return spread, spread.resolve(ctx, view, options)


def compile_as_set(ctx: DistContext, model: nn.Module) -> None:
    """Let torch compile a model by the context's settings, unless a part is compiled already. No communication. Mutates
    the model."""
    asked = ctx.settings.compile
    if isinstance(asked, Compile) and not any(is_compiled(module) for module in model.modules()):
        _ = compile_model(
            model,
            "repeated" if asked.regions == "repeated" else None,
            backend=asked.backend,
            mode=asked.mode,
            fullgraph=asked.fullgraph,
            dynamic=asked.dynamic,
        )


def _spread(
    ctx: DistContext,
    view: ModelView,
    spreads: Iterable[tuple[Spread, SpreadOptions]],
    plan: Plan | None,
    *,
    is_empty: bool,
) -> nn.Module:
    """Spread a model along each dimension along which it is not spread yet, with entries for methods. A collective."""
    spread: list[Dimension] = []
    model, inner = view.model, view.inner.model
    methods = () if plan is None else plan.methods
    has_entries = bool(methods) or (hasattr(inner, "get_encoder") and not _axes_within_forward(ctx))
    if has_entries:
        add_entries(inner, methods)
    is_frozen = not any(each.requires_grad for each in view.parameters.values())
    for each, options in spreads:
        # what another has spread may be so along this one too; SHARD asks gradients, which frozen parts do not have
        is_open = is_frozen and "tensor" in spread and each is SHARD
        if is_open or not each.is_done(ctx, view):
            model = each.spread(ctx, view, options, is_empty=is_empty)
            view = view.after(model)
            spread.append(each.dimension)
    if has_entries:
        lead_entries(inner, model, methods)
    if not SHARING.isdisjoint(spread):
        compare_batches(ctx, view)
    return model


def _axes_within_forward(ctx: DistContext) -> list[str]:
    """Return the axes of several ranks along which nothing but a forward of the whole model can run."""
    axes = ctx.position.axes
    return [name for name, axis in axes if axis.size > 1 and dimension_of(name) in ("pipeline", "context", "sequence")]


def _is_empty(ctx: DistContext, view: ModelView, waiting: Sequence[Dimension]) -> bool:
    """Return whether no rank has values of a model that is to be spread along dimensions. A collective on several
    ranks."""
    if ctx.world_size == 1:
        return ctx.device.type != "meta" and any(each.is_meta for each in view.parameters.values())
    if not waiting:
        return False
    # stages have the values of one model
    return stays_empty(ctx.comm if "pipeline" in waiting else stage_comm(ctx), view)


def check_model(
    ctx: DistContext, view: ModelView, plan: Plan | None = None, keywords: ReplicateOptions | None = None
) -> list[tuple[Spread, SpreadOptions]]:
    """Raise the errors of `prepare_model` for a model, before anything changes: all of them together. No communication.

    Returns the spreads that are to come, with their options.
    """
    plan = _checked_plan(plan)
    keywords = keywords or ReplicateOptions()
    spreads = [(each, options_of(each, plan, keywords, view)) for each in composition(ctx)]
    if view.holds_dtensors:
        check_divided(ctx, view.model)
    if (replica := replica_of(view.model)) is not None:
        if not isinstance(replica, Replica):
            check_replicated(ctx, replica)
        return []
    waiting = unspread(ctx, view)
    to_come = [(each, options) for each, options in spreads if each in waiting]
    asked = PrepareCall(ctx, view, waiting)
    report(refused(asked, FORMS), "prepare_model")
    refusing = [each.dimension for each, _ in spreads if not each.takes_sparse]
    obstacles = {
        f"parameters spread along {', '.join(refusing)}": bool(refusing),
        "master weights": ctx.precision.master_weights is not None,
        "a comm_hook that compresses": keywords.compresses,
        "parameters that are sharded already": view.is_sharded,
    }
    checks = [
        partial(check_sparse, view, obstacles, "prepare_model"),
        *([partial(check_axes, ctx)] if waiting else []),
    ]
    if plan.methods:
        checks.append(partial(check_methods, view.inner.model, plan.methods, _axes_within_forward(ctx)))
    own = [error for each, options in to_come for error in each.refusals(ctx, view, options)]
    report([*refused(asked, MODELS), *raised(checks), *own], "prepare_model")
    return to_come


def replaces_parameters(ctx: DistContext, view: ModelView) -> bool:
    """Return whether `prepare_model` would put other parameters in the place of the model's. No communication."""
    return any(each.replaces for each in unspread(ctx, view))


def options_of(spread: Spread, plan: Plan, keywords: ReplicateOptions, view: ModelView) -> SpreadOptions:
    """Return the options of one dimension, or raise `ConfigError`. No communication."""
    options = spread.options_from(plan, keywords, view)
    options.check()
    return options


def refuse_plan(ctx: DistContext, plan: Plan | None) -> None:
    """Raise `ConfigError` for a plan with an engine, which spreads models by its own options."""
    if plan is not None:
        raise ConfigError(
            "a plan has no effect on an engine",
            expected="a strategy of accel",
            got=ctx.settings.strategy,
            where=ctx.launched.get("plan", "plan="),
            fix="Leave it out: the engine has its own options.",
        )


def _checked_plan(plan: Plan | None) -> Plan:
    check_kind(plan, Plan | None, "the plan is not valid", expected="an accel.parallel.Plan, or None", where="plan=")
    return plan or Plan()


def _check_used(ctx: DistContext, keywords: ReplicateOptions, spreads: Iterable[Spread]) -> None:
    """Raise `ConfigError` for keywords that are not at their defaults and that no dimension has as an option."""
    defaults = ReplicateOptions()
    exchanges = list(spreads)
    if exchanges and exchanges[-1].dimension == "pipeline":
        exchanges += [SHARD]  # stages without peers take what stages with peers do, so that one script serves both
    used = list(dict.fromkeys(name for each in exchanges for name in each.keywords))
    unused = [name for name in keywords.__struct_fields__ if name not in used]
    if ignored := [name for name in unused if getattr(keywords, name) != getattr(defaults, name)]:
        raise ConfigError(
            f"options of DistributedDataParallel have no effect {'on a sharded model' if used else 'on an engine'}",
            expected=f"none but {' and '.join(used)}" if used else "none",
            got=", ".join(ignored),
            where=f"prepare_model, strategy {ctx.strategy}",
            fix="Leave them out: with pp, tp or ep, fully_shard exchanges gradients under the strategy ddp too."
            if exchanges and data_dimension(ctx.strategy) == "replicate"
            else "Leave them out, or use the strategy ddp.",
        )


def _adopt(ctx: DistContext, view: ModelView) -> None:
    """Adopt a model that its user has wrapped or spread."""
    model = view.model
    replica = replica_of(model)
    if replica is None:
        check_adopted(ctx, model)
        sum_each_backward(model)
        if not all(map(name_of, view.parameters.values())):
            label_parameters(view.parameters)
        note_shards(sharded_units(model))
    elif not isinstance(replica, Replica):
        refuse_foreign(replica)
        uses_all = not replica.find_unused_parameters and not replica.static_graph
        label_parameters(view.inner.parameters, needed=uses_all)


def _check_free_of_options(options: ReplicateOptions) -> None:
    if options != ReplicateOptions():
        raise PrepareError(
            "the model is wrapped or spread already, so these options would change nothing",
            expected="options when the model is wrapped, and none later",
            got=options.describe(),
            where="prepare_model",
            fix="Pass them to the first prepare_model, before prepare.",
        )
