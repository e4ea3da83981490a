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
        "all_grad_tensors",
        "cpu_offload",
        "accumulated_grads_in_cpu",
        "_offload_accumulated_param_ids",
        "single_partition_of_fp32_groups",
        "_lazy_init_hp_params_optimizer_state",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        "loss_scale",
        "clip_grad",
        "micro_step_id",
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "_epilogue_ran_this_backward",
        "_offload_boundary_param_ids",
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
            expected="a context that opened it, of one process or several",
            got="none",
            where="strategy='deepspeed'",
            fix="Make the context by accel.session(strategy='deepspeed').",
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    found.init_distributed(
        dist_backend=torch.distributed.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )
    return found


def initialized(model: Any, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Call DeepSpeed's `initialize`. A collective.

    Raises:
        ConfigError: the process has no LOCAL_RANK, which DeepSpeed reads from the environment alone; or as `connected`.
    """
    found = connected()
    try:
        return found.initialize(model=model, **arguments)
    except AssertionError as error:
        if "LOCAL_RANK" not in str(error):
            raise
        raise ConfigError(
            "DeepSpeed reads a variable that this process does not have",
            expected="LOCAL_RANK",
            got="none",
            where="strategy='deepspeed'",
            fix="Start the script by `accel launch` or torchrun.",
        ) from error


def flat_parameters(zero: Any) -> list[torch.Tensor]:
    """Return the fp32 partitions that DeepSpeed's inner optimizer steps."""
    flat = getattr(zero, "single_partition_of_fp32_groups", None)
    return list(zero.fp32_partitioned_groups_flat if flat is None else flat)


def link_state(zero: Any) -> None:
    """Let state that the inner optimizer was given be found by parameter."""
    link = getattr(zero, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        link()


def holds_gradients(zero: Any) -> bool:
    """Return whether a backward came since the last step, or since gradients were dropped."""
    if _is_third(zero):
        return zero.micro_step_id > 0 or zero._epilogue_ran_this_backward
    return zero.micro_step_id > _BEFORE_FIRST


def forget_gradients(zero: Any) -> None:
    """Drop the gradients of a window, also those that are reduced already. Mutates it.

    Buffers become zero, so that a parameter which the next window leaves out has no gradient of this one: DeepSpeed
    overwrites the gradients of those parameters alone that a backward reaches.
    """
    zero.zero_grad(set_to_none=True)
    for key in zero.averaged_gradients:
        zero.averaged_gradients[key] = None
    if _is_third(zero):
        zero.grad_partitions_flat_buffer.zero_()
        zero._offload_boundary_param_ids.clear()
        _clear_flat(zero)
        return
    zero.micro_step_id = _BEFORE_FIRST  # what comes next overwrites, and does not add
    for key in zero.all_grad_tensors:
        zero.all_grad_tensors[key] = None
    if zero.cpu_offload:
        zero.reset_cpu_buffers()
        zero._offload_accumulated_param_ids.clear()
        for each in zero.accumulated_grads_in_cpu.values():
            each.zero_()
        _clear_flat(zero)


def _is_third(zero: Any) -> bool:
    return not hasattr(zero, "single_partition_of_fp32_groups")


def _clear_flat(zero: Any) -> None:
    """Set the gradients to zero that an optimizer on the CPU steps with; they stay where they are between steps."""
    for each in flat_parameters(zero):
        if each.grad is not None:
            each.grad.zero_()
