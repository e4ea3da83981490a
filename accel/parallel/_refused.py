# SPDX-License-Identifier: Apache-2.0
"""Models that `prepare` refuses before anything moves, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from accel.context import DistContext
from accel.errors import AccelError, ConfigError, DeviceError, PrepareError
from accel.parallel._private import is_wrapper
from accel.parallel._spread import ModelView, Spread
from accel.tensors import has_wide_gradient, is_absent
from accel.terminal import show_names
from accel.topology import data_dimension, dimension_of

_HOOK = "_hf_hook"  # attribute of a module with a hook of Accelerate's, or several in its `hooks`


class RefusedFact(NamedTuple):
    """Something in a model that is refused."""

    got: str  # text of it, for the error
    where: str = "prepare_model"  # place of it, for the error


class PrepareCall(NamedTuple):
    """A call of `prepare` for one model."""

    ctx: DistContext  # its context
    view: ModelView  # the model
    waiting: Sequence[Spread] = ()  # the spreads that are to come
    options: Any = None  # options of the spread that is asked


class ModelRefusal(NamedTuple):
    """A kind of model that `prepare` refuses, as a row of a table."""

    problem: str  # what is wrong, for the error
    when: Callable[[PrepareCall], RefusedFact | None]  # finds it in a call; None if it is not there. No communication
    fix: str  # what to do, for the error
    expected: str = ""  # what is right, for the error
    error: type[AccelError] = PrepareError  # class of the error


def refused(asked: PrepareCall, rows: Iterable[ModelRefusal]) -> list[AccelError]:
    """Return the errors of the rows that a call meets. No communication."""
    found = ((row, row.when(asked)) for row in rows)
    return [
        row.error(row.problem, expected=row.expected, got=each.got, where=each.where, fix=row.fix)
        for row, each in found
        if each is not None
    ]


def raised(checks: Iterable[Callable[[], object]]) -> list[AccelError]:
    """Return the errors that checks raise. No communication."""
    errors: list[AccelError] = []
    for check in checks:
        try:
            _ = check()
        except AccelError as error:
            errors.append(error)
    return errors


def report(errors: Sequence[AccelError], where: str) -> None:
    """Raise all errors of a model together, as one `PrepareError`; a single one is raised itself."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise PrepareError(
            "the model is refused for several reasons", got="".join(f"\n- {error}" for error in errors), where=where
        )


def _absent(view: ModelView) -> dict[str, bool]:
    """Whether weights that are not in memory train, by name."""
    packed = {name: False for name, each in view.packed.items() if any(map(is_absent, each.parts.values()))}
    return {name: each.requires_grad for name, each in view.parameters.items() if is_absent(each)} | packed


def _absent_trained(asked: PrepareCall) -> RefusedFact | None:
    trained = [name for name, is_trained in _absent(asked.view).items() if is_trained]
    return RefusedFact(f"{len(trained)}: {show_names(trained)}") if trained else None


def _absent_spread(asked: PrepareCall) -> RefusedFact | None:
    absent = _absent(asked.view)
    several = bool(absent) and asked.ctx.world_size > 1 and not any(absent.values())
    return RefusedFact(f"{len(absent)} such weights and {asked.ctx.world_size} ranks") if several else None


def _hooked(asked: PrepareCall) -> RefusedFact | None:
    """Weights that Accelerate's hooks fetch or spread; known by attributes."""
    hooks: list[tuple[str, object]] = []
    for name, module in asked.view.modules.items():
        if (hook := vars(module).get(_HOOK)) is not None:
            hooks += [(name, each) for each in getattr(hook, "hooks", (hook,))]
    away = [name for name, hook in hooks if getattr(hook, "offload", False) is True]
    devices = {getattr(hook, "execution_device", None) for _, hook in hooks} - {None}
    devices = sorted({f"cuda:{each}" if isinstance(each, int) else str(each) for each in devices})
    if away:
        return RefusedFact(f"{len(away)} offloaded modules, such as {away[0]!r}")
    # a model with all weights on one device passes, and one without its former hooks
    return RefusedFact(f"modules on {', '.join(devices)}") if len(devices) > 1 else None


