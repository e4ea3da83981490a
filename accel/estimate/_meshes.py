# SPDX-License-Identifier: Apache-2.0
"""Meshes of a number of ranks, and what a model demands of one; pure."""

from __future__ import annotations

from collections.abc import Iterator

from accel.errors import ConfigError
from accel.estimate._transformer import Transformer
from accel.topology import Axes, Plan


def list_meshes(ranks: int, *, experts: int = 0) -> Iterator[Axes]:
    """Yield each mesh of so many ranks once.

    Where data parallelism is of one way its axis is `dp`; `dp_replicate` and `dp_shard` stand in meshes of both.

    Args:
        ranks: number of ranks.
        experts: number of experts of the model; `ep` takes the sizes that divide it.

    Raises:
        ConfigError: `ranks` below 1.
    """
    if ranks < 1:
        raise ConfigError("not a number of ranks", expected="1 or above", got=str(ranks), where="ranks")
    for pp, data, cp, tp in _products(ranks, 4):
        ways = [{"dp": data}, *({"dp_replicate": r, "dp_shard": s} for r, s in _products(data, 2) if r > 1 and s > 1)]
        for way in ways:
            plain = Axes(pp=pp, cp=cp, tp=tp, **way)
            yield plain
            for ep in divisors(experts)[1:]:
                if plain.expert_ranks % ep == 0:
                    yield Axes(pp=pp, cp=cp, tp=tp, ep=ep, **way)


def divisors(count: int) -> list[int]:
    """Return the divisors of a number, the smallest first; none of 0."""
    small = [each for each in range(1, int(count**0.5) + 1) if count % each == 0]
    return [*small, *(count // each for each in reversed(small) if each * each != count)]


def mesh_problem(axes: Axes, model: Transformer, plan: Plan, *, tokens: int) -> ConfigError | None:
    """Return why a model cannot be spread over a mesh; None if it can.

    Args:
        axes: of the mesh.
        model: sizes of the model.
        plan: options of its spreading.
        tokens: length of a sequence.
    """
    for what, count, name, divisor in _demands(axes, model, plan, tokens):
        if count % divisor:
            wanted = f"{name} that divides {count}" if divisor == getattr(axes, name) else f"a multiple of {divisor}"
            got = f"{name}={getattr(axes, name)}" + ("" if divisor == getattr(axes, name) else f" and {count}")
            return ConfigError(f"{what} cannot be divided along {name}", expected=wanted, got=got)
    if axes.tp > 1 and model.kv_heads % axes.tp and axes.tp % model.kv_heads:
        expected = f"tp that divides {model.kv_heads}, or is a multiple"
        return ConfigError("heads of keys cannot be divided along tp", expected=expected, got=f"tp={axes.tp}")
    stages = axes.pp * plan.stages_per_rank
    if stages > model.layers:
        expected = f"{model.layers} stages at most, one for each layer"
        return ConfigError("a stage would have no layer", expected=expected, got=f"pp={axes.pp}, {stages} stages")
    if axes.tp > 1 and model.experts and axes.ep == 1:
        expected = "ep beside tp, or a mesh without tp"
        return ConfigError("each rank along tp would compute all experts", expected=expected, got=f"tp={axes.tp}")
    if axes.tp > 1 and model.experts and plan.sequence:
        return ConfigError("estimates of shared tokens do not know experts", expected="sequence=False", got="True")
    if axes.ep > 1 and not model.experts:
        return ConfigError("the model has no experts", expected="a mesh without ep", got=f"ep={axes.ep}")
    return None


def _demands(axes: Axes, model: Transformer, plan: Plan, tokens: int) -> Iterator[tuple[str, int, str, int]]:
    """Yield counts that something must divide: a name of theirs, the count, an axis, and the divisor."""
    if axes.tp > 1:
        yield "heads", model.heads, "tp", axes.tp
    if axes.cp > 1:
        yield "the tokens of a sequence", tokens, "cp", 2 * axes.cp
    if axes.cp > 1 and plan.context == "heads":
        yield "heads", model.heads, "cp", axes.tp * axes.cp
        yield "heads of keys", max(model.kv_heads, axes.tp), "cp", axes.tp * axes.cp
    if axes.tp > 1 and plan.sequence:
        yield "the tokens of a sequence", tokens, "tp", axes.tp * (2 * axes.cp if axes.cp > 1 else 1)
    if axes.ep > 1 and model.experts:
        yield "experts", model.experts, "ep", axes.ep


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in _products(number // first, count - 1))
