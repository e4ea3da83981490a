# SPDX-License-Identifier: Apache-2.0
"""Optimizers x meshes: each is exact, equal up to a rounding with figure and reason, or refused by a typed error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import language_models as lm
import pytest
import torch

from accel.errors import AccelError, StepError
from accel.testing import Simulator

MESHES = {
    "ddp": ("dp=2", "ddp", 2),
    "fsdp": ("dp=2", "fsdp", 2),
    "tp": ("tp=2", "ddp", 2),
    "fsdp x tp": ("dp=2,tp=2", "fsdp", 4),
}
SHARDED = ("fsdp", "tp", "fsdp x tp")


class Rounded(NamedTuple):
    """The largest difference of parameters from one process after an epoch, and why it is not below 1e-10."""

    most: float
    why: str


class Row(NamedTuple):
    """An optimizer: where it is defined, its options, and its verdict on each mesh; "exact" where none is given."""

    path: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    verdicts: dict[str, Rounded | str] = {}  # noqa: RUF012


BF16 = Rounded(5e-3, "it orthogonalizes in bf16, and rounds parts otherwise than the whole")
TINY = Rounded(1e-8, "it divides by the root of sums of squares, of gradients that are 0 but for rounding")
SIGNS = Rounded(0.1, "it steps by signs, of gradients that are 0 but for rounding")
NOISE = Rounded(1e-3, "it divides by second moments of gradients that are 0 but for rounding")
SCALARS = Rounded(0.05, "alone it does not step float64 parameters without dimensions, and it steps their parts")
refused: Any = partial(dict.fromkeys, SHARDED, "refused")

TABLE = {
    "ASGD": Row("torch.optim"),
    "Adadelta": Row("torch.optim"),
    "Adafactor": Row("torch.optim", {}, {"ddp": NOISE, **refused()}),
    "Adagrad": Row("torch.optim", {}, dict.fromkeys(MESHES, TINY)),
    "Adam": Row("torch.optim"),
    "Adam, fused": Row("torch.optim", {"fused": True}),
    "AdamW": Row("torch.optim"),
    "AdamW, fused": Row("torch.optim", {"fused": True}),
    "AdamW, foreach": Row("torch.optim", {"foreach": True}),
    "Adamax": Row("torch.optim"),
    "Muon": Row("torch.optim", {}, dict.fromkeys(SHARDED, BF16)),
    "NAdam": Row("torch.optim"),
    "RAdam": Row("torch.optim"),
    "RMSprop": Row("torch.optim"),
    "Rprop": Row("torch.optim", {}, {"ddp": SIGNS, **refused()}),
    "SGD": Row("torch.optim"),
    "SGD, fused": Row("torch.optim", {"fused": True}, refused()),
    "SGD, momentum": Row("torch.optim", {"momentum": 0.9, "nesterov": True}),
    "AdamWScheduleFree": Row("schedulefree"),
    "AdamW8bit, 8-bit state": Row("bitsandbytes.optim", {"min_8bit_size": 1}, refused()),
    "AdamW8bit, torchao": Row("torchao.optim", {}, dict.fromkeys(SHARDED, SCALARS)),
    "accel's Adafactor": Row("accel.optim", {"eps": (1e-4, 1e-3)}),
}
NOT_STEPPED_SO = {"LBFGS", "SparseAdam"}  # needs a closure; takes sparse gradients alone: each has tests of its own


def make(name: str, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    row = TABLE[name]
    kind = getattr(importlib.import_module(row.path), name.removeprefix("accel's ").partition(",")[0])
    params = [each for each in params if each.ndim == 2] if name == "Muon" else params
    optimizer = kind(params, lr=0.01, **row.options)
    if row.path == "schedulefree":
        optimizer.train()
    return optimizer


def run(ranks: Simulator, name: str, mesh: str, strategy: str, size: int) -> list[lm.Run]:
    optimizer: Callable[..., Any] = partial(make, name)
    train = partial(lm.train, mesh=mesh, strategy=strategy, optimizer=optimizer)
    return ranks.run(lambda ctx: train(ctx), size, default_group=True)


def test_the_table_has_every_optimizer_of_torch() -> None:
    found = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert (
        found == {name.partition(",")[0] for name, row in TABLE.items() if row.path == "torch.optim"} | NOT_STEPPED_SO
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("AdamW", "SGD, fused") else pytest.mark.slow) for name in TABLE]
)
def test_verdicts_of_an_optimizer(ranks: Simulator, name: str) -> None:
    _ = pytest.importorskip(TABLE[name].path)
    (one,) = run(ranks, name, "dp=1", "ddp", 1)
    for label, (mesh, strategy, size) in MESHES.items():
        verdict = TABLE[name].verdicts.get(label, "exact")
        if verdict == "refused":
            with pytest.raises(AccelError) as error:
                run(ranks, name, mesh, strategy, size)
            assert isinstance(error.value, StepError), label
            assert error.value.fix, label
            continue
        most = verdict.most if isinstance(verdict, Rounded) else 1e-10
        for found in run(ranks, name, mesh, strategy, size):
            for key, each in found.parameters.items():
                assert float((each - one.parameters[key]).abs().max()) < most, f"{label}, {key}"
