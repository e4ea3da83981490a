# SPDX-License-Identifier: Apache-2.0
"""Tokens of each expert over a window, and the bias that balances experts by them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, cast

import msgspec
import torch
from torch import Tensor, nn

from accel.comm import refuse_replaced, summed
from accel.context import DistContext, group_of
from accel.context._dist_context import check_context
from accel.errors import ConfigError, PrepareError, StepError
from accel.errors._checks import check_kind
from accel.loop_state import Accumulation
from accel.parallel import balanced_bias, expert_counts
from accel.parallel._modules import forget, is_pipelined, matching, named_modules, note_module, notes_of, unwrap_model
from accel.parallel._private import runs_in_backward, untraced
from accel.parallel.axes.experts import (
    LISTS,
    WITH_OWN_TOKENS,
    ExpertCalls,
    calls_around,
    is_sorted_experts,
    moe_modules,
)
from accel.parallel.parts import PartTensor, plain_of
from accel.parallel.parts._nested import NestedPart
from accel.tensors import is_dtensor
from accel.training._evaluating import Stepped
from accel.training._train_state import TrainState

_WHERE = "ExpertLoad"


class ExpertCounts(msgspec.Struct, frozen=True):
    """The tokens of each expert in a step, of all ranks, on the device.

    Attributes:
        layers: by path of the counted module, integers of shape [experts].
    """

    layers: Mapping[str, Tensor]

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return figures to log, tensors of shape []. No communication, and no wait for the device.

        By layer: "max_over_mean", the busiest expert's tokens over the mean, 1 where experts are equally busy; and
        "idle", the share of experts without a token. The largest of all layers are under "all".

        Examples:
            >>> counts = accel.training.ExpertCounts({"mlp.experts": torch.tensor([6, 2, 0, 0])})
            >>> {name: float(each) for name, each in counts.values()["mlp.experts"].items()}
            {'max_over_mean': 3.0, 'idle': 0.5}
        """
        rows = {path: _figures(each) for path, each in self.layers.items()}
        worst = {
            name: torch.stack([each[name] for each in rows.values()]).amax(0) for name in next(iter(rows.values()))
        }
        return {**rows, "all": worst}


def _figures(counts: Tensor) -> dict[str, Tensor]:
    tokens = counts.float()
    return {"max_over_mean": tokens.max() / tokens.mean().clamp(min=1e-30), "idle": (counts == 0).float().mean()}


class _Counted(NamedTuple):
    """A counted module."""

    counts: Tensor  # tokens of each expert on this rank in the window so far
    holder: nn.Module | None  # module with the bias; None without one
    is_sorted: bool  # whether the module is called with every token for each expert, as in Llama 4


