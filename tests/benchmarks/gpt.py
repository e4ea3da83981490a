# SPDX-License-Identifier: Apache-2.0
"""The step of examples/gpt.py against the same loop by hand in plain torch, and the cost of features that save memory.

    python tests/benchmarks/gpt.py                # a GPU: 124 million and 1.3 billion parameters, within 15 minutes
    python tests/benchmarks/gpt.py --tiny         # a CPU: the same program at a tiny size, uncompiled
    python tests/benchmarks/gpt.py --counts       # operators, host waits and graph breaks of a step, on any device

Loops alternate in blocks within one run. Printed are tokens a second, the MFU, the peak of allocated memory, and the
median over the rounds of the throughput as a share of the loop by hand. One of these compiles the blocks, as the
example does, the other the whole model with its logits, as nanoGPT does. The second table trains the larger model with
one feature added or taken away at a time. Parts that would begin after `--limit-s` are left out, and named.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step_counts import counts
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import accel
from accel.metrics._flops import peak_flops
from accel.parallel import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
Loop = Callable[[int], None]  # trains on so many micro-batches
Change = Callable[[Any], Any]
BLOCKS, WHOLE, ACCEL = "by hand, blocks compiled", "by hand, model compiled", "accel"
DEFERRED = Plan(logits="deferred")


class Sizes(NamedTuple):
    """A model, and a step: rows of a micro-batch, and micro-batches of a step."""

    width: int
    depth: int
    vocabulary: int
    length: int
    rows: int
    accumulation: int

    @property
    def model(self) -> tuple[int, int, int, int]:
        """Arguments of the example's model."""
        return self[:4]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length


SIZES = {"124 million": Sizes(768, 12, 50304, 1024, 64, 2), "1.3 billion": Sizes(2048, 24, 50304, 1024, 8, 4)}
TINY = {"tiny": Sizes(64, 2, 96, 32, 4, 2)}


def load_example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks up the names of a block's module
    spec.loader.exec_module(module)
    return module


class PlainBlock(nn.Module):
    """The example's block in plain torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = 64 if width % 64 == 0 and width > 64 else width // 4
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (3, -1, self.head_width)).transpose(1, 3)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))


class PlainGpt(nn.Module):
    """The example's model in plain torch; its parameters have the same names."""

    def __init__(self, width: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_gpt(ctx: accel.DistContext, sizes: Sizes) -> nn.Module:
    """Return the example's model, made on a GPU if there is one."""
    _ = torch.manual_seed(0)
    with torch.device(ctx.device if ctx.device.type == "cuda" else "cpu"):
        return load_example().Gpt(ctx, *sizes.model)


def make_data(ctx: accel.DistContext, sizes: Sizes) -> DataLoader[Any]:
    """Return a loader of random rows, enough for several steps."""
    generator = torch.Generator().manual_seed(0)
    rows: Any = torch.randint(
        sizes.vocabulary, (8 * sizes.rows * sizes.accumulation, sizes.length), generator=generator
    )
    return DataLoader(rows, sizes.rows, pin_memory=ctx.device.type == "cuda")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def by_hand(
    ctx: accel.DistContext, sizes: Sizes, *, compiled: str = "", backend: str = "inductor", seen: list[Tensor]
) -> Loop:
    """Return the loop in plain torch; `compiled` is "blocks", "model" or empty. The losses are appended to `seen`."""
    with torch.device("meta"):
        model = PlainGpt(*sizes.model)
    _ = model.load_state_dict(make_gpt(ctx, sizes).state_dict(), assign=True)
    model.head.weight = model.tokens.weight
    model = model.to(ctx.device)
    for each in {"blocks": [*model.blocks], "model": [model]}.get(compiled, []):
        each.compile(backend=backend, dynamic=False)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data, half = make_data(ctx, sizes), ctx.precision.compute == "bf16"

    def rows() -> Iterator[Tensor]:
        while True:
            yield from data

    batches = rows()

    def loop(count: int) -> None:
        for at in range(count):
            inputs = next(batches).to(ctx.device, non_blocking=True)
            targets = inputs.roll(-1, 1)
            targets[:, -1] = -100
            with torch.autocast(ctx.device.type, torch.bfloat16, enabled=half):
                logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / sizes.accumulation).backward()
            seen.append(loss.detach())
            if at % sizes.accumulation == sizes.accumulation - 1:
                _ = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return loop


