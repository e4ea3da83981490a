# SPDX-License-Identifier: Apache-2.0
"""Forwards with other control flow, tied and complex tensors, functions of torch.func, and modules in other orders."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import spectral_norm
from torch.utils.checkpoint import checkpoint

from ._entry import WIDTH, WORDS, Handwritten, cross_entropy, cross_entropy_and, entry
from .manners import Block, Words


class WhileIndex(Words):
    """Chooses the next block by a number."""

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.embed(ids), 0
        while at < 2 * len(self.blocks):
            x = self.blocks[at % 4](x)
            at += 2 if at % 3 == 0 else 1
        return self.head(self.norm(x))


class ThereAndBack(Words):
    """Calls the blocks in order, and then from the last to the first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in itertools.chain(self.blocks, reversed(self.blocks)):
            x = block(x)
        return self.head(self.norm(x))


class ScaledBlock(Block):
    def forward(self, x: Tensor, *, scale: float, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) * mask * scale


class Partials(Words):
    """Makes functions of the blocks first, and calls these."""

    kind = ScaledBlock

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 1).to(self.head.weight.dtype)[..., None]
        steps = [partial(block, scale=1 + 0.1 * at, mask=mask) for at, block in enumerate(self.blocks)]
        return self.head(self.norm(reduce(lambda x, step: step(x), steps, self.embed(ids))))


class Generators(Words):
    """Pulls hidden states out of a generator."""

    def states(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, ids: Tensor) -> Any:
        states = self.states(self.embed(ids))
        total = sum(self.norm(x) for x in itertools.islice(states, 3))
        return self.head(total), next(states).mean(-1)


class State(NamedTuple):
    """What blocks take and return."""

    x: Tensor
    memory: tuple[Tensor, ...]
    depth: int


class StateBlock(Block):
    def forward(self, state: State) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(state.x)
        return State(x, (*state.memory[-1:], x.mean(1)), state.depth + 1)


class NamedStates(Words):
    kind = StateBlock

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        state = State(x, (x.mean(1),), 0)
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state.x)) / state.depth, torch.cat(state.memory, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen carrier with slots."""

    x: Tensor
    skip: Tensor | None = None


class FrozenBlock(Block):
    def forward(self, given: Frozen) -> Frozen:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Frozen(super().forward(given.x if given.skip is None else given.x + 0.1 * given.skip), given.x)


class FrozenStates(Words):
    kind = FrozenBlock

    def forward(self, ids: Tensor) -> Tensor:
        given = Frozen(self.embed(ids))
        for block in self.blocks:
            given = block(given)
        return self.head(self.norm(given.x + given.skip))


class OddTies(Words):
    """A weight of two blocks, a norm of two others, a tied head and a bias under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].out.weight = self.blocks[0].out.weight
        self.blocks[2].norm = self.blocks[1].norm
        self.head.weight = self.embed.weight
        self.again = self.blocks[0].out.bias

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.again.expand(len(ids), -1)


class CallsForward(Words):
    """Calls forward methods instead of modules."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm.forward(x))


class EnergyBlock(Block):
    """A step down an energy, by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda given: F.softplus(self.mixed(given)).sum())(x)
        return x - 0.3 * gradient + self.out(x)


class Energies(Words):
    kind = EnergyBlock


class ComplexBlock(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        real = torch.tanh(self.real(z.real) - self.imaginary(z.imag))
        return torch.complex(real, self.imaginary(z.real) + self.real(z.imag))


class ComplexStates(Words):
    kind = ComplexBlock

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        z = torch.polar(torch.ones_like(x), x)
        for block in self.blocks:
            z = block(z) + 0.1 * z
        return self.head(self.norm(z.abs() + z.real))


class Dense(nn.Module):
    """Each layer takes the results of all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList([nn.Linear(8 * (at + 1), 8) for at in range(4)])
        self.head = nn.Linear(40, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.embed(ids)]
        for layer in self.layers:
            found.append(torch.tanh(layer(torch.cat(found, -1))))
        return self.head(torch.cat(found, -1))


class Pyramid(nn.Module):
    """Maps of a way down, joined on a way up, with a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.down = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(3)])
        self.lateral = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3)])
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WORDS) for name in "abc"})

    def forward(self, ids: Tensor) -> Any:
        x, found = self.embed(ids).transpose(1, 2), []
        for layer in self.down:
            x = F.relu(layer(x))
            found.append(x)
        top, outputs = torch.zeros_like(x), {}
        for name, layer, each in zip("cba", reversed(self.lateral), found[::-1], strict=True):
            top = layer(each) + top
            outputs[name] = self.heads[name](top.transpose(1, 2))
        return outputs


