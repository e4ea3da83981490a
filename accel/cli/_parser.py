# SPDX-License-Identifier: Apache-2.0
"""Flags: a parser with typed errors, the fields of a launch's configuration, and the flags of other launchers."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast

from accel.config import ConfigFile, resolve
from accel.config._files import DEFAULT_FILE
from accel.config._resolve import CONFIG_VARIABLE, Resolved
from accel.config._schema import Field, to_text
from accel.config._settings import FIELDS
from accel.errors import ConfigError
from accel.errors._checks import check_choice, did_you_mean
from accel.formats import precision_fix
from accel.system import absolute, write_error
from accel.topology import Plan

CONFIG_FLAG = "--config"
HOSTS = "several hosts"
RESERVED = "3GB"
RESERVED_FOR = "CUDA, NCCL and fragments"
_GROUPS = {
    "processes": ("nproc_per_node", "device", "gpu_ids", "threads_per_process", "bind_cores"),
    "training": (
        *("precision", "accumulation", "strategy", "plan", "mesh", "compile"),
        *("deepspeed", "backend", "timeout_s", "log_level"),
    ),
    "output": ("quiet", "prefix", "log_dir", "alerts", "system"),
    "failures and stops": ("max_restarts", "hang_timeout_s", "stop_grace_s"),
    HOSTS: (
        *("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_timeout_s", "rdzv_last_call_s"),
        *("role", "slurm_options"),
    ),
}


def add_fields(parser: Parser) -> Mapping[str, Flags]:
    """Give a parser a flag for each field, and the one that names a file; return the groups of its help by title."""
    groups = {title: parser.group(title) for title in _GROUPS}
    places = {name: groups[title] for title, names in _GROUPS.items() for name in names}
    rank = {name: at for at, name in enumerate(places)}
    for field in sorted(FIELDS, key=lambda field: rank.get(field.name, -1)):
        add = places[field.name].add if field.name in places else parser.add_argument
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
    """Return the flags that may have the next word as their value."""
    return {CONFIG_FLAG, *(field.flag for field in FIELDS if field.metavar)}


def resolve_flags(known: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Resolve the words that a parser with `add_fields` has read; raise as `read_config` and `resolve`."""
    given: dict[str, list[str]] = {field.name: getattr(known, field.name) or [] for field in FIELDS}
    for field in FIELDS:
        if len(set(given[field.name])) > 1:
            raise ConfigError(
                "the flag is given twice", got=" and ".join(given[field.name]), where=field.flag, fix="Give it once."
            )
        if (script := next((text for text in given[field.name] if text.endswith(".py")), None)) is not None:
            raise ConfigError(
                "the flag has no value",
                expected=field.expects,
                got=repr(script),
                where=field.flag,
                fix=f"Write the value before the script: `{field.flag} {field.metavar} {script}`.",
            )
    flags = {name: values[0] for name, values in given.items() if values}
    resolved = resolve(flags, environ, find_file(known.config, environ))
    if resolved.config.deepspeed:
        from accel.engines.deepspeed._options import from_setting

        _ = from_setting(resolved.config.deepspeed, resolved.sources["deepspeed"].at("deepspeed"))
    return resolved


