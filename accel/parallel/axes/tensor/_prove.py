# SPDX-License-Identifier: Apache-2.0
"""The proof of a plan for one module: simulated ranks compute what the whole module does, and its gradients.

Parameters are drawn anew, as initial zeros hide a bias that is added twice, and all is in float64 without dropout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from accel.comm import SilentGroup, ThreadGroup, run_in_threads
from accel.compiling import uncompiled
from accel.errors import PrepareError
from accel.fakes import is_fake
from accel.mixins import remove_mixin
from accel.parallel._compile import Recomputed
from accel.parallel._copies import WideMode, copied_model
from accel.parallel._fakes import MessageError, NoMessages
from accel.parallel._modules import RANKS
from accel.parallel._private import flat_tensors, tensors_of
from accel.parallel.axes.tensor._dependence import dense
from accel.parallel.axes.tensor._layers import GroupLayer
from accel.parallel.axes.tensor._rules import install, rules_of
from accel.parallel.axes.tensor._styles import Regions, Rule
from accel.parallel.axes.tensor._tokens import SequenceRanks
from accel.parallel.axes.tensor._trace import ModuleCall, copy_with
from accel.parallel.parts import NoRuleError
from accel.random import Key, host_streams, rng_scope
from accel.topology import TensorStyle

_TOLERANCE = 1e-10
_COMPLETE: TensorStyle = "replicated"  # of a module's own backward, which sums
_DRAWS = Key(31)


class Verdict(NamedTuple):
    """The result of a proof."""

    problem: str  # the difference from the whole module; "" for none
    styles: Mapping[str, TensorStyle]  # the plan; of shared tokens, with the modules with complete gradients
    scatters: int = 0  # number of sums that were scattered by tokens
    gathers: Sequence[str] = ()  # names of functions that gathered tokens, outside of divided layers


class _Plan(NamedTuple):
    styles: Mapping[str, TensorStyle]
    regions: Regions
    shares_tokens: bool
    gathers_inputs: bool


class _ProofRun(NamedTuple):
    outputs: list[Tensor]
    inputs: Mapping[int, Tensor | None]
    parameters: Mapping[str, Tensor | None]


def prove(
    module: nn.Module,
    call: ModuleCall,
    styles: Mapping[str, TensorStyle],
    size: int,
    *,
    regions: Regions | None = None,
    shares_tokens: bool = False,
    gathers_inputs: bool = True,
) -> Verdict:
    """Return whether a module that ranks divide computes the same as the full one, in a separate call.

    No communication.
    `styles` are by path in the module. With `shares_tokens` each rank holds its tokens between divided layers. Without
    `gathers_inputs`, a layer that ranks divide by outputs must not have an input that they divide by features. With
    `regions` of parts, a forward and backward in training mode must run, too. In that mode a rank must draw as many
    numbers from python's and numpy's streams as the whole module. The module and all streams are unchanged.
    """
    with cast(Any, torch.random).fork_rng(devices=[]), torch.enable_grad(), uncompiled():
        values = drawn_inputs(call)
        try:
            expected = _run(redrawn(module), call, values)
            is_finite = all(bool(torch.isfinite(each).all()) for each in expected.outputs)
        except Exception as error:  # whatever a forward says of values that are drawn, or an object without values
            return Verdict(f"the whole module alone, with drawn values: {short(error)}", styles)
        if not expected.outputs:
            return Verdict("the whole module returns no tensor to compare", styles)
        if not is_finite:
            return Verdict("the whole module's outputs are not finite", styles)
        whole = redrawn(module)  # anew, as a forward may keep tensors for the next one
        while True:
            plan = _Plan(styles, regions or {}, shares_tokens=shares_tokens, gathers_inputs=gathers_inputs)
            verdict, wrong = _compared(whole, call, values, expected, plan, size)
            if not wrong:
                return verdict
            if not shares_tokens:
                return Verdict(f"gradients of {', '.join(wrong)} differ", styles)
            styles = {**styles, **dict.fromkeys(wrong, _COMPLETE)}


def tokens_refused(problem: str) -> PrepareError:
    """Return the error for a model with tokens that ranks cannot share."""
    return PrepareError(
        "the tokens of this model cannot be shared between its layers",
        expected="a forward that gives the same with parts of the tokens, proved on simulated ranks",
        got=problem,
        where="prepare_model, plan.sequence",
        fix="Leave sequence out: plan=accel.parallel.Plan(sequence=False).",
    )


def redrawn(module: nn.Module) -> nn.Module:
    """Return a copy in float64 with other parameters, in evaluation mode."""
    draw = torch.Generator().manual_seed(17)

    def values_of(each: Tensor) -> Tensor:
        if isinstance(each, nn.Parameter):
            values = torch.randn(each.shape, generator=draw, dtype=torch.float64, device="cpu")
            return values / max(each.shape[-1], 1) ** 0.5 if each.ndim > 1 else values
        has_none = each.is_meta or is_fake(each)
        return _values(each, draw) if has_none else _in_float64(each.detach().to("cpu", copy=True))

    whole = copy_with(module, values_of)
    remove_mixin(whole.modules(), Recomputed)  # a backward does not know the dtypes of the proof
    return whole


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _values(like: Tensor, draw: torch.Generator) -> Tensor:
    """Values for a tensor without any: positions for integers, random values for other dtypes."""
    if like.is_floating_point() or like.is_complex():
        kind = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(like.shape, generator=draw, dtype=kind)
    if like.dtype == torch.bool:
        values = torch.rand(like.shape, generator=draw) < 0.5
        if like.ndim and like.shape[-1] > 1:  # no query without a key, whatever True means
            values[..., 0], values[..., -1] = True, False
        return values
    last = like.shape[-1] if like.ndim else 1
    return torch.arange(last).expand(like.shape).to(like.dtype).clone()


def drawn_inputs(call: ModuleCall) -> Mapping[int, Tensor]:
    """Return values of a call's tensors, by their number: integers of the example, and drawn ones for others."""
    draw = torch.Generator().manual_seed(23)
    tensors = flat_tensors((call.args, call.kwargs))
    drawn = {number: _values(each, draw) for number, each in zip(call.inputs, tensors, strict=True)}
    return drawn | {number: each.detach().to("cpu", copy=True) for number, each in call.given.items()}


