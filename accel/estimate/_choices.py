# SPDX-License-Identifier: Apache-2.0
"""Meshes for a model, a number of ranks and a memory: those that fit by their time, and why others do not; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from accel.errors import ConfigError
from accel.estimate._cost import StepTime, rank_time, step_time
from accel.estimate._efficiencies import Hosts
from accel.estimate._memory import RankMemory, memory_by_moment, rank_memory
from accel.estimate._model import Tower, Transformer
from accel.estimate._step import EstimatedStep, divides_heads, rank_stages, stage_layers, tower_side
from accel.formats import PrecisionName, StrategyName
from accel.topology import Axes, Plan


def list_meshes(ranks: int, *, experts: int = 0) -> Iterator[Axes]:
    """Yield each mesh of so many ranks once; `ep` takes the sizes that divide `experts`.

    Data parallelism of one kind has the axis `dp`; `dp_replicate` and `dp_shard` appear together.

    Raises:
        ConfigError: a number of ranks below 1.
    """
    if ranks < 1:
        raise ConfigError("the number of ranks is not valid", expected="1 or above", got=str(ranks), where="ranks")
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
    """Return why a model cannot be spread over a mesh, for sequences of `tokens`; None if it can.

    Args:
        axes: the mesh.
        model: sizes of the model.
        plan: options of the spreading.
        tokens: length of a sequence.
    """
    for what, count, name, divisor in _demands(axes, model, plan, tokens):
        if count % divisor:
            wanted = f"{name} that divides {count}" if divisor == getattr(axes, name) else f"a multiple of {divisor}"
            got = f"{name}={getattr(axes, name)}" + ("" if divisor == getattr(axes, name) else f" and {count}")
            return ConfigError(f"{what} cannot be divided along {name}", expected=wanted, got=got)
    if axes.tp > 1 and divides_heads(model) and model.kv_heads % axes.tp and axes.tp % model.kv_heads:
        expected = f"tp that divides {model.kv_heads}, or is a multiple"
        return ConfigError("heads of keys cannot be divided along tp", expected=expected, got=f"tp={axes.tp}")
    if model.tower is not None and (problem := _tower_problem(axes, model, model.tower, plan)):
        return problem
    stages = axes.pp * plan.stages_per_rank
    if stages > model.layers:
        expected = f"{model.layers} stages at most, one for each layer"
        return ConfigError("a stage would have no layer", expected=expected, got=f"pp={axes.pp}, {stages} stages")
    if axes.tp > 1 and model.experts and axes.ep == 1:
        expected = "ep together with tp, or a mesh without tp"
        return ConfigError("each rank along tp would compute all experts", expected=expected, got=f"tp={axes.tp}")
    if axes.tp > 1 and model.experts and plan.sequence:
        return ConfigError("estimates of shared tokens do not know experts", expected="sequence=False", got="True")
    if axes.ep > 1 and not model.experts:
        return ConfigError("the model has no experts", expected="a mesh without ep", got=f"ep={axes.ep}")
    return None


def _tower_problem(axes: Axes, model: Transformer, tower: Tower, plan: Plan) -> ConfigError | None:
    """Why a model with an encoder of images cannot be spread over a mesh."""
    if axes.pp > 1:
        return _stages_problem(axes, model, tower, plan)
    if axes.cp > 1 and model.compared:
        expected = "a mesh without cp"
        return ConfigError("texts that are compared with images are not split", expected=expected, got=f"cp={axes.cp}")
    if axes.tp > 1 and plan.sequence and model.compared:
        return ConfigError("the tokens of two encoders cannot be shared", expected="sequence=False", got="True")
    if tower.divided and tower.blocks.heads % axes.tp:
        expected = f"tp that divides {tower.blocks.heads}"
        return ConfigError("heads of the encoder cannot be divided", expected=expected, got=f"tp={axes.tp}")
    return None


def _stages_problem(axes: Axes, model: Transformer, tower: Tower, plan: Plan) -> ConfigError | None:
    """Why a mesh does not run stages where the first one has the encoder."""
    got = f"pp={axes.pp}"
    if model.compared:
        expected = "a mesh without pp"
        return ConfigError("all texts and images of a batch are compared", expected=expected, got=got)
    if not tower.side:  # a row of pixels for each patch
        expected = "a mesh without pp"
        return ConfigError("images of any size cannot be split into micro-batches", expected=expected, got=got)
    if axes.cp > 1:
        expected = "a mesh without cp"
        return ConfigError("estimates of stages with an encoder do not know cp", expected=expected, got=f"cp={axes.cp}")
    if plan.stages_per_rank > 1 or plan.sequence:
        options = "sequence=False, stages_per_rank=1"
        return ConfigError("estimates of stages with an encoder do not know this", expected=options, got=repr(plan))
    return None


def check_images(model: Transformer, step: EstimatedStep) -> None:
    """Raise `ConfigError` for sequences that their images, or the model's positions, do not fit."""
    tower = model.tower
    if model.compared and step.tokens > model.positions:
        raise ConfigError(
            "texts are longer than the model's positions", expected=f"{model.positions} tokens at most",
            got=str(step.tokens), where="tokens",
        )  # fmt: skip
    if tower is None or not tower.merged:
        return
    side = tower_side(tower, step)
    multiple = tower.patch * math.isqrt(tower.merged)
    if side % multiple and not tower.side:
        raise ConfigError(
            "patches do not fill an image", expected=f"a multiple of {multiple} pixels", got=str(side), where="side"
        )
    if (own := step.images * tower.tokens(side)) > step.tokens:
        expected = f"{own} tokens or more, for {step.images} of {tower.tokens(side)} each"
        raise ConfigError(
            "a sequence has no room for its images", expected=expected, got=str(step.tokens), where="tokens"
        )


