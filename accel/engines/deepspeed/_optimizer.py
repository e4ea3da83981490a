# SPDX-License-Identifier: Apache-2.0
"""The sections optimizer and scheduler, which stand for objects that `prepare` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.engines.deepspeed._draft import Draft, dotted
from accel.engines.deepspeed._record import ZERO
from accel.engines.deepspeed._resolved import Facts

_SCHEDULES = {
    "WarmupLR": "accel.schedules.Joined((warmup(steps), Constant()))",
    "WarmupDecayLR": "accel.schedules.Joined((warmup(steps), Linear(rest, end=0.0)))",
    "WarmupCosineLR": "accel.schedules.Joined((warmup(steps), Cosine(rest)))",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
}
_HOW = ("torch_adam", "adam_w_mode", "freeze_step", "cuda_aware", "comm_backend_name")  # of an implementation alone


def settle_optimizer(draft: Draft, facts: Facts) -> None:
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


def _compare(draft: Draft, section: Mapping[tuple[str, ...], Any], facts: Facts) -> None:
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
