# SPDX-License-Identifier: Apache-2.0
"""Logits of words that ranks along tp divide: scores of targets, their cross entropy, and a model's own loss."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from accel.comm import Comm, adopt, all_reduce_flat
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.parallel._modules import tensor_notes
from accel.parallel.logits._logits import DeferredLogits
from accel.parallel.parts import PartTensor, RowLayout, plain_of
from accel.parallel.parts._layout import even
from accel.parallel.parts._local_map import local_map
from accel.parallel.parts._nested import rows_in
from accel.parallel.parts._part import layout_of
from accel.tensors import is_dtensor, is_half

if TYPE_CHECKING:
    import torch.distributed as dist

    from accel.parallel.axes.tensor._layers import Layer

_MARKED = 16  # logits of a row that ranks compare
_LARGEST = 1e4  # of these; a sum with those of masked words, such as -1e9, would round others away
_MANY = 32_000  # words from which a gathered head is worth a line


@context_first
def vocab_cross_entropy(
    ctx: DistContext, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the sum of cross entropies of rows with classes that are divided among the ranks along tp.

    No rank holds a whole row: two small all-reduces along tp join the maxima, then the sums. The backward makes none.
    On one rank along tp it is `torch.nn.functional.cross_entropy(reduction="sum")`.

    Args:
        ctx: the context.
        logits: this rank's classes in the order of ranks, shape [..., classes / tp rounded up, less on the last rank],
            as a head of the style "colwise" gives them; fp16 and bf16 are computed in fp32.
        targets: classes, int64 of shape [...], alike on all ranks along tp. One that is no class makes the loss and
            the gradients NaN.
        ignore_index: the target of rows that do not count.

    Returns:
        The sum over rows, shape []; alike on all ranks along tp. Divide by the number of rows that count for a mean.

    Raises:
        ConfigError: shapes that do not fit each other; a DTensor; equal logits on all ranks, as a head that gathers
            them gives. On an accelerator, where this error would wait for the device, the loss and the gradients of
            such logits are NaN. Logits of one value in each row are not compared.

    Reference:
        Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.

    Examples:
        >>> logits = torch.zeros(2, 4)
        >>> float(accel.parallel.vocab_cross_entropy(accel.single(), logits, torch.tensor([1, -100])).exp())
        4.0
    """
    check_logits(logits, targets, where="vocab_cross_entropy", split="")
    group = group_of(ctx, "tp")
    fix = "Pass the context that prepare_model got."
    if group is not None:
        fix = 'Prepare with plan=accel.parallel.Plan(head="colwise"), or call torch.nn.functional.cross_entropy.'
    check_split(logits, is_split=group is not None, where="vocab_cross_entropy", fix=fix)
    if isinstance(logits, DeferredLogits):
        total = logits.loss(targets, is_split=group is not None, ignore_index=ignore_index, reduction="sum")
        if total is not None:
            return total
        logits = logits.made()
    logits = own_words(logits, -1, group)
    wide = logits.float() if is_half(logits) else logits
    if group is None:
        flat = targets.flatten()
        return functional.cross_entropy(wide.flatten(0, -2), flat, ignore_index=ignore_index, reduction="sum")
    losses, _ = row_scores(wide, targets, adopt(group, ctx.device), entropy=False, ignore_index=ignore_index)
    return losses.sum()


def check_split(logits: torch.Tensor, *, is_split: bool, where: str, fix: str) -> None:
    """Raise `ConfigError` if a call means logits of this rank's classes and the head gives all, or the reverse, as far
    as the logits show it."""
    is_deferred = isinstance(logits, DeferredLogits)
    has_own = logits.is_split if is_deferred else tensor_notes(logits).get("own_words", False)
    if has_own != is_split and (is_deferred or has_own):
        kinds = {True: "this rank's classes along tp", False: "all classes"}
        raise ConfigError(
            "the model's head and the call mean different classes",
            expected=f"logits of {kinds[is_split]}",
            got=f"logits of {kinds[has_own]}",
            where=where,
            fix=fix,
        )