class NestedCheckpoints(Words):
    """Checkpoints of blocks within checkpoints of pairs."""

    def pair(self, first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(first, x, use_reentrant=False)
        return checkpoint(lambda given: torch.tanh(second(given)), x, use_reentrant=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(self.pair, first, second, x, use_reentrant=False)
        return self.head(self.norm(x))


class HookedSkip(Words):
    """A hook of the first block keeps its result, and a hook of the last one adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        _ = self.blocks[0].register_forward_hook(lambda _module, _args, output: self.kept.update(x=output))
        _ = self.blocks[3].register_forward_pre_hook(lambda _module, args: (args[0] + self.kept.pop("x"),))


class Equilibrium(Words):
    """Iterates a block without gradients until it changes little, then once with them."""

    def forward(self, ids: Tensor) -> Tensor:
        given = self.blocks[1](self.blocks[0](self.embed(ids)))
        z = torch.zeros_like(given)
        with torch.no_grad():
            for _ in range(3):
                new = torch.tanh(self.blocks[2](z) + given)
                if (new - z).norm() < 1e-9:
                    break
                z = new
        z = torch.tanh(self.blocks[2](z) + given)
        return self.head(self.norm(self.blocks[3](z)))


class Siamese(Words):
    """Encodes words three times, once without gradients."""

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Any:
        one, other = self.encode(ids), self.encode(ids.flip(1))
        with torch.no_grad():
            target = self.encode(ids.roll(1, 1))
        return self.head(one * other), (one - target).square().sum(-1)


class TimeLoop(nn.Module):
    """Two cells and a head, called in turn for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.one, self.two = nn.LSTMCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        one = two = None
        outputs: list[Tensor] = []
        for each in self.embed(ids).unbind(1):
            one = self.one(each, one)
            two = self.two(one[0], two)
            outputs.append(self.out(two[0]))
        return torch.stack(outputs, 1)


class KeepingBlock(Block):
    """Hands a mask and integers on."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(x)
        keep = keep & (x.mean(-1) > -5)
        return x * keep[..., None], keep, keep.sum(1)


class Kept(Words):
    kind = KeepingBlock

    def forward(self, ids: Tensor) -> Tensor:
        x, keep, count = self.embed(ids), ids > 1, torch.zeros_like(ids[:, 0])
        for block in self.blocks:
            x, keep, count = block(x, keep)
        return self.head(self.norm(x)) / (1 + count)[:, None, None]


class ThroughViews(Words):
    """Changes the stream through a view of it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x[..., : WIDTH // 2].mul_(1.1)
        return self.head(self.norm(x))


class SpectralHooked(Words):
    """torch's older norm of weights, a hook that sets the weight before each call."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            _ = spectral_norm(block.out)


class SetsScale(Words):
    """Sets numbers and a tensor in its blocks, which read them."""

    class kind(Block):  # noqa: N801
        scale = 1.0
        bias: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale + self.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            block.scale, block.bias = 1 / (at + 1), x[:, :1]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


FURTHER_MANNERS: tuple[Handwritten, ...] = (
    entry("while_index", WhileIndex, loss=cross_entropy, tags="language causal shared"),
    entry("there_and_back", ThereAndBack, loss=cross_entropy, tags="language causal shared"),
    entry("partials", Partials, loss=cross_entropy, tags="language causal"),
    entry("generators", Generators, loss=cross_entropy_and, tags="causal shared"),
    entry("named_states", NamedStates, loss=cross_entropy_and, tags="causal"),
    entry("frozen_states", FrozenStates, loss=cross_entropy, tags="language causal"),
    entry("odd_ties", OddTies, loss=cross_entropy_and, tags="causal free"),
    entry("calls_forward", CallsForward, loss=cross_entropy, tags="language causal"),
    entry("energies", Energies, loss=cross_entropy, tags="language"),
    entry("complex_states", ComplexStates, loss=cross_entropy, tags="language"),
    entry("dense", Dense, loss=cross_entropy, tags="language causal"),
    entry("pyramid", Pyramid, loss=cross_entropy_and),
    entry("nested_checkpoints", NestedCheckpoints, loss=cross_entropy, tags="language causal checkpoint"),
    entry("hooked_skip", HookedSkip, loss=cross_entropy, tags="language causal side"),
    entry("equilibrium", Equilibrium, loss=cross_entropy, tags="language decisions rows shared"),
    entry("siamese", Siamese, loss=cross_entropy_and, tags="shared"),
    entry("time_loop", TimeLoop, loss=cross_entropy, tags="language causal shared"),
    entry("kept", Kept, loss=cross_entropy, tags="language"),
    entry("through_views", ThroughViews, loss=cross_entropy, tags="language causal in_place"),
    entry("spectral_hooked", SpectralHooked, loss=cross_entropy, tags="language causal buffers"),
    entry("sets_scale", SetsScale, loss=cross_entropy, tags="language causal side"),
)
