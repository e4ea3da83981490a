# SPDX-License-Identifier: Apache-2.0
"""Adafactor for sharded parameters: one message sums rows and columns of all parameters, another norms of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from accel.comm import adopt, all_reduce_flat
from accel.errors import ConfigError
from accel.optim._matrices import RankedOptimizer, Where, indices_of, loss_of, put, sliced, taken
from accel.tensors import full_tensor, is_dtensor, local_part, mesh_of, placements_of, split_dims


class _Share(NamedTuple):
    """This rank's part of a parameter."""

    where: Where  # indices of the part by dimension
    times: float  # factor of its sums, by which each element counts once over all ranks; 0 for a copy of another rank's


class _Stepped(NamedTuple):
    """A parameter in a step: its group, state, gradient and share; None where this rank has all of it."""

    parameter: Tensor
    group: Mapping[str, Any]
    state: dict[str, Any]
    grad: Tensor
    share: _Share | None


class Adafactor(RankedOptimizer):
    """Adafactor on any mesh: a matrix has second moments of its rows and columns only.

    `accel.optimizer_step` steps it, and gives it the ranks. Where ranks hold parts of parameters, a step sends two
    small messages: sums over rows and columns, then a number for each parameter. Statistics of rows and columns are
    equal on all ranks; statistics of vectors are sharded as the vectors are.

    Args:
        params: parameters or groups of them, of a plain model or one from `prepare_model`.
        lr: largest learning rate; a step takes at most `1 / sqrt(step)`.
        beta2_decay: exponent of the decay of second moments.
        eps: smallest second moment, None for the machine epsilon of the parameter's dtype; and smallest size of
            parameters, as a factor of the learning rate.
        d: largest root mean square of an update; larger ones are scaled down.
        weight_decay: decoupled weight decay.
        maximize: whether to step along gradients.

    Raises:
        ConfigError: an option out of its range, or a complex parameter.

    Reference:
        Shazeer and Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost", arXiv:1804.04235;
        torch.optim.Adafactor, for names, defaults and results.

    Examples:
        >>> model = torch.nn.Linear(4, 6)
        >>> optimizer = accel.optim.Adafactor(model.parameters(), lr=1e-2)
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        choices = (
            ("lr", lr >= 0, "at least 0", lr),
            ("beta2_decay", beta2_decay <= 0, "at most 0", beta2_decay),
            ("eps", (eps[0] is None or eps[0] >= 0) and eps[1] >= 0, "at least 0", eps),
            ("d", d >= 1, "at least 1", d),
            ("weight_decay", weight_decay >= 0, "at least 0", weight_decay),
        )
        for name, is_right, expected, got in choices:
            if not is_right:
                raise ConfigError(f"{name} is out of its range", expected=expected, got=repr(got), where="Adafactor")
        options = {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize})
        if any(each.is_complex() for group in self.param_groups for each in group["params"]):
            raise ConfigError("complex parameters", expected="real ones", got="a complex one", where="Adafactor")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's overloads
        """Step all parameters that have a gradient. Two messages where ranks hold parts of some."""
        loss = loss_of(closure)
        grads = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        shares = self._shares([each for each, _ in grads])
        stepped = [self._stepped(*each, share) for each, share in zip(grads, shares, strict=True)]
        sums = self._over_ranks(stepped, [_first_sums(each) for each in stepped])
        updates = [_update(each, own) for each, own in zip(stepped, sums, strict=True)]
        squares = [[_square(own, each)] for each, (own, _) in zip(stepped, updates, strict=True)]
        totals = self._over_ranks(stepped, squares)
        for each, (update, alpha), (total,) in zip(stepped, updates, totals, strict=True):
            size = math.sqrt(each.parameter.numel()) * each.group["d"]
            part = local_part(each.parameter)
            part.mul_(1 - each.group["lr"] * each.group["weight_decay"])
            part.sub_(update * (alpha / (total.sqrt() / size).clamp(min=1.0)).to(update.dtype))
        return loss

    def _stepped(self, parameter: Tensor, group: Mapping[str, Any], share: _Share | None) -> _Stepped:
        state = self.state[parameter]
        grad = local_part(cast(Tensor, parameter.grad))
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            shape = parameter.shape
            if parameter.ndim > 1:
                state["row_var"] = grad.new_zeros([*shape[:-1], 1])
                state["col_var"] = grad.new_zeros([*shape[:-2], 1, shape[-1]])
            else:
                state["variance"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name in ("row_var", "col_var"):
            if name in state and is_dtensor(state[name]):  # loaded for a parameter of the same shape
                state[name] = full_tensor(state[name])
        state["step"] += 1
        return _Stepped(parameter, group, state, -grad if group["maximize"] else grad, share)

    def _shares(self, parameters: Sequence[Tensor]) -> Sequence[_Share | None]:
        key = tuple((id(mesh_of(each)), placements_of(each), each.shape) for each in parameters)
        if key not in self._plans:
            ranks = self.ranks_of(parameters)
            self._plans[key] = [self._share(each, ranks) for each in parameters]
        return self._plans[key]

    def _share(self, parameter: Tensor, ranks: Sequence[int]) -> _Share | None:
        if not is_dtensor(parameter) or not split_dims(parameter) or self._group is None:
            return None
        held = indices_of(parameter, ranks)
        me = ranks[self._group.rank()]
        own = held[me]
        if not all(map(len, own)):
            return _Share(tuple(slice(0, len(each)) for each in own), 0.0)
        same = [rank for rank, other in held.items() if all(map(torch.equal, own, other))]
        copies = len(ranks) / len(held)  # replicas of the mesh that the group has
        return _Share(tuple(map(sliced, own)), 1.0 / copies if min(same) == me else 0.0)

    def _over_ranks(self, stepped: Sequence[_Stepped], sums: Sequence[list[Tensor]]) -> Sequence[list[Tensor]]:
        """Return sums over the ranks that hold parts, in one message."""
        spread = [at for at, each in enumerate(stepped) if each.share is not None]
        if not spread or self._group is None:
            return sums
        mine = [sums[at] for at in spread]
        flat = torch.cat([each.flatten().double() for own in mine for each in own])
        total: Any = all_reduce_flat(adopt(self._group, flat.device), flat, "sum")
        parts = iter(total.split([each.numel() for own in mine for each in own]))
        found = list(sums)
        for at in spread:
            found[at] = [next(parts).view(each.shape).to(each.dtype) for each in sums[at]]
        return found


def _square(part: Tensor, each: _Stepped) -> Tensor:
    """This rank's share of the sum of squares of a tensor like the parameter, shape []."""
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    return part.to(wide).square().sum() * (1.0 if each.share is None else each.share.times)


