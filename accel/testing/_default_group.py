# SPDX-License-Identifier: Apache-2.0
"""A default group for each simulated rank. What torch does not promise to keep is used here and in `_modes` alone.

c10d keeps all that it knows about groups in one object, `distributed_c10d._world`, "experimental extension point to
override it". While simulations with default groups run, a substitute leads each rank's thread to separate tables, and
any other thread to the real ones. C++ looks groups up by name, in a registry that can be made each thread's own. And
because caches of DTensor compare meshes without their groups, each rank's meshes get a number that no other rank has,
by the way that torch made for its own test backend named "threaded".
"""

from __future__ import annotations

import inspect
import operator
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from accel.testing._group import BACKEND, SimulatedGroup
from accel.testing._sites import SimulationError

_c10d: Any = distributed_c10d
_cpp: Any = sys.modules.get("torch._C._distributed_c10d")
_mesh: Any = device_mesh
_HOOKS = {
    "torch.distributed.distributed_c10d": (
        "_world", "_World", "_new_process_group_helper", "_register_process_group", "_resolve_process_group",
        "_unregister_all_process_groups", "Backend.register_backend", "Backend._plugins", "Backend.backend_list",
        "Backend.backend_type_map", "Backend.backend_capability",
    ),
    "torch._C._distributed_c10d": ("_set_thread_isolation_mode", "_get_work_registry_size"),
    "torch._C": ("_DisableTorchDispatch", "_clear_DTensor_sharding_propagator_cache"),
    "torch.distributed.device_mesh": ("get_backend", "threading", "DeviceMesh"),
}  # fmt: skip
# What c10d's container of state leads to in globals of its module; each rank needs its own.
_TABLES = {
    "pg_map": dict,
    "pg_names": dict,
    "pg_group_ranks": dict,
    "pg_backend_config": dict,
    "group_count": int,
    "tags_to_pg": dict,
    "pg_to_tag": dict,
}
_CHANGING = threading.Lock()  # held while hooks are put in place or removed

Enter = Callable[[SimulatedGroup], AbstractContextManager[object]]


@contextmanager
def default_groups() -> Generator[Enter]:
    """Let ranks have separate default groups inside of the block, and leave torch as it was after it.

    Yields a scope for each rank's thread and its group. Several simulations may do so at once, or inside each other.
    """
    check_hooks()
    with _CHANGING:
        world = _c10d._world
        hooks = world.hooks if isinstance(world, _StandIn) else _TorchHooks()
        hooks.hold()
    try:
        yield partial(hooks.enter, _cpp.HashStore())
    finally:
        with _CHANGING:
            hooks.release()


def check_hooks() -> None:
    """Raise `SimulationError` for a version of torch that lacks a hook, or keeps state of groups elsewhere."""
    for module, names in _HOOKS.items():
        for name in names:
            try:
                _ = operator.attrgetter(name)(sys.modules[module])
            except (AttributeError, KeyError):
                _refuse(f"{module}.{name}", "nothing of that name")
    for name, value in cast("Mapping[str, object]", vars(_c10d._World)).items():
        if isinstance(value, property) and value.fget is not None and name not in _TABLES:
            used = inspect.getclosurevars(value.fget).globals
            if shared := [known for known, what in used.items() if not callable(what) and not inspect.ismodule(what)]:
                _refuse("no state but what a simulation can replace", f"{name} in {', '.join(shared)}")


def _fill(tables: Any, group: SimulatedGroup, store: object) -> None:
    """Enter the default group into tables that are a rank's own."""
    for name, make in _TABLES.items():
        setattr(tables, name, make())
    name, tag = group.group_name, f"ptd:{group.group_name}"
    tables.default_pg = group
    tables.group_count = 1
    tables.pg_map[group] = (BACKEND, store)
    tables.pg_names[group] = name
    tables.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    tables.pg_backend_config[group] = f"cpu:{BACKEND}"
    tables.tags_to_pg.update({"": [group], tag: [group]})
    tables.pg_to_tag[group] = tag


