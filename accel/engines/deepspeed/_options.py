# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeed`: the options of one model as a frozen record, read from JSON; and settings with their sources."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from accel.config._files import decode_values
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean
from accel.formats import Precision
from accel.opening import read_named
from accel.terminal import show_text

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
        overlap: whether gradients are sent during backward.
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
            raise ConfigError("the options are not valid", got=_lowered(str(error)), where="DeepSpeed") from None

    def values(self) -> dict[Key, Any]:
        """Return the record's values, by the key in DeepSpeed's JSON.

        Raises:
            ConfigError: a field and `settings` set one key.
        """
        fields = {key: value for _, key, value in self.said()}
        rest = flat(self.settings)
        for key in rest:
            for own in fields:
                if key[: len(own)] == own or own[: len(key)] == key:
                    raise ConfigError(
                        "a key that a field sets too",
                        got=".".join(key),
                        where="DeepSpeed.settings",
                        fix=f"Write it as {field_of(own)}= only.",
                    )
        return fields | rest

    def said(self) -> Iterator[tuple[str, Key, Any]]:
        """Yield field, key and value of each key that the fields set."""
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
    """The same fields, unchecked."""

    def __post_init__(self) -> None:
        pass


def field_of(key: Key) -> str:
    """Return the field that sets a key or one above it; empty for none."""
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


