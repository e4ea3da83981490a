# SPDX-License-Identifier: Apache-2.0
"""Number formats and compilation of a run as frozen records, and names of strategies. Free of torch.

`precision` maps a name such as "bf16" to its record. Settings without an effect are refused.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice

PrecisionName = Literal["fp32", "bf16", "fp16", "tf32", "pure-bf16", "fp8"]
StrategyName = Literal["ddp", "fsdp", "deepspeed"]
Compute = Literal["fp32", "tf32", "bf16", "fp16"]
Fp8Backend = Literal["torchao", "transformer_engine"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CompileName = Literal["off", "whole", "repeated"]
Fp8Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "current", "mxfp8"]
GROUPED = frozenset[StrategyName](["deepspeed"])  # strategies that need a group on one process, too

_SCALINGS: dict[str, tuple[Fp8Scaling, ...]] = {
    "torchao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "transformer_engine": ("delayed", "current", "mxfp8"),
}

# names that other libraries and torch use
_FOREIGN: dict[str, PrecisionName] = {
    "no": "fp32",
    "none": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "bf16-true": "pure-bf16",
}


class Fp8(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers in 8-bit floats: their choice and their scaling.

    Layers with a size that is no multiple of 16 stay unchanged, as the hardware has no such product.

    Attributes:
        backend: "torchao" (extra `torchao`) or "transformer_engine" (extra `te`).
        scaling: of torchao "tensorwise", "rowwise" or "rowwise_with_gw_hp", of Transformer Engine "delayed", "current"
            or "mxfp8"; None for the first of the backend's.
        skip: patterns of names of further layers to leave unchanged, such as "head" or "blocks.*.router".
        first_and_last: whether to convert the model's first and last linear layers, too; they are the most sensitive.
        emulate: torchao: whether to emulate fp8 in a wider format, on any device; slow, to try a recipe.
        fp8_all_gather: torchao, tensorwise: whether FSDP2 gathers weights in fp8.
        amax_history: delayed: number of past steps that determine a scale.
        margin: delayed: powers of two between scales and the largest that fits.
    """

    backend: Fp8Backend = "torchao"
    scaling: Fp8Scaling | None = None
    skip: tuple[str, ...] = ()
    first_and_last: bool = False
    emulate: bool = False
    fp8_all_gather: bool = False
    amax_history: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        check_choice(self.backend, get_args(Fp8Backend), "unknown fp8 backend", where="Fp8.backend")
        choices = _SCALINGS[self.backend]
        if self.scaling is not None:
            check_choice(self.scaling, choices, f"{self.backend} does not have this scaling", where="Fp8.scaling")
        _check_patterns(self.skip, "Fp8.skip")
        for name, least in (("amax_history", 1), ("margin", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                where = f"Fp8.{name}"
                raise ConfigError(
                    "the count is not valid", expected=f"an integer from {least}", got=repr(value), where=where
                )
        used = {
            "emulate": self.backend == "torchao",
            "fp8_all_gather": self.how == "tensorwise",
            "amax_history": self.how == "delayed",
            "margin": self.how == "delayed",
        }
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        for name, has_effect in used.items():
            if not has_effect and getattr(self, name) != defaults[name]:
                raise _no_effect(f"Fp8.{name}", f"with {self.backend} and {self.how} scaling")

    @property
    def how(self) -> Fp8Scaling:
        """The scaling; by default the first of the backend."""
        return self.scaling or _SCALINGS[self.backend][0]


class Qat(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers that train for a model quantized later, by torchao (extra `torchao`).

    Attributes:
        weights: integers of the quantized weights, "int4" or "int8".
        group_size: neighbouring weights of a row that share a scale; None for a scale a row.
        activations: "int8" for inputs that the quantized layer rounds too, a scale a token; None for none.
        skip: patterns of names of layers to leave unchanged, such as "head" or "blocks.*.router".
    """

    weights: Literal["int4", "int8"] = "int4"
    group_size: int | None = 32
    activations: Literal["int8"] | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice(self.weights, ("int4", "int8"), "unknown format", where="Qat.weights")
        if self.activations is not None:
            check_choice(self.activations, ("int8",), "unknown format", where="Qat.activations")
        if self.group_size is not None and (type(self.group_size) is not int or self.group_size < 2):
            expected, where = "an integer from 2, or None", "Qat.group_size"
            raise ConfigError("the group size is not valid", expected=expected, got=repr(self.group_size), where=where)
        _check_patterns(self.skip, "Qat.skip")


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """The formats in which a run computes and stores.

    Attributes:
        compute: matrix products and convolutions: "fp32"; "tf32" for fp32 rounded to 10 bits on the way into them;
            "bf16" or "fp16" for autocast. fp16 has a loss scale.
        params: format of floating-point parameters, stored and stepped; None for the model's own. There is no "fp16":
            updates would vanish in it.
        outputs: format of floating-point outputs of the model; None for no conversion.
        fp32_modules: patterns of names of submodules with fp32 parameters, inputs and arithmetic, such as "head" or
            "blocks.*.router".
        master_weights: "fp32" for float32 copies of 16-bit parameters, which the optimizer steps, and for gradients in
            float32; None for parameters that are stepped themselves.
        fp8: layers in fp8, with compute in bf16.
        qat: layers that round their weights, for a model that `convert_qat` quantizes after the training.
    """

    compute: Compute = "fp32"
    params: Literal["fp32", "bf16"] | None = None
    outputs: Literal["fp32", "bf16", "fp16"] | None = None
    fp32_modules: tuple[str, ...] = ()
    master_weights: Literal["fp32"] | None = None
    fp8: Fp8 | None = None
    qat: Qat | None = None

    def __post_init__(self) -> None:
        check_choice(self.compute, get_args(Compute), "unknown format", where="Precision.compute")
        if self.params is not None:
            check_choice(self.params, ("fp32", "bf16"), "unknown format", where="Precision.params")
        if self.outputs is not None:
            check_choice(self.outputs, ("fp32", "bf16", "fp16"), "unknown format", where="Precision.outputs")
        if self.master_weights is not None:
            check_choice(self.master_weights, ("fp32",), "unknown format", where="Precision.master_weights")
        if self.master_weights is not None and self.params == "fp32":
            raise _no_effect("Precision.master_weights", "on parameters in fp32")
        _check_patterns(self.fp32_modules, "Precision.fp32_modules")
        if self.fp8 is not None and not isinstance(self.fp8, Fp8):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the recipe is not valid", expected="an accel.precision.Fp8", got=repr(self.fp8), where="Precision.fp8"
            )
        if self.qat is not None and not isinstance(self.qat, Qat):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the recipe is not valid", expected="an accel.precision.Qat", got=repr(self.qat), where="Precision.qat"
            )
        if self.fp8 is not None and self.qat is not None:
            raise ConfigError(
                "layers are trained for fp8 or for integers",
                expected="fp8 or qat",
                got="both",
                where="Precision",
                fix="Leave one out.",
            )
        if self.fp32_modules and self.compute not in ("bf16", "fp16") and self.params != "bf16":
            raise _no_effect("Precision.fp32_modules", f"where all is computed in {self.compute}")
        if self.fp8 is not None and self.compute != "bf16":
            raise ConfigError(
                "fp8 layers need bf16 around them",
                expected="compute='bf16'",
                got=f"compute={self.compute!r}",
                where="Precision.fp8",
            )

    @property
    def name(self) -> str:
        """The name of the record, as `precision` takes it; "custom" if it has none."""
        return next((name for name, record in _named() if record == self), "custom")


class Compile(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `compile_model` for the models that `prepare` takes.

    Attributes:
        regions: "whole" for the model, "repeated" for the blocks of its lists, each class of them compiled once.
        backend: name of a backend that torch knows.
        mode: as in torch.compile.
        fullgraph: whether a graph break is an error.
        dynamic: whether shapes are symbols; None for torch's choice.
    """

    regions: Literal["whole", "repeated"] = "whole"
    backend: str = "inductor"
    mode: CompileMode | None = None
    fullgraph: bool = False
    dynamic: bool | None = None


def compilation(what: Compile | CompileName) -> Compile | Literal["off"]:
    """Return the record of a name, the record itself, or "off"."""
    if isinstance(what, Compile):
        return what
    return "off" if what == "off" else Compile(regions=what)


def precision(what: Precision | PrecisionName | Literal["no"], *, where: str = "precision=") -> Precision:
    """Return the record of a name, or the record itself.

    Args:
        what: "fp32"; "tf32"; "bf16" or "fp16" for autocast; "pure-bf16" for bf16 parameters, too; "fp8" for torchao's
            layers in bf16; or a record. "no", as Accelerate has it, is "fp32".
        where: for errors.

    Raises:
        ConfigError: no such name.
    """
    if isinstance(what, Precision):
        return what
    name: Any = own_name(what)
    check_choice(name, get_args(PrecisionName), "unknown precision", where=where, fix=precision_fix(name))
    return dict(_named())[name]


def own_name(what: object) -> Any:
    """Return "fp32" for "no", and every other value as it is."""
    return "fp32" if what == "no" else what


def precision_fix(what: object) -> str:
    """Return the sentence with this library's name for another one's, such as torch.float16; "" if there is none."""
    name = _FOREIGN.get(str(what).removeprefix("torch.").lower())
    return f'Use "{name}".' if name else ""


@functools.cache
def _named() -> tuple[tuple[str, Precision], ...]:
    plain = [(name, Precision(compute=name)) for name in get_args(Compute)]
    pure = Precision(compute="bf16", params="bf16")
    fp8 = Precision(compute="bf16", fp8=Fp8())
    return (*plain, ("pure-bf16", pure), ("fp8", fp8))


def _check_patterns(patterns: tuple[str, ...], where: str) -> None:
    if type(patterns) is tuple and all(isinstance(each, str) for each in patterns):  # pyright: ignore[reportUnnecessaryIsInstance]
        return
    raise ConfigError(
        "the names of submodules are not valid",
        expected="a tuple of patterns",
        got=repr(patterns),
        where=where,
        fix=f"Write ({patterns!r},)." if isinstance(patterns, str) else "",
    )


def _no_effect(where: str, why: str) -> ConfigError:
    return ConfigError(f"a setting that has no effect {why}", where=where, fix="Leave it out.")
