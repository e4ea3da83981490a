# SPDX-License-Identifier: Apache-2.0
"""Keys are values; captured streams go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
import sys

import msgspec
import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.errors import ConfigError, DeviceError
from accel.random import RngState, capture_rng, check_seed, isolated_rng, restore_rng, rng_scope, seed_rng
from accel.seeding import Key

CPU = torch.device("cpu")
names = st.text(max_size=5) | st.integers(-(2**40), 2**40)
relaxed = settings(deadline=None, max_examples=share(1.2))


def _draw() -> tuple[float, ...]:
    return random.random(), random.gauss(), np.random.rand(), np.random.standard_normal(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def _streams_as_before():
    before = capture_rng(CPU)
    yield
    restore_rng(before, CPU)


@relaxed
@given(seed=st.integers(0, 2**63 - 1), first=st.lists(names, max_size=4), second=st.lists(names, max_size=4))
def test_keys_are_equal_exactly_when_their_paths_are(seed, first, second):
    a, b = Key(seed).fold_in(*first), Key(seed).fold_in(*second)
    assert (a == b) == (first == second) == (a.integers(4) == b.integers(4))


@relaxed
@given(seed=st.integers(0, 2**63 - 1), path=st.lists(names, max_size=4), cut=st.integers(0, 4))
def test_folding_in_steps_is_folding_at_once(seed, path, cut):
    assert Key(seed).fold_in(*path[:cut]).fold_in(*path[cut:]) == Key(seed).fold_in(*path)


def test_equal_keys_draw_equal_numbers_whatever_the_type_of_integer():
    for one in (np.int64(1), True, torch.tensor(1)):
        assert Key(0).fold_in("a", one).integers(3) == Key(0).fold_in("a", 1).integers(3)
        assert msgspec.json.encode(Key(0).fold_in("a", one)) == msgspec.json.encode(Key(0).fold_in("a", 1))
    assert Key(0).fold_in("1").integers(3) != Key(0).fold_in(1).integers(3)
    with pytest.raises(TypeError):
        Key(0).fold_in(1.5)


@relaxed
@given(count=st.integers(0, 40), more=st.integers(0, 40), bits=st.integers(1, 64))
def test_integers_are_a_stream_of_so_many_bits(count, more, bits):
    key = Key(3).fold_in("x")
    drawn = key.integers(count + more, bits=bits)
    assert len(drawn) == count + more
    assert all(0 <= each < 2**bits for each in drawn)
    assert drawn[:count] == key.integers(count, bits=bits)


def test_keys_do_not_change_between_versions():
    """Data order and augmentation of a saved run hang on these."""
    assert Key(0).fold_in("data", 1).integers(2, bits=32) == [2398116433, 3069721474]


def test_a_keys_generator_repeats_and_touches_no_global_stream():
    before = torch.get_rng_state()
    first, again = (torch.rand(3, generator=Key(5).fold_in("g").generator()) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, torch.rand(3, generator=Key(5).fold_in("h").generator()))


def test_seeding_sets_every_stream_and_keys_differ():
    seed_rng(Key(1), CPU)
    first = _draw()
    seed_rng(Key(1), CPU)
    assert _draw() == first
    seed_rng(Key(2), CPU)
    assert not set(_draw()) & set(first)


@relaxed
@given(seed=st.integers(0, 2**32), before=st.integers(0, 3), after=st.integers(1, 3))
def test_streams_go_on_from_a_captured_state_through_json(seed, before, after):
    seed_rng(Key(seed), CPU)
    for _ in range(before):
        _draw()
    random.gauss()  # leaves a pending one, which belongs to the state
    np.random.standard_normal()
    state = capture_rng(CPU)
    expected = [_draw() for _ in range(after)]
    seed_rng(Key(seed + 1), CPU)
    restore_rng(msgspec.json.decode(msgspec.json.encode(state), type=RngState), CPU)
    assert [_draw() for _ in range(after)] == expected


def test_capturing_draws_nothing():
    assert capture_rng(CPU) == capture_rng(CPU)


def test_numpy_is_left_out_where_the_program_does_not_use_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    assert capture_rng(CPU).numpy is None


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "0", True, None])
def test_what_is_not_a_seed_is_refused_with_its_place(seed):
    with assert_raises(ConfigError, problem="the seed is not valid", where="here"):
        check_seed(seed, where="here")
    assert check_seed(2**63 - 1, where="here") == 2**63 - 1


def test_what_an_isolated_block_draws_is_not_missed_outside():
    seed_rng(Key(1), CPU)
    plain = _draw(), _draw()
    seed_rng(Key(1), CPU)
    first = _draw()
    with contextlib.suppress(KeyError), isolated_rng():
        seed_rng(Key(2), CPU)
        assert _draw() != plain[1]
        raise KeyError
    assert (first, _draw()) == plain


def test_a_split_gives_unrelated_keys_and_more_of_them_keep_the_first():
    key = Key(0)
    keys = key.split(5)
    assert key.split(3) == keys[:3]
    drawn = [each.integers(1)[0] for each in (*keys, *keys[0].split(5), *(key.fold_in(i) for i in range(5)), key)]
    assert len(set(drawn)) == len(drawn)


@relaxed
@given(seed=st.integers(0, 2**32), drawn=st.integers(0, 3))
def test_a_scope_draws_from_its_key_and_leaves_no_trace(seed, drawn):
    seed_rng(Key(seed), CPU)
    expected = _draw()
    seed_rng(Key(seed), CPU)
    inside = []
    for _ in range(2):
        with rng_scope(Key(7), CPU):
            inside.append([_draw() for _ in range(drawn)])
    assert inside[0] == inside[1]
    with pytest.raises(KeyError), rng_scope(Key(7), CPU):
        raise KeyError(_draw())
    assert _draw() == expected


class _Device:
    """A kind of device with a stream for each number, as torch.cuda has."""

    def __init__(self, count):
        self.states = {i: torch.Generator().manual_seed(i).get_state() for i in range(count)}

    def get_rng_state(self, device):
        return self.states[device.index].clone()

    def set_rng_state(self, state, device):
        self.states[device.index] = state


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs that exist only as streams."""
    fake = _Device(4)
    monkeypatch.setattr("torch.get_device_module", lambda device: fake)
    return fake


