# SPDX-License-Identifier: Apache-2.0
"""Labels of prepared models and parameters, for calls that see one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from accel.comm import ranks_around
from accel.errors import PrepareError, StepError
from accel.parallel._modules import (
    TensorNotes,
    assigned_data,
    forget,
    is_assigned,
    memory_of,
    note_prepared,
    note_tensor,
    prepared_of,
    refuse_assigned,
    tensor_notes,
    unwrap_model,
    written_class,
)
from accel.parallel._private import forward_pre_hooks, hook_count
from accel.tensors import is_dtensor, is_in_base, local_part, split_dims
from accel.topology import Dimension, has_unknown_axis
from accel.topology._axes import Axis


def label_parameters(
    named: Mapping[str, nn.Parameter], *, needed: bool = False, viewed: bool = False, spared: tuple[str, ...] = ()
) -> None:
    """Label a model's parameters with their names. Mutates them by one attribute, which nothing computes with.

    `needed`: a step needs the gradient of each, except parameters with names that begin with one of `spared`.
    `viewed`: an exchanged gradient is a view of its bucket.
    """
    for name, parameter in named.items():
        needs = needed and not name.startswith(spared)
        note_tensor(parameter, name=name, needed=needs, viewed=viewed, memory=memory_of(parameter))


def refuse_assigned_in_forwards(model: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Let forwards of a model raise `StepError` after a line `parameter.data = values` for a DTensor, which has no
    effect. Mutates the model by a hook. `parameters`: the model's, or those that were replaced."""
    shards = tuple(each for each in map(current_parameter, parameters) if is_dtensor(each))
    if shards and not any(getattr(each, "func", None) is _check_shards for each in forward_pre_hooks(model).values()):
        # before the hooks of `fully_shard` gather
        _ = model.register_forward_pre_hook(partial(_check_shards, shards), prepend=True)


def _check_shards(shards: Sequence[torch.Tensor], _model: nn.Module, _inputs: object) -> None:
    if not is_dynamo_compiling():
        refuse_assigned(shards, "forward")


class Replicated(NamedTuple):
    """A parameter, or a part of one, that several ranks hold alike."""

    holders: str  # a text of these ranks, equal on each of them
    name: str
    part: torch.Tensor  # what each of them holds


def new_replicas(parameters: Iterable[torch.Tensor]) -> list[Replicated]:
    """Return what other ranks hold too of models that have not stepped: all parameters of DDP's models, by the next
    call none of them, and the given ones that are DTensors."""
    found: list[Replicated] = []
    for each in parameters:
        exchanger = tensor_notes(each).get("exchanger")
        replica = None if exchanger is None else exchanger()
        if replica is not None and replica.unstepped and not steps_alone(each):
            found += [Replicated("all", *named) for named in replica.unstepped]
            replica.unstepped.clear()
        # those of DDP are left out: ranks may have stepped without this one, in `join_uneven_inputs`
        elif exchanger is None and is_dtensor(each) and not each.is_meta and name_of(each):
            mesh = each.device_mesh
            ranks = ranks_around(mesh, {*range(mesh.ndim)}.difference(split_dims(each)))
            if len(ranks) > 1:
                found.append(Replicated(str(sorted(ranks)), name_of(each), local_part(each)))
    return found


def name_of(parameter: torch.Tensor) -> str:
    """Return a parameter's name in its prepared model; nothing for one without a label."""
    return tensor_notes(parameter).get("name", "")


def replace_parameter(name: str, old: nn.Parameter, new: nn.Parameter) -> None:
    """Label a parameter that an optimizer may hold with the one that replaced it; that gets the user's attributes of
    the old one. Mutates both."""
    known = {**tensor_notes(old), **tensor_notes(new)}
    for key, value in vars(old).items():
        if key not in vars(new):
            setattr(new, key, value)
    note_tensor(new, **cast("TensorNotes", known))
    note_tensor(new, memory=memory_of(new))
    note_tensor(old, name=name, needed=False, viewed=False, heir=new)
    old.grad = None


def drop_parameter(parameter: nn.Parameter) -> None:
    """Label a parameter that an optimizer may hold and that another rank has instead. Frees its memory."""
    note_tensor(parameter, dropped=True)
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)


def is_dropped(parameter: torch.Tensor) -> bool:
    """Return whether another rank has a parameter instead of this one."""
    return "dropped" in tensor_notes(parameter)


def heir_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that the model has in the place of this one; None if it still has this one."""
    heir = tensor_notes(parameter).get("heir")
    while heir is not None and (later := tensor_notes(heir).get("heir")) is not None:
        heir = later
    return heir


def current_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter, or its replacement in the model."""
    heir = heir_of(parameter)
    return parameter if heir is None else heir


