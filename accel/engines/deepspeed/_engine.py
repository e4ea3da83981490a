# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as an engine of the training loop: prepare, hold, step and state; scopes in which stage 3 is whole."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accel.comm import refuse_replaced, replaced
from accel.context import DistContext, context_first
from accel.data import StreamLoader
from accel.data._loader import Loader
from accel.data._shards import EpochPlan
from accel.engines.deepspeed._options import DeepSpeed, ResolvedDeepSpeed, RunFacts, from_setting
from accel.engines.deepspeed._package import ZeroOptimizer, connected, initialized, link_weights
from accel.engines.deepspeed._resolve import resolve
from accel.engines.deepspeed._whole import loaded, whole_items
from accel.errors import ConfigError, PrepareError
from accel.parallel._engines import Engine, EngineOutcome, StepRequest
from accel.parallel._modules import note_module
from accel.tensors import packed_weights

_WIDTHS = ("hidden_size", "hidden_sizes", "n_embd", "d_model", "dim")


@context_first
def config_of(ctx: DistContext) -> DeepSpeed:
    """Return the configuration of a context's setting `deepspeed`; the default one if it has none. May read a file."""
    return from_setting(ctx.settings.deepspeed, ctx.launched.get("deepspeed", "deepspeed="))


def read_facts(ctx: DistContext, objects: Iterable[object]) -> RunFacts:
    """Return the facts of a context and of prepared objects. No communication.

    The first of several loaders gives the size of a micro-batch; optimizers and models follow the same rule.
    """
    facts: dict[str, Any] = {}
    for each in objects:
        if isinstance(each, Loader | StreamLoader):
            facts.setdefault("rows", _rows(each))
        elif isinstance(each, nn.Module):
            facts.setdefault("hidden_size", width_of(each))
        elif isinstance(each, Optimizer) and "optimizer" not in facts:
            values = {name: value for name, value in each.param_groups[0].items() if name != "params"}
            facts |= {"optimizer": type(each).__name__, "optimizer_values": values}
    is_set = ctx.accumulation > 1 or "accumulation" in ctx.launched
    return RunFacts(
        ranks=ctx.data_parallel[1],
        precision=ctx.precision,
        accumulation=ctx.accumulation if is_set else None,
        places=dict(ctx.launched),
        **facts,
    )


def width_of(model: nn.Module) -> int | None:
    """Return the width in a model's configuration; None without one."""
    config: Any = getattr(model, "config", None)
    for inner in (config, _get(config, "text_config")):
        for name in _WIDTHS:
            found = _get(inner, name)
            widths = cast(list[Any], found) if isinstance(found, list | tuple) else [found]
            if widths and all(type(width) is int for width in widths):
                return max(widths)
    return None


