# SPDX-License-Identifier: Apache-2.0
"""Models that `prepare` refuses before anything moves: weights elsewhere, other wrappers, quantized or half weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from accel.context import DistContext
from accel.errors import AccelError, ConfigError, DeviceError, PrepareError
from accel.parallel._modules import named_modules, sparse_tables
from accel.parallel._spread import Spread
from accel.tensors import has_wide_gradient, is_absent, packed_weights
from accel.topology import data_dimension, dimension_of

_SHOWN = 3
_HOOK = "_hf_hook"  # attribute of a module with a hook of Accelerate's, or several in its `hooks`


def check_absent(ctx: DistContext, model: nn.Module) -> None:
    """Raise `PrepareError` for a dispatched model that would train absent weights, or that ranks would replicate or
    shard."""
    trains = {name: each.requires_grad for name, each in model.named_parameters() if is_absent(each)}
    trains |= {name: False for name, each in packed_weights(model).items() if any(map(is_absent, each.parts.values()))}
    trained = [name for name, is_trained in trains.items() if is_trained]
    if trained:
        raise PrepareError(
            "weights that are not in memory cannot be trained",
            got=f"{len(trained)}: {', '.join(trained[:_SHOWN])}",
            where="prepare_model",
            fix="Freeze them before dispatch_model, by model.requires_grad_(False); then add what trains.",
        )
    if trains and ctx.world_size > 1:
        raise PrepareError(
            "weights that are not in memory cannot be spread over ranks",
            got=f"{len(trains)} such weights and {ctx.world_size} ranks",
            where="prepare_model",
            fix="Train on one rank, or let fsdp shard a model that one device cannot hold. To run it divided, prepare "
            "it empty, by prepare_model(ctx, model, allocate=False), and dispatch it then.",
        )


def check_hooked(model: nn.Module) -> None:
    """Raise `PrepareError` for a model whose weights Accelerate's hooks fetch or spread; known by attributes."""
    hooks: list[tuple[str, object]] = []
    for name, module in named_modules(model):
        if (hook := vars(module).get(_HOOK)) is not None:
            hooks += [(name, each) for each in getattr(hook, "hooks", (hook,))]
    away = [name for name, hook in hooks if getattr(hook, "offload", False) is True]
    devices = {getattr(hook, "execution_device", None) for _, hook in hooks} - {None}
    devices = sorted({f"cuda:{each}" if isinstance(each, int) else str(each) for each in devices})
    # a model with all weights on one device passes, as does one whose hooks were taken away
    if away or len(devices) > 1:
        got = f"{len(away)} offloaded modules, such as {away[0]!r}" if away else f"modules on {', '.join(devices)}"
        raise PrepareError(
            "a model that Accelerate has dispatched",
            expected="a model with all of its weights, without Accelerate's hooks",
            got=got,
            where="prepare_model",
            fix="Load it without device_map=, or call accelerate.hooks.remove_hook_from_module(model, recurse=True) "
            "before prepare. To run one that does not fit: "
            'accel.load_checkpoint_and_dispatch(ctx, accel.init_empty_weights(build), path, "auto").',
        )


def check_unallocated(ctx: DistContext) -> None:
    """Raise `PrepareError` for an empty model where an engine, or several replicas or shards, would exchange its
    gradients."""
    data = ("data", "replicate", "shard")
    named = [f"{name}={axis.size}" for name, axis in ctx.position.axes if axis.size > 1 and dimension_of(name) in data]
    if data_dimension(ctx.settings.strategy) == "data" or named:
        raise PrepareError(
            "a model without memory cannot be replicated, sharded, or given to an engine",
            expected="one rank, or a mesh of pp and tp",
            got=", ".join(named) or f"strategy {ctx.settings.strategy}",
            where="prepare_model(allocate=False)",
            fix="Leave it out to train; to run a model that memory cannot hold, let each replica be a run of its own.",
        )


# by name: of torch, Apex, FairScale, DeepSpeed and others, which are not imported for it
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel", "DeepSpeedEngine"}
)
_COMPOSED = "torch.distributed._composable.replicate"  # DDP as a class put before the module's
_FABRIC = "_FabricModule"
_REPLACED = ("_original_forward", "forward")  # attributes of a model whose forward Accelerate has replaced


def check_bare(model: nn.Module) -> None:
    """Raise for a model with a module inside that another library has wrapped, or given a forward of its own."""
    for name, module in named_modules(model):
        if type(module).__name__ == _FABRIC or all(each in vars(module) for each in _REPLACED):
            fabric = type(module).__name__ == _FABRIC
            raise PrepareError(
                f"{'Lightning Fabric' if fabric else 'Accelerate'} has prepared the model, and converts formats in its "
                "forward",
                expected="a model that no other library has prepared",
                got=f"{type(module).__module__}.{type(module).__name__}",
                where=f"prepare_model, {name or 'the model'}",
                fix="Pass the model before it is wrapped"
                + ("." if fabric else ", or accelerator.unwrap_model(model, keep_fp32_wrapper=False)."),
            )
        kinds = type(module).__mro__
        if any(kind.__name__ in _WRAPPERS or kind.__module__ == _COMPOSED for kind in kinds):
            raise PrepareError(
                "the model holds a module that is wrapped already, so gradients would be exchanged twice",
                expected="a model without a wrapper inside",
                got=f"{type(module).__module__}.{type(module).__name__}",
                where=f"prepare_model, {name or 'the model'}",
                fix="Pass the module that was wrapped, before it is wrapped; or leave the model out of prepare.",
            )


