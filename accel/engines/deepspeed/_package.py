# SPDX-License-Identifier: Apache-2.0
"""The door to DeepSpeed: the package, and what is used of its optimizers beside its documented calls."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel.errors import ConfigError, MissingExtraError

# Attributes of DeepSpeed's optimizers that it does not document, by the class that has them; a test looks for them.
PRIVATE: Mapping[str, Sequence[str]] = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
        "loss_scale",
        "clip_grad",
        "micro_step_id",
        "averaged_gradients",
        "single_partition_of_fp32_groups",
        "_lazy_init_hp_params_optimizer_state",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        "loss_scale",
        "clip_grad",
        "averaged_gradients",
        "fp32_partitioned_groups_flat",
    ),
}
_BEFORE_FIRST = -1  # micro_step_id before the first backward of a window


def package() -> Any:
    """Return DeepSpeed.

    Raises:
        MissingExtraError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module("deepspeed")
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            "the strategy deepspeed needs a package that does not import",
            expected="deepspeed",
            got=f"{type(error).__name__}: {error}",
            where="strategy=",
            fix="Run `pip install 'accel[deepspeed]'`.",
        ) from error


def connected() -> Any:
    """Return DeepSpeed, with its calls on torch's default group, which must be open.

    Raises:
        ConfigError: torch has no default group.
        MissingExtraError: DeepSpeed is missing.
    """
    found = package()
    if not torch.distributed.is_initialized():
        raise ConfigError(
            "DeepSpeed needs torch's default process group",
            expected="a context of several processes, or of one by a launcher",
            got="none",
            where="strategy='deepspeed'",
            fix="Start the script by `accel launch`.",
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    found.init_distributed(
        dist_backend=torch.distributed.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )
    return found


def flat_parameters(zero: Any) -> list[torch.Tensor]:
    """Return the fp32 partitions that DeepSpeed's inner optimizer steps."""
    flat = getattr(zero, "single_partition_of_fp32_groups", None)
    return list(zero.fp32_partitioned_groups_flat if flat is None else flat)


def link_state(zero: Any) -> None:
    """Let state that the inner optimizer was given be found by parameter."""
    link = getattr(zero, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        link()


def forget_gradients(zero: Any) -> None:
    """Drop the gradients of a window, also those that are reduced already. Mutates it."""
    zero.zero_grad(set_to_none=True)
    if hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2; stage 3 counts anew by itself
        zero.micro_step_id = _BEFORE_FIRST  # what comes next overwrites, and does not add
    for key in zero.averaged_gradients:
        zero.averaged_gradients[key] = None