# by name: of torch, Apex, FairScale, DeepSpeed and others, which are not imported for it
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel", "DeepSpeedEngine"}
)
_COMPOSED = "torch.distributed._composable.replicate"  # DDP as a class put before the module's
_STAGES = "transformers.distributed.pipeline_parallel"  # module of the class of layers that other stages have
_REPLACED = ("_original_forward", "forward")  # attributes of a model after Accelerate has replaced its forward


def _module_of(kind: Callable[[nn.Module], bool]) -> Callable[[PrepareCall], RefusedFact | None]:
    """Make a condition: a model has a module of a kind."""

    def find(asked: PrepareCall) -> RefusedFact | None:
        for name, module in asked.view.modules.items():
            if kind(module):
                got = f"{type(module).__module__}.{type(module).__name__}"
                return RefusedFact(got, f"prepare_model, {name or 'the model'}")
        return None

    return find


def _is_wrapped(module: nn.Module) -> bool:
    return any(kind.__name__ in _WRAPPERS or kind.__module__ == _COMPOSED for kind in type(module).__mro__)


def _shapeless(asked: PrepareCall) -> RefusedFact | None:
    without = [name for name, each in (*asked.view.parameters.items(), *asked.view.buffers.items()) if is_lazy(each)]
    return RefusedFact(", ".join(without)) if without and asked.waiting else None


def _scripted(asked: PrepareCall) -> RefusedFact | None:
    """A module that torch.jit has compiled, which takes no hooks, mixins and parts of tensors."""
    if not any(each.dimension in ("tensor", "context", "pipeline") for each in asked.waiting):
        return None
    return _module_of(lambda module: isinstance(module, torch.jit.ScriptModule))(asked)


def _compiled_forward(asked: PrepareCall) -> RefusedFact | None:
    """A compiled function in the place of a forward: it belongs to this module, not to a copy, and to no mixin."""
    axes = [each.dimension for each in asked.waiting]
    root = asked.view.inner.model

    def is_meant(module: nn.Module) -> bool:
        is_compiled = hasattr(vars(module).get("forward"), "get_compiler_config") and not is_wrapper(module)
        return is_compiled and ("tensor" in axes or ("context" in axes and module is root))

    return _module_of(is_meant)(asked)


def _in_inference(asked: PrepareCall) -> RefusedFact | None:
    is_inside = torch.is_inference_mode_enabled()
    given = asked.view.parameters.items()
    names = [name for name, each in given if each.requires_grad and not is_lazy(each)]
    trained = [name for name in names if is_inside or asked.view.parameters[name].is_inference()]
    return (
        RefusedFact(f"{show_names(trained)}, with requires_grad=True, in torch.inference_mode()") if trained else None
    )


_CONVERTS = "converts formats in its forward"

HOOKED = ModelRefusal(
    "a model that Accelerate has dispatched",
    _hooked,
    expected="a model with all of its weights, without Accelerate's hooks",
    fix="Load it without device_map=, or call accelerate.hooks.remove_hook_from_module(model, recurse=True) "
    "before prepare. To run one that does not fit: "
    'accel.load_checkpoint_and_dispatch(ctx, accel.init_empty_weights(build), path, "auto").',
)

INFERENCE = ModelRefusal(
    "a model to train in inference mode, whose tensors never have gradients",
    _in_inference,
    expected="a model that is made and prepared outside of it, or with frozen parameters",
    fix="Make and prepare it in front of the block. In the block, freeze it: model.requires_grad_(False).",
)

