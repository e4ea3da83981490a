# SPDX-License-Identifier: Apache-2.0
"""Names: attributes, methods and functions of Accelerate become names of accel; others get a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import libcst as cst

from accel.migrate._backward import callers_of
from accel.migrate._calls import as_value, is_method_value, launched, placed
from accel.migrate._script import Script, ScriptPass
from accel.migrate._signatures import signatures
from accel.migrate._trackers import Tracking
from accel.migrate._tree import (
    Remarks,
    argument,
    called,
    calls,
    expression,
    full_name,
    keyword_arg,
    leading,
    led_by,
    loads,
    small,
    statement,
    targets,
    text_of,
    walk,
)
from accel.migrate._vocabulary import ATTRIBUTES, DISTRIBUTED, FUNCTIONS, METHODS

# functions that ask for a device
AVAILABLE: Mapping[str, str] = {
    "is_xpu_available": "torch.xpu.is_available()",
    "is_npu_available": 'hasattr(torch, "npu")',
    "is_cuda_available": "torch.cuda.is_available()",
    "is_mps_available": "torch.backends.mps.is_available()",
    "is_torch_xla_available": "False",
}
_ENTERED = "split_between_processes"  # in Accelerate a block, in accel a function
_BIG = (
    *("init_empty_weights", "init_on_device", "infer_auto_device_map", "load_checkpoint_and_dispatch"),
    *("dispatch_model", "cpu_offload", "disk_offload", "load_checkpoint_in_model", "get_balanced_memory"),
    "get_max_memory",
)
_SEEDING = "set_seed: python, numpy and torch are seeded by other numbers than Accelerate's"
_STEPS = (
    "a schedule steps once an optimizer step; in Accelerate once a process: divide constants in steps by their number"
)


class Names(ScriptPass):
    """The last pass over expressions: the remaining names of Accelerate."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        super().__init__(script, notes)
        self._pending: list[list[cst.EmptyLine]] = []
        self._scopes: list[cst.CSTNode] = []
        self._opened: list[bool] = []  # whether a line above opens the context, by scope
        self._counted: set[int] = set()  # arguments of `len`
        self._called: set[int] = set()  # attributes that are methods of calls
        self._tracking = Tracking(script, self._decide, self._change)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.BaseCompoundStatement, cst.SimpleStatementLine)):
            self._pending.append([])
        if isinstance(node, (cst.FunctionDef, cst.Module)):
            self._scopes.append(node)
            self._opened.append(False)
        self._opened[-1] = self._opened[-1] or self._opens(node)
        return super().on_visit(node)

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        result = super().on_leave(original, updated)
        if isinstance(original, (cst.FunctionDef, cst.Module)):
            _ = self._scopes.pop()
            _ = self._opened.pop()
        if isinstance(original, (cst.BaseCompoundStatement, cst.SimpleStatementLine)):
            lines = self._pending.pop()
            if lines and isinstance(result, cst.BaseStatement):
                result = led_by(result, [*leading(result), *_unique(lines)])
            elif lines and isinstance(result, cst.FlattenSentinel):
                first, *rest = cast("cst.FlattenSentinel[cst.BaseStatement]", result)
                result = cst.FlattenSentinel([led_by(first, [*leading(first), *_unique(lines)]), *rest])
        return result

    def _decide(self, what: str, page: str = "names") -> None:
        if self._pending:
            self._pending[-1].append(self._notes.decide(what, page))

    def _callers(self) -> str:
        scope = self._scopes[-1]
        return callers_of(self._script, scope.name.value) if isinstance(scope, cst.FunctionDef) else ""

    def _change(self, text: str) -> None:
        if self._pending:
            self._pending[-1].append(self._notes.change(text))

    def _expression(self, text: str, **parts: cst.BaseExpression) -> cst.BaseExpression:
        return expression(text.replace("{ctx}", self._script.ctx).replace("{state}", self._script.state), **parts)

    def visit_call(self, node: cst.Call) -> None:
        self._called.add(id(node.func))
        if full_name(node.func) == "len":
            self._counted |= {id(arg.value) for arg in node.args}

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        script = self._script
        if updated.args and len(updated.args) < len(original.args):
            last = updated.args[-1].with_changes(comma=original.args[-1].comma)
            updated = updated.with_changes(args=[*updated.args[:-1], last])
        self._passed(original)
        if text_of(original.func) == "iter" and script.loaders & loads(original):
            self._decide("accel.batches(ctx, loader, state) in place of iter(loader)", "data")
        if method := script.method(original):
            return self._method(method, original, updated)
        if origin := script.origin(original.func):
            return self._function(origin, original, updated)
        if full_name(original.func) in ("getattr", "hasattr") and len(original.args) > 1:
            owner = original.args[0].value
            if script.holds(owner) or script.is_state(owner):
                return self._attribute_by_name(original, updated)
        if full_name(original.func) in script.searched:
            return self._searched(full_name(original.func), updated)
        return updated

    def _passed(self, call: cst.Call) -> None:
        """Note an Accelerator that is handed to code from elsewhere."""
        script = self._script
        own = full_name(call.func).rpartition(".")[2] in {*script.functions, *script.classes, *script.shared.takers}
        if (
            own
            or script.method(call)
            or script.origin(call.func)
            or full_name(call.func) in ("print", "str", "hasattr", "getattr")
        ):
            return
        for arg in call.args:
            if script.holds(arg.value) and not script.makes(arg.value):
                self._decide(f"what {full_name(call.func) or 'this call'} gets in place of an Accelerator")

    def _method(self, name: str, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if name in METHODS:
            return self._built(METHODS[name], name, updated)
        if name == "init_trackers":
            return self._tracking.begun(updated)
        if name == "log":
            step = argument(original, "step", 1)
            epochs = step is not None and len(self._script.log_steps) > 1 and "epoch" in text_of(step)
            if (step is None or epochs) and not self._has_state():
                what = "the step of these values: no loop stands in this function"
                self._decide("one count for the steps of all values: they only grow" if epochs else what, "trackers")
                return self._tracking.logged(updated)
            return self._tracking.logged(updated, in_steps=epochs)
        if name == "end_training":
            return cst.parse_expression(f"accel.end_trackers({self._script.ctx}, {self._script.trackers})")
        if name == "get_tracker":
            name_of = argument(updated, "name", 0) or expression('"wandb"')
            unwrap = argument(original, "unwrap", 1)
            if unwrap is None or text_of(unwrap) != "True":
                self._decide("methods of this tracker: get_tracker gives the package's own object", "trackers")
            return expression(f"accel.get_tracker({self._script.trackers}, {{name}})", name=name_of)
        if name == "check_trigger":
            return self._expression("accel.any_rank({ctx}, trigger)")
        if name == "gather_for_metrics":
            self._decide("which batch these values are of: gather_for_metrics(ctx, values, batch)", "data")
            return self._built("accel.gather_for_metrics", name, updated)
        if name in ("save_state", "load_state"):
            self._decide(f"items and state of {name}", "checkpoints")
        elif name in ("register_save_state_pre_hook", "register_load_state_pre_hook"):
            self._decide("the item accel.items.Folder(save=, load=) in place of this hook", "checkpoints")
        elif name in ("clip_grad_norm_", "clip_grad_value_"):
            self._decide(f"max_norm= or max_value= of the optimizer_step that this belongs to{self._callers()}", "step")
        elif name in ("backward", "accumulate", "trigger_sync_in_backward", "set_trigger", "skip_first_batches"):
            self._decide(f"the loop around {name}{self._callers()}", "loop")
        elif name == "profile":
            self._decide("out= of accel.profile", "profile")
        else:
            self._decide(f"what takes the place of accelerator.{name}: unknown to accel migrate")
        return updated

    def _built(self, function: str, name: str, call: cst.Call) -> cst.BaseExpression:
        return placed(self._script, self._decide, self._change, function, name, call)

    def _function(self, name: str, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if name in FUNCTIONS:
            self._needs_context(name)
            if name == "reduce" and argument(updated, "reduction", 1) is None:  # Accelerate averages by default
                mean = expression('"mean"')
                named = bool(updated.args) and updated.args[0].keyword is not None
                given = keyword_arg("reduction", mean) if named else cst.Arg(mean)
                args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in updated.args]
                updated = updated.with_changes(args=[*args[:1], given, *args[1:]])
            return self._built(FUNCTIONS[name], name, updated)
        if name == "set_seed":
            self._change(_SEEDING)
            return self._seeded(updated)
        if name in AVAILABLE:
            return expression(AVAILABLE[name])
        if name.endswith("_launcher"):
            return launched(name, updated)
        if name in ("Accelerator", "PartialState", "AcceleratorState"):
            self._needs_context(name)
            return cst.Name(self._script.ctx)
        if name == "get_logger":
            if self._has_context():
                level = argument(updated, "log_level")
                first = updated.args[0].value if updated.args else expression("__name__")
                if level is None:
                    return expression(f"accel.get_logger({{name}}, {self._script.ctx})", name=first)
                return expression(
                    f"accel.get_logger({{name}}, {self._script.ctx}, level={{level}})", name=first, level=level
                )
            return updated
        there = f", accel.{name}" if signatures(f"accel.{name}") else ""
        self._decide(f"what takes the place of accelerate's {name}{there}", "big" if name in _BIG else "names")
        return updated

    def _needs_context(self, name: str) -> None:
        if not self._has_context():
            self._decide(f"where {self._script.ctx} comes from, which {name} needs")

    def _has_context(self) -> bool:
        """Whether the context is a parameter, or opened, in one of the scopes around."""
        ctx = self._script.ctx
        for scope in self._scopes:
            if isinstance(scope, cst.FunctionDef):
                names = {param.name.value for param in (*scope.params.params, *scope.params.kwonly_params)}
                if ctx in names or names & self._script.holders or ("self" in names and self._script.kept):
                    return True
        return self._opened[-1] or any(self._opens(node) for node in self._around(self._scopes[:-1]))

    def _opens(self, node: cst.CSTNode) -> bool:
        """Whether a line, or the head of a block, makes the context."""
        ctx = self._script.ctx
        if isinstance(node, cst.With):
            return any(each.asname is not None and text_of(each.asname.name) == ctx for each in node.items)
        return isinstance(node, cst.SimpleStatementLine) and targets(node) == [ctx]

    def _has_state(self) -> bool:
        """Whether a line of one of the scopes around makes the state."""
        return any(self._script.state in targets(node) for node in self._around(self._scopes, deep=True))

    def _around(self, scopes: Sequence[cst.CSTNode], *, deep: bool = False) -> Iterator[cst.CSTNode]:
        """Yield the nodes of the scopes around; of a module its own lines, or all but its functions and classes."""
        for scope in scopes:
            if not isinstance(scope, cst.Module):
                yield from walk(scope)
                continue
            for each in cast("Sequence[cst.CSTNode]", scope.body):
                if not isinstance(each, (cst.FunctionDef, cst.ClassDef)):
                    yield from walk(each) if deep else [each]

    def _seeded(self, call: cst.Call) -> cst.BaseExpression:
        args: list[cst.Arg] = []
        specific = "False"
        for at, arg in enumerate(call.args):
            name = arg.keyword.value if arg.keyword else ("seed", "device_specific", "deterministic")[at]
            if name == "device_specific":
                specific = text_of(arg.value)
            elif name == "seed":
                args.append(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        options = "" if specific == "True" else f", per_rank={specific}"
        if not args:
            return call
        alone = specific == "False" and not self._has_context()  # every rank seeds alike: no rank is asked
        if not alone:
            self._needs_context("set_seed")
        else:
            self._change("set_seed before there is a context seeds no device other than the CPU")
        ctx = "accel.single()" if alone else self._script.ctx
        return expression(f"accel.seeding.set_seed({ctx}, {{seed}}{options})", seed=args[0].value)

    def _searched(self, name: str, call: cst.Call) -> cst.BaseExpression:
        start, parameter = self._script.searched[name]
        self._change("find_executable_batch_size halves the size; Accelerate takes 0.9 of it: shrink=")
        text = name
        if call.args:
            text = f"lambda {parameter}: {name}({parameter}, {', '.join(text_of(arg) for arg in call.args)})"
        return self._expression(f"accel.find_executable_batch_size({{ctx}}, {text}, {text_of(start)})")

    def leave_attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        script, name = self._script, original.attr.value
        if not script.holds(original.value):
            if script.is_state(original.value) and name in ATTRIBUTES:
                return self._expression(ATTRIBUTES[name])
            if script.is_state(original.value):
                self._lacks(original, name)
            if name == "accelerator" or f"self__{name}" in script.kept:
                self._decide(f"what takes the place of {text_of(original)}: functions take ctx", "classes")
            return updated.with_changes(attr=original.attr)
        if name in ("sync_gradients", "optimizer_step_was_skipped") and not self._has_state():
            self._decide(f"the state that has what {name} asks: no loop stands in this function", "loop")
        if name in ATTRIBUTES:
            return self._expression(ATTRIBUTES[name])
        if name == "trackers" and id(original) in self._counted:
            return expression(f"{script.trackers}.names")
        if name == "trackers":
            self._decide("which tracker: accel.get_tracker(trackers, name)", "trackers")
        elif name == "project_dir" and "project_dir" in script.tracked:
            return script.tracked["project_dir"]
        elif name == "logging_dir" and "logging_dir" in script.tracked:
            return script.tracked["logging_dir"]
        elif name in METHODS and name != _ENTERED and id(original) not in self._called:
            return as_value(script, METHODS[name])
        elif id(original) not in self._called:
            self._decide(f"what takes the place of accelerator.{name}")
        return updated.with_changes(attr=original.attr)

    def leave_unary_operation(self, original: cst.UnaryOperation, updated: cst.UnaryOperation) -> cst.BaseExpression:
        """Write `not accelerator.optimizer_step_was_skipped` without two negations."""
        stepped = self._script.is_attribute(original.expression, "optimizer_step_was_skipped")
        return self._expression("{state}.stepped") if stepped else updated

    def _lacks(self, node: cst.CSTNode, name: str) -> None:
        page = "deepspeed" if "deepspeed" in name else "fsdp" if "fsdp" in name else "names"
        self._decide(f"what takes the place of {text_of(node)}: a context lacks it", page)

    def _attribute_by_name(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Return `getattr(accelerator, "name", default)` as what takes the attribute's place; note other names."""
        literal = original.args[1].value
        name = literal.raw_value if isinstance(literal, cst.SimpleString) else ""
        if name in ATTRIBUTES and full_name(original.func) == "getattr":
            return self._expression(ATTRIBUTES[name])
        self._lacks(original, name)
        return updated

    def leave_arg(self, original: cst.Arg, updated: cst.Arg) -> cst.Arg | cst.RemovalSentinel:
        value, keyword = original.value, original.keyword
        if is_method_value(self._script, value, METHODS) and keyword is not None and keyword.value == "save_function":
            return cst.RemoveFromParent()
        if keyword is not None and keyword.value in self._script.holders and self._script.holds(value):
            return updated.with_changes(keyword=cst.Name(self._script.ctx))
        return updated.with_changes(keyword=keyword)

    def leave_name(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        if original.value in self._script.holders:
            return cst.Name(self._script.ctx)
        return updated

    def leave_param(self, original: cst.Param, updated: cst.Param) -> cst.Param:
        if original.annotation is not None:
            text = text_of(original.annotation.annotation).strip("\"'")
            if text in ("Accelerator", "accelerate.Accelerator", "PartialState"):
                annotation = updated.annotation and updated.annotation.with_changes(
                    annotation=expression("accel.DistContext")
                )
                return updated.with_changes(annotation=annotation)
        return updated

    def leave_comparison(self, original: cst.Comparison, updated: cst.Comparison) -> cst.BaseExpression:
        if len(original.comparisons) != 1:
            return updated
        script, part = self._script, original.comparisons[0]
        positive = isinstance(part.operator, (cst.Equal, cst.Is))
        if script.is_attribute(original.left, "mixed_precision"):
            value = text_of(part.comparator).strip("\"'")
            if value == "fp8" and isinstance(part.operator, (cst.Equal, cst.NotEqual)):
                return self._expression(f"{{ctx}}.precision.fp8 {'is not' if positive else 'is'} None").with_changes(
                    lpar=original.lpar, rpar=original.rpar
                )
            if value == "no":
                changed = updated.comparisons[0].with_changes(comparator=expression('"fp32"'))
                return updated.with_changes(comparisons=[changed])
        if script.is_attribute(original.left, "distributed_type"):
            return self._kind(original, updated)
        return updated

    def _kind(self, original: cst.Comparison, updated: cst.Comparison) -> cst.BaseExpression:
        part = original.comparisons[0]
        if isinstance(part.operator, (cst.In, cst.NotIn)) and isinstance(
            part.comparator, (cst.List, cst.Tuple, cst.Set)
        ):
            kinds = [full_name(each.value).rpartition(".")[2] for each in part.comparator.elements]
        else:
            kinds = [full_name(part.comparator).rpartition(".")[2] or text_of(part.comparator).strip("\"'")]
        positive = isinstance(part.operator, (cst.Equal, cst.Is, cst.In))
        if not all(kind in DISTRIBUTED for kind in kinds):
            self._decide(f"what takes the place of {', '.join(kinds)}")
            return updated
        text = " or ".join(DISTRIBUTED[kind] for kind in kinds)
        if not positive:
            text = text.replace(" == ", " != ") if len(kinds) == 1 and " and " not in text else f"not ({text})"
        built = self._expression(text)
        if original.lpar:
            return built.with_changes(lpar=original.lpar, rpar=original.rpar)
        return built if len(kinds) == 1 else built.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])

    def leave_if(self, original: cst.If, updated: cst.If) -> cst.If:
        script = self._script
        if any(script.is_attribute(each, "is_main_process") for each in walk(original.test)):
            for call in calls(original.body):
                method = script.method(call)
                name = method or full_name(call.func)
                if method in ("save", "save_model", "get_state_dict", "save_state") or name in script.collective:
                    self._decide(f"which lines of this block rank 0 alone runs: every rank calls {name}")
        if updated.test.lpar and not original.test.lpar:
            return updated.with_changes(test=updated.test.with_changes(lpar=[], rpar=[]))
        return updated

    def leave_with(self, original: cst.With, updated: cst.With) -> cst.With | cst.FlattenSentinel[cst.BaseStatement]:
        item = original.items[0]
        if len(original.items) == 1 and self._script.method(item.item) == _ENTERED:
            name = text_of(item.asname.name) if item.asname else "_"
            line = statement(f"{name} = {{value}}", value=updated.items[0].item)
            body = cast(cst.IndentedBlock, updated.body)
            first = led_by(line, leading(updated))
            return cst.FlattenSentinel([first, *body.body])
        return updated

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        call = called(original)
        method = self._script.method(call)
        if method == "init_trackers":
            inner = cast(cst.Expr, small(updated))
            made = statement(f"{self._script.trackers} = {{value}}", value=inner.value)
            return led_by(made, leading(updated))
        if method == "end_training" and self._script.tracked_if:
            return led_by(
                cst.parse_statement(f"if {self._script.tracked_if}:\n    {text_of(updated)}\n"),
                leading(updated),
            )
        if method == "set_trigger":
            self._pending[-1] = []
            return led_by(statement("trigger = True"), leading(updated))
        if method in ("prepare", "prepare_model") and (self._script.model_options or self._script.local):
            return self._prepared(updated, cast(cst.Call, call))
        if method in ("free_memory", "clear") and targets(original):
            line = led_by(statement(f"del {', '.join(targets(original))}"), leading(updated))
            freed = statement(f"accel.free_memory({self._script.ctx})")
            return cst.FlattenSentinel([line, freed])
        if self._script.schedules(original) and set(targets(original)) & self._script.constant:
            self._change(_STEPS)
        return updated

    def _prepared(
        self, line: cst.SimpleStatementLine, call: cst.Call
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Prepare models by themselves, with their options."""
        script = self._script
        names = [full_name(arg.value) for arg in call.args]
        if len(targets(line)) != len(names):
            return line
        options = "".join(f", {name}={value}" for name, value in script.model_options.items())
        lines: list[cst.BaseStatement] = []
        rest: list[tuple[str, str]] = []
        for target, name in zip(targets(line), names, strict=True):
            if name in script.local.values():
                lines.append(
                    cst.parse_statement(f"{target} = accel.parallel.prepare_local_model({script.ctx}, {name})")
                )
            elif name in script.models and options:
                lines.append(cst.parse_statement(f"{target} = accel.prepare_model({script.ctx}, {name}{options})"))
            else:
                rest.append((target, name))
        if rest:
            left = ", ".join(target for target, _ in rest)
            right = ", ".join(name for _, name in rest)
            lines.append(statement(f"{left} = accel.prepare({script.ctx}, {right})"))
        lines[0] = led_by(lines[0], leading(line))
        return cst.FlattenSentinel(lines)


def _unique(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    return list({line.comment.value: line for line in lines if line.comment}.values())
