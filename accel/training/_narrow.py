# SPDX-License-Identifier: Apache-2.0
"""Weights of 16 bits that a prepared optimizer would step: those in fp16 are refused, those in bf16 are reported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from accel.context import DistContext
from accel.errors import PrepareError
from accel.formats import Precision
from accel.items._optimizer import bare_optimizer
from accel.items._packed_state import is_zero
from accel.parallel._labels import current_parameter, name_of
from accel.parallel._modules import unwrap_model
from accel.precision._model import planned_formats
from accel.tensors import parameters_of

# Options of optimizers that step float32 copies, round at random, or carry what rounding loses: torchao, Transformer
# Engine, apex, optimi, AnyPrecision, and any that has such an attribute, or such an option in its groups.
_DECLARED = ("master_weights", "master_params", "stochastic_round", "kahan")


def check_narrow(ctx: DistContext, optimizers: Sequence[Optimizer], models: Sequence[nn.Module] = ()) -> None:
    """Refuse fp16 weights that optimizers would step; report bf16 ones, once for each optimizer, on rank 0.

    Weights of optimizers with float32 copies or stochastic rounding pass, and bf16 ones that `params="bf16"` asks for.
    No communication.

    Args:
        ctx: the context.
        optimizers: optimizers to prepare.
        models: models that are prepared with them, and have not been converted yet.
    """
    if ctx.precision.master_weights is not None:
        return
    formats = _formats(ctx.precision, models)
    names = {id(each): name for model in models for name, each in unwrap_model(model).named_parameters()}
    stepped = [each for each in optimizers if not _keeps_precision(each)]
    found: dict[torch.dtype, list[torch.Tensor]] = {torch.float16: [], torch.bfloat16: []}
    for live in map(current_parameter, parameters_of(stepped)):
        dtype = formats.get(id(live), live.dtype)
        if live.requires_grad and dtype in found:
            found[dtype].append(live)
    narrow = found[torch.float16] or found[torch.bfloat16]
    if not narrow:
        return
    first = names.get(id(narrow[0])) or name_of(narrow[0]) or f"one of shape {list(narrow[0].shape)}"
    fix = _fix(ctx.precision, narrow, models)
    if found[torch.float16]:
        raise PrepareError(
            "an optimizer steps weights in fp16: updates and squared gradients leave its range",
            expected="trainable weights in fp32; autocast computes in fp16",
            got=f"{len(narrow)} in fp16",
            where=f"the optimizer, {first}",
            fix=f"{fix}.",
        )
    if ctx.precision.params != "bf16":
        reported = [each for each in stepped if ctx.comm.marks.find(each, "narrow") is not None]
        for each in stepped:
            ctx.comm.marks.put(each, "narrow")
        if ctx.is_main_process and len(reported) < len(stepped):
            logging.getLogger("accel.training").warning(
                "the optimizer steps %d parameters in bfloat16, such as %s: steps below 1/256 of a weight are lost. "
                'For float32 weights: %s. If 16 bits are meant: ctx = accel.replace(ctx, precision="pure-bf16").',
                len(narrow),
                first,
                fix,
            )


def _formats(precision: Precision, models: Iterable[nn.Module]) -> Mapping[int, torch.dtype]:
    """Return the dtypes that parameters will have where the precision converts them, by `id`."""
    found = dict[int, torch.dtype]()
    for model in models:
        found |= planned_formats(unwrap_model(model), precision)
    return found


def _keeps_precision(optimizer: Optimizer) -> bool:
    """Return whether an optimizer declares that 16-bit weights lose no updates in it."""
    inner = bare_optimizer(optimizer)
    every = (optimizer, inner, cast(Any, inner).optim if is_zero(inner) else inner)
    return any(_declares(name, value) for each in every for name, value in _options(each))


def _options(optimizer: Optimizer) -> Iterator[tuple[str, object]]:
    yield from vars(optimizer).items()
    yield from getattr(optimizer, "defaults", {}).items()  # some wrappers have none
    for group in optimizer.param_groups:
        yield from group.items()


def _declares(name: str, value: object) -> bool:
    if value is None:
        return name == "kahan_sum"  # optimi's default: for 16-bit weights
    return any(each in name for each in _DECLARED) and value is not False


def _fix(precision: Precision, narrow: Sequence[torch.Tensor], models: Sequence[nn.Module]) -> str:
    """Write the lines that give such parameters in float32. The second one does not convert batch norms."""
    compute = precision.compute
    if compute not in ("bf16", "fp16"):
        compute = "fp16" if narrow[0].dtype is torch.float16 else "bf16"
    wide = msgspec.structs.replace(precision, compute=compute, params="fp32")
    converted = _formats(wide, models)
    converts = not models or all(id(each) in converted for each in narrow)
    lines = "net.float() before prepare"
    return f"{lines}, or ctx = accel.replace(ctx, precision={_line(wide)})" if converts else lines


def _line(precision: Precision) -> str:
    """Write the record as code, without defaults."""
    defaults = dict(zip(precision.__struct_fields__, precision.__struct_defaults__, strict=True))
    options = {name: getattr(precision, name) for name in defaults if getattr(precision, name) != defaults[name]}
    records = {name for name, value in options.items() if isinstance(value, msgspec.Struct)}
    written = (f"{name}={'accel.precision.' if name in records else ''}{value!r}" for name, value in options.items())
    return f"accel.precision.Precision({', '.join(written)})".replace("'", '"')
