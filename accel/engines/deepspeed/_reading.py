# SPDX-License-Identifier: Apache-2.0
"""`read_deepspeed`: the record of a DeepSpeed JSON, or of what a section [deepspeed] says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from accel.config import decode_values
from accel.engines.deepspeed._record import FIELD_KEYS, DeepSpeed, Key, flat, nested
from accel.errors import ConfigError, did_you_mean

_SIZES = ("reduce_bucket", "gather_bucket", "prefetch_bucket", "persist_below")
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
_OFFLOAD_FIELDS = {"device": "device", "nvme_path": "path", "pin_memory": "pin_memory"}


def read_deepspeed(config: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeed:
    """Return the record of a DeepSpeed configuration. No communication.

    Args:
        config: path of a JSON file as DeepSpeed takes it, or its content.

    Raises:
        ConfigError: the file cannot be read or is malformed, or a value is none that its key takes.
    """
    if isinstance(config, Mapping):
        return from_json(config, source="the DeepSpeed settings")
    path = os.fspath(config)
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        raise ConfigError("DeepSpeed's configuration cannot be read", got=reason, where=path) from None
    return from_json(decode_values(text, path if path.endswith(".json") else f"{path}.json"), source=path)


def from_json(values: Mapping[str, Any], *, source: str = "") -> DeepSpeed:
    """Return the record of the content of a DeepSpeed JSON.

    Args:
        values: its keys and values.
        source: its path, for tables and errors.

    Raises:
        ConfigError: a value is none that its key takes.
    """
    leaves = flat(values)
    fields: dict[str, Any] = {"stage": 0, **dict.fromkeys(_SIZES, "default")}
    for name, key in FIELD_KEYS.items():
        if name in _OFFLOADS:
            fields[name] = _offload(leaves, key)
        elif key in leaves:
            fields[name] = leaves.pop(key)
    if isinstance(fields["stage"], float) and fields["stage"].is_integer():
        fields["stage"] = int(fields["stage"])
    for name in _SIZES:  # 5e8 is usual there
        if isinstance(value := fields.get(name), float) and value.is_integer():
            fields[name] = int(value)
    return _made({**fields, "settings": nested(leaves), "source": source}, source or "DeepSpeed's configuration")


def from_section(values: Mapping[str, Any], *, source: str = "") -> DeepSpeed:
    """Return the record whose fields a section [deepspeed] sets.

    Args:
        values: fields of `DeepSpeed` and their values.
        source: place of the section, for tables and errors.

    Raises:
        ConfigError: no such field, or a value that it does not take.
    """
    known = [name for name in DeepSpeed.__struct_fields__ if name != "source"]
    for name in values:
        if name not in known:
            keys = f"Keys of DeepSpeed's own JSON stand in `settings`. {did_you_mean(name, known)}"
            raise ConfigError("unknown key", got=repr(name), where=source or "section deepspeed", fix=keys)
    return _made({**values, "source": source}, source or "section deepspeed")


def from_setting(text: str, where: str = "deepspeed=") -> DeepSpeed:
    """Return the record that the setting `deepspeed` stands for. Reads a file where it names one.

    Args:
        text: path of a DeepSpeed JSON; or the fields of a record as a JSON object, as a section becomes; or nothing.
        where: place of the setting, for errors.

    Raises:
        ConfigError: the file cannot be read, or a field or a value is none.
    """
    if not text.startswith("{"):
        return read_deepspeed(text) if text else DeepSpeed()
    values: dict[str, Any] = msgspec.json.decode(text)
    source = values.pop("source", where)  # a record says its own
    return from_section(values, source=source)


def _offload(leaves: dict[Key, Any], key: Key) -> dict[str, Any] | None:
    """Take what the record has a field for; the rest of the section stays a setting of DeepSpeed's."""
    own = {leaf[-1]: leaf for leaf in leaves if leaf[:-1] == key}
    if leaves.get((*key, "device")) not in ("cpu", "nvme"):
        return None  # "none", "auto" or nothing
    return {
        field: value
        for name, field in _OFFLOAD_FIELDS.items()
        if name in own and (value := leaves.pop(own[name])) not in (None, "")
    }


def _made(fields: dict[str, Any], where: str) -> DeepSpeed:
    try:
        return msgspec.convert(fields, DeepSpeed)
    except msgspec.ValidationError as error:
        reason = str(error)
        raise ConfigError("not usable", got=reason[:1].lower() + reason[1:], where=where) from None
