# SPDX-License-Identifier: Apache-2.0
"""The proof of a first call: outputs and gradients of parts of positions against all positions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accel.devices import wide_dtype
from accel.errors import PrepareError, StageError
from accel.parallel._copies import WideMode, gradients_of
from accel.parallel._modules import forget, note_module, sharded_roots
from accel.parallel._private import is_of_inputs, outside_of_checkpoints
from accel.parallel.axes.context._inner import listed, noted
from accel.parallel.axes.context._positions import DifferentRankError, PositionRanks
from accel.parallel.axes.context._selected import SelectedTensor, whole_of
from accel.parallel.axes.context._split import ALL_POSITIONS
from accel.parallel.parts import NoRuleError
from accel.random import isolated_rng
from accel.tensors import is_dtensor

DIFFERENT = "ranks along cp did not compute the same"
FAILED_ALONE = "the model does not run in evaluation mode"
PROVED = 8  # positions of a rank in the proof
_FAILED, _FAILED_ALONE = -1, -2  # what a rank that fails meets others with, in the place of a number of positions
_LARGEST = 2**28  # most parameter elements for comparing all gradients; larger models: vectors
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPPING = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    functional.multi_head_attention_forward,
)
_DROPOUT_PLACE = 4  # of `dropout_p` among the arguments of `scaled_dot_product_attention`
_WIDEST = 2**29  # elements of the largest parameter that the proof copies in a wide dtype: 4 GiB


class _FailedAloneError(Exception):
    """The model fails with all positions, too, by the error that is the cause."""


def attempted(ranks: PositionRanks, attempt: Callable[[], None], *, may_train: bool = False) -> str:
    """Return the problem that a comparison finds on this rank; "" for none. A collective.

    `may_train`: whether the caller tries once more in training modes where this returns `FAILED_ALONE`, which all
    ranks do or none.
    """
    try:
        attempt()
        ranks.meet(PROVED)
    except Exception as failure:
        error = _of_forward(failure)
        if isinstance(error, DifferentRankError):
            return DIFFERENT
        is_alone = isinstance(error, _FailedAloneError)
        try:
            ranks.meet(_FAILED_ALONE if is_alone else _FAILED)
        except DifferentRankError:  # which the other ranks raise
            may_train = False
        if is_alone and may_train:
            return FAILED_ALONE
        return _problem_of(cast(Exception, error.__cause__) if is_alone else error)
    return ""


def differ(
    ranks: PositionRanks,
    module: nn.Module,
    run_whole: Callable[[], list[Tensor]],
    run_own: Callable[[], list[Tensor]],
    units: Sequence[nn.Module],
) -> list[Tensor]:
    """Raise `PrepareError` where a call with parts differs from one with all positions; return its outputs. Both
    return floating-point outputs. A collective.

    Both compute in a wide dtype, as rounding would hide an error in a narrow one. A forward that does not run in
    it, has a very large parameter or gathers units of `fully_shard`, and the gradients of a large model, are
    compared in its dtypes.

    `units`: the outermost modules that the calls call, some of which may be units of `fully_shard`.
    """
    everything = list(module.parameters())
    parameters = _proved(everything)
    sizes = [each.numel() for each in everything]
    is_small = bool(parameters) and sum(sizes) <= _LARGEST  # frozen ones count: a graph keeps wide copies
    mode = WideMode(wide_dtype(ranks.ctx.device), everything if is_small else [])
    copies = [mode.copies[id(each)] for each in parameters] if is_small else []
    runs = [(mode, copies), (contextlib.nullcontext(), parameters)]
    has_units = any(map(sharded_roots, units))  # messages fill buffers of their dtype
    got: list[Tensor] = []
    for run, compared in runs[1:] if has_units or max(sizes, default=0) > _WIDEST else runs:
        # if ranks share parameters, a graph is made alone: functions that lose positions fail in it
        follows = not parameters and (run is not mode or sum(sizes) <= _LARGEST)
        is_followed = bool(compared) or (follows and any(each.requires_grad for each in everything))
        with run, torch.set_grad_enabled(is_followed):
            expected = whole_outputs(ranks, run_whole, may_fail=run is mode)
            if expected is None:
                continue
            with noted(module, ranks), isolated_rng(ranks.ctx.device):
                got = run_own()
            if difference := _difference(ranks, expected, got, compared):
                raise PrepareError("", got=difference)
        if compared or not parameters:
            break
    return got


def whole_outputs(ranks: PositionRanks, call: Callable[[], list[Tensor]], *, may_fail: bool) -> list[Tensor] | None:
    """Return the outputs of a call with all positions; None if it failed and may. A collective."""
    with ALL_POSITIONS.begun(ranks.ctx), isolated_rng(ranks.ctx.device):  # both draw the same random numbers
        try:
            found = call()
        except Exception as error:
            if not may_fail:
                raise _FailedAloneError from error
            found = None
    ranks.meet(found is None)
    return found


def _difference(
    ranks: PositionRanks, expected: Sequence[Tensor], got: Sequence[Tensor], parameters: Sequence[Tensor]
) -> str:
    """Return a line on the first output or gradient that differs from the one of all positions; "" for none. A
    collective."""
    if len(expected) != len(got):
        return f"{len(got)} outputs of {len(expected)}"
    objectives: list[tuple[Tensor, Tensor]] = []
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        if ranks.has_own_loss and not want.dim():
            continue
        if want.shape != have.shape:
            return f"output {number} of shape {list(have.shape)}, expected {list(want.shape)}"
        have = whole_of(have)
        draw = torch.arange(1, want.numel() + 1, device=want.device).sin().view(want.shape).to(want.dtype)
        infinite = want.isinf()
        change = (want - have).masked_fill(infinite & (want == have), 0)  # as in a mask that stages pass on
        off = _norm(change.detach()) / max(_norm(want.masked_fill(infinite, 0).detach()), 1e-30)
        if not off <= _tolerance(want):
            return f"output {number} is off by {off:.0e} of its norm"
        objectives.append(((want * draw).sum(), (have * draw).sum() / ranks.size))
    return _gradients(ranks, objectives, parameters) if objectives else ""


def _gradients(ranks: PositionRanks, objectives: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor]) -> str:
    """Return a line on the first gradient that the ranks' do not sum up to; "" for none. A collective."""
    want, have = (torch.stack([each[at].real for each in objectives]).sum() for at in (0, 1))
    if not parameters or not want.requires_grad:
        return ""
    with ALL_POSITIONS.begun(ranks.ctx):  # where blocks are recomputed
        try:
            expected = gradients_of(want, parameters)
        except Exception as error:
            raise _FailedAloneError from error
    own = gradients_of(have, parameters)
    with torch.no_grad():
        largest = max(_norm(each) for each in expected)
        for parameter, wanted, mine in zip(parameters, expected, own, strict=True):
            off = _norm(ranks.total(mine.contiguous()) - wanted)
            size = max(_norm(wanted), largest / 100, 1e-30)
            if not off <= _tolerance(parameter) * size:
                return f"a gradient of a parameter of shape {list(parameter.shape)} is off"
    return ""


