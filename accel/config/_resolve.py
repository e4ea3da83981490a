# SPDX-License-Identifier: Apache-2.0
"""The order of sources, flag over variable over file over default; older formats of files, and torchrun's variables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import msgspec

from accel.config._schema import Field, from_plain, from_text, to_text
from accel.config._settings import COLUMNS_VARIABLE, FIELDS, SETTINGS, SOURCES_VARIABLE, LaunchConfig, refuse_clash
from accel.errors import ConfigError
from accel.errors._checks import check_spelling, did_you_mean

# A launch follows these, and ignores the others.
TORCHRUN_VARIABLES = (
    "PET_NPROC_PER_NODE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_MAX_RESTARTS",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_ROLE",
)
# Hosts of a fixed number have `timeout` in place of `join_timeout`.
_OPTIONS = MappingProxyType(
    {"timeout": "rdzv_timeout_s", "join_timeout": "rdzv_timeout_s", "last_call_timeout": "rdzv_last_call_s"}
)
_RDZV_PORT, _MASTER_PORT = "29400", "29500"  # torchrun's defaults


def read_torchrun(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fields that torchrun's variables set: for each the variable, and the text of our own one; other
    rendezvous are refused."""
    given = {name: text for name in TORCHRUN_VARIABLES if (text := environ.get(name, "").strip())}
    if (backend := given.get("PET_RDZV_BACKEND", "c10d")) not in ("c10d", "static"):
        raise ConfigError(
            "no such rendezvous backend",
            expected="c10d or static",
            got=repr(backend),
            where="PET_RDZV_BACKEND",
        )
    names = {
        "nproc_per_node": "PET_NPROC_PER_NODE",
        "nnodes": "PET_NNODES",
        "max_restarts": "PET_MAX_RESTARTS",
        "rdzv_id": "PET_RDZV_ID",
        "role": "PET_ROLE",
    }
    if ":" not in given.get("PET_NNODES", ""):  # torchrun, too, lets hosts that come and go take any place
        names["node_rank"] = "PET_NODE_RANK"
    found = {field: (name, given[name]) for field, name in names.items() if name in given}
    if given.get("PET_NPROC_PER_NODE") == "gpu":
        found["nproc_per_node"] = ("PET_NPROC_PER_NODE", "auto")
    if endpoint := given.get("PET_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        whole = port.isdecimal() and (":" not in host or host.endswith("]"))
        found["rdzv_endpoint"] = ("PET_RDZV_ENDPOINT", endpoint if whole else _joined(endpoint, _RDZV_PORT))
    elif host := given.get("PET_MASTER_ADDR"):
        found["rdzv_endpoint"] = ("PET_MASTER_ADDR", _joined(host, given.get("PET_MASTER_PORT", _MASTER_PORT)))
    timeouts, _ = rendezvous_fields(given.get("PET_RDZV_CONF", ""))
    found |= {field: ("PET_RDZV_CONF", text) for field, text in timeouts.items()}
    return found


