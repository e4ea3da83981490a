# SPDX-License-Identifier: Apache-2.0
"""`accel plan`: meshes on which a model can be trained, the fastest first, and why others do not fit."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from accel.cli._estimate_tables import with_recorded_calls
from accel.cli._parser import RESERVED, RESERVED_FOR, Parser, add_saving_flags, memory_limit, saving_plan
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.estimate import Hosts, Job, Transformer, choose_meshes, read_transformer
from accel.estimate._choices import Choice, Choices, RankStages, Refusal, stages_of
from accel.estimate._efficiencies import Efficiencies, read_efficiencies
from accel.estimate._memory import PARTS
from accel.estimate._step import OPTIMIZERS, has_encoder
from accel.formats import PrecisionName
from accel.storage import parse_size
from accel.terminal import show_count, show_seconds, show_size, show_table

_COLUMNS = 80
_NEAREST = 3
_TITLES = ("MESH", "MEMORY", "STEP", "BUSY", "MICRO")


def show_choices(
    source: str, model: Transformer, job: Job, found: Choices, *, most: int, more: tuple[int, Choice] | None
) -> str:
    """Return the answer as text; `more` is a larger number of ranks with which the model fits, and its best mesh."""
    batch = job.ranks * job.rows if job.batch is None else job.batch
    head = f"{source}: {show_count(model.count)} parameters, {model.layers} blocks"
    work = f"A step of {batch} x {job.tokens} tokens in {job.precision} with {job.optimizer}"
    lines = [head, f"{work} on {job.ranks} ranks of {show_size(job.memory)}:", *_speeds(job.hosts), ""]
    if found.fitting:
        left = len(found.fitting) - most
        rest = [f"and {left} more; --top shows them"] if left > 0 else []
        lines += [_table(found.fitting[:most], _TITLES, _cells), *rest, ""]
        lines += _advice(model, found.fitting[0])
        lines += _loss(*found.fitting[:2]) if len(found.fitting) > 1 else []
        staged = next((each for each in found.fitting[:most] if each.axes.pp > 1), None)
        lines += _stages(model, staged, job.hosts) if staged is not None else []
    else:
        lines += [f"No mesh of {job.ranks} ranks fits.", *_way_out(job, found, more)]
    return "\n".join([*lines, *_too_large(found.too_large), *_impossible(found.refused)])


def _speeds(hosts: Hosts) -> list[str]:
    """The device of a table that was measured, and when; that it is a CPU's."""
    table = hosts.efficiencies
    if hosts.flops is not None or not table.torch:
        return []
    lines = _folded(f"Speeds of {table.device},", f"torch {table.torch}, {table.date}")
    return [*lines, "A plan for such CPUs, not for GPUs."] if table.kind == "cpu" else lines


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
        words.append(f"recompute but {step.keep}" if step.keep else "recompute")
    if step.micro_batches > 1 and axes.pp == 1 and not step.held:
        words.append("sync each")
    return words


def _table(choices: Sequence[Choice], titles: Sequence[str], cells: Callable[[Choice], Sequence[str]]) -> str:
    """Meshes with their figures; options follow, on a separate line if there is no room."""
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