def _proved(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters to compare gradients of: none if ranks share some, only vectors if there are many."""
    found = [each for each in parameters if each.requires_grad]
    if any(is_dtensor(each) for each in found):
        return []
    is_large = sum(each.numel() for each in found) > _LARGEST
    return [each for each in found if each.dim() < 2] if is_large else found


def _tolerance(tensor: Tensor) -> float:
    """Return the largest difference that rounding makes, as a share of a norm; some functions round in float32."""
    return max(torch.finfo(tensor.dtype).eps ** 0.4, 1e-5)


class _WithoutDropout(TorchFunctionMode):
    """Calls functions with dropout as in evaluation, whatever the mode of the modules that call them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "dropout_p" in given:  # also of `context_attention`
            given["dropout_p"] = 0.0
        if func is functional.scaled_dot_product_attention and len(args) > _DROPOUT_PLACE:
            args = (*args[:_DROPOUT_PLACE], 0.0, *args[_DROPOUT_PLACE + 1 :])
        elif func in _DROPPING:
            call = inspect.signature(func).bind(*args, **given)
            call.arguments["training"] = False
            args, given = call.args, call.kwargs
        return func(*args, **given)


@contextlib.contextmanager
def evaluated(module: nn.Module, device: torch.device, *, trains: bool = False) -> Generator[None]:
    """Compute without gradients and without dropout, as a proof does; streams of random numbers stay as they are.

    Modules and names of modes that a model replaces by the length of its inputs are put back. `trains`: only layers and
    functions of dropout change their mode, and buffers that the forward changes are put back. No checkpoint around the
    calls sees them, and no mode: under one a function of torch.jit, which loses positions, would keep them.
    """
    before = [(each, each.training, dict(each.named_children()), dict(vars(each))) for each in module.modules()]
    buffers = [(vars(each)["_buffers"], dict(each.named_buffers(recurse=False))) for each, *_ in before if trains]
    values = [(each, each.clone()) for each in module.buffers()] if trains else []
    for each, *_ in before:
        note_module(each, proves=True)
    try:
        for each in [each for each in module.modules() if isinstance(each, _DROPOUTS)] if trains else [module]:
            _ = each.eval()
        without = _WithoutDropout() if trains else contextlib.nullcontext()
        with outside_of_checkpoints(), isolated_rng(device), torch.no_grad(), without:
            yield
    finally:
        for each, training, children, own in before:
            forget(each, "proves")
            for name in [name for name, child in children.items() if getattr(each, name) is not child]:
                setattr(each, name, children[name])
            vars(each).update({name: value for name, value in own.items() if isinstance(value, str)})
            each.training = training
        for stored, given in buffers:
            stored.update(given)
        with torch.no_grad():
            for buffer, value in values:
                _ = buffer.copy_(value)


def _of_forward(error: Exception) -> Exception:
    """Return the error that a forward raised, of the one that a stage of a pipeline makes of it."""
    while isinstance(error, StageError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _problem_of(error: Exception) -> str:
    """Return a line on an error of a call with parts; raise those that are not of parts."""
    if isinstance(error, PrepareError) and (isinstance(error, NoRuleError) or not error.problem):
        return str(error.got)
    if is_of_inputs(error):
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise error


def _norm(tensor: Tensor) -> float:
    return float(tensor.abs().to(wide_dtype(tensor.device)).square().sum().sqrt())


def outputs_of(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a forward's output."""
    found = [whole_of(each) if isinstance(each, SelectedTensor) else each for each in listed(output)]
    return [each for each in found if each.is_floating_point()]
