# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and wrong calls of replica groups, in one process."""

from __future__ import annotations

import socket

import msgspec
import pytest
import torch
from catching import assert_raises
from processes import patience
from torch import nn

import accel
from accel.testing import simulate

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
torchft = pytest.importorskip("accel.engines.torchft")


def test_a_model_of_another_shape_is_refused_and_stays() -> None:
    from accel.engines.torchft._step import capture, restore

    state = accel.train_state(accel.single("cpu"))
    taken = capture({"model": nn.Linear(4, 1)}, state)
    wide, narrow = nn.Linear(4, 3), nn.Linear(4, 1).double()
    before = wide.bias.detach().clone()
    with assert_raises(accel.errors.ConfigError, expected=r"model\.weight \[1, 4\] ", got=r"model\.weight \[3, 4\]"):
        restore({"model": wide}, taken)
    assert torch.equal(wide.bias, before)
    with assert_raises(accel.errors.ConfigError, got=r"model\.bias \[1\] torch\.float64"):
        restore({"model": narrow}, taken)


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    _ = pytest.importorskip("torchft")
    with (
        accel.session({}, device="cpu") as ctx,
        assert_raises(accel.errors.ConfigError, got="expected http://host:port"),
        torchft.replica(ctx, lighthouse=address, name="a"),
    ):
        pass


def test_a_host_without_an_address_is_told_at_once() -> None:
    _ = pytest.importorskip("torchft")
    with socket.create_server(("127.0.0.1", 0)) as listener, accel.session({}, device="cpu") as ctx:
        lighthouse = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            assert_raises(
                accel.errors.LaunchError,
                problem="has no address",
                got=r"'no-such-host\.invalid'",
                fix="Pass a hostname=",
            ),
            torchft.replica(ctx, lighthouse=lighthouse, name="a", hostname="no-such-host.invalid"),
        ):
            pass


def test_a_state_that_did_not_take_up_the_turn_is_refused() -> None:
    ctx = accel.single("cpu")
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2))))
    state, optimizer = accel.train_state(ctx), torch.optim.SGD(nn.Linear(2, 1).parameters())
    ahead = msgspec.structs.replace(state, accum=msgspec.structs.replace(state.accum, updates=20))
    turn = torchft.Turn(step=20, groups=2, index=1, healed=True, state=ahead, begun_s=0.0)
    group = torchft.ReplicaGroup(ctx, 1, 1.0)
    with assert_raises(
        accel.errors.StepError, expected="after 20 steps", got="0 steps", where="next_batch", fix=r"state = turn\.state"
    ):
        torchft.next_batch(group, loader, turn, state)
    with assert_raises(accel.errors.StepError, expected="after 20 steps", where=r"torchft\.optimizer_step"):
        torchft.optimizer_step(group, turn, optimizer, state)


def test_fewer_groups_than_a_group_asks_for_make_no_step() -> None:
    _ = pytest.importorskip("torchft")
    model = nn.Linear(2, 1)
    with (
        accel.session({}, device="cpu") as ctx,
        torchft.lighthouse(min_replicas=1, join_timeout_s=1) as lighthouse,
        torchft.replica(ctx, lighthouse=lighthouse, name="a", min_replicas=2, quorum_timeout_s=patience(0.6)) as group,
        assert_raises(accel.errors.PeerError, expected="min_replicas=2 groups", got="1"),
    ):
        torchft.begin_step(group, accel.train_state(ctx), {"model": model})


def test_a_sharded_model_is_refused_at_the_first_step() -> None:
    def begin(ctx: accel.DistContext) -> None:
        model = accel.prepare(accel.replace(ctx, strategy="fsdp"), nn.Linear(2, 2))
        group = torchft.ReplicaGroup(ctx, 1, 1.0)
        with assert_raises(
            accel.errors.ConfigError, problem="shard their model", got="2 sharded tensors, the first model"
        ):
            torchft.begin_step(group, accel.train_state(ctx), {"model": model})

    _ = simulate(begin, 2, default_group=True)
