# SPDX-License-Identifier: Apache-2.0
"""Evaluation mode of models, and of optimizers that keep two sets of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from accel.errors import ConfigError
from accel.parallel import stage_modules


@runtime_checkable
class TwoModes(Protocol):
    """Methods of schedule-free optimizers: weights to step from, and averaged ones to evaluate."""

    def train(self) -> object:
        """Put the weights to step from into the parameters."""
        ...

    def eval(self) -> object:
        """Put the averaged weights into the parameters."""
        ...


@contextlib.contextmanager
def evaluating(*objects: nn.Module | Optimizer) -> Generator[None]:
    """Evaluate in this block: models in eval mode, with the averaged weights of schedule-free optimizers.

    Pass the optimizers too; only schedule-free ones change. Save a model for inference in this block, and the state of
    a run outside of it. Afterwards every submodule and optimizer is in its former mode. No communication.

    Args:
        objects: models and optimizers.

    Raises:
        ConfigError: an object of another kind.

    Reference: Defazio et al. 2024, "The road less scheduled", arXiv:2405.15682.
    """
    for at, each in enumerate(objects):
        if not isinstance(each, nn.Module | Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "this has no mode of evaluation",
                expected="a module or an optimizer",
                got=type(each).__name__,
                where=f"evaluating, argument {at + 1}",
            )
    models = [each for each in objects if isinstance(each, nn.Module)]
    # stages of a pipeline have copies of the modules around their own
    roots = [root for model in models for root in (model, *stage_modules(model))]
    trained = [module for root in roots for module in root.modules() if module.training]
    switched = [each for each in objects if isinstance(each, TwoModes) and _trains(each)]
    try:
        for model in models:
            _ = model.eval()
        for optimizer in switched:
            _ = optimizer.eval()
        yield
    finally:
        for module in trained:
            module.training = True
        for optimizer in switched:
            _ = optimizer.train()


def _trains(each: object) -> bool:
    return isinstance(each, Optimizer) and bool(each.param_groups[0].get("train_mode", True))
