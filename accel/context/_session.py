# SPDX-License-Identifier: Apache-2.0
"""A context from what a launcher left in the environment, and the scope that closes it; a context of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping
from typing import Any

import torch

from accel.comm import alone, connect
from accel.context._adopt import replace
from accel.context._checks import DEFAULT_TIMEOUT_S, check_accumulation, check_backend, check_strategy, check_timeout
from accel.context._device import choose_device
from accel.context._first import context_first
from accel.context._record import DistContext, build
from accel.env import LaunchEnv, read_env
from accel.formats import Precision, PrecisionName, StrategyName
from accel.formats import precision as precision_of
from accel.topology import fit_mesh


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    precision: Precision | PrecisionName | None = None,
    accumulation: int | None = None,
    strategy: StrategyName | None = None,
    mesh: str | None = None,
    timeout_s: float | None = None,
) -> DistContext:
    """Make a context from a launcher's variables and join the process group. A collective; pair it with `close`.

    An argument beats `ACCEL_*`, which beats the default: the GPU of this local rank with nccl where there is one, else
    the CPU with gloo; fp32; 1 micro-batch a step; ddp; no mesh; 300 s. Prefer `session`, which closes by itself.

    Args:
        environ: variables; `os.environ` when left out.
        device: where to compute, such as "cpu", "cuda" (the GPU of the local rank) or "cuda:1".
        backend: c10d backend for that device.
        precision: a name such as "bf16", or a record: see `accel.Precision`.
        accumulation: how many micro-batches make one optimizer step; the script reads it from the context.
        strategy: how `prepare` spreads a model over the ranks: "ddp" or "fsdp".
        mesh: dimensions of a mesh of all ranks, such as "dp=2,tp=2" or "fsdp=-1,tp=4": the last is that of neighbours,
            -1 stands for all ranks that the others leave. It becomes `ctx.mesh`. No mesh if empty.
        timeout_s: seconds after which a collective that misses a rank fails.

    Returns:
        The context; with one process and no mesh it holds no group.

    Raises:
        EnvError: the variables contradict each other.
        DeviceError: the device is not there.
        ConfigError: an argument is outside its range.
        PeerError: the other ranks could not be reached.
    """
    env = read_env(os.environ if environ is None else environ)
    chosen = choose_device(device, env)
    seconds = check_timeout(_first(timeout_s, env.timeout_s, DEFAULT_TIMEOUT_S))
    checked_precision = precision_of(_first(precision, env.precision, "fp32"))
    micro_batches = check_accumulation(_first(accumulation, env.accumulation, 1))
    spread = check_strategy(_first(strategy, env.strategy, "ddp"))
    carrier = check_backend(backend or env.backend)
    spans = _first(mesh, env.mesh, "")
    _ = fit_mesh(spans, env.world_size, where="mesh=")
    arguments = {"accumulation": accumulation, "precision": precision, "mesh": mesh}
    launched = frozenset(name for name, given in arguments.items() if given is None and getattr(env, name))
    comm = connect(env, chosen, carrier, seconds) if env.world_size > 1 or spans else alone()
    ctx = build(
        env,
        device=chosen,
        precision=checked_precision,
        timeout_s=seconds,
        accumulation=micro_batches,
        strategy=spread,
        comm=comm,
    )
    try:
        return dataclasses.replace(replace(ctx, mesh=spans), launched=launched)
    except BaseException:
        close(ctx)
        raise


@contextlib.contextmanager
def session(
    environ: Mapping[str, str] | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    precision: Precision | PrecisionName | None = None,
    accumulation: int | None = None,
    strategy: StrategyName | None = None,
    mesh: str | None = None,
    timeout_s: float | None = None,
) -> Generator[DistContext]:
    """Give a context from the environment, and close what it opened at the end of the block. A collective.

    Arguments and errors are those of `from_env`. After the block the context refuses to communicate. The end of the
    block waits for a save in the background and raises what went wrong with it; after an exception it only waits.

    Example:
        >>> with accel.session() as ctx:
        ...     ctx.rank, ctx.world_size
        (0, 1)
    """
    ctx = from_env(
        environ,
        device=device,
        backend=backend,
        precision=precision,
        accumulation=accumulation,
        strategy=strategy,
        mesh=mesh,
        timeout_s=timeout_s,
    )
    try:
        yield ctx
        ctx.comm.finish()
    finally:
        close(ctx)


@context_first
def close(ctx: DistContext) -> None:
    """Destroy the process group if this context opened it; adopted groups stay. Closing twice does nothing."""
    ctx.comm.close()


def single(
    device: torch.device | str = "cpu",
    *,
    precision: Precision | PrecisionName = "fp32",
    accumulation: int = 1,
    strategy: StrategyName = "ddp",
) -> DistContext:
    """Make a context of one process without a process group.

    Args:
        device: where to compute.
        precision: a name such as "bf16", or a record: see `accel.Precision`.
        accumulation: how many micro-batches make one optimizer step; the script reads it from the context.
        strategy: how `prepare` spreads a model over the ranks: "ddp" or "fsdp".

    Raises:
        DeviceError: the device is not there.
        ConfigError: an unknown precision or strategy, or no number of micro-batches.
    """
    env = LaunchEnv()
    return build(
        env,
        device=choose_device(device, env),
        precision=precision_of(precision),
        timeout_s=DEFAULT_TIMEOUT_S,
        accumulation=check_accumulation(accumulation),
        strategy=check_strategy(strategy),
        comm=alone(),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
