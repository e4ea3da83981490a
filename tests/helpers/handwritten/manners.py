# SPDX-License-Identifier: Apache-2.0
"""Forwards that hand things on in other ways than by arguments and results, and layers with a behavior of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from ._entry import WIDTH, WORDS, Handwritten, cross_entropy, cross_entropy_and, entry


class Block(nn.Module):
    """Mixes positions by their running mean, and features by an MLP."""

    def __init__(self, dim: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.mixed(x)))

    def mixed(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        return self.mix(torch.cat([h, h.cumsum(1) / steps], dim=-1))


class Words(nn.Module):
    """Words in, logits out; what is between is the subject of each model below."""

    kind: type[nn.Module] = Block

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([self.kind() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormedBlock(Block):
    """One weight is normed by torch's parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.out = weight_norm(self.out)


class SpectralBlock(Block):
    """The power iteration of each forward in training changes two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = spectral_norm(self.out)


class ScaledTanh(torch.autograd.Function):
    """tanh(x) * scale, with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, floor: float) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y, scale)
        ctx.floor = floor
        return y * scale + floor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, scale = ctx.saved_tensors
        return grad * scale * (1 - y * y), (grad * y).flatten(0, -2).sum(0), None


class FunctionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(ScaledTanh.apply(self.mixed(x), self.scale, 0.1))


class KeyedBlocks(Words):
    """torchtitan's manner: blocks in a ModuleDict by their number as a string."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.layers = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm else h
        return self.head(h) if self.head else h


class ListedLosses(Words):
    """Blocks append a loss to a list that they are given."""

    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            x = super().forward(x)
            losses.append(x.square().mean((1, 2)))
            return x

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.embed(ids), []
        for block in self.blocks:
            x = block(x, losses)
        return self.head(self.norm(x)), torch.stack(losses).sum(0)


class AuxAttribute(Words):
    """Blocks leave a loss in an attribute, which the model sums up, as routers of experts do."""

    class kind(Block):  # noqa: N801
        aux: Tensor

        def forward(self, x: Tensor) -> Tensor:
            h = self.mixed(x)
            self.aux = h.square().mean((1, 2))
            return x + self.out(F.gelu(h))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        return {"logits": logits, "aux": sum(block.aux for block in self.blocks)}


class CachedValues(Words):
    """Blocks write into a mapping that they are given; later ones read what the first one wrote."""

    class kind(Block):  # noqa: N801
        def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
            h = self.mixed(x)
            first = cache.setdefault("first", h)
            return x + self.out(F.gelu(h + 0.5 * first))

    def forward(self, ids: Tensor) -> Tensor:
        x, cache = self.embed(ids), {}
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


class HookedFeatures(Words):
    """Hooks on blocks collect their outputs, which the head reads together."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda _module, _args, output: self.features.append(output))

    def forward(self, ids: Tensor) -> Tensor:
        self.features.clear()
        super().forward(ids)
        found = torch.stack(self.features).mean(0)
        self.features.clear()
        return self.head(self.norm(found))


class Residue(nn.Module):
    """A closure of each block reads the stream that its owner keeps in a list."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        stream = [self.embed(ids)]

        def step(block: nn.Module) -> None:
            stream.append(block(sum(stream) / len(stream)))

        for block in self.blocks:
            step(block)
        return self.head(stream[-1] + 0.5 * stream[1])


class BranchOnInputs(Words):
    """The path depends on the words."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if (ids == 0).any():
            x = x.masked_fill((ids == 0)[..., None], 0.0)
        for block in self.blocks:
            x = block(x) if ids.max() > 3 else x
        return self.head(self.norm(x))


class BranchOnHidden(Words):
    """The path depends on the activations: some samples stop early."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean() > 1e6:
                break
            x = x / 2 if x.abs().max() > 2.0 else x
        return self.head(self.norm(x))


class Checkpointed(Words):
    """Runs each block again in backward, as its author decided."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedPairs(Words):
    """Runs two blocks at a time again."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)

        def two(at: int, x: Tensor) -> Tensor:
            return self.blocks[at + 1](self.blocks[at](x))

        for at in range(0, len(self.blocks), 2):
            x = checkpoint(two, at, x, use_reentrant=False)
        return self.head(self.norm(x))


class CalledByParts(Words):
    """Calls a block's submodules and methods instead of the block."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block.out(F.gelu(block.mixed(x)))
        return self.head(self.norm(x))