def check_sparse(model: nn.Module, obstacles: Mapping[str, bool], where: str) -> None:
    """Refuse sparse gradients where nothing exchanges them, or where they meet dense ones of the same parameter.

    `obstacles`: things that do not take sparse gradients, and whether each of them is there.
    """
    tables = sparse_tables(model)
    if not tables:
        return
    names = ", ".join(list(tables)[:_SHOWN])
    if found := [each for each, stands in obstacles.items() if stands]:
        raise PrepareError(
            "sparse gradients travel through DDP alone, and as they are",
            expected='strategy="ddp", on a mesh of replicas',
            got=f"embeddings with sparse=True and {', '.join(found)}",
            where=f"{where}, {names}",
            fix="Build them with sparse=False, and take a dense optimizer in the place of SparseAdam.",
        )
    if dense := _dense_uses(model, {id(each) for each in tables.values()}):
        raise PrepareError(
            "a parameter would get sparse gradients and dense ones, which DDP does not add up",
            expected="the weight of an embedding with sparse=True, in no other module",
            got=", ".join(dense[:_SHOWN]),
            where=where,
            fix="Build the embedding with sparse=False, or give the other module a weight of its own.",
        )


def _dense_uses(model: nn.Module, tables: Collection[int]) -> list[str]:
    """List the paths under which parameters of sparse embeddings are something else than the weight of one."""
    uses: list[str] = []
    for path, module in named_modules(model):
        for name, each in module.named_parameters(recurse=False):
            is_table = name == "weight" and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            if id(each) in tables and not is_table:
                uses.append(f"{path}.{name}" if path else name)
    return uses


def check_shapes(model: nn.Module) -> None:
    """Raise for parameters and buffers of lazy modules that have no shape yet, as ranks cannot compare them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if without := [name for name, each in named if is_lazy(each)]:
        raise PrepareError(
            "the model has parameters without a shape yet",
            expected="a model whose lazy modules have seen an input",
            got=", ".join(without),
            where="prepare_model",
            fix="Run the model once on the CPU, before it is prepared.",
        )


def check_devices(ctx: DistContext, model: nn.Module) -> None:
    """Raise `DeviceError` for a tensor on neither the CPU nor the context's device; an empty model may have any on the
    meta device."""
    is_empty = any(each.is_meta for each in model.parameters())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu" and tensor.device != ctx.device and not (tensor.is_meta and is_empty):
            raise DeviceError(
                "the model is on a device that is not this rank's",
                expected=" or ".join(dict.fromkeys(("cpu", str(ctx.device)))),
                got=str(tensor.device),
                where=f"prepare_model, {name}",
                fix="Build it on the CPU, or on ctx.device.",
            )


def check_quantized(model: nn.Module, where: str, *, left_out: Collection[int] = ()) -> None:
    """Raise `PrepareError` for quantized weights that would be divided among ranks: scales and elements are laid out
    differently."""
    names = [name for name, each in _quantized(model) if id(each) not in left_out]
    if names:
        raise PrepareError(
            "quantized weights cannot be divided among ranks",
            expected="a model of plain weights",
            got=f"{len(names)} quantized: {', '.join(names[:_SHOWN])}",
            where=where,
            fix='Take strategy="ddp", where each rank has all of them.',
        )


def check_frozen(model: nn.Module) -> None:
    """Raise `PrepareError` for quantized weights that ask for gradients: autograd gives them none, and no error."""
    names = [name for name, each in _quantized(model) if each.requires_grad]
    if names:
        raise PrepareError(
            "quantized weights cannot be trained",
            expected="frozen ones, beside adapters that train",
            got=f"{len(names)} with requires_grad: {', '.join(names[:_SHOWN])}",
            where="prepare_model",
            fix="Freeze them, by model.get_parameter(name).requires_grad_(False).",
        )


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the quantized weights; one that an engine casts while it is gathered holds a plain weight."""
    for name, weight in packed_weights(model).items():
        parameter = model.get_parameter(name)
        elements = weight.parts[weight.first]
        is_plain = elements.is_floating_point() and elements.dtype == parameter.dtype
        if not is_plain or elements.shape != parameter.shape:
            yield name, parameter


def check_all(checks: Iterable[Callable[[], object]], problem: str, where: str) -> None:
    """Run several checks and report all errors together, as one `PrepareError`; a single one is raised itself. No
    communication."""
    refusals: list[AccelError] = []
    for check in checks:
        try:
            _ = check()
        except AccelError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise PrepareError(problem, got="".join(f"\n- {error}" for error in refusals), where=where)


def check_masters(ctx: DistContext, waiting: Iterable[Spread]) -> None:
    """Raise `ConfigError` for master weights where parameters are about to be sharded, cut or divided."""
    others = [each.dimension for each in waiting if each.dimension != "replicate"]
    if ctx.precision.master_weights is not None and others:
        raise ConfigError(
            "master weights are for replicated parameters",
            expected="the strategy ddp, and a mesh of replicas",
            got=f"parameters spread along {', '.join(others)}",
            where="Precision.master_weights",
            fix='Keep parameters in float32, which are sharded then: precision="bf16" gathers and computes in bf16.',
        )


def refuse_foreign(replica: DistributedDataParallel) -> None:
    """Raise `PrepareError` for a DDP of the user's around parameters with float32 gradients."""
    module = cast(nn.Module, cast(Any, replica).module)
    if any(has_wide_gradient(each) for each in module.parameters()):
        raise PrepareError(
            "this DDP was made before the parameters got master weights, and exchanges 16 bits",
            expected="the model without DDP",
            got="DistributedDataParallel",
            where="prepare_model",
            fix="Pass the module itself: prepare_model wraps it.",
        )
