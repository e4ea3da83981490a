# SPDX-License-Identifier: Apache-2.0
"""State that DeepSpeed shares out, as whole tensors by name, and back: the same checkpoint at any stage, and by ddp."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accel.comm import is_replaced, refuse_replaced
from accel.context import DistContext
from accel.engines.deepspeed._package import ZeroOptimizer, flat_parameters, link_state, package
from accel.parallel._modules import notes_of
from accel.tensors import packed_weights, part_names

_MASTER = torch.float32


class Whole(NamedTuple):
    """A model with whole fp32 weights on the CPU, its optimizer, and their parameters by the live ones."""

    model: nn.Module
    optimizer: Optimizer | None
    of: dict[int, nn.Parameter]


def whole_items(ctx: DistContext, items: Mapping[str, object]) -> Mapping[str, object]:
    """Return items with each of DeepSpeed's objects replaced by a whole one. A collective for each tensor.

    Each rank gets all weights and all optimizer state in memory of the CPU.
    """
    handles = {id(each.engine): each for each in items.values() if isinstance(each, ZeroOptimizer)}
    for handle in handles.values():
        refuse_replaced(itertools.chain(*handle.groups), "accel.save_state or accel.load_state")
    made: dict[int, Whole] = {}
    found = dict(items)
    for name, each in items.items():
        engine = each.engine if isinstance(each, ZeroOptimizer) else each
        if not isinstance(engine, nn.Module) or "wraps" not in notes_of(engine):
            continue
        if id(engine) not in made:
            made[id(engine)] = _whole(engine, handles.get(id(engine)))
        found[name] = made[id(engine)].optimizer if isinstance(each, ZeroOptimizer) else made[id(engine)].model
    return found


def loaded(ctx: DistContext, items: Mapping[str, object], made: Mapping[str, object]) -> None:
    """Give DeepSpeed's objects the state loaded into the result of `whole_items`. A collective for each tensor."""
    for name, each in items.items():
        whole = made.get(name)
        if isinstance(each, ZeroOptimizer):
            _give_optimizer(each, cast(Optimizer, whole))
        elif isinstance(each, nn.Module) and "wraps" in notes_of(each) and isinstance(whole, nn.Module):
            _give_model(cast(Any, each), whole)