def _get(config: Any, name: str) -> Any:
    return cast(Mapping[str, Any], config).get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _rows(loader: Loader | StreamLoader) -> int | None:
    """Return the most samples of a rank's batch; None where batches differ in size."""
    if isinstance(loader, StreamLoader):
        if loader.batch_size is not None or loader.global_batch is None:
            return loader.batch_size
        return -(-loader.global_batch // loader.world_size)
    plan = loader.source.plan
    return -(-plan.global_batch // loader.world_size) if isinstance(plan, EpochPlan) else None


M = TypeVar("M", bound=nn.Module)


@context_first
@contextlib.contextmanager
def gathered(ctx: DistContext, parameters: Iterable[torch.Tensor], *, changed_by: int | None = None) -> Generator[None]:
    """Make sharded parameters whole for a block. A collective; at stages 1 and 2 parameters are whole in any case.

    Args:
        ctx: the context.
        parameters: of a model that DeepSpeed shards.
        changed_by: the rank that sends its changes to all ranks; None if nothing is changed. The optimizer's separate
            fp32 weights do not follow.
    """
    whole = list(parameters)
    line = "gathered(ctx, parameters)"
    with connected().zero.GatheredParameters(whole, modifier_rank=changed_by), replaced(whole, "gathered", line):
        yield


@context_first
def build_sharded(ctx: DistContext, make: Callable[[], M]) -> M:
    """Build a model, and shard the parameters of each module as it is made. A collective; every rank calls it.

    Args:
        ctx: the context, with stage 3.
        make: builds the model; the same on every rank.

    Returns:
        The model, for `prepare`.

    Raises:
        ConfigError: another stage than 3.
        MissingExtraError: DeepSpeed is missing.

    Examples:
        >>> model = build_sharded(ctx, lambda: Llama(config))
    """
    config = config_of(ctx)
    if config.stage != 3:
        raise ConfigError(
            "only stage 3 shards parameters",
            expected="stage 3",
            got=f"stage {config.stage}",
            where="build_sharded",
            fix="Call make() itself, or pass deepspeed=accel.engines.deepspeed.DeepSpeed(stage=3).",
        )
    settings = resolve(config, read_facts(ctx, ())).settings
    with connected().zero.Init(config_dict_or_path=settings):
        model = make()
    mark_emptied(model)
    return model


def mark_emptied(model: nn.Module) -> None:
    """Note on a model and its modules that their parameters are empty between passes. Mutates them."""
    for each in model.modules():
        note_module(each, emptied="DeepSpeed's stage 3")


def make(ctx: DistContext) -> Engine:
    """Return the engine. Its state is in the objects that it prepares."""
    return Engine(
        prepare=_prepare,
        hold=_hold,
        backward=_backward,
        step=_step,
        clear=_clear,
        clip_norm=_refuse_clip,
        clip_value=_refuse_clip,
        items=whole_items,
        loaded=loaded,
    )


def _prepare(ctx: DistContext, objects: Sequence[Any]) -> Sequence[Any]:
    """Hand models and their optimizers over to DeepSpeed. A collective."""
    _check_mesh(ctx)
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    owners = {id(each): _owner(each, models) for each in optimizers}
    others = [each for each in objects if not isinstance(each, nn.Module | Optimizer)]
    prepared: dict[int, Any] = {}
    for model in models:
        own = [each for each in optimizers if owners[id(each)] is model]
        resolved = _settled(ctx, [model, *own, *others])
        if len(own) > 1:
            got = f"{len(own)} optimizers"
            raise PrepareError("DeepSpeed takes one optimizer of a model", got=got, where="prepare", fix=_GROUPS)
        if own:
            prepared[id(model)], prepared[id(own[0])] = _trained(ctx, model, own[0], resolved)
        else:
            prepared[id(model)] = _frozen(ctx, model, resolved)
    return [prepared.get(id(each), each) for each in objects]


_BOUNDARY = "managed_gradient_accumulation"  # False: a window ends in `optimizer_step` alone
_GROUPS = "Make one optimizer with several groups of parameters."


def _check_mesh(ctx: DistContext) -> None:
    if ctx.data_parallel[1] != ctx.world_size:
        raise ConfigError(
            "DeepSpeed shards over data-parallel ranks only",
            expected="no mesh",
            got=str(ctx.axes),
            where="strategy='deepspeed'",
            fix="Leave the mesh out, or use strategy='fsdp', which combines with tp, cp and pp.",
        )


def _owner(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that an optimizer trains."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for model in models:
        if held <= {id(each) for each in model.parameters()}:
            return model
    raise PrepareError(
        "DeepSpeed prepares a model together with its optimizer",
        expected="the model of the optimizer's parameters in the same call",
        got=type(optimizer).__name__,
        where="prepare",
        fix="model, optimizer = accel.prepare(ctx, model, optimizer)",
    )


def _settled(ctx: DistContext, objects: Sequence[Any]) -> ResolvedDeepSpeed:
    config = config_of(ctx)
    if config.stage == 0:
        raise ConfigError(
            "ZeRO stage 0 shards nothing",
            expected="stage 1, 2 or 3",
            got="0",
            where="DeepSpeed.stage",
            fix="Pass strategy='ddp', which is the same and needs no DeepSpeed.",
        )
    if config.stage == 1 and config.overlap is True:
        raise ConfigError(
            "ZeRO stage 1 exchanges gradients within the step",
            expected="overlap left out, or stage 2",
            got="overlap=True",
            where="DeepSpeed.overlap",
            fix="Leave overlap out, or pass stage=2, which sends gradients during backward.",
        )
    if ctx.device.type == "cpu" and ctx.precision.compute == "fp16":
        raise ConfigError(
            "DeepSpeed has no fp16 on a CPU", got=ctx.precision.name, where="precision=", fix="Pass precision='bf16'."
        )
    resolved = resolve(config, read_facts(ctx, objects), imposed={_BOUNDARY: False})
    if resolved.newer and ctx.is_main_process:
        text = "DeepSpeed's configuration has keys that are not on record, which the installed version must know: %s"
        logging.getLogger("accel.engines").warning(text, ", ".join(resolved.newer))
    return resolved


def _trained(
    ctx: DistContext, model: nn.Module, optimizer: Optimizer, resolved: ResolvedDeepSpeed
) -> tuple[Any, Optimizer]:
    stage = resolved.settings["zero_optimization"]["stage"]
    _check_values(model, stage)
    every = optimizer.param_groups
    groups = [list(group["params"]) for group in every]
    trained = [group for group in every if any(each.requires_grad for each in group["params"])]
    if not trained:
        raise PrepareError(
            "the optimizer has no parameter that trains",
            expected="a parameter with requires_grad",
            got=f"{sum(map(len, groups))} without",
            where="prepare",
            fix="Set requires_grad before prepare; or prepare the model without an optimizer.",
        )
    optimizer.param_groups = trained  # DeepSpeed makes a flat tensor of each group, and none of nothing
    try:
        engine, _, _, _ = initialized(model, optimizer=optimizer, config=_settings(ctx, resolved))
    finally:
        optimizer.param_groups = every
    link_weights(engine.optimizer)
    handle = ZeroOptimizer(engine, optimizer, groups, trained, resolved)
    note_module(engine, wraps="module", held=handle.gradients)
    if stage == 3:
        mark_emptied(engine)
    return engine, handle


def _frozen(ctx: DistContext, model: nn.Module, resolved: ResolvedDeepSpeed) -> nn.Module:
    """Return a model without an optimizer: sharded at stage 3, else whole on the device."""
    if resolved.settings["zero_optimization"]["stage"] < 3:
        return model.to(ctx.device)
    _check_values(model, 3)
    engine, _, _, _ = initialized(model, config=_settings(ctx, resolved))
    note_module(engine, wraps="module")
    mark_emptied(engine)
    return engine


def _check_values(model: nn.Module, stage: int) -> None:
    empty = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise PrepareError(
            "DeepSpeed cannot shard a model on the meta device",
            expected="a model with values, or one that is sharded as it is built",
            got=f"{empty} on meta",
            where="prepare",
            fix="Build it by accel.engines.deepspeed.build_sharded(ctx, make).",
        )
    flat = next((name for name, each in model.named_parameters() if not each.dim()), None)
    if flat is not None:
        raise PrepareError(
            "DeepSpeed does not take parameters without a dimension",
            expected="parameters of one dimension or more",
            got=f"{flat} of shape []",
            where="prepare",
            fix="Give it shape [1], as torch.nn.Parameter(torch.tensor([value])); or take strategy='fsdp' or 'ddp'.",
        )
    kinds = {name: type(model.get_parameter(name)) for name in packed_weights(model)}
    wrong = [name for name, kind in kinds.items() if stage == 3 or kind.__module__.startswith("torchao.")]
    if wrong:
        raise PrepareError(
            "DeepSpeed neither divides quantized weights nor moves torchao's",
            expected="plain weights, or weights of bitsandbytes at stage 1 or 2",
            got=f"stage {stage}, {len(wrong)} weights such as {wrong[0]}",
            where="prepare",
            fix="Use strategy='ddp', which keeps all of them on each rank.",
        )


def _settings(ctx: DistContext, resolved: ResolvedDeepSpeed) -> dict[str, Any]:
    """Return the settings with a window of one backward, as the loop decides where windows end."""
    settings = resolved.settings
    settings["gradient_accumulation_steps"] = 1
    settings["train_batch_size"] = settings["train_micro_batch_size_per_gpu"] * ctx.world_size
    settings["gradient_clipping"] = 0.0
    settings.setdefault("steps_per_print", 2**62)
    if settings.get("bf16", {}).get("enabled"):
        settings["bf16"]["check_grad_overflow"] = True
    return settings


@contextlib.contextmanager
def _hold(ctx: DistContext, models: Sequence[nn.Module], exchanges: bool) -> Generator[None]:
    yield  # stage 1 exchanges within the step, stages 2 and 3 in every backward, which adds


def _backward(ctx: DistContext, loss: torch.Tensor, retain_graph: bool) -> None:
    torch.autograd.backward(loss, retain_graph=retain_graph)  # hooks of DeepSpeed's reduce what there is to reduce


def _step(ctx: DistContext, optimizers: Sequence[Optimizer], request: StepRequest) -> EngineOutcome:
    handles = _handles(optimizers)
    _check_request(handles, request)
    for handle in handles:
        handle.gradients.refuse_found()
        refuse_replaced(itertools.chain(*handle.groups), "accel.optimizer_step")
    scale = 1.0 / float(request.factor)
    norms: list[torch.Tensor] = []
    finite = True
    for handle, longest in zip(handles, request.max_norms, strict=True):
        handle.resolved.check_step(max_norm=longest, accumulation=request.accumulation)
        zero = handle.zero
        zero.loss_scale, zero.clip_grad = scale, longest or 0.0  # its own pass divides and clips
        try:
            with handle.inner_groups():
                handle.engine.step()
        finally:
            zero.loss_scale, zero.clip_grad = 1.0, 0.0
        handle.gradients.clear()
        if zero.overflow:
            finite = False
        elif (norm := handle.engine.get_global_grad_norm()) is not None:
            norms.append(torch.as_tensor(norm, dtype=torch.float32))
    joint = torch.stack(norms).square().sum().sqrt() if len(norms) == len(handles) else None
    return EngineOutcome(stepped=finite, finite=finite, grad_norm=joint)


def _check_request(handles: Sequence[ZeroOptimizer], request: StepRequest) -> None:
    problem = ""
    if request.max_value is not None:
        problem = "max_value= clips elements"
    elif request.norm_type != 2 and any(each is not None for each in request.max_norms):
        problem = f"norm_type={request.norm_type:g} is no 2-norm"
    elif len(handles) > 1 and (request.joint or request.check_finite) and any(request.max_norms):
        problem = "max_norm= clips several models by one norm"
    if problem:
        raise ConfigError(
            f"{problem}, which DeepSpeed's engine cannot",
            expected="max_norm= of one optimizer, by the 2-norm",
            where="optimizer_step, strategy='deepspeed'",
            fix="Step each optimizer in a separate call, with max_norm=.",
        )


def _clear(ctx: DistContext, optimizers: Sequence[Optimizer]) -> None:
    for handle in _handles(optimizers):
        handle.gradients.clear()


def _handles(optimizers: Sequence[Optimizer]) -> list[ZeroOptimizer]:
    found = [each for each in optimizers if isinstance(each, ZeroOptimizer)]
    if len(found) < len(optimizers):
        raise PrepareError(
            "an optimizer that DeepSpeed did not prepare",
            expected="the one that prepare returned",
            got=type(optimizers[0]).__name__,
            where="optimizer_step",
            fix="model, optimizer = accel.prepare(ctx, model, optimizer)",
        )
    return found


def _refuse_clip(ctx: DistContext, parameters: Sequence[torch.Tensor], *options: Any) -> Any:
    raise ConfigError(
        "gradients under DeepSpeed cannot be clipped before the step",
        where="strategy='deepspeed'",
        fix="Pass max_norm= to accel.optimizer_step.",
    )
