# SPDX-License-Identifier: Apache-2.0
"""Exchange of gradients: DDP's options as one record, and its communication hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import msgspec
import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage] - a documented name
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from accel.errors import ConfigError, check_choice
from accel.parallel._power_sgd import PowerSgdExchange
from accel.parallel._spread import SpreadOptions

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Wire = Literal["fp16", "bf16"]
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class PowerSgd(msgspec.Struct, frozen=True, kw_only=True):
    """Send gradients as products of two thin matrices; what that loses is added to the next step's gradients.

    Its memory of what was lost is in no checkpoint: a resumed run sends whole gradients for `start_step` steps again.
    Messages are not sent while backward goes on. Gradients that are not finite make no memory: it stays as it was.

    Attributes:
        matrix_rank: columns of the thin matrices; more lose less.
        start_step: steps before which gradients travel whole, at least 2.
        min_compression: parameters that would not shrink by this factor travel whole, as do those of one dimension.
        error_feedback: whether what was lost is added to the next step's gradients.
        warm_start: whether a step's matrices begin where those of the step before ended.
        wire: dtype that the matrices travel in, "fp16" or "bf16"; None for their own.
        batched: whether a whole bucket is one square matrix, instead of each parameter. Fewer and smaller messages,
            which lose more: rows of that matrix are no rows of a layer.

    Reference: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression", arXiv:1905.13727.
    """

    matrix_rank: int = 1
    start_step: int = 1000
    min_compression: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    wire: Wire | None = None
    batched: bool = False

    def __post_init__(self) -> None:
        facts = {
            "matrix_rank of at least 1": self.matrix_rank >= 1,
            "start_step of at least 2": self.start_step >= 2,
            "min_compression above 0": self.min_compression > 0,
            "a wire of fp16 or bf16, or None": self.wire in (None, *get_args(Wire)),
        }
        for expected, holds in facts.items():
            if not holds:
                raise ConfigError("cannot compress so", expected=expected, got=repr(self), where="PowerSgd")


CommHook = Wire | PowerSgd | Hook


class ReplicateOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of DistributedDataParallel."""

    find_unused_parameters: bool = False
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    comm_hook: Any = None

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        if self.find_unused_parameters and self.static_graph:
            raise ConfigError(
                "a static graph is searched for unused parameters once, at the first step",
                expected="find_unused_parameters or static_graph",
                got="both",
                where="prepare_model",
            )
        if not 0 < self.bucket_cap_mb < float("inf"):
            raise ConfigError("no bucket has that size", expected="MiB above 0", got=repr(self.bucket_cap_mb))
        hook = self.comm_hook
        if hook is not None and not isinstance(hook, PowerSgd) and not callable(hook):
            check_choice(hook, get_args(Wire), "unknown communication hook", where="comm_hook=")

    def describe(self) -> str:
        """Return the options as text that is the same on ranks with the same options."""
        hook = self.comm_hook
        named = f"function {getattr(hook, '__qualname__', type(hook).__qualname__)}" if callable(hook) else hook
        return repr(msgspec.structs.replace(self, comm_hook=named))


def register_hook(replica: DistributedDataParallel, group: Any, hook: CommHook | None) -> None:
    """Let a hook exchange the gradients of a replica instead of DDP's own all-reduce."""
    if hook is None:
        return
    state, function = group, cast(Any, hook)
    if isinstance(hook, PowerSgd):
        state, function = _power_sgd(group, hook), PowerSgdExchange.exchange
    elif isinstance(hook, str):
        function = default_hooks.fp16_compress_hook if hook == "fp16" else default_hooks.bf16_compress_hook
    cast(Any, replica).register_comm_hook(state, _anonymous(function))


def _anonymous(hook: Any) -> Any:
    """The same hook under no name: by their names, DDP refuses torch's bf16 hooks on gloo, which carries bf16."""
    return lambda state, bucket: hook(state, bucket)  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]


def _power_sgd(group: Any, hook: PowerSgd) -> PowerSgdExchange:
    return PowerSgdExchange(
        group,
        matrix_rank=hook.matrix_rank,
        start_step=hook.start_step,
        min_compression=hook.min_compression,
        error_feedback=hook.error_feedback,
        warm_start=hook.warm_start,
        wire=None if hook.wire is None else _DTYPES[hook.wire],
        batched=hook.batched,
    )