def _whole(engine: Any, handle: ZeroOptimizer | None) -> Whole:
    live = _tensors(engine.module)
    root = nn.Module()
    for path in packed_weights(engine.module):  # quantized weights are frozen and whole: the live ones
        _put_layer(root, path.rpartition(".")[0], engine.module)
    of: dict[int, Any] = {}
    for name, tensor in live.items():
        if id(tensor) not in of:
            value = _value(engine, tensor)
            of[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        _put(root, name, of[id(tensor)])
    optimizer = None if handle is None else _whole_optimizer(handle, of)
    return Whole(root, optimizer, of)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state, with their live objects, except quantized weights."""
    packed = packed_weights(module).keys() | part_names(module)
    state = module.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if isinstance(each, torch.Tensor) and name not in packed}


def _put_layer(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a layer with a quantized weight into a tree of plain modules, with that weight alone."""
    layer = module.get_submodule(path)
    made = copy.copy(layer)
    vars(made)["_parameters"] = {"weight": layer.weight}
    *above, last = path.split(".")
    _place(root, above).add_module(last, made)


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor into a tree of plain modules at its path."""
    *path, last = name.split(".")
    root = _place(root, path)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)


def _place(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at a path in a tree, made where it is missing."""
    for step in path:
        inner = getattr(root, step, None)
        if inner is None:
            inner = nn.Module()
            root.add_module(step, inner)
        root = inner
    return root


def _value(engine: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, whole, on the CPU; of a trained parameter the fp32 one, unless a block replaces it."""
    if isinstance(tensor, nn.Parameter):
        steps = engine.optimizer is not None and hasattr(engine.optimizer, "loss_scale")
        if tensor.requires_grad and steps and not is_replaced(tensor):
            return package().utils.safe_get_full_fp32_param(tensor).detach().to("cpu", _MASTER, copy=True)
        with package().zero.GatheredParameters([tensor]):
            return tensor.detach().to("cpu", copy=True)
    return tensor.detach().to("cpu", copy=True)


def _whole_optimizer(handle: ZeroOptimizer, of: Mapping[int, nn.Parameter]) -> Optimizer:
    passed = handle.passed
    whole = copy.copy(passed)
    whole.state = defaultdict(dict)
    whole.param_groups = [
        {**group, "params": [of[id(each)] for each in params]}
        for group, params in zip(passed.param_groups, handle.groups, strict=True)
    ]
    stepped = [(flat, params) for flat, params in flat_parameters(handle.zero) if passed.state.get(flat)]
    if stepped:
        with handle.inner_groups():
            link_state(handle.zero)
    for flat, params in stepped:
        first = passed.state[flat]
        spread = [key for key, value in first.items() if _is_spread(key, value, flat)]
        for each in params:
            state = {key: copy.deepcopy(value) for key, value in first.items() if key not in spread}
            for key in spread:
                value = package().utils.safe_get_full_optimizer_state(each, key)
                state[key] = value.detach().to("cpu", copy=True)
            whole.state[of[id(each)]] = state
    return whole


def _is_spread(key: str, value: object, parameter: torch.Tensor) -> bool:
    """Return whether a state of the inner optimizer has an element for each weight; torch counts steps by "step"."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"


def _give_model(engine: Any, whole: nn.Module) -> None:
    stored = _tensors(whole)
    gathered = package().zero.GatheredParameters
    with torch.no_grad():
        for name, tensor in _tensors(engine.module).items():
            value = stored[name].detach()
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(value)
                continue
            if tensor.requires_grad and engine.optimizer is not None and hasattr(engine.optimizer, "loss_scale"):
                _give(engine, tensor, value, None)
            with gathered([tensor], modifier_rank=0):
                tensor.data.copy_(value)


def _give_optimizer(handle: ZeroOptimizer, whole: Optimizer) -> None:
    passed = handle.passed
    for group, other in zip(passed.param_groups, whole.param_groups, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
    handle.gradients.clear()
    pairs = zip(handle.groups, whole.param_groups, strict=True)
    of = {id(each): other for params, group in pairs for each, other in zip(params, group["params"], strict=True)}
    given: list[tuple[torch.Tensor, str, torch.Tensor]] = []
    for flat, params in flat_parameters(handle.zero):
        held = [(each, other, state) for each in params if (state := whole.state.get(other := of[id(each)]))]
        old = cast(dict[str, Any], passed.state.pop(flat, None) or {})
        if not held:
            continue
        _, first, state = held[0]
        spread = [key for key, value in state.items() if _is_spread(key, value, first)]
        shared = {key: copy.deepcopy(value) for key, value in state.items() if key not in spread}
        kept = {key: old[key].zero_() if key in old else torch.zeros_like(flat) for key in spread}
        passed.state[flat] = kept | shared
        given += [(each, key, state[key]) for each, _, state in held for key in spread]
    if given:
        with handle.inner_groups():
            link_state(handle.zero)
    for parameter, key, value in given:
        _give(handle.engine, parameter, value, key)


def _give(engine: Any, parameter: Any, value: torch.Tensor, key: str | None) -> None:
    """Give DeepSpeed's fp32 copy of a parameter a value, or a state of its optimizer. No communication."""
    utils = package().utils
    flat = value.detach().to(torch.device(engine.device), _MASTER)
    part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    if part is None:
        if key is None:
            utils.safe_set_full_fp32_param(parameter, flat)
        else:
            utils.safe_set_full_optimizer_state(parameter, flat, key)
        return
    # at stage 3 ranks hold equal parts, the last one padded, which DeepSpeed's call for whole values does not cut
    ranks = int(engine.dp_world_size)
    flat = nn.functional.pad(flat.flatten(), (0, ranks * part.numel() - flat.numel()))
    own = flat.chunk(ranks)[torch.distributed.get_rank()]
    if key is None:
        utils.safe_set_local_fp32_param(parameter, own)
    else:
        utils.safe_set_local_optimizer_state(parameter, own, key)