def _demands(axes: Axes, model: Transformer, plan: Plan, tokens: int) -> Iterator[tuple[str, int, str, int]]:
    """Yield counts that something must divide: a name of theirs, the count, an axis, and the divisor."""
    if axes.tp > 1 and divides_heads(model):
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training to find a mesh for.

    Attributes:
        ranks: number of ranks.
        memory: bytes that a rank has.
        tokens: length of a sequence.
        batch: sequences of a step, of all ranks; None for one for each rank.
        rows: sequences of a micro-batch.
        precision: as in `accel.formats.precision`.
        optimizer: one of `OPTIMIZERS`.
        compiled: whether `torch.compile` fuses the operators between matmuls.
        hosts: speeds of the machine.
        images: number of images of a sequence, for models with an encoder of them.
        side: side of an image in pixels, for encoders that take images of any size.
        offload, chunks: as for `EstimatedStep`. Copies to the host count no time.
        plan: `logits` and `offload` of the plans to choose among.
    """

    ranks: int
    memory: int
    tokens: int
    batch: int | None = None
    rows: int = 1
    precision: PrecisionName = "bf16"
    optimizer: str = "adamw"
    compiled: bool = False
    hosts: Hosts = Hosts()
    images: int = 1
    side: int = 448
    offload: bool = False
    chunks: int = 1
    plan: Plan = Plan()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh, and the options with which a step on it takes least time, or least memory where it does not fit."""

    axes: Axes  # of the mesh
    step: EstimatedStep  # strategy and choices
    plan: Plan  # options of the spreading
    memory: RankMemory  # of the rank that needs most
    time: StepTime  # of the step


