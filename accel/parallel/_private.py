# SPDX-License-Identifier: Apache-2.0
"""The names of torch that this package uses and that torch does not promise to keep: a list, and the calls of several.

A test looks for each of them in the torch that is installed, and in the package for names that are not listed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch, _pytree as pytree, checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction

from accel.compiling import uncompiled
from accel.errors import AccelError

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")

# By owner. The names of `fully_shard` are in `_torch_fsdp.py`, the only file that uses them. Attention kernels are only
# called in `context/_kernels.py`.
PRIVATE = {
    # the replica that is running its forward; torch.compile cuts its graphs at its buckets; sets and resets it
    "torch.nn.parallel.DistributedDataParallel": ("_active_ddp_module", "_inside_ddp_forward"),
    "torch._C._distributed_c10d.Reducer": ("_rebuild_buckets", "_set_mixed_precision_param_dtype"),
    "torch.Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks", "_make_wrapper_subclass"),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", "dynamo_ctx"),
    "torch": ("_weight_norm", "_dynamo"),
    "torch.nn.Module": (
        "_parameters",
        "_modules",
        "_buffers",
        "_non_persistent_buffers_set",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    ),
    "torch._dynamo": ("error_on_graph_break",),
    "torch._dynamo.exc": ("Unsupported",),  # what torch.compile raises at a graph break
    "torch._dynamo.convert_frame": ("FRAME_COUNTER",),  # functions that torch has compiled; reset with the compiler
    "torch.nn.RNNBase": ("_flat_weights", "_flat_weights_names", "_flat_weight_refs"),
    "torch._subclasses.fake_tensor": (
        "FakeTensorMode",
        "FakeTensor",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
    ),
    "torch._C": (
        "_autograd",
        "_are_functorch_transforms_active",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_is_torch_function_enabled",
        "DisableTorchFunctionSubclass",
        "_EnableTorchFunction",
    ),
    "torch._C._autograd": (
        "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks",
        "_top_saved_tensors_default_hooks",
    ),
    "torch._C._functorch": ("get_unwrapped", "is_functorch_wrapped_tensor"),
    "torch._functorch.vmap": ("_validate_and_get_batch_size",),  # which asks tensors for the size to map over
    "torch.autograd.Variable": ("_execution_engine",),  # which calls a function at the end of a backward
    "torch.autograd": ("_get_sequence_nr", "_unsafe_preserve_version_counter"),
    "torch.autograd.graph.Node": ("_sequence_nr",),
    "torch.utils._python_dispatch": ("_get_current_dispatch_mode_stack", "_pop_mode", "_push_mode"),
    "torch.utils.checkpoint": ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"),  # of selective checkpoints
    "torch.nn.TransformerEncoderLayer": ("_ff_block",),  # compared, like nn.TransformerDecoderLayer's
    "torch.distributed.tensor.DTensor": ("_spec", "_local_tensor"),  # and the arguments of its constructor
    "torch.distributed.device_mesh.DeviceMesh": ("_get_root_mesh",),
    "torch.distributed.pipelining.PipelineStage": ("_post_metadata_inference_cleanup",),  # overridden to do nothing
    "torch.ops.aten": (
        "_unsafe_view",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
    ),
}


GET_DATA = cast(Any, torch.Tensor.data).__get__  # as modes of torch's functions see it
SET_DATA = cast(Any, torch.Tensor.data).__set__
# Contexts without and with the `__torch_function__` of tensor subclasses, and whether it is called now.
without_subclasses: type[contextlib.AbstractContextManager[None]] = cast(Any, torch)._C.DisableTorchFunctionSubclass
with_subclasses: type[contextlib.AbstractContextManager[None]] = cast(Any, torch)._C._EnableTorchFunction
subclasses_are_on: Callable[[], bool] = cast(Any, torch)._C._is_torch_function_enabled
alias: Callable[[torch.Tensor], torch.Tensor] = cast(Any, torch).ops.aten.alias.default
Operator = cast(type, type(alias))  # of those, as modes of dispatch see them
_SIZES_OF_VMAP = cast(Any, importlib.import_module("torch._functorch.vmap"))._validate_and_get_batch_size.__code__
OPERATORS: tuple[type, ...] = (
    Operator,
    type(cast(object, cast(Any, torch).ops.aten.alias)),
)  # one overload, and all of a name
# A tensor of the same memory that is no view.
alike: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = cast(Any, torch).ops.aten._unsafe_view.default


# Arguments that contain no tensor.
_PLAIN: tuple[type[Any], ...] = (int, float, complex, str, slice, torch.Size, torch.dtype, torch.device, type(None))


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors in a nesting of containers, mappings and dataclasses, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, _PLAIN):
        return []
    if isinstance(tree, Mapping):
        tree = [*cast("Mapping[object, object]", tree).values()]
    elif dataclasses.is_dataclass(tree):
        tree = [getattr(tree, each.name, None) for each in dataclasses.fields(tree)]
    if not isinstance(tree, tuple | list):
        return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]
    found: list[torch.Tensor] = []
    for each in cast("Sequence[object]", tree):
        if isinstance(each, torch.Tensor):  # most often
            found.append(each)
        else:
            found += tensors_of(each)
    return found


def map_kind(kind: Any, function: Callable[[Any], object], tree: Any) -> Any:
    """Return a nesting of containers, tensors of a class in it replaced by what a function gives for them.

    `kind` is the class, or several. torch's `tree_map_only` returns the same. It takes 50 us for a few arguments.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree) if isinstance(tree, kind) else tree
    if isinstance(tree, _PLAIN):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)([map_kind(kind, function, each) for each in tree])
    if type(tree) is dict:
        return {key: map_kind(kind, function, each) for key, each in cast("Mapping[Any, Any]", tree).items()}
    return pytree.tree_map_only(kind, function, tree)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function at which torch.compile breaks its graph. A call does not import the compiler."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # nobody has compiled anything yet
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(cast(Any, torch.compiler).disable(function))
        return disabled[0](*args, **kwargs)

    return call


