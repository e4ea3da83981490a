# SPDX-License-Identifier: Apache-2.0
"""Facts of a script, found once before it changes."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import cast

import libcst as cst

from accel.migrate._shared import ALONE, Shared
from accel.migrate._tree import (
    Change,
    Remarks,
    argument,
    block,
    bound,
    called,
    calls,
    children,
    full_name,
    loads,
    method_of,
    names_in,
    targets,
    text_of,
    trained_in,
    value_of,
    walk,
)
from accel.migrate._vocabulary import FUNCTIONS

_MAKERS = ("Accelerator", "PartialState", "AcceleratorState")
_LOADER = re.compile(r"loader|_dl$|^dl$")
_OPTIMIZER = re.compile(r"optim|^opt|_opt$")
_COUNTED = re.compile(r"warmup|steps|milestone|step_size")
_FEW = 10  # smaller integers are powers and counts of cycles
_SCHEDULER = re.compile(r"sched|^warmup$")
_CONTEXTS = ("ctx", "context", "dist_ctx", "accel_ctx")
_STATES = ("state", "train_state", "run_state")


class Script:
    """Facts of a script, found once before it changes."""

    def __init__(self, module: cst.Module, kept: frozenset[str] = frozenset(), shared: Shared = ALONE) -> None:
        self.shared = shared
        self.origins: dict[str, str] = {}
        self.modules: set[str] = set()
        self.functions: dict[str, cst.FunctionDef] = {}
        self.assigned: dict[str, cst.BaseExpression] = {}
        self.makers: dict[str, list[cst.Call]] = {}
        self.loaders: set[str] = set()
        self.models: set[str] = set()
        self.optimizers: set[str] = set()
        self.schedulers: set[str] = set()
        self.devices: set[str] = set()
        self.prepared: set[str] = set()
        self._nodes = tuple(walk(module))
        self._imports()
        self._names = loads(module)
        self.kept = kept  # variables of an Accelerator that a class keeps
        self.holders = self._holders()
        self.ctx = self.free(*_CONTEXTS)
        self.state = self.free(*_STATES)
        self._uses = self._used()
        self._kinds()
        self._given()
        self._pass_on()
        asked_for = (self.accumulation_of(call) for made in self.makers.values() for call in made)
        self.accumulation = next((value for value in asked_for if value is not None), None)
        self.model_options: dict[str, str] = {}
        self.local: dict[str, str] = {}  # models that LocalSGD averages, by its variable
        self.tracked = self._tracked()
        asked = any(self.is_attribute(node, "gradient_accumulation_steps") for node in self._nodes)
        self.carried = bool(kept) or asked or self._has_factory(module)
        methods = {self.method(node) for node in self._nodes}
        self.tracks = "init_trackers" in methods
        self.tracked_if = self._guard()
        self.searched = self._searched()
        self.classes = {node.name.value for node in self._nodes if isinstance(node, cst.ClassDef)}
        self.taken = self._taken()
        self._numbers = self._scheduled()
        schedules = [node for node in self._nodes if self.schedules(node)]
        self.constant = {name for each in schedules if self._has_constant_steps(each) for name in targets(each)}
        self.clipped = _clipped(module)
        grown = [method_of(call) for call in calls(module)]
        self.extended = [owner for owner, name in grown if owner is not None and name in ("append", "extend")]
        self.looped = _called_in_loops(module)
        self.epochs: set[str] = set()  # functions that train one epoch a call, on the caller's state
        self.hooked: set[str] = set()  # functions of hooks that an item calls
        self.seeded = any(is_seeding(call) for call in calls(module))
        self.windows = "accumulate" in methods or self.accumulation is not None
        self.trackers = self.free("trackers", "run_trackers")
        self.collective = self._reaching(("save", "save_model", "get_state_dict", "save_state"))
        logs = [call for call in calls(module) if self.method(call) == "log"]
        self.log_steps = {text_of(step) if (step := argument(call, "step", 1)) else "" for call in logs}
        self.reaching_backward = self._reaching(("backward",))
        made = ((name, value) for name, value in self.assigned.items() if isinstance(value, cst.Call))
        self.loggers = {name for name, value in made if self.origin(value.func) == "get_logger"}
        self.synced = self.free("synced", "window_ends")  # whether a window ends, behind its step

    def free(self, *choices: str) -> str:
        """Return the first name that the script does not have."""
        return next((each for each in choices if each not in self._names), f"accel_{choices[0]}")

    def _reaching(self, methods: tuple[str, ...]) -> set[str]:
        """Return functions of the script that call one of the methods, or a function that does."""
        found: set[str] = set()
        while more := {
            name
            for name, node in self.functions.items()
            if name not in found
            and any(self.method(each) in methods or full_name(each.func) in found for each in calls(node))
        }:
            found |= more
        return found

    @property
    def uses_accelerate(self) -> bool:
        """Whether the script has anything of Accelerate."""
        return bool(self.origins or self.modules or self.holders)

    def origin(self, node: cst.CSTNode) -> str:
        """Return the name in Accelerate that an expression refers to, empty for others."""
        name = full_name(node)
        first, _, rest = name.partition(".")
        if first in self.origins and not rest:
            return self.origins[first]
        if first in self.origins and self.origins[first] in ("utils", "logging", "state", "tracking"):
            return rest.rpartition(".")[2]
        if first in self.modules and rest:
            return rest.rpartition(".")[2]
        return ""

    def makes(self, node: cst.CSTNode | None) -> bool:
        """Whether an expression makes an Accelerator or its state."""
        return isinstance(node, cst.Call) and (self.origin(node.func) in _MAKERS or self.is_factory(node))

    def is_factory(self, call: cst.Call) -> bool:
        """Whether a call is of a function that returns an Accelerator."""
        return full_name(call.func).rpartition(".")[2] in self.shared.factories | self.shared.returners

    def _has_factory(self, module: cst.Module) -> bool:
        """Whether the script makes an Accelerator by a function, or has such a function."""
        made = any(self.is_factory(call) for call in calls(module))
        return made or bool((self.shared.factories | self.shared.returners) & self.functions.keys())

    def is_alias(self, line: cst.CSTNode) -> bool:
        """Whether a line gives an Accelerator another variable."""
        value = value_of(line)
        plain = isinstance(value, cst.Name) and value.value in self.holders
        return plain and bool(targets(line)) and set(targets(line)) <= self.holders - self.kept

    def holds(self, node: cst.CSTNode | None) -> bool:
        """Whether an expression is an Accelerator: a variable, or the call that makes one."""
        return (isinstance(node, cst.Name) and node.value in self.holders) or self.makes(node)

    def method(self, node: cst.CSTNode | None) -> str:
        """Return the method of an Accelerator that an expression calls, empty for others."""
        if isinstance(node, cst.Call):
            owner, name = method_of(node)
            if self.holds(owner):
                return name
        return ""

    def is_attribute(self, node: cst.CSTNode, name: str) -> bool:
        """Whether an expression is an attribute of an Accelerator."""
        return isinstance(node, cst.Attribute) and node.attr.value == name and self.holds(node.value)

    def is_state(self, node: cst.CSTNode | None) -> bool:
        """Whether an expression is the state of an Accelerator, or a variable of it."""
        if isinstance(node, cst.Name):
            node = self.assigned.get(node.value)
        return node is not None and self.is_attribute(node, "state")

    def is_device(self, node: cst.CSTNode | None) -> bool:
        """Whether an expression is the Accelerator's device, or a variable that holds it."""
        if node is None:
            return False
        return self.is_attribute(node, "device") or (isinstance(node, cst.Name) and node.value in self.devices)

    def has_key(self, name: str, key: str) -> bool:
        """Whether a variable is a dict that a line gives a key."""
        dicts = [each for each in self.values.get(name, ()) if isinstance(each, cst.Dict)]
        keys = [each.key for value in dicts for each in value.elements if isinstance(each, cst.DictElement)]
        keyed = any(isinstance(each, cst.SimpleString) and each.raw_value == key for each in keys)
        set_later = (
            each
            for each in self._nodes
            if isinstance(each, cst.AssignTarget) and text_of(each.target).replace("'", '"') == f'{name}["{key}"]'
        )
        return keyed or any(True for _ in set_later)

    def resolved(self, node: cst.BaseExpression | None) -> cst.BaseExpression | None:
        """Return the value of a variable that was assigned once, else the expression itself."""
        if isinstance(node, cst.Name) and node.value in self.assigned:
            return self.assigned[node.value]
        return node

    def _imports(self) -> None:
        for node in self._nodes:
            if isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
                own = full_name(node.module).split(".")[0] == "accelerate"
                if own and isinstance(node.names, cst.ImportStar):
                    self.origins.update({name: name for name in (*_MAKERS, *FUNCTIONS, "set_seed", "get_logger")})
                elif own and not isinstance(node.names, cst.ImportStar):
                    for alias in node.names:
                        local = alias.evaluated_alias or alias.evaluated_name
                        self.origins[local] = alias.evaluated_name
            elif isinstance(node, cst.Import):
                for alias in node.names:
                    if alias.evaluated_name.split(".")[0] == "accelerate":
                        self.modules.add(alias.evaluated_alias or "accelerate")
            elif isinstance(node, cst.FunctionDef):
                _ = self.functions.setdefault(node.name.value, node)

    def _holders(self) -> set[str]:
        found = set(self.kept)
        self.values: dict[str, list[cst.BaseExpression]] = {}
        for node in self._nodes:
            if isinstance(node, cst.SimpleStatementLine) and (value := value_of(node)) is not None:
                made = [each for each in _branches(value) if self.makes(each)]
                for name in targets(node):
                    self.values.setdefault(name, []).append(value)
                    self.assigned[name] = value
                    if made or name == "accelerator":
                        found.add(name)
                    if made:
                        self.makers.setdefault(name, []).extend(made)  # type: ignore[arg-type]
            elif isinstance(node, cst.Param):
                annotation = text_of(node.annotation.annotation) if node.annotation else ""
                if node.name.value == "accelerator" or re.search(r"\bAccelerator\b", annotation):
                    found.add(node.name.value)
        while more := {
            name
            for name, values in self.values.items()
            if name not in found and any(isinstance(each, cst.Name) and each.value in found for each in values)
        }:
            found |= more
        self.assigned = {name: value for name, value in self.assigned.items() if len(self.values[name]) == 1}
        return found

    def _used(self) -> dict[str, set[str]]:
        """Return variables by what is done with them: a loop over them, a call, a call of `step`."""
        found: dict[str, set[str]] = {"for": set(), "call": set(), "step": set()}
        for node in self._nodes:
            if isinstance(node, cst.For):
                kind = "step" if set(names_in(node.target)) & trained_in(node) else "for"
                found[kind].update(loads(node.iter) if kind == "step" else {full_name(node.iter)})
            elif isinstance(node, cst.Call):
                owner, name = method_of(node)
                found["call"].add(full_name(node.func))
                if name == "step" and not node.args and owner is not None:
                    found["step"].add(full_name(owner))
        return found

    def _given(self) -> None:
        """Sort what another file has prepared: attributes of a class that keeps an Accelerator, and parameters."""
        names = {name for name in self._names if name.startswith("self__")} if self.kept else set[str]()
        for node in self._nodes:
            if isinstance(node, cst.FunctionDef):
                params = [each.name.value for each in (*node.params.params, *node.params.kwonly_params)]
                names |= set(params) if self.holders & set(params) else set()
        known = self.loaders | self.models | self.optimizers | self.schedulers
        for name in names - known - self.holders:
            plain = name.removeprefix("self__")
            if name in self._uses["for"] and _LOADER.search(plain):
                self.loaders.add(name)
            elif name in self._uses["step"] and _SCHEDULER.search(plain):
                self.schedulers.add(name)
            elif name in self._uses["step"] and _OPTIMIZER.search(plain):
                self.optimizers.add(name)

    def _kinds(self) -> None:
        for node in self._nodes:
            if not isinstance(node, cst.SimpleStatementLine) or (call := called(node)) is None:
                if isinstance(node, cst.SimpleStatementLine) and self.is_device(value_of(node)):
                    self.devices.update(targets(node))
                continue
            method = self.method(call)
            if method.startswith("prepare"):
                given = [arg.value.value for arg in call.args if isinstance(arg.value, cst.Name)]
                made = targets(node)
                named = dict(zip(made, given, strict=True)) if len(given) == len(made) else {}
                for name, origin in [(name, named.get(name, name)) for name in (*given, *made)]:
                    self.prepared.add(name)
                    self._sort(name, origin, method)

    def _sort(self, name: str, origin: str, method: str) -> None:
        """Note what kind of object a name is: by the calls that make it, or the name that it was prepared from."""
        values = [value for each in (name, origin) for value in self.values.get(each, ())]
        makers = [full_name(value.func) for value in values if isinstance(value, cst.Call)]
        schedules = [maker for maker in makers if "sched" in maker.lower() or maker.endswith("LR")]
        loads_data = any(maker.endswith("DataLoader") for maker in makers)
        read = name in self._uses["for"] - self._uses["call"] - self._uses["step"]
        if method == "prepare_data_loader" or loads_data or read or _LOADER.search(name):
            self.loaders.add(name)
        elif method == "prepare_scheduler" or schedules or _SCHEDULER.search(name):
            self.schedulers.add(name)
        elif method == "prepare_optimizer" or any(".optim" in each for each in makers) or _OPTIMIZER.search(name):
            self.optimizers.add(name)
        else:
            self.models.add(name)

    def _pass_on(self) -> None:
        """Parameters of the script's own functions are what the calls give them."""
        kinds = (self.holders, self.loaders, self.models, self.optimizers, self.schedulers, self.prepared)
        for _round in range(3):
            for call in (node for node in self._nodes if isinstance(node, cst.Call)):
                function = self.functions.get(full_name(call.func))
                if function is None:
                    continue
                for name, value in bound(call, function):
                    for kind in kinds:
                        if isinstance(value, cst.Name) and value.value in kind:
                            kind.add(name)

    def _scheduled(self) -> set[str]:
        """Return variables that a schedule is made of, however many lines make them; rates are none."""
        makers: dict[str, set[str]] = {}
        kinds = self.loaders | self.models | self.optimizers | self.schedulers
        for node in self._nodes:
            if isinstance(node, cst.SimpleStatementLine) and (value := value_of(node)) is not None:
                for name in set(targets(node)) - kinds:
                    makers.setdefault(name, set()).update(loads(value))
        schedules = [called(line) for line in self._nodes if self.schedules(line)]
        given = [arg for call in schedules if call is not None for arg in call.args]
        found: set[str] = set()
        waiting = {name for arg in given if not is_rate(arg) for name in loads(arg.value)}
        while waiting:
            found |= waiting & makers.keys()
            waiting = {name for each in waiting for name in makers.get(each, ())} - found
        return found

    def _guard(self) -> str:
        """Return the condition under which trackers begin, empty where they always do."""
        for node in self._nodes:
            if isinstance(node, cst.If) and any(self.method(called(each)) == "init_trackers" for each in block(node)):
                rank = any(self.is_attribute(each, "is_main_process") for each in walk(node.test))
                return "" if rank else text_of(node.test)
        return ""

    def schedules(self, line: cst.CSTNode) -> bool:
        """Whether a line makes a scheduler that is prepared."""
        return (
            isinstance(line, cst.SimpleStatementLine)
            and bool(set(targets(line)) & self.schedulers)
            and (called(line) is not None and not self.method(called(line)))
        )

    def _has_constant_steps(self, line: cst.CSTNode) -> bool:
        """Whether a schedule counts in steps that are neither a length nor scaled by the number of processes."""
        call = called(line)
        waiting: list[cst.CSTNode] = [] if call is None else [arg.value for arg in call.args if not is_rate(arg)]
        seen = self.loaders | self.models | self.optimizers | self.schedulers
        while waiting:
            node = waiting.pop()
            text = text_of(node) if isinstance(node, cst.BaseExpression) else ""
            if "len(" in text or "num_processes" in text:
                continue
            name = full_name(node).rpartition(".")[2] if isinstance(node, cst.BaseExpression) else ""
            if isinstance(node, cst.Integer) and int(node.value, 0) >= _FEW:
                return True
            if isinstance(node, cst.Name) and node.value in self.values:
                waiting += [] if node.value in seen else self.values[node.value]
                seen = seen | {node.value}
            elif name and _COUNTED.search(name):
                return True
            elif not name:
                waiting += children(node)
        return False

    def feeds_schedule(self, line: cst.CSTNode) -> bool:
        """Whether a line makes a scheduler, or a number that one takes."""
        return self.schedules(line) or bool(set(targets(line)) & self._numbers)

    def configures(self, value: cst.BaseExpression) -> list[cst.Call]:
        """Return the calls of Accelerate's records that a value is, or a list of them; empty for others."""
        parts = [each.value for each in value.elements] if isinstance(value, (cst.List, cst.Tuple)) else [value]
        made = [each for each in parts if isinstance(each, cst.Call) and self.origin(each.func)]
        named = [each for each in parts if isinstance(each, cst.Name) and each.value in self.assigned]
        return made if len(made) + len(named) == len(parts) else []

    def _taken(self) -> set[str]:
        """Return variables that an Accelerator alone reads."""
        found: set[str] = set()
        waiting = [call for made in self.makers.values() for call in made]
        while waiting:
            call = waiting.pop()
            for arg in call.args:
                for each in walk(arg.value):
                    if isinstance(each, cst.Name) and each.value in self.assigned and each.value not in found:
                        made = self.configures(self.assigned[each.value])
                        found |= {each.value} if made else set()
                        waiting += made
        return found

    def _searched(self) -> dict[str, tuple[cst.BaseExpression, str]]:
        """Return functions that search a batch size: the first size, and their parameter's name."""
        found: dict[str, tuple[cst.BaseExpression, str]] = {}
        for node in (each for each in self._nodes if isinstance(each, cst.FunctionDef)):
            for each in node.decorators:
                call = each.decorator
                if isinstance(call, cst.Call) and self.origin(call.func) == "find_executable_batch_size":
                    params = [param.name.value for param in node.params.params]
                    start = argument(call, "starting_batch_size", 1) or cst.Integer("128")
                    found[node.name.value] = (start, params[0] if params else "batch_size")
        return found

    def _tracked(self) -> dict[str, cst.BaseExpression]:
        """Return `log_with=` and the folder of trackers, wherever an Accelerator takes them."""
        found: dict[str, cst.BaseExpression] = {}
        for call in (call for made in self.makers.values() for call in made):
            config = self.resolved(argument(call, "project_config"))
            for each in (call, config):
                if isinstance(each, cst.Call):
                    for name in ("log_with", "project_dir", "logging_dir", "total_limit"):
                        if (value := argument(each, name)) is not None:
                            found[name] = value
        return found

    def accumulation_of(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the number of micro-batches that a call of `Accelerator` asks for; None for none."""
        if (value := argument(call, "gradient_accumulation_steps")) is not None:
            return value
        plugin = self.resolved(argument(call, "gradient_accumulation_plugin"))
        return argument(plugin, "num_steps", 0) if isinstance(plugin, cst.Call) else None


def _branches(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the values that an expression can have: both sides of a conditional expression."""
    if isinstance(value, cst.IfExp):
        yield from _branches(value.body)
        yield from _branches(value.orelse)
    else:
        yield value


def _clipped(module: cst.Module) -> set[str]:
    """Return variables that the one call that clips gradients alone reads."""
    clips = [call for call in calls(module) if method_of(call)[1].startswith("clip_grad_") and call.args]
    if len(clips) != 1:
        return set()
    found = loads(clips[0].args[0].value)
    reads = [node.value for node in walk(module) if isinstance(node, cst.Name) and node.value in found]
    made = [name for node in walk(module) for name in targets(node)]
    return {name for name in found if name in made and reads.count(name) == made.count(name) + 1}


def _called_in_loops(module: cst.Module) -> set[str]:
    """Return the functions that are called within loops."""
    loops = [node for node in walk(module) if isinstance(node, (cst.For, cst.While))]
    return {method_of(call)[1] for loop in loops for call in calls(loop)}


def is_seeding(call: cst.Call) -> bool:
    """Whether a call seeds random numbers."""
    return full_name(call.func).rpartition(".")[2] in ("set_seed", "manual_seed", "seed_everything") and bool(call.args)


def is_rate(arg: cst.Arg) -> bool:
    """Whether an argument of a schedule is a learning rate."""
    return arg.keyword is not None and "lr" in arg.keyword.value.split("_")


class ScriptPass(Change):
    """A pass over a script, which leaves notes."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        self._script = script
        self._notes = notes


class ScopePass(ScriptPass):
    """A pass that rewrites each function, and the module, as one scope."""

    @abstractmethod
    def rewritten(self, node: cst.FunctionDef | cst.Module) -> cst.CSTNode:
        """Return a scope with the changes of this pass; scopes inside of it have them already."""

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        return cast(cst.FunctionDef, self.rewritten(updated))

    def leave_module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        return cast(cst.Module, self.rewritten(updated))
