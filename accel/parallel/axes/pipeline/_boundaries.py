# SPDX-License-Identifier: Apache-2.0
"""Shapes of the activations between stages, found by one forward without gradients, stage after stage.

The same forward checks that the model is a chain: modules are called in the order of the stages, the input of a stage
reaches its first module unchanged, and the output of its last module leaves the stage unchanged. Another one, of later
stages, checks that nothing but the chain reaches their modules from the model's first input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import nn

from accel.comm import Call, Comm, agreed_values
from accel.errors import StageError
from accel.errors._checks import with_article
from accel.parallel._private import called_eagerly
from accel.parallel.axes.pipeline._skipped import take_hidden
from accel.parallel.axes.pipeline._stage_module import StageModule, first_tensor, has_own
from accel.parallel.axes.pipeline._stage_plan import Layout
from accel.parallel.axes.pipeline._trial import Trial

_FIX = "Put what the forward computes between its modules into a module of its own, which one stage has."
# May be called anywhere: where they are skipped, the shapes and the meaning of what they are given stay.
_ANYWHERE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)


class Boundary(msgspec.Struct, frozen=True):
    """Dtype and shape of a tensor that a stage passes on, and whether a gradient travels back."""

    dtype: str
    shape: tuple[int, ...]
    differentiable: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return getattr(torch, self.dtype)

    def tensor(self, *, requires_grad: bool) -> torch.Tensor:
        """Return a tensor like it on the meta device."""
        dtype = self.torch_dtype
        floats = dtype.is_floating_point or dtype.is_complex
        return torch.empty(
            self.shape, dtype=dtype, device="meta", requires_grad=requires_grad and floats and self.differentiable
        )


def find_boundaries(
    comm: Comm, layout: Layout, stages: Sequence[StageModule], main: torch.Tensor, device: torch.device, trial: Trial
) -> tuple[Boundary, ...]:
    """Return the shapes between stages, from the first input of a micro-batch. A collective of the pipeline; a
    `StageError` is alike on all its ranks, with the outcome of a trial cut for a model that is no chain."""
    found: list[Boundary] = []
    own = {stage.index: stage for stage in stages}
    for at in range(layout.stages):
        before = boundary_of(main) if at == 0 else found[-1]

        def work(at: int = at, before: Boundary = before) -> Boundary:
            if at not in own:
                return before
            try:
                return _run(own[at], main if at == 0 else noise(before, device))
            except StageError as error:
                given = own[at].work
                if not error.expected or given is None:  # the forward's own failure
                    raise
                raise trial.with_outcome(error, given.micro_batches[0], given.around) from error

        shapes = agreed_values(comm, Call("forward_backward: shapes"), work, Boundary)
        found.append(shapes[layout.owners[at]])
    return tuple(found)


def boundary_of(tensor: torch.Tensor) -> Boundary:
    """Return a tensor's dtype and shape."""
    return Boundary(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _run(stage: StageModule, hidden: torch.Tensor) -> Boundary:
    """Run a stage without gradients, on the first micro-batch; buffers and random streams stay as they are."""
    with _Chain(stage) as chain:
        try:
            output = _probed(stage, hidden)
        except StageError:
            chain.check_kinds()
            chain.check_given(hidden)
            raise
    chain.check(hidden, output)
    work = stage.work
    assert work is not None
    if stage.index and hidden.is_floating_point() and not has_own(work.micro_batches[0]):
        with _handing_on(stage, hidden):
            other = _probed(stage, 2 * hidden + 1)
            again = None if _equal(output, other) else _probed(stage, hidden)
        if again is not None and _differ(output, other, again):
            raise StageError(
                "the forward gives modules of a stage a value computed from the model's first input, which only the"
                " first stage has",
                expected=f"modules that depend on the output of stage {stage.index - 1} and on other inputs",
                got="another output for another first input",
                where=f"stage {stage.index} of {stage.count}, rank {stage.rank}",
                fix="Pass what depends on it as an input of its own.",
            )
    return boundary_of(output)


def _probed(stage: StageModule, hidden: torch.Tensor) -> torch.Tensor:
    """The output of a stage."""
    devices = [] if hidden.device.type == "cpu" else [hidden.device]
    buffers = {each: each.detach().clone() for each in stage.buffers()}
    streams = cast(Any, torch.random).fork_rng(devices=devices, device_type=hidden.device.type)
    with torch.no_grad(), streams, called_eagerly(stage):
        output = stage(hidden, micro=torch.zeros(1, dtype=torch.int64))
        for buffer, before in buffers.items():
            _ = buffer.copy_(before)
    return output


@contextlib.contextmanager
def _handing_on(stage: StageModule, hidden: torch.Tensor) -> Generator[None]:
    """Let the stand-ins for modules of the stages before return a tensor, whatever they are given that is like it."""

    def other(_module: nn.Module, _args: Any, output: Any) -> Any:
        is_like = isinstance(output, torch.Tensor) and output.shape == hidden.shape and output.is_floating_point()
        return hidden.to(output.dtype) if is_like else output

    with contextlib.ExitStack() as hooks:
        for path in (path for paths in stage.stages[: stage.index] for path in paths):
            _ = hooks.callback(stage.module.get_submodule(path).register_forward_hook(other).remove)
        yield


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs are equal, where numbers and what is none are."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _differ(one: torch.Tensor, other: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether an output differs from another one by more than from its own second run, whose kernels may add in
    another order."""
    if one.shape != other.shape:
        return True
    if one.shape != again.shape or not one.numel():
        return False
    noise, found = ((one.double() - each.double()).nan_to_num().abs().max() for each in (again, other))
    return bool(found > 10 * noise)


class _Chain:
    """Notes what the first of a stage's modules is given, and what the last one returns."""

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._where = f"stage {stage.index} of {stage.count}, rank {stage.rank}"
        self._hooks = contextlib.ExitStack()
        self._given: torch.Tensor | None = None
        self._returned: Any = None
        self._called = ""
        self._first = ""
        self._unlike = ""
        self._latest = (0, "")
        self._late = ""

    def __enter__(self) -> _Chain:
        for at, paths in enumerate(self._stage.stages):
            for path in paths:
                self._watch_order(at, path, self._stage.module.get_submodule(path))
        for path in self._stage.own:
            self._watch(path, self._stage.module.get_submodule(path))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def check_kinds(self) -> None:
        """Raise `StageError` for a module that returns something else than a tensor."""
        if self._unlike:
            raise StageError(
                "a module returns something else than one tensor, which modules of other stages cannot stand in for",
                expected="a tensor",
                got=self._unlike,
                where=self._where,
                fix="Let it return a tensor.",
            )

    def check_given(self, hidden: torch.Tensor) -> None:
        """Raise `StageError` for a stage that gives its first module something else than what it is given."""
        stage = self._stage
        if self._called and stage.index and (self._given is None or not _same(self._given, hidden)):
            raise StageError(
                "the forward changes what a stage is given before it reaches the stage's first module",
                expected=f"the tensor of the stage before as the first input of {self._first}",
                got="another one",
                where=self._where,
                fix=f"{_FIX} {take_hidden(stage.module)}",
            )

    def check(self, hidden: torch.Tensor, output: torch.Tensor) -> None:
        """Raise `StageError` unless the stage is a link of a chain."""
        stage = self._stage
        where = self._where
        if not self._called:
            raise StageError("a stage calls none of its modules", expected=", ".join(stage.own), where=where)
        if self._late:
            raise StageError(
                "the forward calls modules in another order than that of the stages",
                expected="no module of a stage behind one of a later stage",
                got=self._late,
                where=where,
                fix="Name the modules of each stage as the forward calls them: Plan(stages=[[...], [...]]).",
            )
        self.check_kinds()
        self.check_given(hidden)
        if not stage.is_last and not _same(first_tensor(self._returned), output):
            raise StageError(
                "the forward changes what the last module of a stage returns",
                expected=f"the output of {self._called} as the output of the stage",
                got="another one",
                where=where,
                fix=_FIX,
            )

    def _watch_order(self, at: int, path: str, module: nn.Module) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            stage, last = self._latest
            if at < stage and not self._late:
                self._late = f"{path} of stage {at} behind {last} of stage {stage}"
            self._latest = max(self._latest, (at, path))

        if not isinstance(module, _ANYWHERE):
            _ = self._hooks.callback(module.register_forward_pre_hook(before).remove)

    def _watch(self, path: str, module: nn.Module) -> None:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._called:
                self._first = path
                given = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
                self._given = given if isinstance(given, torch.Tensor) else None
            self._called = path

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._returned = output
            if not isinstance(output, torch.Tensor):
                self._unlike = f"{with_article(type(output).__name__)} of {path}"

        first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        _ = self._hooks.callback(first.remove)
        _ = self._hooks.callback(module.register_forward_hook(after).remove)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, but for a cast to another dtype."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    return torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-2)


def noise(like: Boundary, device: torch.device) -> torch.Tensor:
    """Return random numbers in the place of a tensor that a stage passes on; zeros for integers."""
    dtype: torch.dtype = getattr(torch, like.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(like.shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(device, dtype)


@contextlib.contextmanager
def working(stages: Iterable[Any], work: Any) -> Generator[None]:
    """Give stages their work for the time of a block."""
    for each in stages:
        each.work = work
        if each.before_batch is not None:
            each.before_batch()
    try:
        yield
    finally:
        for each in stages:
            each.work = None