WRAPPED = "_orig_mod"  # attribute of the module in a wrapper of torch.compile, whose class torch has in a private place
REGION = "accel_region"  # attribute of compiled regions, and of recomputed blocks in them: how blocks are compiled


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch compiles a module's calls."""
    return cast(Any, module)._compiled_call_impl is not None


def contains_compiled(module: nn.Module) -> bool:
    """Return whether torch compiles a module, or one in it. Every pass asks, so it makes no generators and sets."""
    todo: list[nn.Module | None] = [module]
    while todo:
        each = todo.pop()
        if each is not None:
            attributes = vars(each)
            inside = attributes["_modules"]
            if attributes.get("_compiled_call_impl") is not None or REGION in attributes or WRAPPED in inside:
                return True
            todo += inside.values()
    return False


def compile_in_place(model: nn.Module) -> bool:
    """Replace the wrappers of torch.compile in a model by their modules, which torch then compiles as
    `nn.Module.compile` does. Return whether there were some. Mutates the model.

    A call of such a wrapper goes past the class of its module, which passes parts of tensors to graphs. A wrapper with
    hooks stays, and runs as it is.
    """
    seen: set[int] = set()
    todo = [model]
    is_changed = False
    while todo:  # each forward asks that finds compiled modules
        inside = vars(todo.pop())["_modules"]
        for name, child in inside.items():
            if child is not None and is_wrapper(child) and not user_hooks(child):
                inner = getattr(child, WRAPPED)
                inner._compiled_call_impl = child.dynamo_ctx(inner._call_impl)
                inside[name] = inner
                is_changed = True
        fresh = [each for each in inside.values() if each is not None and id(each) not in seen]
        seen.update(map(id, fresh))
        todo += fresh
    return is_changed


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of torch.compile."""
    return WRAPPED in vars(module)["_modules"] and hasattr(module, "dynamo_ctx")


class GraphBreak(NamedTuple):
    """Why and where torch.compile ends a graph.

    Attributes:
        problem: a line.
        functions: file and name of the traced functions around it, from the outside.
    """

    problem: str
    functions: tuple[tuple[str, str], ...]


def one_graph() -> contextlib.AbstractContextManager[object]:
    """Return a context in which torch.compile raises an error at a graph break."""
    return cast(Any, torch)._dynamo.error_on_graph_break(True)


def call_in_one_graph(
    call: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> tuple[R, None] | tuple[None, GraphBreak]:
    """Call what torch compiles; return its result, or None and the graph break if it is not one graph."""
    with one_graph():
        return call_compiled(call, *args, **kwargs)


def call_compiled(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, None] | tuple[None, GraphBreak]:
    """Call what torch compiles; return its result, or None and the graph break that is an error there."""
    unsupported: type[Exception] = cast(Any, importlib.import_module("torch._dynamo")).exc.Unsupported
    try:
        return call(*args, **kwargs), None
    except unsupported as error:
        functions = tuple((each.filename, each.name) for each in cast(Any, error).real_stack or ())
        first, _, rest = str(error).partition("\n")
        raised = rest.partition("context: raised exception ")[2].partition("\n")[0]
        return None, GraphBreak(f"it raises {raised}" if raised else first or type(error).__name__, functions)


@contextlib.contextmanager
def called_eagerly(module: nn.Module) -> Generator[None]:
    """Let modules that torch compiles, and functions that they call, run as they are, for calls that it should not
    compile for."""
    compiled: list[Any] = [each for each in module.modules() if is_compiled(each)]
    calls = [each._compiled_call_impl for each in compiled]
    inside = [(vars(each), vars(each)[REGION]) for each in module.modules() if REGION in vars(each)]
    for each in compiled:
        each._compiled_call_impl = None
    for attributes, _ in inside:
        del attributes[REGION]
    try:
        with uncompiled():
            yield
    finally:
        for attributes, region in inside:
            attributes[REGION] = region
        for each, call in zip(compiled, calls, strict=True):
            each._compiled_call_impl = call


def run_eagerly(module: nn.Module) -> None:
    """Let a module and all in it run as they are from now on, if torch compiles some. Mutates them."""
    if contains_compiled(module):
        for each in module.modules():
            if is_compiled(each):
                cast(Any, each)._compiled_call_impl = None
            _ = vars(each).pop(REGION, None)


def mixes_dtensors(error: Exception) -> bool:
    """Return whether an error is torch's of a function with a plain tensor and a DTensor."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)


