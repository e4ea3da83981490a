# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeed`: the options of one model under DeepSpeed, as a frozen record. Free of torch and of DeepSpeed.

A field says what DeepSpeed's JSON says at one key; `settings` holds every other key of that JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from accel.errors import ConfigError

Auto = Literal["auto", "default"]
Key = tuple[str, ...]  # a path in DeepSpeed's JSON
Elements = Annotated[int, Meta(ge=0)]

ZERO = "zero_optimization"
FIELD_KEYS: Mapping[str, Key] = {
    "stage": (ZERO, "stage"),
    "offload_optimizer": (ZERO, "offload_optimizer"),
    "offload_parameters": (ZERO, "offload_param"),
    "reduce_bucket": (ZERO, "reduce_bucket_size"),
    "gather_bucket": (ZERO, "allgather_bucket_size"),
    "prefetch_bucket": (ZERO, "stage3_prefetch_bucket_size"),
    "persist_below": (ZERO, "stage3_param_persistence_threshold"),
    "overlap": (ZERO, "overlap_comm"),
    "leaf_modules": (ZERO, "leaf_module", "classes"),
}
_OFFLOAD_KEYS = {"device": "device", "path": "nvme_path", "pin_memory": "pin_memory"}


class Offload(msgspec.Struct, frozen=True):
    """Place of a part of the training state between its uses.

    Attributes:
        device: "cpu" for host memory, "nvme" for files.
        path: folder of the files, on a local drive; for "nvme".
        pin_memory: whether host memory is page-locked; None for DeepSpeed's default.
    """

    device: Literal["cpu", "nvme"] = "cpu"
    path: str = ""
    pin_memory: bool | None = None


class DeepSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one model under DeepSpeed. Buckets and thresholds count elements; "default" leaves them to DeepSpeed.

    Attributes:
        stage: parts of the state that ranks share out: 0 none, 1 the optimizer's state, 2 gradients too, 3 parameters.
        offload_optimizer: place of the optimizer's state, from stage 1; None for the device.
        offload_parameters: place of parameters, at stage 3; None for the device.
        reduce_bucket: elements of one reduction of gradients; "auto": the square of the model's hidden size.
        gather_bucket: elements of one gather of parameters after a step.
        prefetch_bucket: elements that stage 3 gathers ahead; "auto": 0.9 times the square of the hidden size.
        persist_below: parameters of fewer elements stay whole at stage 3; "auto": ten times the hidden size.
        overlap: whether gradients travel during backward.
        leaf_modules: classes of modules that stage 3 gathers as a whole, such as a block of experts.
        settings: every other key of DeepSpeed's JSON, nested as there; "auto" is filled in.
        source: file that it was read from, for tables and errors.
    """

    stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: Offload | Literal["cpu"] | None = None
    offload_parameters: Offload | Literal["cpu"] | None = None
    reduce_bucket: Annotated[int, Meta(ge=1)] | Auto = "auto"
    gather_bucket: Elements | Auto = "default"
    prefetch_bucket: Elements | Auto = "auto"
    persist_below: Elements | Auto = "auto"
    overlap: bool | Auto = "default"
    leaf_modules: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    source: str = ""

    def __post_init__(self) -> None:
        try:
            plain = {name: getattr(self, name) for name in self.__struct_fields__}
            _ = msgspec.convert(plain, _Checked)
        except msgspec.ValidationError as error:
            raise ConfigError("not usable", got=_lowered(str(error)), where="DeepSpeed") from None

    def values(self) -> dict[Key, Any]:
        """Return what the record says, by the key in DeepSpeed's JSON.

        Raises:
            ConfigError: a field and `settings` say something at one key.
        """
        fields = {key: value for _, key, value in self.said()}
        rest = flat(self.settings)
        for key in rest:
            for own in fields:
                if key[: len(own)] == own or own[: len(key)] == key:
                    raise ConfigError(
                        "a key that a field says too",
                        got=".".join(key),
                        where="DeepSpeed.settings",
                        fix=f"Write it as {field_of(own)}= alone.",
                    )
        return fields | rest

    def said(self) -> Iterator[tuple[str, Key, Any]]:
        """Yield field, key and value of each key that the fields say something at."""
        for name, key in FIELD_KEYS.items():
            value = getattr(self, name)
            if value is None or value in ((), "default"):
                continue
            if name.startswith("offload_"):
                where = Offload() if value == "cpu" else cast(Offload, value)
                for attribute, part in _OFFLOAD_KEYS.items():
                    if (own := getattr(where, attribute)) not in (None, ""):
                        yield name, (*key, part), own
            else:
                yield name, key, list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


class _Checked(DeepSpeed, frozen=True, kw_only=True):
    """The same fields, without a check of their own."""

    def __post_init__(self) -> None:
        pass


def field_of(key: Key) -> str:
    """Return the field that says something at a key or above it; empty for none."""
    return next((name for name, own in FIELD_KEYS.items() if key[: len(own)] == own), "")


def flat(values: Mapping[str, Any], above: Key = ()) -> dict[Key, Any]:
    """Return the leaves of nested mappings by path; an empty mapping is a leaf."""
    found: dict[Key, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(cast(Mapping[str, Any], value), (*above, name))
        else:
            found[*above, name] = value
    return found


def nested(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """Return leaves by path as nested dicts; the inverse of `flat`."""
    found: dict[str, Any] = {}
    for key, value in leaves.items():
        inner = found
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = value
    return found


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
