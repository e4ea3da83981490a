# SPDX-License-Identifier: Apache-2.0
"""`Sum` and `Mean`: metrics added up over batches as records, in float64, without stand-ins, padding and duplicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from accel.collectives import reduce
from accel.comm import Call, call_site, shared_failure
from accel.context import DistContext, check_context
from accel.data._batches import Batch
from accel.errors import ConfigError, DataError, TreeError
from accel.tree import leaves, map_leaves, replace_tensors, tensors

Weight = float | torch.Tensor


class Sum(msgspec.Struct, frozen=True, eq=False):
    """Sums over the samples of all ranks. Adding returns a new record. Ranks communicate only in `sync` and `value`.

    Attributes:
        total: sums over all ranks up to the last `sync`: nested containers of tensors, float64; None before the first.
        own: this rank's sums since then.
    """

    total: Any = None
    own: Any = None

    def add(self, values: Any, batch: Batch | None = None) -> Sum:
        """Return the sums with values added. No communication.

        Args:
            values: nested containers of tensors and numbers, the same at every call. With a batch, tensors of shape
                [batch.rows, ...] are summed over its real rows, and those of shape [] count unless it holds none.
                Without one, all are added as they are.
            batch: the batch that the values were computed on.

        Raises:
            DataError: a tensor whose first dimension is not the batch's, or of another shape than before.
            TreeError: a container that cannot be taken apart, or a leaf that is no number.
        """
        part = _each(lambda path, leaf: _summed(path, leaf, batch), values)
        return Sum(self.total, part if self.own is None else _added(self.own, part))

    def sync(self, ctx: DistContext) -> Sum:
        """Return the sums, added up over all ranks. A collective.

        Synchronized sums can be saved, and resumed on another number of ranks.

        Raises:
            CollectiveMismatch: ranks have added other structures or shapes; on every rank.
        """
        check_context(ctx, "sums.sync(ctx)")
        summed = reduce(ctx, self.own)
        return Sum(total=summed if self.total is None else _added(self.total, summed))

    def value(self, ctx: DistContext) -> Any:
        """Return the sums over all ranks: the containers of `add` with tensors of float64. A collective.

        Raises:
            DataError: nothing was added; on every rank.
            CollectiveMismatch: as `sync`.
        """
        check_context(ctx, "sums.value(ctx)")
        total = self.sync(ctx).total
        if total is None:
            _nothing(ctx)
        return total

    def check_saveable(self) -> None:
        """Raise `ConfigError` before `sync`: a checkpoint keeps rank 0's record, which lacks the other ranks' sums."""
        if self.own is not None:
            raise ConfigError(
                "sums that are not synchronized cannot be saved",
                expected="metric = metric.sync(ctx) before save_state",
                got="values added since the last sync",
            )


class Mean(msgspec.Struct, frozen=True, eq=False):
    """Weighted means over the samples of all ranks. Adding returns a new record, as with `Sum`.

    Attributes:
        sums: sums of values times weight, and of weights.
    """

    sums: Sum = Sum()

    def add(self, values: Any, batch: Batch | None = None, *, weight: Weight | None = None) -> Mean:
        """Return the means with values added. No communication.

        Args:
            values: nested containers of tensors and numbers, the same at every call. With a batch, tensors of shape
                [batch.rows, ...] are one value a sample; everything else is a mean over `weight` units already.
            batch: the batch that the values were computed on; its real samples are the default weight.
            weight: units behind the values, such as valid tokens: a number, or a tensor of shape [] or [batch.rows].

        Raises:
            DataError: as `Sum.add`, or a weight whose shape does not fit.
            ConfigError: neither batch nor weight.
            TreeError: as `Sum.add`.
        """
        if batch is None and weight is None:
            raise ConfigError("a mean needs weights", expected="batch or weight=", got="neither", where="Mean.add")
        each = _tensor("weight=", int(batch.valid) if batch is not None and weight is None else weight)
        by_row = batch is not None and weight is None
        weighed = _each(lambda path, leaf: _weighed(path, leaf, batch, each, by_row), values)
        return Mean(self.sums.add({"values": weighed, "weight": _summed("weight=", each, batch)}))

    def sync(self, ctx: DistContext) -> Mean:
        """Return the means, added up over all ranks. A collective; see `Sum.sync`."""
        check_context(ctx, "mean.sync(ctx)")
        return Mean(self.sums.sync(ctx))

    def value(self, ctx: DistContext) -> Any:
        """Return the means over all ranks: the containers of `add` with tensors of float64. A collective.

        Raises:
            DataError: nothing was added, or only weights of 0; on every rank.
            CollectiveMismatch: as `Sum.sync`.
        """
        check_context(ctx, "mean.value(ctx)")
        total = self.sums.value(ctx)
        if not float(total["weight"]):
            _nothing(ctx)
        return map_leaves(lambda leaf: leaf / total["weight"].to(leaf.device), total["values"])

    def check_saveable(self) -> None:
        """Raise `ConfigError` before `sync`; see `Sum`."""
        self.sums.check_saveable()


def _each(function: Callable[[str, torch.Tensor], torch.Tensor], values: Any) -> Any:
    new = iter([function(path, _tensor(path, leaf)) for path, leaf in leaves(values)])
    return map_leaves(lambda _: next(new), values)


def _tensor(path: str, leaf: object) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor | int | float):
        raise TreeError("only tensors and numbers are added up", got=type(leaf).__name__, where=path)
    value = torch.as_tensor(leaf).detach()
    if value.is_complex():
        raise TreeError("only real numbers are added up", got=str(value.dtype), where=path)
    return value.to(torch.float32 if value.device.type in ("mps", "xla") else torch.float64)


def _summed(path: str, leaf: torch.Tensor, batch: Batch | None) -> torch.Tensor:
    if batch is None:
        return leaf
    counted = 0 if batch.duplicate else int(batch.valid)
    if leaf.ndim == 0:
        return leaf if counted else torch.zeros_like(leaf)
    _check(leaf.shape[0] == batch.rows, f"{batch.rows} rows", leaf, path)
    return leaf[:counted].sum(0)


def _weighed(path: str, leaf: torch.Tensor, batch: Batch | None, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Multiply a leaf by its weight; a value of weight 0 may be anything, such as the mean of no tokens."""
    if by_row and leaf.ndim:
        return _summed(path, leaf, batch)
    weight = weight.to(leaf.device)
    if weight.ndim:
        fits = batch is not None and leaf.shape[:1] == weight.shape
        _check(fits, f"one value for each of the weights, shape {list(weight.shape)}", leaf, path)
        weight = weight.reshape(-1, *[1] * (leaf.ndim - 1))
    elif batch is not None:
        _check(leaf.ndim == 0, "a weight for each row, or a value of shape []", leaf, path)
    return _summed(path, torch.where(weight == 0, 0.0, leaf * weight), batch)


def _check(fits: bool, expected: str, leaf: torch.Tensor, path: str) -> None:
    if not fits:
        raise DataError(
            "values that do not fit the batch or its weights",
            expected=expected,
            got=f"shape {list(leaf.shape)}",
            where=path,
            fix="Pass values with one row a sample, or leave the batch out.",
        )


def _added(left: Any, right: Any) -> Any:
    if right is None:
        return left
    ours = tensors(left)
    news = tensors(right)
    before = [f"{path} {list(leaf.shape)}" for path, leaf in ours]
    now = [f"{path} {list(leaf.shape)}" for path, leaf in news]
    if before != now:
        raise DataError("values of another form than before", expected=", ".join(before), got=", ".join(now))
    return replace_tensors(left, [a.to(b.device) + b for (_, a), (_, b) in zip(ours, news, strict=True)])


def _nothing(ctx: DistContext) -> None:
    with shared_failure(ctx.comm, Call("value", site=call_site())):
        raise DataError("nothing was added, so there is no value", fix="Call metric = metric.add(...) in the loop.")
