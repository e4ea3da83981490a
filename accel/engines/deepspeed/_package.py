# SPDX-License-Identifier: Apache-2.0
"""The door to DeepSpeed: the package, and the undocumented parts of its optimizers that are used."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from accel.engines.deepspeed._options import ResolvedDeepSpeed
from accel.errors import ConfigError, PrepareError, StepError
from accel.errors._checks import import_extra

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
        "_hp_optimizer_states_linked",
        "round_robin_gradients",
        "bit16_groups",
        "bit16_groups_flat",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "real_dp_process_group",
        "offload_gradient_dict",
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
        "fp16_groups",
    ),
}
_BEFORE_FIRST = -1  # micro_step_id before the first backward of a window


def package() -> Any:
    """Return DeepSpeed, or raise `MissingExtraError`."""
    return import_extra("deepspeed", "the strategy deepspeed", extra="deepspeed", where="strategy=")


def connected() -> Any:
    """Return DeepSpeed, with its calls on torch's default group, which must be open."""
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
    """Call DeepSpeed's `initialize`; its refusal is a `PrepareError`. A collective."""
    found = connected()
    try:
        return found.initialize(model=model, **arguments)
    except Exception as error:
        if isinstance(error, RuntimeError):  # from torch, such as for memory or a lost peer
            raise
        if not isinstance(error, AssertionError) or "LOCAL_RANK" not in str(error):
            raise PrepareError(
                "DeepSpeed refuses the model or its configuration",
                got=f"{type(error).__name__}: {error}",
                where="prepare, strategy='deepspeed'",
                fix="See the key that it names in the JSON, or in DeepSpeed(settings=).",
            ) from error
        raise ConfigError(
            "DeepSpeed reads a variable that this process does not have",
            expected="LOCAL_RANK",
            got="none",
            where="strategy='deepspeed'",
            fix="Start the script by `accel launch` or torchrun.",
        ) from error


def flat_parameters(zero: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return the fp32 partitions that DeepSpeed's inner optimizer steps, each with the model's parameters in it."""
    if _is_third(zero):
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
    return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))


def link_weights(zero: Any) -> None:
    """Let fp32 weights be found by parameter where gradients go round robin, in a flat group of another order."""
    if not getattr(zero, "round_robin_gradients", False):
        return
    link = package().utils.link_hp_params
    # DeepSpeed itself looks for each parameter at its place in the order of the optimizer's group
    for at, flat in enumerate(zero.bit16_groups_flat):
        group = zero.real_dp_process_group[at]
        reordered = zip(zero.round_robin_bit16_groups[at], zero.round_robin_bit16_offsets[at], strict=True)
        offsets = {id(parameter): offset for parameter, offset in reordered}
        size = flat.numel() // torch.distributed.get_world_size(group)
        link(
            lp_param_list=zero.bit16_groups[at],
            flat_hp_partition=zero.single_partition_of_fp32_groups[at],
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=at,
            partition_start=torch.distributed.get_rank(group) * size,
            partition_size=size,
            dp_group=group,
            param_offsets=[offsets[id(parameter)] for parameter in zero.bit16_groups[at]],
        )


def link_state(zero: Any) -> None:
    """Let the inner optimizer's state be found by parameter.

    DeepSpeed does so once, when the first group has been stepped and others have no state yet.
    """
    if not _is_third(zero):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def holds_gradients(zero: Any) -> bool:
    """Return whether a backward came since the last step, or since gradients were dropped."""
    if _is_third(zero):
        return zero.micro_step_id > 0 or zero._epilogue_ran_this_backward
    return zero.micro_step_id > _BEFORE_FIRST


def forget_gradients(zero: Any) -> None:
    """Drop the gradients of a window, also those that are reduced already. Mutates it."""
    zero.zero_grad(set_to_none=True)
    for key in zero.averaged_gradients:
        zero.averaged_gradients[key] = None
    if _is_third(zero):
        # a backward overwrites only the gradients that it reaches; others would keep this window's
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
    for each, _ in flat_parameters(zero):
        if each.grad is not None:
            each.grad.zero_()


class ZeroGradients:
    """Gradients of one model. It notes whether a window began with some.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._found = False

    def clear(self) -> None:
        """Drop them, and the note. No communication."""
        forget_gradients(self._zero)
        self._found = False

    def note(self) -> None:
        """Note whether there are any now that a window begins."""
        self._found = holds_gradients(self._zero)

    def refuse_found(self) -> None:
        """Raise `StepError` if the window began with gradients: on every rank, as all of them ran that backward."""
        if self._found:
            raise StepError(
                "the step would use gradients from before its window",
                expected="a model without gradients when a window begins",
                got="gradients that DeepSpeed has reduced already",
                where="optimizer_step",
                fix="Call accel.training.clear_gradients(model) where a window is abandoned, "
                "with the model that prepare returned.",
            )


class ZeroOptimizer(Optimizer):
    """An optimizer with a state that DeepSpeed shards.

    `param_groups` belong to the optimizer that was passed: schedulers change learning rates there.

    Args:
        engine: DeepSpeed's engine.
        passed: the optimizer that the user made, which steps inside of DeepSpeed.
        groups: the model's parameters of each group.
        trained: the groups with parameters that train, which alone DeepSpeed takes.
        resolved: the settings.
    """

    def __init__(
        self,
        engine: Any,
        passed: Optimizer,
        groups: Sequence[Sequence[torch.Tensor]],
        trained: list[dict[str, Any]],
        resolved: ResolvedDeepSpeed,
    ) -> None:
        super().__init__(passed.param_groups, passed.defaults)
        self.engine = engine
        self.gradients = ZeroGradients(engine.optimizer)
        self.passed = passed
        self.groups = groups
        self._trained = trained
        self.resolved = resolved

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.engine.optimizer

    @contextlib.contextmanager
    def inner_groups(self) -> Generator[None]:
        """Let the optimizer that was passed have the groups that DeepSpeed counts, for a block of its calls."""
        every = self.passed.param_groups
        self.passed.param_groups = self._trained
        try:
            yield
        finally:
            self.passed.param_groups = every

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise `ConfigError`: the engine steps."""
        fix = "Call accel.optimizer_step(ctx, optimizer, state)."
        raise ConfigError("DeepSpeed's engine steps this optimizer", where="optimizer.step", fix=fix)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window."""
        self.gradients.clear()
