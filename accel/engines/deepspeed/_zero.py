# SPDX-License-Identifier: Apache-2.0
"""The section zero_optimization: sizes from the model's width, and what needs which stage."""

from __future__ import annotations

from accel.engines.deepspeed._draft import Draft, dotted
from accel.engines.deepspeed._record import FIELD_KEYS, ZERO, DeepSpeed, Key
from accel.engines.deepspeed._resolved import Facts

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


def settle_zero(draft: Draft, config: DeepSpeed, facts: Facts) -> None:
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
            draft.problem(f"{draft.shown(key)}, but it acts at stage 3 alone, and the stage is {stage}. Leave it out.")


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
        draft.problem(f'{name}: "nvme" needs stage 3, but the stage is {stage}. Take "cpu".')
    path = draft.said((*section, "nvme_path"))
    if device == "nvme" and not path:
        draft.problem(f'{name}: "nvme" needs the folder of its files. Write nvme_path.')
    if device == "cpu" and path:
        draft.problem(f'{name}: nvme_path has no effect beside "cpu". Leave it out, or write "nvme".')