class ExpertLoad:
    """The tokens that a model's experts get in each window, and the bias of its routers that balances them.

    Counts stay on the device. The bias is a buffer of the model, or a frozen parameter: it is saved with it, and no
    optimizer changes it.

    Args:
        model: model from `prepare`. Hooks of its modules count; `close` removes them.
        experts: number of experts by pattern of the modules to count at, which are called with the experts of tokens,
            or return them: integers of shape [..., k]. With "model", the experts that `expert_plan` finds.
        speed: step of the bias, such as 0.001; None to only count.
        bias: name of the bias in the module of experts, or one next to it.

    Raises:
        PrepareError: no such modules; with `speed` none with a bias, one that trains, or one that moves already.

    Reference: Wang et al. 2024, arXiv:2408.15664; DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437.

    Examples:
        >>> load = accel.training.ExpertLoad(model, speed=0.001)
        >>> with accel.accumulate(ctx, state, model), load.counting(state):
        ...     state = accel.backward(ctx, loss_of(model), state)
        >>> if state.sync:
        ...     state = accel.optimizer_step(ctx, optimizer, state)
        ...     counts = load.update_(ctx, state)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        experts: Mapping[str, int] | Literal["model"] = "model",
        speed: float | None = None,
        bias: str = "e_score_correction_bias",
    ) -> None:
        inner = unwrap_model(model)
        self._speed, self._bias = speed, bias
        self._window: Accumulation | None = None
        self._micros: set[int] = set()
        self._is_counting = False
        self._mask: Tensor | None = None
        self._is_real = True
        self._calls = 0
        self._positions: list[Any] = []  # calls with parts of positions, along cp
        modules = dict(named_modules(inner))
        found = _experts_by_path(inner, experts)
        paths = dict.fromkeys(each for path in found for each in _paths_above(path) if each in modules)
        self._above = [modules[each] for each in paths]
        self._layers = {path: self._layer(modules, path, number, found) for path, number in found.items()}
        if self._layers and speed is not None and all(each.holder is None for each in self._layers.values()):
            raise PrepareError(
                "no router has a bias to balance experts by",
                expected=f"a buffer {bias!r} in {', '.join(found)}, or in a neighbouring module",
                got="none",
                where=f"{_WHERE}(speed={speed})",
                fix='Name yours, as in bias="expert_bias"; or leave speed out, to count only.',
            )
        for path, each in self._layers.items():
            if each.holder is not None:
                _mark_moved(each.holder, path)
        self._hooks = [
            called.register_forward_hook(hook, with_kwargs=True)
            for path in self._layers
            for called, hook in self._hooks_of(modules, path)
        ]

    def close(self) -> None:
        """Remove the hooks from the model; another `ExpertLoad` may then move its biases."""
        for hook in self._hooks:
            hook.remove()
        for each in self._layers.values():
            if each.holder is not None:
                forget(each.holder, "moved")

    @contextlib.contextmanager
    def counting(self, state: TrainState | Accumulation, *, mask: Tensor | None = None) -> Generator[Self]:
        """Count the tokens of the block's forwards with gradients; layers that a backward computes again count once.

        Args:
            state: state from `state.next(batch)`, or an accumulation from `accum.next(...)`.
            mask: 1 for tokens that count and 0 for padding, one entry for each of this rank's tokens, or for each
                sample, as `batch.mask`; None if all count. A placeholder batch never counts.

        Raises:
            StepError: outside of a micro-batch, or the counts of the window before were not taken.
            ConfigError: a mask of other tokens.
        """
        window = state.accum if isinstance(state, TrainState) else state
        self._begin(window)
        is_real = not isinstance(state, TrainState) or state.valid is None or state.valid > 0
        self._mask, self._is_real = mask, is_real
        self._is_counting, before = True, self._calls
        noted = [notes_of(each).get("positions") for each in self._above]
        self._positions = [each for each in noted if each is not None]
        try:
            yield self
        finally:
            self._is_counting, self._mask = False, None
        if self._calls == before and self._layers:
            raise StepError(
                "no experts were called in the block that counts",
                expected="a forward with gradients in it",
                got=f"none of {', '.join(self._layers)}",
                where=f"{_WHERE}.counting",
                fix="Write with accel.accumulate(ctx, state, model), load.counting(state): around the forward. "
                "torch.utils.checkpoint shows it gradients with use_reentrant=False.",
            )
        self._micros.add(window.micro)

    def update_(self, ctx: DistContext, step: TrainState | Stepped) -> ExpertCounts:
        """Sum the window's counts over the ranks, move the biases by them, and begin a new window. A collective.

        Call it after each step. Mutates the biases, on all ranks alike; a skipped step leaves them as they were.

        Args:
            ctx: the context.
            step: result of `optimizer_step`.

        Returns:
            The counts of the ranks that share this rank's layers: of all ranks, or of a pipeline's stage.

        Raises:
            StepError: before the step, twice after it, or a micro-batch of the window was not counted.
        """
        check_context(ctx, "load.update_(ctx, state)")
        self._check_full(step)
        biases = [getattr(each.holder, self._bias) for each in self._layers.values() if each.holder is not None]
        refuse_replaced(biases, f"{_WHERE}.update_")
        counts = {path: each.counts for path, each in self._layers.items()}
        group = group_of(ctx, *WITH_OWN_TOKENS)
        if group is not None and counts:
            sizes = [len(each) for each in counts.values()]
            total = summed(torch.cat(list(counts.values())), group)
            counts = dict(zip(counts, torch.split(total, sizes), strict=True))
        else:
            counts = {path: each.clone() for path, each in counts.items()}
        self._clear()
        if self._speed is not None and step.stepped:
            for path, layer in self._layers.items():
                if layer.holder is not None:
                    _move(getattr(layer.holder, self._bias), counts[path], self._speed)
        return ExpertCounts(counts)

    def _layer(self, modules: Mapping[str, nn.Module], path: str, number: int, paths: Iterable[str]) -> _Counted:
        module = modules[path]
        holder = None if self._speed is None else _holder(modules, path, self._bias, paths)
        number = max(number, 0 if holder is None else getattr(holder, self._bias).numel())  # of experts without weights
        first = next(iter([*module.parameters(), *module.buffers(), *modules[""].parameters()]))
        return _Counted(torch.zeros(number, dtype=torch.int64, device=first.device), holder, is_sorted_experts(module))

    def _hooks_of(self, modules: Mapping[str, nn.Module], path: str) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        """Yield the modules to count at for a path, each with its hook."""
        above = [each for each in _paths_above(path) if each in modules]
        around = [calls for each in above if (calls := calls_around(modules[each])) is not None]
        if not isinstance(listed := modules[path], LISTS):
            yield listed, self._hook(path, around)
            return
        yield modules[path.rpartition(".")[0]], self._call_hook()
        entries = listed.values() if isinstance(listed, nn.ModuleDict) else listed
        for at, expert in enumerate(cast("Iterable[nn.Module | None]", entries)):
            if expert is not None:
                yield expert, self._row_hook(path, at)

    def _call_hook(self) -> Callable[..., None]:
        """Return a hook for the module with the loop over a list of experts; it may call none of them."""

        def called(module: nn.Module, *_: object) -> None:
            self._calls += not self._is_skipped(module)

        return untraced(called)

    def _row_hook(self, path: str, expert: int) -> Callable[..., None]:
        """Return a hook that counts the rows with which an expert of a list is called."""

        def count(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: object) -> None:
            calls = calls_around(module)
            if self._is_skipped(module) or not self._is_real or (calls is not None and calls.phase != "replay"):
                return
            if self._mask is not None:
                raise _without_tokens(path)
            rows = self._own(next(each for each in (*inputs, *named.values()) if isinstance(each, Tensor)))
            if rows is not None:
                self._layers[path].counts[expert] += rows.shape[:-1].numel()

        return untraced(count)

    def _is_skipped(self, module: nn.Module) -> bool:
        is_first = torch.is_grad_enabled() and not runs_in_backward()
        return not self._is_counting or not is_first or "proves" in notes_of(module)

    def _own(self, tensor: Tensor) -> Tensor | None:
        """Return the rows that this rank counts. In a model that computes with parts of positions, ranks along cp have
        the same tensor if it is no part, and the first of them counts it: None for the others."""
        part = tensor.rows if isinstance(tensor, NestedPart) else tensor
        if isinstance(part, PartTensor) and part.division is not None:
            return plain_of(part)
        is_counted = any(each.is_running and each.ranks.rank for each in self._positions)
        return None if is_counted else tensor

    def _hook(self, path: str, around: Sequence[ExpertCalls]) -> Callable[..., None]:
        def count(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: object) -> None:
            if self._is_skipped(module) or any(each.phase == "collect" for each in around):
                return
            self._calls += 1
            if not self._is_real:
                return
            layer = self._layers[path]
            given = (*inputs, *named.values())
            own = self._own(given[0] if layer.is_sorted else _indices(path, given, output))
            if own is None:
                return
            count_rows = _of_rows if layer.is_sorted else expert_counts
            with torch.no_grad():
                _ = layer.counts.add_(count_rows(own, len(layer.counts), mask=self._mask))

        return untraced(count)

    def _begin(self, window: Accumulation) -> None:
        if not window.micro:
            raise StepError(
                "tokens are counted in a micro-batch",
                expected="state = state.next(batch) before it",
                got="a state between two windows",
                where=f"{_WHERE}.counting",
            )
        last = self._window
        if last is not None and (last.updates, last.skipped) != (window.updates, window.skipped):
            raise StepError(
                "the counts of the window before were not taken",
                expected="load.update_(ctx, state) after optimizer_step",
                got=f"a new window, after one of {last.micro} micro-batches",
                where=f"{_WHERE}.counting",
                fix="Call counts = load.update_(ctx, state) after each step.",
            )
        if last is not None and last is not window and window.micro == 1 and not window.backwards:
            self._clear()  # that window was abandoned
        self._window = window

    def _check_full(self, step: TrainState | Stepped) -> None:
        window = self._window
        after = step.accum if isinstance(step, TrainState) else getattr(step, "accum", None)
        if isinstance(after, Accumulation) and after.micro:
            got = f"micro-batch {after.micro} of {after.steps}"
        elif window is None:
            got = "no micro-batch that was counted since the last update"
        elif not window.sync or len(self._micros) != window.micro:
            got = f"{len(self._micros)} counted micro-batches of {max(window.micro, window.steps)}"
        else:
            return
        raise StepError(
            "the window's tokens were not counted, or the update has come already",
            expected="load.counting(state) around the forward of every micro-batch, and one update after the step",
            got=got,
            where=f"{_WHERE}.update_",
            fix="Write with accel.accumulate(ctx, state, model), load.counting(state): in each batch, and "
            "counts = load.update_(ctx, state) below state = accel.optimizer_step(...).",
        )

    def _clear(self) -> None:
        self._window = None
        self._micros = set()
        for each in self._layers.values():
            _ = each.counts.zero_()


def _paths_above(path: str) -> list[str]:
    """Return the paths of all that contains a module, from the model's."""
    return [".".join(path.split(".")[:at]) for at in range(path.count(".") + 1)]


