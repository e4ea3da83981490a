# SPDX-License-Identifier: Apache-2.0
"""Names that torch does not promise to keep: each is listed and there; what torch takes away or renames fails here.

Those of `accel.parallel` are listed in `accel.parallel._private`, those of `accel.testing` beside their hooks, in
`accel.testing._default_group`; the few of other packages are listed here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from uncollected import no_collections

from accel.parallel._private import PRIVATE, has_hooks, is_view
from accel.testing import simulate

ROOT = Path(__file__).parent.parent / "accel"
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
    "torch.Tensor": ("_make_wrapper_subclass", "_version"),
    "torch._C": ("_disabled_torch_function_impl", "_set_throw_on_mutable_data_ptr", "_swap_tensor_impl"),
    "torch.nn.Module": ("_apply", "_call_impl"),
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
    "torch._C._distributed_c10d": ("_dump_fr_trace",),  # and `_dump_nccl_trace` where torch has NCCL
}
LISTED = [(owner, name) for names in (PRIVATE, ELSEWHERE) for owner in names for name in names[owner]]
# Of Python, other packages, and of ours.
OTHERS = {
    "_make", "_replace", "_fields", "_asdict", "_getframe", "_exit", "_actions", "_from_config", "_no_split_modules",
    "_can_set_attn_implementation", "_XLAC", "_xla_get_tensor_id", "_xla_runtime_is_initialized", "_extra_state",
    "_hf_hook", "_is_stateful", "_per_s", "_bytes_per_s",
    "_dump_nccl_trace",
    "_dist_init", "_C", "_original_forward", "_experts_implementation",
    # of DeepSpeed; tests/engines/test_deepspeed.py looks for them
    "_lazy_init_hp_params_optimizer_state", "_epilogue_ran_this_backward", "_offload_boundary_param_ids",
    "_offload_accumulated_param_ids", "_hp_optimizer_states_linked",
}  # fmt: skip


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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.distributed.optim
@pytest.mark.parametrize(("owner", "name"), LISTED)
def test_torch_still_has_it(owner: str, name: str) -> None:
    holder = find(owner)
    if hasattr(holder, name) or name in getattr(holder, "__annotations__", {}):
        return
    assert re.search(rf"self\.{name}\b|setattr__\(\"{name}\"", inspect.getsource(holder)), f"{owner} has no {name}"


def defined(trees: list[ast.Module]) -> set[str]:
    """The names that this package gives to something of its own."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Assign) and any(
            isinstance(at, ast.Name) and at.id == "__slots__" for at in node.targets
        ):
            found |= set(ast.literal_eval(node.value))
    return found


def used(tree: ast.Module) -> set[str]:
    """Private names that a module reads from something, or spells out."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in found if re.fullmatch(r"_(?!accel_)[A-Za-z][A-Za-z0-9]*(_[a-z0-9]+)*_?", name)}


def test_no_private_name_is_used_that_is_not_listed() -> None:
    with no_collections():
        trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py") if "testing" not in path.parts}
    modules = {path.stem for path in trees}
    known = defined(list(trees.values())) | modules | OTHERS | {name for _, name in LISTED}
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for name in used(tree) - known
        if "_" in name[1:] or any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree))
    }
    assert not unknown, f"list them in {Path(__file__).name} or accel/parallel/_private.py: {sorted(unknown)}"


def test_hooks_are_where_they_are_looked_for() -> None:
    plain, hooked, accumulating = (nn.Parameter(torch.ones(1)) for _ in range(3))
    hooked.register_hook(lambda grad: grad)
    accumulating.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [has_hooks(each) for each in (plain, hooked, accumulating)] == [False, True, True]


def test_gradients_in_buckets_are_views_and_others_are_not() -> None:
    import accel

    def rank(ctx: accel.DistContext) -> list[bool]:
        model, alone = accel.prepare_model(ctx, nn.Linear(2, 2)), nn.Linear(2, 2)
        for each in (model, alone):
            each(torch.ones(1, 2)).sum().backward()
        return [is_view(parameter.grad) for each in (model, alone) for parameter in each.parameters()]

    assert simulate(rank, 2) == [[True, True, False, False]] * 2
