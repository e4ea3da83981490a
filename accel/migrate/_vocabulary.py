# SPDX-License-Identifier: Apache-2.0
"""Names of Accelerate, and what stands in their place: each target is public in accel."""

from __future__ import annotations

from collections.abc import Mapping

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
# methods that keep their arguments: the function, and whether it takes the context
METHODS: Mapping[str, tuple[str, bool]] = {
    "print": ("accel.print", True),
    "wait_for_everyone": ("accel.wait_for_everyone", True),
    "main_process_first": ("accel.main_process_first", True),
    "local_main_process_first": ("accel.local_main_process_first", True),
    "on_main_process": ("accel.on_main_process", True),
    "on_local_main_process": ("accel.on_local_main_process", True),
    "on_last_process": ("accel.on_last_process", True),
    "on_process": ("accel.on_process", True),
    "on_local_process": ("accel.on_local_process", True),
    "unwrap_model": ("accel.unwrap_model", False),
    "gather": ("accel.gather", True),
    "reduce": ("accel.reduce", True),
    "pad_across_processes": ("accel.pad_across_processes", True),
    "get_state_dict": ("accel.get_state_dict", True),
    "save_model": ("accel.save_model", True),
    "save": ("accel.save", True),
    "prepare": ("accel.prepare", True),
    "prepare_model": ("accel.prepare_model", True),
    "prepare_optimizer": ("accel.prepare_optimizer", True),
    "prepare_scheduler": ("accel.prepare_scheduler", True),
    "prepare_data_loader": ("accel.prepare_loader", True),
    "no_sync": ("accel.no_sync", True),
    "autocast": ("accel.autocast", True),
    "join_uneven_inputs": ("accel.join_uneven_inputs", True),
    "free_memory": ("accel.free_memory", True),
    "clear": ("accel.free_memory", True),
}
# keywords of methods: new name, or None where it is left out
KEYWORDS: Mapping[tuple[str, str], str | None] = {
    ("on_process", "process_index"): "rank",
    ("on_local_process", "local_process_index"): "local_rank",
    ("save", "f"): "path",
    ("save", "obj"): "tensors",
    ("prepare_loader", "data_loader"): "loader",
    ("autocast", "cache_enabled"): "cache",
    ("unwrap_model", "keep_fp32_wrapper"): None,
    ("unwrap_model", "keep_torch_compile"): None,
    ("get_state_dict", "unwrap"): None,
    ("save_model", "safe_serialization"): None,
    ("save_model", "save_directory"): "folder",
    ("save", "safe_serialization"): None,
    ("save", "save_on_each_node"): None,
    ("reduce", "reduction"): "op",
    ("reduce", "tensor"): "tree",
    ("gather", "tensor"): "tree",
    ("pad_across_processes", "tensor"): "tree",
    ("pad_across_processes", "pad_value"): "pad_index",
    ("split_between_processes", "apply_padding"): "pad",
    ("broadcast", "from_process"): "src",
    ("broadcast_object_list", "from_process"): "src",
}
# functions of accelerate and accelerate.utils that keep their arguments
FUNCTIONS: Mapping[str, tuple[str, bool]] = {
    "gather": ("accel.gather", True),
    "reduce": ("accel.reduce", True),
    "gather_object": ("accel.gather_object", True),
    "broadcast": ("accel.broadcast", True),
    "broadcast_object_list": ("accel.broadcast_object_list", True),
    "pad_across_processes": ("accel.pad_across_processes", True),
    "send_to_device": ("accel.tree.send_to_device", False),
    "concatenate": ("accel.tree.concatenate", False),
    "convert_to_fp32": ("accel.tree.convert_to_fp32", False),
    "find_batch_size": ("accel.tree.find_batch_size", False),
    "slice_tensors": ("accel.tree.slice_tensors", False),
    "wait_for_everyone": ("accel.wait_for_everyone", True),
    "extract_model_from_parallel": ("accel.unwrap_model", False),
    "synchronize_rng_states": ("accel.seeding.synchronize_rng", True),
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
