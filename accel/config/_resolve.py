# SPDX-License-Identifier: Apache-2.0
"""The order of sources, flag over variable over file over default, in one pure function."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from accel.config._format import is_old
from accel.config._record import FIELDS, LaunchConfig, refuse_clash
from accel.config._schema import Field, from_plain, from_text, to_text
from accel.config._settings import SETTINGS, SOURCES_VARIABLE
from accel.config._torchrun import read_torchrun
from accel.errors import ConfigError, check_spelling, did_you_mean

CONFIG_VARIABLE = "ACCEL_CONFIG"


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file, unchecked.

    Attributes:
        path: path of the file.
        values: its keys and decoded values.
    """

    path: str
    values: Mapping[str, Any]


class Source(msgspec.Struct, frozen=True):
    """The place that sets a field.

    Attributes:
        kind: one of the four kinds of places.
        name: the flag, the variable or the file; empty for a default.
    """

    kind: Literal["flag", "environment", "file", "default"]
    name: str = ""

    def __str__(self) -> str:
        return " ".join((self.kind, self.name)).strip()

    def at(self, name: str) -> str:
        """Return the place of the field of that name, as messages have it."""
        return {"file": f"{self.name}, key {name}", "default": f"the default {name}"}.get(self.kind, self.name)


class Resolved(NamedTuple):
    """A record, and for each of its fields the place that sets it."""

    config: LaunchConfig
    sources: Mapping[str, Source]

    def sources_variable(self) -> dict[str, str]:
        """Return the variable with the flag or file behind each setting, for the ranks; none if no setting has one."""
        places = {
            f"{field.variable}={to_text(getattr(self.config, field.name))}": self.sources[field.name].at(field.name)
            for field in SETTINGS
            if self.sources[field.name].kind in ("flag", "file")
        }
        return {SOURCES_VARIABLE: msgspec.json.encode(places).decode()} if places else {}


def resolve(flags: Mapping[str, str], environ: Mapping[str, str], file: ConfigFile | None = None) -> Resolved:
    """Resolve a record: a flag beats a variable, that beats the file, that beats the default. No communication.

    Variables are `ACCEL_*`, or else torchrun's `PET_*`, which Kubeflow's jobs set. A value equal to its default is
    still a value. An empty variable counts as unset. Values that lose are checked too.

    Args:
        flags: field names to texts of the flags.
        environ: variable names to values; others than `ACCEL_*` and `PET_*` are ignored.
        file: content of a file; None for no file.

    Returns:
        The record, and the source of each field.

    Raises:
        ConfigError: an unknown name, a value that its field does not take, or fields that contradict each other.
        EnvError: a variable is nearly one of ours.
    """
    _check_names(flags, "unknown field", "flags")
    check_spelling(environ, [CONFIG_VARIABLE, SOURCES_VARIABLE, *(field.variable for field in FIELDS)])
    if file is not None:
        _check_names(file.values, "unknown key", file.path)
    torchruns = read_torchrun(environ)
    values = {field.name: field.default for field in FIELDS}
    sources = {field.name: Source("default") for field in FIELDS}
    for field in FIELDS:
        for value, source in _said(field, flags, environ, torchruns.get(field.name), file):
            values[field.name] = value
            sources[field.name] = source
    refuse_clash(values, {name: source.at(name) for name, source in sources.items()})
    return Resolved(LaunchConfig(**values), sources)


def _check_names(values: Mapping[str, object], problem: str, where: str) -> None:
    known = [field.name for field in FIELDS]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(problem, got=repr(name), where=where, fix=_name_fix(name, value, known, where))


def _name_fix(name: str, value: object, known: Collection[str], where: str) -> str:
    if is_old(name):
        return f"Run `accel config update {where}`."
    if isinstance(value, dict) and any(inner in known for inner in cast("dict[str, object]", value)):
        return "Move its keys to the top of the file, out of the section."
    return did_you_mean(name, known)


def _said(
    field: Field,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    torchruns: tuple[str, str] | None,
    file: ConfigFile | None,
) -> Iterator[tuple[Any, Source]]:
    """Yield the values that sources give a field, the weakest first."""
    if file is not None and field.name in file.values:
        source = Source("file", file.path)
        yield from_plain(field, file.values[field.name], where=source.at(field.name)), source
    for name, text in (torchruns or ("", ""), (field.variable, environ.get(field.variable, ""))):
        if text:
            yield from_text(field, text, where=name), Source("environment", name)
    if field.name in flags:
        yield from_text(field, flags[field.name], where=field.flag), Source("flag", field.flag)
