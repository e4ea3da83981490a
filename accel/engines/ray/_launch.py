# SPDX-License-Identifier: Apache-2.0
"""`launch` on a Ray cluster: one actor a rank, the launcher's supervision, and what the actors report."""

from __future__ import annotations

import importlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, TypeVar, get_args

import msgspec

from accel.config import LaunchConfig
from accel.errors import AccelError, ConfigError, LaunchError
from accel.errors._checks import check_arguments, check_choice, import_extra
from accel.launching._function import launch_placed
from accel.launching._launch import PlacedRank, RankNews, RankPosition
from accel.launching.local._children import Children, Relay, open_logs, start_relay, write_all
from accel.launching.local._launch_plan import LaunchPlan
from accel.launching.reports._failure import Failure, FailureRecord, read_failure
from accel.terminal import show_limit

_LOOK_S = 0.2
_SIGNAL_S = 5.0
_LOST = 1  # status of a rank after the loss of its actor


class RayChildren(Children):
    """Ranks in actors; a thread asks these for news.

    Args:
        ray: the package.
        actors: holder of each rank.
        hosts: address of each.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], hosts: Sequence[str]) -> None:
        super().__init__()
        self._ray = ray
        self._actors = actors
        self._hosts = hosts
        self._status: dict[int, int | None] = dict.fromkeys(range(len(actors)))
        self._seen_s: dict[int, float] = {}
        self._plan: LaunchPlan | None = None
        self._pipes: dict[int, tuple[IO[bytes], IO[bytes]]] = {}

    def open(self, positions: Sequence[RankPosition], config: LaunchConfig, call: bytes) -> None:
        """Start the process of each rank."""
        ray = self._ray
        starts = [
            actor.start.remote(position, config, call) for actor, position in zip(self._actors, positions, strict=True)
        ]
        for rank, start in enumerate(starts):
            try:
                ray.get(start)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, AccelError):
                    raise cause from error
                raise LaunchError(
                    f"rank {rank} of {len(starts)} does not start",
                    got=_first_line(error),
                    where=self._hosts[rank],
                    fix="Let every host of the cluster have this Python, accel and the modules of the function.",
                ) from error

    def start(self, plan: LaunchPlan) -> Relay | None:
        self._plan = plan
        ends: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        for process in plan.processes:
            out, to_out = os.pipe()
            err, to_err = os.pipe()
            ends[process.rank] = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
            self._pipes[process.rank] = os.fdopen(to_out, "wb", 0), os.fdopen(to_err, "wb", 0)
        relay = start_relay(plan, open_logs(plan), ends)
        threading.Thread(target=self._watch, name="accel-ray-watch", daemon=True).start()
        return relay

    def statuses(self) -> dict[int, int | None]:
        return dict(self._status)

    def failures(self) -> list[Failure]:
        return [
            read_failure(rank, status, self._record(rank), self._seen_s[rank])
            for rank, status in self._status.items()
            if status
        ]

    def recorded(self) -> list[Failure]:
        return []  # records come with the end of a rank

    def signal(self, number: int) -> None:
        self._send(number, self.running(), group=False)

    def signal_rank(self, rank: int, number: int) -> None:
        self._send(number, [rank], group=False)

    def records(self) -> dict[int, str]:
        return {}  # no rank writes where this process could read

    def signal_groups(self, number: int) -> bool:
        """Send a signal to each rank and the processes it has started; return whether a rank runs."""
        if number:
            self._send(number, list(self._status), group=True)
        return bool(self.running())

    def _send(self, number: int, ranks: Sequence[int], *, group: bool) -> None:
        ray = self._ray
        sent = [self._actors[rank].signal.remote(int(number), group=group) for rank in ranks]
        _ = ray.wait(sent, num_returns=len(sent), timeout=_SIGNAL_S) if sent else None

    def _record(self, rank: int) -> str:
        assert self._plan is not None
        return self._plan.processes[rank].record

    def _watch(self) -> None:
        """Ask the actors for news until all ranks have ended."""
        ray = self._ray
        asked = {self._actors[rank].look.remote(): rank for rank in self._status}
        while asked:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=_LOOK_S)
            for each in ready:
                rank = asked.pop(each)
                try:
                    news: RankNews = ray.get(each)
                except ray.exceptions.RayError as error:
                    self._lose(rank, error)
                    continue
                self._pass_on(rank, news)
                if news.status is None:
                    asked[self._actors[rank].look.remote()] = rank

    def _pass_on(self, rank: int, news: RankNews) -> None:
        for pipe, data in zip(self._pipes[rank], (news.out, news.err), strict=True):
            with suppress(OSError):  # nobody reads the output any more
                write_all(pipe.fileno(), data)
        if news.status is None:
            return
        folder = Path(self._record(rank)).parent
        for name, data in news.files.items():
            _ = folder.joinpath(Path(name).name).write_bytes(data)
        self._end(rank, news.status)

    def _lose(self, rank: int, error: Exception) -> None:
        """Record that the actor of a rank is gone, and the rank with it."""
        kind = type(error)
        lost = FailureRecord(
            rank=rank,
            host=self._hosts[rank],
            exception=f"ray.exceptions.{kind.__qualname__}",
            message=f"the actor of rank {rank} on {self._hosts[rank]} is gone, and the rank with it",
            location="",
            traceback=f"{error}\n",
            time_s=time.time(),
        )
        _ = Path(self._record(rank)).write_bytes(msgspec.json.encode(lost))
        self._end(rank, _LOST)

    def _end(self, rank: int, status: int) -> None:
        for pipe in self._pipes[rank]:
            pipe.close()
        self._seen_s[rank] = time.time()
        self._status[rank] = status
        os.kill(os.getpid(), signal.SIGCHLD)  # wakes the supervisor, which waits for the ends of its children


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


T = TypeVar("T")
Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_STEP_S = 0.25
_END_S = 10.0
_NONE: Mapping[str, float] = MappingProxyType({})


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    nproc: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    resources: Mapping[str, float] = _NONE,
    placement: Placement = "PACK",
    timeout_s: float = 60.0,
    config: LaunchConfig | None = None,
) -> list[T]:
    """Run `fn(ctx, *args)` on ranks that Ray places on its cluster, and return their values.

    This process must be connected: `ray.init()` first. Each rank is a fresh interpreter with a context from
    `session()`, held by an actor; the rank ends with its actor, and all ranks when one fails. Output of the ranks
    appears here, with their rank in front. SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 of this process reach all ranks.

    Args:
        fn: called on every rank with its context first. Hosts must have accel and the modules of the function.
        args: further arguments, a copy for each rank.
        nproc: number of ranks.
        cpus: CPU cores of each rank.
        gpus: GPUs of each rank, 0 or 1; ranks without one compute on the CPU, unless `config.device` names another
            device.
        resources: further resources of each rank, by Ray's name.
        placement: distribution over hosts, as Ray calls it. Each host used must hold equally many ranks.
        timeout_s: seconds to wait for these resources.
        config: settings of the launch; None for the settings of the `ACCEL_*` variables.

    Returns:
        A copy of each rank's value, in rank order; tensors should be on the CPU.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and traceback.
        LaunchError: no connection to a cluster, too few resources within `timeout_s`, hosts with unequal numbers of
            ranks, or a rank or its actor was killed.
        MissingExtraError: Ray is not installed.
        ConfigError: an argument outside its range, or an object that cannot be pickled.
        KeyboardInterrupt: Ctrl-C; the ranks have had their time to leave.
    """
    ray = _require()
    _check(nproc, cpus, gpus, timeout_s, resources)
    check_choice(placement, get_args(Placement), "unknown placement", where="placement=")
    if not ray.is_initialized():
        raise LaunchError(
            "this process is not connected to a Ray cluster",
            where="accel.engines.ray.launch",
            fix='Call ray.init() for this machine, or ray.init(address="auto") for the cluster it belongs to.',
        )
    bundle = {"CPU": cpus, "GPU": gpus, **resources}
    bundle = {name: amount for name, amount in bundle.items() if amount}

    @contextmanager
    def place(settings: LaunchConfig, call: bytes) -> Generator[RayChildren]:
        settings = _with_device(settings, gpus)
        group = ray.util.placement_group([bundle] * nproc, strategy=placement)
        actors: list[Any] = []
        try:
            _await_room(ray, group, bundle, nproc, timeout_s)
            seats = _seats(ray, group, nproc)
            actors += [_actor(ray, group, seat, cpus, gpus, resources) for seat, _ in seats]
            children = RayChildren(ray, actors, [host for _, host in seats])
            children.open(_positions(ray, actors, [host for _, host in seats]), settings, call)
            yield children
        finally:
            _end(ray, actors)
            ray.util.remove_placement_group(group)

    return launch_placed(fn, args, nproc=nproc, config=config, place=place)


def _end(ray: Any, actors: Sequence[Any]) -> None:
    """Let actors end their ranks and remove the files of these, as far as they still can, and kill them."""
    closing = [actor.close.remote() for actor in actors]
    if closing:
        _ = ray.wait(closing, num_returns=len(closing), timeout=_END_S)
    for actor in actors:
        ray.kill(actor)


def _require() -> Any:
    where = "accel.engines.ray"
    _ = import_extra("ray.util.scheduling_strategies", where, extra="ray", where=where)
    return importlib.import_module("ray")


def _check(nproc: int, cpus: float, gpus: float, timeout_s: float, resources: Mapping[str, float]) -> None:
    twice = [name for name in ("CPU", "GPU") if name in resources]
    odd = {name: amount for name, amount in resources.items() if not 0 <= amount < math.inf}
    problems = {
        f"nproc={nproc}, expected at least 1": nproc < 1,
        f"cpus={cpus}, expected 0 or above": not 0 <= cpus < math.inf,
        f"gpus={gpus}, expected 0 or 1": gpus not in (0, 1),
        "cpus=0 and gpus=0, expected some of either": cpus == 0 and gpus == 0,
        f"timeout_s={timeout_s}, expected above 0": not timeout_s > 0,
        f"{', '.join(twice)} in resources, expected cpus= and gpus=": twice,
        f"resources={odd}, expected 0 or above": odd,
    }
    check_arguments(problems, where="accel.engines.ray.launch")


def _with_device(config: LaunchConfig, gpus: float) -> LaunchConfig:
    """Return settings for ranks each of which sees its own GPU only, or may use none."""
    if not config.device.startswith(("auto", "cuda")):
        return config
    if not gpus and config.device != "auto":
        raise ConfigError(
            "ranks on GPUs that Ray has not given them",
            expected="gpus=1",
            got=f"gpus=0 and device={config.device}",
            where="accel.engines.ray.launch",
        )
    return msgspec.structs.replace(config, device="cuda:0" if gpus else "cpu")


def _await_room(ray: Any, group: Any, bundle: Mapping[str, float], nproc: int, timeout_s: float) -> None:
    """Wait until the cluster has reserved the resources; Ray itself would wait forever."""
    deadline = time.monotonic() + timeout_s
    while not group.wait(min(_STEP_S, timeout_s)):
        if time.monotonic() < deadline:
            continue
        total = ray.cluster_resources()
        free = ray.available_resources()
        names = ("CPU", "GPU", *(name for name in bundle if name not in ("CPU", "GPU")))
        held = ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} free" for name in names)
        raise LaunchError(
            f"the Ray cluster has no room for {nproc} ranks within {show_limit(timeout_s)}",
            expected=f"{nproc} times {', '.join(f'{amount:g} {name}' for name, amount in bundle.items())}",
            got=f"{held}, on {len([node for node in ray.nodes() if node['Alive']])} hosts",
            where="accel.engines.ray.launch",
            fix="Ask for less, end what holds the resources, or give a growing cluster a longer timeout_s.",
        )


def _seats(ray: Any, group: Any, nproc: int) -> list[tuple[int, str]]:
    """Return the bundle and host of each rank; ranks of one host follow each other. Hosts must hold equal numbers."""
    nodes: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    order = list(dict.fromkeys(nodes[at] for at in range(nproc)))
    counts = {node: sum(nodes[at] == node for at in range(nproc)) for node in order}
    if len(set(counts.values())) > 1:
        raise LaunchError(
            "hosts hold unequal numbers of ranks",
            expected="equally many on each host",
            got=", ".join(f"{count} on {address[node]}" for node, count in counts.items()),
            where="accel.engines.ray.launch",
            fix='Pass placement="STRICT_PACK" or "STRICT_SPREAD", or another nproc.',
        )
    return sorted(((at, address[nodes[at]]) for at in range(nproc)), key=lambda seat: order.index(nodes[seat[0]]))


def _actor(ray: Any, group: Any, bundle: int, cpus: float, gpus: float, resources: Mapping[str, float]) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    options = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources), "max_restarts": 0}
    return ray.remote(PlacedRank).options(scheduling_strategy=strategy, **options).remote()


def _positions(ray: Any, actors: Sequence[Any], hosts: Sequence[str]) -> list[RankPosition]:
    try:
        port = ray.get(actors[0].free_port.remote())
    except ray.exceptions.RayError as error:
        raise LaunchError(
            "the actor of rank 0 does not start",
            got=next(iter(str(error).splitlines()), type(error).__name__),
            where=hosts[0],
            fix="Let every host of the cluster have this Python, accel and its packages.",
        ) from error
    order = list(dict.fromkeys(hosts))
    count = len(hosts) // len(order)
    return [
        RankPosition(
            rank=rank,
            world_size=len(hosts),
            local_rank=rank % count,
            local_world_size=count,
            node_rank=order.index(host),
            master_addr=hosts[0],
            port=port,
        )
        for rank, host in enumerate(hosts)
    ]
