# SPDX-License-Identifier: Apache-2.0
"""All ranks find the same batch size, each attempt begins afresh, and nothing is remembered."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel import AccelError
from accel.errors import CollectiveMismatch, ConfigError, OutOfMemoryError, PeerError
from accel.memory import is_out_of_memory

relaxed = settings(deadline=None, max_examples=share(0.8))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """What was there before these tests is not looked through at each attempt."""
    gc.freeze()
    yield
    gc.unfreeze()


def _allocate_too_much(kind: str) -> None:
    if kind == "torch":
        torch.empty(2**50, dtype=torch.uint8)
    elif kind == "python":
        bytearray(2**60)
    else:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@relaxed
@given(
    limits=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    start=st.integers(1, 128),
    kind=st.sampled_from(["torch", "python", "cuda"]),
    talks=st.integers(0, 2),
    seed=st.none() | st.integers(0, 99),
)
def test_ranks_with_different_limits_end_with_the_largest_size_that_fits_all(ranks, limits, start, kind, talks, seed):
    """Accelerate decides on each rank alone, so ranks go on with different sizes and hang."""
    expected, tried = start, [start]
    while expected > min(limits):
        expected //= 2
        tried.append(expected)

    def rank(ctx):
        sizes, drawn = [], []

        def train(size):
            sizes.append(size)
            drawn.append((random.random(), torch.rand(()).item()))
            for _ in range(talks):
                accel.reduce(ctx, torch.ones(3))
            if size > limits[ctx.rank]:
                _allocate_too_much(kind)
            accel.wait_for_everyone(ctx)
            return size, ctx.rank

        found = [accel.find_executable_batch_size(ctx, train, start) for _ in range(2)]
        return found, sizes, len(set(drawn))

    for at, (found, sizes, streams) in enumerate(ranks.run(rank, len(limits), seed=seed)):
        assert found == [(expected, at)] * 2
        assert sizes == tried * 2
        assert streams <= 2  # one for each search


def test_no_size_that_fits_is_an_error_on_every_rank_that_names_one(ranks):
    def rank(ctx):
        def train(size):
            if ctx.rank == 1:
                _allocate_too_much("cuda")

        with assert_raises(OutOfMemoryError, got="at 4: rank 1: OutOfMemoryError: CUDA out of memory") as caught:
            accel.find_executable_batch_size(ctx, train, 16, least=3)
        return str(caught.value)

    assert len(set(ranks.run(rank, 3))) == 1


def test_memory_of_a_failed_attempt_is_free_when_the_next_begins():
    alive: list[weakref.ref[torch.Tensor]] = []

    def train(size):
        assert not [ref for ref in alive if ref() is not None]
        model = nn.Linear(64, 64)
        alive.append(weakref.ref(model.weight))
        model.itself = [model]  # a cycle, as a closure or a hook makes one
        if size > 2:
            _allocate_too_much("torch")
        return size

    assert accel.find_executable_batch_size(accel.single(), train, 16) == 2
    assert len(alive) == 4


@pytest.mark.parametrize("part", [False, True])
def test_ranks_that_share_a_process_collect_once_an_attempt_after_all_have_left_it(monkeypatch, ranks, part):
    alive: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    collected: list[int] = []

    def free(ctx):
        collected.append(ctx.rank)
        collect(ctx)

    def rank(ctx):
        if part:  # a group whose calls no alarm ends
            ctx = accel.from_group(dist.new_group([0, 1] if ctx.rank < 2 else [2]), device="cpu")

        def train(size):
            assert not [ref for refs in alive.values() for ref in refs if ref() is not None and not part]
            accel.wait_for_everyone(ctx)
            model = nn.Linear(64, 64)
            alive.setdefault(ctx.rank, []).append(weakref.ref(model.weight))
            model.itself = [model]
            accel.wait_for_everyone(ctx)
            if size > 2 and ctx.rank == ctx.world_size - 1:
                _allocate_too_much("torch")
            accel.wait_for_everyone(ctx)
            return size

        return accel.find_executable_batch_size(ctx, train, 16)

    collect = accel.memory.free_memory
    monkeypatch.setattr(accel.memory, "free_memory", free)
    assert ranks.run(rank, 3, default_group=part) == [2, 2, 2]
    assert collected == [0] * (6 if part else 3)


def test_an_attempt_leaves_no_trace_in_the_run_that_follows():
    def train(size):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        out = model(torch.ones(size, 4))
        if size > 2:
            _allocate_too_much("python")
        return out

    torch.manual_seed(0)
    searched = accel.find_executable_batch_size(accel.single(), train, 8)
    torch.manual_seed(0)
    assert torch.equal(searched, train(2))


def test_the_steps_are_the_callers():
    def train(size):
        if size > 5:
            _allocate_too_much("python")
        return size

    ctx = accel.single()
    assert accel.find_executable_batch_size(ctx, train, 100, shrink=lambda size: int(size * 0.9)) == 5
    assert accel.find_executable_batch_size(ctx, train, 8, shrink=lambda size: size - 1) == 5


def bug_on_rank_1(ctx):
    """Expect a bug of rank 1: as it is there, as another rank's elsewhere."""
    return pytest.raises(KeyError, match="a bug") if ctx.rank == 1 else assert_raises(PeerError, problem="a bug")