def _advice(model: Transformer, choice: Choice) -> Iterator[str]:
    """Words and lines that take the first mesh."""
    axes, step, plan = choice.axes, choice.step, choice.plan
    fields = [f'context="{plan.context}"'] if axes.cp > 1 and plan.context != "gather" else []
    fields += ["sequence=True"] if axes.tp > 1 and plan.sequence else []
    if axes.pp > 1:
        several = plan.stages_per_rank > 1
        fields += [f'schedule="{plan.schedule}", stages_per_rank={plan.stages_per_rank}'] if several else []
        fields += [f"micro_batches={step.micro_batches}"]
        fields += ["stages=stages"] if has_encoder(model, axes) or step.balance != "time" else []
    fields += ['logits="deferred"'] if plan.logits == "deferred" else []
    fields += [f"offload={plan.offload!r}".replace("'", '"')] if plan.offload else []
    mesh = f" --mesh {axes}" if str(axes) else ""
    yield from _wrapped("The first:", f"accel launch{mesh} --strategy {step.strategy} train.py")
    if fields:
        yield from _wrapped("  in the script,", f"plan=accel.parallel.Plan({', '.join(fields)})")
    if step.recompute:
        keep = f', keep="{step.keep}"' if step.keep else ""
        yield f"  and accel.checkpoint_activations(model{keep})"
    if step.offload:
        yield "  and accel.offload_activations(model)"
    if step.chunks > 1:
        yield f"  and accel.chunk_sequence(model, Mlp, parts={step.chunks})"
    if step.micro_batches > 1 and axes.pp == 1:
        each = "" if step.held else ", sync_each_batch=True"
        yield f"  and accel.train_state(ctx, accumulation={step.micro_batches}{each})"


def _stages(model: Transformer, choice: Choice, hosts: Hosts) -> Iterator[str]:
    """A table of the stages of each rank along pp."""
    found = stages_of(model, choice, hosts)
    count = sum(len(each.stages) for each in found)
    rows: list[Sequence[str]] = [("STAGES", "BLOCKS", "MEMORY", "PRODUCTS")]
    for each in found:
        blocks = [_blocks(at, count, *ends) for at, ends in zip(each.stages, each.blocks, strict=True)]
        blocks = ["encoder", *blocks] if model.tower is not None and 0 in each.stages else blocks
        cells = (", ".join(map(str, each.stages)), ", ".join(blocks), show_size(each.memory.total))
        rows.append((*cells, show_seconds(each.time.compute)))
    balance = choice.step.balance
    yield ""
    yield from _folded(f"Stages of {choice.axes},", f"balanced by {balance}, on each rank along pp:")
    yield show_table(rows)
    if has_encoder(model, choice.axes):
        begins = ", ".join(str(start) for each in found for start, _ in each.blocks)
        yield "in the script, accel.prepare(..., example=batch):"
        yield f'  stages = [[f"model.language_model.layers.{{at}}"] for at in ({begins})]'
    elif balance != "time":  # as prepare does it
        yield f'in the script, stages = accel.parallel.stage_plan(model, {count}, balance="{balance}")'
    if not model.calls and model.tower is None:
        yield "by the sizes in the file: no forward of the model is recorded"


def _blocks(stage: int, count: int, first: int, last: int) -> str:
    """The blocks of a stage, and what it has at the model's ends."""
    blocks = [f"{first}-{last}" if last > first else str(first)] if last >= first else []
    return ", ".join([*["embedding"] * (stage == 0), *blocks, *["head"] * (stage == count - 1)])


def _loss(first: Choice, second: Choice) -> list[str]:
    """Why the second mesh is not the first."""
    slower = second.time.total / first.time.total - 1
    axes = len(second.axes.sizes) - len(first.axes.sizes)
    more = second.memory.total - first.memory.total
    if slower < 0.01 and (axes > 0 or more > 0):
        reason = (
            f"on {axes} more {'axis' if axes == 1 else 'axes'}" if axes > 0 else f"and needs {show_size(more)} more"
        )
        return _folded(f"The second, {second.axes}, is as fast within 1 %,", f"{reason}.")
    causes = sorted(_slower_parts(first, second), key=lambda pair: -pair[1])
    reasons = [f"{show_seconds(seconds)} more of {name}" for name, seconds in causes[:2] if seconds > causes[0][1] / 10]
    return _folded(f"The second, {second.axes}, takes {slower:.1%} longer:", *reasons)


def _wrapped(first: str, line: str) -> list[str]:
    """Words before a line of code, above it where both are wider than a terminal."""
    whole = f"{first} {line}"
    return [whole] if len(whole) <= _COLUMNS else [first, f"    {line}"]


def _folded(first: str, *others: str) -> list[str]:
    whole = f"{first} {' and '.join(others)}"
    return [whole] if len(whole) <= _COLUMNS else [first, *(f"  {each}" for each in others)]


