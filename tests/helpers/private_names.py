# SPDX-License-Identifier: Apache-2.0
"""The names of torch that accel uses without a promise of torch, and which of them a torch lacks.

`python tests/helpers/private_names.py` prints the missing ones. It needs torch and what accel itself needs, no pytest,
so that `tests/matrix.py --names VERSION` asks a new torch within a minute.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

from accel.parallel import _torch_fsdp
from accel.parallel._private import PRIVATE

ELSEWHERE = {
    "torch": (
        "_foreach_norm",
        "_foreach_mul_",
        "_foreach_clamp_min_",
        "_foreach_clamp_max_",
        "_foreach_lerp_",
        "_foreach_copy_",
    ),
    "torch.ops.aten": ("_grouped_mm", "_to_copy", "_unsafe_view", "_local_scalar_dense"),
    "torch._ops.OpOverload": ("_schema",),
    "torch.Tensor": ("_is_view", "_make_wrapper_subclass", "_version"),
    "torch._C": ("_disabled_torch_function_impl", "_set_throw_on_mutable_data_ptr", "_swap_tensor_impl"),
    "torch._C._functions.MseLossBackward0": ("_saved_reduction",),
    "torch.nn.Module": ("_apply", "_call_impl"),
    "torch.utils._pytree": (
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_structure",
        "tree_unflatten",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch._dynamo.eval_frame": (
        "_stance",  # of torch.compiler.set_stance
        "cached_backends",  # of functions that torch compiles, since its compiler was reset; None of others
        "DynamoStance",
        "_get_error_on_graph_break",
        "_set_error_on_graph_break",
    ),
    "torch.UntypedStorage": ("_cdata", "_checkpoint_offset"),  # the latter: first byte in the file of a lazy torch.load
    "torch.nn.MultiheadAttention": ("_reset_parameters",),
    "torch.nn.modules.batchnorm": ("_BatchNorm", "_NormBase"),
    "torch.nn.modules.module": ("_EXTRA_STATE_KEY_SUFFIX",),  # "_extra_state"
    "torch.optim.SGD": ("_step_supports_amp_scaling",),
    "torch.optim.Optimizer": ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    "torch.distributed.optim.ZeroRedundancyOptimizer": ("_overlap_with_ddp",),
    "torch.optim.lr_scheduler.SequentialLR": ("_milestones", "_schedulers", "_last_lr"),
    "torch.amp.GradScaler": ("_growth_tracker",),
    "torch.utils.data.DataLoader": ("_get_iterator",),
    "torch.cuda.memory": ("_record_memory_history", "_dump_snapshot"),
    "torch.distributed.distributed_c10d": ("_resolve_process_group",),
    "torch._C._distributed_c10d": ("_dump_fr_trace",),  # and `_dump_nccl_trace` where torch has NCCL
}
LISTED = [
    (owner, name) for names in (PRIVATE, _torch_fsdp.NAMES, ELSEWHERE) for owner in names for name in names[owner]
]


def find(path: str) -> Any:
    """What a dotted path leads to."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:length]))
        except ImportError:
            continue
        for name in names[length:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def is_there(owner: str, name: str) -> bool:
    """Whether an owner, a dotted path, has a name: as an attribute, an annotation, or one that its methods set."""
    holder = find(owner)
    if hasattr(holder, name) or name in getattr(holder, "__annotations__", {}):
        return True
    return re.search(rf"self\.{name}\b|setattr__\(\"{name}\"", inspect.getsource(holder)) is not None


def missing() -> list[str]:
    """Return the listed names that the installed torch lacks."""
    found: list[str] = []
    for owner, name in LISTED:
        try:
            there = is_there(owner, name)
        except (ImportError, AttributeError) as error:
            there = False
            name = f"{name} ({error})"
        if not there:
            found.append(f"{owner}: {name}")
    return found


if __name__ == "__main__":
    import torch

    lost = missing()
    print(f"torch {torch.__version__}: {len(LISTED)} private names, {len(lost)} missing", *lost, sep="\n  ")
    sys.exit(bool(lost))