# No other check applies to these models, so they are refused separately.
FORMS = (
    HOOKED,
    ModelRefusal(
        f"Lightning Fabric has prepared the model, and {_CONVERTS}",
        _module_of(lambda module: type(module).__name__ == "_FabricModule"),
        expected="a model that no other library has prepared",
        fix="Pass the model before it is wrapped.",
    ),
    ModelRefusal(
        f"Accelerate has prepared the model, and {_CONVERTS}",
        _module_of(lambda module: all(each in vars(module) for each in _REPLACED)),
        expected="a model that no other library has prepared",
        fix="Pass the model before it is wrapped, or accelerator.unwrap_model(model, keep_fp32_wrapper=False).",
    ),
    ModelRefusal(
        "transformers has cut the model into stages of a pipeline, and they cannot be trained",
        _module_of(lambda module: type(module).__module__ == _STAGES),
        expected="a model with all of its layers",
        fix="Load it without pp_size=, and let prepare cut it: accel.replace(ctx, mesh='pp=2').",
    ),
    ModelRefusal(
        "the model holds a module that is wrapped already, so gradients would be exchanged twice",
        _module_of(_is_wrapped),
        expected="a model without a wrapper inside",
        fix="Pass the module that was wrapped, before it is wrapped; or leave the model out of prepare.",
    ),
    ModelRefusal(
        "the model has parameters without a shape yet",
        _shapeless,
        expected="a model with lazy modules that have seen an input",
        fix="Run the model once on the CPU, before it is prepared.",
    ),
    ModelRefusal(
        "torch.jit has compiled a module, which parts of tensors cannot enter",
        _scripted,
        expected="modules of Python along tp, cp and pp",
        fix="Leave torch.jit.script out; accel.compile_model(model) takes its place.",
    ),
    ModelRefusal(
        "a module's own forward is replaced by a function that torch has compiled",
        _compiled_forward,
        expected="modules that torch compiles in place along tp and cp",
        fix="Write self.compile() in the place of self.forward = torch.compile(self.forward).",
    ),
    ModelRefusal(
        "weights that are not in memory cannot be trained",
        _absent_trained,
        fix="Freeze them before dispatch_model, by model.requires_grad_(False); then add what trains.",
    ),
    ModelRefusal(
        "weights that are not in memory cannot be spread over ranks",
        _absent_spread,
        fix="Train on one rank, or let fsdp shard a model that one device cannot hold. To run it divided, prepare "
        "it empty, by prepare_model(ctx, model, allocate=False), and dispatch it then.",
    ),
)


def _elsewhere(asked: PrepareCall) -> RefusedFact | None:
    """A tensor on neither the CPU nor the context's device; an empty model may have any on the meta device."""
    here = asked.ctx.device
    is_empty = any(each.is_meta for each in asked.view.parameters.values())
    for name, tensor in (*asked.view.parameters.items(), *asked.view.buffers.items()):
        if tensor.device.type != "cpu" and tensor.device != here and not (tensor.is_meta and is_empty):
            return RefusedFact(str(tensor.device), f"prepare_model, {name}")
    return None


def _quantized_trained(asked: PrepareCall) -> RefusedFact | None:
    """Quantized weights that ask for gradients: autograd gives them none, and no error."""
    names = [name for name, each in _quantized(asked.view) if each.requires_grad]
    return RefusedFact(f"{len(names)} with requires_grad: {show_names(names)}") if names else None


def _masters_divided(asked: PrepareCall) -> RefusedFact | None:
    others = [each.dimension for each in asked.waiting if each.dimension != "replicate"]
    if asked.ctx.precision.master_weights is None or not others:
        return None
    return RefusedFact(f"parameters spread along {', '.join(others)}", "Precision.master_weights")


def _bounded_tables(asked: PrepareCall) -> RefusedFact | None:
    """Embeddings that write to their weight the rows that a forward looks up: ranks look up different ones."""
    if asked.ctx.data_parallel[1] == 1 and not any(each.dimension in ("shard", "context") for each in asked.waiting):
        return None
    for name, module in asked.view.modules.items():
        is_bounded = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if is_bounded and asked.waiting and module.weight.requires_grad:
            return RefusedFact(f"max_norm={module.max_norm:g}", f"prepare_model, {name or 'the model'}")
    return None


