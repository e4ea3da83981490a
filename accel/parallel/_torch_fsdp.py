# SPDX-License-Identifier: Apache-2.0
"""Names inside torch's `fully_shard` that this package reads and replaces, only in this file.

`fully_shard` gives a module a state, and the state a group of parameters for each mesh. Over one step the group's
methods run in this order, and each hook below is at one of them:

    forward   `pre_forward` -> `unshard`, `wait_for_unshard` -> the module -> `reshard`
    backward  `pre_backward` (a gradient of an output) -> `unshard`, `wait_for_unshard` -> the module -> `post_backward`
    its end   a callback of the root sums groups that no `post_backward` reached

A backward within a forward, or one that makes a graph, as `torch.autograd.grad(loss, inputs, create_graph=True)` does,
gathers and sums nothing. The parameters of a graph stay gathered for the backward of that graph; see `keep_for_graphs`.
`loss.backward(create_graph=True)` sums the gradients at its end.

`NAMES` lists each name by its owner. A test looks for them, and one test a function runs it on the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accel.parallel._private import is_end_of_backward, runs_in_backward
from accel.tensors import local_part

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.distributed.device_mesh import DeviceMesh

_INSIDE = "torch.distributed.fsdp._fully_shard"
NAMES = {
    "torch.distributed.fsdp.FSDPModule": ("_get_fsdp_state",),
    f"{_INSIDE}._fsdp_state.FSDPState": (
        "_fsdp_param_groups",
        "_fsdp_param_group",
        "_training_state",
        "_pre_backward",
        "_state_ctx",
        "_register_root_post_backward_final_callback",
    ),
    f"{_INSIDE}._fsdp_state.FSDPStateContext": ("iter_forward_root",),
    f"{_INSIDE}._fsdp_param_group.FSDPParamGroup": (
        "_init_mp_dtypes",
        "_partial_reduce_output",
        "fsdp_params",
        "reduce_grads",
        "pre_forward",
        "post_forward",
        "reshard",
        "unshard",
        "wait_for_unshard",
        "post_backward",
    ),
    f"{_INSIDE}._fsdp_param.FSDPParam": (
        "_unsharded_param",
        "_module_info",
        "all_gather_outputs",
        "mesh_info",
        "orig_dtype",
        "param_dtype",
        "sharded_param",
        "unsharded_accumulated_grad",
    ),
    f"{_INSIDE}._fsdp_param.ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
}
_SUM_UNUSED = "set_reduce_scatter_unused_params"  # public; of torch 2.13
# Before torch 2.15 gradients of several dtypes wait separately, and this method casts one to the dtype of the sum.
_TO_ONE_FORMAT, _WAITING = "to_accumulated_grad_if_needed", "unsharded_accumulated_grad"
# the methods of a group in which a rank waits for others
GATHERS, SUMS = ("unshard", "wait_for_unshard"), "post_backward"


class Shards(NamedTuple):
    """A parameter that `fully_shard` has taken."""

    parameter: torch.Tensor  # as an optimizer has it
    whole: torch.Tensor | None  # as forward and backward have it; None until the first forward
    held: list[torch.Tensor]  # gradients of the whole one that ranks have not exchanged


def shards_of(module: nn.Module) -> Iterator[Shards]:
    """Yield the parameters that `fully_shard` took when it was called on a module, not on modules below it."""
    for group in _groups(module):
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            held = [None if whole is None else whole.grad]
            held += [each.unsharded_accumulated_grad] if _WAITING in vars(each) else []
            yield Shards(each.sharded_param, whole, [grad for grad in held if grad is not None])


def is_within_hooks(unit: nn.Module) -> bool:
    """Whether torch's hooks of a unit's call, or of its backward, have run and not ended."""
    return _state(unit)._training_state.name in ("FORWARD", "PRE_BACKWARD")


def meshes_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, DeviceMesh]]:
    """Yield owner, name and mesh of the parameters that `fully_shard` took when it was called on a module.

    By name, as a load may put other parameters in their places. Along the mesh the parameter is gathered and its
    gradient is reduced.
    """
    for group in _groups(module):
        for each in group.fsdp_params:
            info = each._module_info
            mesh = each.mesh_info.mesh
            yield info.module, info.param_name, mesh
            for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield owner, name, mesh


def gather_in_new_dtype(module: nn.Module) -> None:
    """Let the next forward gather parameters that were converted after the first one, as by `module.to(dtype)`. torch
    keeps their dtypes, and full parameters without memory; gradients that those hold are converted."""
    for group in _groups(module):
        known = [each for each in group.fsdp_params if "orig_dtype" in vars(each)]
        changed = [each for each in known if each.orig_dtype != each.sharded_param.dtype]
        if changed:
            group._init_mp_dtypes()
        for each in changed:
            whole: Any = cast(Any, vars)(each).pop("_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                each.unsharded_accumulated_grad = whole.grad.to(each.param_dtype or each.orig_dtype)
            each.all_gather_outputs = []


def drop_unsharded(module: nn.Module) -> list[torch.Tensor]:
    """Drop the gradients held for a module of `fully_shard`, not for modules below it; return its parameters as an
    optimizer has them."""
    parameters: list[torch.Tensor] = []
    for group in _groups(module):
        group._partial_reduce_output = None  # of replicas that wait for set_requires_all_reduce
        for each in group.fsdp_params:
            if _WAITING in vars(each):
                each.unsharded_accumulated_grad = None
            parameters.append(each.sharded_param)
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
    return parameters


def sum_unused(unit: nn.Module) -> None:
    """Let ranks sum zeros for parameters that a backward does not reach, of a module of `fully_shard` and those below
    it."""
    if hasattr(unit, _SUM_UNUSED):
        getattr(unit, _SUM_UNUSED)(True)
        return
    from torch.distributed.fsdp import FSDPModule

    for each in unit.modules():
        if isinstance(each, FSDPModule):
            for group in _groups(each):
                group.post_backward = partial(_with_zeros, group, group.post_backward)


def sum_in_one_format(modules: Iterable[nn.Module]) -> None:
    """Let modules of `fully_shard` among others sum all gradients of a window in one dtype, whichever
    micro-batches used their parameters."""
    from torch.distributed.fsdp import FSDPModule

    for each in modules:
        if isinstance(each, FSDPModule):
            for group in _groups(each):
                group.post_backward = partial(_widened, group, group.post_backward)


def _widened(group: Any, post_backward: Callable[..., None], *unused: object) -> None:
    """Sum the gradients of a group of `fully_shard`. Gradients of earlier micro-batches wait in the dtype of the sum,
    and torch takes no others together with them."""
    if not any(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
        return  # torch looks for gradients of a module that no forward has run
    if group.reduce_grads and any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params):
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or each.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is None and whole.requires_grad and getattr(group, "reduce_scatter_unused_params", False):
                whole.grad = torch.zeros_like(whole)
            if hasattr(each, _TO_ONE_FORMAT):
                each.to_accumulated_grad_if_needed()
    post_backward(*unused)


def _with_zeros(group: Any, post_backward: Callable[..., None], *unused: object) -> None:
    """Sum the gradients of a group of `fully_shard`, with zeros for those that are missing."""
    for each in group.fsdp_params:
        whole = getattr(each, "_unsharded_param", None)
        if whole is None or whole.grad is not None or each.unsharded_accumulated_grad is not None:
            continue
        if group.reduce_grads and whole.requires_grad:
            whole.grad = torch.zeros_like(whole)
    post_backward(*unused)


def _groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that `fully_shard` made when it was called on a module."""
    state = _state(module)
    several = getattr(state, "_fsdp_param_groups", None)  # older torch has at most one
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def around_calls(
    module: nn.Module, begins: Callable[[], None], waits: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let each forward of a module that `fully_shard` was called on call `begins`, and replace each method in which its
    rank waits for others by what `waits` makes of the name and the method."""
    for at, group in enumerate(_groups(module)):
        if at == 0:
            group.pre_forward = partial(_after, begins, group.pre_forward)
        for method in (*GATHERS, SUMS):
            setattr(group, method, waits(method, getattr(group, method)))


def _after(begins: Callable[[], None], pre_forward: Callable[..., Any], *inputs: Any) -> Any:
    begins()
    return pre_forward(*inputs)


def gather_at(module: nn.Module, output: torch.Tensor) -> None:
    """Gather a module's parameters for its backward when the gradient of an output comes that torch did not find."""
    _ = cast(Any, output).register_hook(_state(module)._pre_backward)


def gather_before(module: nn.Module, function: Node) -> None:
    """Gather a module's parameters for its backward before a function of autograd runs in it."""
    state = _state(module)

    def reached(grads: tuple[torch.Tensor, ...]) -> None:
        _ = state._pre_backward(grads[0])

    _ = function.register_prehook(reached)


class _Kept:
    """A group of parameters that stay gathered for the backward of a graph that a backward has made.

    torch reshards after each backward. The graph of a gradient reads the parameters again, before any hook of a unit.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module, self._group = module, group
        self._facts: list[tuple[int, ...]] | None = None  # of the shards that are gathered; None if none is kept
        self._watched = self._in_forward = False
        self._torch_reshard, self._torch_unshard = group.reshard, group.unshard
        self._torch_post_forward, self._torch_post_backward = group.post_forward, group.post_backward
        group.reshard, group.unshard = self._reshard, self._unshard
        group.post_forward, group.post_backward = self._post_forward, self._post_backward

    @property
    def is_on(self) -> bool:
        """Whether the parameters are kept now."""
        return self._facts is not None

    def gather(self, *, keep: bool) -> None:
        """Gather the parameters; with `keep` until a backward sums their gradients, or somebody reshards them."""
        self._group.unshard()
        self._group.wait_for_unshard()
        if not keep:
            return
        self._facts = self._now()
        for whole in (each.whole for each in shards_of(self._module)) if not self._watched else ():
            if whole is not None and whole.requires_grad:
                sum_at_end(self._module, whole)  # the loss may only read the gradient, and no output
        self._watched = True

    def _now(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for each in self._group.fsdp_params:
            part = local_part(each.sharded_param)
            found.append((part.data_ptr(), part._version, each.sharded_param._version))  # an optimizer has either
        return found

    def _reshard(self) -> None:
        if self._facts is None or not self._in_forward:  # a further forward within the loss leaves them gathered
            self._facts = None
            self._torch_reshard()

    def _unshard(self, *args: Any, **kwargs: Any) -> None:
        if self._facts is not None and self._facts != self._now():  # a step has come, and no backward before it
            self._group.reshard()
        self._torch_unshard(*args, **kwargs)

    def _post_forward(self, *args: Any) -> Any:
        self._in_forward = True
        try:
            return self._torch_post_forward(*args)
        finally:
            self._in_forward = False

    def _post_backward(self, *unused: object) -> None:
        if _is_within_forward(_state(self._module)):
            if not self.is_on:
                self._group.reshard()
            return
        is_end = is_end_of_backward()
        if _makes_graph():  # `autograd.grad` gives parameters no gradients, `backward` does
            wholes = (each.whole for each in shards_of(self._module))
            is_last = is_end and any(each is not None and each.grad is not None for each in wholes)
        else:
            is_last = is_end or not self.is_on  # the graph may come after this forward
        if is_last:
            self._facts = None
            with torch.no_grad():
                self._torch_post_backward(*unused)


def keep_for_graphs(modules: Iterable[nn.Module]) -> None:
    """Let a backward that makes a graph (double backward, as for a gradient penalty) leave modules of `fully_shard`
    gathered until the next backward, which sums the gradients; let one within a forward sum nothing. Mutates the
    modules."""
    for module in modules:
        state = _state(module)
        kept = [_Kept(module, each) for each in _groups(module)]
        state._pre_backward = partial(_gather, state, state._pre_backward, kept)


def is_kept(module: nn.Module) -> bool:
    """Whether a module of `fully_shard` is gathered for the backward of a graph; see `keep_for_graphs`."""
    groups = _groups(module) if hasattr(module, "_get_fsdp_state") else []  # stages of a pipeline reshard too
    holders = [getattr(each.post_forward, "__self__", None) for each in groups]
    return any(isinstance(each, _Kept) and each.is_on for each in holders)


def _gather(
    state: Any, usual: Callable[[torch.Tensor], torch.Tensor], kept: Iterable[_Kept], grad: torch.Tensor
) -> torch.Tensor:
    makes_graph = _makes_graph()
    if not makes_graph and not _is_within_forward(state):
        return usual(grad)
    for each in kept:
        each.gather(keep=makes_graph)
    return grad


def _is_within_forward(state: Any) -> bool:
    """Whether this thread is in a backward within a model's forward, as one that returns forces."""
    return runs_in_backward() and state._state_ctx.iter_forward_root is not None


def _makes_graph() -> bool:
    """Whether this thread is in a backward that makes a graph."""
    return torch.is_grad_enabled() and runs_in_backward()


def end_failed_forward(module: nn.Module) -> None:
    """Forget a forward of a module of `fully_shard` that has raised. The hook at its end has not run, and later
    backwards would seem to be within it."""
    state = _state(module)
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None


def sum_at_end(module: nn.Module, whole: torch.Tensor) -> None:
    """Sum a module's gradients at the end of a backward that reaches a whole parameter. torch asks for it when the
    gradient of an output comes."""
    state = _state(module)

    def reached(_grad: torch.Tensor) -> None:
        state._register_root_post_backward_final_callback()

    _ = cast(Any, whole).register_hook(reached)


def _state(module: nn.Module) -> Any:
    return cast(Any, module)._get_fsdp_state()
