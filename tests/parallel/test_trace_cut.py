# SPDX-License-Identifier: Apache-2.0
"""Exported programs cut into stages: any cut computes what the whole program does, or is refused. No ranks."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accel.parallel.axes.pipeline._trace_cut import (
    TracedStage,
    begins_of,
    choose_stages,
    cut_program,
    model_line,
)
from accel.parallel.axes.pipeline._trace_program import first_operators, read_program
from catching import caught
from hypothesis import given, settings, strategies as st
from torch import nn

from accel.errors import StageError

WIDTH = 4
KINDS = ("linear", "skip", "mask", "tied", "norm", "relu", "halves", "counts", "free")


class Step(nn.Module):
    """One step of a model: reads the newest value, an earlier one, and the mask of the inputs."""

    seen: torch.Tensor

    def __init__(self, kind: str, back: int) -> None:
        super().__init__()
        self.kind, self.back = kind, back
        if kind in ("linear", "tied", "relu"):
            self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "counts":
            self.register_buffer("seen", torch.ones(()))

    def forward(self, values: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        hidden, earlier = values[-1], values[max(0, len(values) - 1 - self.back)]
        if self.kind in ("linear", "tied"):
            return torch.tanh(self.linear(hidden))
        if self.kind == "skip":
            return hidden + earlier
        if self.kind == "mask":
            return hidden * (ids > 0).to(hidden.dtype).cumsum(0)
        if self.kind == "norm":
            return self.norm(hidden)
        if self.kind == "relu":
            return self.linear(hidden).add_(0.1).relu_() + earlier
        if self.kind == "halves":
            first, second = hidden.chunk(2, dim=1)
            return torch.cat([second, first * 2], dim=1)
        if self.kind == "counts":
            self.seen += 1
            return hidden * self.seen
        with torch.no_grad():
            scale = earlier.abs().mean()
        return hidden * scale


class Steps(nn.Module):
    def __init__(self, kinds: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(Step(*each) for each in kinds)
        for each in self.steps:
            if each.kind == "tied":
                each.linear.weight = self.begin.weight
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        values = [self.begin(ids)]
        for step in self.steps:
            values.append(step(values, ids))
        return {"loss": (values[-1] - labels).square().mean(), "hidden": values[-1], "kind": "steps"}


def exported(model: nn.Module, *inputs: torch.Tensor) -> Any:
    return torch.export.export(copy.deepcopy(model), inputs, strict=False)


def run(stages: Sequence[TracedStage], model: nn.Module, constants: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run stage after stage and back; the graph of autograd ends at each boundary, as between processes."""
    own = {**constants, **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    taken: list[torch.Tensor] = []
    edges: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], TracedStage]] = []
    found: tuple[Any, ...] = ()
    for stage in stages:
        held = [own[name] for name in stage.held]
        found = tuple(stage.graph(*held, *(inputs[at] for at in stage.inputs), *taken))
        if stage is not stages[-1]:
            taken = [
                each.detach().clone().requires_grad_(passed.differentiable)
                for each, passed in zip(found, stage.gives, strict=True)
            ]
            edges.append((found, taken, stage))
    found[0].backward()
    for sent, received, _ in reversed(edges):
        pairs = [(one, other.grad) for one, other in zip(sent, received, strict=True) if one.requires_grad]
        kept = [pair for pair in pairs if pair[1] is not None]
        if kept:
            torch.autograd.backward([one for one, _ in kept], [grad for _, grad in kept])
    return found


def far(ones: Any, others: Any) -> float:
    differences = [(one - other).detach().abs().max() for one, other in zip(ones, others, strict=True)]
    return float(torch.stack(differences).max())  # not the max of numbers, which may hide NaN


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


@settings(max_examples=8, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 4)), min_size=3, max_size=7),
    cuts=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    training=st.booleans(),
)
def test_any_cut_computes_outputs_gradients_and_buffers_of_the_whole(
    kinds: list[tuple[str, int]], cuts: set[int], training: bool
) -> None:
    model = Steps(kinds).train(training)
    ids, labels = torch.randn(3, WIDTH, dtype=torch.float64), torch.randn(3, WIDTH, dtype=torch.float64)
    exports = exported(model, ids, labels)
    program = read_program(exports)
    stages = [["begin"], *([f"steps.{at}"] for at in sorted(cuts) if at < len(kinds))]
    made: list[tuple[TracedStage, ...]] = []
    error = caught(lambda: made.append(cut_program(program, begins_of(program, stages))))
    if error is not None:  # two steps may begin at one operator, and views of one memory be changed behind the cut
        assert re.search("in place|order in which the forward", str(error))
        return
    [cut] = made
    for before, behind in itertools.pairwise(cut):
        assert before.gives == behind.takes
    assert [at for at, stage in enumerate(cut) if 1 in stage.inputs] == [len(cut) - 1]  # labels go to the last stage
    whole = copy.deepcopy(model)
    expected = whole(ids, labels)
    expected["loss"].backward()
    found = run(cut, model, exports.constants, (ids, labels))
    assert far([found[0], found[1]], [expected["loss"], expected["hidden"]]) < 1e-12
    assert found[2] == "steps"
    assert far(grads(model), grads(whole)) < 1e-12
    assert not list(model.buffers()) or far(model.buffers(), whole.buffers()) < 1e-12


