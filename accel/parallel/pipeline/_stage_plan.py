# SPDX-License-Identifier: Apache-2.0
"""`stage_plan`: modules of each pipeline stage, as plain paths; and a check of paths that a user names. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from accel.errors import ConfigError, PrepareError, did_you_mean
from accel.parallel._paths import named_modules
from accel.parallel.pipeline._chain import Chain, find_chain

Stages = tuple[tuple[str, ...], ...]


def stage_plan(model: nn.Module, stages: int, *, costs: Mapping[str, float] | None = None) -> Stages:
    """Return the paths of the modules of each pipeline stage. No communication; the model may be on the meta device.

    The repeated blocks of the model are divided so that the costliest stage costs least. What stands before them goes
    to the first stage, what stands behind them to the last. Change the result as you like, and pass it as
    `Plan(stages=...)`.

    Args:
        model: calls its blocks one after another, each with what the one before returned.
        stages: number of stages.
        costs: relative time of modules by path; 1 for a block and 0 for another module that it does not name.

    Returns:
        Paths by stage.

    Raises:
        PrepareError: the model has no list of blocks or several, fewer blocks than stages, or parameters that belong to
            no module of the chain; all of them are listed.
        ConfigError: not a number of stages, or costs that are no numbers from 0, or of other modules.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> accel.stage_plan(model, 2)
        (('0', '1'), ('2',))
    """
    if type(stages) is not int or stages < 1:
        raise ConfigError("not a number of stages", expected="an integer from 1", got=repr(stages), where="stages=")
    chain = find_chain(model)
    weights = _costs(chain, costs or {})
    if len(chain.blocks) < stages:
        raise PrepareError(
            "fewer blocks than stages",
            expected=f"at least {stages}",
            got=f"{len(chain.blocks)}, in {chain.blocks[0].rpartition('.')[0] or 'the model'}",
            where="stage_plan",
            fix="Take fewer ranks along pp or fewer stages_per_rank.",
        )
    block_costs = [weights[path] for path in chain.blocks]
    block_costs[0] += sum(weights[path] for path in chain.before)
    block_costs[-1] += sum(weights[path] for path in chain.behind)
    ends = divide(block_costs, stages)
    begins = (0, *ends[:-1])
    found = [list(chain.blocks[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    found[0] = [*chain.before, *found[0]]
    found[-1] += chain.behind
    plan = tuple(map(tuple, found))
    check_stages(model, plan, "stage_plan")
    return plan


def divide(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the ends of contiguous parts of a list so that the costliest part costs least; no part is empty.

    Of equally good divisions, earlier parts are the longer ones.

    Args:
        costs: from 0.
        parts: at most as many as there are costs.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: highest cost of a part, and sum of squares, of the first n costs in the parts so far
    best: list[tuple[float, float]] = [(sums[n], sums[n] ** 2) if n else (math.inf, math.inf) for n in range(len(sums))]
    ends: list[list[int]] = []
    for part in range(1, parts):
        chosen = [0] * len(sums)
        following = [(math.inf, math.inf)] * len(sums)
        for n in range(part + 1, len(sums)):
            for begin in range(part, n):
                own = sums[n] - sums[begin]
                found = (max(best[begin][0], own), best[begin][1] + own**2)
                if found <= following[n]:
                    following[n] = found
                    chosen[n] = begin
        best = following
        ends.append(chosen)
    cuts = [len(costs)]
    for chosen in reversed(ends):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts))


def check_stages(model: nn.Module, stages: Sequence[Sequence[str]], where: str) -> None:
    """Raise unless stages divide a model: each parameter is in a module of one stage.

    Args:
        model: the whole one.
        stages: paths by stage.
        where: source of the stages, for errors.

    Raises:
        PrepareError: paths that are no modules, in two stages or within another; a stage without modules; parameters
            in no stage. All of them are listed.
    """
    problems: list[str] = []
    known = [name for name, _ in named_modules(model, every_path=True) if name]
    owner: dict[str, int] = {}
    for at, stage in enumerate(stages):
        if not stage:
            problems.append(f"stage {at} has no module")
        for path in stage:
            if path not in known:
                problems.append(f"{path!r} is no module of the model. {did_you_mean(path, known)}".rstrip())
            elif path in owner:
                problems.append(f"{path} is in stage {owner[path]} and in stage {at}")
            owner.setdefault(path, at)
    for path in owner:
        around = (outer for outer in owner if path.startswith(f"{outer}."))
        problems += [f"{path} is within {outer}, which stage {owner[outer]} has" for outer in around]
    inside = tuple(f"{path}." for path in owner)
    left = [name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(inside)]
    problems += [f"{name} is in no stage" for name in left]
    if problems:
        raise PrepareError(
            "the stages do not divide the model:" + "".join(f"\n  {each}" for each in problems) + "\n",
            where=where,
            fix="Give each module with parameters to one stage. A parameter of a module around the blocks needs a"
            " module of its own.",
        )


def _costs(chain: Chain, given: Mapping[str, float]) -> dict[str, float]:
    """Cost of each module of the chain."""
    defaults = dict.fromkeys((*chain.before, *chain.behind), 0.0) | dict.fromkeys(chain.blocks, 1.0)
    for path, cost in given.items():
        if path not in defaults:
            raise ConfigError(
                "a cost of something else than a module of the chain",
                expected="a path such as " + chain.blocks[0],
                got=repr(path),
                where="costs=",
                fix=did_you_mean(path, tuple(defaults)),
            )
        if not isinstance(cost, int | float) or not 0 <= cost < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("not a cost", expected="a number from 0", got=repr(cost), where=f"costs=, {path}")
    return defaults | dict(given)
