# SPDX-License-Identifier: Apache-2.0
"""An entry of the collection of hand-written models: how to make the model, its batches and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH = 32, 16, 16  # size of the vocabulary, longest sequence, features


class Batch(NamedTuple):
    """One batch with samples in dimension 0.

    Attributes:
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments of the model.
        targets: tensor that the loss takes, [rows] or [rows, length].
    """

    inputs: Any
    targets: Tensor


class Handwritten(NamedTuple):
    """One hand-written model.

    Attributes:
        name: of the entry, unique.
        build: makes the model in the default dtype with torch's default generator.
        draw: makes a batch from a generator, the number of samples and the length of sequences.
        loss: maps the model's output and the batch's targets to a scalar, a sum over samples.
        tags: traits that a test may select or exclude, see `TAGS`.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    tags: frozenset[str] = frozenset()

    def make(self) -> nn.Module:
        """The model in float64, with the same values at each call; no parameter is zero."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().double()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    def batch(self, seed: int, rows: int, length: int = 6) -> Batch:
        """A batch of float64 and int64, the same for the same arguments. `length` is at most `LENGTH`."""
        return self.draw(torch.Generator().manual_seed(seed), rows, length)


TAGS: Mapping[str, str] = {
    "language": "maps ids [rows, length] to logits [rows, length, WORDS]",
    "causal": "a position depends on no later one",
    "random": "draws random numbers in training",
    "batch_norm": "updates running statistics in training",
    "buffers": "changes buffers in training",
    "counts": "counts its forwards in training",
    "rows": "computes across the samples of a batch",
    "decisions": "takes a path that depends on activations",
    "free": "uses parameters outside of the module that holds them",
    "side": "hands tensors on by attributes, lists, hooks or caches",
    "in_place": "changes tensors in place between modules",
    "checkpoint": "calls torch.utils.checkpoint in its forward",
    "reentrant": "calls it with use_reentrant=True",
    "function": "has an autograd.Function",
    "shared": "calls one module several times",
    "frozen": "has parameters that do not require a gradient",
}


def entry(
    name: str,
    build: Callable[[], nn.Module],
    draw: Callable[[torch.Generator, int, int], Batch] | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    tags: str = "",
) -> Handwritten:
    """An entry; without `draw` a language model's, without `loss` the sum of all outputs' squares."""
    return Handwritten(name, build, draw or ids, loss or squares, frozenset(tags.split()))


def ids(generator: torch.Generator, rows: int, length: int) -> Batch:
    """Ids and their successors, both [rows, length]."""
    drawn = torch.randint(WORDS, (rows, length + 1), generator=generator)
    return Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def images(generator: torch.Generator, rows: int, _length: int) -> Batch:
    """Images [rows, 3, 8, 8] and a class for each."""
    return Batch(noise(generator, rows, 3, 8, 8), torch.randint(WORDS, (rows,), generator=generator))


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """The sum over tokens, or samples, of the cross-entropy of the first tensor of an output."""
    logits = tensors_of(outputs)[0]
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def squares(outputs: Any, _targets: Tensor) -> Tensor:
    """The sum of squares of each tensor of an output, weighted, so that no two tensors have the same part."""
    found = [each for each in tensors_of(outputs) if each.is_floating_point()]
    return torch.stack([(at + 1) * (each + 0.1).square().sum() for at, each in enumerate(found)]).sum()


def cross_entropy_and(outputs: Any, targets: Tensor) -> Tensor:
    """The cross-entropy of the first tensor, and the squares of the other ones."""
    first, *others = tensors_of(outputs)
    return cross_entropy(first, targets) + squares(others, targets) if others else cross_entropy(first, targets)


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if dataclasses.is_dataclass(outputs):
        outputs = vars(outputs)
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if not isinstance(outputs, list | tuple):
        return []
    return [tensor for each in outputs for tensor in tensors_of(each)]