def check_logits(logits: torch.Tensor, targets: torch.Tensor, *, where: str, split: str) -> None:
    """Raise `ConfigError` for logits that do not fit their targets, and for a DTensor; `split` is its keyword."""
    if is_dtensor(logits):
        has_parts = any(each.is_shard(logits.ndim - 1) for each in logits.placements)
        raise ConfigError(
            "logits are a DTensor",
            expected="this rank's logits, a plain tensor",
            got=f"a DTensor placed as {logits.placements}",
            where=where,
            fix=f"{where}(ctx, logits.to_local(), targets{split if has_parts else ''})",
        )
    if not isinstance(logits, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - from users
        raise ConfigError(
            "logits are no tensor",
            expected="a tensor of shape [..., classes]",
            got=type(logits).__name__,
            where=where,
            fix=f"Pass the output's logits: {where}(ctx, outputs.logits, targets).",
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        got, fix = str(targets.dtype), "Pass ids, not a mask: targets = ids[:, 1:]."
        raise ConfigError("targets are no classes", expected="int64", got=got, where=where, fix=fix)
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            "logits and targets do not fit",
            expected=f"targets of shape {list(logits.shape[:-1])}",
            got=f"shape {list(targets.shape)}",
            where=where,
            fix=f"Score the logits that predict a token: {where}(ctx, logits[:, :-1], ids[:, 1:]).",
        )


def own_words(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's classes, along a dimension, of a tensor in the forward of a divided model: a plain tensor; on
    a mesh with cp a part of positions.

    `group`: of the ranks along tp in the caller's context; None without any, which is an error for a part.
    """
    if not isinstance(tensor, PartTensor) or (tensor.ranks.keeps_rows and group is None):
        return tensor  # with all classes, of this rank's positions along cp in the latter case
    if group is None:
        raise ConfigError(
            "ranks along tp divide the classes, and the context has no tp",
            expected="the context of the prepared model",
            got=repr(tensor),
            where="forward",
            fix="Pass the context that prepare_model got.",
        )
    total = tensor.shape[dim]
    if tensor.division != RowLayout(dim % tensor.dim(), even(total, tensor.ranks.size)):
        raise ConfigError(
            "ranks along tp hold other rows than classes in order",
            expected="a head divided by classes",
            got=repr(tensor),
            where="forward",
            fix='Give the head the style "colwise".',
        )
    return rows_in(plain_of(tensor))


def divided_words(model: nn.Module) -> int | None:
    """Return the number of words of heads with logits that ranks along tp divide; None for no such head, and for heads
    of several numbers of words."""
    layers: list[Layer] = [vars(each)["accel_layer"] for each in model.modules() if "accel_layer" in vars(each)]
    totals = {words for layer in layers for words in layer.rule.words}
    return totals.pop() if len(totals) == 1 else None


def row_scores(
    logits: torch.Tensor, targets: torch.Tensor, comm: Comm | None, *, entropy: bool, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each target, NaN for one that is no class, and the entropy of its classes.

    Two messages along tp; none without `comm`, and none in the backward. Parts of positions give parts.

    Args:
        logits: of this rank's classes, fp32 or float64, shape [..., classes].
        targets: classes of all ranks, int64 of shape [...].
        comm: of the ranks along tp that divide the classes; None where each has all of them.
        entropy: whether the second result is needed; else it is zeros.
        ignore_index: target with a cross entropy of 0.

    Returns:
        Cross entropies and entropies, shape [...].
    """
    positions = layout_of(logits)
    if positions is not None:
        scores = partial(row_scores, comm=comm, entropy=entropy, ignore_index=ignore_index)
        return local_map(scores, (positions.dim, positions.dim), out=positions.dim)(logits, targets)
    ignored = targets == ignore_index
    known = targets.masked_fill(ignored, 0).flatten()
    losses, entropies = cast(Any, _RowScores).apply(logits.flatten(0, -2), known, comm, entropy)
    return losses.view(targets.shape).masked_fill(ignored, 0.0), entropies.view(targets.shape)


class _RowScores(torch.autograd.Function):
    """Losses and entropies of rows, shape [rows] each."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, comm: Comm | None, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, classes = logits.shape
        # the last rank may have fewer classes than others and gets their number with the maxima, at no message more
        numbers = [logits.amax(1), logits.new_full((1,), classes)]
        if comm is not None:
            marks = _marks(logits, comm.rank)
            numbers += [marks, -marks]
        maxima = _reduced(comm, torch.cat(numbers), "max")
        largest = maxima[:rows]
        width = maxima[rows].long()
        marks = maxima[rows + 1 :]
        powers = (logits - largest[:, None]).exp_()
        at = targets if comm is None else targets - comm.rank * width
        here = (at >= 0) & (at < classes)
        at = at.masked_fill(~here, 0)
        own = (logits.gather(1, at[:, None])[:, 0] - largest).masked_fill_(~here, 0.0)
        # of x * exp(x), where exp(x) may be 0 and x infinite
        numbers = [powers.sum(1), own, *([torch.xlogy(powers, powers).sum(1)] if entropy else [])]
        sums = _reduced(comm, functional.pad(torch.stack(numbers), (0, 1), value=classes), "sum")
        total, target, *mean = sums[:, :-1]
        count = sums[0, -1]
        is_class = (targets >= 0) & (targets < count)
        if comm is not None:
            highest, opposite = marks.chunk(2)
            are_alike = (highest == -opposite).all() & (count == classes * comm.size)
            if not _waits(are_alike) and are_alike:
                raise _gathered_error()
            total = total.masked_fill(are_alike, torch.nan)
        entropies = total.log() - mean[0] / total if entropy else torch.zeros_like(total)
        ctx.save_for_backward(powers.div_(total[:, None]), at, here, is_class, entropies)
        ctx.entropy = entropy
        return torch.where(is_class, total.log() - target, torch.nan), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        grad, of_entropy = grad_outputs
        probabilities, at, here, is_class, entropies = ctx.saved_tensors
        grad = grad.masked_fill(~is_class & (grad != 0), torch.nan)  # 0 of a row that a mask leaves out
        slope = probabilities * grad[:, None]
        slope.scatter_add_(1, at[:, None], (-grad * here)[:, None])
        if ctx.entropy:
            terms = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropies[:, None])
            slope.addcmul_(terms, of_entropy[:, None], value=-1)
        return slope, None, None, None


def _waits(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor would wait for its device."""
    return tensor.device.type != "cpu"


def _marks(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """Two numbers of logits that ranks share if all have the same logits, and hardly ever by chance: the rank's number
    for rows of a single value, as of a head of zeros, which may be alike."""
    some = logits[:, :: max(1, logits.shape[1] // _MARKED)]
    some = torch.where(some.abs() <= _LARGEST, some, 0.0)  # NaN is left out too
    at = torch.arange(some.numel(), dtype=some.dtype, device=some.device).view_as(some)
    marks = torch.stack([(some * at.cos()).sum(), (some * at.sin()).sum()])
    is_flat = (some == some[:, :1]).all()
    return marks.masked_fill(is_flat, rank)


def _gathered_error() -> ConfigError:
    return ConfigError(
        "ranks along tp have the same logits, and each would take them for its own classes",
        expected='logits of other classes on each rank, as a head of the style "colwise" gives them',
        got="equal logits on all ranks, as a head that gathers its outputs gives them",
        where="vocab_cross_entropy, token_logprobs",
        fix='Prepare with plan=accel.parallel.Plan(head="colwise"); or take all classes on each rank: '
        "torch.nn.functional.cross_entropy, or token_logprobs without vocab_parallel.",
    )


def _reduced(comm: Comm | None, numbers: torch.Tensor, op: Literal["max", "sum"]) -> torch.Tensor:
    return numbers if comm is None else all_reduce_flat(comm, numbers, op)


class VocabLoss:
    """The loss of a model of transformers from its `labels=`, with the logits of one part of the words on each rank.

    Attributes:
        ctx: the context.
        shifts: whether a token is compared with the label of the next one.
    """

    def __init__(self, ctx: DistContext, *, shifts: bool) -> None:
        self.ctx = ctx
        self.shifts = shifts

    def __deepcopy__(self, memo: object) -> VocabLoss:
        return self

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_kwargs: object,
    ) -> torch.Tensor:
        """Return the mean over labels that count, or the sum over `num_items_in_batch`."""
        if shift_labels is not None:
            labels = shift_labels
        elif self.shifts:
            labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        count = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return vocab_cross_entropy(self.ctx, logits, labels.to(logits.device), ignore_index) / count


def set_own_loss(ctx: DistContext, model: nn.Module) -> None:
    """Let a model of transformers compute the loss of its `labels=` from this rank's words. Mutates the model."""
    inner = _with_loss(model)
    kind = getattr(inner, "loss_type", None) or "ForCausalLM"
    if inner is not None and kind in ("ForCausalLM", "ForMaskedLM"):
        inner.loss_function = VocabLoss(ctx, shifts=kind == "ForCausalLM")


def _with_loss(model: nn.Module) -> Any:
    """The model that computes its loss itself; None for none."""
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(outer, "get_base_model") else outer  # of peft
    return inner if isinstance(getattr(inner.__class__, "loss_function", None), property) else None


def gathered_note(words: int, itemsize: int, size: int) -> str:
    """Return what a head that gathers its logits sends for each token, and the fix; "" for few words."""
    if words < _MANY:
        return ""
    return (
        f"the head gathers the logits of {words} words: {words * itemsize} bytes for each token along tp={size}. With"
        ' plan=accel.parallel.Plan(head="colwise") each rank keeps its own, and the loss comes from labels= or'
        " accel.parallel.vocab_cross_entropy"
    )
