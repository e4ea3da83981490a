# SPDX-License-Identifier: Apache-2.0
"""Distributed PyTorch training as plain functions over explicit values.

Names resolve on first use, so `import accel` loads neither torch nor anything optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.checkpoint import Keep as Keep, Saving as Saving, latest_checkpoint as latest_checkpoint
    from accel.collectives import (
        broadcast as broadcast,
        broadcast_object_list as broadcast_object_list,
        gather as gather,
        gather_object as gather_object,
        pad_across_processes as pad_across_processes,
        reduce as reduce,
    )
    from accel.context import (
        DistContext as DistContext,
        close as close,
        from_env as from_env,
        from_group as from_group,
        from_mesh as from_mesh,
        group_of as group_of,
        replace as replace,
        session as session,
        single as single,
    )
    from accel.data import (
        Batch as Batch,
        Cursor as Cursor,
        Loader as Loader,
        Mean as Mean,
        SampleCount as SampleCount,
        StreamLoader as StreamLoader,
        Sum as Sum,
        batches as batches,
        gather_for_metrics as gather_for_metrics,
        order as order,
        prepare_loader as prepare_loader,
        progress as progress,
        skip_first_batches as skip_first_batches,
        total_steps as total_steps,
    )
    from accel.env import LaunchEnv as LaunchEnv, read_env as read_env
    from accel.errors import (
        AccelError as AccelError,
        CheckpointError as CheckpointError,
        CollectiveMismatch as CollectiveMismatch,
        ConfigError as ConfigError,
        ContextClosedError as ContextClosedError,
        DataError as DataError,
        DeviceError as DeviceError,
        EnvError as EnvError,
        LaunchError as LaunchError,
        MissingExtraError as MissingExtraError,
        NonFiniteError as NonFiniteError,
        OutOfMemoryError as OutOfMemoryError,
        PeerError as PeerError,
        PrepareError as PrepareError,
        StageError as StageError,
        StepError as StepError,
        TreeError as TreeError,
    )
    from accel.formats import Fp8 as Fp8, Precision as Precision
    from accel.items import (
        Loaded as Loaded,
        Part as Part,
        Stored as Stored,
        TrainableOnly as TrainableOnly,
        get_state_dict as get_state_dict,
        load_accelerate_state as load_accelerate_state,
        load_state as load_state,
        save as save,
        save_model as save_model,
        save_state as save_state,
    )
    from accel.launching import (
        debug_launcher as debug_launcher,
        launch as launch,
        notebook_launcher as notebook_launcher,
    )
    from accel.memory import find_executable_batch_size as find_executable_batch_size, free_memory as free_memory
    from accel.optim import Accumulation as Accumulation
    from accel.parallel import (
        DispatchedTokens as DispatchedTokens,
        LocalSgd as LocalSgd,
        PowerSgd as PowerSgd,
        Routing as Routing,
        balance_loss as balance_loss,
        checkpoint_activations as checkpoint_activations,
        clear_gradients as clear_gradients,
        combine_tokens as combine_tokens,
        compile_model as compile_model,
        context_attention as context_attention,
        dispatch_tokens as dispatch_tokens,
        expert_plan as expert_plan,
        join_uneven_inputs as join_uneven_inputs,
        local_sgd_step as local_sgd_step,
        no_sync as no_sync,
        prepare_local_model as prepare_local_model,
        prepare_model as prepare_model,
        route_tokens as route_tokens,
        sequence_positions as sequence_positions,
        split_sequence as split_sequence,
        stage_plan as stage_plan,
        tensor_plan as tensor_plan,
        trigger_sync_in_backward as trigger_sync_in_backward,
        unwrap_model as unwrap_model,
        vocab_cross_entropy as vocab_cross_entropy,
    )
    from accel.precision import (
        LossScale as LossScale,
        apply_precision as apply_precision,
        autocast as autocast,
        loss_scale as loss_scale,
    )
    from accel.preempt import (
        Stop as Stop,
        StopRequests as StopRequests,
        stop_agreed as stop_agreed,
        stop_requests as stop_requests,
    )
    from accel.process import (
        any_rank as any_rank,
        local_main_process_first as local_main_process_first,
        main_process_first as main_process_first,
        on_last_process as on_last_process,
        on_local_main_process as on_local_main_process,
        on_local_process as on_local_process,
        on_main_process as on_main_process,
        on_process as on_process,
        print as print,
        split_between_processes as split_between_processes,
        wait_for_everyone as wait_for_everyone,
    )
    from accel.random import Key as Key
    from accel.seeding import (
        deterministic as deterministic,
        rank_key as rank_key,
        seeded as seeded,
        set_seed as set_seed,
        synchronize_rng as synchronize_rng,
    )
    from accel.storage import RemotePath as RemotePath
    from accel.topology import Axes as Axes, Plan as Plan
    from accel.training import (
        Ema as Ema,
        StepResult as StepResult,
        TrainState as TrainState,
        accumulate as accumulate,
        backward as backward,
        clip_grad_norm_ as clip_grad_norm_,
        clip_grad_value_ as clip_grad_value_,
        discard as discard,
        evaluating as evaluating,
        forward as forward,
        forward_backward as forward_backward,
        fused_step as fused_step,
        optimizer_step as optimizer_step,
        prepare as prepare,
        prepare_optimizer as prepare_optimizer,
        prepare_scheduler as prepare_scheduler,
        resume as resume,
        train_state as train_state,
        unscale_gradients as unscale_gradients,
    )
    from accel.tree import Container as Container

__version__ = "0.1.0"

_HOMES = {
    "checkpoint": ("Keep", "Saving", "latest_checkpoint"),
    "collectives": (
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "reduce",
    ),
    "context": (
        "DistContext",
        "close",
        "from_env",
        "from_group",
        "from_mesh",
        "group_of",
        "replace",
        "session",
        "single",
    ),
    "data": (
        "Batch",
        "Cursor",
        "Loader",
        "Mean",
        "SampleCount",
        "StreamLoader",
        "Sum",
        "batches",
        "gather_for_metrics",
        "order",
        "prepare_loader",
        "progress",
        "skip_first_batches",
        "total_steps",
    ),
    "env": ("LaunchEnv", "read_env"),
    "errors": (
        "AccelError",
        "CheckpointError",
        "CollectiveMismatch",
        "ConfigError",
        "ContextClosedError",
        "DataError",
        "DeviceError",
        "EnvError",
        "LaunchError",
        "MissingExtraError",
        "NonFiniteError",
        "OutOfMemoryError",
        "PeerError",
        "PrepareError",
        "StageError",
        "StepError",
        "TreeError",
    ),
    "formats": ("Fp8", "Precision"),
    "items": (
        "Loaded",
        "Part",
        "Stored",
        "TrainableOnly",
        "get_state_dict",
        "load_accelerate_state",
        "load_state",
        "save",
        "save_model",
        "save_state",
    ),
    "launching": ("debug_launcher", "launch", "notebook_launcher"),
    "memory": ("find_executable_batch_size", "free_memory"),
    "optim": ("Accumulation",),
    "parallel": (
        "DispatchedTokens",
        "LocalSgd",
        "PowerSgd",
        "Routing",
        "balance_loss",
        "checkpoint_activations",
        "clear_gradients",
        "combine_tokens",
        "compile_model",
        "context_attention",
        "dispatch_tokens",
        "expert_plan",
        "join_uneven_inputs",
        "local_sgd_step",
        "no_sync",
        "prepare_local_model",
        "prepare_model",
        "route_tokens",
        "sequence_positions",
        "split_sequence",
        "stage_plan",
        "tensor_plan",
        "trigger_sync_in_backward",
        "unwrap_model",
        "vocab_cross_entropy",
    ),
    "precision": ("LossScale", "apply_precision", "autocast", "loss_scale"),
    "preempt": ("Stop", "StopRequests", "stop_agreed", "stop_requests"),
    "process": (
        "any_rank",
        "local_main_process_first",
        "main_process_first",
        "on_last_process",
        "on_local_main_process",
        "on_local_process",
        "on_main_process",
        "on_process",
        "print",
        "split_between_processes",
        "wait_for_everyone",
    ),
    "random": ("Key",),
    "seeding": ("deterministic", "rank_key", "seeded", "set_seed", "synchronize_rng"),
    "training": (
        "Ema",
        "StepResult",
        "TrainState",
        "accumulate",
        "backward",
        "clip_grad_norm_",
        "clip_grad_value_",
        "discard",
        "evaluating",
        "forward",
        "forward_backward",
        "fused_step",
        "optimizer_step",
        "prepare",
        "prepare_optimizer",
        "prepare_scheduler",
        "resume",
        "train_state",
        "unscale_gradients",
    ),
    "storage": ("RemotePath",),
    "topology": ("Axes", "Plan"),
    "tree": ("Container",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]


_CONTEXT = "Use `with accel.session() as ctx`, and pass ctx to each function."
_OTHERS = {  # names of Accelerate, Fabric and torch.distributed
    "Accelerator": "Use `with accel.session() as ctx`, then accel.prepare(ctx, ...) and accel.backward(ctx, ...).",
    "Fabric": "Use `with accel.session() as ctx`, then accel.prepare(ctx, ...) and accel.backward(ctx, ...).",
    "PartialState": _CONTEXT,
    "AcceleratorState": _CONTEXT,
    "init_process_group": _CONTEXT,
    "InitProcessGroupKwargs": "Use accel.session(timeout_s=...).",
    "GradientState": "Use accel.Accumulation, which says at which micro-batch a step is due.",
    "GradientAccumulationPlugin": "Use accel.Accumulation.",
    "DataLoaderConfiguration": "Use the arguments of accel.prepare_loader.",
    "prepare_data_loader": "Use accel.prepare_loader.",
    "prepare_dataloader": "Use accel.prepare_loader.",
    "DistributedDataParallelKwargs": "Use the arguments of accel.prepare_model.",
    "DistributedDataParallel": "Use accel.prepare_model.",
    "FullyShardedDataParallelPlugin": 'Use accel.session(strategy="fsdp"), then accel.prepare.',
    "DeepSpeedPlugin": 'Use accel.session(strategy="fsdp"), then accel.prepare.',
    "AutocastKwargs": "Use the arguments of accel.autocast.",
    "GradScalerKwargs": "Use the arguments of accel.loss_scale.",
    "GradScaler": "Use accel.loss_scale.",
    "ProjectConfiguration": "Use the arguments of accel.save_state.",
    "LocalSGD": "Use accel.LocalSgd.",
    "clip_grad_norm": "Use accel.clip_grad_norm_.",
    "extract_model_from_parallel": "Use accel.unwrap_model.",
    "all_gather": "Use accel.gather.",
    "all_reduce": "Use accel.reduce.",
    "barrier": "Use accel.wait_for_everyone.",
    "is_main_process": "Use ctx.is_main_process, of the ctx of accel.session.",
    "device": "Use ctx.device, of the ctx of accel.session.",
}

__getattr__ = exports("accel", _HOMES, _OTHERS)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
