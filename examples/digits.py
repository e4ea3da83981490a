# SPDX-License-Identifier: Apache-2.0
"""Train a small CNN on scikit-learn's handwritten digits, on one process or many, and go on after a crash.

    python examples/digits.py
    accel launch --nproc-per-node 2 examples/digits.py --save-every 10

The same command again goes on from the last checkpoint under `--out`, in the middle of an epoch if it stands there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The flags, what they may be, and their defaults."""

    epochs: Annotated[int, Meta(ge=1, description="passes over the training images")] = 12
    batch_size: Annotated[int, Meta(ge=1, description="images of one optimizer step, all processes together")] = 64
    accumulate: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="parts in which a batch is computed, to save memory; else as ACCEL_ACCUMULATION says"),
    ] = None
    lr: Annotated[float, Meta(gt=0, lt=1e6, description="learning rate of the first step")] = 4e-3
    seed: Annotated[int, Meta(ge=0, lt=2**62, description="of the first weights and the order of images")] = 0
    precision: Annotated[str | None, Meta(description="fp32, tf32, bf16 or fp16; else as ACCEL_PRECISION says")] = None
    save_every: Annotated[int, Meta(ge=0, description="steps between checkpoints within an epoch")] = 0
    out: Annotated[str, Meta(min_length=1, description="folder of the checkpoints and the curves")] = "runs/digits"


class Epoch(msgspec.Struct, frozen=True):
    """One line of the table: mean losses, right answers among the test images, the last step's learning rate."""

    train_loss: float
    test_loss: float
    right: int
    tested: int
    lr: float
    samples_per_s: float


class Log(msgspec.Struct, frozen=True):
    """The epochs that are over, and sums over the training samples of the one under way.

    Attributes:
        epochs: the table so far.
        loss, samples, seconds: of all ranks.
        own: loss on this rank that is not in `loss` yet; it stays on the device, so that adding waits for nothing.
    """

    epochs: tuple[Epoch, ...] = ()
    loss: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    own: torch.Tensor | None = None


def main(ctx: accel.DistContext, settings: Settings) -> tuple[Epoch, ...]:
    """Train until `settings.epochs` are done; return the table, a line for each."""
    figure = require("matplotlib.figure", "matplotlib").Figure(figsize=(9, 3.6), layout="constrained")
    train_set, test_set = load_digits()
    torch.manual_seed(settings.seed)  # every rank, of however many, begins with the same weights
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    size = part_size(ctx, settings)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, size, shuffle=True), global_batch=size)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, 512))
    steps = accel.total_steps(loader, accumulation=ctx.accumulation, epochs=settings.epochs)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(cosine, steps=steps))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)

    recipe, log = make_recipe(ctx, settings), Log()
    items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "recipe": recipe}
    state = accel.train_state(ctx, seed=settings.seed)
    if found := accel.latest_checkpoint(settings.out):
        loaded = accel.load_state(ctx, found, items | {"state": state, "log": log})
        check_recipe(recipe, loaded["recipe"], found)
        state, log = loaded["state"], loaded["log"]
    show_start(ctx, log, found)

    while state.epoch < settings.epochs:
        model.train()
        began = time.perf_counter()
        for batch in accel.batches(ctx, loader, state):
            inputs, targets = batch.data
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = cross_entropy(model(inputs), targets)
                state = accel.backward(ctx, loss, state)
            log = add(log, loss, batch)
            show_progress(ctx, f"epoch {len(log.epochs) + 1}", log.samples / len(train_set))
            if not state.sync:
                continue
            lr = scheduler.get_last_lr()[0]
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler)
            if settings.save_every and state.updates % settings.save_every == 0 and not batch.is_last:
                log = settle(ctx, log, began)
                accel.save_state(ctx, settings.out, items | {"state": state, "log": log}, step=state.updates, keep=3)
                began = time.perf_counter()
        log = close(settle(ctx, log, began), lr, *evaluate(ctx, model, test_loader))
        show_epoch(ctx, len(log.epochs), log.epochs[-1])
        accel.save_state(ctx, settings.out, items | {"state": state, "log": log}, step=state.updates, keep=3)
    last = log.epochs[-1]
    accel.print(ctx, f"{last.right} right of {last.tested} tested images; the test split has {len(test_set)}")
    accel.on_main_process(ctx, draw_curves)(figure, log.epochs, Path(settings.out, "curves.png"))
    return log.epochs


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> tuple[float, int, int]:
    """Return mean loss, right answers and number of the samples, each counted once on any number of ranks."""
    model.eval()
    loss, right, tested = 0.0, 0, 0
    for batch in accel.batches(ctx, loader):
        inputs, targets = batch.data
        with accel.autocast(ctx):
            logits = model(inputs).float()
        mine = {"loss": cross_entropy(logits, targets, reduction="none"), "right": logits.argmax(1) == targets}
        everyone = accel.gather_for_metrics(ctx, mine, batch)
        loss += everyone["loss"].double().sum().item()
        right += int(everyone["right"].sum())
        tested += len(everyone["right"])
    return loss / tested, right, tested


def add(log: Log, loss: torch.Tensor, batch: accel.Batch) -> Log:
    """Return the log with the mean loss of a batch on this rank. Does not wait for the device."""
    own = loss.detach().double() * batch.valid + (0.0 if log.own is None else log.own)
    return msgspec.structs.replace(log, own=own, samples=log.samples + batch.valid.world)


