# SPDX-License-Identifier: Apache-2.0
"""Names that torch does not promise to keep: each is listed and there; what torch takes away or renames fails here.

Those of `accel.parallel` are listed in `accel.parallel._private`, those inside `fully_shard` in
`accel.parallel._torch_fsdp`, those of `accel.testing` beside their hooks, in `accel.testing._default_group`; those of
other folders in `helpers/private_names.py`. A name is private if a part of its path has an underscore in front.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence

import pytest
import torch
from private_names import LISTED, is_there, missing
from sources import ACCEL, source_nodes, walked
from torch import nn

from accel.parallel import _private, _torch_fsdp
from accel.tensors import is_view
from accel.testing import simulate

# Of Python, other packages, and of ours.
OTHERS = {
    "_make", "_replace", "_fields", "_asdict", "_getframe", "_exit", "_actions", "_from_config", "_no_split_modules",
    "_attn_implementation",
    "_can_set_attn_implementation", "_XLAC", "_xla_get_tensor_id", "_xla_runtime_is_initialized", "_extra_state",
    "_hf_hook", "_is_stateful", "_per_s", "_bytes_per_s",
    "_dump_nccl_trace",
    "_dist_init", "_C", "_original_forward", "_experts_implementation",
    # of DeepSpeed; tests/engines/test_deepspeed.py looks for them
    "_lazy_init_hp_params_optimizer_state", "_epilogue_ran_this_backward", "_offload_boundary_param_ids",
    "_offload_accumulated_param_ids", "_hp_optimizer_states_linked",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.distributed.optim
def test_torch_still_has_each_name() -> None:
    assert missing() == []


def test_a_name_that_torch_lacks_is_found() -> None:
    assert is_there("torch.nn.Module", "_call_impl")
    assert not is_there("torch.nn.Module", "_call_of_no_version")
    with pytest.raises(ImportError):
        is_there("no_module_of_torch", "name")


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that this package gives to something of its own."""
    found: set[str] = set()
    for node in nodes:
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


def used(nodes: Sequence[ast.AST]) -> set[str]:
    """Private names that a module reads from something, or spells out."""
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in found if re.fullmatch(r"_(?!accel_)[A-Za-z][A-Za-z0-9]*(_[a-z0-9]+)*_?", name)}


@pytest.mark.kept("default")
def test_no_private_name_is_used_that_is_not_listed() -> None:
    files = {path: its for path, its in source_nodes().items() if "testing" not in path.parts}
    modules = {path.stem for path in files}
    known = defined(itertools.chain(*files.values())) | modules | OTHERS | {name for _, name in LISTED}
    unknown = {
        f"{path.relative_to(ACCEL)}: {name}"
        for path, its in files.items()
        for name in used(its) - known
        if "_" in name[1:] or any(isinstance(node, ast.Attribute) and node.attr == name for node in its)
    }
    assert not unknown, f"list them in helpers/private_names.py or accel/parallel/_private.py: {sorted(unknown)}"


def imported(nodes: Sequence[ast.AST]) -> set[tuple[str, str]]:
    """Names that a module imports from private modules of torch, or reads from one that it imports."""
    found, aliases = set[tuple[str, str]](), dict[str, str]()
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "torch":
            continue
        for each in node.names:
            if re.search(r"\._", node.module or ""):
                found.add((node.module or "", each.name))
            elif each.name.startswith("_"):
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found.add((aliases[node.value.id], node.attr))
    return found


def test_no_name_of_a_private_module_is_imported_that_is_not_listed() -> None:
    source = "from torch._a import b\nfrom torch.c import _d as d\nfrom torch import nn\nd.e(nn.f)"
    assert imported(walked(source)) == {("torch._a", "b"), ("torch.c._d", "e")}
    unknown = {f"{path.relative_to(ACCEL)}: {each}" for path, its in source_nodes().items() for each in imported(its)}
    unknown -= {f"{path.relative_to(ACCEL)}: {each}" for path in source_nodes() for each in LISTED}
    assert not unknown, f"list them in helpers/private_names.py or accel/parallel/_private.py: {sorted(unknown)}"


def test_the_inside_of_fully_shard_is_used_in_one_file() -> None:
    names = {name for names in _torch_fsdp.NAMES.values() for name in names if "_" in name}
    for path, its in source_nodes().items():
        if path.name != "_torch_fsdp.py":
            attributes = {node.attr for node in its if isinstance(node, ast.Attribute)}
            assert not attributes & names, f"{path.relative_to(ACCEL)}: {attributes & names}"


def test_hooks_are_where_they_are_looked_for() -> None:
    plain, hooked, accumulating = (nn.Parameter(torch.ones(1)) for _ in range(3))
    hooked.register_hook(lambda grad: grad)
    accumulating.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [_private.has_hooks(each) for each in (plain, hooked, accumulating)] == [False, True, True]


def test_gradients_in_buckets_are_views_and_others_are_not() -> None:
    import accel

    def rank(ctx: accel.DistContext) -> list[bool]:
        model, alone = accel.prepare_model(ctx, nn.Linear(2, 2)), nn.Linear(2, 2)
        for each in (model, alone):
            each(torch.ones(1, 2)).sum().backward()
        return [is_view(parameter.grad) for each in (model, alone) for parameter in each.parameters()]

    assert simulate(rank, 2) == [[True, True, False, False]] * 2


def test_the_exception_that_ends_a_graph_is_named() -> None:
    compiled = torch.compile(lambda items: items["key"], backend="eager")
    found, end = _private.call_in_one_graph(compiled, {})
    assert found is None
    assert end is not None
    assert end.problem == "it raises KeyError('key')"
