# SPDX-License-Identifier: Apache-2.0
"""Dropout in modules that ranks along tp divide: each rank drops different elements there. Elsewhere all ranks drop the
same ones.

A key for torch's streams between a column-wise layer and the row-wise layer that ends it is drawn from the shared
stream and folded with the rank. The shared stream continues when the row-wise layer has run, so it stays the same on
all ranks. A recomputed forward drops the same elements again, because torch restores its stream first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn

from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import named_modules
from accel.parallel.axes.tensor._styles import COLWISE, Rule, is_adapted
from accel.random import Key, torch_rng_scope

Mark = Literal["holder", "divides", "joins"]
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


def dropout_marks(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, Mark]:
    """Return the modules at which ranks begin and end to draw different random numbers, by path. Pure.

    A "holder" has layers that divide the features and ones that join them.
    """
    modules = dict(named_modules(model))
    found: dict[str, Mark] = {}
    columns = {
        _whole_layer(modules, path) for path, rule in rules.items() if rule.style in COLWISE - {"colwise_gather_output"}
    }
    rows = {_whole_layer(modules, path) for path, rule in rules.items() if rule.style == "rowwise"}
    for row in rows:
        holder = row.rpartition(".")[0]
        while holder and not _inside(columns, holder):
            holder = holder.rpartition(".")[0]
        inside = _inside(columns, holder)
        if not inside or not draws(modules[holder]):
            continue
        found |= {holder: "holder", row: "joins", **dict.fromkeys(inside, cast(Mark, "divides"))}
    return found


def _inside(columns: set[str], holder: str) -> list[str]:
    return sorted(path for path in columns if path.startswith(f"{holder}." if holder else ""))


def _whole_layer(modules: Mapping[str, nn.Module], path: str) -> str:
    """The path of a layer, or of the module that holds the layer and its adapters if it is one of them."""
    around = path
    while around:
        around = around.rpartition(".")[0]
        if is_adapted(modules[around]):
            return around
    return path


def draws(module: nn.Module) -> bool:
    """Return whether a module has a dropout, or an attribute with "drop" in its name, of a rate above 0."""
    return any(_rate_of(each) > 0 for each in module.modules())


def _rate_of(module: nn.Module) -> float:
    if isinstance(module, _DROPOUTS):
        return module.p
    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return max(rates, default=0.0)


class Streams:
    """Source of a rank's draws: torch's streams as ranks along tp share them, or its own ones. Copies share it.

    Attributes:
        rank: along tp.
        device: of the rank.
        holders: number of holders that are running their forward.
    """

    __slots__ = ("_own", "device", "holders", "rank")

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.holders = 0
        self._own: AbstractContextManager[None] | None = None

    @property
    def are_own(self) -> bool:
        """Whether this rank draws from its own streams."""
        return self._own is not None

    def divide(self) -> None:
        """Draw from this rank's own streams from now on."""
        if self._own is None:
            seed = int(torch.randint(2**62, (), device="cpu"))  # alike on all ranks
            self._own = torch_rng_scope(Key(seed).fold_in("tp", self.rank), self.device)
            self._own.__enter__()

    def join(self) -> None:
        """Go on with the streams that ranks share."""
        if self._own is not None:
            own, self._own = self._own, None
            own.__exit__(None, None, None)

    @contextmanager
    def divided(self) -> Generator[None]:
        """Draw from this rank's own streams during a block."""
        outer = self.are_own
        self.divide()
        try:
            yield
        finally:
            if not outer:
                self.join()

    def __deepcopy__(self, memo: object) -> Streams:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, (self.rank, self.device)


class _Marked(Mixin):
    accel_streams: Streams
    training: bool


class _Holder(_Marked):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        streams = self.accel_streams
        if not self.training or streams.are_own:
            return super().forward(*args, **kwargs)
        streams.holders += 1
        try:
            return super().forward(*args, **kwargs)
        finally:  # also where torch stops a recomputed forward early
            streams.holders -= 1
            streams.join()


class _Divides(_Marked):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.accel_streams.holders:
            self.accel_streams.divide()
        return output


class _Joins(_Marked):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.accel_streams.holders:
            self.accel_streams.join()
        return output


_MIXINS: Mapping[Mark, type[_Marked]] = {
    "holder": _Holder, "divides": _Divides, "joins": _Joins,
}  # fmt: skip


def use_rank_streams(model: nn.Module, rules: Mapping[str, Rule], streams: Streams) -> None:
    """Let ranks along tp draw different random numbers where they hold different features or tokens. Mutates the
    model."""
    marks = dropout_marks(model, rules)
    marked = {path: model.get_submodule(path) for path in marks}
    for each in marked.values():
        cast(Any, each).accel_streams = streams
    for mark, mixin in _MIXINS.items():
        add_mixin([each for path, each in marked.items() if marks[path] == mark], mixin)
