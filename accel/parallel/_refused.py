# SPDX-License-Identifier: Apache-2.0
"""Models that `prepare` refuses before anything moves: weights elsewhere, other wrappers, quantized or half weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - torch has no other name
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from accel.context import DistContext
from accel.errors import AccelError, ConfigError, DeviceError, PrepareError
from accel.parallel._modules import named_modules, sparse_tables, stage_modules, unwrap_model
from accel.parallel._private import GET_DATA, SET_DATA, is_compiled
from accel.parallel._spread import Spread
from accel.tensors import has_wide_gradient, is_absent, is_dtensor, local_part, packed_weights
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
            fix="Leave it out to train; to run a model that memory cannot hold, run each replica separately.",
        )


# by name: of torch, Apex, FairScale, DeepSpeed and others, which are not imported for it
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel", "DeepSpeedEngine"}
)
_COMPOSED = "torch.distributed._composable.replicate"  # DDP as a class put before the module's
_FABRIC = "_FabricModule"
_STAGES = "transformers.distributed.pipeline_parallel"  # module of the class of layers that other stages have
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
        if type(module).__module__ == _STAGES:
            raise PrepareError(
                "transformers has cut the model into stages of a pipeline, and they cannot be trained",
                expected="a model with all of its layers",
                got="DistributedConfig(pp_size=...)",
                where=f"prepare_model, {name}",
                fix="Load it without pp_size=, and let prepare cut it: accel.replace(ctx, mesh='pp=2').",
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
            "sparse gradients are exchanged by DDP only, and uncompressed",
            expected='strategy="ddp", on a mesh of replicas',
            got=f"embeddings with sparse=True and {', '.join(found)}",
            where=f"{where}, {names}",
            fix="Build them with sparse=False, and take a dense optimizer instead of SparseAdam.",
        )
    if dense := _dense_uses(model, {id(each) for each in tables.values()}):
        raise PrepareError(
            "a parameter would get sparse gradients and dense ones, which DDP does not add up",
            expected="the weight of an embedding with sparse=True, in no other module",
            got=", ".join(dense[:_SHOWN]),
            where=where,
            fix="Build the embedding with sparse=False, or give the other module a separate weight.",
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
            expected="frozen ones, with adapters that train",
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


_HARMLESS = ("requires_grad_", "share_memory_", "detach_", "retain_grad_")


class _ParameterChanges(TorchFunctionMode):
    """Notes parameters that are changed, without effect on what ranks keep of them.

    Attributes:
        found: ways by the name of a parameter.
    """

    def __init__(self, model: nn.Module, kept: Collection[int]) -> None:
        super().__init__()
        self._model = model
        self._kept = kept
        self._views: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        first: Any = args[0] if args else None
        if name == "__set__" and func == SET_DATA and not _is_same(first, args[1]):
            self._note(first, "data", also_parts=True)
        result = func(*args, **(kwargs or {}))
        if name == "__set__":
            return result
        if (name == "__get__" and func == GET_DATA) or name == "detach":
            if isinstance(first, nn.Parameter):
                self._views[id(result)] = result, first
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS):
            for each in cast("list[Any]", first) if isinstance(first, list | tuple) else [first]:
                self._note(self._views[id(each)][1] if id(each) in self._views else each, name)
        return result

    def _note(self, changed: Any, way: str, *, also_parts: bool = False) -> None:
        is_read = also_parts and isinstance(changed, torch.Tensor) and changed.requires_grad  # as a plain tensor
        if id(changed) in self._kept or not (is_read or isinstance(changed, nn.Parameter)):
            return
        if also_parts or not is_dtensor(changed):
            named = (name for name, each in self._model.named_parameters() if each is changed)
            _ = self.found.setdefault(next(named, "a parameter").removeprefix("module."), way)


def _is_same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether data that a tensor is set to is its own, as of a `Module.to` that changes nothing."""
    own = local_part(tensor)
    other = local_part(data)
    return own.dtype == other.dtype and own.device == other.device and own.data_ptr() == other.data_ptr()