def _run(
    module: nn.Module,
    call: ModuleCall,
    values: Mapping[int, Tensor],
    *,
    is_forward: bool = False,
) -> _ProofRun:
    """Outputs, and gradients of a random function of them; no gradients if only the forward runs."""
    given: dict[int, Tensor] = {}
    for number, each in zip(call.inputs, flat_tensors((call.args, call.kwargs)), strict=True):
        if number not in given:
            given[number] = values[number].detach().clone().requires_grad_(each.requires_grad)
    with torch.enable_grad(), NoMessages():  # of copies, as a forward may change its input in place
        taken = {number: each.clone() if each.requires_grad else each for number, each in given.items()}
        outputs = tensors_of(run_valued(module, call, taken))
    draw = torch.Generator().manual_seed(29)
    total = torch.zeros((), dtype=torch.float64)
    for each in outputs:
        weights = torch.randn(each.shape, generator=draw, dtype=torch.float64)
        if each.requires_grad:
            total = total + (each.double() * weights).sum()
    if total.requires_grad and not is_forward:
        with NoMessages():
            torch.autograd.backward([get_gradient_edge(total)], [torch.ones_like(total)])
    own = {name: dense(each.grad) for name, each in module.named_parameters()}
    return _ProofRun([each.detach() for each in outputs], {number: each.grad for number, each in given.items()}, own)


def run_valued(module: nn.Module, call: ModuleCall, values: Mapping[int, Tensor]) -> object:
    """Run a copy of a module in a separate call, in float64, with values, also of modules that it is given. Each
    run draws the same numbers."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    numbers = iter(call.inputs)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[at] = values[next(numbers)]
        elif isinstance(leaf, nn.Module):
            leaves[at] = redrawn(leaf)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with WideMode(torch.float64, draws=torch.Generator().manual_seed(37)):
        return module(*args, **kwargs)


def _part(whole: nn.Module, rules: Mapping[str, Rule], group: ThreadGroup, *, gathers_inputs: bool) -> nn.Module:
    """A rank's copy of a module, with its parts of the parameters."""
    memo: dict[int, Any] = {}
    for path, rule in rules.items():
        for name, each in whole.get_submodule(path).named_parameters(recurse=False):
            values = _piece(each.detach(), rule.dims.get(name), group)
            memo[id(each)] = nn.Parameter(values.clone())
    part = copied_model(whole, memo)
    ranks = install(part, rules, lambda rule: GroupLayer(rule, group))
    if ranks is not None:
        ranks.gathers_inputs = gathers_inputs
    return part


def _piece(values: Tensor, dim: int | None, group: ThreadGroup) -> Tensor:
    return values if dim is None else values.chunk(group.size(), dim)[group.rank()]


