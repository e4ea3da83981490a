# SPDX-License-Identifier: Apache-2.0
"""The questions of `accel config`, and its suggestions for a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.cli._menu import Option, ask, choose
from accel.config import FIELDS, Field, LaunchConfig, from_text, to_text
from accel.formats import PrecisionName
from accel.launching import Machine

_FIRST = ("device", "gpu_ids", "nproc_per_node", "precision")  # the others are asked for on demand
_OTHER = "other"


def describe_machine(machine: Machine) -> str:
    """Return one line about the cores and GPUs that processes would share."""
    cores = f"{machine.cores} CPU core{'s' if machine.cores != 1 else ''}"
    names = [gpu.name for gpu in machine.gpus or ()]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"This machine: {cores}, {gpus or 'no GPU that the driver knows'}."


def suggest(machine: Machine) -> dict[str, Any]:
    """Return the fields for which another value than the default suits this machine."""
    if not machine.gpus:
        return {}
    precision: PrecisionName = "bf16" if min(gpu.generation for gpu in machine.gpus) >= 8 else "fp16"
    return {"nproc_per_node": "auto", "precision": precision}


def interview(machine: Machine, present: Mapping[str, Any], *, arrows: bool) -> dict[str, Any]:
    """Ask for the fields one by one.

    Args:
        machine: machine to configure.
        present: fields that are set already.
        arrows: True for menus with arrow keys.

    Returns:
        The answers, and the fields that were set already and not asked for.

    Raises:
        ConfigError: the input ended.
    """
    answers = {name: value for name, value in present.items() if name not in _FIRST}
    suggested = suggest(machine) | dict(present)
    fields = {field.name: field for field in FIELDS}
    for name in _FIRST:
        if name == "gpu_ids" and answers["device"] == "cpu":
            continue
        if name == "gpu_ids" and len(machine.gpus or ()) < 2:  # nothing to choose here; a file may be for elsewhere
            answers |= {name: present[name]} if name in present else {}
            continue
        default = suggested.get(name, fields[name].default)
        if name == "nproc_per_node" and answers["device"] == "cpu" and name not in present:
            default = fields[name].default
        answers[name] = _answer(fields[name], default, answers, arrows=arrows)
    more = [Option("no", "take what is there"), Option("yes", "hosts, accumulation, strategy, mesh, time-outs, output")]
    if choose("Look at the other settings too?", more, "no", arrows=arrows) == "yes":
        for field in FIELDS:
            if field.name not in _FIRST and (not field.section or answers["strategy"] == field.name):
                default = suggested.get(field.name, field.default)
                answers[field.name] = _answer(field, default, answers, arrows=arrows)
    return answers


def _answer(field: Field, default: Any, answers: Mapping[str, Any], *, arrows: bool) -> Any:
    def check(answer: str) -> LaunchConfig:
        return LaunchConfig(**{**answers, field.name: from_text(field, answer, where=field.name)})

    spelled = to_text(default)
    about = f"{field.doc.partition(';')[0].rstrip('.')}."
    options = [Option(name, meaning) for name, meaning in field.choices.items()]
    if not field.metavar:
        options = [Option("true"), Option("false")]
    elif options:
        if spelled not in field.choices:
            options.append(Option(spelled, "as it is"))
        if field.is_open:
            options.append(Option(_OTHER, field.expects))
    text = choose(about, options, spelled, arrows=arrows) if options else _OTHER
    if text == _OTHER:
        text = ask(f"{about if options else field.doc} Takes {field.expects}.", spelled, check)
    return from_text(field, text, where=field.name)