class _FirstForward:
    """Looks at the first training forward of a model, by hooks that go after it.

    Args:
        model: the module.
        wrap: makes a hook of a method.
        prepend: whether to look before the module's other hooks.
    """

    def __init__(self, model: nn.Module, wrap: Callable[[Any], Any], *, prepend: bool = False) -> None:
        self._is_begun = self._is_over = False
        self._hooks = (
            model.register_forward_pre_hook(wrap(self._begin), prepend=prepend),
            model.register_forward_hook(wrap(self._end), always_call=True),
            model.register_forward_hook(wrap(self._judge)),
        )

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def begin(self, module: nn.Module) -> bool:
        """Begin to look; False where the model is to be left alone."""
        raise NotImplementedError

    def end(self) -> None:
        """Cease to look, after an error of the forward too."""

    def judge(self, module: nn.Module) -> None:
        """Report what was seen in a forward without an error."""
        raise NotImplementedError

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_over or not module.training or not torch.is_grad_enabled():
            return
        self._is_begun = self.begin(module)
        if not self._is_begun:
            self._remove()

    def _end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._is_begun:
            self.end()
            self._is_begun = False
            self._is_over = True

    def _remove(self) -> None:
        for each in self._hooks:
            each.remove()

    def _judge(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._is_over:
            self._remove()
            self.judge(module)


class _ChangesWatch(_FirstForward):
    """Looks at changes of parameters that ranks divide."""

    def __init__(self, model: nn.Module) -> None:
        kept = frozenset(id(each) for each in model.parameters() if not is_dtensor(each))
        self._changes = _ParameterChanges(model, kept)
        super().__init__(model, cast(Any, torch.compiler).disable)

    def begin(self, module: nn.Module) -> bool:
        """Enter the mode, unless torch compiles a part of the model."""
        if any(is_compiled(each) for each in module.modules()):
            return False
        _ = self._changes.__enter__()
        return True

    def end(self) -> None:
        """Leave the mode."""
        cast(Any, self._changes).__exit__(None, None, None)

    def judge(self, module: nn.Module) -> None:
        """Raise for a change that is lost, and warn about bounds."""
        bounded = [name for name, way in self._changes.found.items() if way.startswith("clamp")]
        lost = {name: way for name, way in self._changes.found.items() if name not in bounded}
        if lost:
            raise ConfigError(
                "the forward changes parameters that ranks divide, and the change is lost behind it",
                expected="parameters that change only between steps",
                got=", ".join(f"{name} by {way}" for name, way in [*lost.items()][:_SHOWN]),
                where="the first training forward of a prepared model",
                fix="Change them between steps, as accel.Ema does for a model's average; or keep them whole, on a mesh "
                'of dp alone: accel.replace(ctx, strategy="ddp").',
            )
        if bounded:
            text = "the forward bounds parameters (%s): ranks keep them as they were, and bound them at each forward"
            logging.getLogger("accel.parallel").warning(text, ", ".join(bounded[:_SHOWN]))


def refuse_changes(model: nn.Module) -> None:
    """Let the first training forward of a divided model raise `ConfigError` where it changes parameters and ranks would
    lose the change. Mutates the model, by hooks that go after it.

    A forward that bounds parameters, as Gemma 3n's, does so at each call, and is warned about. Models with regions that
    torch compiles are left alone.
    """
    _ = _ChangesWatch(model)


_MOVED = (
    "the forward changes buffers in training (%s). Like statistics of a batch norm, they change with each micro-batch, "
    "so accumulation and pipelines change them more often than one large batch does. Each rank changes them by its "
    "samples; rank 0's replace the others' before the next forward, unless prepare_model has broadcast_buffers=False."
)


class _BufferWatch(_FirstForward):
    """Looks at changes of buffers, for one log line."""

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        # Hooks of torch.nn.utils.spectral_norm change buffers too; those of a sharded model bring rank 0's. A graph
        # would break at a hook that is not traced.
        super().__init__(model, lambda hook: hook, prepend=not any(map(is_dtensor, model.parameters())))

    def begin(self, module: nn.Module) -> bool:
        """Note the buffers and their versions."""
        self._before = {name: (each, each._version) for name, each in _statistics(module)}
        return bool(self._before)

    def judge(self, module: nn.Module) -> None:
        """Log the buffers that the forward has changed, or replaced by others of other values."""
        moved: list[str] = []
        for name, each in _statistics(module):
            before, version = self._before.get(name, (each, each._version))
            is_same = each is before or (each.shape == before.shape and torch.equal(each, before))
            if before._version != version or not is_same:
                moved.append(name.removeprefix("module."))
        self._before = {}
        if moved:
            more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
            logging.getLogger("accel.parallel").warning(_MOVED, ", ".join(moved[:_SHOWN]) + more)


def _statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's buffers but for counters and those of batch norms, whose change everybody expects."""
    for path, module in named_modules(model):
        if not isinstance(module, _BatchNorm):
            for name, each in module.named_buffers(path, recurse=False):
                if (each.is_floating_point() or each.is_complex()) and not each.is_inference():
                    yield name, each


def log_changed_buffers(ctx: DistContext, model: nn.Module) -> None:
    """Let the first training forward of a prepared model log which buffers it changes, once for each stage. Mutates the
    model, by hooks that go after it. A model that torch compiles as a whole is left alone."""
    others = (axis for name, axis in ctx.position.axes if dimension_of(name) != "pipeline")
    is_first = ctx.data_parallel[0] == 0 and all(axis.rank == 0 for axis in others)
    if is_first and any(each.requires_grad for each in model.parameters()):
        for each in stage_modules(unwrap_model(model)):
            if any(True for _ in _statistics(each)):
                _ = _BufferWatch(each)
