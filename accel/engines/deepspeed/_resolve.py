# SPDX-License-Identifier: Apache-2.0
"""`resolve`: a configuration and the facts of a run, to settings for DeepSpeed. Pure; imports neither it nor torch.

Every "auto" is filled in from a fact, each value keeps its source, and all that does not fit is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.engines.deepspeed._draft import Draft, dotted
from accel.engines.deepspeed._foreign import check_foreign, check_names
from accel.engines.deepspeed._optimizer import settle_optimizer
from accel.engines.deepspeed._record import DeepSpeed
from accel.engines.deepspeed._resolved import Facts, Resolved, Setting, contradictions
from accel.engines.deepspeed._zero import settle_zero

_MICRO, _STEPS, _BATCH = ("train_micro_batch_size_per_gpu",), ("gradient_accumulation_steps",), ("train_batch_size",)
_CLIPPING = ("gradient_clipping",)
_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")


def resolve(config: DeepSpeed, facts: Facts, *, imposed: Mapping[str, Any] | None = None) -> Resolved:
    """Settle every value of a configuration. No communication.

    Args:
        config: the configuration.
        facts: values that context, loader, model and optimizer have.
        imposed: values that the training loop needs, by key with dots; a configuration that says otherwise is refused.

    Returns:
        The settings, each with its source.

    Raises:
        ConfigError: the configuration contradicts itself, the facts or the training loop, or leaves an "auto" that
            nothing fills in. The error lists all that does not fit.
    """
    draft = Draft.of(config)
    check_names(draft)
    check_foreign(draft)
    _settle_batch(draft, facts)
    clipping = _settle_clipping(draft, facts)
    _settle_precision(draft, facts)
    settle_zero(draft, config, facts)
    settle_optimizer(draft, facts)
    for name, value in (imposed or {}).items():
        draft.impose(tuple(name.split(".")), value)
    for key in [key for key, row in draft.rows.items() if row.value == "auto"]:
        draft.problem(f'{dotted(key)}: "auto", which nothing here fills in. Write a value, or leave it out.')
    if draft.problems:
        raise contradictions(draft.problems, config.source or "DeepSpeed")
    steps = draft.rows[_STEPS]
    named = facts.accumulation is not None or not steps.source.startswith("default")
    return Resolved(draft.rows, clipping, steps.value if named else None)


def _settle_batch(draft: Draft, facts: Facts) -> None:
    """Micro-batch, accumulation and their product with the ranks."""
    for key in (_MICRO, _STEPS, _BATCH):
        said = draft.said(key)
        if said is not None and (type(said) is not int or said < 1):
            draft.problem(f"{draft.shown(key)}, not a count. Write an integer from 1.")
            del draft.rows[key]
    batch = draft.said(_BATCH)
    steps = draft.agree(_STEPS, facts.accumulation, facts.places.get("accumulation", "context"))
    rows = draft.agree(_MICRO, facts.rows, facts.places.get("rows", "loader"))
    if batch is not None and steps is None and rows is not None and batch % (rows * facts.ranks) == 0:
        steps = batch // (rows * facts.ranks)
        draft.fill(_STEPS, steps, "from train_batch_size")
    if steps is None:
        steps = 1
        draft.fill(_STEPS, steps, "default")
    if batch is not None and rows is None and batch % (steps * facts.ranks) == 0:
        rows = batch // (steps * facts.ranks)
        draft.fill(_MICRO, rows, "from train_batch_size")
    if rows is None:
        rows = 1
        draft.fill(_MICRO, rows, "no loader; not used")
    whole = rows * steps * facts.ranks
    if batch is None:
        draft.fill(_BATCH, whole, "micro x steps x ranks")
    elif batch != whole:
        draft.problem(
            f"{draft.shown(_BATCH)}, but {rows} samples x {steps} micro-batches x {facts.ranks} ranks are {whole}. "
            'Write "auto", or leave it out.'
        )


def _settle_clipping(draft: Draft, facts: Facts) -> float | None:
    said = draft.said(_CLIPPING)
    if said is None:
        _ = draft.rows.pop(_CLIPPING, None)
        if facts.max_norm is not None:
            draft.fill(_CLIPPING, facts.max_norm, "optimizer_step(max_norm=)")
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or said < 0:
        draft.problem(f"{draft.shown(_CLIPPING)}, not a norm. Write a number from 0.")
        return None
    if facts.max_norm is not None and facts.max_norm != said:
        draft.problem(f'{draft.shown(_CLIPPING)}, but optimizer_step has max_norm={facts.max_norm:g}. Write "auto".')
    return float(said) or None


def _settle_precision(draft: Draft, facts: Facts) -> None:
    for key in [key for key in draft.rows if key[0] == "bfloat16"]:  # its older name
        draft.rows["bf16", *key[1:]] = draft.rows.pop(key)
    precision, place = facts.precision, facts.places.get("precision", "precision of the context")
    for problem, holds in (
        ("parameters in bf16 without an fp32 copy", precision.params == "bf16"),
        ("master weights by choice", precision.master_weights is not None),
        ("fp8 layers", precision.fp8 is not None),
        ("fp32 modules within a model in 16 bits", bool(precision.fp32_modules)),
        ("converted outputs", precision.outputs is not None),
    ):
        if holds:
            draft.problem(f'{place}: {problem}, which this engine does not have. Take "bf16", "fp16" or "fp32".')
    for name in ("bf16", "fp16"):
        on = precision.compute == name and precision.params is None
        key = (name, "enabled")
        said = draft.said(key)
        if said is not None and said is not on:
            draft.problem(
                f'{draft.shown(key)}, but {place} is "{precision.name}". Write "auto", or pass another precision.'
            )
        elif said is None and (on or key in draft.rows or any(other[0] == name for other in draft.rows)):
            draft.fill(key, on, place)
    if draft.said(("torch_autocast", "enabled")):
        draft.problem(
            f"{draft.shown(('torch_autocast', 'enabled'))}, which accel.autocast does. Leave it out, and pass "
            'accel.Precision(compute="bf16", params="fp32") for autocast on fp32 parameters.'
        )
    if precision.compute == "fp16":
        _settle_loss_scale(draft)


def _settle_loss_scale(draft: Draft) -> None:
    """The loss scale is the state's; DeepSpeed's own stays at 1."""
    said = {name: value for name in _SCALE if (value := draft.said(("fp16", name))) is not None}
    if said.pop("loss_scale", 0) not in (0, 1):
        draft.problem(
            f"{draft.shown(('fp16', 'loss_scale'))}, but the state's loss scale holds. "
            "Pass accel.LossScale(scale=...) to train_state instead."
        )
    if said:
        draft.problem(
            f"fp16.{', fp16.'.join(said)}: the state's loss scale holds. Leave them out, and pass "
            "accel.loss_scale(ctx, initial=2.0**power, growth_interval=window) to train_state."
        )
    draft.rows["fp16", "loss_scale"] = Setting(1.0, "the state's loss scale holds")
