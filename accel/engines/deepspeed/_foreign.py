# SPDX-License-Identifier: Apache-2.0
"""Keys of DeepSpeed's JSON that do not act in accel's training loop, and names that are none."""

from __future__ import annotations

import difflib

from accel.engines.deepspeed._draft import Draft, dotted
from accel.engines.deepspeed._record import Key

# section: whether it asks for something, and what does it here
_NO_EFFECT = {
    "amp": "Pass precision= to accel.session.",
    "data_efficiency": "accel.batches gives the data; pass a sampler to the DataLoader.",
    "curriculum_learning": "Pass a sampler to the DataLoader.",
    "dataloader_drop_last": 'Pass tail="drop" to accel.prepare_loader.',
    "elasticity": "accel launch --nnodes 1:4 takes hosts that come and go.",
    "expert_parallel": 'Use the mesh axis "ep" with the strategy ddp or fsdp.',
    "pipeline": 'Use the mesh axis "pp" with the strategy ddp or fsdp.',
    "sequence_parallel_size": 'Use the mesh axis "cp" with the strategy ddp or fsdp.',
    "tensor_parallel": 'Use the mesh axis "tp" with the strategy ddp or fsdp.',
    "autotuning": "accel plan --config config.json lists the meshes that fit.",
}
_IDLE: dict[str, tuple[tuple[str, object], ...]] = {  # values by which a section asks for nothing
    "sequence_parallel_size": (("", 1),),
    "dataloader_drop_last": (("", False),),
    "tensor_parallel": (("autotp_size", 0), ("autotp_size", 1)),
}
_UNIVERSAL: Key = ("checkpoint", "load_universal")
_KNOWN = (
    "activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comms_logger", "communication_data_type",
    "compile", "csv_monitor", "comet", "data_types", "disable_allgather", "disable_python_gc", "dump_state",
    "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "log_level", "managed_gradient_accumulation", "memory_breakdown", "nebula",
    "optimizer", "prescale_gradients", "quantize_training", "scheduler", "seq_parallel_communication_data_type",
    "sparse_gradients", "steps_per_print", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip


def check_names(draft: Draft) -> None:
    """Note keys at the top that are nearly one of DeepSpeed's, which it would pass over."""
    names = (*_KNOWN, *_NO_EFFECT)
    for name in dict.fromkeys(key[0] for key in draft.rows):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        if name not in names and near:
            draft.problem(f"{name}: no key of DeepSpeed. Did you mean `{near[0]}`?")


def check_foreign(draft: Draft) -> None:
    """Note sections that ask for what accel's loop, loader or mesh does."""
    for name, fix in _NO_EFFECT.items():
        keys = [key for key in draft.rows if key[0] == name]
        if keys and not _asks_nothing(draft, name, keys):
            draft.problem(f"{name}: has no effect here. {fix}")
    if draft.said(_UNIVERSAL):
        draft.problem(
            f"{dotted(_UNIVERSAL)}: has no effect here. accel.load_state loads a checkpoint at any stage and on any "
            "number of ranks."
        )


def _asks_nothing(draft: Draft, name: str, keys: list[Key]) -> bool:
    if draft.rows.get((name, "enabled"), (None,))[0] is False:
        return True
    if len(keys) == 1 and len(keys[0]) == 1 and draft.rows[keys[0]].value in ({}, None):
        return True
    for inner, value in _IDLE.get(name, ()):
        row = draft.rows.get((name, inner) if inner else (name,))
        if row is not None and row.value == value and type(row.value) is type(value):
            return True
    return False