class RankStages(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a rank along pp."""

    stages: Sequence[int]  # indices of the stages
    # First and last block of each stage; the last is before the first where there is none.
    blocks: Sequence[tuple[int, int]]
    memory: RankMemory  # of the rank, when it needs most
    time: StepTime  # of the step on the rank


def stages_of(model: Transformer, choice: Choice, hosts: Hosts) -> Sequence[RankStages]:
    """Return the stages of each rank along pp, with their memory and time; nothing without a pipeline."""
    axes, step, plan = choice.axes, choice.step, choice.plan
    if axes.pp == 1:
        return ()
    layers = stage_layers(model, axes.pp * plan.stages_per_rank, step.balance)
    ends = list(itertools.accumulate(layers))
    found: list[RankStages] = []
    for rank in range(axes.pp):
        own = rank_stages(plan, axes.pp, rank)
        memory = max(memory_by_moment(model, axes, step, plan, rank), key=lambda each: each.total)
        time = rank_time(model, axes, step, plan, hosts, rank)
        blocks = [(ends[at] - layers[at], ends[at] - 1) for at in own]
        found.append(RankStages(stages=own, blocks=blocks, memory=memory, time=time))
    return found


class Refusal(NamedTuple):
    """A mesh that the model or the batch cannot be spread over, and the reason."""

    axes: Axes
    strategy: StrategyName
    problem: ConfigError


class Choices(NamedTuple):
    """Meshes of a job.

    Attributes:
        fitting: meshes that fit, the fastest first; of equally fast ones, fewer axes first.
        too_large: meshes that need more memory, the smallest need first.
        refused: meshes that the model or the batch cannot be divided by.
    """

    fitting: Sequence[Choice]
    too_large: Sequence[Choice]
    refused: Sequence[Refusal]


def choose_meshes(model: Transformer, job: Job) -> Choices:
    """Return the meshes for a job, with the options that serve each best.

    Args:
        model: sizes of the model.
        job: the training.

    Returns:
        Meshes that fit, the fastest first; meshes that need more memory, the smallest need first; and meshes that
        the model cannot be divided by.

    Raises:
        ConfigError: sequences that their images, or the model's positions, do not fit.
    """
    fitting: list[Choice] = []
    too_large: list[Choice] = []
    refused: list[Refusal] = []
    for axes in list_meshes(job.ranks, experts=model.experts):
        # a mesh that names its shards, or has no ranks with equal parameters, leaves no choice
        strategies: Sequence[StrategyName] = (
            ("ddp", "fsdp") if axes.dp_shard == 1 and axes.dp * axes.cp > 1 else ("fsdp",)
        )
        for strategy in strategies:
            found = _choice(model, axes, strategy, job)
            if isinstance(found, ConfigError):
                refused.append(Refusal(axes, strategy, found))
            else:
                (fitting if found.memory.total <= job.memory else too_large).append(found)
    fitting.sort(key=_order)
    too_large.sort(key=lambda each: (each.memory.total, each.time.total))
    return Choices(fitting, too_large, refused)


_OF_A_STEP = [name for name in EstimatedStep.__struct_fields__ if name in Job.__struct_fields__]


def _order(choice: Choice) -> tuple[int, int, int]:
    """Fast meshes first; of those alike by a hundredth, the ones of fewer axes, then of less memory."""
    return math.ceil(math.log(choice.time.total) / math.log(1.01)), len(choice.axes.sizes), choice.memory.total


def _choice(model: Transformer, axes: Axes, strategy: StrategyName, job: Job) -> Choice | ConfigError:
    """Return the best way to use a mesh, or why there is none."""
    shares = axes.dp * axes.dp_replicate * axes.dp_shard
    batch = job.ranks * job.rows if job.batch is None else job.batch
    micro_batches, rest = divmod(batch, shares * job.rows)
    if rest or not micro_batches:
        expected = f"a multiple of {shares * job.rows} sequences"
        return ConfigError(
            "the batch cannot be divided among the data-parallel ranks", expected=expected, got=f"{batch}"
        )
    options = {name: getattr(job, name) for name in _OF_A_STEP}
    base = EstimatedStep(micro_batches=micro_batches, strategy=strategy, **options)
    check_images(model, base)
    problem: ConfigError | None = None
    best: Choice | None = None
    for step, plan in _ways(axes, base, job.plan):
        found = mesh_problem(axes, model, plan, tokens=job.tokens) or _too_few(axes, step, plan)
        if found is None:
            best = _better(best, model, axes, step, plan, job)
        problem = problem or found
    if best is None:
        assert problem is not None  # there is at least one way to look at
        return problem
    for balance in ("blocks", "memory") if axes.pp > 1 else ():
        balanced = msgspec.structs.replace(best.step, balance=balance)
        best = _better(best, model, axes, balanced, best.plan, job)
    return best


def _better(best: Choice | None, model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, job: Job) -> Choice:
    """Return a way to use a mesh, or the best one so far."""
    memory = rank_memory(model, axes, step, plan)
    if best is not None and memory.total > max(job.memory, best.memory.total):
        return best
    time = step_time(model, axes, step, plan, job.hosts)
    way = Choice(axes=axes, step=step, plan=plan, memory=memory, time=time)
    return way if best is None or _rank(way, job.memory) < _rank(best, job.memory) else best


def _rank(choice: Choice, memory: int) -> tuple[float, float]:
    """Fast ones first if they fit, small ones first if they do not."""
    need = choice.memory.total
    return (0.0, choice.time.total) if need <= memory else (1.0, need)


def _ways(axes: Axes, base: EstimatedStep, like: Plan) -> Iterator[tuple[EstimatedStep, Plan]]:
    """Yield the options to try on a mesh."""
    several = base.micro_batches > 1 and axes.pp == 1
    again: list[dict[str, Any]] = [{}, {"recompute": True, "keep": "products"}, {"recompute": True}]
    for options in again:
        for held in (True, False) if several else (True,):
            step = msgspec.structs.replace(base, held=held, **options)
            yield from ((step, plan) for plan in _plans(axes, like))


def _plans(axes: Axes, like: Plan) -> Iterator[Plan]:
    schedules: list[dict[str, Any]] = [{}]
    if axes.pp > 1:
        schedules.append({"schedule": "Interleaved1F1B", "stages_per_rank": 2})
    for options in schedules:
        for sequence in (True, False) if axes.tp > 1 else (False,):
            for context in ("gather", "ring", "heads") if axes.cp > 1 else ("gather",):
                yield msgspec.structs.replace(like, sequence=sequence, context=context, **options)


def _too_few(axes: Axes, step: EstimatedStep, plan: Plan) -> ConfigError | None:
    """Why a schedule cannot run so few micro-batches."""
    stages = axes.pp * plan.stages_per_rank
    if axes.pp == 1 or (step.micro_batches >= stages and step.micro_batches % axes.pp == 0):
        return None
    expected = f"{stages} or more, a multiple of pp={axes.pp}"
    return ConfigError("too few micro-batches for a pipeline", expected=expected, got=str(step.micro_batches))
