# SPDX-License-Identifier: Apache-2.0
"""Records to and from text: TOML with its comments, JSON without. A suffix of `.json` means JSON, any other TOML."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import shlex
import stat
import textwrap
import tomllib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from accel.config._resolve import CHANGES, FORMAT_KEY, ConfigFile, resolve, take_format
from accel.config._schema import Field, section_values, to_text, toml_key, toml_value
from accel.config._settings import FIELDS, LaunchConfig
from accel.errors import ConfigError
from accel.errors._checks import check_kind, did_you_mean
from accel.opening import read_named, read_regular
from accel.system import absolute

DEFAULT_FILE = "accel.toml"
# Keys that name a command, an address, options of another program, or a place to write to.
_NAMED_ONLY = ("alerts", "rdzv_endpoint", "slurm_options", "log_dir")
_PLACE = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.S)
_WIDTH = 100


def read_config(path: str, *, found: bool = False) -> ConfigFile:
    """Read a file, TOML or `.json`, unchecked but for its syntax; `resolve` checks its values.

    Args:
        path: the file. One that the user named may be a pipe or a device.
        found: whether the file was found rather than named: then it must be a regular file, or a link to one.

    Raises:
        ConfigError: the file is missing or malformed, with line and column; or YAML.
    """
    refuse_yaml(path, fix=f"Turn one of Accelerate's into ours with `accel config import {path}`.")
    return ConfigFile(path=path, values=take_format(decode_values(read_text(path, found=found), path), path)[1])


def read_found(path: str = DEFAULT_FILE) -> ConfigFile:
    """Read a file that nobody has named, as `read_config` does.

    Raises:
        ConfigError: also if another user can write the file, and it has keys by which it could act as this user.
    """
    file = read_config(path, found=True)
    held = [name for name in _NAMED_ONLY if name in file.values]
    if held and (writer := _other_writer(path)):
        raise ConfigError(
            "another user can write this file, and some of its keys count only in a file that you name",
            expected=f"a file of yours or root's that nobody else can write, or none of {', '.join(_NAMED_ONLY)}",
            got=f"{', '.join(held)} in a file {writer}",
            where=absolute(path),
            fix=f"Read it, and name it if you trust it: `--config {shlex.quote(path)}`.",
        )
    return file


def _other_writer(path: str) -> str:
    """Return how another user can write a file; empty if none can."""
    mine = os.geteuid()
    for found in (os.lstat(path), os.stat(path)):  # a link too, which chooses the file
        if found.st_uid not in (mine, 0):
            return f"of user {_name(pwd.getpwuid, found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return "that every user can write"
    if found.st_mode & stat.S_IWGRP and (found.st_gid not in _private_groups(mine) or _has_acl(path)):
        return f"that group {_name(grp.getgrgid, found.st_gid)} can write"
    return ""


def _private_groups(user: int) -> set[int]:
    """Return root's group, and the group with a user's name and no other member, as systems make one for each user."""
    groups = {0}
    with contextlib.suppress(KeyError):  # a user without a name
        account = pwd.getpwuid(user)
        group = grp.getgrgid(account.pw_gid)
        if group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}:
            groups.add(group.gr_gid)
    return groups


def _has_acl(path: str) -> bool:
    """Return whether a file has an access control list; the group's mode is its mask then."""
    with contextlib.suppress(OSError, AttributeError):  # a file system, or an operating system, without them
        return "system.posix_acl_access" in os.listxattr(path)
    return False


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def read_text(path: str, *, found: bool = False) -> str:
    """Read a small text file, or raise `ConfigError`; one that was `found`, not named, must be a regular file."""
    try:
        return (read_regular(path) if found else read_named(path)).decode()
    except UnicodeDecodeError as error:
        raise ConfigError("the file is not text", expected="UTF-8", got=f"byte {error.start}", where=path) from None
    except FileNotFoundError:
        others = (near.name for near in Path(path).parent.glob("*.*"))
        hint = did_you_mean(Path(path).name, others)
        fix = hint if hint.startswith("Did") else "Check the path, or write a file with `accel config`."
        raise ConfigError("there is no such file", got=repr(path), fix=fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("the file cannot be read", got=str(reason), where=path) from None


def decode_values(text: str, path: str) -> dict[str, Any]:
    """Return the keys and values of a file's text; `path` decides its format, and is in errors."""
    return _decode_json(text, path) if path.lower().endswith(".json") else _decode_toml(text, path)


def decode(text: str, path: str = DEFAULT_FILE) -> LaunchConfig:
    """Return the record that a file's text describes; the inverse of `encode`.

    Args:
        text: the text.
        path: its suffix decides the format, and errors name it.

    Raises:
        ConfigError: the text is malformed, or holds what no record can.
    """
    return resolve({}, {}, ConfigFile(path=path, values=take_format(decode_values(text, path), path)[1])).config


def encode(config: LaunchConfig, path: str = DEFAULT_FILE, *, only: Collection[str] | None = None) -> str:
    """Return a record as a file's text.

    Args:
        config: the record.
        path: its suffix decides the format.
        only: fields to set; TOML shows the others as comments, JSON leaves them out. None sets all.

    Raises:
        ConfigError: the suffix is YAML's.
    """
    refuse_yaml(path, fix="Write `accel.toml` or `accel.json`.")
    values = {field.name: _plain(getattr(config, field.name)) for field in FIELDS}
    if path.lower().endswith(".json"):
        chosen = {name: value for name, value in values.items() if only is None or name in only}
        for field in FIELDS:
            if field.section and field.name in chosen:
                section = section_values(chosen[field.name])
                chosen[field.name] = chosen[field.name] if section is None else section
        return json.dumps({FORMAT_KEY: len(CHANGES)} | chosen, indent=2, ensure_ascii=False) + "\n"
    blocks = [
        "# How `accel launch` starts a script. A flag or an ACCEL_* variable overrides this file.",
        f"# Format of this file; `accel config update` rewrites older ones.\n{FORMAT_KEY} = {len(CHANGES)}",
    ]
    for field in sorted(FIELDS, key=lambda field: _is_table(field, values[field.name])):  # a table holds all behind it
        lines = textwrap.wrap(field.doc, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += [f"#   {name}: {meaning}" for name, meaning in field.choices.items()]
        mark = "" if only is None or field.name in only else "#"
        lines += [mark + line for line in _toml_lines(field, values[field.name])]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def refuse_yaml(path: str, *, fix: str) -> None:
    """Raise `ConfigError` for a name that ends as YAML's do."""
    if path.lower().endswith((".yaml", ".yml")):
        raise ConfigError(
            "accel does not read or write this format", expected="a file in TOML or JSON", got=repr(path), fix=fix
        )


def _plain(value: object) -> Any:
    return to_text(value) if isinstance(value, msgspec.Struct) else value


def _is_table(field: Field, value: Any) -> bool:
    return field.section and section_values(value) is not None


def _toml_lines(field: Field, value: Any) -> list[str]:
    section = section_values(value) if field.section else None
    if section is None:
        return [f"{field.name} = {toml_value(value)}"]
    return [f"[{field.name}]", *(f"{toml_key(key)} = {toml_value(each)}" for key, each in section.items())]


def _decode_toml(text: str, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.fullmatch(str(error))
        reason, line, column = found.groups() if found else (str(error), None, None)
        end = text.rstrip("\n")
        row = int(line or end.count("\n") + 1)
        col = int(column or len(end) - end.rfind("\n"))
        fix = _bare_word(text.splitlines()[row - 1], col) if reason == "Invalid value" else ""
        raise _malformed("TOML", path, reason, row, col, fix) from None
    except (RecursionError, ValueError):
        raise _malformed("TOML", path, "nested too deeply, or a number with too many digits", 1, 1) from None


def _decode_json(text: str, path: str) -> dict[str, Any]:
    try:
        values: object = json.loads(text, object_pairs_hook=partial(_unique, path))
    except json.JSONDecodeError as error:
        raise _malformed("JSON", path, error.msg, error.lineno, error.colno) from None
    except ConfigError:
        raise
    except (RecursionError, ValueError):
        raise _malformed("JSON", path, "nested too deeply, or a number with too many digits", 1, 1) from None
    check_kind(values, dict, "the file does not hold a JSON object", expected="{ key: value, ... }", where=path)
    return cast(dict[str, Any], values)


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; json itself would keep the last of two."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError("a key is repeated", got=repr(key), where=path, fix="Remove one.")
        values[key] = value
    return values


def _bare_word(line: str, column: int) -> str:
    """Return the advice for a word without quotes at a column; empty if there is none."""
    found = re.match(r"[A-Za-z][\w.-]*", line[column - 1 :])
    if found is None:
        return ""
    word = found[0]
    return f"Write {word.lower()}." if word.lower() in ("true", "false") else f'Write texts in quotes: "{word}".'


def _malformed(language: str, path: str, reason: str, line: int, column: int, fix: str = "") -> ConfigError:
    return ConfigError(
        f"malformed {language}",
        got=reason[:1].lower() + reason[1:],
        where=f"{path}, line {line}, column {column}",
        fix=fix,
    )