def by_accel(
    ctx: accel.DistContext,
    sizes: Sizes,
    *,
    compiled: str = "",
    backend: str = "inductor",
    seen: list[Tensor],
    plan: Plan = DEFERRED,
    change: Change = lambda model: model,
    of_model: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
) -> Loop:
    """Return the loop of the example, with its own step. `change` changes the model, `of_model` is the optimizer's."""
    example = load_example()
    model: Any = change(make_gpt(ctx, sizes))
    if compiled:
        model = accel.compile_model(model, "repeated", backend=backend, dynamic=False)
    optimizer: Any = of_model(model)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler, plan=plan)
    loader = accel.prepare_loader(ctx, make_data(ctx, sizes), global_batch=sizes.rows)
    state = accel.train_state(ctx, seed=0, accumulation=sizes.accumulation)
    batches = accel.batches(ctx, loader, state, repeat=True)

    def loop(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, loss, _ = example.take_step(ctx, state, next(batches), model, optimizer, scheduler)
            seen.append(loss)

    return loop


LOOPS: dict[str, Callable[..., Loop]] = {
    BLOCKS: partial(by_hand, compiled="blocks"),
    WHOLE: partial(by_hand, compiled="model"),
    ACCEL: partial(by_accel, compiled="blocks"),
}
FEATURES: dict[str, dict[str, Any]] = {
    "as examples/gpt.py": {},
    "with logits": {"plan": Plan()},
    "activations on the host": {"change": accel.offload_activations},
    "recomputed blocks": {"change": accel.checkpoint_activations},
    "recomputed blocks, inputs on the host": {
        "change": lambda model: accel.offload_activations(accel.checkpoint_activations(model))
    },
    "Muon": {"of_model": lambda model: accel.optim.Muon(model, lr=0.02, adamw_lr=6e-4)},
    "Adafactor": {"of_model": lambda model: accel.optim.Adafactor(model.parameters())},
    "optimizer state on the host": {"plan": Plan(logits="deferred", offload="optimizer")},
}


def timed(ctx: accel.DistContext, loop: Loop, count: int) -> float:
    """Return the seconds of so many micro-batches, up to the end of the device's work."""
    on_device = ctx.device.type != "cpu"
    if on_device:
        torch.accelerator.synchronize()
    began = time.perf_counter()
    loop(count)
    if on_device:
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def told(ctx: accel.DistContext, sizes: Sizes, rate: float) -> str:
    """Return the throughput and the MFU for people."""
    with torch.device("meta"):
        model = PlainGpt(*sizes.model)
    flops = accel.metrics.count_flops(model, torch.zeros(1, sizes.length, dtype=torch.long)).per_sample(1)
    name = torch.cuda.get_device_name() if ctx.device.type == "cuda" else "cpu"
    peak = peak_flops(name, ctx.precision)
    mfu = f"{flops * rate / sizes.length / peak:5.1%} MFU" if flops and peak else "no MFU"
    return f"{rate / 1000:8.1f}k tok/s  {mfu}"


def emptied(ctx: accel.DistContext) -> None:
    """Free what the last part held, and count the peak from here."""
    gc.collect()
    torch.compiler.reset()
    accel.free_memory(ctx)
    if ctx.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def peak_text(ctx: accel.DistContext) -> str:
    """Return the peak of allocated memory since `emptied`."""
    return f"peak {torch.accelerator.max_memory_allocated() / 1e9:6.2f} GB" if ctx.device.type != "cpu" else "no peak"


def compare(ctx: accel.DistContext, sizes: Sizes, rounds: int, steps: int) -> None:
    """Print the throughput of each loop, in alternating blocks."""
    emptied(ctx)
    made = {name: make(ctx, sizes, seen=[]) for name, make in LOOPS.items()}
    count = steps * sizes.accumulation
    for loop in made.values():
        loop(2 * sizes.accumulation)
    seconds = [{name: timed(ctx, loop, count) for name, loop in made.items()} for _ in range(rounds)]
    for name in made:
        rate = count * sizes.tokens / statistics.median(each[name] for each in seconds)
        shares = [statistics.median(each[other] / each[name] for each in seconds) for other in (BLOCKS, WHOLE)]
        print(f"  {name:<26} {told(ctx, sizes, rate)}  {shares[0]:.3f} and {shares[1]:.3f} of the loops by hand")


def feature(ctx: accel.DistContext, sizes: Sizes, steps: int, name: str) -> None:
    """Print the throughput and the peak of memory with one feature."""
    emptied(ctx)
    loop = LOOPS[ACCEL](ctx, sizes, seen=[], **FEATURES[name])
    loop(2 * sizes.accumulation)
    count = steps * sizes.accumulation
    rate = count * sizes.tokens / timed(ctx, loop, count)
    print(f"  {name:<38} {told(ctx, sizes, rate)}  {peak_text(ctx)}", flush=True)


def count_work(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return what a step does on the device of counted_device.py, by loop: operators, kernels, waits of the host.

    `by_block` is the number of operators that one more block adds.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    import counted_device
    from counted_work import DEVICE, is_view, reach_into_devices

    from accel.parallel.logits import _deferred

    reach_into_devices()
    deferred: Any = _deferred
    deferred.Tensor = counted_device.CountedTensor  # the inputs of its heads
    ctx = accel.single(str(DEVICE))

    def step_of(make: Callable[..., Loop], each: Sizes) -> tuple[list[str], list[str]]:
        operators = list[str]()
        with counted_device.counting(operators) as waits:
            loop = make(ctx, each, compiled="", seen=[])
            loop(2 * each.accumulation)
            operators.clear()
            waits.clear()
            loop(each.accumulation)
            return operators, list(waits)

    found = dict[str, dict[str, Any]]()
    for name, make in LOOPS.items():
        operators, waits = step_of(make, sizes)
        deeper, _ = step_of(make, sizes._replace(depth=sizes.depth + 1))
        kernels = sum(not is_view(each) for each in operators)
        found[name] = {"operators": len(operators), "kernels": kernels, "by_block": len(deeper) - len(operators)}
        found[name]["waits"] = waits
    return found


def count_graphs(ctx: accel.DistContext, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return the graphs and the graph breaks of each compiled loop, and its losses."""
    counters: Any = torch._dynamo.utils.counters
    found = dict[str, dict[str, Any]]()
    for name, make in LOOPS.items():
        torch.compiler.reset()
        counters.clear()
        seen = list[Tensor]()
        make(ctx, sizes, seen=seen, backend="aot_eager")(3 * sizes.accumulation)
        breaks = sum(counters["graph_break"].values())
        found[name] = {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks, "losses": [*map(float, seen)]}
    return found


def counted(ctx: accel.DistContext) -> dict[str, dict[str, Any]]:
    """Return the work of a step: of CUDA by the profiler, else by a device type that counts."""
    sizes = TINY["tiny"]
    if ctx.device.type != "cuda":
        return count_work(sizes)
    loops = {name: make(ctx, sizes, compiled="", seen=[]) for name, make in LOOPS.items()}
    return {name: counts(loop, sizes.accumulation, 4, "cuda") for name, loop in loops.items()}


def run_parts(parts: dict[str, Callable[[], None]], limit_s: float) -> None:
    """Run each part that begins within the limit; say what ran out of memory, and what was left out."""
    began = time.monotonic()
    for title, part in parts.items():
        if time.monotonic() - began > limit_s:
            print(f"{title}: left out, after {limit_s:.0f} s", flush=True)
            continue
        print(title, flush=True)
        try:
            part()
        except torch.OutOfMemoryError as error:
            print(f"  out of memory: {str(error).splitlines()[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, uncompiled where there is no GPU")
    parser.add_argument("--counts", action="store_true", help="count a step's work, at the tiny size")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of blocks")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a block")
    parser.add_argument("--limit-s", type=float, default=780, help="seconds after which no part begins")
    options = parser.parse_args()
    with accel.session() as ctx:
        on_gpu = ctx.device.type == "cuda"
        if options.counts:
            # work first: its device type has to be there before the first backward
            print(json.dumps({"work": counted(ctx), "graphs": count_graphs(ctx, TINY["tiny"])}, indent=1))
            return
        if not on_gpu:
            for name, make in LOOPS.items():
                LOOPS[name] = partial(make, compiled="")
        ctx = accel.replace(ctx, precision="bf16") if on_gpu else ctx
        sizes = TINY if options.tiny else SIZES
        parts: dict[str, Callable[[], None]] = {
            f"{name}: throughput": partial(compare, ctx, each, options.rounds, options.steps)
            for name, each in sizes.items()
        }
        largest = [*sizes][-1]
        parts |= {f"{largest}: {name}": partial(feature, ctx, sizes[largest], options.steps, name) for name in FEATURES}
        run_parts(parts, options.limit_s)


if __name__ == "__main__":
    main()
