# SPDX-License-Identifier: Apache-2.0
"""The chain of a model's blocks, the modules of each stage, and the ranks of stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - torch has no other name

from accel.errors import AccelError, ConfigError, PrepareError
from accel.errors._checks import check_choice, check_count, did_you_mean, with_article
from accel.parallel._blocks import ModuleGroup, block_groups, blocks_of, is_container
from accel.parallel._modules import named_modules
from accel.topology import Balance, divide

_FIX = "Name the modules of each stage: Plan(stages=[[...], [...]])."


class Chain(NamedTuple):
    """Paths of modules in the order in which a model calls them.

    Attributes:
        before: modules in front of the blocks, such as an embedding.
        blocks: modules that follow one another.
        behind: modules behind the blocks, such as a norm and a head.
    """

    before: tuple[str, ...]
    blocks: tuple[str, ...]
    behind: tuple[str, ...]


def find_chain(model: nn.Module) -> Chain:
    """Return the chain of a model: the group of its blocks, or the modules of its outermost list.

    No list of blocks, or several, are a `PrepareError`.
    """
    blocks: list[str] = []
    known: set[int] = set()
    for path, module in _group(model).entries:
        if id(module) not in known:  # a stage has a module in one place
            known.add(id(module))
            blocks.append(path)
    around = tuple(_walk(model, "", blocks))
    first = min(around.index(path) for path in blocks)
    return Chain(around[:first], tuple(blocks), tuple(path for path in around[first:] if path not in blocks))


def _group(model: nn.Module) -> ModuleGroup:
    """The modules that follow one another in a model."""
    groups = block_groups(model)
    blocks = {block.path for block in blocks_of(model)}
    found = [group for group in groups if any(path in blocks for path, _ in group.entries)]
    if len(found) > 1:
        raise PrepareError(
            "the model has several lists of blocks, so their order is unknown",
            expected="one list of repeated blocks, each called with what the one before returned",
            got=", ".join(dict.fromkeys(group.holder or "the model" for group in found)),
            where="stage_plan",
            fix=_FIX,
        )
    lists = [group for group in groups if group.kind == "list" and len(group.entries) > 1]
    if not found and not lists:
        raise PrepareError(
            "the model has no list of blocks to make stages of",
            expected="a ModuleList or Sequential of several modules",
            got=f"{with_article(type(model).__name__)} without one",
            where="stage_plan",
            fix=_FIX,
        )
    return found[0] if found else min(lists, key=lambda group: group.holder.count(".") + bool(group.holder))


def _walk(module: nn.Module, path: str, blocks: Sequence[str]) -> Iterator[str]:
    """Paths in the chain's order; around the blocks, what has a forward is one entry."""
    for key, child in module.named_children():
        here = f"{path}.{key}" if path else key
        if here in blocks:
            yield here
        elif is_container(child) or any(each.startswith(f"{here}.") for each in blocks):
            yield from _walk(child, here, blocks)
        elif _is_link(module, child):
            yield here


def _is_link(parent: nn.Module, child: nn.Module) -> bool:
    """Whether a module outside of the blocks belongs to one place of the chain."""
    # a module without parameters is one if torch has its class, as Dropout; others, such as rotary embeddings, run on
    # every rank
    has_parameters = any(True for _ in child.parameters())
    is_torchs = type(child).__module__.startswith("torch.nn.")
    return has_parameters or is_torchs or isinstance(parent, nn.Sequential)


Stages = tuple[tuple[str, ...], ...]


def plan_blocks(
    model: nn.Module, stages: int, costs: Mapping[str, float] | None = None, balance: Balance = "blocks"
) -> Stages:
    """Return the paths of the modules of each stage, by the repeated blocks; see `stage_plan`. Pure."""
    check_count(stages, "not a number of stages", where="stages=")
    check_choice(balance, get_args(Balance), "unknown balance of stages", where="stage_plan, balance=")
    chain = find_chain(model)
    weights = _costs(chain, costs or {}, _estimated(model, chain, balance))
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


def check_stages(model: nn.Module, stages: Sequence[Sequence[str]], where: str) -> None:
    """Raise `PrepareError` with all problems, unless each parameter of a model is in a module of one stage, and each
    stage has modules."""
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
    twice = _second_places(model)
    within = {name: next((place for place in twice if name.startswith(f"{place}.")), None) for name in left}
    aliases = dict.fromkeys(place for place in within.values() if place is not None)
    problems += [f"{place} is {twice[place]} again, and a stage has a module in one place" for place in aliases]
    problems += [f"{name} is in no stage" for name in left if within[name] is None]
    if problems:
        raise PrepareError(
            "the stages do not divide the model:" + "".join(f"\n  {each}" for each in problems) + "\n",
            where=where,
            fix="Give each module with parameters to one stage. A parameter of a module around the blocks needs a"
            " module of its own."
            + (" So does each place of a module with two; tie their parameters." if aliases else ""),
        )


