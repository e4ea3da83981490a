# SPDX-License-Identifier: Apache-2.0
"""`default_group=True`: code that leans on c10d's default group runs, and torch is left as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from catching import assert_raises
from processes import wait_for
from torch.distributed import _functional_collectives as functional, device_mesh, distributed_c10d

from accel.errors import CollectiveMismatch
from accel.testing import Deadlock, SimulationError, Simulator, simulate, simulate_groups
from accel.testing._group import SimulatedGroup

SEEDS = [None, 0, 1]
ALL_GATHER_AUTOGRAD = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
REDUCE_SCATTER_AUTOGRAD = (
    getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd
)


def _torch_state() -> tuple[object, ...]:
    """All that a simulation with default groups changes in torch."""
    backend = dist.Backend
    tables = (backend.backend_list, backend.backend_type_map, backend.backend_capability, backend._plugins)
    names = [name.lower() for table in (*tables, backend.default_device_backend_map, vars(backend)) for name in table]
    assert "simulated" not in names
    return distributed_c10d._world, device_mesh.threading, device_mesh.get_backend, dist.group.WORLD, sys.excepthook


@pytest.fixture(autouse=True)
def torch_is_left_alone():
    before = _torch_state()
    yield
    assert _torch_state() == before
    assert not dist.is_initialized()


def _default(fn, size=4, **options):
    return simulate_groups(lambda group: fn(), size, default_group=True, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_default_group_is_the_simulated_one(seed):
    def rank(ctx):
        assert ctx.comm.group is dist.group.WORLD
        assert (ctx.rank, ctx.world_size) == (dist.get_rank(), dist.get_world_size())
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]
        total, everything = torch.tensor(float(dist.get_rank())), [None] * 3
        dist.all_reduce(total)
        dist.all_gather_object(everything, ctx.rank)
        dist.broadcast_object_list(names := [str(ctx.rank)], src=2)
        dist.barrier()
        return total.item(), everything, names, dist.get_backend()

    assert simulate(rank, 3, seed=seed, default_group=True) == [(3.0, [0, 1, 2], ["2"], "simulated")] * 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, {"backend": "gloo"}, {"use_local_synchronization": True}])
def test_subgroups_count_their_own_calls(seed, options):
    def rank():
        me = dist.get_rank()
        groups = [dist.new_group(ranks, **options) for ranks in ([0, 2], [1, 3], [3, 2, 1])]
        found = []
        for ranks, group in zip(([0, 2], [1, 3], [1, 2, 3]), groups, strict=True):
            if me not in ranks:
                continue
            assert dist.get_process_group_ranks(group) == ranks
            assert dist.get_group_rank(group, me) == group.rank() == ranks.index(me)
            total = torch.tensor(float(me))
            dist.all_reduce(total, group=group)
            sent = torch.tensor(me)
            dist.broadcast(sent, src=ranks[-1], group=group)
            found.append((total.item(), sent.item()))
        return found

    assert _default(rank, seed=seed) == [[(2, 2)], [(4, 3), (6, 3)], [(2, 2), (6, 3)], [(4, 3), (6, 3)]]


def test_subgroups_where_torch_does_not_ask_the_default_group(monkeypatch):
    """Versions of torch that do not know of a group's `new_group` make subgroups by the backend's name."""
    monkeypatch.delattr(SimulatedGroup, "new_group")
    test_subgroups_count_their_own_calls(None, {})
    test_subgroups_count_their_own_calls(1, {"use_local_synchronization": True})


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_by_world_rank(seed):
    def rank():
        me, group = dist.get_rank(), dist.new_group([1, 3])
        if me == 1:
            dist.send(torch.tensor([7.0]), dst=3, group=group)
        if me == 3:
            found = torch.zeros(1)
            assert dist.recv(found, src=1, group=group) == 1
            assert found.item() == 7
        mine, other = torch.tensor(float(me)), torch.zeros(())
        ops = [dist.P2POp(dist.isend, mine, (me + 1) % 4), dist.P2POp(dist.irecv, other, (me - 1) % 4)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        any_rank = torch.zeros(())
        if me:
            dist.send(mine, dst=0)
            return other.item()
        return other.item(), sorted((dist.recv(any_rank), any_rank.item()) for _ in range(3))

    assert _default(rank, seed=seed) == [(3.0, [(1, 1.0), (2, 2.0), (3, 3.0)]), 0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_with_gradients(seed):
    def rank():
        me = dist.get_rank()
        x = torch.full((4,), float(me), requires_grad=True)
        group = dist.group.WORLD
        outputs = [
            functional.all_reduce(x * 1, "sum", group),
            ALL_GATHER_AUTOGRAD(x, 0, group),
            REDUCE_SCATTER_AUTOGRAD(x, "sum", 0, group),
            functional.all_to_all_single_autograd(x, None, None, group),
            differentiable.all_reduce(x * 1),
            torch.stack(differentiable.all_gather(x)),
        ]
        gradients = []
        for out in outputs[1:]:
            x.grad = None
            (out.sum() * me).backward()  # so gradients say who depended on whom
            gradients.append(x.grad.tolist())
        return outputs[0].tolist(), gradients

    ranks = sum(range(4))
    for total, gradients in _default(rank, seed=seed):
        assert total == [float(ranks)] * 4
        gather, scatter, swap, reduce, gather_list = gradients
        assert gather == reduce == gather_list == [float(ranks)] * 4
        assert scatter == swap == [0.0, 1.0, 2.0, 3.0]


def test_a_mesh_and_its_slices():
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        found = []
        for name in ("row", "column"):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=mesh[name].get_group())
            found.append(total.item())
        flat = mesh["row", "column"]._flatten("all")
        return found, mesh.get_coordinate(), flat.size(), hash(mesh)

    got = _default(rank)
    assert [each[0] for each in got] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
    assert [list(each[1]) for each in got] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len({each[3] for each in got} | {each[3] for each in _default(rank)}) == 8


@pytest.mark.parametrize("seed", SEEDS)
def test_deadlocks_and_mismatches_name_the_group(seed):
    def skips():
        group = dist.new_group([1, 3])
        if dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(2), group=group)

    def differs():
        group = dist.new_group([0, 2])
        if dist.get_rank() in (0, 2):
            dist.all_reduce(torch.zeros(2 + dist.get_rank()), group=group)

    with pytest.raises(Deadlock) as caught:
        _default(skips, seed=seed)
    assert "collective #0 in group '1' of ranks 1, 3, joined by rank 1 of 2" in str(caught.value)
    with assert_raises(
        CollectiveMismatch, problem="collective #0 in group '1' of ranks 0, 2", expected=r"float32\[[24]\]"
    ):
        _default(differs, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_made_in_another_order_are_found_when_they_are_made(seed):
    def leaves_one_out():
        if dist.get_rank() != 2:
            dist.new_group([0, 1])
        dist.new_group([0, 2])

    with assert_raises(
        CollectiveMismatch, problem="group '1'", expected="ranks 0, [12] .*test_sim", got="ranks 0, [12]"
    ):
        _default(leaves_one_out, 3, seed=seed)


def test_a_deadlock_inside_of_cpp_unwinds_and_the_next_run_works():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def ddp():
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        loss = model(torch.ones(2, 3)).sum()
        if dist.get_rank() != 1:
            loss.backward()

    def fsdp():
        model = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (4,)))
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() != 1:
            loss.backward()

    def waiting():
        if dist.get_rank() != 1:
            functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))

    def raising():
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        if dist.get_rank() == 2:
            model.module.weight.register_hook(_boom)
        model(torch.ones(2, 3)).sum().backward()

    for fn in (ddp, fsdp, waiting):
        with assert_raises(Deadlock, got="rank 1: returned"):
            _default(fn)
        assert _default(dist.get_rank) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="boom") as caught:
        _default(raising)
    assert "raised on rank 2 of 4" in caught.value.__notes__[-1]
    assert _default(dist.get_rank) == [0, 1, 2, 3]


def _boom(gradient):
    raise ValueError("boom")


def test_torch_is_restored_whatever_happens():
    def endless():
        while True:
            pass

    def interrupted():
        dist.barrier()
        if dist.get_rank() == 1:
            raise KeyboardInterrupt

    def stopped_by_hand():
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            dist.barrier()

    def destroys():
        dist.new_group([0, 1])
        dist.destroy_process_group()
        assert not dist.is_initialized()

    before = set(threading.enumerate())
    with assert_raises(SimulationError, problem="did not end"):
        _default(endless, timeout_s=0.2)
    for fn in (interrupted, stopped_by_hand):
        with pytest.raises(KeyboardInterrupt):
            _default(fn)
    _default(destroys)
    wait_for(lambda: set(threading.enumerate()) <= before)  # ranks that were told to stop take a moment


def test_the_process_keeps_its_own_default_group(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert _default(lambda: (dist.get_rank(), dist.get_world_size()), 3) == [(0, 3), (1, 3), (2, 3)]
        assert dist.group.WORLD is own
        total = torch.ones(1)
        dist.all_reduce(total)
        assert functional.all_reduce(total, "sum", own).item() == 1
        assert simulate(lambda ctx: ctx.world_size, 2) == [2, 2]
    finally:
        dist.destroy_process_group()


def test_a_thread_that_is_no_rank_sees_the_process():
    def rank():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
        thread.start()
        thread.join()
        return dist.is_initialized(), seen

    assert _default(rank, 2) == [(True, [False])] * 2


def test_simulations_inside_of_ranks():
    def inner():
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def outer():
        found = _default(inner, 3)
        dist.barrier()
        return dist.get_rank(), dist.get_world_size(), found

    assert _default(outer, 2) == [(rank, 2, [3.0] * 3) for rank in range(2)]


def test_simulations_from_several_threads_at_once():
    found, failures = {}, []

    def rank():
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for _ in range(20):
            total = torch.ones(())
            dist.all_reduce(total, group=mesh.get_group())
        return total.item(), dist.get_rank()

    def run(size):
        try:
            found[size] = [_default(rank, size) for _ in range(5)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(size,)) for size in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert found == {size: [[(float(size), rank) for rank in range(size)]] * 5 for size in (2, 3, 4)}


def test_a_simulator_runs_both_kinds():
    with Simulator() as simulator:
        for default_group in (False, True, False, True):
            got = simulator.run_groups(lambda group: dist.is_initialized(), 2, default_group=default_group)
            assert got == [default_group] * 2


def test_a_rank_that_opens_a_real_default_group_is_told(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        with assert_raises(SimulationError, problem="opened or closed the default group", fix="default_group=True"):
            simulate_groups(lambda group: dist.init_device_mesh("cpu", (1,)), 1)
    finally:
        dist.destroy_process_group()
    assert simulate_groups(lambda group: dist.init_device_mesh("cpu", (1,)).size(), 1, default_group=True) == [1]


@pytest.mark.parametrize("call", [dist.get_rank, lambda: dist.init_device_mesh("cpu", (2,)), dist.barrier])
def test_without_a_default_group_the_error_says_how_to_get_one(call):
    with pytest.raises(ValueError, match=r"default process group|RANK|Default process group") as caught:
        simulate_groups(lambda group: call(), 2)
    assert "default_group=True" in "".join(caught.value.__notes__)