def find_file(named: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Read the file that a flag names, or a variable, or the default one if it exists; raise as `read_found`."""
    path = named if named is not None else environ.get(CONFIG_VARIABLE) or None
    if path is None and not os.path.exists(DEFAULT_FILE):
        return None
    from accel.config._files import read_config, read_found

    return read_found() if path is None else read_config(path)


def print_settings_file(resolved: Resolved) -> None:
    """Print the file that a launch follows, if it follows one."""
    if resolved.file:
        write_error(f"accel: settings of {absolute(resolved.file)}\n")


def _help(field: Field) -> str:
    doc = field.doc.rstrip(".")
    doc = doc[0].lower() + doc[1:] if doc[1].islower() else doc
    choices = f"{', '.join(field.choices)}; " if field.choices else ""
    undo = f"{field.flag}=false turns it off; " if field.default is True else ""
    default = to_text(field.default) or "none"
    return f"{doc} ({choices}{undo}default: {default})".replace("%", "%%")


class _Same(NamedTuple):
    """A flag of ours for another launcher's."""

    flag: str  # ours; empty where none is needed
    value: str = ""  # the value to write after it; empty for the other flag's own
    note: str = ""  # the difference, one sentence


_PROCESSES = _Same("--nproc-per-node", note="It counts the processes of one host.")
_ENDPOINT = _Same("--rdzv-endpoint", "HOST:PORT", "A single host needs none.")
_OF_SLURM = _Same("--slurm-options", '"--gpus-per-node=8"', "It goes to sbatch.")
_FREE = _Same("", note="Leave it out: ranks of one host meet at a free port.")
_SHARDS = _Same("--strategy", "fsdp", "`accel.prepare` finds the blocks to shard.")
_OTHERS = {
    "n": _PROCESSES,
    "np": _PROCESSES,
    "num_processes": _PROCESSES,
    "nproc": _PROCESSES,
    "nproc_per_node": _PROCESSES,
    "gpus_per_node": _OF_SLURM,
    "gres": _OF_SLURM,
    "num_machines": _Same("--nnodes"),
    "machine_rank": _Same("--node-rank"),
    "main_process_ip": _ENDPOINT,
    "main_process_port": _ENDPOINT,
    "master_addr": _ENDPOINT,
    "master_port": _ENDPOINT,
    "rdzv_backend": _ENDPOINT,
    "rdzv_conf": _Same("--rdzv-timeout-s", "SECONDS", "Its last_call_timeout is --rdzv-last-call-s."),
    "standalone": _FREE,
    "same_network": _FREE,
    "multi_gpu": _Same("--nproc-per-node", "auto", "Without it, too, each GPU gets a process."),
    "num_gpus": _PROCESSES,
    "use_cpu": _Same("--cpu"),
    "fp16": _Same("--precision", "fp16"),
    "bf16": _Same("--precision", "bf16"),
    "mixed_precision": _Same("--precision"),
    "gradient_accumulation_steps": _Same("--accumulation"),
    "num_cpu_threads_per_process": _Same("--threads-per-process"),
    "enable_cpu_affinity": _Same("--bind-cores"),
    "use_fsdp": _SHARDS,
    "use_deepspeed": _Same("--strategy", "deepspeed"),
    "zero_stage": _SHARDS,
    "config_file": _Same("--config"),
    "redirects": _Same("--log-dir"),
    "tee": _Same("--log-dir"),
}


def other_flag(word: str, flags: Sequence[str]) -> str:
    """Return the sentence that names the flag to use for another launcher's, such as "--num_processes=4"; empty if none
    is known."""
    name, _, value = word.lstrip("-").partition("=")
    short = re.fullmatch(r"(np?)(\d+)", name)
    if short is not None:
        name, value = short[1], short[2]
    key = name.replace("-", "_")
    dashed = "--" + name.replace("_", "-")
    same = _OTHERS.get(key) or (_Same(dashed) if dashed in flags else None)
    if same is None and key.startswith("fsdp_"):
        same = _SHARDS
    if same is None or (same.flag and same.flag not in flags):
        return ""
    if not same.flag:
        return same.note
    given = same.value or _translated(same.flag, value)
    return f"Use `{same.flag}{' ' * bool(given)}{given}`.{' ' * bool(same.note)}{same.note}"


def _translated(flag: str, value: str) -> str:
    """Another launcher's value as ours."""
    fix = precision_fix(value) if flag == "--precision" else ""
    return fix.split('"')[1] if fix else value


def given_flags(known: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the flags that a command line has, of those that set some names."""
    values = {name: getattr(known, name) for name in names}
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False]


def memory_limit(memory: str, reserve: str) -> int:
    """Return the bytes of a GPU that a step may take, of the values of `--memory` and `--reserve`."""
    from accel.storage import parse_size  # `accel launch` has no use for it

    left = parse_size(memory, "--memory") - parse_size(reserve, "--reserve")
    if left <= 0:
        got = f"--memory {memory} --reserve {reserve}"
        raise ConfigError("the reserve takes all of the memory", got=got, fix="Pass a smaller --reserve.")
    return left


_FOREIGN = ("--slurm-options", "--shell")  # their values are options of other programs


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words with each foreign option joined to its flag, as it may begin with a dash."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _FOREIGN and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class Flags:
    """The flags of a command, or of a group in its help.

    Attributes:
        add: argparse's `add_argument` of it.
    """

    def __init__(self, add: Callable[..., object]) -> None:
        self.add = add

    def switch(self, flag: str, meaning: str) -> None:
        """Add a flag without a value."""
        _ = self.add(flag, action="store_true", help=meaning)

    def value(self, name: str, metavar: str, meaning: str, **options: Any) -> None:
        """Add a flag with a value, or a word that its place identifies; `options` are argparse's."""
        _ = self.add(name, metavar=metavar, help=meaning, **options)


_CLOSE = 0.8  # likeness of a misspelt flag; one of a script may be as like as 0.75


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations that raises instead of leaving the process.

    Args:
        prog: the command.
        usage: its words.
        description: text above the flags. Its lines stay if it has several.
        script: word that ends the flags, if other flags may follow it; empty for none.
    """

    def __init__(self, prog: str, *, usage: str, description: str, script: str = "") -> None:
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self._script = script
        own = Flags(self.add_argument)
        self.switch, self.value = own.switch, own.value
        if "\n" in description:
            self.formatter_class = argparse.RawDescriptionHelpFormatter

    def group(self, title: str) -> Flags:
        """Return a group of flags with a title in the help."""
        return Flags(self.add_argument_group(title).add_argument)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all words; raise `ConfigError` for an unknown flag, or one without a valid value."""
        known, unknown = self.parse_known_args(_joined(words))
        for word in unknown:
            name = word.partition("=")[0]
            fix = other_flag(word, self.flags()) or self._advice(name)
            raise ConfigError("unknown flag", got=repr(name), where=self.prog, fix=fix)
        return known

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where=self.prog, fix=f"`{self.prog} --help` shows the flags.")

    def _advice(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.flags(), n=1, cutoff=_CLOSE if self._script else 0.6)
        if near or not self._script:
            return did_you_mean(name, self.flags())
        right = f"`{self.prog} {self._script} {name}`"
        return f"Flags of the script come after it: {right}; {self.prog} --help lists others."

    def flags(self) -> list[str]:
        """Return the flags that it knows, by their long names."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def add_saving_flags(add: Parser | Flags) -> None:
    """Give a parser the flags that save memory, other than sharding and recomputation."""
    add.value("--logits", "NAME", "full, or deferred, as Plan(logits='deferred') (default: full)")
    add.value("--offload", "NAME", "state that is kept on the host: optimizer, or all, as Plan(offload=)")
    add.switch("--offload-activations", "keep activations on the host, as accel.offload_activations")
    add.value("--chunks", "N", "run MLPs on N parts of the sequence, as accel.chunk_sequence", type=int)


def saving_plan(known: argparse.Namespace) -> Plan:
    """Return the plan of `--logits` and `--offload`."""
    logits, offload = known.logits or "full", known.offload or ""
    check_choice(logits, ["full", "deferred"], "unknown value of --logits", where="--logits")
    check_choice(offload or "all", ["optimizer", "all"], "unknown value of --offload", where="--offload")
    kept = "optimizer" if offload == "optimizer" else offload == "all"
    return Plan(logits=cast(Literal["full", "deferred"], logits), offload=kept)
