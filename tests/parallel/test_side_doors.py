# SPDX-License-Identifier: Apache-2.0
"""Whatever a module hands on beside its result is recorded, so that stages play it back, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_parts import ForwardRecord, record_of
from torch import Tensor, nn

from accel.errors import StageError
from accel.parallel._calls import grow_cache, units_of

WIDTH = 4


class Layer(nn.Module):
    """A block; subclasses hand something on beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *_more: Any) -> Any:
        return x + self.norm(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    """Calls its blocks, and reads by `read` what they leave."""

    def __init__(self, kind: type[Layer], given: Callable[[], Any], read: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.given, self.read = given, read

    def forward(self, x: Tensor) -> Tensor:
        given = self.given()
        for block in self.blocks:
            x = self.read(block, given, block(x, given))
        return x


class Leaves(Layer):
    def forward(self, x: Tensor, *_more: Any) -> Tensor:
        self.loss = x.square().mean()
        return super().forward(x)


class Appends(Layer):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        losses.append(x.square().mean())
        return super().forward(x)


class Adds(Layer):
    def forward(self, x: Tensor, losses: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        losses[str(len(losses))] = x.square().mean()
        return super().forward(x)


class Writes(Layer):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        total += x.detach().mean(0)
        return super().forward(x)


class Counts(Layer):
    """Sets numbers that nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, *_more: Any) -> Tensor:
        self.calls += 1
        self.rows = len(x) * self.calls
        return super().forward(x)


class Branches(Layer):
    """Takes a path by its values, within the module."""

    def forward(self, x: Tensor, *_more: Any) -> Tensor:
        return super().forward(x) if x.mean().item() > 0 else super().forward(-x)


class Means(Layer):
    def forward(self, x: Tensor, *_more: Any) -> Tensor:
        self.mean = float(x.mean())
        return super().forward(x)


class Gives(Layer):
    def forward(self, x: Tensor, *_more: Any) -> tuple[Tensor, float]:
        return super().forward(x), float(x.mean())


class Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Holds(Layer):
    def forward(self, x: Tensor, *_more: Any) -> Held:
        return Held(super().forward(x))


class Hides(Layer):
    """Leaves a tensor in an object that it is given."""

    def forward(self, x: Tensor, place: Held) -> Tensor:  # type: ignore[override]
        place.x = x.square().mean()
        return super().forward(x)


class Caches(Layer):
    """Adds keys to a layer of a cache; one that is `asked` for values runs on random ones."""

    asked = False

    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        at = cache.numbers.setdefault(self, len(cache.numbers))
        new = self.linear(x)[None, None]
        if cache.is_linear[at]:
            cache.update_conv_state(new[0], at)
        else:
            cache.update(new, new, at)
        return super().forward(x * 2 if self.asked and x.sum() > 0 else x)


class Asked(Caches):
    asked = True


def _nothing() -> None:
    return None


def _record(kind: type[Layer], given: Callable[[], Any], read: Callable[[Any, Any, Any], Any]) -> ForwardRecord:
    model = Stack(kind, given, read)
    return record_of(model, units_of(model), torch.ones(3, WIDTH))


@pytest.mark.parametrize(
    ("kind", "given", "read", "door"),
    [
        (Leaves, _nothing, lambda block, _, x: x * block.loss, "stashes"),
        (Appends, list, lambda _, losses, x: x * losses[-1], "changes"),
        (Adds, dict, lambda _, losses, x: x * sum(losses.values()), "changes"),
        (Writes, lambda: torch.zeros(WIDTH), lambda _, total, x: x + total, "writes"),
        (Counts, _nothing, lambda _b, _g, x: x, ""),
        (Branches, _nothing, lambda _b, _g, x: x, ""),
        (Means, _nothing, lambda _b, _g, x: x, ""),
    ],
)
def test_what_a_module_leaves_is_recorded(kind: type[Layer], given: Any, read: Any, door: str) -> None:
    record = _record(kind, given, read)
    assert record.paths == ("blocks.0", "blocks.1", "blocks.2")
    for call in record.calls:
        found = [name for name in ("stashes", "changes", "writes") if getattr(call, name)]
        assert found == ([door] if door else [])


@pytest.mark.parametrize(
    ("kind", "given", "read", "got"),
    [
        (Counts, _nothing, lambda block, _, x: x * block.calls, "calls of blocks.0"),
        (Means, _nothing, lambda block, _, x: x * block.mean, "mean of blocks.0"),
        (Gives, _nothing, lambda _b, _g, x: x[0] * x[1], "of blocks.0"),
        (Holds, _nothing, lambda _b, _g, x: x.x, "Held of blocks.0"),
        (Hides, lambda: Held(torch.ones(())), lambda _, place, x: x * place.x, "blocks.0"),
    ],
)
def test_what_cannot_be_played_back_is_refused_by_name(kind: type[Layer], given: Any, read: Any, got: str) -> None:
    with pytest.raises(StageError) as told:
        _ = _record(kind, given, read)
    assert got in told.value.got
    assert told.value.fix


@pytest.mark.parametrize("kind", [Caches, Asked])
def test_a_cache_grows_as_by_the_recorded_calls(kind: type[Layer]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Lfm2Config(
        num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"], sliding_window=2
    )

    def new() -> Any:
        cache = transformers.DynamicCache(config=config)
        cache.numbers = {}
        return cache

    def facts(cache: Any) -> list[object]:
        windows = [cache.get_mask_sizes(1, at) for at in (1, 2)]
        return [cache.has_previous_state(0), cache.get_seq_length(1), cache.get_seq_length(2), windows]

    grown, real = new(), new()
    record = _record(kind, new, lambda _b, _g, x: x)
    for _ in range(2):
        real.numbers.clear()
        Stack(kind, lambda: real, lambda _b, _g, x: x)(torch.ones(3, WIDTH))
        for call in record.calls:
            for each in call.cached:
                grow_cache(grown, each, torch.device("cpu"))
        assert facts(grown) == facts(real)
    assert all(each.keys.shape[:2] + each.keys.shape[3:] == (1, 1, 1) for each in grown.layers[1:])
