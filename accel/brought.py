# SPDX-License-Identifier: Apache-2.0
"""Keywords that people bring from Accelerate and Transformers, answered with what stands in their place here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from accel.errors._checks import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

_LOADER = "Use the arguments of accel.prepare_loader."
_HOSTS = "A notebook's ranks are of one machine; on several, start a script by `accel launch --nnodes` on each."
_TRACKING = "Use accel.tracking(ctx, project, to=[...], dir=...), and the folder of accel.save_state."
_ACCUMULATION = "Use accumulation=, of accel.session and accel.train_state."
_FIXES = {
    "mixed_precision": "Use precision=, of accel.session and accel.notebook_launcher.",
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_accumulation_plugin": _ACCUMULATION,
    "cpu": 'Use device="cpu".',
    "device_placement": "Leave what stays where it is out of accel.prepare.",
    "split_batches": "Use accel.prepare_loader(global_batch=...).",
    "dataloader_config": _LOADER,
    "even_batches": 'Use accel.prepare_loader(tail="pad").',
    "dispatch_batches": 'Use accel.prepare_loader(stream="dispatch").',
    "use_seedable_sampler": "Leave it out: accel.train_state(ctx, seed=...) gives the order of the data.",
    "use_stateful_dataloader": "Leave it out: the state holds the position in the data.",
    "rng_types": "Leave it out: the order of the data is arithmetic on the state.",
    "deepspeed_plugin": 'Use strategy="deepspeed", deepspeed=accel.engines.deepspeed.DeepSpeed(...).',
    "deepspeed_plugins": 'Use strategy="deepspeed", deepspeed=accel.engines.deepspeed.DeepSpeed(...).',
    "fsdp_plugin": 'Use strategy="fsdp", plan=accel.parallel.Plan(...).',
    "megatron_lm_plugin": 'Use mesh="dp=2,tp=2".',
    "parallelism_config": 'Use mesh="dp=2,tp=2".',
    "dynamo_backend": "Use compile=.",
    "dynamo_plugin": "Use compile=.",
    "log_with": _TRACKING,
    "project_dir": _TRACKING,
    "project_config": _TRACKING,
    "step_scheduler_with_optimizer": "Use accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler).",
    "kwargs_handlers": "Use the arguments of accel.session, accel.prepare_model, accel.loss_scale and accel.autocast.",
    "timeout": "Use timeout_s=, in seconds.",
    "safe_serialization": "Leave it out: files of weights are safetensors, always.",
    "save_on_each_node": "Use accel.checkpoint.HostFolder(path) as the folder.",
    "is_main_process": "Leave it out: every rank calls the function, which decides who writes.",
    "num_processes": "Use nproc=.",
    "num_nodes": _HOSTS,
    "node_rank": _HOSTS,
    "master_addr": _HOSTS,
    "rdzv_endpoint": _HOSTS,
    "use_port": "Leave it out: a free port is found.",
}


def keyword_fix(name: str, valid: Iterable[str]) -> str:
    """Return the sentence that names the argument to write in place of an unknown one."""
    return _FIXES.get(name) or did_you_mean(name, valid)


def answered(function: F) -> F:
    """Decorate a function: the error of an unknown keyword names the one to write in its place."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise_unknown(function, kwargs, error)
            raise

    return cast(F, called)


def raise_unknown(function: Callable[..., Any], keywords: Mapping[str, object], error: TypeError) -> None:
    """Raise a `TypeError` with a fix if a call failed for an unknown keyword; else return.

    If the call itself failed, the function's frame is left out of the traceback.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return
    parameters = inspect.signature(function).parameters
    for name in keywords:
        if name not in parameters:
            fix = keyword_fix(name, (each for each in parameters if each != "ctx"))
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {fix}") from None
