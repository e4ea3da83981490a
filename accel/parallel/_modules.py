# SPDX-License-Identifier: Apache-2.0
"""Modules of a model by path, class or size, and inside of wrappers; small inputs that its config describes."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.context import DistContext
from accel.errors import ConfigError, StepError
from accel.mixins import Mixin
from accel.parallel._private import WRAPPED
from accel.tensors import Memory, is_dtensor
from accel.terminal import show_names


def named_modules(
    model: nn.Module | Mapping[str, nn.Module], *, every_path: bool = False
) -> Iterable[tuple[str, nn.Module]]:
    """Yield the modules of a model with their first path, or every one, the model itself first, as "". A table of them
    is not walked again."""
    if not isinstance(model, nn.Module):
        return model.items()
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=not every_path))


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a model under all their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def aliases_of(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return the parameters and buffers of a model, each with all its names."""
    found: dict[int, tuple[Tensor, tuple[str, ...]]] = {}
    for name, each in named_tensors(model):
        _, names = found.get(id(each), (each, ()))
        found[id(each)] = each, (*names, name)
    return list(found.values())


def listed_modules(holder: nn.Module) -> list[nn.Module]:
    """Return the entries of a list or dict of modules, without those that are None, as norms that a layer lacks."""
    entries = cast(Any, holder).values() if isinstance(holder, nn.ModuleDict) else cast("Iterable[Any]", holder)
    return [each for each in entries if each is not None]


def matching(paths: Iterable[str], pattern: str) -> list[str]:
    """Return the paths that a pattern matches, where `*` is one component, or any part of one, as in "vision*"."""
    rule = re.compile(r"[^.]*".join(map(re.escape, pattern.split("*"))))
    return [path for path in paths if rule.fullmatch(path) and (path or not pattern)]


def is_in(path: str, around: str) -> bool:
    """Return whether a module is another one or inside of it."""
    return not around or path == around or path.startswith(f"{around}.")


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module behind the classes that parallelism has put before it, such as the first block's class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    before = (Mixin, getattr(fsdp, "FSDPModule", Mixin))  # another thread may be importing the module
    return next(each for each in type(module).__mro__ if not issubclass(each, before))


