# SPDX-License-Identifier: Apache-2.0
"""The loss scale as a frozen record with a pure update.

Dynamic loss scaling: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

import msgspec

from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.precision._support import check_compute

_LEAST = 2.0**-126  # the range of fp32
_MOST = 2.0**127


class LossScale(msgspec.Struct, frozen=True):
    """The factor of losses before backward, so that small gradients survive fp16.

    Attributes:
        scale: the factor, 2**-126 to 2**127.
        dynamic: whether the scale follows overflows.
        growth_factor: factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: steps without an overflow between two growths.
        good_steps: steps without an overflow since the last change.
        overflows: overflows in a row.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        facts = {
            "scale from 2**-126 to 2**127": _LEAST <= self.scale <= _MOST,
            "growth_factor of at least 1": self.growth_factor >= 1,
            "backoff_factor between 0 and 1": 0 < self.backoff_factor < 1,
            "growth_interval of at least 1": self.growth_interval >= 1,
        }
        for expected, holds in facts.items():
            if not holds:
                raise ConfigError("not a loss scale", expected=expected, got=repr(self), where="LossScale")

    def update(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step.

        Args:
            finite: whether the gradients of this step were finite.
        """
        if not self.dynamic:
            return self
        if not finite:
            return msgspec.structs.replace(
                self,
                scale=max(self.scale * self.backoff_factor, _LEAST),
                good_steps=0,
                overflows=self.overflows + 1,
            )
        if self.good_steps + 1 < self.growth_interval:
            return msgspec.structs.replace(self, good_steps=self.good_steps + 1, overflows=0)
        grown = min(self.scale * self.growth_factor, _MOST)
        return msgspec.structs.replace(self, scale=grown, good_steps=0, overflows=0)


@context_first
def loss_scale(ctx: DistContext, *, initial: float = 2.0**16, growth_interval: int = 2000) -> LossScale:
    """Return the initial loss scale: dynamic for fp16, else fixed at 1.

    Args:
        ctx: the context, for its precision.
        initial: first scale under fp16.
        growth_interval: steps without an overflow between two doublings.

    Raises:
        ConfigError: a value outside its range.
        DeviceError: the device does not support the context's precision.

    Example:
        >>> accel.loss_scale(ctx).scale
        1.0
        >>> accel.loss_scale(accel.replace(ctx, precision="fp16")).scale
        65536.0
    """
    check_compute(ctx.device, ctx.precision.compute)
    if ctx.precision.compute != "fp16":
        return LossScale()
    return LossScale(scale=initial, dynamic=True, growth_interval=growth_interval)