def _slower_parts(first: Choice, second: Choice) -> Iterator[tuple[str, float]]:
    """Parts of a step that take longer on the second mesh, and by how many seconds."""
    for name in ("products", "attention"):
        yield name, getattr(second.time, name) - getattr(first.time, name)
    yield "norms, activations and copies", second.time.memory - first.time.memory
    yield "waiting for stages", second.time.bubble - first.time.bubble
    for name, seconds in second.time.messages.items():
        yield name, seconds - first.time.messages.get(name, 0.0)


def _way_out(job: Job, found: Choices, more: tuple[int, Choice] | None) -> Iterator[str]:
    if more is not None:
        ranks, choice = more
        yield f"It fits on {ranks} ranks: {choice.axes}, {show_size(choice.memory.total)}."
    elif found.too_large:
        need = show_size(found.too_large[0].memory.total)
        yield f"The smallest need is {need}: take more ranks, a shorter --tokens or another --optimizer."
    elif job.batch is not None:
        yield "Use another --batch: ranks that do not share samples have equally many each."
    else:
        yield "Use another number of ranks, or --tokens that more ranks can share."


def _too_large(choices: Sequence[Choice]) -> Iterator[str]:
    if not choices:
        return
    yield ""
    yield f"Too large: {len(choices)}. The nearest:"
    yield _table(choices[:_NEAREST], ("MESH", "NEEDS", "MOST OF IT"), _needs)


def _needs(choice: Choice) -> tuple[str, ...]:
    largest = max(PARTS, key=lambda name: getattr(choice.memory, name))
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