def _experts_by_path(model: nn.Module, experts: Mapping[str, int] | Literal["model"]) -> dict[str, int]:
    """Return the number of experts by path of the modules to count at."""
    if experts == "model":
        found = moe_modules(model)
    else:
        check_kind(
            experts, Mapping, "the value does not map patterns to numbers of experts", where=f"{_WHERE}(experts=)"
        )
        paths = [path for path, _ in named_modules(model)]
        found = {path: number for pattern, number in experts.items() for path in matching(paths, pattern)}
    if is_pipelined(model):
        found = {
            path: number for path, number in found.items() if any(True for _ in model.get_submodule(path).parameters())
        }
    if not found and not is_pipelined(model):  # a stage may have none
        raise PrepareError(
            "no experts to count at",
            expected="modules of experts, or routers",
            got="a model that names none" if experts == "model" else f"patterns without one: {', '.join(experts)}",
            where=f"{_WHERE}(experts=)",
            fix='Name them, with the number of experts: experts={"layers.*.router": 8}.',
        )
    return found


def _holder(modules: Mapping[str, nn.Module], path: str, bias: str, paths: Iterable[str]) -> nn.Module | None:
    """Return the module with the bias: the experts, or a module of the block that holds no other experts."""
    block = path
    while True:
        inside = [each for each in modules if each == block or each.startswith(f"{block}.") or not block]
        if sum(each in inside for each in paths) > 1:
            return None
        holders = [modules[each] for each in inside if _has(modules[each], bias)]
        if len(holders) == 1:
            _check_bias(getattr(holders[0], bias), bias, path)
            return holders[0]
        if holders or not block:
            return None
        block = block.rpartition(".")[0]


