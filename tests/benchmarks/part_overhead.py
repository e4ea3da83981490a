# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a block that the search divides between two ranks, against layers written for one of them.

    OMP_NUM_THREADS=1 python tests/benchmarks/part_overhead.py

One process runs the first rank's share: its messages go nowhere, and both variants make as many. Printed is the median
over rounds of the ratio. The attention translates sizes by layouts. Its queries, keys and values are one layer, from
which ranks exchange rows in each forward and backward; with `--apart` they are three. Written layers store the rows
that they need; with `--exchange` they exchange as many.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accel.comm import SilentGroup, copied, exchanged, summed
from accel.parallel.axes.tensor._found_plan import found_plan
from accel.parallel.axes.tensor._layers import GroupLayer
from accel.parallel.axes.tensor._rules import install, rules_of

RANKS, HEADS, ROWS, TOKENS = 2, 8, 4, 64


class Attention(nn.Module):
    """Counts its heads in a mapping; `share` is that of the heads."""

    def __init__(self, width: int, share: int = 1, *, apart: bool = False) -> None:
        super().__init__()
        layers = (
            [nn.Linear(width, width // share) for _ in range(3)] if apart else [nn.Linear(width, 3 * width // share)]
        )
        self.qkv = nn.ModuleList(layers)
        self.out = nn.Linear(width // share, width, bias=False)
        self.settings = {"heads": HEADS // share, "width": width // share}

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads, width = self.settings["heads"], self.settings["width"]
        pieces = self.qkv[0](x).split(width, 2) if len(self.qkv) == 1 else [layer(x) for layer in self.qkv]
        q, k, v = (each.view(rows, tokens, heads, -1).transpose(1, 2) for each in pieces)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))


class Exchanging(nn.Linear):
    """The first rank's half of a layer of queries, keys and values, stored as the first half of its rows."""

    group: Any = None

    def forward(self, input: Tensor) -> Tensor:
        """Exchange rows of the weight and of the bias, and compute."""
        third = self.out_features // 3  # the second is of the other rank's queries, for some of its values
        counts = [2 * third, third]
        weight, bias = (
            exchanged(torch.cat([each[:third], each[2 * third :], each[third : 2 * third]]), counts, counts, self.group)
            for each in (self.weight, self.bias)
        )
        return functional.linear(input, weight, bias)


class Mlp(nn.Module):
    def __init__(self, width: int, share: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width // share)
        self.down = nn.Linear(4 * width // share, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Both, with norms; of a rank's sizes with the messages of its layers, where it has a `group`."""

    def __init__(
        self, width: int, share: int = 1, group: Any = None, *, apart: bool = False, exchanges: bool = False
    ) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, share, apart=apart), Mlp(width, share)
        self.group = group
        if exchanges:
            layer = Exchanging(width, 3 * width // share)
            layer.group = group
            self.attention.qkv = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in ((self.first, self.attention), (self.second, self.mlp)):
            y = norm(x)
            x = x + (part(y) if self.group is None else summed(part(copied(y, self.group)), self.group))
        return x


def divided(width: int, group: Any, *, apart: bool = False) -> nn.Module:
    """Return the first rank's share of a block by the plan that is found."""
    whole = Block(width, apart=apart)
    plan = found_plan(whole, RANKS, [torch.empty(ROWS, TOKENS, width)])
    rules = rules_of(whole, plan.styles, RANKS, regions=plan.regions)
    part = copy.deepcopy(whole)
    for path, rule in rules.items():
        module = part.get_submodule(path)
        for name, dim in rule.dims.items():
            own = module.get_parameter(name).detach().chunk(RANKS, dim)[0]
            setattr(module, name, nn.Parameter(own.clone()))
    install(part, rules, lambda rule: GroupLayer(rule, group))
    return part


def seconds(module: nn.Module, x: Tensor, passes: int) -> float:
    """Return the time of the processor for some passes, in which other processes count little."""
    start = time.process_time()
    for _ in range(passes):
        module(x).sum().backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--apart", action="store_true", help="queries, keys and values by a layer each")
    parser.add_argument("--exchange", action="store_true", help="written layers exchange rows of a weight, too")
    given = parser.parse_args()
    torch.manual_seed(0)
    for width in given.widths:
        group: Any = SilentGroup(RANKS)
        own = divided(width, group, apart=given.apart)
        written = Block(width, RANKS, group, apart=given.apart, exchanges=given.exchange)
        x = torch.randn(ROWS, TOKENS, width, requires_grad=True)
        passes = max(2, 4096 // width)
        _ = seconds(own, x, 2), seconds(written, x, 2)
        ratios = [seconds(own, x, passes) / seconds(written, x, passes) for _ in range(given.rounds)]
        print(f"width {width}: {statistics.median(ratios):.2f} of written layers")


if __name__ == "__main__":
    main()
