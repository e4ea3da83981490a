# SPDX-License-Identifier: Apache-2.0
"""`resolve`: a configuration and the facts of a run, to settings for DeepSpeed. Pure; imports neither it nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.engines.deepspeed._draft import Draft, check_conflicts, check_foreign, check_known, check_names, dotted
from accel.engines.deepspeed._options import (
    FIELD_KEYS,
    ZERO,
    DeepSpeed,
    DeepSpeedSetting,
    Key,
    ResolvedDeepSpeed,
    RunFacts,
    contradictions,
)

_SCHEDULES = {
    "WarmupLR": "accel.schedules.Joined((warmup(steps), Constant()))",
    "WarmupDecayLR": "accel.schedules.Joined((warmup(steps), Linear(rest, end=0.0)))",
    "WarmupCosineLR": "accel.schedules.Joined((warmup(steps), Cosine(rest)))",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
}
_HOW = ("torch_adam", "adam_w_mode", "freeze_step", "cuda_aware", "comm_backend_name")  # of an implementation alone


def settle_optimizer(draft: Draft, facts: RunFacts) -> None:
    """Compare the sections with the optimizer that `prepare` was given, and take them out."""
    section = {key[1:]: row.value for key, row in draft.rows.items() if key[0] == "optimizer"}
    if section:
        _compare(draft, section, facts)
    scheduler = draft.said(("scheduler", "type"))
    if any(key[0] == "scheduler" for key in draft.rows):
        made = _SCHEDULES.get(str(scheduler), "one of torch.optim.lr_scheduler or accel.schedules")
        draft.problem(f"scheduler: {scheduler}, but optimizer_step(scheduler=) steps one. Leave it out; build {made}.")
    for key in [key for key in draft.rows if key[0] in ("optimizer", "scheduler")]:
        del draft.rows[key]
    if not facts.optimizer:
        return
    allowed = ("zero_allow_untested_optimizer",)
    if draft.said(allowed) is None:
        draft.fill(allowed, True, f"optimizer passed: {facts.optimizer}")
    forced = ("zero_force_ds_cpu_optimizer",)
    offloads = (ZERO, "offload_optimizer", "device") in draft.rows
    if offloads and not facts.optimizer.startswith("DeepSpeedCPU") and draft.said(forced) is None:
        draft.fill(forced, False, f"optimizer passed: {facts.optimizer}")


def _compare(draft: Draft, section: Mapping[tuple[str, ...], Any], facts: RunFacts) -> None:
    name = str(section.get(("type",), ""))
    options = {key[1]: value for key, value in section.items() if len(key) == 2 and key[0] == "params"}
    if name.lower() == "adam" and options.get("adam_w_mode", True):
        name = "AdamW"  # what DeepSpeed makes of it
    build = f"torch.optim.{name}(model.parameters(), ...)"
    if not facts.optimizer:
        draft.problem(f"optimizer: {name}, but prepare got no optimizer. Pass {build} to it, too.")
        return
    if name.lower() not in (facts.optimizer.lower(), facts.optimizer.lower().removeprefix("deepspeedcpu")):
        draft.problem(f"optimizer.type: {name}, but prepare got {facts.optimizer}. Leave the section out.")
        return
    for option, value in options.items():
        if value == "auto" or option in _HOW:
            continue
        key = dotted(("optimizer", "params", option))
        if option not in facts.optimizer_values:
            draft.problem(f"{key}: {value!r}, which {facts.optimizer} does not have. Leave it out.")
        elif not _alike(value, own := facts.optimizer_values[option]):
            draft.problem(f'{key}: {value!r}, but the optimizer passed has {own!r}. Write "auto".')


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = zip(left, right, strict=False)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return len(left) == len(right) and all(_alike(one, other) for one, other in pairs)  # pyright: ignore
    return left == right


_OPTIMIZER, _PARAMETERS = (ZERO, "offload_optimizer"), (ZERO, "offload_param")
_WIDE: dict[str, tuple[Key, float, int, str]] = {  # field: key, factor and power of the width, words
    "reduce_bucket": (FIELD_KEYS["reduce_bucket"], 1.0, 2, "{h} x {h}"),
    "prefetch_bucket": (FIELD_KEYS["prefetch_bucket"], 0.9, 2, "0.9 x {h} x {h}"),
    "persist_below": (FIELD_KEYS["persist_below"], 10.0, 1, "10 x {h}"),
}
_LEFT_OPEN: tuple[Key, ...] = (
    FIELD_KEYS["gather_bucket"],
    FIELD_KEYS["overlap"],
    (ZERO, "stage3_gather_16bit_weights_on_model_save"),
    (*_OPTIMIZER, "nvme_path"),
    (*_PARAMETERS, "nvme_path"),
)


def settle_zero(draft: Draft, config: DeepSpeed, facts: RunFacts) -> None:
    """Fill in the sizes, and note what needs another stage."""
    stage = config.stage
    draft.rows[FIELD_KEYS["stage"]] = draft.rows.pop(FIELD_KEYS["stage"])  # after what is filled in
    for field, (key, factor, power, words) in _WIDE.items():
        if key not in draft.rows or draft.rows[key].value != "auto":
            continue
        if facts.hidden_size is None or stage == 0 or (field != "reduce_bucket" and stage != 3):
            del draft.rows[key]  # DeepSpeed's own default
        else:
            value = int(factor * facts.hidden_size**power)
            draft.fill(key, value, f"width of the model: {words.format(h=facts.hidden_size)}")
    for key in _LEFT_OPEN:
        if key in draft.rows and draft.rows[key].value in ("auto", None):
            del draft.rows[key]
    _check_stage(draft, stage)
    for section, device in ((_OPTIMIZER, "the optimizer's state"), (_PARAMETERS, "parameters")):
        _settle_offload(draft, section, device, stage)


def _check_stage(draft: Draft, stage: int) -> None:
    third = [
        key
        for key in draft.rows
        if key[0] == ZERO and len(key) > 1 and (key[1].startswith("stage3_") or key[1] == "leaf_module")
    ]
    for key in third:
        if stage != 3:
            draft.problem(f"{draft.shown(key)}, but it acts only at stage 3, and the stage is {stage}. Leave it out.")


def _settle_offload(draft: Draft, section: Key, what: str, stage: int) -> None:
    keys = [key for key in draft.rows if key[: len(section)] == section]
    device = draft.said((*section, "device"))
    if device in (None, "none"):
        for key in keys:
            del draft.rows[key]  # a section that moves nothing
        return
    name = dotted(section)
    least = 1 if section == _OPTIMIZER else 3
    if stage < least:
        draft.problem(f"{name}: moves {what} from stage {least} on, but the stage is {stage}.")
    elif device == "nvme" and stage != 3:
        draft.problem(f'{name}: "nvme" needs stage 3, but the stage is {stage}. Use "cpu".')
    path = draft.said((*section, "nvme_path"))
    if device == "nvme" and not path:
        draft.problem(f'{name}: "nvme" needs the folder of its files. Write nvme_path.')
    if device == "cpu" and path:
        draft.problem(f'{name}: nvme_path has no effect with "cpu". Leave it out, or write "nvme".')


_MICRO, _STEPS, _BATCH = ("train_micro_batch_size_per_gpu",), ("gradient_accumulation_steps",), ("train_batch_size",)
_CLIPPING = ("gradient_clipping",)
_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")


def resolve(config: DeepSpeed, facts: RunFacts, *, imposed: Mapping[str, Any] | None = None) -> ResolvedDeepSpeed:
    """Return every setting of a configuration with its source. No communication.

    `imposed` are values that the training loop needs, by dotted key. All contradictions, and each "auto" that nothing
    fills in, are listed in one `ConfigError`.
    """
    draft = Draft.of(config)
    check_names(draft)
    check_foreign(draft)
    newer = check_known(draft)
    _settle_batch(draft, facts)
    clipping = _settle_clipping(draft, facts)
    _settle_precision(draft, facts)
    check_conflicts(draft, facts, config.stage)
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
    return ResolvedDeepSpeed(draft.rows, clipping, steps.value if named else None, newer)


def _settle_batch(draft: Draft, facts: RunFacts) -> None:
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


def _settle_clipping(draft: Draft, facts: RunFacts) -> float | None:
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


def _settle_precision(draft: Draft, facts: RunFacts) -> None:
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
            draft.problem(f'{place}: {problem}, which this engine does not have. Use "bf16", "fp16" or "fp32".')
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
            'accel.precision.Precision(compute="bf16", params="fp32") for autocast on fp32 parameters.'
        )
    if precision.compute == "fp16":
        _settle_loss_scale(draft)


def _settle_loss_scale(draft: Draft) -> None:
    """The loss scale is the state's; DeepSpeed's own stays at 1."""
    said = {name: value for name in _SCALE if (value := draft.said(("fp16", name))) is not None}
    if said.pop("loss_scale", 0) not in (0, 1):
        draft.problem(
            f"{draft.shown(('fp16', 'loss_scale'))}, but the state's loss scale holds. "
            "Pass it there instead: accel.train_state(ctx, scaler=accel.LossScale(scale=...))."
        )
    if said:
        draft.problem(
            f"fp16.{', fp16.'.join(said)}: the state's loss scale holds. Leave them out, and write "
            "accel.train_state(ctx, scaler=accel.loss_scale(ctx, initial=2.0**power, growth_interval=window))."
        )
    draft.rows["fp16", "loss_scale"] = DeepSpeedSetting(1.0, "the state's loss scale holds")
