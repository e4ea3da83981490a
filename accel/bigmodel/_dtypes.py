# SPDX-License-Identifier: Apache-2.0
"""Dtypes by safetensors' names, such as "BF16"; complex128, which the format lacks, is "C128"."""

from __future__ import annotations

import functools

import torch

from accel.errors import ConfigError
from accel.storage import torch_dtypes

_ONLY_READ = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}


def dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that weights may have, by name."""
    only_read = {key: getattr(torch, name) for key, name in _ONLY_READ.items() if hasattr(torch, name)}
    return {**torch_dtypes(), "C128": torch.complex128, **only_read}


@functools.lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name.

    Raises:
        ConfigError: torch has no such dtype.
    """
    known = dtypes()
    if name not in known:
        raise ConfigError("torch has no such dtype", expected=", ".join(sorted(known)), got=repr(name))
    return known[name]


def check_dtype(dtype: object, *, where: str) -> None:
    """Refuse texts, integers' dtypes and other things in the place of one that floating-point weights may have.

    Raises:
        ConfigError: not a dtype of torch, or none of floating-point numbers.
    """
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise ConfigError(
            "not a dtype of floating-point weights",
            expected="one such as torch.bfloat16",
            got=str(dtype),
            where=where,
            fix="accel.load_quantized loads weights as integers, with their scales.",
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        fix = f"Pass torch.{dtype}." if isinstance(getattr(torch, str(dtype), None), torch.dtype) else ""
        raise ConfigError("not a dtype", expected="one of torch's", got=repr(dtype), where=where, fix=fix)


@functools.lru_cache(maxsize=64)
def name_of(dtype: torch.dtype) -> str:
    """Return the name of torch's dtype.

    Raises:
        ConfigError: weights of the dtype cannot be stored.
    """
    for name, known in dtypes().items():
        if known == dtype:
            return name
    raise ConfigError("weights of this dtype cannot be stored", got=str(dtype))


def copy_in_range(target: torch.Tensor, source: torch.Tensor, *, name: str) -> None:
    """Copy values to a tensor of any dtype; refuse those that a float of 8 bits would clip or lose.

    Raises:
        ConfigError: a value beyond the largest of a float8 target.
    """
    if target.dtype.is_floating_point and target.itemsize == 1 and source.dtype != target.dtype and source.numel():
        largest = torch.finfo(target.dtype).max
        low, high = (source.float() if source.itemsize == 1 else source).aminmax()
        got = max(-low.item(), high.item())
        if got > largest:
            raise ConfigError(
                f"a weight with values that {name_of(target.dtype)} does not hold",
                expected=f"up to {largest:g}",
                got=f"{got:g}",
                where=f"{name!r}, storage_dtype",
                fix=f"Leave it out: storage_skip=[{name!r}].",
            )
    _ = target.copy_(source)
