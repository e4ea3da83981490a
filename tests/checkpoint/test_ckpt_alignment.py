# SPDX-License-Identifier: Apache-2.0
"""Complex numbers load from wherever they lie in a file: torch's copy crashes on what is not aligned to 16 bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("padding", range(4))
def test_complex_tensors_load_from_any_place_in_a_file(tmp_path: Path, dtype: torch.dtype, padding: int) -> None:
    ctx, names = accel.single(), [f"{'x' * length}_z" for length in range(1, 9)]  # headers of several lengths
    values = {name: torch.randn((), dtype=dtype) for name in names}
    values |= {f"{name}_pad": torch.ones(padding + 1) for name in names}
    path = accel.save_state(ctx, tmp_path, {"values": values}, step=1)
    found = accel.load_state(ctx, path, {"values": {}})["values"]
    assert all(torch.equal(found[name], value) for name, value in values.items())
