# SPDX-License-Identifier: Apache-2.0
"""The fields of a launch's configuration as flags, and the file that goes with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping

from accel.config import CONFIG_VARIABLE, DEFAULT_FILE, FIELDS, ConfigFile, Field, Resolved, resolve, to_text
from accel.errors import ConfigError

CONFIG_FLAG = "--config"
HOSTS = "several hosts"
_GROUPS = {
    "processes": ("nproc_per_node", "device", "gpu_ids", "threads_per_process", "bind_cores"),
    "training": (
        *("precision", "accumulation", "strategy", "plan", "mesh", "compile"),
        *("deepspeed", "backend", "timeout_s", "log_level"),
    ),
    "output": ("quiet", "prefix", "log_dir"),
    "failures and stops": ("max_restarts", "hang_timeout_s", "stop_grace_s"),
    HOSTS: (
        *("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_timeout_s", "rdzv_last_call_s"),
        *("role", "slurm_options"),
    ),
}


def add_fields(parser: argparse.ArgumentParser) -> Mapping[str, Callable[..., argparse.Action]]:
    """Give a parser a flag for each field, and the one that names a file; return `add_argument` of each group."""
    groups = {title: parser.add_argument_group(title).add_argument for title in _GROUPS}
    places = {name: groups[title] for title, names in _GROUPS.items() for name in names}
    rank = {name: at for at, name in enumerate(places)}
    for field in sorted(FIELDS, key=lambda field: rank.get(field.name, -1)):
        add = places.get(field.name, parser.add_argument)
        if field.metavar:
            _ = add(field.flag, dest=field.name, action="append", metavar=field.metavar, help=_help(field))
        else:
            _ = add(
                field.flag, dest=field.name, action="append", nargs="?", const="true", metavar="BOOL", help=_help(field)
            )
        if field.shorthand:
            flag, value = field.shorthand
            _ = add(flag, dest=field.name, action="append_const", const=value, help=f"short for {field.flag} {value}")
    _ = parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help=f"file of settings, TOML or JSON (default: {CONFIG_VARIABLE}, else {DEFAULT_FILE} in this folder, if any)",
    )
    return groups


def value_flags() -> set[str]:
    """Return the flags whose value may be the next word."""
    return {CONFIG_FLAG, *(field.flag for field in FIELDS if field.metavar)}


def resolve_flags(known: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Resolve the words that a parser with `add_fields` has read.

    Raises:
        ConfigError: a flag contradicts itself, or as `read_config` and `resolve`.
    """
    given: dict[str, list[str]] = {field.name: getattr(known, field.name) or [] for field in FIELDS}
    for field in FIELDS:
        if len(set(given[field.name])) > 1:
            raise ConfigError(
                "a flag is given twice", got=" and ".join(given[field.name]), where=field.flag, fix="Give it once."
            )
        if (script := next((text for text in given[field.name] if text.endswith(".py")), None)) is not None:
            raise ConfigError(
                "a flag without its value",
                expected=field.expects,
                got=repr(script),
                where=field.flag,
                fix=f"Write the value before the script: `{field.flag} {field.metavar} {script}`.",
            )
    flags = {name: values[0] for name, values in given.items() if values}
    resolved = resolve(flags, environ, find_file(known.config, environ))
    if resolved.config.deepspeed:
        from accel.engines.deepspeed import from_setting

        _ = from_setting(resolved.config.deepspeed, resolved.sources["deepspeed"].at("deepspeed"))
    return resolved


def find_file(named: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Read the file that a flag names, or a variable, or the default one if it is there.

    Raises:
        ConfigError: as `read_config` does.
    """
    path = named if named is not None else environ.get(CONFIG_VARIABLE) or None
    if path is None and not os.path.exists(DEFAULT_FILE):
        return None
    from accel.config import read_config

    return read_config(DEFAULT_FILE if path is None else path)


def _help(field: Field) -> str:
    doc = field.doc.rstrip(".")
    doc = doc[0].lower() + doc[1:] if doc[1].islower() else doc
    choices = f"{', '.join(field.choices)}; " if field.choices else ""
    undo = f"{field.flag}=false for no; " if field.default is True else ""
    default = to_text(field.default) or "none"
    return f"{doc} ({choices}{undo}default: {default})".replace("%", "%%")
