# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training by torchao: linear layers that round their weights as a quantized model will.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
arXiv:1712.05877.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.errors import ConfigError, MissingExtraError, PrepareError
from accel.formats import Qat
from accel.precision._names import matched, submodules
from accel.tensors import is_dtensor

M = TypeVar("M", bound=nn.Module)

_TRAINED = "torchao.quantization.qat"  # module of the classes of prepared layers


def qat_layers(model: nn.Module, recipe: Qat, spared: set[str]) -> list[str]:
    """Return the names of the linear layers that a recipe rounds, in the model's order. No communication.

    Args:
        model: without wrappers.
        recipe: with `skip`.
        spared: names of submodules to leave out.

    Raises:
        ConfigError: no layer is left.
    """
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


def has_qat(model: nn.Module) -> bool:
    """Return whether layers of the model are prepared."""
    return any(type(module).__module__.startswith(_TRAINED) for module in model.modules())


def round_layers(model: nn.Module, recipe: Qat, names: list[str]) -> None:
    """Replace layers in place by such that round, with the same parameter objects."""
    chosen = set(names)
    qat = _package("torchao.quantization.qat")
    config = qat.QATConfig(_quantization(recipe), step="prepare")

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name in chosen

    _package("torchao.quantization").quantize_(model, config, filter_fn=is_chosen)


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
    if sharded is not None or not has_qat(model):
        raise PrepareError(
            "the model cannot be quantized",
            expected="a whole model, prepared with Precision(qat=...)",
            got=f"{sharded} sharded" if sharded is not None else f"a {type(model).__name__} without prepared layers",
            where="convert_qat",
            fix="Save it by save_model, load the file into a model on one rank that apply_precision has prepared, and"
            " pass that.",
        )
    qat = _package("torchao.quantization.qat")
    _package("torchao.quantization").quantize_(model, qat.QATConfig(_quantization(recipe), step="convert"))
    return model


def _quantization(recipe: Qat) -> Any:
    """Return torchao's configuration of the quantized model."""
    package = _package("torchao.quantization")
    dtype: Any = vars(torch)[recipe.weights]  # int4 has no stub
    granularity = package.PerAxis(0) if recipe.group_size is None else package.PerGroup(recipe.group_size)
    if recipe.activations == "int8":
        return package.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return package.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            "quantization-aware training needs a package that does not import",
            expected=name,
            got=f"{type(error).__name__}: {error}",
            where="Precision.qat",
            fix="Run `pip install 'accel[torchao]'`.",
        ) from error