@functools.lru_cache(maxsize=1024)  # Python parses the whole file of a class: 0.1 s for a base class of transformers
def source_of(written: type | Callable[..., Any]) -> str | None:
    """Return the source of a class or a function; None where there is none."""
    try:
        return inspect.getsource(written)
    except (OSError, TypeError):
        return None


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's own forward, behind the classes that parallelism has put before
    its own."""
    forward = vars(module).get("forward")
    if forward is not None:
        return tuple(inspect.signature(forward).parameters)
    return _argument_names(cast(Any, written_class(module)).forward)[1:]


@functools.lru_cache(256)  # hooks of each attention ask in every forward
def _argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def layerdrops(module: nn.Module) -> list[float]:
    """Return a module's layerdrop rates, or its config's."""
    if hasattr(module, "layerdrop"):
        return [cast(Any, module).layerdrop]
    config = getattr(module, "config", None)
    if config is None or not any(isinstance(each, nn.ModuleList) for each in module.children()):
        return []
    source = source_of(inspect.unwrap(cast(Any, written_class(module)).forward))
    if source is None:
        source = "config.layerdrop"
    return [getattr(config, name, 0.0) for name in re.findall(r"config\.(\w*layerdrop)", source)]


class KeepsParameters(Mixin):
    """Keeps its parameters in a `to` that changes nothing, as routers call it in their forward: torch swaps the memory
    of DTensors and fake tensors even then, which a reference to one of them forbids."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert parameters and buffers, as `nn.Module.to` does."""
        module = cast(nn.Module, self)
        own = [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        if own and all(each.to(*args, **kwargs) is each for each in own):
            return module
        return cast(Any, super()).to(*args, **kwargs)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module itself has parameters."""
    return any(True for _ in module.parameters(recurse=False))


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether a module is of another stage."""
    return "elsewhere" in notes_of(module)


RANKS = "accel_ranks"  # attribute of modules that compute with parts of tensors: the ranks that hold these


class EngineGradients(Protocol):
    """Gradients of one model, as an engine holds them."""

    def clear(self) -> None:
        """Drop them. No communication."""
        ...

    def note(self) -> None:
        """Note whether there are any now that a window begins; a step then refuses them. No communication."""
        ...


class Prepared(TypedDict, total=False):
    """Facts of a prepared model, kept on the module inside of wrappers."""

    context: str  # method of context parallelism. By prepare_model; read by a second one
    expects_values: bool  # it was spread empty. By prepare_model; read until its first forward, which removes it
    follows: bool  # it copies a pipelined model, and is divided as that one is. By `Ema`; read by saves
    local: bool  # no gradient crosses ranks with other samples. By prepare_local_model; read by `accumulate`
    losses: tuple[str, ...]  # texts of the loss functions that add up over micro-batches. By and for forward_backward
    micro_batches: int  # number of micro-batches of its plan. By prepare_model; read by forward_backward
    pipeline: Any  # its `Pipeline`. By prepare_model, along pp; read by each pass
    same_batches: Any  # its `SameBatches`. By prepare_model, along tp, cp and pp; read by its first forwards
    # Modules that run this rank's stages. By prepare_model, along pp; read wherever modules run.
    stages: tuple[nn.Module, ...]


class ModuleNotes(TypedDict, total=False):
    """Facts of a module within a model."""

    absent: Mapping[str, Tensor]  # placeholders of tensors that other stages hold, by name. By prepare_model, along pp
    answer: Any  # function that answers its calls. By replays, until they end
    chunks: Any  # parts of the sequence on which it runs. By chunk_sequence; read by its forwards
    copied: Any  # the module that it is a copy of, for a stage. By prepare_model, along pp; read by each batch
    context: Any  # of the attention of a model of transformers. By prepare_model, along cp
    compute: Any  # function that a head runs instead of its forward. By a loss without logits, for one call
    elsewhere: bool  # another stage holds it. By prepare_model, along pp; read wherever modules are chosen
    emptied: str  # engine that empties its parameters between passes. By DeepSpeed's engine; read by losses
    exchanges: Mapping[str, Any]  # rows of its parameters that ranks exchange, by name. By prepare_model, along tp
    expert: int  # its place in a list of experts. By prepare_model, along ep
    experts: str  # name of its list of experts. By prepare_model, along ep
    gate: Any  # leads calls of entries to the model. By prepare_model, methods=
    held: EngineGradients  # the `EngineGradients` of an engine's wrapper. By the engine; read by `accumulate`
    kept_gathered: bool  # an FSDP unit that is not resharded after a forward. By its first such forward
    moved: int  # id of the module with a bias that an `ExpertLoad` moves. Until the `ExpertLoad` is closed
    offload: Any  # place of a block in `offload_activations`. Read in its forwards
    overlaps: bool  # messages with matmuls: not compiled. By prepare_model, along tp; read by compile_model
    plain: Any  # replicated parameters that its forward sees as plain tensors. By prepare_model, fsdp
    positions: Any  # calls with parts of positions. By prepare_model, along cp
    proves: bool  # a proof calls it, no pass of the user's. Until the proof ends
    recompute: bool | None  # whether logits are made again in backward. By defer_logits; read by losses
    reported: bool  # the line that made its deferred logits was logged. By that line
    wraps: str  # attribute of the module in an engine's wrapper. By the engine; read by unwrap_model
    watch: Any  # function that reads and writes of its attributes call. By records, until they end
    within: bool  # compiled in a model that computes with parts. By the model's calls, along tp and cp


class TensorNotes(TypedDict, total=False):
    """Facts of a parameter, and of gradients and activations if a field says so.

    Notes of hooks hold the id of the tensor with the hook: a copy of the tensor has the note, and no hook.
    """

    adjusted: int  # id of a tensor with a hook that adjusts what transformers sums. By its layer's forward
    alone: bool  # ranks may decide differently about its steps. By local SGD and `join_uneven_inputs`
    autocast: list[bool]  # whether a forward ran with autocast off, and on; one list for a model. By its first forwards
    # Placements of the gradient of a replicated parameter before its mean. By prepare_model, fsdp.
    awaited: tuple[object, ...]
    dropped: bool  # another rank has it instead. By prepare_model, along pp; read by prepare_optimizer
    exchanger: Any  # the latest `Replica` with its gradient. By prepare_model, ddp; read by the next one and by steps
    found: bool  # whether a window found a gradient with other values than zero. Until the gradient is cleared
    heir: nn.Parameter  # the parameter in its place. By prepare_model; read by prepare_optimizer and steps
    memory: Memory | None  # of a DTensor; None of others, an empty set in a file. By prepare_model; read by steps
    name: str  # its name in the prepared model. By prepare_model; read by errors
    needed: bool  # a step needs its gradient. By prepare_model; read by steps
    on_host: bool  # the optimizer keeps its state on the host. By prepare_model; read by prepare_optimizer and steps
    own_words: bool  # activation; logits of this rank's words. By the model's end along tp; read by token_logprobs
    placeholder: bool  # also activation; another stage has its values. By stages; read by the look at a loss
    reached: bool  # activation; a unit is gathered again when its gradient comes. By the unit's forward
    replicated: bool  # plain tensor of a parameter that ranks along tp replicate. By its module; read by losses
    reports: int  # id of the parameter that a hook notes as used
    sharded: int  # torch writes its gradient past hooks, except so many. By prepare_model, fsdp; read by steps
    settled: bool  # gradient; ranks have exchanged its bit. By steps
    tied_copy: bool  # a lower rank along pp has the same parameter. By prepare_model
    used: bool  # whether a backward has reached it since these bits were exchanged. By backwards; read by steps
    viewed: bool  # its exchanged gradient is a view of its bucket. By prepare_model, ddp; read by steps
    watched: int | None  # id of the tensor with the hook that may take `found` back; None for none


NOTES = "accel_notes"  # attribute of modules within a model and of tensors
_PREPARED = "accel_prepared"  # attribute of models


def prepared_of(model: nn.Module) -> Prepared:
    """Return the facts of a model; none of a wrapper around it. Not to be changed."""
    notes: Prepared | None = vars(model).get(_PREPARED)
    return notes or {}


def notes_of(module: nn.Module) -> ModuleNotes:
    """Return the facts of a module within a model. Not to be changed."""
    notes: ModuleNotes | None = vars(module).get(NOTES)
    return notes or {}


def tensor_notes(tensor: Tensor) -> TensorNotes:
    """Return the facts of a tensor. Not to be changed."""
    notes: TensorNotes | None = getattr(tensor, NOTES, None)
    return notes or {}


def note_prepared(model: nn.Module, **notes: Unpack[Prepared]) -> None:
    """Note facts of a prepared model. Mutates it by one attribute."""
    _add(model, _PREPARED, notes)


def note_module(module: nn.Module, **notes: Unpack[ModuleNotes]) -> None:
    """Note facts of a module. Mutates it by one attribute."""
    _add(module, NOTES, notes)


def note_tensor(tensor: Tensor, **notes: Unpack[TensorNotes]) -> None:
    """Note facts of a tensor. Mutates it by one attribute, which nothing computes with."""
    _add(tensor, NOTES, notes)


def _add(owner: object, attribute: str, notes: Mapping[str, object]) -> None:
    # a new dict, as a shallow copy of the owner shares the one before
    vars(owner)[attribute] = {**vars(owner).get(attribute, {}), **notes}


def forget(owner: nn.Module | Tensor, *names: str) -> None:
    """Remove notes of a model, module or tensor. Mutates it."""
    for attribute in (NOTES, _PREPARED):
        if notes := getattr(owner, attribute, None) if isinstance(owner, Tensor) else vars(owner).get(attribute):
            vars(owner)[attribute] = {name: each for name, each in notes.items() if name not in names}


def memory_of(tensor: Tensor) -> Memory | None:
    """Return the memory of a DTensor, to be noted for `refuse_assigned`; None of other tensors."""
    return Memory(id(tensor), tensor.untyped_storage()) if is_dtensor(tensor) else None


def refuse_assigned(parameters: Iterable[Tensor], where: str) -> None:
    """Raise `StepError` if a line `parameter.data = values` has set a DTensor: torch leaves this rank's part."""
    found = [tensor_notes(each).get("name", "") for each in parameters if is_assigned(each, tensor_notes(each))]
    if found:
        raise assigned_data("parameter", found, where)


def refuse_assigned_gradients(parameters: Iterable[Tensor], where: str) -> None:
    """Raise `StepError` as `refuse_assigned`, for gradients."""
    held = ((tensor_notes(each).get("name", ""), each.grad) for each in parameters)
    found = [name for name, grad in held if grad is not None and is_assigned(grad, tensor_notes(grad))]
    if found:
        raise assigned_data("parameter.grad", found, where)


def is_assigned(tensor: Tensor, known: TensorNotes) -> bool:
    """Return whether a line `tensor.data = values` has set a tensor with these notes since its memory was noted."""
    memory = known.get("memory")  # Module.to swaps in tensors without the note
    return bool(memory) and memory.is_left(tensor)


def assigned_data(what: str, names: Sequence[str], where: str) -> StepError:
    """Make the error for such a line."""
    return StepError(
        "an assignment to .data of a DTensor, as a sharded parameter is, has no effect: this rank's part stays",
        expected="a change in place",
        got=f"{what}.data = ... for {show_names(names)}",
        where=where,
        fix=f"Under torch.no_grad(): {what}.copy_(values).",
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile; a plain module is returned as it is.

    `fully_shard`, tensor parallelism and `compile_model` wrap nothing: the model itself is returned, still sharded or
    compiled. `get_state_dict` gives its tensors whole.

    Args:
        model: from `prepare_model`, or compiled, or plain.

    Raises:
        ConfigError: the argument is no module.

    Examples:
        >>> model = accel.prepare_model(ctx, net)
        >>> accel.unwrap_model(model) is net
        True
    """
    check_module(model)
    while (name := wrapped_name(model)) is not None:
        model = getattr(model, name)
    return model


def check_module(model: object, *, where: str = "") -> None:
    """Raise `ConfigError` for other things than a module, such as its class, a function that makes it, or a context."""
    if isinstance(model, nn.Module):
        return
    fix = "Build it first: accel.init_empty_weights(make) takes the function." if callable(model) else ""
    raise ConfigError(
        "the model is not a module",
        expected="a torch.nn.Module",
        got=getattr(model, "__name__", type(model).__name__),
        where=where,
        fix="Pass the model first: this function takes no context." if isinstance(model, DistContext) else fix,
    )


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute that holds the wrapped module, None for a module that wraps nothing."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    if (name := notes_of(module).get("wraps")) is not None:
        return name
    return WRAPPED if isinstance(getattr(module, WRAPPED, None), nn.Module) else None


def clean_name(module: nn.Module, raw: str) -> str:
    """Return a name in a module without the steps of wrappers."""
    return name_and_owner(module, raw)[0]


def name_and_owner(module: nn.Module, raw: str) -> tuple[str, nn.Module]:
    """Return a name without the steps of wrappers, and the innermost submodule on the way."""
    kept: list[str] = []
    node = module
    for part in raw.split("."):
        if part != wrapped_name(node):
            kept.append(part)
        child = getattr(node, part, None)
        node = child if isinstance(child, nn.Module) else node
    return ".".join(kept), node


class Sharded(Protocol):
    """Methods that `fully_shard` adds to a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, /) -> None:
        """Set whether the next backward exchanges the gradients of this module and of those below it."""
        ...

    def reshard(self) -> None:
        """Shard this module's parameters again, if they are whole after a forward."""
        ...


def is_unit(module: nn.Module) -> bool:
    """Return whether a module has the methods of `fully_shard`: one that it was called on, or a pipeline of such."""
    kind = type(module)  # a protocol's isinstance takes 10 us for a module that does not fit
    return hasattr(kind, "reshard") and hasattr(kind, "set_requires_gradient_sync")


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules of this rank that `fully_shard` was called on."""
    return [module for stage in stage_modules(model) for module in stage.modules() if is_unit(module)]


def sharded_roots(model: nn.Module) -> Sequence[Sharded]:
    """Return the outermost modules that `fully_shard` was called on; none if there is only tensor parallelism."""
    if is_pipelined(model):
        return [root for stage in stage_modules(model) for root in sharded_roots(stage)]
    if is_unit(model):
        return [cast(Sharded, model)]
    return [root for child in model.children() for root in sharded_roots(child)]


def reshard(model: nn.Module) -> None:
    """Let `fully_shard` drop gathered weights, which are stale once their shards change."""
    for module in filter(is_unit, model.modules()):
        cast(Any, module).reshard()


def held_by(model: nn.Module) -> EngineGradients | None:
    """Return the gradients that an engine holds of a model, from under wrappers; None if no engine does."""
    at: nn.Module | None = model
    while at is not None:
        if (held := notes_of(at).get("held")) is not None:
            return held
        name = wrapped_name(at)
        at = None if name is None else getattr(at, name)
    return None


def emptied_by(module: nn.Module) -> str | None:
    """Return what makes a module's parameters empty between passes; None where they have their values."""
    return notes_of(module).get("emptied")


def stage_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that run this rank's stages of a model; the model itself where it has no pipeline."""
    return prepared_of(model).get("stages") or (model,)


def is_pipelined(model: nn.Module) -> bool:
    """Return whether a model is cut into the stages of a pipeline."""
    return "stages" in prepared_of(model)


def follow_stages(module: nn.Module, model: nn.Module) -> None:
    """Let a module that copies a model's parameters be divided among ranks as the model is. Mutates it."""
    if is_divided(model):
        note_prepared(module, follows=True)


def is_divided(module: nn.Module) -> bool:
    """Return whether ranks along a pipeline hold different parts of a module, under the names of the whole one."""
    inner = unwrap_model(module)
    return is_pipelined(inner) or "follows" in prepared_of(inner)


_ROWS, _TOKENS, _FRAMES, _SAMPLES = 2, 7, 64, 4000  # 7 tokens, as few models have 7 heads


def example_of(model: nn.Module, times: int = 1) -> Mapping[str, Any] | None:
    """Return inputs without values for a model with a config of transformers; None for another. The number of tokens is
    a multiple of `times`."""
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(outer, "get_base_model") else outer  # of peft
    config: Any = getattr(inner, "config", None)
    main: object = getattr(inner, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return None
    names = list(inspect.signature(inner.forward).parameters)
    found = {name: each for name in names if (each := _input(name, inner, config, times)) is not None}
    if main not in found:
        return None
    switches = {"use_cache": False, "output_attentions": False, "return_dict": True}
    return {**found, **{name: value for name, value in switches.items() if name in names}}


def without_cache(model: nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any] | Sequence[Any]:
    """Return inputs by name with `use_cache=False` for a forward that takes it, as blocks would share the cache."""
    if not isinstance(example, Mapping) or "use_cache" not in inspect.signature(model.forward).parameters:
        return example
    return {**example, "use_cache": False}


def _input(name: str, model: Any, config: Any, times: int) -> Tensor | None:
    if name == "input_ids" and model.main_input_name in ("input_ids", "pixel_values"):
        return torch.empty(_ROWS, _TOKENS * times, dtype=torch.long, device="meta")
    if name == "decoder_input_ids":
        return torch.empty(_ROWS, (_TOKENS - 2) * times, dtype=torch.long, device="meta")
    if name == "pixel_values":
        return _pixels(config)
    if name == "input_features":
        length = 2 * int(getattr(config, "max_source_positions", _FRAMES // 2))
        return torch.empty(_ROWS, int(getattr(config, "num_mel_bins", 80)), length, device="meta")
    if name == "input_values":
        if hasattr(config, "frequency_stride"):  # a spectrum, cut into patches
            return torch.empty(_ROWS, int(config.max_length), int(config.num_mel_bins), device="meta")
        return torch.empty(_ROWS, _SAMPLES, device="meta")
    return None


def _pixels(config: Any) -> Tensor:
    own = getattr(config, "vision_config", config)
    size: Any = getattr(own, "image_size", 224)
    height, width = (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return torch.empty(_ROWS, int(getattr(own, "num_channels", 3)), height, width, device="meta")