def test_another_error_is_raised_as_it_was_and_told_to_the_others(ranks):
    def rank(ctx, talks):
        def train(size):
            if ctx.rank == 1:
                raise KeyError("a bug")
            if talks:
                accel.reduce(ctx, torch.ones(3))

        with bug_on_rank_1(ctx):
            accel.find_executable_batch_size(ctx, train, 4)

    for talks in (False, True):
        ranks.run(lambda ctx, talks=talks: rank(ctx, talks), 3)


def test_an_error_within_a_search_within_a_search_is_raised_on_all_ranks(ranks):
    def rank(ctx):
        def inner(size):
            if ctx.rank == 1:
                raise KeyError("a bug")

        with bug_on_rank_1(ctx):
            accel.find_executable_batch_size(ctx, lambda size: accel.find_executable_batch_size(ctx, inner, size), 4)
        accel.wait_for_everyone(ctx)

    ranks.run(rank, 2)


def test_what_a_function_puts_around_the_error_of_another_rank_does_not_end_the_search(ranks):
    def rank(ctx):
        sizes = []

        def train(size):
            sizes.append(size)
            try:
                if ctx.rank == 1 and size > 8:
                    _allocate_too_much("cuda")
                accel.reduce(ctx, torch.ones(2))
            except Exception as error:
                raise RuntimeError("the step failed") from error
            return size

        return accel.find_executable_batch_size(ctx, train, 64), sizes

    assert ranks.run(rank, 2) == [(8, [64, 32, 16, 8])] * 2


@pytest.mark.parametrize(
    ("start", "options", "kind"),
    [
        (lambda rank: 4 * rank, lambda rank: {}, ConfigError),
        (lambda rank: 8, lambda rank: {"least": 1 + 7 * rank}, OutOfMemoryError),
        (lambda rank: 8, lambda rank: {"shrink": lambda size: size // (2 * rank)}, PeerError),
        (lambda rank: 8, lambda rank: {"shrink": lambda size: size - 1 - rank}, CollectiveMismatch),
    ],
)
def test_what_one_rank_cannot_choose_is_an_error_on_all_of_them(ranks, start, options, kind):
    def rank(ctx):
        with pytest.raises(kind) as caught:
            accel.find_executable_batch_size(
                ctx, lambda size: _allocate_too_much("cuda"), start(ctx.rank), **options(ctx.rank)
            )
        accel.wait_for_everyone(ctx)
        return str(caught.value)

    assert len(set(ranks.run(rank, 2))) == 1


def test_an_error_that_all_ranks_raise_alike_stays_what_it_was(ranks):
    def rank(ctx):
        with pytest.raises(CollectiveMismatch):
            accel.find_executable_batch_size(ctx, lambda size: accel.reduce(ctx, torch.ones(1 + ctx.rank)), 4)

    ranks.run(rank, 2)


def test_ranks_must_start_alike(ranks):
    def rank(ctx):
        with assert_raises(CollectiveMismatch, expected="batch size 4", got="batch size 5"):
            accel.find_executable_batch_size(ctx, lambda size: size, 4 + ctx.rank)

    ranks.run(rank, 2)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("XPU out of memory, please use `empty_cache`", "and another argument"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Error loading program"), True),
        (PeerError("MemoryError: "), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_says_that_memory_ran_out_is_recognised(error, is_one):
    assert is_out_of_memory(error) == is_one
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) == is_one


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"starting_batch_size": 0}, {"expected": "an integer from 1", "got": "^0$", "where": "starting_batch_size="}),
        ({"starting_batch_size": 8.0}, {"where": "starting_batch_size="}),
        ({"starting_batch_size": 8, "least": 0}, {"where": "least="}),
        (
            {"starting_batch_size": 2, "least": 4},
            {"expected": "at least 4", "got": "^2$", "where": "starting_batch_size="},
        ),
        (
            {"starting_batch_size": 8, "shrink": lambda size: size},
            {"expected": "below 8", "got": "^8$", "where": "shrink="},
        ),
        ({"starting_batch_size": 8, "shrink": lambda size: size / 2}, {"got": "4.0", "where": "shrink="}),
    ],
)
def test_what_is_no_search_is_refused(options, fields):
    with assert_raises(ConfigError, **fields):
        accel.find_executable_batch_size(accel.single(), lambda size: _allocate_too_much("python"), **options)


def test_a_closed_context_is_refused():
    with accel.session({}, device="cpu") as ctx:
        pass
    with assert_raises(AccelError, problem="closed"):
        accel.find_executable_batch_size(ctx, lambda size: size, 4)


def test_caches_of_the_device_are_given_back(monkeypatch):
    class Fake:
        emptied = 0

        @classmethod
        def empty_cache(cls):
            cls.emptied += 1

    monkeypatch.setattr("torch.get_device_module", lambda device: Fake)
    accel.free_memory(accel.single())
    assert Fake.emptied == 0
    object.__setattr__(ctx := accel.single(), "device", torch.device("cuda", 0))
    accel.free_memory(ctx)
    assert Fake.emptied == 1