def _second_places(model: nn.Module) -> dict[str, str]:
    """Return the first path of each module with a further place, by that place."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, module in named_modules(model, every_path=True):
        if first.setdefault(id(module), path) != path:
            found[path] = first[id(module)]
    return found


def _estimated(model: nn.Module, chain: Chain, balance: Balance) -> dict[str, float]:
    """The cost of each module of the chain by a balance."""
    around = (*chain.before, *chain.behind)
    if balance == "blocks":
        return dict.fromkeys(around, 0.0) | dict.fromkeys(chain.blocks, 1.0)
    return {path: _cost(model.get_submodule(path), balance) for path in (*around, *chain.blocks)}


def _cost(module: nn.Module, balance: Balance) -> float:
    if balance == "memory":
        return float(sum(each.numel() * each.element_size() for each in module.parameters()))
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    rows = {id(each) for table in tables for each in table.parameters()}
    return float(sum(each.numel() for each in module.parameters() if each.ndim > 1 and id(each) not in rows))


def _costs(chain: Chain, given: Mapping[str, float], estimated: Mapping[str, float]) -> dict[str, float]:
    """Cost of each module of the chain."""
    defaults = dict(estimated)
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


_ONE_STAGE = ("GPipe", "1F1B")
_IN_A_V = ("ZBVZeroBubble", "DualPipeV")
_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")
SPLIT_BACKWARDS: frozenset[str] = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})


class Layout(NamedTuple):
    """Numbers of a pipeline.

    Attributes:
        schedule: name of torch's schedule.
        ranks: number of ranks along the pipeline.
        stages: number of stages, of all ranks.
        micro_batches: number of micro-batches of a batch.
        is_set: whether the plan says that number, so that one process makes as many.
    """

    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    is_set: bool = True

    @property
    def owners(self) -> Mapping[int, int]:
        """Rank along the pipeline of each stage."""
        return {stage: rank for rank in range(self.ranks) for stage in own_stages(self, rank)}


def own_stages(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along the pipeline: in a V for schedules that need one, else round and round."""
    if layout.schedule in _IN_A_V:
        return rank, layout.stages - 1 - rank
    return tuple(range(rank, layout.stages, layout.ranks))


def make_layout(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int | None) -> Layout:
    """Return the numbers of a pipeline, or raise `ConfigError` for stages or micro-batches that the schedule does not
    run."""
    stages = ranks * stages_per_rank
    micro = stages if micro_batches is None else micro_batches
    if schedule in _ONE_STAGE and stages_per_rank != 1:
        raise _refused(schedule, "1", stages_per_rank, "Take Interleaved1F1B, or leave stages_per_rank out.")
    if schedule in _IN_A_V and stages_per_rank != 2:
        raise _refused(schedule, "2, one on each side of its V", stages_per_rank, "Pass Plan(stages_per_rank=2).")
    if schedule not in (*_ONE_STAGE, *_IN_A_V) and stages_per_rank < 2:
        raise _refused(schedule, "2 or more", stages_per_rank, "Pass Plan(stages_per_rank=2), or take 1F1B.")
    if schedule in _AT_LEAST_STAGES and micro < stages:
        raise ConfigError(
            f"{schedule} needs as many micro-batches as stages",
            expected=f"{stages} or more",
            got=str(micro),
            where="plan=, micro_batches",
            fix="Make more micro-batches, or take GPipe.",
        )
    rounds = max(1, micro // ranks)
    if schedule in _ROUNDS and micro % rounds:
        raise ConfigError(
            f"{schedule} runs micro-batches in rounds of equal length",
            expected=f"a multiple of {rounds}, the number of rounds",
            got=str(micro),
            where="plan=, micro_batches",
            fix=f"Make {micro // ranks * ranks} or {(micro // ranks + 1) * ranks}.",
        )
    return Layout(schedule, ranks, stages, micro, micro_batches is not None)


def _refused(schedule: str, expected: str, got: int, fix: str) -> ConfigError:
    return ConfigError(
        f"{schedule} does not run so many stages on a rank",
        expected=expected,
        got=str(got),
        where="plan=, stages_per_rank",
        fix=fix,
    )


Norms = tuple[tuple[str, _BatchNorm], ...]
_OTHER_NORMS = "Take nn.GroupNorm, or call .eval() on the norms, which use their own statistics then"


def batch_norms(model: nn.Module) -> Norms:
    """Return the batch norms of a model, with their paths."""
    return tuple((path, each) for path, each in named_modules(model) if isinstance(each, _BatchNorm))


def check_norms(norms: Norms, layout: Layout, kind: type[AccelError], where: str, *, filled: int = 0) -> None:
    """Raise for a batch norm that would take the statistics of other rows than in one process, by its mode now.

    `filled`: number of rows of the batch that are copies of its last one.
    """
    for path, norm in norms:
        # those of other stages have no tensors any more
        if not norm.training and (norm.track_running_stats or norm.running_mean is not None):
            continue
        mode = "in training" if norm.training else "without statistics of its own"
        got = f"{path}, {with_article(type(norm).__name__)} {mode}"
        if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is None:
            raise kind(
                "a batch norm exchanges its statistics with the ranks of other stages",
                expected="a group of ranks with the same stage",
                got=got,
                where=where,
                fix=f"{_OTHER_NORMS}; or pass convert_sync_batchnorm a process_group, such as that of ranks along dp.",
            )
        if not layout.is_set and layout.micro_batches > 1:
            raise kind(
                "a batch norm takes the statistics of each micro-batch, and the mesh decides how many there are",
                expected="norms of single samples or in eval mode, or a plan with the number of micro-batches",
                got=got,
                where=where,
                fix=f"{_OTHER_NORMS}; or say the number, which one process makes, too:"
                f" accel.parallel.Plan(micro_batches={layout.micro_batches}), or"
                ' Plan(schedule="GPipe", micro_batches=1) for the statistics of full batches.',
            )
        if filled:
            raise kind(
                "a batch norm would take the statistics of rows that fill the last micro-batches up",
                expected=f"a batch whose rows {layout.micro_batches} micro-batches divide",
                got=f"{filled} rows too few; {got}",
                where=where,
                fix=f"Pass DataLoader(drop_last=True) and such a batch_size. {_OTHER_NORMS}.",
            )