class _StandIn:
    """Answers for `distributed_c10d._world`, to each thread from its own tables."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: _TorchHooks) -> None:
        object.__setattr__(self, "hooks", hooks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hooks.tables(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.hooks.tables(), name, value)


class _TorchHooks:
    """The changes to torch while at least one simulation needs them."""

    def __init__(self) -> None:
        self._users = 0
        self._threads = threading.local()
        self._real: Any = _c10d._world
        self._mesh_backend: Any = _mesh.get_backend
        self._new_group: Any = _c10d._new_process_group_helper
        # c10d's tables as one rank sees them: own attributes hide the properties that lead to globals
        self._tables = type("_RankTables", (_c10d._World,), dict.fromkeys(_TABLES))
        self._undo = ExitStack()

    def hold(self) -> None:
        """Count a user; the first puts the hooks in place, all or none."""
        if not self._users:
            with ExitStack() as undo:
                self._put(undo)
                self._undo = undo.pop_all()
        self._users += 1

    def release(self) -> None:
        """Count a user off; the last removes the hooks."""
        self._users -= 1
        if not self._users:
            self._undo.close()

    def _put(self, undo: ExitStack) -> None:
        _register_backend()
        undo.callback(_unregister_backend)
        _cpp._set_thread_isolation_mode(True)
        undo.callback(_cpp._set_thread_isolation_mode, False)
        stand_in = SimpleNamespace(**vars(threading) | {"get_ident": self._mesh_owner})
        for place, name, value in (
            (_c10d, "_world", _StandIn(self)),
            (_c10d, "_new_process_group_helper", self._group_of_rank),
            (_mesh, "get_backend", self._backend_for_mesh),
            (_mesh, "threading", stand_in),
        ):
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)

    def tables(self) -> Any:
        """Tables of c10d, as the calling thread sees them."""
        return getattr(self._threads, "tables", self._real)

    @contextmanager
    def enter(self, store: object, group: SimulatedGroup) -> Generator[None]:
        """Give the calling thread, which must end with the run, a separate c10d world; check that torch sees it."""
        self._threads.tables = self._tables()
        self._threads.owner = uuid.uuid4().int
        _fill(self._threads.tables, group, store)
        try:
            _c10d._register_process_group(group.group_name, group)
            self._check(group)
            group.works = WeakSet()
            yield
        finally:
            if self._users:  # else the rank outlived its run, and names are the process's again
                _forget_works(group)
                _c10d._unregister_all_process_groups()
            del self._threads.tables, self._threads.owner

    def _check(self, group: SimulatedGroup) -> None:
        if dist.group.WORLD is not group or (dist.get_rank(), dist.get_world_size()) != (group.rank(), group.size()):
            _refuse("the simulated group as default group", repr(dist.group.WORLD))
        if _c10d._resolve_process_group(group.group_name) is not group:
            _refuse("the simulated group under its name", "another group")
        if group.rank() == 0:
            try:
                owner = _mesh.DeviceMesh("cpu", [0], _init_backend=False)._thread_id
            except (TypeError, AttributeError) as error:
                _refuse("meshes that know their thread", str(error))
            if owner != self._threads.owner:
                _refuse("meshes that are each rank's own", "a mesh that is equal on all ranks")

    def _backend_for_mesh(self, *args: Any, **options: Any) -> Any:
        return "threaded" if hasattr(self._threads, "owner") else self._mesh_backend(*args, **options)

    def _group_of_rank(
        self, size: int, rank: int | None, ranks: list[int], backend: Any, *args: Any, **named: Any
    ) -> Any:
        """Make a rank's group of simulated ranks, whichever backend it names; torch 2.13 asks the default group."""
        own = BACKEND if hasattr(self._threads, "tables") else backend
        return self._new_group(size, rank, ranks, own, *args, **named)

    def _mesh_owner(self) -> int:
        return getattr(self._threads, "owner", None) or threading.get_ident()


def _forget_works(group: SimulatedGroup) -> None:
    """Take what functional collectives left unwaited for, as a rank that is stopped does, out of torch's table."""
    tensors = [tensor for work in list(group.works or ()) for tensor in work.give_up()]
    for tensor in tensors:
        if _cpp._get_work_registry_size():
            torch.ops._c10d_functional.wait_tensor(tensor)


def _register_backend() -> None:
    def create(options: Any, _: object) -> SimulatedGroup:
        return _c10d._world.default_pg.subgroup(options.group_id, options.global_ranks_in_group)

    _c10d.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def _unregister_backend() -> None:
    backends = _c10d.Backend
    delattr(backends, BACKEND.upper())
    backends.backend_list.remove(BACKEND)
    for table in (backends.backend_type_map, backends.backend_capability):
        table.pop(BACKEND)
    backends._plugins.pop(BACKEND.upper())


def _refuse(expected: str, got: str) -> NoReturn:
    raise SimulationError(
        "this version of torch does not let simulated ranks have a default group",
        expected=expected,
        got=f"{got}, in torch {torch.__version__}",
        where="default_group=True",
        fix="Use default_group=False, or a version of accel that was made for this torch.",
    )