def _has(module: nn.Module, bias: str) -> bool:
    own = (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
    return any(name == bias for name, _ in own)


def _check_bias(bias: Tensor, name: str, path: str) -> None:
    if bias.requires_grad or bias.element_size() < 4:
        raise PrepareError(
            "this bias cannot balance experts",
            expected="a buffer or a frozen parameter, in float32 or float64",
            got=f"{bias.dtype}{', which trains' if bias.requires_grad else ''}",
            where=f"{_WHERE}(bias={name!r}), {path}",
            fix="Register it as a buffer of float32, so that no gradient and no weight decay change it.",
        )


def _mark_moved(holder: nn.Module, path: str) -> None:
    if notes_of(holder).get("moved") == id(holder):  # a copy has another id
        raise PrepareError(
            "another ExpertLoad moves this bias, which would move twice a step",
            expected="one with a speed for each model",
            got="a second one",
            where=f"{_WHERE}(speed=), {path}",
            fix="Keep the first one; or call its close() before.",
        )
    note_module(holder, moved=id(holder))


def _move(bias: Tensor, counts: Tensor, speed: float) -> None:
    with torch.no_grad():
        if is_dtensor(bias):
            from torch.distributed.tensor import distribute_tensor  # its import takes most of a second

            whole = balanced_bias(torch.zeros(bias.shape, dtype=bias.dtype, device=counts.device), counts, speed)
            moves = distribute_tensor(whole, bias.device_mesh, bias.placements, src_data_rank=None)
            _ = bias.add_(moves)
        else:
            _ = bias.copy_(balanced_bias(bias, counts.to(bias.device), speed))


def _without_tokens(path: str) -> ConfigError:
    return ConfigError(
        "the rows of experts in a list do not show their tokens, so none can be left out",
        expected="counts at the router, which returns the experts of each token",
        got=f"a mask, and counts at {path}",
        where=f"{_WHERE}.counting(mask=)",
        fix='Name the router: ExpertLoad(model, experts={"layers.*.router": 8}).',
    )


def _of_rows(rows: Tensor, experts: int, mask: Tensor | None) -> Tensor:
    """Count the rows of experts that are called with each token for each of them: zeros where they were not chosen."""
    chosen = rows.reshape(experts, -1, rows.shape[-1]).ne(0).any(-1)
    if mask is not None:
        marks = mask.reshape(-1).to(rows.device, non_blocking=True) != 0
        if chosen.shape[1] % max(len(marks), 1):
            raise ConfigError(
                "the mask does not fit the tokens",
                expected=f"{chosen.shape[1]} tokens",
                got=f"{len(marks)} entries",
                where=f"{_WHERE}.counting(mask=)",
            )
        chosen = chosen & marks.repeat_interleave(chosen.shape[1] // max(len(marks), 1))
    return chosen.sum(1)


def _indices(path: str, given: tuple[Any, ...], output: object) -> Tensor:
    """Return the experts of tokens: the tensor of integers that a module returns, or is called with."""
    kind = type(output).__name__
    returned = cast("tuple[object, ...]", output) if isinstance(output, tuple | list) else (output,)
    for values in (returned, given):
        found = [each for each in values if isinstance(each, Tensor) and _counts_something(each)]
        if len(found) == 1:
            return found[0]
    raise PrepareError(
        "the experts of tokens do not show where they are counted",
        expected="a module that returns one tensor of integers, or is called with one",
        got=f"called with {', '.join(type(each).__name__ for each in given)}; returned {kind}",
        where=f"{_WHERE}, {path}",
        fix='Name the module that has them, such as the router: experts={"layers.*.router": 8}.',
    )


def _counts_something(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool and tensor.ndim > 0
