# SPDX-License-Identifier: Apache-2.0
"""Containers that a context knows are taken apart by every function that takes it; others are refused with the way."""

from __future__ import annotations

from collections import UserDict, deque

import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import ConfigError, TreeError
from accel.tree import Container

relaxed = settings(deadline=None, max_examples=share(0.8))
KNOWN = [
    Container(UserDict, take_apart=dict, put_together=lambda old, children: type(old)(children)),
    Container(
        deque,
        take_apart=lambda old: dict(enumerate(old)),
        put_together=lambda old, children: deque(children.values(), old.maxlen),
    ),
]


class Encoding(UserDict):
    """A subclass, as tokenizers return."""


@relaxed
@given(size=st.integers(1, 4), rows=st.integers(0, 3))
def test_known_containers_come_back_as_they_were(ranks, size, rows):
    tree = {"batch": Encoding(ids=torch.ones(rows), more=deque([torch.tensor(1.0), None], maxlen=5))}
    calls = {
        accel.gather: rows * size,
        accel.reduce: rows,
        accel.broadcast: rows,
        accel.pad_across_processes: rows,
    }
    for call, expected in calls.items():
        given_ = {"batch": Encoding(ids=torch.ones(rows))} if call is accel.pad_across_processes else tree
        for result in ranks.run(
            lambda ctx, call=call, given_=given_: call(accel.replace(ctx, containers=KNOWN), given_), size
        ):
            assert type(result["batch"]) is Encoding
            assert list(result["batch"]) == list(given_["batch"])
            assert result["batch"]["ids"].shape == (expected,)
            if "more" in given_["batch"]:
                assert type(result["batch"]["more"]) is deque
                assert result["batch"]["more"].maxlen == 5
                assert result["batch"]["more"][1] is None


def test_unknown_ones_are_refused_with_path_and_way_out(ranks):
    def rank(ctx):
        with assert_raises(TreeError, got="deque", where=r"\$\[1\]", fix=r"containers=\[accel\.tree\.Container\(deque"):
            accel.gather(ctx, [torch.ones(1), deque([torch.ones(1)])])
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_a_failing_container_on_one_rank_is_an_error_on_all(ranks):
    def take_apart(old):
        raise KeyError("torn")

    torn = Container(UserDict, take_apart=take_apart, put_together=lambda old, children: old)

    def rank(ctx):
        ctx = accel.replace(ctx, containers=[torn] if ctx.rank == 1 else KNOWN)
        with assert_raises(accel.errors.PeerError, problem="rank 1: KeyError: 'torn'"):
            accel.gather(ctx, UserDict(a=torch.ones(1)))
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_another_class_than_the_old_one_is_refused():
    lossy = Container(UserDict, take_apart=dict, put_together=lambda old, children: children)
    ctx = accel.replace(accel.single(), containers=[lossy])
    with assert_raises(TreeError, expected="UserDict", got="dict", where=r"\$\.x", fix="put_together for UserDict"):
        accel.gather(ctx, {"x": UserDict(a=torch.ones(1))})


def test_containers_are_part_of_the_context_and_of_its_copies():
    ctx = accel.replace(accel.single(), containers=KNOWN)
    assert ctx.containers == tuple(KNOWN)
    assert accel.replace(ctx, precision="bf16").containers == tuple(KNOWN)
    assert ctx != accel.single()
    assert hash(ctx) != hash(accel.single())
    assert accel.replace(ctx, containers=()) == accel.single()
    with assert_raises(ConfigError, problem="the value does not describe a container", got="UserDict"):
        accel.replace(ctx, containers=[UserDict])