def check_exchanged(rank: int, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters with gradients that ranks cannot have exchanged, by name. No communication."""
    unused: list[str] = []
    own: list[str] = []
    hooked: list[str] = []
    assigned: list[str] = []
    for each in parameters:
        known, grad = tensor_notes(each), each.grad
        if is_assigned(each, known):
            assigned.append(name_of(each))
        name = known.get("name")
        if "sharded" in known and hook_count(each) > known["sharded"]:
            hooked.append(name_of(each))
        if grad is None:
            if heir_of(each) is not None:
                raise replaced_parameter(rank, name_of(each))
            if name is not None and known.get("needed") and each.requires_grad:
                unused.append(name)
        elif name is None:
            _check_spread(rank, each)
        # sums of ranks are coalesced where they are sparse
        elif known.get("viewed") and not ((grad.is_sparse and grad.is_coalesced()) or is_in_base(grad)):
            own.append(name)
    if assigned:
        raise assigned_data("parameter", assigned, f"rank {rank}, optimizer_step")
    if hooked:
        raise StepError(
            "hooks on gradients of sharded parameters have not run",
            expected="hooks that run when ranks have summed a gradient",
            got=f"register_hook for {', '.join(hooked)}",
            where=f"rank {rank}",
            fix="parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) then; parameter.grad is this"
            " rank's part of the sum, a DTensor, and the hook changes it in place.",
        )
    if unused:
        raise unused_parameters(rank, unused)
    if own:
        raise StepError(
            "gradients were not exchanged between ranks",
            expected="those that DDP leaves after a backward of the prepared model",
            got=f"others for {', '.join(own)}",
            where=f"rank {rank}",
            fix="Call the model that prepare returned, outside of no_sync, and set requires_grad before preparing. Name"
            " what is called instead: accel.prepare_model(ctx, model, plan=accel.parallel.Plan(methods=("
            '"encode",))).'
            " Gradients of your own go into DDP's by parameter.grad.copy_(...). Without a backward, make them alike on"
            " all ranks by accel.reduce, and call optimizer.step().",
        )


def replaced_parameter(rank: int, name: str) -> PrepareError:
    """Make the error for an optimizer's parameter that its model has replaced."""
    return PrepareError(
        "the optimizer was built before the model was sharded, and holds parameters that the model no longer has",
        expected="the parameters of the prepared model",
        got=f"former parameters, such as {name}",
        where=f"rank {rank}, optimizer",
        fix="Prepare both in one call: model, optimizer = accel.prepare(ctx, model, optimizer).",
    )


def unused_parameters(rank: int, names: Sequence[str]) -> StepError:
    """Make the error for parameters without gradients at an exchange."""
    return StepError(
        "parameters took no part in the loss, so gradients were not exchanged",
        expected="every trainable parameter in every backward that ends a window",
        got=f"no gradient for {', '.join(names)}",
        where=f"rank {rank}",
        fix="Freeze them before preparing, or use accel.prepare_model(ctx, model, find_unused_parameters=True).",
    )


def term_of_parameters(got: str) -> StepError:
    """Make the error for a loss that computes with parameters as ranks keep them."""
    return StepError(
        "the loss computes with parameters as ranks keep them, DTensors, so it has no gradient that ranks exchange",
        expected="a loss of the model's outputs",
        got=got,
        where="backward",
        fix="For an L2 penalty of a factor over model.parameters(), build the optimizer with weight_decay=2 * factor."
        " Compute another penalty in the forward of the module that has the parameter, and return it with the outputs.",
    )


def called_again(error: BaseException, got: str) -> StepError | None:
    """Make the error for a module that a function calls again in its backward, where the unit around it holds shards;
    None if none was called."""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            kind = written_class(module).__name__
            return StepError(
                "the backward calls a module again, outside of the FSDP unit that has its parameters",
                expected="calls of full units, as a reversible layer makes them where its functions are units",
                got=f"{kind}: {got}",
                where="backward",
                fix=f'Make it a unit: plan=accel.parallel.Plan(units=("{kind}",)).',
            )
        trace = trace.tb_next
    return None


def _check_spread(rank: int, parameter: torch.Tensor) -> None:
    if not is_dtensor(parameter):  # placements of a DTensor show who exchanges its gradient
        raise PrepareError(
            "a parameter is not prepared, so its gradient stays on each rank",
            expected="parameters of a model from accel.prepare_model",
            got=f"a plain one of shape {list(parameter.shape)}",
            where=f"rank {rank}, optimizer",
            fix="Prepare the module that holds it before the loop, a criterion too: "
            "model = accel.prepare_model(ctx, model)."
            ' Register a lone one before: model.register_parameter("scale", parameter)',
        )


# Along these, ranks of local SGD step on their own gradients.
STEPPED_ALONE: tuple[Dimension, ...] = ("data", "replicate", "shard")


def mark_local(model: nn.Module) -> None:
    """Note that no gradient of a model crosses ranks with other samples. Mutates it."""
    note_prepared(model, local=True)
    let_step_alone_(model.parameters())


def is_local(model: nn.Module) -> bool:
    """Return whether no gradient of a model crosses ranks with other samples."""
    return "local" in prepared_of(unwrap_model(model))


def let_step_alone_(parameters: Iterable[torch.Tensor], *, alone: bool = True) -> None:
    """Note whether ranks may decide differently about the steps of parameters. Mutates them."""
    for each in parameters:
        if alone:
            note_tensor(each, alone=True)
        elif steps_alone(each):
            forget(each, "alone")


def steps_alone(parameter: torch.Tensor) -> bool:
    """Return whether ranks may decide differently about a parameter's steps."""
    return "alone" in tensor_notes(parameter)


def keep_state_on_host_(parameters: Iterable[torch.Tensor]) -> None:
    """Note that the optimizer's state of parameters is in the host's memory between steps. Mutates them."""
    for each in parameters:
        note_tensor(each, on_host=True)


def has_state_on_host(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state is in the host's memory between steps, by a parameter of each group."""
    groups = (group["params"] for group in optimizer.param_groups)
    return any(params and "on_host" in tensor_notes(params[0]) for params in groups)


def decide_independently(axes: tuple[tuple[str, Axis], ...], optimizers: Iterable[Optimizer]) -> bool:
    """Return whether a rank may skip a step that others take: its parameters, or those along an axis, are its own."""
    if has_unknown_axis(axes):
        return True
    groups = [group["params"] for each in optimizers for group in each.param_groups]
    return any(params and steps_alone(params[0]) for params in groups)


def micro_batches_of(model: nn.Module) -> int:
    """Return the number of micro-batches that a model's plan makes of a batch; 1 without such a plan."""
    return prepared_of(unwrap_model(model)).get("micro_batches", 1)
