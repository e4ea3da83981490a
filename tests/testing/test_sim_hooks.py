# SPDX-License-Identifier: Apache-2.0
"""A torch without a private hook, or with a new one, is refused by its name; plain simulations need none of them."""

from __future__ import annotations

import importlib
import operator
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from torch.distributed import device_mesh, distributed_c10d

from accel.testing import SimulationError, simulate, simulate_groups
from accel.testing._default_group import _HOOKS, check_hooks

HOOKS = [(module, name) for module, names in _HOOKS.items() for name in names]


def _world_sizes(default_group: bool) -> list[int]:
    return simulate(lambda ctx: ctx.world_size, 2, default_group=default_group)


def _owner(module: str, name: str) -> tuple[object, str]:
    """What holds a hook, and under which name."""
    path, _, last = name.rpartition(".")
    holder = sys.modules[module]
    return (operator.attrgetter(path)(holder) if path else holder), last


@pytest.mark.parametrize(("module", "name"), HOOKS)
def test_a_hook_that_is_gone_is_named(monkeypatch, module, name):
    check_hooks()
    monkeypatch.delattr(*_owner(module, name))
    with pytest.raises(SimulationError) as caught:
        _world_sizes(default_group=True)
    text = str(caught.value)
    assert f"expected {module}.{name}, got nothing of that name, in torch {torch.__version__}" in text
    assert "default_group=False" in text
    monkeypatch.undo()
    assert _world_sizes(default_group=True) == [2, 2]


@pytest.mark.parametrize(("module", "name"), HOOKS)
def test_plain_simulations_and_their_import_need_no_hook(monkeypatch, module, name):
    if name not in ("DeviceMesh", "_world"):  # a public name, and one without which torch does nothing
        monkeypatch.delattr(*_owner(module, name))
        importlib.reload(sys.modules["accel.testing._default_group"])
    assert _world_sizes(default_group=False) == [2, 2]


def test_state_of_torch_that_no_hook_leads_to_is_named(monkeypatch):
    world = distributed_c10d._World
    monkeypatch.setattr(world, "news", property(lambda self: distributed_c10d._pg_map), raising=False)
    assert _world_sizes(default_group=True) == [2, 2]
    monkeypatch.setattr(world, "news", property(_reads_a_global), raising=False)
    with assert_raises(SimulationError, got="news in _SHARED.*in torch"):
        _world_sizes(default_group=True)


@pytest.mark.parametrize(
    ("attribute", "value", "fields"),
    [
        ("_thread_id", property(lambda mesh: None, lambda mesh, value: None), {"got": "equal on all ranks"}),
        ("__init__", lambda self, device, mesh: None, {"expected": "meshes that know their thread"}),
    ],
)
def test_a_torch_that_takes_no_notice_of_the_hooks_is_refused(monkeypatch, attribute, value, fields):
    monkeypatch.setattr(device_mesh.DeviceMesh, attribute, value, raising=False)
    with assert_raises(SimulationError, **fields):
        _world_sizes(default_group=True)


def test_hooks_are_put_in_place_all_or_none(monkeypatch):
    """The last one fails; those before it are taken back, and the next run puts all in place again."""
    before = distributed_c10d._world, device_mesh.get_backend, device_mesh.threading, dict(vars(dist.Backend))

    def fails(**names: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr("accel.testing._default_group.SimpleNamespace", fails)
    with pytest.raises(OSError, match="no such luck"):
        _world_sizes(default_group=True)
    after = distributed_c10d._world, device_mesh.get_backend, device_mesh.threading, dict(vars(dist.Backend))
    assert after == before
    assert type(signal.signal).__name__ == "function"
    monkeypatch.undo()
    assert simulate_groups(lambda group: dist.get_rank(), 2, default_group=True) == [0, 1]


_SHARED: dict[str, int] = {}


def _reads_a_global(world):
    return _SHARED
