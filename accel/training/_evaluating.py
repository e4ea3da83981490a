# SPDX-License-Identifier: Apache-2.0
"""Evaluation mode of models and optimizers, and `Ema`, an exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from accel.comm import refuse_replaced, replaced
from accel.comm._marks import find_mark
from accel.errors import ConfigError, PrepareError
from accel.errors._checks import check_choice, check_kind
from accel.parallel._modules import (
    clean_name,
    emptied_by,
    follow_stages,
    is_pipelined,
    reshard,
    stage_modules,
    unwrap_model,
)
from accel.parallel.axes.pipeline import pipeline_of
from accel.tensors import FORMATS, mesh_of, parameters_of, placements_of


@runtime_checkable
class TwoModes(Protocol):
    """Methods of schedule-free optimizers: weights to step from, and averaged ones to evaluate."""

    def train(self) -> object:
        """Put the weights to step from into the parameters."""
        ...

    def eval(self) -> object:
        """Put the averaged weights into the parameters."""
        ...


@contextlib.contextmanager
def evaluating(*objects: nn.Module | Optimizer) -> Generator[None]:
    """Evaluate in this block: models in eval mode, with the averaged weights of schedule-free optimizers.

    Pass the optimizers too; only schedule-free ones change. Save a model for inference in this block, by `save_model`.
    While averaged weights are in place, steps, saves and loads of them are errors. Afterwards every submodule and
    optimizer is in its former mode. No communication.

    Args:
        objects: models and optimizers.

    Raises:
        ConfigError: an object of another kind.

    Reference: Defazio et al. 2024, "The road less scheduled", arXiv:2405.15682.
    """
    for at, each in enumerate(objects):
        where = f"evaluating, argument {at + 1}"
        kinds = nn.Module | Optimizer
        check_kind(each, kinds, "this has no mode of evaluation", expected="a module or an optimizer", where=where)
    models = [each for each in objects if isinstance(each, nn.Module)]
    # stages of a pipeline have copies of the modules around their own
    roots = [root for model in models for root in (model, *stage_modules(model))]
    trained = [module for root in roots for module in root.modules() if module.training]
    switched = [each for each in objects if isinstance(each, Optimizer) and _trains(each)]
    try:
        for model in models:
            _ = model.eval()
        for optimizer in switched:
            _ = cast(TwoModes, optimizer).eval()
        with replaced(parameters_of(switched), "evaluating", "accel.evaluating(model, optimizer)"):
            yield
    finally:
        # Not `model.train()`: modules that the user keeps in evaluation, such as frozen norms, stay so.
        for module in trained:
            module.training = True
        for optimizer in switched:
            _ = cast(TwoModes, optimizer).train()


def _trains(each: Optimizer) -> bool:
    """Return whether an optimizer has both modes, and is in that for training."""
    return isinstance(each, TwoModes) and bool(each.param_groups[0].get("train_mode", True))


_torch = cast(Any, torch)  # the operations on lists have no public names


class Stepped(Protocol):
    """Protocol of step results: the part of a `StepResult` that an average reads."""

    @property
    def stepped(self) -> bool | None:
        """Whether parameters were changed; None while that is not known."""
        ...


class Ema(nn.Module):
    """The average of a model's weights over its steps, in a separate module: an item of a checkpoint.

    Sharded parameters have sharded averages; quantized weights, which do not train, have none. Floating-point averages
    are at least fp32: in bf16 a decay of 0.999 would leave them unchanged.

    Args:
        model: model from `prepare`, so that the average is on the same devices. Its parameters are copied.
        decay: share of the average that an update keeps, in [0, 1).
        warmup: whether to keep less at first, (1 + n) / (10 + n) at update n, so that the initial weights soon lose
            influence.
        buffers: "model" evaluates with the model's own buffers, which for batch norms are averages already; "average"
            averages floating-point buffers too, and copies others.

    Raises:
        ConfigError: a decay out of range, or an unknown choice.
        PrepareError: a model of DeepSpeed's stage 3: its weights are empty between passes.
    """

    updates: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float = 0.999,
        warmup: bool = True,
        buffers: Literal["model", "average"] = "model",
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ConfigError(
                "the decay is not valid", expected="0 up to but without 1", got=repr(decay), where="Ema(decay=)"
            )
        check_choice(buffers, ("model", "average"), "unknown choice", where="Ema(buffers=)")
        _refuse_emptied(model)
        self.decay, self.warmup, self.averages_buffers = decay, warmup, buffers == "average"
        self.weights = nn.Module()
        for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
            _ = _child(self.weights, clean_name(model, name))  # in the model's order, which tensors follow
        for name, live in _named(model, buffers=self.averages_buffers):
            _add_copy(self.weights, name, live)
        follow_stages(self, model)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device="cpu"))  # read without a wait

    def update_(self, model: nn.Module, step: Stepped | None = None) -> None:
        """Move the average towards the model's weights. Call it after each step. No communication. Mutates this.

        Args:
            model: model of the average.
            step: result of `optimizer_step`; a skipped step does not change the average.

        Raises:
            PrepareError: another model, or one that was prepared after the average was made.
            StepError: a block, such as `applied_to`, has replaced the model's weights.
            ConfigError: a model of steps with `nonfinite="defer"`.
        """
        if step is not None and step.stepped is False:
            return
        is_deferred = any(find_mark(each, "deferred") is not None for each in model.parameters())
        if is_deferred or (step is not None and step.stepped is None):
            raise ConfigError(
                "the average cannot take a step with an unknown outcome",
                expected="an optimizer step with a known outcome",
                got="nonfinite='defer'",
                where="Ema.update_",
                fix="Pass nonfinite='skip' or 'raise' to optimizer_step.",
            )
        # `updates` is on the CPU, so this does not wait for the device.
        weight = 1 - ema_decay(int(self.updates), self.decay, warmup=self.warmup)
        pairs = self._pairs(model)
        refuse_replaced((live for _, live in pairs), "Ema.update_")
        with torch.no_grad():
            # One kernel for all tensors of a kind; where dtypes differ, each needs a conversion.
            same = [pair for pair in pairs if pair[0].dtype == pair[1].dtype and _averaged(pair[0])]
            for averages, live in _by_kind(same):
                _torch._foreach_lerp_(averages, live, weight)
            for average, live in pairs:
                if not _averaged(average):
                    average.copy_(live)
                elif average.dtype != live.dtype:
                    average.lerp_(live.to(average.dtype), weight)
            self.updates += 1

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module) -> Generator[None]:
        """Put the averaged weights into the model for the block; the model's weights return at the end, also after an
        error.

        In the block, evaluate, generate, and save the averaged model by `save_model` or `get_state_dict`. Steps, saves
        and loads of the weights or of this average are errors there. Takes the memory of a copy of the weights. No
        communication.

        Raises:
            PrepareError: another model, as in `update_`.
        """
        pairs = self._pairs(model)
        averages = [average.detach() for average, _ in pairs]
        live = [tensor.detach() for _, tensor in pairs]
        # The copy is this block's until its end; the averages are copied in, not swapped, as optimizers hold the
        # tensors.
        own = [each.clone() for each in live]
        with replaced(itertools.chain(*pairs), "applied_to", "ema.applied_to(model)"):
            try:
                _copy(averages, live)
                yield
            finally:
                # A forward in the block may have left shards gathered: a later one would compute with the gathered
                # averages.
                reshard(model)
                _copy(own, live)

    def _live(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the model's tensors with an average."""
        if is_pipelined(unwrap_model(model)):
            return [each for _, each in _named(model, buffers=self.averages_buffers)]
        reshard(model)
        trained = (each for each in model.parameters() if not _is_quantized(each))
        return [*trained, *(model.buffers() if self.averages_buffers else ())]

    def _pairs(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair averages with the model's tensors, in the model's order."""
        own = [*self.weights.parameters(), *self.weights.buffers()]
        live = self._live(model)
        if list(map(_shape_and_place, own)) != list(map(_shape_and_place, live)):
            raise self._other_model(model)
        return list(zip(own, live, strict=True))

    def _other_model(self, model: nn.Module) -> PrepareError:
        _refuse_emptied(model)
        own = dict([*self.weights.named_parameters(), *self.weights.named_buffers()])
        live = dict(_named(model, buffers=self.averages_buffers))
        names = [*live, *own]
        name = next((name for name in names if _shape_text(own.get(name)) != _shape_text(live.get(name))), names[0])
        return PrepareError(
            "the average was made of another model",
            expected=_shape_text(own.get(name)),
            got=_shape_text(live.get(name)),
            where=f"Ema, {name}",
            fix="Make the Ema after accel.prepare, of the model that is trained.",
        )


def ema_decay(updates: int, decay: float, *, warmup: bool = True) -> float:
    """Return the share of the average that an update keeps; with `warmup` it grows to `decay` by earlier updates."""
    return min(decay, (1 + updates) / (10 + updates)) if warmup else decay


def _refuse_emptied(model: nn.Module) -> None:
    if (source := emptied_by(model)) is not None:
        raise PrepareError(
            "an average takes weights between passes, where these are empty",
            expected="weights on each rank, replicated or as DTensors",
            got=f"{source}, which gathers weights for a pass",
            where="Ema(model)",
            fix="Use a stage below 3, or strategy='fsdp': the average then holds shards.",
        )


def _named(model: nn.Module, *, buffers: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the model's tensors by name, without wrappers; of a tied one the first name in the whole model."""
    reshard(model)
    trained = ((name, each) for name, each in model.named_parameters() if not _is_quantized(each))
    named: list[tuple[str, torch.Tensor]] = _renamed(model, trained)
    if buffers:
        named += _renamed(model, model.named_buffers())
    return named


def _renamed(model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    found = [(clean_name(model, name), each) for name, each in named]
    pipeline = pipeline_of(unwrap_model(model))
    if pipeline is None:
        return found
    first = {name: names[0] for names in pipeline.names for name in names}
    places = {name: at for at, name in enumerate(pipeline.order)}
    renamed = [(first.get(name, name), each) for name, each in found]
    return sorted(renamed, key=lambda pair: places.get(pair[0], len(places)))


def _add_copy(root: nn.Module, name: str, live: torch.Tensor) -> None:
    """Store a copy under its name in the model."""
    path, _, leaf = name.rpartition(".")
    root = _child(root, path)
    copy = live.detach().clone()
    if _averaged(copy):
        copy = copy.to(torch.promote_types(copy.dtype, torch.float32))
    if isinstance(live, nn.Parameter):
        root.register_parameter(leaf, nn.Parameter(copy, requires_grad=False))
    else:
        root.register_buffer(leaf, copy)


def _child(root: nn.Module, name: str) -> nn.Module:
    """Return the submodule of a name, made if it is missing; the root itself for an empty name."""
    for part in name.split(".") if name else ():
        child = getattr(root, part, None)
        if not isinstance(child, nn.Module):
            child = nn.Module()
            setattr(root, part, child)
        root = child
    return root


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is a quantizer's, which has no arithmetic; one that trains has."""
    return type(tensor).__module__.partition(".")[0] in FORMATS and not tensor.requires_grad


def _averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _by_kind(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Group pairs by device, dtype and mesh, so that one kernel can take a group."""
    groups: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for average, live in pairs:
        kind = average.device, average.dtype, mesh_of(average)
        averages, lives = groups.setdefault(kind, ([], []))
        averages.append(average)
        lives.append(live)
    return list(groups.values())


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    torch.clear_autocast_cache()  # an enclosing autocast keeps copies of the former targets


def _shape_and_place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.device, placements_of(tensor)


def _shape_text(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "no such tensor"
    placed = placements_of(tensor)
    return f"shape {list(tensor.shape)} on {tensor.device}" + (f", {placed}" if placed else "")
