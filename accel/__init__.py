# SPDX-License-Identifier: Apache-2.0
"""Distributed PyTorch training as plain functions over explicit values.

Names resolve on first use, so `import accel` loads neither torch nor anything optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.checkpoint import Keep as Keep
    from accel.checkpoint import Saving as Saving
    from accel.checkpoint import latest_checkpoint as latest_checkpoint
    from accel.collectives import broadcast as broadcast
    from accel.collectives import broadcast_object_list as broadcast_object_list
    from accel.collectives import gather as gather
    from accel.collectives import gather_object as gather_object
    from accel.collectives import pad_across_processes as pad_across_processes
    from accel.collectives import reduce as reduce
    from accel.context import DistContext as DistContext
    from accel.context import close as close
    from accel.context import from_env as from_env
    from accel.context import from_group as from_group
    from accel.context import from_mesh as from_mesh
    from accel.context import group_of as group_of
    from accel.context import replace as replace
    from accel.context import session as session
    from accel.context import single as single
    from accel.data import Batch as Batch
    from accel.data import Cursor as Cursor
    from accel.data import Loader as Loader
    from accel.data import Mean as Mean
    from accel.data import SampleCount as SampleCount
    from accel.data import StreamLoader as StreamLoader
    from accel.data import Sum as Sum
    from accel.data import batches as batches
    from accel.data import gather_for_metrics as gather_for_metrics
    from accel.data import order as order
    from accel.data import prepare_loader as prepare_loader
    from accel.data import progress as progress
    from accel.data import skip_first_batches as skip_first_batches
    from accel.data import total_steps as total_steps
    from accel.env import LaunchEnv as LaunchEnv
    from accel.env import read_env as read_env
    from accel.errors import AccelError as AccelError
    from accel.errors import CheckpointError as CheckpointError
    from accel.errors import CollectiveMismatch as CollectiveMismatch
    from accel.errors import ConfigError as ConfigError
    from accel.errors import ContextClosedError as ContextClosedError
    from accel.errors import DataError as DataError
    from accel.errors import DeviceError as DeviceError
    from accel.errors import EnvError as EnvError
    from accel.errors import LaunchError as LaunchError
    from accel.errors import MissingExtraError as MissingExtraError
    from accel.errors import NonFiniteError as NonFiniteError
    from accel.errors import OutOfMemoryError as OutOfMemoryError
    from accel.errors import PeerError as PeerError
    from accel.errors import PrepareError as PrepareError
    from accel.errors import StepError as StepError
    from accel.errors import TreeError as TreeError
    from accel.formats import Fp8 as Fp8
    from accel.formats import Precision as Precision
    from accel.items import Loaded as Loaded
    from accel.items import Part as Part
    from accel.items import Stored as Stored
    from accel.items import TrainableOnly as TrainableOnly
    from accel.items import get_state_dict as get_state_dict
    from accel.items import load_accelerate_state as load_accelerate_state
    from accel.items import load_state as load_state
    from accel.items import save as save
    from accel.items import save_model as save_model
    from accel.items import save_state as save_state
    from accel.launching import debug_launcher as debug_launcher
    from accel.launching import launch as launch
    from accel.launching import notebook_launcher as notebook_launcher
    from accel.memory import find_executable_batch_size as find_executable_batch_size
    from accel.memory import free_memory as free_memory
    from accel.optim import Accumulation as Accumulation
    from accel.parallel import LocalSgd as LocalSgd
    from accel.parallel import PowerSgd as PowerSgd
    from accel.parallel import checkpoint_activations as checkpoint_activations
    from accel.parallel import clear_gradients as clear_gradients
    from accel.parallel import compile_model as compile_model
    from accel.parallel import join_uneven_inputs as join_uneven_inputs
    from accel.parallel import local_sgd_step as local_sgd_step
    from accel.parallel import no_sync as no_sync
    from accel.parallel import prepare_local_model as prepare_local_model
    from accel.parallel import prepare_model as prepare_model
    from accel.parallel import trigger_sync_in_backward as trigger_sync_in_backward
    from accel.parallel import unwrap_model as unwrap_model
    from accel.precision import LossScale as LossScale
    from accel.precision import apply_precision as apply_precision
    from accel.precision import autocast as autocast
    from accel.precision import loss_scale as loss_scale
    from accel.preempt import Stop as Stop
    from accel.preempt import StopRequests as StopRequests
    from accel.preempt import stop_agreed as stop_agreed
    from accel.preempt import stop_requests as stop_requests
    from accel.process import any_rank as any_rank
    from accel.process import local_main_process_first as local_main_process_first
    from accel.process import main_process_first as main_process_first
    from accel.process import on_last_process as on_last_process
    from accel.process import on_local_main_process as on_local_main_process
    from accel.process import on_local_process as on_local_process
    from accel.process import on_main_process as on_main_process
    from accel.process import on_process as on_process
    from accel.process import print as print
    from accel.process import split_between_processes as split_between_processes
    from accel.process import wait_for_everyone as wait_for_everyone
    from accel.random import Key as Key
    from accel.seeding import deterministic as deterministic
    from accel.seeding import rank_key as rank_key
    from accel.seeding import seeded as seeded
    from accel.seeding import set_seed as set_seed
    from accel.seeding import synchronize_rng as synchronize_rng
    from accel.storage import RemotePath as RemotePath
    from accel.training import Ema as Ema
    from accel.training import StepResult as StepResult
    from accel.training import TrainState as TrainState
    from accel.training import accumulate as accumulate
    from accel.training import backward as backward
    from accel.training import clip_grad_norm_ as clip_grad_norm_
    from accel.training import clip_grad_value_ as clip_grad_value_
    from accel.training import discard as discard
    from accel.training import evaluating as evaluating
    from accel.training import fused_step as fused_step
    from accel.training import optimizer_step as optimizer_step
    from accel.training import prepare as prepare
    from accel.training import prepare_optimizer as prepare_optimizer
    from accel.training import prepare_scheduler as prepare_scheduler
    from accel.training import resume as resume
    from accel.training import train_state as train_state
    from accel.training import unscale_gradients as unscale_gradients
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
        "LocalSgd",
        "PowerSgd",
        "checkpoint_activations",
        "clear_gradients",
        "compile_model",
        "join_uneven_inputs",
        "local_sgd_step",
        "no_sync",
        "prepare_local_model",
        "prepare_model",
        "trigger_sync_in_backward",
        "unwrap_model",
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