def settle(ctx: accel.DistContext, log: Log, began: float) -> Log:
    """Return the log with every rank's `own` summed up, and the time since `began`. A collective."""
    loss = accel.reduce(ctx, log.own).item() if log.own is not None else 0.0
    seconds = log.seconds + time.perf_counter() - began
    return msgspec.structs.replace(log, own=None, loss=log.loss + loss, seconds=seconds)


def close(log: Log, lr: float, test_loss: float, right: int, tested: int) -> Log:
    """Return the log with the epoch as a line of the table, and empty sums for the next."""
    row = Epoch(log.loss / log.samples, test_loss, right, tested, lr, log.samples / log.seconds)
    return Log(epochs=(*log.epochs, row))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test images with their labels; every fifth of the 1,797 is for the test."""
    digits = require("sklearn.datasets", "scikit-learn").load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # [1797, 1, 8, 8], from 0 to 1
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Return a CNN of 0.3 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def cosine(step: int, steps: int) -> float:
    """Return the learning rate at a step as a share of the first: half a cosine, from 1 down to 0."""
    return (1 + math.cos(math.pi * min(step / steps, 1))) / 2


def part_size(ctx: accel.DistContext, settings: Settings) -> int:
    """Return how many images are computed at once, by all processes together."""
    if settings.batch_size % ctx.accumulation:
        got = f"{settings.batch_size} images in {ctx.accumulation} parts"
        raise accel.ConfigError("a batch does not divide", got=got, where="--batch-size and --accumulate")
    return settings.batch_size // ctx.accumulation


def make_recipe(ctx: accel.DistContext, settings: Settings) -> dict[str, object]:
    """Return the settings that a run cannot change on its way."""
    fixed = {name: getattr(settings, name) for name in ("batch_size", "lr", "seed")}
    return fixed | {"accumulate": ctx.accumulation, "precision": ctx.precision.name}


def check_recipe(asked: dict[str, object], stored: dict[str, object], found: Path) -> None:
    """Raise `ConfigError` if the run in a checkpoint was started with other settings."""
    fix = "Give the same flags to go on, or another --out to start anew."
    for name in (name for name in asked if asked[name] != stored[name]):
        want, got = (f"--{name.replace('_', '-')} {values[name]}" for values in (stored, asked))
        raise accel.ConfigError("the folder holds another run", expected=want, got=got, where=str(found), fix=fix)


def show_start(ctx: accel.DistContext, log: Log, found: Path | None) -> None:
    """Print where the run begins, and the table of the epochs before."""
    if found:
        accel.print(ctx, f"going on from {found}: {len(log.epochs)} epochs and {log.samples} samples are done")
    accel.print(ctx, "epoch  train loss  test loss  accuracy        lr  samples/s", flush=True)
    for i, row in enumerate(log.epochs):
        show_epoch(ctx, i + 1, row)


def show_epoch(ctx: accel.DistContext, epoch: int, row: Epoch) -> None:
    """Print a line of the table."""
    losses = f"{epoch:5}  {row.train_loss:10.4f}  {row.test_loss:9.4f}  {row.right / row.tested:8.2%}"
    accel.print(ctx, f"{losses}  {row.lr:.2e}  {row.samples_per_s:9,.0f}", flush=True)


def show_progress(ctx: accel.DistContext, label: str, done: float) -> None:
    """Draw a bar on a terminal, and wipe it away when all is done; elsewhere do nothing."""
    if not ctx.is_main_process or not sys.stderr.isatty():
        return
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # a terminal may not know its size
    width = min(40, columns - len(label) - 9)
    bar = "#" * round(width * done) + "." * (width - round(width * done))
    line = f"{label} {bar} {int(100 * done):3}%"[: columns - 1] if done < 1 else ""
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def draw_curves(figure: Any, epochs: tuple[Epoch, ...], path: Path) -> None:
    """Draw losses and accuracy over the epochs into a PNG."""
    losses, accuracies = figure.subplots(1, 2)
    numbers = range(1, len(epochs) + 1)
    losses.plot(numbers, [row.train_loss for row in epochs], marker="o", label="training")
    losses.plot(numbers, [row.test_loss for row in epochs], marker="o", label="test")
    losses.set(xlabel="epoch", ylabel="mean loss", yscale="log")
    losses.legend()
    accuracies.plot(numbers, [100 * row.right / row.tested for row in epochs], marker="o", color="tab:green")
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def require(module: str, package: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise accel.MissingExtraError(
            f"this example needs {package}", got=str(error), fix="Run: pip install 'accel[examples]'"
        ) from error


def read_flags() -> Settings:
    """Read the command line; leave with one line on stderr if it makes no sense."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def convert(kind: Any, text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from error

    for field in msgspec.structs.fields(Settings):
        name, kind = f"--{field.name.replace('_', '-')}", functools.partial(convert, field.type)
        about = f"{msgspec.json.schema(field.type)['description']} (default: {field.default or 'none'})"
        parser.add_argument(name, type=kind, default=field.default, metavar="X", help=about)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    flags = read_flags()
    try:
        with accel.session(precision=flags.precision, accumulation=flags.accumulate) as context:
            main(context, flags)
    except accel.ConfigError as error:
        sys.exit(f"digits.py: error: {error}")
