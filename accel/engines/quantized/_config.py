# SPDX-License-Identifier: Apache-2.0
"""Ways to quantize: frozen records, one for each package, and the packages, imported when they are needed."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import torch

from accel.errors import ConfigError
from accel.errors._checks import check_choice, import_extra

DtypeName = Literal["fp32", "bf16", "fp16"]
TorchaoKind = Literal["int8", "int8_dynamic", "int4", "int4_grouped", "float8", "float8_dynamic"]
Patterns = str | tuple[str, ...]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROUPED = ("int4", "int4_grouped")


class Bitsandbytes(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers with weights of 4 or 8 bits, by bitsandbytes.

    Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339; Dettmers et al. 2023, "QLoRA", arXiv:2305.14314.

    Attributes:
        bits: 4 or 8.
        kind: format of 4 bits: "nf4", with values for normally distributed weights, or "fp4".
        double: 4 bits: whether the scales are quantized too, which saves 0.4 bits a weight.
        compute_dtype: 4 bits: dtype of the product; "bf16", "fp16" or "fp32".
        threshold: 8 bits: columns of inputs with a larger value compute in 16 bits; 0 for none.
        skip: paths of modules that stay as they are, or patterns such as "*.router"; names below them, too.
        keep_float32: paths or patterns of modules that stay as they are and have float32 weights, such as "*norm*".
        dtype: dtype of weights that are not quantized, and of the others before they are; None for the model's.

    Raises:
        ConfigError: a value outside its choices, or an option of the other number of bits.
    """

    bits: int = 4
    kind: Literal["nf4", "fp4"] = "nf4"
    double: bool = False
    compute_dtype: DtypeName = "bf16"
    threshold: float = 0.0
    skip: Patterns = ()
    keep_float32: Patterns = ()
    dtype: DtypeName | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            fix = "Choose 4 or 8; Torchao(kind='int4') has other formats."
            raise ConfigError(
                "no such number of bits", expected="4 or 8", got=repr(self.bits), where=_at(self), fix=fix
            )
        check_choice(self.kind, ("nf4", "fp4"), "no such format of 4 bits", where=f"{_at(self)}.kind")
        _check_dtypes(self, self.compute_dtype, self.dtype)
        if self.bits == 4 and self.threshold:
            raise ConfigError(
                "threshold= has no effect with 4 bits", where=_at(self), fix="Leave it out, or pass bits=8."
            )
        four = {"kind": self.kind != "nf4", "double": self.double, "compute_dtype": self.compute_dtype != "bf16"}
        if self.bits == 8 and any(four.values()):
            names = ", ".join(f"{name}=" for name, given in four.items() if given)
            raise ConfigError(f"{names} without effect with 8 bits", where=_at(self), fix="Leave out, or pass bits=4.")
        if not self.threshold >= 0:
            raise ConfigError(
                "the threshold is not valid", expected="0 or more", got=repr(self.threshold), where=_at(self)
            )


class Torchao(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers with weights of 4 or 8 bits, by torchao.

    Attributes:
        kind: "int8" and "float8" quantize weights, a scale a row; "int8_dynamic" and "float8_dynamic" also the inputs,
            as they come; "int4" packs two weights a byte for the kernels of CUDA (package `mslk`); "int4_grouped" has
            values of 4 bits in bytes, on any device.
        group_size: weights that share a scale; of the kinds of int4.
        skip: paths of modules that stay as they are, or patterns such as "*.router"; names below them, too.
        keep_float32: paths or patterns of modules that stay as they are and have float32 weights, such as "*norm*".
        dtype: dtype of weights that are not quantized, and of the others before they are; None for the model's.

    Raises:
        ConfigError: a value outside its choices, or a group size of a kind without groups.
    """

    kind: TorchaoKind = "int8"
    group_size: int | None = None
    skip: Patterns = ()
    keep_float32: Patterns = ()
    dtype: DtypeName | None = None

    def __post_init__(self) -> None:
        check_choice(self.kind, get_args(TorchaoKind), "no such kind of quantization", where=f"{_at(self)}.kind")
        _check_dtypes(self, self.dtype)
        if self.group_size is None:
            return
        if self.kind not in _GROUPED:
            fix = "Leave it out: each row has its scale."
            raise ConfigError(f"group_size= has no effect with {self.kind!r}", where=_at(self), fix=fix)
        if self.group_size < 1 or self.group_size & (self.group_size - 1):
            got = repr(self.group_size)
            raise ConfigError(
                "the group size is not valid", expected="a power of 2", got=got, where=f"{_at(self)}.group_size"
            )


Quantization = Bitsandbytes | Torchao


def dtype_named(name: DtypeName) -> torch.dtype:
    """Return torch's dtype."""
    return _DTYPES[name]


def patterns(given: Patterns) -> tuple[str, ...]:
    """Return patterns as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


def _check_dtypes(config: object, *names: DtypeName | None) -> None:
    for name in names:
        if name is not None:
            check_choice(name, list(_DTYPES), "no such dtype", where=_at(config))


def _at(config: object) -> str:
    return type(config).__name__


def package(name: str) -> Any:
    """Import a module of bitsandbytes or torchao, or raise `MissingExtraError`."""
    extra = name.partition(".")[0]
    return import_extra(name, f"quantization by {extra}", extra=extra, where="load_quantized")
