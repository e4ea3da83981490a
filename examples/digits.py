# SPDX-License-Identifier: Apache-2.0
"""Train a small CNN on scikit-learn's handwritten digits, on one process or many, and resume after a crash.

    python examples/digits.py
    accel launch --nproc-per-node 2 examples/digits.py --save-every 10

The same command resumes from the last checkpoint under `--out`, also in the middle of an epoch.
`accel report runs/digits` draws the curves, and `accel watch runs/digits` shows them in a terminal.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
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
    out: Annotated[str, Meta(min_length=1, description="folder of the checkpoints and the metrics")] = "runs/digits"


def main(ctx: accel.DistContext, settings: Settings) -> None:
    """Train until `settings.epochs` are done."""
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

    shown = ("epoch", "train_loss", "test_loss", "accuracy")
    to = [accel.trackers.jsonl(), accel.trackers.console(names=shown, formats={"accuracy": ".1%"})]
    with accel.tracking(ctx, "digits", to=to, config=settings, dir=settings.out) as trackers:
        recipe = make_recipe(ctx, settings)
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "recipe": recipe, "trackers": trackers}
        state = accel.train_state(ctx, seed=settings.seed)
        statistics = accel.metrics.step_statistics(train_loss="mean", lr="last")
        if found := accel.latest_checkpoint(settings.out):
            loaded = accel.load_state(ctx, found, items | {"state": state, "statistics": statistics})
            check_recipe(recipe, loaded["recipe"], found)
            state, statistics = loaded["state"], loaded["statistics"]
            accel.print(ctx, f"going on from {found}: {state.updates} of {steps} steps are done", flush=True)

        while state.epoch < settings.epochs:
            model.train()
            batches, label = accel.batches(ctx, loader, state), f"epoch {state.epoch + 1}"
            for batch in accel.data.progress(ctx, batches, total=loader.samples, label=label):
                inputs, targets = batch.data
                lr = scheduler.get_last_lr()[0]
                state = state.next(batch)
                with accel.accumulate(ctx, state, model):
                    with accel.autocast(ctx):
                        loss = cross_entropy(model(inputs), targets)
                    state = accel.backward(ctx, loss, state)
                if state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler)
                statistics = statistics.add(batch, state, train_loss=loss, lr=lr)
                due = settings.save_every and state.sync and state.updates % settings.save_every == 0
                if due and not batch.is_last:
                    now = items | {"state": state, "statistics": statistics}
                    accel.save_state(ctx, settings.out, now, step=state.updates, keep=3)
            values, statistics = statistics.read(ctx)
            values |= {"epoch": state.epoch, **evaluate(ctx, model, test_loader)}
            accel.log(ctx, trackers, values, step=state.updates)
            now = items | {"state": state, "statistics": statistics}
            accel.save_state(ctx, settings.out, now, step=state.updates, keep=3)
    accel.print(ctx, f"curves: accel report {settings.out}")


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> dict[str, float]:
    """Return mean loss, right answers, number of the samples and accuracy, each counted once on any number of ranks."""
    model.eval()
    metrics = accel.metrics.running_metrics(test_loss="mean", right="count", tested="count")
    for batch in accel.batches(ctx, loader):
        inputs, targets = batch.data
        with accel.autocast(ctx):
            logits = model(inputs).float()
        losses = cross_entropy(logits, targets, reduction="none")
        found = {"test_loss": losses, "right": logits.argmax(1) == targets, "tested": torch.ones_like(targets)}
        metrics = metrics.add(batch.weights, **found)
    counted = metrics.read(ctx)[0]
    return counted | {"accuracy": counted["right"] / counted["tested"]}


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
        raise accel.errors.ConfigError("a batch does not divide", got=got, where="--batch-size and --accumulate")
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
        raise accel.errors.ConfigError(
            "the folder holds another run", expected=want, got=got, where=str(found), fix=fix
        )


def require(module: str, package: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise accel.errors.MissingExtraError(
            f"this example needs {package}", got=str(error), fix="Run: pip install 'accel-torch[examples]'"
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
    except accel.errors.ConfigError as error:
        sys.exit(f"digits.py: error: {error}")