_SIZES = ("reduce_bucket", "gather_bucket", "prefetch_bucket", "persist_below")


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
        text = read_named(path).decode()
    except (OSError, ValueError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        raise ConfigError("DeepSpeed's configuration cannot be read", got=reason, where=path) from None
    return from_json(decode_values(text, path if path.endswith(".json") else f"{path}.json"), source=path)


def from_json(values: Mapping[str, Any], *, source: str = "") -> DeepSpeed:
    """Return the record of a DeepSpeed JSON's content, of the path `source`; an invalid value is a `ConfigError`."""
    leaves = flat(values)
    fields: dict[str, Any] = {"stage": 0, **dict.fromkeys(_SIZES, "default")}
    for name, key in FIELD_KEYS.items():
        if name.startswith("offload_"):
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
    """Return the record of a section [deepspeed]; `source` is its place, for tables and errors."""
    known = [name for name in DeepSpeed.__struct_fields__ if name != "source"]
    for name in values:
        if name not in known:
            keys = f"Keys of DeepSpeed's own JSON stand in `settings`. {did_you_mean(name, known)}"
            raise ConfigError("unknown key", got=repr(name), where=source or "section deepspeed", fix=keys)
    return _made({**values, "source": source}, source or "section deepspeed")


def from_setting(text: str, where: str = "deepspeed=") -> DeepSpeed:
    """Return the record of the setting `deepspeed`: of the JSON file that it names, or of fields as a JSON object.

    An empty text gives the defaults. `where` is the place of the setting, for errors.
    """
    if not text.startswith("{"):
        return read_deepspeed(text) if text else DeepSpeed()
    values: dict[str, Any] = msgspec.json.decode(text)
    source = values.pop("source", where)  # a record has its own
    return from_section(values, source=source)


def _offload(leaves: dict[Key, Any], key: Key) -> dict[str, Any] | None:
    """Take what the record has a field for; the rest of the section stays a setting of DeepSpeed's."""
    own = {leaf[-1]: leaf for leaf in leaves if leaf[:-1] == key}
    if leaves.get((*key, "device")) not in ("cpu", "nvme"):
        return None  # "none", "auto" or nothing
    return {
        field: value
        for field, name in _OFFLOAD_KEYS.items()
        if name in own and (value := leaves.pop(own[name])) not in (None, "")
    }


def _made(fields: dict[str, Any], where: str) -> DeepSpeed:
    try:
        return msgspec.convert(fields, DeepSpeed)
    except msgspec.ValidationError as error:
        raise ConfigError("the options are not valid", got=_lowered(str(error)), where=where) from None


_COLUMNS = 80
_VALUE = 14


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Values that context, loader, model and optimizer have. None, or an empty text, where unknown.

    Attributes:
        ranks: data-parallel ranks.
        precision: precision of the run.
        rows: samples of a rank's micro-batch.
        accumulation: micro-batches of an optimizer step.
        max_norm: norm to which `optimizer_step` clips.
        hidden_size: width of the model, from its configuration.
        optimizer, optimizer_values: class of the optimizer and its options.
        places: the place where the user wrote a fact, by its name, for tables and errors.
    """

    ranks: int = 1
    precision: Precision = Precision()
    rows: int | None = None
    accumulation: int | None = None
    max_norm: float | None = None
    hidden_size: int | None = None
    optimizer: str = ""
    optimizer_values: Mapping[str, Any] = {}
    places: Mapping[str, str] = {}


class DeepSpeedSetting(NamedTuple):
    """A value for DeepSpeed, and its source."""

    value: Any
    source: str


class ResolvedDeepSpeed(msgspec.Struct, frozen=True):
    """Settings for DeepSpeed, without "auto" and without contradictions.

    Attributes:
        rows: value and source by key, in the order of DeepSpeed's JSON.
        clipping: norm that the configuration names for clipping; None if it names none.
        accumulation: micro-batches of an optimizer step that configuration or facts name; None if neither does.
        newer: keys that the recorded version of DeepSpeed does not have, and that are no slip of one that it has.
    """

    rows: Mapping[Key, DeepSpeedSetting]
    clipping: float | None = None
    accumulation: int | None = None
    newer: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """A new dict for DeepSpeed, as its JSON is nested."""
        return nested({key: row.value for key, row in self.rows.items()})

    def table(self) -> str:
        """Return keys, values and sources as a table of 80 columns."""
        lines: list[tuple[str, str, str]] = [("KEY", "VALUE", "SOURCE")]
        above: Key = ()
        for key, row in sorted(self.rows.items(), key=lambda item: (len(item[0]) > 1, item[0])):
            new = (depth for depth in range(len(key) - 1) if key[: depth + 1] != above[: depth + 1])
            lines += [("  " * depth + key[depth], "", "") for depth in new]
            lines.append(("  " * (len(key) - 1) + key[-1], _short(row.value), row.source))
            above = key[:-1]
        lines = [(show_text(key), show_text(value), show_text(source)) for key, value, source in lines]
        first = max(len(key) for key, _, _ in lines)
        second = max(len(value) for _, value, _ in lines)
        return "\n".join(_line(line, first, second) for line in lines)

    def check_step(self, *, max_norm: float | None, accumulation: int | None) -> None:
        """Raise `ConfigError` if a step clips to another norm than the configuration, or has other micro-batches.

        None for a step that does not clip, and for micro-batches that the caller does not count.
        """
        problems: list[str] = []
        if self.clipping is not None and max_norm != self.clipping:
            problems.append(
                f"gradient_clipping: {self.clipping:g} in DeepSpeed's configuration, but max_norm={max_norm} here. "
                f'Pass max_norm={self.clipping:g}, or write "auto".'
            )
        if None not in (self.accumulation, accumulation) and accumulation != self.accumulation:
            problems.append(
                f"gradient_accumulation_steps: {self.accumulation} in DeepSpeed's configuration, but the state has "
                f'{accumulation}. Pass accumulation={self.accumulation} to train_state, or write "auto".'
            )
        if problems:
            raise contradictions(problems, where="optimizer_step")


def contradictions(problems: list[str], where: str) -> ConfigError:
    """Make the error of all that does not fit."""
    listed = "".join(f"\n- {each}" for each in problems)
    return ConfigError("DeepSpeed's configuration contradicts the run", got=listed, where=where)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 3]}..."


def _line(cells: tuple[str, str, str], first: int, second: int) -> str:
    key, value, source = cells
    begin = f"{key:{first}}  {value:{second}}  "
    room = max(_COLUMNS - len(begin), 12)
    parts = textwrap.wrap(source, room, break_on_hyphens=False) or [""]
    return "\n".join([f"{begin}{parts[0]}".rstrip(), *(" " * len(begin) + part for part in parts[1:])])
