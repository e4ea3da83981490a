# SPDX-License-Identifier: Apache-2.0
"""`prepare` keeps order, checks what belongs together, and changes nothing when it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import accel
from accel import Loader
from accel.errors import DataError, DeviceError, PrepareError


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, StepLR, DataLoader]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 1), DataLoader(range(6), batch_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_order_is_kept_whatever_it_is(ranks, world_size):
    kinds = [nn.Module, torch.optim.Optimizer, StepLR, Loader]

    def rank(ctx):
        for places in itertools.permutations(range(4)):
            objects = _objects()
            prepared = accel.prepare(ctx, *(objects[place] for place in places))
            assert isinstance(prepared, tuple)
            assert all(isinstance(each, kinds[place]) for each, place in zip(prepared, places, strict=True))
            model, optimizer, scheduler, loader = (prepared[places.index(place)] for place in range(4))
            assert isinstance(model, DistributedDataParallel) == (ctx.world_size > 1)
            assert accel.unwrap_model(model) is objects[0]
            assert optimizer is objects[1]
            assert scheduler is objects[2]
            assert loader.dataset is objects[3].dataset
        return True

    assert ranks.run(rank, world_size) == [True] * world_size


def test_one_object_comes_back_as_one_and_several_of_a_kind_are_fine():
    ctx = accel.single()
    model, optimizer, _, loader = _objects()
    assert accel.prepare(ctx, model) is model
    assert accel.prepare(ctx, optimizer) is optimizer
    assert isinstance(accel.prepare(ctx, loader), Loader)
    second = _objects()
    first_model, second_model, *rest = accel.prepare(ctx, model, second[0], second[1], optimizer, loader, second[3])
    assert (first_model, second_model, rest[0], rest[1]) == (model, second[0], second[1], optimizer)
    both = torch.optim.SGD([*model.parameters(), *second[0].parameters()], lr=0.1)
    assert accel.prepare(ctx, second[0], both, model)[1] is both


def test_preparing_again_changes_nothing(ranks):
    def rank(ctx):
        once = accel.prepare(ctx, *_objects())
        again = accel.prepare(ctx, *once)
        assert all(one is other for one, other in zip(once, again, strict=True))
        assert accel.prepare_model(ctx, once[0]) is once[0]
        return True

    assert ranks.run(rank, 2) == [True, True]
    assert rank(accel.single())


def test_a_compiled_replica_is_not_wrapped_again(ranks):
    class Compiled(nn.Module):
        """What torch.compile returns holds the module so; compiling itself takes seconds."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    def rank(ctx):
        compiled = Compiled(accel.prepare_model(ctx, nn.Linear(1, 1)))
        assert accel.prepare_model(ctx, compiled) is compiled
        return isinstance(accel.unwrap_model(compiled), nn.Linear)

    assert ranks.run(rank, 2) == [True, True]


def test_ranks_begin_with_the_parameters_of_rank_0(ranks):
    def rank(ctx):
        torch.manual_seed(ctx.rank)
        model = nn.Linear(3, 2)
        mine = model.weight.detach().clone()
        accel.prepare_model(ctx, model)
        return mine, model.weight.detach().clone()

    (first, _), *_ = results = ranks.run(rank, 3)
    assert all(torch.equal(after, first) for _, after in results)
    assert not torch.equal(results[1][0], first)


def test_a_frozen_model_is_not_wrapped(ranks):
    def rank(ctx):
        model = nn.Linear(3, 2).requires_grad_(False)
        assert accel.prepare(ctx, model) is model
        with accel.no_sync(ctx, model):
            return model(torch.zeros(1, 3)).requires_grad

    assert ranks.run(rank, 2) == [False, False]


def test_an_optimizer_or_scheduler_may_come_without_its_model():
    _, optimizer, scheduler, _ = _objects()
    assert accel.prepare(accel.single(), optimizer, scheduler) == (optimizer, scheduler)
    assert accel.prepare_optimizer(accel.single(), optimizer) is optimizer
    assert accel.prepare_scheduler(accel.single(), scheduler) is scheduler
    plateau = ReduceLROnPlateau(optimizer)
    assert accel.prepare(accel.single(), plateau) is plateau


def _stranger(objects):
    return (objects[0], torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), *objects[2:])


