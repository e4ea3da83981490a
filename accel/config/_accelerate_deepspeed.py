# SPDX-License-Identifier: Apache-2.0
"""The section deepspeed_config of a file of Accelerate, as fields of `accel.DeepSpeed`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_FILE = "config_file"
_OFFLOADS = {"offload_optimizer": "offload_optimizer_", "offload_parameters": "offload_param_"}
_EMPTY = (None, "", "none", "None", False)
_LEFT = {
    "zero3_init_flag": "build the model with accel.init_empty_weights in the script",
    "zero3_save_16bit_model": "accel.save_model gathers the weights at any stage",
    "hostfile": "accel launch --hostfile",
    "inclusion_filter": "accel launch --include",
    "exclusion_filter": "accel launch --exclude",
    "multinode_launcher": "accel launch --hostfile starts hosts by ssh, accel launch --slurm by Slurm",
}
_INERT = {"multinode_launcher": ("standard", "pdsh")}
_TAKEN = ("zero_stage", "gradient_clipping", "gradient_accumulation_steps", "moe_layer_cls_names", _FILE)


class Translated(NamedTuple):
    """The setting `deepspeed`, a path or the fields of a record; and keys without a counterpart, with the way out."""

    setting: str | dict[str, Any]
    left_out: dict[str, str]


def translate_deepspeed(section: Mapping[str, Any]) -> Translated:
    """Return what a section says.

    A DeepSpeed JSON that it names says all: the launcher of Accelerate refuses other keys beside it.

    Args:
        section: keys, without the prefix "deepspeed_", and values of the section.
    """
    left = {
        key: _LEFT.get(key, "nothing here corresponds to it")
        for key, value in section.items()
        if not _is_taken(key) and value not in _EMPTY and value not in _INERT.get(key, ())
    }
    if section.get(_FILE) not in _EMPTY:
        return Translated(section[_FILE], left)
    fields: dict[str, Any] = {"stage": 2 if section.get("zero_stage") is None else section["zero_stage"]}
    for field, prefix in _OFFLOADS.items():
        device = section.get(f"{prefix}device")
        if device not in _EMPTY:
            path = section.get(f"{prefix}nvme_path")
            fields[field] = {"device": device} | ({"path": path} if device == "nvme" and path not in _EMPTY else {})
    names = section.get("moe_layer_cls_names")
    if names not in _EMPTY:
        fields["leaf_modules"] = [name.strip() for name in str(names).split(",")]
    clipping = section.get("gradient_clipping")
    if clipping not in _EMPTY:
        fields["settings"] = {"gradient_clipping": clipping}
    return Translated(fields, left)


def _is_taken(key: str) -> bool:
    return key in _TAKEN or key.startswith(tuple(_OFFLOADS.values()))
