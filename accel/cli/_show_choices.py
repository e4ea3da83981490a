# SPDX-License-Identifier: Apache-2.0
"""The answer of `accel plan` for people: meshes that fit, those that are too large, and those that are impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from accel.estimate import Choice, Choices, Job, Refusal, Transformer
from accel.terminal import show_size, show_table

_COLUMNS = 80
_NEAREST = 3
_TITLES = ("MESH", "MEMORY", "STEP", "BUSY", "MICRO")
_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")


def show_choices(
    source: str, model: Transformer, job: Job, found: Choices, *, most: int, more: tuple[int, Choice] | None
) -> str:
    """Return the answer as text.

    Args:
        source: the configuration.
        model: sizes of the model.
        job: the training.
        found: its meshes.
        most: number of meshes to list.
        more: a larger number of ranks with which the model fits, and its best mesh; None without.
    """
    batch = job.ranks * job.rows if job.batch is None else job.batch
    head = f"{source}: {model.count / 1e9:.2f} billion parameters, {model.layers} blocks"
    work = f"A step of {batch} x {job.tokens} tokens in {job.precision} with {job.optimizer}"
    lines = [head, f"{work} on {job.ranks} ranks of {show_size(job.memory)}:", ""]
    if found.fitting:
        lines += [_table(found.fitting[:most], _TITLES, _cells), *_rest(len(found.fitting) - most), ""]
        lines += _advice(found.fitting[0])
    else:
        lines += [f"No mesh of {job.ranks} ranks fits.", *_way_out(job, found, more)]
    return "\n".join([*lines, *_too_large(found.too_large), *_impossible(found.refused)])


def options_of(choice: Choice) -> list[str]:
    """Return the words for a choice's options, without those that have no effect on its mesh."""
    axes, step, plan = choice.axes, choice.step, choice.plan
    words = [step.strategy] if axes.dp * axes.cp > 1 and axes.dp_shard == axes.dp_replicate == 1 else []
    if axes.cp > 1:
        words.append(plan.context)
    if axes.tp > 1 and plan.sequence:
        words.append("sequence")
    if axes.pp > 1:
        words.append(plan.schedule)
    if step.recompute:
        words.append("recompute")
    if step.micro_batches > 1 and axes.pp == 1 and not step.held:
        words.append("sync each")
    return words


def _table(choices: Sequence[Choice], titles: Sequence[str], cells: Callable[[Choice], Sequence[str]]) -> str:
    """Meshes with their figures; options stand behind, or below where the line has no room."""
    rows = [titles, *map(cells, choices)]
    first, *others = show_table(rows).split("\n")
    width = max(map(len, (first, *others)))
    lines = [f"{first:{width}}  WITH"]
    for line, choice in zip(others, choices, strict=True):
        options = ", ".join(options_of(choice))
        whole = f"{line:{width}}  {options}".rstrip()
        lines += [whole] if len(whole) <= _COLUMNS else [line, f"    {options}"]
    return "\n".join(lines)


def _cells(choice: Choice) -> tuple[str, ...]:
    time = choice.time
    busy = f"{time.compute / time.total:.0%}"
    return (
        str(choice.axes) or "one rank",
        show_size(choice.memory.total),
        show_seconds(time.total),
        busy,
        str(choice.step.micro_batches),
    )


def show_seconds(seconds: float) -> str:
    """Return a duration of a step: "1.32 s", or "12 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _rest(count: int) -> list[str]:
    return [f"and {count} more; --top shows them"] if count > 0 else []


def _advice(choice: Choice) -> Iterator[str]:
    """Words and lines that take the first mesh."""
    axes, step, plan = choice.axes, choice.step, choice.plan
    fields = [f'context="{plan.context}"'] if axes.cp > 1 and plan.context != "gather" else []
    fields += ["sequence=True"] if axes.tp > 1 and plan.sequence else []
    if axes.pp > 1:
        several = plan.stages_per_rank > 1
        fields += [f'schedule="{plan.schedule}", stages_per_rank={plan.stages_per_rank}'] if several else []
        fields += [f"micro_batches={step.micro_batches}"]
    mesh = f" --mesh {axes}" if str(axes) else ""
    yield f"The first: accel launch{mesh} --strategy {step.strategy} train.py"
    if fields:
        yield f"  in the script, plan=accel.Plan({', '.join(fields)})"
    if step.recompute:
        yield "  and accel.checkpoint_activations(model)"
    if step.micro_batches > 1 and axes.pp == 1:
        each = "" if step.held else ", sync_each_batch=True"
        yield f"  and accel.Accumulation({step.micro_batches}{each})"


def _way_out(job: Job, found: Choices, more: tuple[int, Choice] | None) -> Iterator[str]:
    if more is not None:
        ranks, choice = more
        yield f"It fits on {ranks} ranks: {choice.axes}, {show_size(choice.memory.total)}."
    elif found.too_large:
        need = show_size(found.too_large[0].memory.total)
        yield f"The smallest need is {need}: take more ranks, a shorter --tokens or another --optimizer."
    elif job.batch is not None:
        yield "Take another --batch: ranks that do not share samples have equally many each."
    else:
        yield "Take another number of ranks, or --tokens that more ranks can share."


def _too_large(choices: Sequence[Choice]) -> Iterator[str]:
    if not choices:
        return
    yield ""
    yield f"Too large: {len(choices)}. The nearest:"
    yield _table(choices[:_NEAREST], ("MESH", "NEEDS", "MOST OF IT"), _needs)


def _needs(choice: Choice) -> tuple[str, ...]:
    largest = max(_PARTS, key=lambda name: getattr(choice.memory, name))
    part = f"{largest} {show_size(getattr(choice.memory, largest))}"
    return (str(choice.axes) or "one rank", show_size(choice.memory.total), part)


def _impossible(refused: Sequence[Refusal]) -> Iterator[str]:
    if not refused:
        return
    yield ""
    yield f"Impossible: {len({str(each.axes) for each in refused})}."
    by_reason: dict[str, dict[str, None]] = {}
    for each in refused:
        by_reason.setdefault(each.problem.problem, {})[str(each.axes)] = None
    for reason, meshes in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
        line = f"  {reason}: {len(meshes)}"
        example = f"{line}, such as {next(iter(meshes))}"
        yield example if len(example) <= _COLUMNS else line
