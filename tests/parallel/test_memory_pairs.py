# SPDX-License-Identifier: Apache-2.0
"""What works with what: each pair of a feature that saves memory and another feature trains as without the former.

docs/memory.md has the table of these pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import language_models as lm
import pytest
import torch
from torch import Tensor, nn

import accel
from accel.optim import _streamed_state
from accel.testing import Simulator

Of = Callable[[nn.Module], Any]


class Feature(NamedTuple):
    """A feature of a run: fields of the plan, a change of the model, an optimizer, a mesh, a precision, options."""

    plan: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it
    model: Of | None = None
    after: bool = False  # the change of the model comes after the others
    optimizer: Of | None = None
    mesh: str = ""
    strategy: Any = "ddp"
    precision: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it


MASTERS = accel.precision.Precision(params="bf16", master_weights="fp32")
SAVING = {
    "deferred logits": Feature(plan={"logits": "deferred"}),
    "activations on the host": Feature(model=partial(accel.offload_activations, min_bytes=1)),
    "state on the host": Feature(plan={"offload": "optimizer"}),
    "parts of the sequence": Feature(model=lambda model: accel.chunk_sequence(model, lm.Mlp, parts=3)),
    "recomputation": Feature(model=accel.checkpoint_activations),
}
OTHERS = {
    "compiled blocks": Feature(model=partial(accel.compile_model, regions=lm.Block, backend="aot_eager"), after=True),
    "Muon": Feature(optimizer=lambda model: accel.optim.Muon(model, lr=0.02, adamw_lr=0.01, dtype=None)),
    "Adafactor": Feature(optimizer=lambda model: accel.optim.Adafactor(model.parameters(), lr=0.02, eps=(1e-4, 1e-3))),
    "ddp": Feature(mesh="dp=2"),
    "fsdp": Feature(mesh="dp=2", strategy="fsdp"),
    "tp": Feature(mesh="tp=2"),
    "cp": Feature(mesh="cp=2"),
    "pp": Feature(mesh="pp=2"),
    "ep": Feature(mesh="dp=2,ep=2", strategy="fsdp", options={"experts": 4}),
    "autocast": Feature(precision="bf16"),
    "master weights": Feature(precision=MASTERS),
    "accumulation": Feature(options={"accumulation": 2}),
}
FEATURES = {**SAVING, **OTHERS}
NAMES = list(FEATURES)
PAIRS = [(one, other) for at, one in enumerate(SAVING) for other in NAMES[at + 1 :]]
QUICK = {("deferred logits", "activations on the host"), ("state on the host", "parts of the sequence")}


def run_with(ctx: accel.DistContext, *features: Feature) -> lm.Run:
    """Train with some features. Precisions but float64 are of a model in float32."""
    mesh = next((each.mesh for each in features if each.mesh), "dp=1")
    strategy = next((each.strategy for each in features if each.mesh), "ddp")
    precision = next((each.precision for each in features if each.precision is not None), None)
    options: dict[str, Any] = {"epochs": 2}
    plan: dict[str, Any] = {}
    for each in features:
        options |= each.options
        plan |= each.plan

    def of_model(model: nn.Module) -> torch.optim.Optimizer:
        if precision is not None:
            _ = model.float()
        for each in sorted(features, key=lambda each: each.after):
            if each.model is not None:
                _ = each.model(model)
        make = next((each.optimizer for each in features if each.optimizer), None)
        if make is not None:
            return make(model)
        if precision is not None:  # AdamW steps gradients that are 0 in exact numbers by the signs of their roundings
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    ctx = ctx if precision is None else accel.replace(ctx, precision=precision)
    spread = lm.plan_of(options.get("experts", 0), **plan)
    return lm.train(ctx, mesh, strategy=strategy, plan=spread, of_model=of_model, **options)


def size_of(*features: Feature) -> int:
    """Number of ranks of a run."""
    return 2 if any(each.mesh for each in features) else 1


def changes_values(feature: Feature) -> bool:
    """Return whether a run with it ends with other parameters by design."""
    return feature.optimizer is not None or feature.precision is not None or bool(feature.options)


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow, id=" and ".join(each)) for each in PAIRS],
)
def test_pairs_train_as_without(ranks: Simulator, monkeypatch: pytest.MonkeyPatch, one: str, other: str) -> None:
    monkeypatch.setattr(_streamed_state, "STATE_BUCKET", 16 * 16 * 8)
    pair = FEATURES[one], FEATURES[other]
    kept = [each for each in pair if changes_values(each)]
    plain = [each._replace(mesh="") for each in kept]
    (expected,) = ranks.run(lambda ctx: run_with(ctx, *plain), 1, default_group=True)
    is_narrow = any(each.precision is not None for each in pair)
    for run in ranks.run(lambda ctx: run_with(ctx, *pair), size_of(*pair), default_group=True):
        for name, each in run.parameters.items():
            limit = 0.02 if is_narrow else 1e-10
            assert distance(each, expected.parameters[name]) < limit, name


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference in float64; of 16 bits, the relative one of the whole tensor."""
    if one.dtype == torch.float64:
        return float((one - other).abs().max())
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-3))


def test_the_page_has_each_pair() -> None:
    """A row for each feature that saves memory, a column for each of all."""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    rows = dict(re.findall(r"^\| ([a-zA-Z ]+) \|((?: (?:yes|no|-) \|)+)$", page, re.M))
    assert list(rows) == NAMES
    for name in NAMES:
        cells = [each.strip() for each in rows[name].strip(" |").split("|")]
        assert cells == ["-" if column == name else "yes" for column in SAVING], name
