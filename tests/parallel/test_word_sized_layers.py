# SPDX-License-Identifier: Apache-2.0
"""Layers with as many outputs as an embedding has rows, at any place in a model along tp: outputs are right or refused.

What leaves the model decides which of them is a head: this rank's words of its logits are returned for the style
"colwise". All other values are full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.errors import PrepareError
from accel.tensors import full_tensor
from accel.testing import Simulator

WORDS, WIDTH = 34, 4
IDS = torch.arange(12).view(2, 6) % WORDS
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "relu": torch.relu,
    "norm": lambda x: functional.normalize(x, dim=-1),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),  # has no rule for features that ranks divide
}

STYLES = {
    "block": {".0.up": "colwise", ".0.down": "rowwise"},
    "apart": {".up": "colwise", ".down.0": "rowwise"},
    "sum": {"": "colwise"},
}


class Wide(nn.Module):
    """A layer as wide as the vocabulary, and one back."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = BETWEEN[between]
        self.up, self.down = nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Net(nn.Module):
    """Word-sized layers before, in and after blocks, and one to three heads."""

    def __init__(self, between: str, kinds: tuple[str, ...], heads: int, *, tied: bool, reads_head: bool) -> None:
        super().__init__()
        self.between, self.kinds, self.reads_head = BETWEEN[between], kinds, reads_head
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.styles: dict[str, str] = {}
        for at, kind in enumerate(kinds):
            made: dict[str, nn.Module] = {
                "block": nn.ModuleList([Wide(between)]),
                "apart": nn.ModuleDict({"up": nn.Linear(WIDTH, WORDS), "down": nn.Sequential(nn.Linear(WORDS, WIDTH))}),
                "sum": nn.Linear(WIDTH, WORDS),
            }
            self.add_module(f"part{at}", made[kind])
            self.styles |= {f"part{at}{path}": style for path, style in STYLES[kind].items()}
        self.back = nn.Linear(WORDS, WIDTH) if reads_head else None
        self.styles |= {"back": "rowwise"} if reads_head else {}
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS, bias=False) for _ in range(heads))
        if tied:
            self.heads[0].weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(ids)
        for at, kind in enumerate(self.kinds):
            part: Any = self.get_submodule(f"part{at}")
            if kind == "block":
                x = x + part[0](x)
            elif kind == "apart":
                x = x + part["down"](self.between(part["up"](x)))
            else:  # a score of each word, of which only the mean is used
                x = x + self.between(part(x)).square().mean(-1, keepdim=True)
        if self.back is not None:
            x = x + self.back(self.between(self.heads[0](x)))
        return tuple(head(x).tanh() * 3.0 for head in self.heads)


def run(ctx: accel.DistContext, make: Callable[[], Net], head: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return outputs and gradients; a head of the style "colwise" gives this rank's words."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double()
        for each in net.parameters():
            _ = nn.init.normal_(each)
    styles: Any = dict(net.styles)
    if head:
        styles |= {f"heads.{at}": head for at in range(len(net.heads))}
        styles |= {"embed": "embedding_rowwise"} if net.heads[0].weight is net.embed.weight else {}
    model = accel.prepare_model(ctx, net, plan=accel.parallel.Plan(tensor=styles))
    outputs = model(IDS)
    sum(each.square().sum() for each in outputs).backward()
    grads = {name: each.grad for name, each in accel.unwrap_model(model).named_parameters()}
    return [each.detach() for each in outputs], {
        name: full_tensor(each) for name, each in grads.items() if each is not None
    }


@settings(deadline=None, max_examples=share(2))
@given(
    between=st.sampled_from(list(BETWEEN)),
    kinds=st.lists(st.sampled_from(list(STYLES)), max_size=2).map(tuple),
    heads=st.integers(1, 3),
    tied=st.booleans(),
    reads_head=st.booleans(),
    head=st.sampled_from(["", "colwise", "colwise_gather_output"]),
)
def test_word_sized_layers_are_right_or_refused(
    ranks: Simulator, between: str, kinds: tuple[str, ...], heads: int, tied: bool, reads_head: bool, head: str
) -> None:
    def make() -> Net:
        return Net(between, kinds, heads, tied=tied, reads_head=reads_head)

    def rank(ctx: accel.DistContext) -> Any:
        try:
            return run(accel.replace(ctx, mesh="tp=2"), make, head)
        except PrepareError as error:
            return error

    expected, wanted = run(accel.single(), make, "")
    found = ranks.run(rank, 2, default_group=True)
    is_split = bool(kinds) or (reads_head and head == "colwise")
    if between == "softmax" and is_split:
        assert all(isinstance(each, PrepareError) for each in found)
        return
    for at, output in enumerate(expected):
        parts = [outputs[at] for outputs, _ in found]
        for each in [torch.cat(parts, -1)] if head == "colwise" else parts:
            torch.testing.assert_close(each, output, rtol=0, atol=1e-9)
    for _, grads in found:
        torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-8)
