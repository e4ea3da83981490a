# SPDX-License-Identifier: Apache-2.0
"""accel's collectives on two gloo processes and on two simulated ranks: the same bytes, or the same errors by the word.

Cases are drawn: trees, dtypes, shapes, layouts, options, and what goes wrong on rank 1. All run one after another in
one group, so that a call also has to leave the ranks in step.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from twin_ranks import differences, refused, serve

import accel

SEED = 2026
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ANY = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    inputs: Any
    label: Any


class Record(msgspec.Struct):
    value: Any


class Sealed:
    """Can be pickled and not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse_to_open, ()


def _refuse_to_open() -> None:
    raise ValueError("sealed")


class Case(msgspec.Struct, frozen=True):
    """A call, what its arguments are drawn from, and what is wrong with it."""

    name: str
    seed: int
    wrong: str = ""


class Rank:
    """One rank's side of a case. Both ranks draw the same, and differ where a number is theirs alone."""

    def __init__(self, group: dist.ProcessGroup, case: Case) -> None:
        self.ctx = accel.from_group(group, device="cpu")
        self.rank, self.wrong = self.ctx.rank, case.wrong
        self.draw = random.Random(case.seed)
        self.numbers = torch.Generator().manual_seed(2 * case.seed + self.rank)

    def mine(self, low: int, high: int) -> int:
        """A number of this rank's own."""
        return [self.draw.randint(low, high) for _ in range(2)][self.rank]

    def option(self, *choices: Any) -> Any:
        """One of the choices; the next one on rank 1 if that is what is wrong."""
        return choices[(self.draw.randrange(len(choices)) + (self.wrong == "option" and self.rank)) % len(choices)]

    def target(self) -> int:
        return 9 if self.wrong == "rank" and self.rank else self.option(0, 1)

    def leaf(self, dtypes: tuple[torch.dtype, ...], *, ragged: bool) -> torch.Tensor:
        dtype = self.draw.choice(dtypes)
        shape = [self.draw.randint(0, 4) for _ in range(self.draw.choice((0, 1, 1, 2, 3)))]
        if shape and self.draw.random() < 0.05:
            shape[0] = self.draw.choice((700, 30_000))  # past one message, and past where large leaves go alone
        if shape and ragged:
            shape[0] = self.mine(shape[0] // 2, shape[0])
        whole = torch.randint(0, 3, [2, *shape], generator=self.numbers)
        view = self.draw.choice((lambda t: t[0], lambda t: t[1].contiguous(), lambda t: t.transpose(0, -1)[..., 0]))
        tensor = view(whole.to(torch.float32).to(dtype))
        if view(whole).shape != whole.shape[1:]:
            tensor = tensor.reshape(shape)
        if dtype.is_complex and self.draw.random() < 0.5:
            tensor = tensor.conj()
        return tensor.requires_grad_() if dtype in FLOATS and self.draw.random() < 0.3 else tensor

    def tree(self, dtypes: tuple[torch.dtype, ...] = ANY, *, ragged: bool = False, depth: int = 2) -> Any:
        kind = self.draw.randrange(10 if depth else 3)
        if kind < 3:
            return self.leaf(dtypes, ragged=ragged)
        parts = [self.tree(dtypes, ragged=ragged, depth=depth - 1) for _ in range(self.draw.randint(0, 3))]
        first = parts[0] if parts else None
        match kind:
            case 3:
                return parts
            case 4:
                return tuple(parts)
            case 5 | 6:
                return {f"key {number}": part for number, part in enumerate(parts)}
            case 7:
                return Pair(parts, None)
            case 8:
                return Sample(first, parts)
            case _:
                return Record(first)

    def broken(self, tree: Any) -> Any:
        """The tree beside what is wrong with it on rank 1."""
        first, zeros = self.rank == 0, torch.zeros(2, 3)
        match self.wrong:
            case "structure":
                return [tree, zeros] if first else [tree, zeros, zeros]
            case "dtype":
                return [tree, zeros if first else zeros.double()]
            case "shape":
                return {"tree": tree, "other": zeros if first else zeros[:, :2]}
            case "leaf":
                return [tree, zeros if first else "text"]
            case "container":
                return [tree, {"a": zeros} if first else UserDict(a=zeros)]
            case _:
                return tree


Call = Callable[[Rank], Any]
CALLS: dict[str, Call] = {}
WRONG: dict[str, list[str]] = {}
TREES = ("structure", "dtype", "shape", "leaf", "container", "call")


def call(*wrong: str) -> Callable[[Call], Call]:
    def register(fn: Call) -> Call:
        CALLS[fn.__name__], WRONG[fn.__name__] = fn, list(wrong)
        return fn

    return register


@call(*TREES, "option", "rank", "place")
def gather(me: Rank) -> Any:
    dst, to = me.draw.choice((None, me.target())), me.draw.choice((None, "cpu"))
    return accel.gather(me.ctx, me.broken(me.tree(ragged=True)), dst=dst, to="moon" if me.wrong == "place" else to)


@call(*TREES, "option", "rank")
def gather_to_one(me: Rank) -> Any:
    return accel.gather(me.ctx, me.broken(me.tree(ragged=True)), dst=me.target())


@call(*TREES, "option")
def reduce(me: Rank) -> Any:
    op = me.option("sum", "mean", "max", "min", "product", "summ" if me.wrong else "sum")
    return accel.reduce(me.ctx, me.broken(me.tree((*FLOATS, *INTEGERS, torch.bool, torch.complex64))), op)


@call(*TREES, "option", "rank")
def broadcast(me: Rank) -> Any:
    return accel.broadcast(me.ctx, me.broken(me.tree()), src=me.target())


@call(*TREES, "option")
def pad_across_processes(me: Rank) -> Any:
    index, first = me.draw.choice((0, 1, -1)), me.option(False, True)
    tree = me.broken(me.tree(ragged=True))
    return accel.pad_across_processes(me.ctx, tree, dim=me.draw.choice((0, 0, -1, 1)), pad_index=index, pad_first=first)


@call("rows", "call")
def gather_for_metrics(me: Rank) -> Any:
    data = list(range(me.draw.randint(1, 13)))
    loader = DataLoader(data, batch_size=me.draw.randint(1, 4), shuffle=me.draw.random() < 0.5)
    loader = accel.prepare_loader(me.ctx, loader)
    found = []
    for batch in accel.batches(me.ctx, loader, accel.Cursor(seed=me.draw.randint(0, 9))):
        values = {"ids": batch.data, "sum": batch.data.sum()}
        if me.wrong == "rows" and me.rank:
            values["ids"] = torch.cat([values["ids"], values["ids"]])
        found.append(accel.gather_for_metrics(me.ctx, values, batch))
    return found


@call("call", "option", "rank", "pickle", "unpickle")
def gather_object(me: Rank) -> Any:
    dst = None if me.draw.random() < 0.5 and me.wrong not in ("option", "rank") else me.target()
    return accel.gather_object(me.ctx, _object(me), dst=dst)


@call("call", "option", "rank", "pickle", "unpickle", "length")
def broadcast_object_list(me: Rank) -> Any:
    count = me.draw.randint(0, 3) + (me.wrong == "length" and me.rank)
    objects = [_object(me) for _ in range(count)]
    return accel.broadcast_object_list(me.ctx, [_object(me), *objects], src=me.target())


def _object(me: Rank) -> Any:
    if me.wrong in ("pickle", "unpickle") and me.rank:
        return (lambda: None) if me.wrong == "pickle" else Sealed()
    size = 10_000 if me.draw.random() < 0.1 else me.mine(0, 50)
    return {"rank": me.rank, "text": "x" * size, "tree": me.tree(depth=1)}


@call("call")
def any_rank(me: Rank) -> Any:
    return [accel.any_rank(me.ctx, me.mine(0, 2) == 0) for _ in range(3)]


@call("call")
def wait_for_everyone(me: Rank) -> Any:
    return accel.wait_for_everyone(me.ctx)


@call("call", "block")
def main_process_first(me: Rank) -> Any:
    with accel.main_process_first(me.ctx):
        if me.wrong == "block" and me.ctx.is_main_process:
            raise OSError("in the block")
        return me.rank


@call("call", "lengths", "kind")
def split_between_processes(me: Rank) -> Any:
    count, pad = me.draw.randint(0, 7), me.draw.random() < 0.5
    inputs: dict[str, Any] = {"rows": torch.arange(float(count)), "names": [str(each) for each in range(count)]}
    if me.wrong == "lengths":
        inputs["names"] = [*inputs["names"], "one more"]
    part = accel.split_between_processes(me.ctx, 7 if me.wrong == "kind" else inputs, pad=pad)
    return part, accel.gather(me.ctx, part["rows"])


def _cases(drawn: int) -> list[Case]:
    """As many of each call, two thirds of them right."""
    draw, count = random.Random(SEED + drawn), drawn * len(CALLS)
    seeds = iter(range(count, 2 * count))
    kinds = {
        name: ["", "", *wrong] if len(wrong) < 2 else [""] * 2 * len(wrong) + wrong for name, wrong in WRONG.items()
    }
    return [Case(name, next(seeds), draw.choice(kinds[name])) for _ in range(drawn) for name in CALLS]


def _run(group: dist.ProcessGroup, case: Case) -> Any:
    me = Rank(group, case)
    if case.wrong == "call" and me.rank:
        other = accel.any_rank if case.name == "wait_for_everyone" else accel.wait_for_everyone
        return other(me.ctx, *([True] if other is accel.any_rank else []))
    return CALLS[case.name](me)


@pytest.mark.multiprocess
@pytest.mark.parametrize("drawn", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_accel_on_simulated_ranks_equals_gloo_processes(drawn):
    cases = _cases(drawn)
    wrong, real = differences(__file__, [str(drawn)], _run, cases, lambda expected, got: expected == got)
    assert not wrong, f"{len(wrong)} of {2 * len(cases)} differ\n" + "\n".join(wrong[:20])
    by_name = {
        name: [refused(found) for case, found in zip(cases, real[0], strict=True) if case.name == name]
        for name in CALLS
    }
    assert all(any(found) and not all(found) for found in by_name.values()), by_name


if __name__ == "__main__":
    serve(_run, _cases(int(sys.argv[2])))