DEVICES = ModelRefusal(
    "the model is on a device that is not this rank's",
    _elsewhere,
    expected="the CPU, or ctx.device",
    fix="Build it on the CPU, or on ctx.device.",
    error=DeviceError,
)

# All that are met are reported together, with the refusals of the mesh's axes.
MODELS = (
    ModelRefusal(
        "quantized weights cannot be trained",
        _quantized_trained,
        expected="frozen ones, with adapters that train",
        fix="Freeze them, by model.get_parameter(name).requires_grad_(False).",
    ),
    DEVICES,
    ModelRefusal(
        "an embedding bounds the rows of its weight in each forward, and ranks look up different rows",
        _bounded_tables,
        expected="max_norm=None where ranks have different samples, or parts of the weight",
        fix="Build it with max_norm=None, and bound what it returns: "
        "rows = rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm)).",
    ),
    ModelRefusal(
        "master weights are for replicated parameters",
        _masters_divided,
        expected="the strategy ddp, and a mesh of replicas",
        fix='Keep parameters in float32, which are sharded then: precision="bf16" gathers and computes in bf16.',
        error=ConfigError,
    ),
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


def check_sparse(view: ModelView, obstacles: Mapping[str, bool], where: str) -> None:
    """Refuse sparse gradients where nothing exchanges them, or where they meet dense ones of the same parameter.

    `obstacles`: things that do not take sparse gradients, and whether each of them is there.
    """
    if not view.tables:
        return
    if found := [each for each, stands in obstacles.items() if stands]:
        raise PrepareError(
            "sparse gradients are exchanged by DDP only, and uncompressed",
            expected='strategy="ddp", on a mesh of replicas',
            got=f"embeddings with sparse=True and {', '.join(found)}",
            where=f"{where}, {show_names([*view.tables])}",
            fix="Build them with sparse=False, and take a dense optimizer instead of SparseAdam.",
        )
    if dense := _dense_uses(view):
        raise PrepareError(
            "a parameter would get sparse gradients and dense ones, which DDP does not add up",
            expected="the weight of an embedding with sparse=True, in no other module",
            got=show_names(dense),
            where=where,
            fix="Build the embedding with sparse=False, or give the other module a separate weight.",
        )


def _dense_uses(view: ModelView) -> list[str]:
    """List the names under which parameters of sparse embeddings are something else than the weight of one."""
    uses: list[str] = []
    for name in (name for each in view.tables.values() for name in view.owners[id(each)]):
        path, _, own = name.rpartition(".")
        module = view.model.get_submodule(path)
        if own != "weight" or not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.sparse:
            uses.append(name)
    return uses


def quantized_divided(
    where: str, left_out: Callable[[PrepareCall], Collection[int]] = lambda _asked: ()
) -> ModelRefusal:
    """Return the row of quantized weights that would be divided among ranks: scales and elements are laid out
    differently. `left_out`: gives the `id` of parameters that stay whole."""

    def find(asked: PrepareCall) -> RefusedFact | None:
        whole = left_out(asked)
        names = [name for name, each in _quantized(asked.view.inner) if id(each) not in whole]
        return RefusedFact(f"{len(names)} quantized: {show_names(names)}", where) if names else None

    return ModelRefusal(
        "quantized weights cannot be divided among ranks",
        find,
        expected="a model of plain weights",
        fix='Use strategy="ddp", which keeps all of them on each rank.',
    )


def _quantized(view: ModelView) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the quantized weights; one that an engine casts while it is gathered holds a plain weight."""
    for name, weight in view.packed.items():
        parameter = view.model.get_parameter(name)
        elements = weight.parts[weight.first]
        is_plain = elements.is_floating_point() and elements.dtype == parameter.dtype
        if not is_plain or elements.shape != parameter.shape:
            yield name, parameter


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
