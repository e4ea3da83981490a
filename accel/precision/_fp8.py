# SPDX-License-Identifier: Apache-2.0
"""Formats that a device supports; linear layers in fp8 by torchao or Transformer Engine, and QAT by torchao."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.errors._checks import did_you_mean, import_extra, with_article
from accel.formats import Compute, Fp8, Qat
from accel.tensors import is_dtensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_compute(device: torch.device, compute: Compute) -> None:
    """Raise `DeviceError` unless a device supports a precision; the CPU has bf16 and fp16, slowly, only CUDA tf32."""
    if reason := _reason(device, compute):
        formats: tuple[Compute, ...] = ("fp32", "bf16", "fp16")
        others = [other for other in formats if not _reason(device, other)]
        raise DeviceError(
            f"this device does not compute in {compute}",
            expected=" or ".join(others),
            got=f"{compute} on {device}: {reason}",
            where="precision",
            fix=f"Pass precision={(others[1:] or others)[0]!r}, or choose another device.",
        )


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as (8, 9)."""
    return torch.cuda.get_device_capability(device)


def _reason(device: torch.device, compute: Compute) -> str:
    """Return why a device does not support a precision; "" if it does."""
    if compute == "fp32" or (device.type == "cpu" and compute != "tf32"):
        return ""
    if device.type == "cuda":
        needs_ampere = compute in ("bf16", "tf32") and torch.version.hip is None
        found = capability(device)
        return f"compute capability {found[0]}.{found[1]}, it takes 8.0" if needs_ampere and found < (8, 0) else ""
    if compute == "tf32":
        return f"{device.type} has no tf32"
    return "" if _autocasts(device.type, DTYPES[compute]) else f"torch has no {compute} autocast for {device.type}"


def _autocasts(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast supports a dtype; if not, it disables itself with a warning."""
    if not torch.amp.is_autocast_available(device_type):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast(device_type, dtype=dtype):
            return torch.is_autocast_enabled(device_type)


def submodules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List submodules with their names; first the model itself, named ""."""
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def matched(model: nn.Module, patterns: Sequence[str], where: str) -> set[str]:
    """Return the submodules that match patterns such as "blocks.*.router", with all inside; none: `ConfigError`."""
    every = list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)))
    names = [name for name, _ in every if name]
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigError(
                "no submodule has such a name",
                expected=f"a name in {type(model).__name__}",
                got=repr(pattern),
                where=where,
                fix=did_you_mean(pattern, names) if names else "Leave it out.",
            )
        found.update(hits)
    inside = {id(module) for name, module in every if any(f"{name}.".startswith(f"{hit}.") for hit in found)}
    return {name for name, module in submodules(model) if id(module) in inside}


_EXTRAS = {"torchao": "torchao", "transformer_engine": "te"}
_MODULES = {"torchao": "torchao.float8", "transformer_engine": "transformer_engine.pytorch"}
_MULTIPLE = 16  # the hardware multiplies matrices with sizes of multiples of this


def check_fp8(device: torch.device, recipe: Fp8) -> None:
    """Raise `MissingExtraError` or `DeviceError` unless this machine supports a recipe."""
    _ = _package(recipe)
    if recipe.emulate:
        return
    least = (10, 0) if recipe.how == "mxfp8" else (9, 0) if recipe.how.startswith("rowwise") else (8, 9)
    found = capability(device) if device.type == "cuda" and torch.version.hip is None else None
    if device.type == "cuda" and (found is None or found >= least):
        return
    has = f"compute capability {found[0]}.{found[1]}" if found else f"a {device.type} device"
    other = ", or Fp8(emulate=True) to try the recipe" if recipe.backend == "torchao" else ""
    raise DeviceError(
        f"this device does not multiply in fp8 with {recipe.how} scaling",
        expected=f"CUDA with compute capability {least[0]}.{least[1]} or above",
        got=has,
        where="Precision.fp8",
        fix=f"Pass precision='bf16'{other}.",
    )


def fp8_layers(model: nn.Module, recipe: Fp8, spared: set[str]) -> list[str]:
    """Return the names of the linear layers that a recipe converts, in the model's order; none is a `ConfigError`."""
    linear = [(name, module) for name, module in submodules(model) if type(module) is nn.Linear and name]
    spared = spared | matched(model, recipe.skip, "Fp8.skip")
    ends = set[str]() if recipe.first_and_last or not linear else {linear[0][0], linear[-1][0]}
    chosen = [
        name
        for name, module in linear
        if name not in spared | ends and not module.in_features % _MULTIPLE and not module.out_features % _MULTIPLE
    ]
    if not chosen:
        raise ConfigError(
            "no layer of the model would compute in fp8",
            expected=f"linear layers inside the model, sizes multiples of {_MULTIPLE}, besides its first and its last",
            got=f"{len(linear)} linear layers",
            where=f"Precision.fp8, {type(model).__name__}",
            fix="Pass precision='bf16', or Fp8(first_and_last=True).",
        )
    return chosen


