# SPDX-License-Identifier: Apache-2.0
"""A context from what a launcher left in the environment, and the scope that closes it; a context of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping
from typing import Unpack, cast

import torch

from accel.comm import alone, connect
from accel.config import GroupKeywords, SettingKeywords
from accel.context._adopt import replace
from accel.context._device import choose_device
from accel.context._first import context_first
from accel.context._record import DistContext, build
from accel.context._settings import check_backend, settle
from accel.env import LaunchEnv, read_env
from accel.formats import GROUPED
from accel.topology import fit_axes

_CHECKED = ("accumulation", "precision", "mesh", "plan", "compile")  # by the first step


def from_env(environ: Mapping[str, str] | None = None, **settings: Unpack[SettingKeywords]) -> DistContext:
    """Make a context from a launcher's variables and join the process group. A collective; pair it with `close`.

    An argument beats `ACCEL_*`, which beats the default: the GPU of this local rank with nccl where there is one, else
    the CPU with gloo; fp32; 1 micro-batch a step; ddp; no mesh; 300 s. Prefer `session`, which closes by itself.

    Args:
        environ: variables; `os.environ` when left out.
        settings: any of these.
            device: the device to compute on, such as "cpu", "cuda" (the GPU of the local rank) or "cuda:1".
            precision: a name such as "bf16", or a record: see `accel.Precision`.
            accumulation: number of micro-batches in an optimizer step; the script reads it from the context.
            strategy: "ddp" or "fsdp", the way in which `prepare` spreads a model over the ranks.
            deepspeed: options of the strategy "deepspeed", an `accel.DeepSpeed` or the path of a DeepSpeed JSON.
            plan: an `accel.Plan`, for models that `prepare` gets without one of their own.
            compile: "whole", "repeated" or an `accel.Compile`: what torch compiles of the models that `prepare` takes.
            mesh: axes of a mesh of all ranks, such as "dp=2,tp=2" or "dp=-1,tp=4", in any order; -1 stands for all
                ranks that the others leave. Ranks are numbered as `Axes` says. It becomes `ctx.mesh`. No mesh if empty.
            backend: c10d backend for that device.
            timeout_s: seconds after which a collective that misses a rank fails.

    Returns:
        The context; with one process, no mesh and no engine that needs one it holds no group.

    Raises:
        EnvError: the variables contradict each other.
        DeviceError: the device is not there.
        ConfigError: an argument is outside its range.
        PeerError: the other ranks could not be reached.
    """
    env = read_env(os.environ if environ is None else environ)
    settled = settle(settings, env, SettingKeywords)
    device = choose_device(settings.get("device"), env)
    check_backend(settled.backend, "backend=" if settings.get("backend") else env.sources.get("backend", ""))
    _ = fit_axes(settled.mesh, env.world_size, where="mesh=")
    backend = None if settled.backend == "auto" else settled.backend
    grouped = env.world_size > 1 or settled.mesh or settled.strategy in GROUPED
    comm = connect(env, device, backend, cast(float, settled.timeout_s)) if grouped else alone()
    ctx = build(env, settled, device, comm)
    launched = {name: env.sources[name] for name in _CHECKED if name in env.sources and settings.get(name) is None}
    try:
        return dataclasses.replace(replace(ctx, mesh=settled.mesh), launched=launched)
    except BaseException:
        close(ctx)
        raise


@contextlib.contextmanager
def session(environ: Mapping[str, str] | None = None, **settings: Unpack[SettingKeywords]) -> Generator[DistContext]:
    """Give a context from the environment, and close what it opened at the end of the block. A collective.

    Arguments and errors are those of `from_env`. After the block the context refuses to communicate. The end of the
    block waits for a save in the background and raises what went wrong with it; after an exception it only waits.

    Example:
        >>> with accel.session() as ctx:
        ...     ctx.rank, ctx.world_size
        (0, 1)
    """
    ctx = from_env(environ, **settings)
    try:
        yield ctx
        ctx.comm.finish()
    finally:
        close(ctx)


@context_first
def close(ctx: DistContext) -> None:
    """Destroy the process group if this context opened it; adopted groups stay. Closing twice does nothing."""
    ctx.comm.close()


def single(on: torch.device | str = "cpu", /, **settings: Unpack[GroupKeywords]) -> DistContext:
    """Make a context of one process without a process group.

    Args:
        on: the device to compute on; `device=` says the same.
        settings: as for `from_group`.

    Raises:
        DeviceError: the device is not there.
        ConfigError: a setting is outside its range.
    """
    env = LaunchEnv()
    settled = settle(settings, env)
    return build(env, settled, choose_device(settings.get("device", on), env), alone())