def _compared(
    whole: nn.Module,
    call: ModuleCall,
    values: Mapping[int, Tensor],
    expected: _ProofRun,
    plan: _Plan,
    size: int,
) -> tuple[Verdict, list[str]]:
    """A verdict, and paths of modules with gradients that may be summands, if nothing else differs."""
    styles, regions, shares_tokens, gathers_inputs = plan
    try:
        rules = rules_of(whole, styles, size, regions=regions, shares_tokens=shares_tokens)
    except PrepareError as error:
        return Verdict(error.got.replace("the model: ", ""), styles), []
    tokens: list[SequenceRanks] = []
    part_of = partial(_part, whole, rules, gathers_inputs=gathers_inputs)

    def work(group: ThreadGroup) -> tuple[ThreadGroup, _ProofRun]:
        part = part_of(group)
        if shares_tokens and not group.rank():
            tokens.append(getattr(part, RANKS))
        return group, _run(part, call, values)

    try:
        runs = run_in_threads(size, work)
    except Exception as error:  # whatever a forward says of parts that do not fit
        return Verdict(short(error), styles), []
    for _, run in runs:
        problem = next(_differences(expected, run), "")
        if problem:
            return Verdict(problem, styles), []
    wrong: list[str] = []
    for name, want in expected.parameters.items():
        got = [run.parameters[name] for _, run in runs]
        path, _, own = name.rpartition(".")
        dim = rules[path].dims.get(own)
        is_summand = rules[path].summands or (rules[path].tokens and want is not None and want.dim() > 0)
        if is_summand and dim is None:
            got = [None if any(each is None for each in got) else torch.stack(cast("list[Tensor]", got)).sum(0)] * size
        pieces = [None if want is None else _piece(want, dim, group) for group, _ in runs]
        if all(_equal(a, b) for a, b in zip(pieces, got, strict=True)):
            continue
        if dim is not None or path in styles:
            return Verdict(f"the gradient of {name} differs", styles), []
        wrong.append(path)
    if not wrong:
        alone = SilentGroup(size)  # one rank, as threads would draw different numbers
        problem = _problem_in_training(
            lambda: _run(whole.train(), call, values, is_forward=True),
            lambda: _run(part_of(alone).train(), call, values, is_forward=not regions),
            always=bool(regions),
        )
        verdict = Verdict(problem, styles)
        return verdict._replace(scatters=tokens[0].scatters, gathers=(*tokens[0].gathers,)) if tokens else verdict, []
    return Verdict("", styles), list(dict.fromkeys(wrong))


def _problem_in_training(whole: Callable[[], object], part: Callable[[], object], *, always: bool) -> str:
    """Why a rank's part does not run in training, or draws from other streams than the whole module; "" for neither.

    `always`: whether to run the part where the whole module draws nothing of python's or numpy's streams.
    """

    def drawn(run: Callable[[], object]) -> tuple[object, object]:
        with rng_scope(_DRAWS):
            _ = run()
            return host_streams()

    nothing = expected = drawn(lambda: None)
    with contextlib.suppress(Exception):  # whatever a forward says of drawn values
        expected = drawn(whole)
    if not always and expected == nothing:
        return ""
    try:
        return "" if drawn(part) == expected else "in training, ranks would draw other numbers of python or numpy"
    except Exception as error:  # whatever a forward says of parts
        return f"in training, {short(error)}"


def short(error: Exception) -> str:
    """Return the kind and the beginning of an error in one line; only the problem of a message, or of no rule."""
    if isinstance(error, NoRuleError):
        return f"no rule for {error.got}"
    if isinstance(error, MessageError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _differences(expected: _ProofRun, run: _ProofRun) -> Iterator[str]:
    """Differences of a rank's outputs and gradients of inputs from the whole module's."""
    if len(expected.outputs) != len(run.outputs):
        yield f"{len(run.outputs)} outputs, not {len(expected.outputs)}"
        return
    for at, (want, got) in enumerate(zip(expected.outputs, run.outputs, strict=True)):
        if not _equal(want, got):
            yield f"output {at} differs"
    for at, (number, want) in enumerate(expected.inputs.items()):
        if not _equal(want, run.inputs[number]):
            yield f"the gradient of input {at} differs"


def _equal(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        return want is got
    if want.shape != got.shape:
        return False
    if not want.is_floating_point():
        return torch.equal(want, got)
    limit = _TOLERANCE * max(1.0, float(want.abs().max())) if want.numel() else 0.0
    return bool(((want - got).abs() <= limit).all())  # False for NaN
