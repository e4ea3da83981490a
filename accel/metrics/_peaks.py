# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of accelerators in dense matrix products, by the name that torch gives them. From their data sheets."""

from __future__ import annotations

from typing import NamedTuple

from accel.formats import Precision


class Peak(NamedTuple):
    """Peak rates of a device in 10**12 FLOP/s, without sparsity; 0 for a format that it does not have.

    Attributes:
        half: bf16 and fp16.
        tf32: fp32 values rounded to tf32.
        single: fp32.
        fp8: 8-bit floats.
    """

    half: float
    tf32: float
    single: float
    fp8: float = 0


# The first name that occurs in the device's counts.
_PEAKS = {
    "GB200": Peak(2500, 1250, 80, 5000),
    "B200": Peak(2250, 1120, 75, 4500),
    "H200": Peak(989.4, 494.7, 66.9, 1978.9),
    "H100 PCIe": Peak(756, 378, 51, 1513),
    "H100 NVL": Peak(835, 417, 60, 1670),
    "H100": Peak(989.4, 494.7, 66.9, 1978.9),
    "A100": Peak(312, 156, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165, 82, 10.3),
    "L40S": Peak(362, 183, 91.6, 733),
    "L4": Peak(121, 60, 30.3, 242.5),
    "V100": Peak(125, 0, 15.7),
    "T4": Peak(65, 0, 8.1),
    "MI300X": Peak(1307.4, 653.7, 163.4, 2614.9),
}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device in a run's format; None if it is not known.

    Args:
        device_name: as of `torch.cuda.get_device_name`.
        precision: number formats of the run.
    """
    found = next((peak for name, peak in _PEAKS.items() if name in device_name), None)
    if found is None:
        return None
    if precision.fp8 is not None:
        rate = found.fp8
    else:
        rate = {"fp32": found.single, "tf32": found.tf32}.get(precision.compute, found.half)
    return rate * 1e12 or None