def _first_sums(each: _Stepped) -> list[Tensor]:
    """Sums of squares: of the parameter, shape [], and of a gradient's rows and columns, for the whole parameter."""
    sums = [_square(local_part(each.parameter), each)]
    if each.parameter.ndim > 1:
        squares = each.grad.square()
        for dim, name in ((-1, "row_var"), (-2, "col_var")):
            own = squares.sum(dim, keepdim=True)
            if each.share is not None:
                whole = torch.zeros_like(each.state[name])
                if each.share.times:
                    put(whole, _along(each.share.where, dim), own * each.share.times)
                own = whole
            sums.append(own)
    return sums


def _along(where: Where, dim: int) -> Where:
    """Indices of sums along a dimension."""
    kept = list(where)
    kept[dim] = slice(0, 1)
    return tuple(kept)


def _update(each: _Stepped, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the update, before its norm is limited, and the step size, shape []."""
    state, group = each.state, each.group
    step = float(state["step"])
    least = torch.finfo(each.parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
    decay = step ** group["beta2_decay"]
    size = (sums[0] / max(each.parameter.numel(), 1)).sqrt().clamp(min=group["eps"][1])
    alpha = size * min(float(group["lr"]), 1 / math.sqrt(step))
    if each.parameter.ndim == 1 or each.parameter.ndim == 0:
        variance = local_part(state["variance"])
        variance.lerp_(each.grad.square(), decay)
        estimate = variance.clone()
    else:
        rows, columns = state["row_var"], state["col_var"]
        rows.lerp_(sums[1] / each.parameter.shape[-1], decay)
        columns.lerp_(sums[2] / each.parameter.shape[-2], decay)
        mean = rows.mean(-2, keepdim=True).clamp(min=least)
        if each.share is not None:
            where = each.share.where
            rows = taken(rows, _along(where, -1))
            columns = taken(columns, _along(where, -2))
            mean = taken(mean, _along(_along(where, -1), -2))
        estimate = rows @ columns / mean
    return estimate.clamp_(min=least * least).rsqrt_().mul_(each.grad), alpha