def is_no_parameter(error: Exception) -> bool:
    """Return whether an error is that of `get_parameter` where a module has a plain tensor."""
    return isinstance(error, AttributeError) and str(error).endswith("is not an nn.Parameter")


def is_of_inputs(error: Exception) -> bool:
    """Return whether a function may have raised an error for the shapes or the kind of its tensors, except DTensors."""
    is_known = isinstance(error, RuntimeError | ValueError | TypeError | IndexError | AssertionError)
    return is_known and not isinstance(error, AccelError) and not mixes_dtensors(error)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether somebody registered a hook on a parameter or on the accumulation of its gradient."""
    each = cast(Any, parameter)
    return bool(each._backward_hooks or each._post_accumulate_grad_hooks)


def sequence_number(node: Node | None = None) -> int:
    """Return the number of a node of the graph, in the order of the forward; of the next one without a node."""
    return cast(Any, torch).autograd._get_sequence_nr() if node is None else cast(Any, node)._sequence_nr()


def hook_count(tensor: torch.Tensor) -> int:
    """Return the number of hooks on a tensor's gradient."""
    return len(cast(Any, tensor)._backward_hooks or ())


def forward_hooks(module: nn.Module) -> Mapping[int, object]:
    """Return the hooks that see a module's inputs and outputs, only of this module."""
    return cast(Any, module)._forward_hooks


def drop_forward_hooks(module: nn.Module) -> None:
    """Let a copy of a module have no hooks that see its output; the module that shared its table keeps them."""
    cast(Any, module)._forward_hooks = OrderedDict[int, object]()


def hooks_with_keywords(module: nn.Module) -> Collection[int]:
    """Return the numbers of the forward hooks of a module that take its keyword arguments."""
    return cast(Any, module)._forward_hooks_with_kwargs


def forward_pre_hooks(module: nn.Module) -> Mapping[int, object]:
    """Return the hooks that see a module's inputs, only of this module."""
    return cast(Any, module)._forward_pre_hooks