class InPlace(Words):
    """Changes the stream in place between blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).clone()
        for at, block in enumerate(self.blocks):
            x = block(x)
            x *= 1.0 + 0.1 * at
            x[:, 0] += 0.5
        return self.head(self.norm(x))


class NestedOutputs(Words):
    """Blocks return a mapping of tuples, which the next one takes."""

    class kind(Block):  # noqa: N801
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            x, (count, total) = state["x"], state["rest"]
            x = super().forward(x)
            return {"x": x, "rest": (count + 1, total + x.mean(1))}

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.embed(ids)
        state: dict[str, Any] = {"x": x, "rest": (0, x.mean(1))}
        for block in self.blocks:
            state = block(state)
        count, total = state["rest"]
        return self.head(self.norm(state["x"])), {"mean": total / count}


class Backwards(Words):
    """Calls the blocks from the last to the first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class DeepSupervision(Words):
    """The head is called behind every block."""

    def forward(self, ids: Tensor) -> list[Tensor]:
        x, found = self.embed(ids), []
        for block in self.blocks:
            x = block(x)
            found.append(self.head(self.norm(x)))
        return found[::-1]


class FrozenBody(Words):
    """All but the embedding and the head is frozen, so that whole stages train nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class FrozenEnd(Words):
    """Only the first parts train: the last stages have no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.embed.requires_grad_(True)
        self.blocks[0].requires_grad_(True)


class Counting(Words):
    """Warms up a gain with the number of its forwards in training."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(ids) * min(1.0, (1 + self.calls) / 10)


class OptionalBlocks(Words):
    """None entries, an Identity, and blocks of two classes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Identity(), NormedBlock(), Block(), NormedBlock()])
        self.extra = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.extra is not None:
            x = self.extra(x)
        return self.head(self.norm(x))


def _words(name: str, build: type[nn.Module], tags: str = "", *, others: bool = False) -> Handwritten:
    """A model of words; `others`: it returns more than logits."""
    loss = cross_entropy_and if others else cross_entropy
    return entry(name, build, loss=loss, tags=f"causal {tags}" if others else f"language causal {tags}")


def _of(block: type[Block]) -> type[Words]:
    return type(f"Words{block.__name__}", (Words,), {"kind": block})


MANNERS: tuple[Handwritten, ...] = (
    _words("weight_norm", _of(NormedBlock)),
    _words("spectral_norm", _of(SpectralBlock), "buffers"),
    _words("autograd_function", _of(FunctionBlock), "function"),
    _words("keyed_blocks", KeyedBlocks),
    _words("listed_losses", ListedLosses, "side", others=True),
    _words("aux_attribute", AuxAttribute, "side", others=True),
    _words("cached_values", CachedValues, "side"),
    _words("hooked_features", HookedFeatures, "side"),
    _words("closures", Residue, "side"),
    _words("branch_on_inputs", BranchOnInputs),
    entry("branch_on_hidden", BranchOnHidden, loss=cross_entropy, tags="language decisions rows"),
    _words("checkpointed", Checkpointed, "checkpoint"),
    _words("checkpointed_pairs", CheckpointedPairs, "checkpoint"),
    _words("reentrant", Reentrant, "checkpoint reentrant"),
    _words("called_by_parts", CalledByParts),
    _words("in_place", InPlace, "in_place"),
    _words("nested_outputs", NestedOutputs, others=True),
    _words("backwards", Backwards),
    _words("deep_supervision", DeepSupervision, "shared", others=True),
    _words("frozen_body", FrozenBody, "frozen"),
    _words("frozen_end", FrozenEnd, "frozen"),
    _words("counting", Counting, "counts"),
    _words("optional_blocks", OptionalBlocks),
)