_USAGE = "accel plan CONFIG --ranks N --memory SIZE [flags]"
_ABOUT = """List the meshes of N ranks on which a model can be trained, the fastest first,
and why others do not fit. No model is built and no GPU is needed. The exit
status is 1 if nothing fits.

CONFIG is a config.json of Hugging Face's transformers, or a folder with one."""
NAMES: Mapping[str, tuple[str, ...]] = {"--precision": get_args(PrecisionName), "--optimizer": tuple(OPTIMIZERS)}
_CALIBRATE = """Measure matmuls, attention and memory of this machine's device by shape, and
collectives if a launcher has started several ranks. FILE is for --efficiencies."""
_LINK = "450GB,50GB"
_MOST_RANKS = 1 << 14
_SEARCHED_RANKS = 1 << 8


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for programs."""

    source: str  # the configuration
    parameters: int  # number of elements of the model
    ranks: int  # number of ranks
    limit: int  # bytes that a rank may use
    fitting: Sequence[PlanRow]  # meshes that fit, the fastest first
    too_large: Sequence[PlanRow]  # meshes that do not, the smallest need first
    refused: Mapping[str, int]  # number of meshes by the reason for which they are impossible


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh."""

    mesh: str  # text for `--mesh`
    options: Choice  # the choice, with the memory and time of a step
    memory: int  # bytes on the rank that needs most
    step_s: float  # seconds of a step
    stages: Sequence[RankStages] = ()  # of each rank along pp; of meshes that fit


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the meshes; return the exit status, 1 if nothing fits."""
    if any(word.split("=")[0] == "--calibrate" for word in words):
        return _calibrate(words, environ)
    known = parser().read(words)
    job = _job(known)
    file = Path(known.config)
    model = read_transformer(file)
    found = choose_meshes(model, job)
    if any(each.axes.pp > 1 for each in (*found.fitting, *found.too_large)):
        model = with_recorded_calls(model, file)
        found = choose_meshes(model, job)
    if known.json:
        report = PlanReport(
            source=known.config,
            parameters=model.count,
            ranks=job.ranks,
            limit=job.memory,
            fitting=[_row(each, stages_of(model, each, job.hosts)) for each in found.fitting],
            too_large=list(map(_row, found.too_large)),
            refused=dict(Counter(str(each.problem) for each in found.refused)),
        )
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        more = next(_enough(model, job, found), None)
        print(show_choices(known.config, model, job, found, most=known.top, more=more))
    return int(not found.fitting)


def _calibrate(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measure the speeds of this machine's device, and write them to a file."""
    import datetime

    from accel.context import session
    from accel.estimate._efficiencies import measure_efficiencies

    built = Parser("accel plan --calibrate", usage="accel plan --calibrate FILE", description=_CALIBRATE)
    built.value("--calibrate", "FILE", "file to write", required=True)
    path = Path(built.read(words).calibrate)
    if path.is_dir() or not path.parent.is_dir():
        expected = "a file in a folder that exists"
        raise ConfigError(
            "the table of speeds cannot be written there", expected=expected, got=repr(str(path)), where="--calibrate"
        )
    with session(environ) as ctx:
        found = measure_efficiencies(ctx, date=datetime.date.today().isoformat())
        if ctx.is_main_process:
            _write(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
            print(_efficiencies_text(found, path))
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        _ = path.write_bytes(data)
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise ConfigError("the table of speeds cannot be written", got=got, where="--calibrate") from error


def _efficiencies_text(found: Efficiencies, path: Path) -> str:
    """The measured speeds, in words."""
    fastest = {dtype: max(each.flops for each in found.products if each.dtype == dtype) for dtype in found.dtypes}
    rates = ", ".join(f"{dtype} {flops / 1e12:.3g}" for dtype, flops in fastest.items())
    lines = [
        f"{path}: {found.device}, torch {found.torch}, {found.date}",
        f"matmuls, in 10^12 operations a second at most: {rates}",
        f"memory: {show_size(int(found.bandwidth))} a second",
    ]
    lines += [f"collectives of {found.messages[0].ranks} ranks"] if found.messages else []
    if found.kind == "cpu":
        lines += ["These are this CPU's speeds: a plan by them is one for such CPUs, not for GPUs."]
    return "\n".join(lines)


def parser() -> Parser:
    """Return the parser of the command's words."""
    hosts = Hosts()
    built = Parser("accel plan", usage=_USAGE, description=_ABOUT)
    built.value("config", "CONFIG", argparse.SUPPRESS)
    built.value("--ranks", "N", "number of GPUs", type=int, required=True)
    built.value("--memory", "SIZE", "memory of one GPU, such as 80GB", required=True)
    built.value("--reserve", "SIZE", f"memory kept for {RESERVED_FOR} (default: {RESERVED})", default=RESERVED)
    built.value("--tokens", "N", "tokens per sequence (default: 4096)", type=int, default=4096)
    built.value("--batch", "N", "sequences per step over all ranks (default: one per rank)", type=int)
    built.value("--rows", "N", "sequences per micro-batch (default: 1)", type=int, default=1)
    built.value("--precision", "NAME", f"{', '.join(NAMES['--precision'])} (default: bf16)", default="bf16")
    built.value("--optimizer", "NAME", f"{', '.join(OPTIMIZERS)} (default: adamw)", default="adamw")
    built.value("--host", "N", f"number of GPUs on a host (default: {hosts.ranks})", type=int, default=hosts.ranks)
    built.value(
        "--link",
        "SIZE,SIZE",
        f"bytes per second of a GPU inside its host, and to other hosts (default: {_LINK}, or the table's)",
    )
    built.value(
        "--tflops",
        "N",
        "10^12 operations per second of a GPU, for all shapes, instead of the table of speeds",
        type=float,
    )
    built.value("--efficiencies", "FILE", "table of speeds by shape (default: published ones of H100)")
    built.value("--power", "W", "power limit of a GPU in watts (default: as in the table)", type=float)
    built.value("--calibrate", "FILE", "measure this machine's speeds and write such a table; takes no CONFIG")
    built.value("--images", "N", "images per sequence, for models with vision (default: 1)", type=int, default=1)
    built.value(
        "--image-size",
        "N",
        "side of an image in pixels, if the model accepts any size (default: 448)",
        type=int,
        default=448,
        dest="side",
    )
    add_saving_flags(built)
    built.switch("--compiled", "assume that torch.compile fuses the operators between matmuls")
    built.value("--top", "N", "number of meshes to show (default: 10)", type=int, default=10)
    built.switch("--json", "print all meshes as JSON")
    return built


def _job(known: argparse.Namespace) -> Job:
    for flag, names in NAMES.items():
        name = getattr(known, flag.removeprefix("--"))
        check_choice(name, names, f"unknown {flag.removeprefix('--')}", where=flag)
    for flag in ("ranks", "tokens", "batch", "rows", "host", "top", "images", "side"):
        count = getattr(known, flag)
        if count is not None and count < 1:
            name = "image-size" if flag == "side" else flag
            raise ConfigError("the number is too small", expected="1 or more", got=str(count), where=f"--{name}")
    if known.ranks > _MOST_RANKS:
        got = str(known.ranks)
        raise ConfigError(
            "the meshes of so many ranks are not listed", expected=f"at most {_MOST_RANKS}", got=got, where="--ranks"
        )
    return Job(
        ranks=known.ranks,
        memory=memory_limit(known.memory, known.reserve),
        tokens=known.tokens,
        batch=known.batch,
        rows=known.rows,
        precision=known.precision,
        optimizer=known.optimizer,
        compiled=known.compiled,
        hosts=_hosts(known),
        images=known.images,
        side=known.side,
        offload=known.offload_activations,
        chunks=1 if known.chunks is None else known.chunks,
        plan=saving_plan(known),
    )


def _hosts(known: argparse.Namespace) -> Hosts:
    inside, comma, between = (known.link or _LINK).partition(",")
    if not comma:
        expected = "two sizes, such as 450GB,50GB"
        raise ConfigError("the speeds of links are not valid", expected=expected, got=repr(known.link), where="--link")
    if known.tflops is not None and known.efficiencies is not None:
        expected = "--tflops or --efficiencies"
        raise ConfigError("two flags exclude each other", expected=expected, got="both", where="accel plan")
    hosts = Hosts(
        ranks=known.host,
        inside=parse_size(inside, "--link"),
        between=parse_size(between, "--link"),
        flops=None if known.tflops is None else known.tflops * 1e12,
    )
    if known.efficiencies is not None:
        table = read_efficiencies(Path(known.efficiencies))
        links = {} if known.link else link_speeds(table)
        hosts = msgspec.structs.replace(hosts, efficiencies=table, **links)
    return hosts if known.power is None else msgspec.structs.replace(hosts, power_w=known.power)


def link_speeds(table: Efficiencies) -> dict[str, float]:
    """Return the speeds of links as fields of `Hosts`, from the longest messages in a table.

    A collective goes round a ring. Ranks of one host measure `inside`; of several hosts `between`, where as many ranks
    on each host share the message out among its links.
    """
    found: dict[str, float] = {}
    for name, several in (("inside", False), ("between", True)):
        rows = [each for each in table.messages if (each.hosts > 1) == several and each.ranks > 1]
        if not rows:
            continue
        longest = max(rows, key=lambda each: each.bytes)
        rounds = 2 if longest.operation == "all-reduce" else 1
        sent = rounds * longest.bytes * (longest.ranks - 1) / longest.ranks / longest.seconds
        found[name] = sent * longest.hosts / longest.ranks if several else sent
    return found


def _enough(model: Transformer, job: Job, found: Choices) -> Iterator[tuple[int, Choice]]:
    """Yield larger numbers of ranks with which the model would fit."""
    ranks = job.ranks
    while not found.fitting and ranks * 2 <= _SEARCHED_RANKS:
        ranks *= 2
        more = choose_meshes(model, msgspec.structs.replace(job, ranks=ranks))
        if more.fitting:
            yield ranks, more.fitting[0]


def _row(choice: Choice, stages: Sequence[RankStages] = ()) -> PlanRow:
    memory = choice.memory.total
    return PlanRow(mesh=str(choice.axes), options=choice, memory=memory, step_s=choice.time.total, stages=stages)