def _gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_only_this_ranks_devices_are_captured_and_restored(gpus):
    """Accelerate stores and overwrites the state of every visible GPU on every rank."""
    state = capture_rng(CPU, _gpu(2))
    assert [kind for kind, _ in state.devices] == ["cuda"]
    changed = {i: torch.Generator().manual_seed(100 + i).get_state() for i in range(4)}
    stored, gpus.states = gpus.states[2], dict(changed)
    restore_rng(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RngState), _gpu(1))
    assert torch.equal(gpus.states[1], stored)
    assert all(torch.equal(gpus.states[i], changed[i]) for i in (0, 2, 3))
    with isolated_rng(_gpu(3)):
        gpus.states[3], gpus.states[0] = stored, stored
    assert torch.equal(gpus.states[3], changed[3])
    assert torch.equal(gpus.states[0], stored)


def test_a_state_of_other_devices_is_refused_before_any_stream_is_touched(gpus):
    random.seed(1)
    state, before = capture_rng(_gpu(0), _gpu(1)), random.getstate()
    random.random()
    for devices in ((), (_gpu(0),), (torch.device("xpu", 0), _gpu(0))):
        moved = random.getstate()
        with assert_raises(ConfigError, expected="^cuda, cuda$"):
            restore_rng(state, *devices)
        assert random.getstate() == moved != before


def test_a_device_without_a_stream_is_refused(monkeypatch):
    monkeypatch.setattr("torch.get_device_module", lambda device: object())
    with assert_raises(DeviceError, got="xpu:0"):
        capture_rng(torch.device("xpu", 0))