def rendezvous_fields(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the fields that torchrun's `--rdzv-conf`, such as "join_timeout=900", sets, and the names of its other
    options."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    options = {name.strip(): value.strip() for name, _, value in pairs}
    found = {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    return found, [name for name in options if name not in _OPTIONS]


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


FORMAT_KEY = "format"
_FOREIGN = ("compute_environment", "distributed_type", "mixed_precision", "num_processes")  # keys of Accelerate's files


class FormatChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change of keys from one format to the next."""

    renamed: tuple[tuple[str, str], ...] = ()  # pairs of an old key and its new name
    removed: tuple[tuple[str, str], ...] = ()  # pairs of an old key and the reason why nothing takes its place


# CHANGES[n] leads from format n to n + 1. A renamed or removed key gets an entry in a new last element.
CHANGES: tuple[FormatChange, ...] = (FormatChange(),)  # format 1: files have the key `format`


class Updated(NamedTuple):
    """The values of a file in the present format, and a line for each change."""

    values: dict[str, Any]
    changes: tuple[str, ...]


def take_format(
    values: Mapping[str, Any], path: str, changes: Sequence[FormatChange] = CHANGES
) -> tuple[int, dict[str, Any]]:
    """Return the format of a file, and its values without it; raise `ConfigError` for none, or one of a newer
    release."""
    rest = dict(values)
    given = rest.pop(FORMAT_KEY, 0)
    if type(given) is not int or not 0 <= given <= len(changes):
        raise ConfigError(
            "a newer release wrote the file"
            if type(given) is int and given > len(changes)
            else "the format of the file is not known",
            expected=f"{FORMAT_KEY} = {len(changes)} at most",
            got=repr(given),
            where=path,
            fix="Update accel, or write the file anew with `accel config`.",
        )
    return given, rest


def is_old(key: str) -> bool:
    """Return whether a key is one of an older format."""
    return any(key in dict(change.renamed) or key in dict(change.removed) for change in CHANGES)


def update_values(values: Mapping[str, Any], path: str, changes: Sequence[FormatChange] = CHANGES) -> Updated:
    """Return a file's values in the present format, or raise `ConfigError` with all that cannot be mapped, or for a
    newer format."""
    given, found = take_format(values, path, changes)
    notes: list[str] = []
    problems: list[str] = []
    for change in changes[given:]:
        for old, new in change.renamed:
            if old in found and new in found:
                problems.append(f"{old!r} and its new name {new!r} are both set")
            elif old in found:
                found = {new if key == old else key: value for key, value in found.items()}
                notes.append(f"{old} is now {new}")
        for old, why in change.removed:
            if old in found:
                notes.append(f"{old} = {found.pop(old)!r} is gone: {why}")
    fields = {field.name: field for field in FIELDS}
    for key in list(found):
        if (same := key.replace("-", "_").lower()) != key and same in fields and same not in found:  # as in a flag
            found = {same if name == key else name: value for name, value in found.items()}
            notes.append(f"{key} is now {same}")
    for key, value in found.items():
        if key not in fields:
            problems.append(f"{key!r} is no key: {did_you_mean(key, fields)}".rstrip("."))
            continue
        try:
            _ = from_plain(fields[key], value, where=f"key {key}")
        except ConfigError as error:
            problems.append(str(error).rstrip("."))
    if problems:
        foreign = any(key in _FOREIGN for key in found)
        raise ConfigError(
            "keys that cannot be mapped",
            got="; ".join(problems),
            where=path,
            fix=f"Turn one of Accelerate's into ours with `accel config import {path}`." if foreign else "",
        )
    if given < len(changes):
        notes.append(f"{FORMAT_KEY} = {len(changes)}, from {given or 'none'}")
    return Updated(found, tuple(notes))


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
    """A record, for each of its fields the place that sets it, and the path of the file that was read, if any."""

    config: LaunchConfig
    sources: Mapping[str, Source]
    file: str = ""

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

    Variables are `ACCEL_*`, or else torchrun's `PET_*`, which Kubeflow's jobs set; others are ignored. A value equal to
    its default is still a value. An empty variable counts as unset. Values that lose are checked too.

    Args:
        flags: texts of flags, by field.
        environ: the variables.
        file: the content of a file; None for none.

    Returns:
        The record, and the source of each field.

    Raises:
        ConfigError: an unknown name or an invalid value, with its place; or two settings that contradict each other.
        EnvError: a variable with nearly a known name.
    """
    _check_names(flags, "unknown field", "flags")
    check_spelling(
        environ, [CONFIG_VARIABLE, COLUMNS_VARIABLE, SOURCES_VARIABLE, *(field.variable for field in FIELDS)]
    )
    if file is not None:
        _check_names(file.values, "unknown key", file.path)
    torchruns = read_torchrun(environ)
    values = {field.name: field.default for field in FIELDS}
    sources = {field.name: Source("default") for field in FIELDS}
    for field in FIELDS:
        for value, source in _given_values(field, flags, environ, torchruns.get(field.name), file):
            values[field.name] = value
            sources[field.name] = source
    refuse_clash(values, {name: source.at(name) for name, source in sources.items()})
    return Resolved(LaunchConfig(**values), sources, file.path if file else "")


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


def _given_values(
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
