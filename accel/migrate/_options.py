# SPDX-License-Identifier: Apache-2.0
"""Arguments of `Accelerator(...)` as settings of a session, and notes on those that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    Remarks,
    argument,
    expression,
    full_name,
    matches_code,
    text_of,
)

# communication hooks by their member of DDPCommunicationHookType, and by its value
HOOKS: Mapping[str, str] = {
    "no": "None",
    "fp16": '"fp16"',
    "bf16": '"bf16"',
    "power_sgd": "accel.parallel.PowerSgd()",
    "batched_power_sgd": "accel.parallel.PowerSgd(batched=True)",
}
_TAKEN = (
    *("log_with", "project_dir", "logging_dir", "project_config", "gradient_accumulation_steps"),
    *("gradient_accumulation_plugin", "rng_types"),
)
_UNNEEDED = ("use_stateful_dataloader", "use_seedable_sampler", "non_blocking", "data_seed")
_NO_PLAN = (
    "state_dict_config",
    "optim_state_dict_config",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "sync_module_states",
)
_DDP = ("find_unused_parameters", "bucket_cap_mb", "static_graph", "broadcast_buffers", "gradient_as_bucket_view")


class Made(NamedTuple):
    """Settings of one call of `Accelerator`, and notes on the rest."""

    settings: dict[str, cst.BaseExpression]
    notes: list[cst.EmptyLine]
    opener: cst.Call | None = None  # call of a function that opens a session itself


class Options:
    """Translate the arguments of `Accelerator(...)`; keeps what models and trackers take of them."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        self._script = script
        self._notes = notes

    def read(self, call: cst.Call) -> Made:
        """Return the settings of a session, and notes on what has none."""
        made = Made({}, [])
        for arg in call.args:
            name = arg.keyword.value if arg.keyword is not None else ""
            value = self._script.resolved(arg.value) if name != "mixed_precision" else arg.value
            self._one(name, arg.value, value, made)
        accumulation = self._script.accumulation_of(call)
        if self._script.carried and accumulation is not None:
            made.settings["accumulation"] = accumulation
        return made

    def _one(self, name: str, given: cst.BaseExpression, value: cst.BaseExpression | None, made: Made) -> None:
        if name in _TAKEN or value is None:
            if name == "rng_types":
                made.notes.append(self._notes.change("rng_types= is left out: data order is arithmetic on the state"))
            return
        text = text_of(value)
        if name == "mixed_precision":
            made.settings["precision"] = given
        elif name == "cpu":
            if text != "False":
                device = '"cpu"' if text == "True" else '"cpu" if {cpu} else None'
                made.settings["device"] = expression(device, **({} if text == "True" else {"cpu": given}))
        elif name == "step_scheduler_with_optimizer":
            why = "step_scheduler_with_optimizer= is left out: a scheduler takes one step for each optimizer step"
            made.notes.append(self._notes.change(why))
        elif name in ("dataloader_config", "split_batches", "even_batches", "dispatch_batches"):
            self._data(name, value, made)
        elif name == "fsdp_plugin":
            self._sharded(value, made)
        elif name == "kwargs_handlers" and isinstance(value, (cst.List, cst.Tuple)):
            for element in value.elements:
                self._handler(self._script.resolved(element.value) or element.value, made)
        elif name == "dynamo_backend" and text.strip("\"'").lower() in ("no", "inductor"):
            if "inductor" in text.lower():
                made.settings["compile"] = expression('"whole"')
        elif text != "None" and not (name == "device_placement" and text == "True"):
            page = "deepspeed" if "deepspeed" in name else "meshes" if "parallel" in name or "mega" in name else "names"
            made.notes.append(self._notes.decide(f"what takes the place of {name or 'an option'}={_short(text)}", page))

    def _data(self, name: str, value: cst.BaseExpression, made: Made) -> None:
        pairs: list[tuple[str, str]] = [(name, text_of(value))]
        if isinstance(value, cst.Call):
            pairs = [(arg.keyword.value if arg.keyword else "", text_of(arg.value)) for arg in value.args]
        for option, text in pairs:
            if option in _UNNEEDED:
                why = f"{option}= is left out: the state holds the position in the data"
                made.notes.append(self._notes.change(why))
            elif option == "even_batches":
                why = 'even_batches= is left out: the last step is shorter and repeats nothing; else tail="pad"'
                made.notes.append(self._notes.change(why))
            elif text not in ("None", "False"):
                page = self._notes.decide(f"the arguments of accel.prepare_loader in place of {option}={text}", "data")
                made.notes.append(page)

    def _sharded(self, value: cst.BaseExpression, made: Made) -> None:
        if text_of(value) == "None":
            return
        made.settings["strategy"] = expression('"fsdp"')
        fields = [arg.keyword.value for arg in value.args if arg.keyword] if isinstance(value, cst.Call) else ["it"]
        for field in fields:
            if field in _NO_PLAN:
                why = f"{field}= is left out: checkpoints have one format, and each rank takes its own shards"
                made.notes.append(self._notes.change(why))
        left = [field for field in fields if field not in _NO_PLAN]
        if left:
            made.notes.append(
                self._notes.decide(f"the fields of accel.parallel.Plan in place of {', '.join(left)}", "fsdp")
            )

    def _handler(self, value: cst.BaseExpression, made: Made) -> None:
        kind = self._script.origin(value.func) if isinstance(value, cst.Call) else ""
        args = (
            {arg.keyword.value: arg.value for arg in value.args if arg.keyword} if isinstance(value, cst.Call) else {}
        )
        if kind == "DistributedDataParallelKwargs":
            for name in list(args):
                if name in _DDP:
                    self._script.model_options[name] = text_of(args.pop(name))
            if (hook := self._hook(args.pop("comm_hook", None))) is not None:
                self._script.model_options["comm_hook"] = hook
            if (wrapper := args.pop("comm_wrapper", None)) is not None:
                self._wrapper(wrapper, made)
        elif kind == "InitProcessGroupKwargs":
            if (timeout := args.pop("timeout", None)) is not None:
                made.settings["timeout_s"] = _seconds(timeout)
            if (backend := args.pop("backend", None)) is not None:
                made.settings["backend"] = backend
        elif kind in ("ProfileKwargs",):
            return
        else:
            args = {kind or text_of(value): value}
        if args:
            made.notes.append(
                self._notes.decide(f"what takes the place of {', '.join(args)} of {kind or 'a handler'}", "names")
            )

    def _hook(self, value: cst.BaseExpression | None) -> str | None:
        value = self._script.resolved(value)
        if value is None:
            return None
        name = full_name(value)
        if name.startswith("DDPCommunicationHookType."):
            return HOOKS.get(name.rpartition(".")[2].lower())
        if isinstance(value, cst.Call) and self._script.origin(value.func) == "DDPCommunicationHookType":
            table = ", ".join(f'"{key}": {hook}' for key, hook in HOOKS.items())
            return f"{{{table}}}[{text_of(value.args[0].value)}]"
        return None

    def _wrapper(self, value: cst.BaseExpression, made: Made) -> None:
        why = f"comm_wrapper={text_of(value)} is left out: one hook compresses at a time"
        made.notes.append(self._notes.change(why))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _seconds(value: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(value, cst.Call) and full_name(value.func).rpartition(".")[2] == "timedelta":
        seconds = argument(value, "seconds")
        if len(value.args) == 1 and seconds is not None:
            return seconds
    return expression("{value}.total_seconds()", value=value)


def _grouped(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, (cst.IfExp, cst.Lambda)) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def merged(parts: Sequence[tuple[cst.BaseExpression | None, Made]]) -> Made:
    """Join the settings of branches; a setting that differs becomes a conditional expression."""
    if len(parts) == 1:
        return parts[0][1]
    settings = dict(parts[-1][1].settings)
    notes = [note for _, made in parts for note in made.notes]
    for test, made in reversed(parts[:-1]):
        for name in {**made.settings, **settings}:
            here = made.settings.get(name)
            there = settings.get(name)
            if here is not None and there is not None and matches_code(here, there):
                continue
            none = expression("None")
            built = cst.IfExp(
                test=_grouped(cast(cst.BaseExpression, test)),
                body=_grouped(here or none),
                orelse=_grouped(there or none),
            )
            settings[name] = built
    unique: dict[str, cst.EmptyLine] = {note.comment.value: note for note in notes if note.comment}
    return Made(settings, list(unique.values()))