def test_masks_are_computed_again_and_numbers_do_not_pass() -> None:
    model = Steps([("mask", 0), ("linear", 0), ("mask", 0), ("free", 3)])
    inputs = torch.randn(3, WIDTH, dtype=torch.float64), torch.randn(3, WIDTH, dtype=torch.float64)
    program = read_program(exported(model, *inputs))
    first, second = cut_program(program, begins_of(program, [["begin"], ["steps.2"]]))
    assert [each.differentiable for each in first.gives] == [True, True]  # a value that is read later, and the newest
    assert first.inputs == (0,)
    assert second.inputs == (0, 1)


def test_a_value_passes_through_a_stage_that_does_not_read_it() -> None:
    model = Steps([("linear", 0), ("linear", 0), ("skip", 3)])
    inputs = torch.randn(3, WIDTH, dtype=torch.float64), torch.randn(3, WIDTH, dtype=torch.float64)
    program = read_program(exported(model, *inputs))
    stages = cut_program(program, begins_of(program, [["begin"], ["steps.0"], ["steps.1"], ["steps.2"]]))
    assert [len(stage.gives) for stage in stages] == [1, 2, 2, 0]
    assert all(stage.takes[0] == stages[0].gives[0] for stage in stages[1:])


class Shared(nn.Module):
    """One batch norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


class Viewed(Shared):
    """A view that crosses the cut beside its base, which is changed behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.a(x) * 2
        view = base.view(2, -1)
        return self.b(x) + base.add_(1) + view.view(-1, 4)


@pytest.mark.parametrize(("kind", "told"), [(Shared, "running_mean"), (Viewed, "in place")])
def test_a_tensor_that_is_changed_in_one_stage_and_read_in_another_is_refused(kind: Any, told: str) -> None:
    program = read_program(exported(kind(), torch.randn(4, 4)))
    with pytest.raises(StageError, match=told):
        _ = cut_program(program, begins_of(program, [["a"], ["b"]]))


def test_stages_in_another_order_or_without_operators_are_refused() -> None:
    program = read_program(exported(Shared().eval(), torch.randn(4, 4)))
    with pytest.raises(StageError, match="order in which the forward calls"):
        _ = begins_of(program, [["b"], ["a"]])
    with pytest.raises(StageError, match="no operator of a stage's modules"):
        _ = begins_of(program, [["a"], ["c"]])


@settings(max_examples=10, deadline=None)
@given(depth=st.integers(2, 6), count=st.integers(2, 3))
def test_chosen_stages_hold_blocks_in_equal_numbers(depth: int, count: int) -> None:
    if depth < count:
        return
    model = Steps([("linear", 0)] * depth)
    inputs = torch.randn(3, WIDTH, dtype=torch.float64), torch.randn(3, WIDTH, dtype=torch.float64)
    program = read_program(exported(model, *inputs))
    stages = choose_stages(program, count, [f"steps.{at}" for at in range(depth)])
    numbers = [int(paths[0].rpartition(".")[2]) for paths in stages] + [depth]
    sizes = [end - begin for begin, end in itertools.pairwise(numbers)]
    assert max(sizes) - min(sizes) <= 1


def test_operators_that_torch_saw_in_no_module_name_none() -> None:
    program = read_program(exported(Shared().eval(), torch.randn(4, 4)))
    program.body[0].meta["nn_module_stack"] = {"": ("_empty_nn_module_stack_from_metadata_hook", "")}
    assert set(first_operators(program.body)) == {"b", "norm"}


def test_the_line_of_the_model_is_the_last_one_outside_of_torch() -> None:
    text = '  File "/model.py", line 7, in forward\n    x\n  File "/lib/site-packages/torch/nn/f.py", line 2, in relu\n'
    assert model_line(text) == 'File "/model.py", line 7, in forward'
    assert model_line("nothing") == ""