def user_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, except for hooks of torch.distributed and of this package."""
    each = cast(Any, module)
    kinds = (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
    return any(not is_library_hook(hook) for kind in kinds for hook in kind.values())


def is_library_hook(hook: Any) -> bool:
    """Return whether a hook is of torch.distributed or of this package, which wait for a forward or a gradient."""
    function: Any = inspect.unwrap(hook)  # torch.compiler.disable
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "accel."))


def wrapper_of(
    kind: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
) -> Any:
    """Return a tensor of a subclass, without memory."""
    make: Any = cast(Any, torch.Tensor)._make_wrapper_subclass
    return make(kind, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def asks_for_values(error: Exception) -> bool:
    """Return whether an operator failed as its fake arguments have no values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator changes in place, by its schema. That of `batch_norm` leaves out its
    statistics."""
    schema = operator._schema
    found: list[Any] = []
    if schema.is_mutable:
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    elif "batch_norm" in operator.name():
        found += args[3:5]
    return [each for each in found if isinstance(each, torch.Tensor)]


def overloads_of(operator: Any) -> list[Any]:
    """Return the overloads of one of `OPERATORS`."""
    one = isinstance(operator, Operator)
    return [operator] if one else [getattr(operator, each) for each in operator.overloads()]


def is_pointwise(overload: Any) -> bool:
    """Return whether an overload computes each element independently, by its tags, and writes into no argument."""
    return torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable


def part_alone(parameter: DTensor) -> torch.Tensor:
    """Return this rank's part, without autograd's record: one view, where `to_local` of a parameter takes two."""
    return cast(Any, parameter)._local_tensor.detach()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh is a part of; itself if it is no part, or if this torch does not know."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


# Whether a transform of `torch.func`, such as `vjp`, runs the function around. Each function of a part asks, without a
# frame of Python more.
in_function_transform: Callable[[], bool] = cast(Any, torch)._C._are_functorch_transforms_active


def given_to_transform(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that transforms of `torch.func` wrap; others as they are."""
    functorch: Any = importlib.import_module("torch._C._functorch")
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_asked_by_vmap() -> bool:
    """Return whether torch.vmap asks a tensor for a size, a few calls up. It then takes the tensor's memory."""
    frame = inspect.currentframe()
    for _ in range(8):
        if frame is None or frame.f_code is _SIZES_OF_VMAP:
            return frame is not None
        frame = frame.f_back
    return False


def runs_in_backward() -> bool:
    """Return whether this thread is in a backward, as a forward is that torch computes again."""
    return cast(Any, torch)._C._current_graph_task_id() != -1


def is_end_of_backward() -> bool:
    """Return whether this thread is in a callback at the end of a backward, after all functions of its graph."""
    return runs_in_backward() and cast(Any, torch)._C._current_autograd_node() is None


def unchanged_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a block in which in-place changes do not increase the tensor's version, which saved tensors compare."""
    return cast(Any, torch.autograd)._unsafe_preserve_version_counter(tensor)


def runs_in_reentrant_checkpoint() -> bool:
    """Return whether this thread is in the first forward of a reentrant checkpoint that is to have a gradient."""
    if torch.is_grad_enabled():
        return False
    first_run = cast(Any, CheckpointFunction).forward.__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not first_run:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def outside_of_checkpoints() -> Generator[None]:
    """Compute in a block as outside of the checkpoints around it, which count the tensors and results that they keep: a
    forward that is computed again does not compute the block again."""
    stack = cast(Any, torch)._C._autograd
    modes = cast(Any, dispatch)
    selective = cast(Any, checkpoints)
    kinds = (selective._CachingTorchDispatchMode, selective._CachedTorchDispatchMode)
    hooks: list[tuple[Any, Any]] = []
    while (top := stack._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        stack._pop_saved_tensors_default_hooks()
    taken: list[Any] = []
    while any(isinstance(each, kinds) for each in modes._get_current_dispatch_mode_stack()):
        taken.append(modes._pop_mode())
    others = [each for each in reversed(taken) if not isinstance(each, kinds)]
    for each in others:
        modes._push_mode(each)
    try:
        yield
    finally:
        for _ in others:
            modes._pop_mode()
        for each in reversed(taken):
            modes._push_mode(each)
        for pack, unpack in reversed(hooks):
            stack._push_saved_tensors_default_hooks(pack, unpack)