def convert_layers(model: nn.Module, recipe: Fp8, names: list[str]) -> None:
    """Replace layers in place by layers of the recipe's package, with the same parameter objects."""
    if recipe.backend == "torchao":
        _convert_torchao(model, recipe, set(names))
        return
    engine = _package(recipe)
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)  # fp8_layers chose it
        new = engine.Linear(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,  # pyright: ignore[reportUnnecessaryComparison] - Linear(bias=False) has none
            params_dtype=old.weight.dtype,
            device=old.weight.device,
        )
        new.weight, new.bias = old.weight, old.bias
        new.train(old.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


@contextlib.contextmanager
def fp8_scope(ctx: DistContext, recipe: Fp8, around: AbstractContextManager[object]) -> Generator[None]:
    """Compute converted layers in fp8 during the block, within another scope; raises as `check_fp8`."""
    check_fp8(ctx.device, recipe)
    with around:
        if recipe.backend == "torchao":
            yield
            return
        group = ctx.comm.group if ctx.world_size > 1 and recipe.how == "delayed" else None
        with _package(recipe).autocast(enabled=True, recipe=_engine_recipe(recipe), amax_reduction_group=group):
            yield


def _package(recipe: Fp8) -> Any:
    return import_extra(
        _MODULES[recipe.backend],
        f"fp8 by {recipe.backend}",
        extra=_EXTRAS[recipe.backend],
        where="Precision.fp8",
        otherwise=", or pass precision='bf16'",
    )


def _convert_torchao(model: nn.Module, recipe: Fp8, names: set[str]) -> None:
    float8 = _package(recipe)
    config = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(recipe.how),
        emulate=recipe.emulate,
        enable_fsdp_float8_all_gather=recipe.fp8_all_gather,
    )

    def chosen(_: nn.Module, name: str) -> bool:
        return name in names

    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _engine_recipe(recipe: Fp8) -> Any:
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    if recipe.how == "delayed":
        return recipes.DelayedScaling(margin=recipe.margin, amax_history_len=recipe.amax_history)
    return recipes.Float8CurrentScaling() if recipe.how == "current" else recipes.MXFP8BlockScaling()


M = TypeVar("M", bound=nn.Module)

FP8_PACKAGES = ("torchao.float8", "transformer_engine")
QAT_PACKAGES = ("torchao.quantization.qat",)


def qat_layers(model: nn.Module, recipe: Qat, spared: set[str]) -> list[str]:
    """Return the names of the linear layers that a recipe rounds, in the model's order; none is a `ConfigError`."""
    spared = spared | matched(model, recipe.skip, "Qat.skip")
    linear = [(name, module) for name, module in submodules(model) if type(module) is nn.Linear]
    size = recipe.group_size or 1
    chosen = [name for name, module in linear if name not in spared and not module.in_features % size]
    if not chosen or chosen == [""]:
        raise ConfigError(
            "no layer of the model would be quantized",
            expected=f"linear layers inside the model, with inputs in multiples of {size}",
            got=f"{len(linear)} linear layers",
            where=f"Precision.qat, {type(model).__name__}",
            fix="Pass a smaller Qat(group_size=...), or None for a scale each row.",
        )
    return chosen


def has_layers(model: nn.Module, packages: tuple[str, ...]) -> bool:
    """Return whether some layers of the model are of classes from these packages: it is converted or prepared."""
    return any(type(module).__module__.startswith(packages) for module in model.modules())


def round_layers(model: nn.Module, recipe: Qat, names: list[str]) -> None:
    """Replace layers in place by such that round, with the same parameter objects."""
    chosen = set(names)
    qat = _torchao("torchao.quantization.qat")
    config = qat.QATConfig(_quantization(recipe), step="prepare")

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name in chosen

    _torchao("torchao.quantization").quantize_(model, config, filter_fn=is_chosen)


@context_first
def convert_qat(ctx: DistContext, model: M) -> M:
    """Quantize the layers that were trained with `Precision(qat=...)`, in place. No communication.

    The quantized layers compute what the trained ones did. They are for inference: their weights have no gradients.

    Args:
        ctx: the context, with the precision of the training.
        model: without wrappers, and whole on this rank. Mutated.

    Returns:
        The model.

    Raises:
        ConfigError: the context's precision has no `qat`.
        PrepareError: no layer of the model is prepared, or it is sharded.
        MissingExtraError: torchao is missing.
    """
    recipe = ctx.precision.qat
    if recipe is None:
        raise ConfigError(
            "the context has no recipe to quantize by",
            expected="Precision(qat=Qat(...))",
            got=ctx.precision.name,
            where="convert_qat",
            fix="Pass the context of the training.",
        )
    sharded = next((name for name, each in model.named_parameters() if is_dtensor(each)), None)
    if sharded is not None or not has_layers(model, QAT_PACKAGES):
        shown = with_article(type(model).__name__)
        raise PrepareError(
            "the model cannot be quantized",
            expected="a full model, prepared with Precision(qat=...)",
            got=f"{sharded} sharded" if sharded is not None else f"{shown} without prepared layers",
            where="convert_qat",
            fix="Save it by save_model, load the file into a model on one rank that apply_precision has prepared, and"
            " pass that.",
        )
    qat = _torchao("torchao.quantization.qat")
    _torchao("torchao.quantization").quantize_(model, qat.QATConfig(_quantization(recipe), step="convert"))
    return model


def _quantization(recipe: Qat) -> Any:
    """Return torchao's configuration of the quantized model."""
    package = _torchao("torchao.quantization")
    dtype: Any = vars(torch)[recipe.weights]  # int4 has no stub
    granularity = package.PerAxis(0) if recipe.group_size is None else package.PerGroup(recipe.group_size)
    if recipe.activations == "int8":
        return package.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return package.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def _torchao(name: str) -> Any:
    return import_extra(name, "quantization-aware training", extra="torchao", where="Precision.qat")
