# SPDX-License-Identifier: Apache-2.0
"""The handle of an optimizer that `prepare` returns: its options, and the engine that steps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from accel.engines.deepspeed._gradients import ZeroGradients
from accel.engines.deepspeed._resolved import Resolved
from accel.errors import ConfigError


class ZeroOptimizer(Optimizer):
    """An optimizer whose state DeepSpeed shares out among ranks.

    `param_groups` are those of the optimizer that was passed: schedulers change learning rates there.

    Args:
        engine: DeepSpeed's engine.
        passed: the optimizer that the user made, which steps inside of DeepSpeed.
        groups: the model's parameters of each group.
        resolved: the settings.
    """

    def __init__(
        self, engine: Any, passed: Optimizer, groups: Sequence[Sequence[torch.Tensor]], resolved: Resolved
    ) -> None:
        super().__init__(passed.param_groups, passed.defaults)
        self.engine = engine
        self.gradients = ZeroGradients(engine.optimizer)
        self.passed = passed
        self.groups = groups
        self.resolved = resolved

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.engine.optimizer

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise: the engine steps.

        Raises:
            ConfigError: always.
        """
        fix = "Call accel.optimizer_step(ctx, optimizer, state)."
        raise ConfigError("DeepSpeed's engine steps this optimizer", where="optimizer.step", fix=fix)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window."""
        self.gradients.clear()
