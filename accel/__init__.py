# SPDX-License-Identifier: Apache-2.0
"""Distributed PyTorch training as plain functions over explicit values.

The core, in the order of a script:

    session           open this rank's context from the launcher's environment; close it at the end
    single            make a context for one process, without a launcher
    DistContext       this rank's place, device and settings, frozen; the first argument of most functions
    launch            run a function as ranks of this machine
    prepare           get models, optimizers and schedulers ready for the ranks and the mesh
    prepare_loader    divide the batches of a DataLoader among ranks
    total_steps       count the optimizer steps of a run, for its schedule
    train_state       make the record that a loop carries: position in the data, window, loss scale
    resume            load the newest checkpoint, if there is one, and return its state
    batches           iterate over this rank's batches from the state's position
    accumulate        hold gradients back until the last batch of a window
    autocast          compute a block in the number format of the context
    backward          add the gradient of a loss, weighted by its samples
    optimizer_step    divide and clip the gradients of a window, step, and return the next state
    evaluating        put a model into evaluation mode for a block
    gather            join tensors of all ranks
    reduce            sum or average tensors over ranks
    print             print on one rank only
    save_state        commit a checkpoint of a run
    load_state        load a checkpoint of a run
    save_model        save the weights of a model alone
    unwrap_model      return the plain model behind a prepared one

Other subjects have separate modules: `accel.bigmodel`, `accel.parallel`, `accel.trackers`, `accel.errors` and
others. Names resolve on first use, so `import accel` loads neither torch nor anything optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel import (
        bigmodel as bigmodel,
        checkpoint as checkpoint,
        config as config,
        data as data,
        engines as engines,
        errors as errors,
        estimate as estimate,
        items as items,
        launching as launching,
        metrics as metrics,
        optim as optim,
        parallel as parallel,
        precision as precision,
        preempt as preempt,
        schedules as schedules,
        seeding as seeding,
        testing as testing,
        trackers as trackers,
        training as training,
        tree as tree,
    )
    from accel.bigmodel._empty import init_empty_weights as init_empty_weights
    from accel.bigmodel.plan import infer_device_map as infer_device_map
    from accel.bigmodel.run import (
        cpu_offload as cpu_offload,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from accel.checkpoint._manifest import latest_checkpoint as latest_checkpoint
    from accel.collectives import (
        broadcast as broadcast,
        broadcast_from_holder as broadcast_from_holder,
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
    from accel.data._batches import Batch as Batch, batches as batches
    from accel.data._loader import Loader as Loader, prepare_loader as prepare_loader
    from accel.data._progress import (
        gather_for_metrics as gather_for_metrics,
        skip_first_batches as skip_first_batches,
        total_steps as total_steps,
    )
    from accel.env import LaunchEnv as LaunchEnv, read_env as read_env
    from accel.errors._base import AccelError as AccelError
    from accel.formats import Compile as Compile
    from accel.items._loading import load_state as load_state
    from accel.items._models import save as save, save_model as save_model
    from accel.items._saving import save_state as save_state
    from accel.items._whole import get_state_dict as get_state_dict
    from accel.launching._function import (
        debug_launcher as debug_launcher,
        launch as launch,
        notebook_launcher as notebook_launcher,
    )
    from accel.loop_state import Accumulation as Accumulation, Cursor as Cursor, LossScale as LossScale
    from accel.memory import (
        find_executable_batch_size as find_executable_batch_size,
        free_memory as free_memory,
        is_out_of_memory as is_out_of_memory,
    )
    from accel.parallel._chunked import chunk_sequence as chunk_sequence
    from accel.parallel._compile import checkpoint_activations as checkpoint_activations, compile_model as compile_model
    from accel.parallel._modules import unwrap_model as unwrap_model
    from accel.parallel._offload import offload_activations as offload_activations
    from accel.parallel._prepare_model import prepare_model as prepare_model
    from accel.parallel._sync import no_sync as no_sync, trigger_sync_in_backward as trigger_sync_in_backward
    from accel.parallel.axes.replicate._ddp import join_uneven_inputs as join_uneven_inputs
    from accel.parallel.logits._deferred import defer_logits as defer_logits
    from accel.precision._amp import autocast as autocast, loss_scale as loss_scale
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
    from accel.trackers._log import log as log
    from accel.trackers._logger import get_logger as get_logger
    from accel.trackers._profile import profile as profile
    from accel.trackers._tracking import (
        end_trackers as end_trackers,
        get_tracker as get_tracker,
        init_trackers as init_trackers,
        tracking as tracking,
    )
    from accel.training._backward import accumulate as accumulate, backward as backward
    from accel.training._clip import (
        clip_grad_norm_ as clip_grad_norm_,
        clip_grad_value_ as clip_grad_value_,
        unscale_gradients as unscale_gradients,
    )
    from accel.training._evaluating import evaluating as evaluating
    from accel.training._forward_backward import forward_backward as forward_backward
    from accel.training._prepare import (
        prepare as prepare,
        prepare_optimizer as prepare_optimizer,
        prepare_scheduler as prepare_scheduler,
    )
    from accel.training._resume import resume as resume
    from accel.training._step import optimizer_step as optimizer_step
    from accel.training._train_state import TrainState as TrainState, train_state as train_state
    from accel.training._train_step import train_step as train_step

__version__ = "0.2.0"

_HOMES = declared()
_MODULES = [name for name, home in _HOMES.items() if home == __name__]

__all__ = sorted(_HOMES.keys() - _MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


_CONTEXT = "Use `with accel.session() as ctx`, and pass ctx to each function."
_FP8 = 'Use accel.session(precision="fp8"); accel.precision.Fp8(...) has its options, for accel.precision.Precision.'
_OTHERS = {  # names of Accelerate, Fabric and torch.distributed
    "Accelerator": "Use `with accel.session() as ctx`, then accel.prepare(ctx, ...) and accel.backward(ctx, ...).",
    "Fabric": "Use `with accel.session() as ctx`, then accel.prepare(ctx, ...) and accel.backward(ctx, ...).",
    "PartialState": _CONTEXT,
    "AcceleratorState": _CONTEXT,
    "infer_auto_device_map": "Use accel.infer_device_map(accel.bigmodel.describe(model), max_memory).",
    "get_max_memory": "Use accel.bigmodel.available_memory(device, reserve=...).",
    "get_balanced_memory": 'Use accel.infer_device_map(..., fill="balanced").',
    "cpu_offload_with_hook": "Use accel.bigmodel.swap_models(device, *models).",
    "set_module_tensor_to_device": "Use load_checkpoint_in_model of accel.bigmodel, or its open_weights(path).read.",
    "find_tied_parameters": "Use accel.bigmodel.describe(model); its weights have their ties.",
    "compute_module_sizes": "Use accel.bigmodel.describe(model); its segments have nbytes.",
    "GeneralTracker": "Use accel.trackers.Tracker, a record of functions.",
    "observe": "Use accel.trackers, or accel.metrics for numbers of a run.",
    "end_training": "Use the block of accel.tracking, or accel.end_trackers.",
    "init_process_group": _CONTEXT,
    "InitProcessGroupKwargs": "Use accel.session(backend=..., init_method=..., timeout_s=...).",
    "GradientState": "Use the state of accel.train_state(ctx, accumulation=...): state.sync says when a step is due.",
    "GradientAccumulationPlugin": "Use accel.train_state(ctx, accumulation=...).",
    "set_trigger": "Use accel.any_rank(ctx, flag), which says on every rank whether any has set its flag.",
    "check_trigger": "Use accel.any_rank(ctx, flag), which says on every rank whether any has set its flag.",
    "DistributedType": "Use ctx.strategy, ctx.backend and ctx.device.type, of the ctx of accel.session.",
    "ProfileKwargs": "Use the arguments of accel.profile.",
    "mixed_precision": "Use accel.session(precision=...), and ctx.precision for what holds.",
    "ParallelismConfig": 'Use accel.session(mesh="dp_shard=2,tp=2").',
    "MegatronLMPlugin": 'Use accel.session(mesh="dp=2,tp=2,pp=2").',
    "TorchDynamoPlugin": "Use accel.session(compile=...), or accel.compile_model.",
    "FP8RecipeKwargs": _FP8,
    "AORecipeKwargs": _FP8,
    "TERecipeKwargs": _FP8,
    "DDPCommunicationHookType": "Use accel.prepare_model(ctx, model, comm_hook=...).",
    "prepare_pippy": "Use pp in the mesh, and accel.parallel.Plan(stages=...).",
    "maybe_context_parallel": "Use accel.parallel.split_sequence.",
    "register_for_checkpointing": "Use another item of accel.save_state.",
    "synchronize_rng_states": "Use accel.seeding.synchronize_rng.",
    "recursively_apply": "Use accel.tree.map_tensors.",
    "release_memory": "Use del, then accel.free_memory(ctx).",
    "should_reduce_batch_size": "Use accel.is_out_of_memory.",
    "load_and_quantize_model": "Use accel.engines.quantized.load_quantized.",
    "BnbQuantizationConfig": "Use accel.engines.quantized.Bitsandbytes.",
    "sync_gradients": "Use state.sync, of the state of accel.train_state.",
    "optimizer_step_was_skipped": "Use state.stepped, of the state that accel.optimizer_step returns.",
    "process_index": "Use ctx.rank, of the ctx of accel.session.",
    "num_processes": "Use ctx.world_size, of the ctx of accel.session.",
    "DataLoaderConfiguration": "Use the arguments of accel.prepare_loader.",
    "prepare_data_loader": "Use accel.prepare_loader.",
    "prepare_dataloader": "Use accel.prepare_loader.",
    "DistributedDataParallelKwargs": "Use the arguments of accel.prepare_model.",
    "DistributedDataParallel": "Use accel.prepare_model.",
    "FullyShardedDataParallelPlugin": 'Use accel.session(strategy="fsdp"), then accel.prepare.',
    "DeepSpeedPlugin": 'Use accel.session(strategy="deepspeed", deepspeed=accel.engines.deepspeed.DeepSpeed(...)).',
    "AutocastKwargs": "Use the arguments of accel.autocast.",
    "GradScalerKwargs": "Use accel.train_state(ctx, scaler=accel.loss_scale(ctx, initial=...)).",
    "GradScaler": "Use accel.train_state(ctx); its state holds the loss scale.",
    "ProjectConfiguration": "Use the arguments of accel.save_state.",
    "LocalSGD": "Use accel.parallel.LocalSgd.",
    "Mean": 'Use accel.metrics.running_metrics(loss="mean").',
    "Sum": 'Use accel.metrics.running_metrics(loss="sum").',
    "clip_grad_norm": "Use accel.clip_grad_norm_.",
    "extract_model_from_parallel": "Use accel.unwrap_model.",
    "all_gather": "Use accel.gather.",
    "all_reduce": "Use accel.reduce.",
    "barrier": "Use accel.wait_for_everyone.",
    "is_main_process": "Use ctx.is_main_process, of the ctx of accel.session.",
    "device": "Use ctx.device, of the ctx of accel.session.",
}

_PUBLIC = (
    *_MODULES,
    *("training.parts", "post_training"),
    *("engines.deepspeed", "engines.megatron", "engines.quantized", "engines.ray", "engines.torchft"),
)

__getattr__ = exports(__name__, _HOMES, _OTHERS, _PUBLIC)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
