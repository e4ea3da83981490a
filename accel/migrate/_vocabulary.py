# SPDX-License-Identifier: Apache-2.0
"""Names of Accelerate, and what stands in their place: each target is public in accel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# attributes of an Accelerator or a PartialState: expressions
ATTRIBUTES: Mapping[str, str] = {
    "device": "{ctx}.device",
    "process_index": "{ctx}.rank",
    "num_processes": "{ctx}.world_size",
    "local_process_index": "{ctx}.local_rank",
    "is_main_process": "{ctx}.is_main_process",
    "is_local_main_process": "{ctx}.is_local_main_process",
    "is_last_process": "{ctx}.is_last_process",
    "use_distributed": "({ctx}.world_size > 1)",
    "mixed_precision": "{ctx}.precision.compute",
    "gradient_accumulation_steps": "{ctx}.accumulation",
    "distributed_type": "{ctx}.strategy",
    "state": "{ctx}",
    "optimizer_step_was_skipped": "(not {state}.stepped)",
    "sync_gradients": "{state}.sync",
}
_SAME = (
    *("print", "wait_for_everyone", "main_process_first", "local_main_process_first", "on_main_process"),
    *("on_local_main_process", "on_last_process", "on_process", "on_local_process", "split_between_processes"),
    *("gather", "reduce", "pad_across_processes", "prepare", "prepare_model", "prepare_optimizer"),
    *("prepare_scheduler", "no_sync", "autocast", "join_uneven_inputs", "free_memory", "unwrap_model"),
    *("get_state_dict", "save_model", "save"),
)
_SAME_FUNCTIONS = (
    *("gather", "reduce", "gather_object", "broadcast", "broadcast_object_list", "pad_across_processes"),
    "wait_for_everyone",
)
_OF_TREES = ("send_to_device", "concatenate", "convert_to_fp32", "find_batch_size", "slice_tensors")
# methods, and functions of accelerate and accelerate.utils, that keep their arguments: the function of accel
METHODS: Mapping[str, str] = {
    **{name: f"accel.{name}" for name in _SAME},
    "prepare_data_loader": "accel.prepare_loader",
    "clear": "accel.free_memory",
}
FUNCTIONS: Mapping[str, str] = {
    **{name: f"accel.{name}" for name in _SAME_FUNCTIONS},
    **{name: f"accel.tree.{name}" for name in _OF_TREES},
    "extract_model_from_parallel": "accel.unwrap_model",
    "synchronize_rng_states": "accel.seeding.synchronize_rng",
}
# their parameters in Accelerate's order: `old=new` for another name in accel, `old=` for one that is left out
PARAMETERS: Mapping[str, Sequence[str]] = {
    "gather": ("tensor=tree",),
    "reduce": ("tensor=tree", "reduction=op", "scale"),
    "pad_across_processes": ("tensor=tree", "dim", "pad_index", "pad_first", "pad_value=pad_index"),
    "broadcast": ("tensor=tree", "from_process=src"),
    "broadcast_object_list": ("object_list=objects", "from_process=src"),
    "gather_for_metrics": ("input_data=tree", "use_gather_object"),
    "split_between_processes": ("inputs", "apply_padding=pad"),
    "send_to_device": ("tensor=tree", "device", "non_blocking", "skip_keys"),
    "save": ("obj=tensors", "f=path", "safe_serialization=", "save_on_each_node="),
    "save_model": ("model", "save_directory=folder", "max_shard_size", "safe_serialization="),
    "unwrap_model": ("model", "keep_fp32_wrapper=", "keep_torch_compile="),
    "get_state_dict": ("model", "unwrap="),
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_data_loader": ("data_loader=loader", "device_placement", "slice_fn_for_dispatch"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "on_process": ("function", "process_index=rank"),
    "on_local_process": ("function", "local_process_index=local_rank"),
    "join_uneven_inputs": ("joinables", "even_batches"),
    "autocast": ("cache_enabled=cache",),
}
# kinds of accelerator.distributed_type: a condition
DISTRIBUTED: Mapping[str, str] = {
    "NO": "{ctx}.world_size == 1",
    "MULTI_GPU": '({ctx}.world_size > 1 and {ctx}.device.type == "cuda")',
    "MULTI_CPU": '({ctx}.world_size > 1 and {ctx}.device.type == "cpu")',
    "FSDP": '{ctx}.strategy == "fsdp"',
    "DEEPSPEED": '{ctx}.strategy == "deepspeed"',
    "XLA": '{ctx}.device.type == "xla"',
    "TPU": '{ctx}.device.type == "xla"',
    "MULTI_XPU": '{ctx}.device.type == "xpu"',
    "MULTI_NPU": '{ctx}.device.type == "npu"',
}