def _other_schedulers(objects):
    return (*objects[:2], _objects()[2], objects[3])


def _one_more_parameter(objects):
    optimizer = torch.optim.SGD(objects[0].parameters(), lr=1.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return (objects[0], optimizer)


def _without_statistics():
    model = nn.BatchNorm1d(2)
    model.running_var = model.running_var.to("meta")
    return model


REFUSED = {
    "nothing": (lambda objects: (), PrepareError, {"problem": "there is nothing to prepare"}),
    "tensor": (
        lambda objects: (*objects, torch.zeros(1)),
        PrepareError,
        {"got": "Tensor", "where": "prepare, argument 5"},
    ),
    "function": (lambda objects: (print, *objects), PrepareError, {"where": "argument 1"}),
    "class": (lambda objects: (objects[0], nn.Linear), PrepareError, {"got": "type", "where": "prepare, argument 2"}),
    "list": (lambda objects: (list(objects),), PrepareError, {"got": "list"}),
    "other parameters": (
        _stranger,
        PrepareError,
        {"got": "2 of 2", "where": r"argument 2, param_groups\[0\]\['params'\]\[0\]", "fix": "very model"},
    ),
    "some other parameters": (
        _one_more_parameter,
        PrepareError,
        {"got": "1 of 1", "where": r"param_groups\[1\]\['params'\]\[0\]"},
    ),
    "other optimizer": (_other_schedulers, PrepareError, {"where": "argument 3"}),
    "stream": (
        lambda objects: (*objects[:3], DataLoader([1], batch_size=None)),
        DataError,
        {"where": "prepare_loader"},
    ),
    "device": (
        lambda objects: (_without_statistics(),),
        DeviceError,
        {"got": "meta", "where": "prepare_model, running_var"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_belong_together_is_refused_and_nothing_has_changed(ranks, name, world_size):
    change, error, fields = REFUSED[name]

    def rank(ctx):
        objects = _objects()
        model, optimizer = objects[0], objects[1]
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with assert_raises(error, **fields):
            accel.prepare(ctx, *change(objects))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert not any(parameter._backward_hooks or parameter.grad is not None for parameter in model.parameters())
        accel.wait_for_everyone(ctx)  # no rank was left in a collective
        return [type(each) for each in accel.prepare(ctx, *objects)][3] is Loader  # and the right call still works

    assert ranks.run(rank, world_size) == [True] * world_size


def test_a_buffer_on_another_device_is_named():
    model = _without_statistics()
    with assert_raises(DeviceError, got="^meta$", where="prepare_model, running_var"):
        accel.prepare_model(accel.single(), model)


def test_an_optimizer_on_another_device_is_named():
    optimizer = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters(), lr=0.1)
    with assert_raises(
        DeviceError, expected="cpu", got="meta", where=r"param_groups\[0\]\['params'\]\[0\], shape \[2, 2\]"
    ):
        accel.prepare_optimizer(accel.single(), optimizer)
    with assert_raises(DeviceError, fix="Prepare the model before"):
        accel.prepare_scheduler(accel.single(), StepLR(optimizer, 1))


@pytest.mark.parametrize("thing", [None, "model", torch.zeros(1), nn.Linear])
def test_a_model_is_a_module(thing):
    with assert_raises(PrepareError, expected="a torch.nn.Module"):
        accel.prepare_model(accel.single(), thing)


def test_unwrapping_a_plain_model_gives_itself():
    model = nn.Linear(1, 1)
    assert accel.unwrap_model(model) is model


@pytest.mark.parametrize("capturable", [False, True])
def test_state_loaded_before_prepare_moves_with_the_parameters(capturable):
    there = torch.device("meta")
    optimizer = torch.optim.AdamW(nn.Linear(3, 2, device=there).parameters(), capturable=capturable)
    (group,) = optimizer.param_groups
    optimizer.state.update({p: {"step": torch.ones(()), "exp_avg": torch.ones(p.shape)} for p in group["params"]})
    ctx = dataclasses.replace(accel.single(), device=there)
    before = [torch.device("meta" if capturable else "cpu"), there]
    assert accel.prepare_optimizer(ctx, optimizer) is optimizer
    for state in optimizer.state.values():
        assert [state["step"].device, state["exp_avg"].device] == before
