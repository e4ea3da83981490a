# SPDX-License-Identifier: Apache-2.0
"""`network=` refuses what the real backend refuses; `test_sim_gloo.py` holds gloo's table against gloo itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

import accel
from accel.errors import ConfigError
from accel.testing import SimulationError, simulate, simulate_groups

FLOAT, WHOLE, FLOAT8 = torch.float32, torch.int64, torch.float8_e4m3fn


def _all_reduce(dtype, op=dist.ReduceOp.SUM):
    return lambda group: dist.all_reduce(torch.ones(4).to(dtype), op, group)


def _broadcast(dtype):
    return lambda group: dist.broadcast(torch.ones(4).to(dtype), group=group, group_src=0)


def _message(dtype=FLOAT, *, tag=0, any_rank=False, columns=False):
    def rank(group):
        tensor = (torch.ones(4, 2)[:, 0] if columns else torch.ones(4)).to(dtype)
        other = 1 - group.rank()
        sending = dist.isend(tensor, group=group, group_dst=other, tag=tag)
        dist.irecv(tensor.clone(), group=group, tag=tag, group_src=None if any_rank else other).wait()
        sending.wait()

    return rank


CASES = [
    # call, refused by gloo, refused by nccl, refused without a network
    (_all_reduce(FLOAT), None, None, None),
    (_all_reduce(torch.int16), {"problem": "int16"}, {"problem": "int16"}, None),
    (_all_reduce(torch.uint16), {"problem": "uint16"}, {"problem": "uint16"}, {"problem": "cannot be computed"}),
    (_all_reduce(FLOAT8), {"problem": "float8"}, {"problem": "float8"}, {"problem": "cannot be computed"}),
    (_all_reduce(torch.complex64), None, None, None),
    (_all_reduce(WHOLE, dist.ReduceOp.AVG), {"problem": "AVG of torch.int64"}, None, {"problem": "AVG of torch.int64"}),
    (
        _all_reduce(torch.bool, dist.ReduceOp.AVG),
        {"problem": "AVG of torch.bool"},
        {"problem": "AVG of torch.bool"},
        {"problem": "AVG of torch.bool"},
    ),
    (_all_reduce(WHOLE, dist.ReduceOp.BAND), None, {"problem": "BAND of torch.int64"}, None),
    (
        _all_reduce(FLOAT, dist.ReduceOp.BOR),
        {"problem": "BOR of torch.float32"},
        {"problem": "BOR of torch.float32"},
        {"problem": "BOR of torch.float32"},
    ),
    (
        lambda group: dist.all_reduce(torch.eye(2).to_sparse(), group=group),
        None,
        {"problem": "nccl does not carry sparse"},
        None,
    ),
    (
        lambda group: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX, group),
        {"problem": "gloo does not carry sparse"},
        {"problem": "nccl does not carry sparse"},
        {"problem": "the simulated network does not carry sparse"},
    ),
    (
        lambda group: dist.broadcast(torch.eye(2).to_sparse(), group=group, group_src=0),
        {"problem": "gloo does not carry sparse"},
        {"problem": "nccl does not carry sparse"},
        {"problem": "the simulated network does not carry sparse"},
    ),
    (
        _broadcast(torch.int16),
        {"problem": "does not carry torch.int16"},
        {"problem": "does not carry torch.int16"},
        None,
    ),
    (_broadcast(torch.bool), None, None, None),
    (_broadcast(FLOAT8), {"problem": "does not carry torch.float8_e4m3fn"}, None, None),
    (_message(), None, None, None),
    (_message(torch.int16), None, {"problem": "does not carry torch.int16"}, None),
    (_message(tag=3), None, {"problem": "no tags"}, None),
    (_message(any_rank=True), None, {"problem": "does not receive from any rank"}, None),
    (_message(columns=True), {"problem": "contiguous"}, None, None),
    (
        lambda group: dist.all_reduce(torch.ones(4, 2)[:, 0], group=group),
        {"problem": "contiguous"},
        {"problem": "contiguous"},
        None,
    ),
    (
        lambda group: dist.all_gather([torch.ones(4, 2)[:, 0]] * 2, torch.ones(4), group=group),
        None,
        {"problem": "contiguous"},
        None,
    ),
    (
        lambda group: dist.all_gather([torch.ones(2, 2), torch.ones(2, 2)], torch.ones(4), group=group),
        {"problem": "one shape here", "expected": r"\[4\]", "got": r"\[2, 2\] at index 0"},
        None,
        None,
    ),
]


@pytest.mark.parametrize("network", ["gloo", "nccl", None])
@pytest.mark.parametrize("case", CASES)
def test_what_each_network_refuses(case, network):
    call, *answers = case
    fields = answers[["gloo", "nccl", None].index(network)]
    if fields is None:
        simulate_groups(call, 2, network=network)
    else:
        with assert_raises(SimulationError, **fields) as caught:
            simulate_groups(call, 2, network=network)
        assert network is None or network in str(caught.value)


def test_averages_of_integers_are_rounded_towards_zero_as_by_nccl():
    def rank(group):
        x = torch.tensor([1, -3, 5]) * group.rank()
        dist.all_reduce(x, dist.ReduceOp.AVG, group)
        return x.tolist()

    assert simulate_groups(rank, 2, network="nccl") == [[0, -1, 2]] * 2


@pytest.mark.parametrize("network", ["gloo", "nccl"])
def test_accel_passes_only_what_the_networks_take(network):
    def rank(ctx):
        columns = torch.arange(6.0).view(3, 2)[:, 0]
        gathered = accel.gather(ctx, {"x": columns, "y": torch.ones(1, dtype=torch.int16)})
        return gathered["x"].tolist(), accel.reduce(ctx, columns, "mean").tolist()

    assert simulate(rank, 2, network=network) == [([0.0, 2.0, 4.0] * 2, [0.0, 2.0, 4.0])] * 2


def test_subgroups_keep_the_limits_too():
    def rank(group):
        dist.all_reduce(torch.ones(2, dtype=torch.int16), group=dist.new_group([0, 1]))

    with assert_raises(SimulationError, problem="int16 is refused by gloo"):
        simulate_groups(rank, 2, network="gloo", default_group=True)


def test_an_unknown_network_is_refused():
    with assert_raises(ConfigError, expected="gloo, nccl", fix="Did you mean `nccl`"):
        simulate_groups(_all_reduce(FLOAT), 2, network="ncll")
