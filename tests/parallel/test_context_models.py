# SPDX-License-Identifier: Apache-2.0
"""Hand-written models compute along cp, as they are written, what one process computes."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from handwritten import MODELS, Handwritten, named, tensors_of
from handwritten_runs import called
from steps import begin_batch
from tables import in_turn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import AccelError, ConfigError, PrepareError
from accel.fakes import fake_mode
from accel.testing import Simulator
from accel.tree import map_tensors

LENGTH = 8
QUICK = ("nano_gpt", "moe", "lstm", "perceiver")
NO_SEQUENCE = ("gnn", "dlrm")  # inputs are nodes, or features of a sample
# gradients within the forward; checkpoints within checkpoints, with tensors that are not passed by keyword
NOT_ALONG_CP = ("energies", "nested_checkpoints")


def is_sequence(tensor: Tensor) -> bool:
    return tensor.dim() in (2, 3) and tensor.shape[1] == LENGTH


def cut(ctx: accel.DistContext, tree: Any) -> Any:
    """Own positions of the sequences in a tree."""
    found: dict[str, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if is_sequence(tensor):
            found[str(id(tensor))] = tensor
        return tensor

    _ = map_tensors(note, tree)
    own = accel.parallel.split_sequence(ctx, found, shift=()) if found else {}
    return map_tensors(lambda tensor: own.get(str(id(tensor)), tensor), tree)


def floats(output: Any) -> list[Tensor]:
    return [each for each in tensors_of(output) if each.is_floating_point()]


def weighted(outputs: list[Tensor], draws: list[Tensor]) -> Tensor:
    pairs = zip(outputs, draws, strict=True)
    return torch.stack([(each * draw).sum() for each, draw in pairs if each.requires_grad]).sum()


def own_of(ctx: accel.DistContext, whole: Tensor, own: Tensor) -> Tensor:
    """The rows of a tensor at own positions; all of it if an output has them on each rank."""
    dims = [dim for dim, length in enumerate(own.shape) if length != whole.shape[dim]]
    if not dims:
        return whole
    (dim,) = dims
    places = accel.parallel.split_sequence(ctx, {"at": torch.arange(whole.shape[dim])[None]}, shift=())["at"][0]
    return whole.index_select(dim, places)


def off(ranks: Simulator, entry: Handwritten, size: int) -> float:
    """The largest difference of outputs and of summed gradients on a mesh cp."""
    batch = entry.batch(5, 3, LENGTH).inputs  # no number of samples that is one of own positions
    model = entry.make().eval()
    whole = floats(called(model, batch))
    draws = [
        torch.randn(each.shape, generator=torch.Generator().manual_seed(at)).to(each) for at, each in enumerate(whole)
    ]
    weighted(whole, draws).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        spread = accel.prepare_model(ctx, entry.make().eval())
        own = floats(called(spread, cut(ctx, batch)))
        wanted = [own_of(ctx, each.detach(), mine) for each, mine in zip(whole, own, strict=True)]
        shares = [
            own_of(ctx, draw, mine) / (1 if mine.shape != draw.shape else size)
            for draw, mine in zip(draws, own, strict=True)
        ]
        found = [float((each.detach() - want).abs().max()) for each, want in zip(own, wanted, strict=True)]
        spread.zero_grad()
        weighted(own, shares).backward()
        for name, each in accel.unwrap_model(spread).named_parameters():
            total = accel.reduce(ctx, torch.zeros_like(each) if each.grad is None else each.grad)
            want = expected.get(name, torch.zeros_like(each))
            found.append(float((total - want).abs().max() / max(1.0, float(want.abs().max()))))
        return max(found)

    return max(ranks.run(rank, size, default_group=True))


SEQUENCES = [
    each
    for each in MODELS
    if each.name not in (*NO_SEQUENCE, *NOT_ALONG_CP)
    and any(map(is_sequence, tensors_of(each.batch(5, 2, LENGTH).inputs)))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "entry",
    [*named(*QUICK), pytest.param(*named("torch_transformer"), marks=pytest.mark.slow)],
    ids=lambda each: each.name,
)
def test_a_hand_written_model_computes_as_in_one_process(ranks: Simulator, entry: Handwritten) -> None:
    assert off(ranks, entry, 2) < 1e-10


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "size"),
    in_turn([each for each in SEQUENCES if each.name not in QUICK], 4, 2),
    ids=lambda each: getattr(each, "name", each),
)
def test_each_hand_written_model_computes_as_in_one_process(ranks: Simulator, entry: Handwritten, size: int) -> None:
    assert off(ranks, entry, size) < 1e-10


NO_PLAN = ("lstm", "gru", "hooked_features", "called_by_parts", "odd_ties")  # refused along tp
TOGETHER = ("nano_gpt", "moe", "t5", "in_place", "torch_transformer")


# computed with in code around their unit, a reentrant checkpoint, and a function with a backward of its own
NOT_SHARED = (*NO_PLAN, "mamba", "residuals_between", "reentrant", "autograd_function")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "sequence"),
    [
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in named(*TOGETHER)),
        *(pytest.param(each, True, marks=pytest.mark.slow) for each in named("llama")),
        *(
            pytest.param(each, sequence and each.name not in NOT_SHARED, marks=pytest.mark.nightly)
            for each, sequence in in_turn([each for each in SEQUENCES if each.name not in NO_PLAN], True, False)
        ),
    ],
    ids=lambda each: getattr(each, "name", "tokens" if each else "features"),
)
def test_a_hand_written_model_trains_along_cp_and_tp(ranks: Simulator, entry: Handwritten, *, sequence: bool) -> None:
    batch = entry.batch(5, 3, LENGTH).inputs
    model = entry.make().eval()
    whole = floats(called(model, batch))
    draws = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each) for each in whole]
    weighted(whole, draws).backward()
    expected = {name: each if each.grad is None else each - each.grad for name, each in model.named_parameters()}

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2,tp=2")
        made: Any = entry.make().eval()
        optimizer: Any = torch.optim.SGD([each for each in made.parameters() if each.requires_grad], lr=1.0)
        plan = accel.parallel.Plan(sequence=sequence)
        spread, optimizer = accel.prepare(ctx, made, optimizer, example=batch, plan=plan)
        state = begin_batch(ctx)
        own = floats(called(spread, cut(ctx, batch)))
        shares = [
            own_of(ctx, draw, mine) / (1 if mine.shape != draw.shape else 2)
            for draw, mine in zip(draws, own, strict=True)
        ]
        state = accel.backward(ctx, 2 * weighted(own, shares), state, weight=1)
        _ = accel.optimizer_step(ctx, optimizer, state)
        after = accel.get_state_dict(ctx, spread, dst=None)
        sizes = {name: max(1.0, float(want.detach().abs().max())) for name, want in expected.items()}
        return max(float((after[name] - want.detach()).abs().max()) / sizes[name] for name, want in expected.items())

    assert max(ranks.run(rank, 4, default_group=True)) < 1e-10


class Attention(nn.Module):
    """Attention of all positions, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Body(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = Attention()
        self.change = change
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.change(x)))


@pytest.mark.parametrize("is_before", [True, False])
def test_a_part_of_the_model_that_attends_is_refused_alone(ranks: Simulator, is_before: bool) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        model: Any = accel.unwrap_model(accel.prepare_model(ctx, nn.Sequential(Body(nn.Identity()), nn.Linear(4, 2))))
        own = cut(ctx, {"x": torch.randn(2, LENGTH, 4)})["x"]
        if not is_before:
            _ = model(own)
            _ = model[0].head(own)  # works on positions one by one
            with assert_raises(ConfigError, problem="a part of the model was called alone"):
                model[0].attention(own)
        with assert_raises(ConfigError, problem="called alone", fix="Call the prepared model"):
            model[0](own)
        _ = model[0](torch.randn(2, 3, 4))  # not of a sequence that was cut
        return model(own).shape == (2, LENGTH // 2, 2)

    assert all(ranks.run(rank, 2, default_group=True))


class Coder(nn.Module):
    """Its forward chooses a part of it, by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Body(nn.Identity()), Body(nn.Identity())

    def forward(self, x: Tensor, only: str = "") -> Tensor:
        if only:
            chosen: Tensor = getattr(self, only)(x)
            return chosen
        return self.decoder(self.encoder(x))


def test_the_forward_chooses_a_part_by_an_argument(ranks: Simulator) -> None:
    torch.manual_seed(0)
    whole = Coder()
    x = torch.randn(2, LENGTH, 4)

    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh="cp=2")
        model: Any = accel.prepare_model(ctx, copy.deepcopy(whole))
        part = accel.parallel.split_sequence(ctx, {"x": x})
        with assert_raises(ConfigError, problem="called alone", fix="let its forward choose the part, by an argument"):
            accel.unwrap_model(model).encoder(part["x"])
        _ = model(part["x"])
        out = accel.gather(ctx, model(part["x"], only="encoder").detach().transpose(0, 1).contiguous())
        return out[accel.gather(ctx, part["position_ids"][0]).argsort()].transpose(0, 1)

    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, whole.encoder(x).detach())


def test_a_call_on_fake_tensors_is_refused_and_may_come_before_prepare(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh="cp=2")
        net = Coder()
        with fake_mode() as mode:
            assert net(mode.from_tensor(torch.randn(2, LENGTH, 4))).shape == (2, LENGTH, 4)
        model = accel.prepare_model(ctx, net)
        own = accel.parallel.split_sequence(ctx, {"x": torch.randn(2, LENGTH, 4)})["x"]
        for _ in range(2):  # before and after the proof
            with fake_mode() as mode, assert_raises(ConfigError, problem="fake tensors", fix="before accel.prepare"):
                model(mode.from_tensor(own))
            shape = list(model(own).shape)
        return shape

    assert ranks.run(rank, 2, default_group=True) == [[2, LENGTH // 2, 4]] * 2


def test_copies_of_a_model_compute_alike(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Body(nn.Identity()))
        own = cut(ctx, {"x": torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0))})["x"]
        inner = accel.unwrap_model(model)
        early = copy.deepcopy(model), copy.copy(inner)
        out = early[1](own)
        return all(torch.equal(each(own), out) for each in (*early, copy.deepcopy(model), copy.copy(inner), model))

    assert all(ranks.run(rank, 2, default_group=True))


class Equations(nn.Module):
    """An attention by equations. The second one contracts positions that ranks divide.

    Attributes:
        seen: the values of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x)
        self.seen.append(weakref.ref(v))
        weights = torch.einsum("bqd,bkd->bqk", self.q(x), self.k(x)).softmax(-1)
        return x + torch.einsum("bqk,bkd->bqd", weights, v)


def test_what_an_equation_gathers_is_not_kept_after_a_step(ranks: Simulator) -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64)

    def rank(ctx: accel.DistContext) -> list[bool]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare(ctx, Equations().double())
        own = cut(ctx, {"x": x})["x"]
        for _ in range(2):
            model(own).square().mean().backward()
        _ = gc.collect()
        return [each() is None for each in accel.unwrap_model(model).seen]

    for is_gone in ranks.run(rank, 2, default_group=True):
        assert len(is_gone) > 1
        assert all(is_gone)


def test_functions_of_all_positions_are_named_once(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Body(lambda x: x.flip(1)))
        own = cut(ctx, {"x": torch.randn(2, LENGTH, 4)})["x"]
        for _ in range(2):
            _ = model(own)

    with caplog.at_level(logging.INFO, "accel.parallel"):
        ranks.run(rank, 2, default_group=True)
    said = [each.getMessage() for each in caplog.records if "computes all positions" in each.getMessage()]
    assert said == ["Body: each rank along cp=2 computes all positions in flip"]


@pytest.mark.parametrize("way", ["torch.compile", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_compiled_model_computes_uncompiled_and_says_so(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    whole = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    plain = Body(nn.Identity()).double()
    plain(whole).square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model: Any = copy.deepcopy(plain)
        model.zero_grad()
        if way == "compile":
            model.compile(backend="aot_eager")
        model = accel.prepare_model(ctx, model)
        called = torch.compile(model, backend="aot_eager") if way == "torch.compile" else model
        for _ in range(2):
            out = called(cut(ctx, {"x": whole})["x"])
        out.square().sum().backward()
        pairs = zip(accel.unwrap_model(model).parameters(), plain.parameters(), strict=True)
        return max(float((accel.reduce(ctx, mine.grad) - want.grad).abs().max()) for mine, want in pairs)

    with caplog.at_level(logging.WARNING, "accel.parallel"):
        assert max(ranks.run(rank, 2, default_group=True)) < 1e-10
    said = [each.getMessage() for each in caplog.records if "uncompiled" in each.getMessage()]
    assert said == [
        'Body runs as it is, uncompiled, along cp=2: compile its blocks alone, accel.compile_model(model, "repeated")'
    ]


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_computed_again(ranks: Simulator) -> None:
    (entry,) = [each for each in MODELS if each.name == "nano_gpt"]
    ids = entry.batch(5, 3, LENGTH).inputs
    plain = entry.make()
    called(plain, ids).square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.checkpoint_activations(accel.prepare_model(ctx, entry.make()))
        model = accel.compile_model(model, "repeated", backend="aot_eager")
        called(model, cut(ctx, ids)).square().sum().backward()
        pairs = zip(accel.unwrap_model(model).parameters(), plain.parameters(), strict=True)
        return max(float((accel.reduce(ctx, mine.grad) - want.grad).abs().max()) for mine, want in pairs)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


class Failing(nn.Module):
    """Fails on one rank, in the way and at the place of the test's case."""

    def __init__(self, case: str, rank: int) -> None:
        super().__init__()
        self.case = case
        self.rank = rank
        self.attention = Attention()
        self.head = nn.Linear(4, 4)

    def fail(self, case: str) -> None:
        if self.rank == 1 and case == self.case:
            raise RuntimeError("fails on one rank")
        if self.rank == 1 and self.case == f"{case} of another kind":
            raise KeyError("fails on one rank")

    def forward(self, x: Tensor) -> Tensor:
        is_part = type(x) is not Tensor
        if is_part:
            self.fail("before attention")
        x = self.attention(self.head(x))
        if is_part:
            self.fail("after attention")
        if is_part and self.case == "in the output" and self.rank == 1:
            x = x * 2
        if is_part and x.requires_grad:
            _ = x.register_hook(lambda _grad: self.fail("in the backward"))
        return self.attention(x)


CASES = ("before attention", "after attention", "in the output", "in the backward")


@pytest.mark.parametrize("case", [*CASES, "after attention of another kind", "in the backward of another kind"])
def test_what_fails_on_one_rank_in_the_proof_is_one_error_on_all(ranks: Simulator, case: str) -> None:
    def rank(ctx: accel.DistContext) -> tuple[str, str]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Failing(case, ctx.rank))
        own = cut(ctx, {"x": torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0))})["x"]
        with pytest.raises(AccelError) as caught:
            _ = model(own)
        return type(caught.value).__name__, str(caught.value).split(" - at ")[0]

    first, second = ranks.run(rank, 2, default_group=True)
    assert first == second
    assert first[0] == ("PeerError" if "another kind" in case else "PrepareError")
    assert ("is off" if case == "in the output" else "fails on one rank") in first[1]


class Near(nn.Module):
    """Is wrong by a factor along cp, in its output or in a gradient alone."""

    def __init__(self, by: float, *, in_backward: bool) -> None:
        super().__init__()
        self.by = by
        self.in_backward = in_backward
        self.attention = Body(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            return self.attention(x)
        factor = self.by + torch.zeros(4, dtype=x.dtype)
        return self.attention(x * factor.detach()) if not self.in_backward else self._scaled(x)

    def _scaled(self, x: Tensor) -> Tensor:
        out = self.attention(x)
        return out * self.by - (out * (self.by - 1)).detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_small_error_is_found_in_narrow_weights(ranks: Simulator, dtype: torch.dtype, in_backward: bool) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = cut(ctx, {"x": torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0)).to(dtype)})["x"]
        right = accel.prepare_model(ctx, Near(1.0, in_backward=in_backward).to(dtype))
        assert right(own).dtype == dtype
        wrong = accel.prepare_model(ctx, Near(1.02, in_backward=in_backward).to(dtype))
        with pytest.raises(PrepareError) as caught:
            _ = wrong(own)
        return caught.value.got

    said = "a gradient of a parameter" if in_backward else "output 0 is off by"
    assert all(each.startswith(said) for each in ranks.run(rank, 2, default_group=True))


@pytest.mark.parametrize("by", [1.0, 1.02])
def test_outputs_of_a_large_model_are_compared_in_a_wide_dtype(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    """Its gradients are compared in its dtypes: here those of the biases, as frozen weights are many."""
    monkeypatch.setattr("accel.parallel.axes.context._proof._LARGEST", 8)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = Near(by, in_backward=False).bfloat16()
        _ = model.attention.head[0].weight.requires_grad_(False)
        x = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
        wrong = assert_raises(PrepareError, got="output 0 is off by")
        with contextlib.nullcontext() if by == 1.0 else wrong:
            _ = accel.prepare_model(ctx, model)(cut(ctx, {"x": x})["x"])

    ranks.run(rank, 2, default_group=True)


class Watched(nn.Linear):
    """Notes whether its weight has its value, which is that of its bias."""

    def forward(self, x: Tensor) -> Tensor:
        KNOWN.append(bool((self.weight == self.bias[0]).all()))
        return super().forward(x)


KNOWN: list[bool] = []


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_the_proof_of_sharded_units_has_their_weights(ranks: Simulator) -> None:
    """Units are gathered within the proof, into memory of their dtype."""
    KNOWN.clear()

    def rank(ctx: accel.DistContext) -> None:
        model = nn.Sequential(*(nn.Sequential(Watched(4, 4), nn.Tanh()) for _ in range(3)))
        for number, each in enumerate(model.parameters()):
            nn.init.constant_(each, 0.1 + number // 2)
        model = accel.prepare_model(accel.replace(ctx, mesh="cp=2", strategy="fsdp"), model)
        _ = model(cut(accel.replace(ctx, mesh="cp=2"), {"x": torch.ones(2, LENGTH, 4)})["x"])

    ranks.run(rank, 2, default_group=True)
    assert len(KNOWN) > 6
    assert all(KNOWN)


class Nested(nn.Module):
    """A checkpoint within a checkpoint, in training alone or always."""

    def __init__(self, *, by_keyword: bool, always: bool) -> None:
        super().__init__()
        self.by_keyword = by_keyword
        self.always = always
        self.attention = Body(nn.Identity())

    def inner(self, x: Tensor) -> Tensor:
        if self.by_keyword:
            return checkpoint(self.attention, x=x, use_reentrant=False)
        return checkpoint(self.attention, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.attention(x)


@pytest.mark.parametrize("always", [True, False])
def test_checkpoints_in_checkpoints_pass_tensors_by_keyword(ranks: Simulator, always: bool) -> None:
    whole = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Nested(by_keyword=True, always=always)
    plain(whole.requires_grad_()).square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = cut(ctx, {"x": whole.detach()})["x"].requires_grad_()
        with assert_raises(ConfigError, fix=r"checkpoint\(block, x=x, use_reentrant=False\)"):
            accel.prepare_model(ctx, Nested(by_keyword=False, always=always))(own).sum().backward()
        model = accel.prepare_model(ctx, copy.deepcopy(plain))
        model.zero_grad()
        model(own).square().sum().backward()
        pairs = zip(accel.unwrap_model(model).parameters(), plain.parameters(), strict=True)
        return max(float((accel.reduce(ctx, own.grad) - want.grad).abs().max()) for own, want in pairs)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-4


def add_to_row(h: Tensor, v: Tensor) -> Tensor:
    h[:, 0] += v[:, 1]
    return h


def copy_into_row(h: Tensor, v: Tensor) -> Tensor:
    h.select(1, 0).copy_(v[:, 1])
    return h


def change_slice_of_view(h: Tensor, v: Tensor) -> Tensor:
    h.transpose(1, 2)[:, :, 1:7][:, :2, 1:3].mul_(2).sub_(v[:, 2:4, :2].transpose(1, 2))
    return h


def rectify_slice(h: Tensor, v: Tensor) -> Tensor:
    _ = nn.functional.relu(h[:, 2:5], inplace=True)
    return h + v


def change_detached(h: Tensor, v: Tensor) -> Tensor:
    _ = h.detach()[:, 3:6].select(1, 1).zero_()
    return h + v


def change_integers(h: Tensor, v: Tensor) -> Tensor:
    ids = (v.detach() * 3).long()
    _ = ids[:, 0].fill_(2)
    ids[:, 2:5] += int(ids[0, 0, 0]) - 1  # 1
    return h + v + ids.to(h.dtype)


def read_after_the_change(h: Tensor, v: Tensor) -> Tensor:
    row = h[:, 0]
    same = h[:, 0]
    _ = h.mul_(2)
    _ = row.mul_(3)
    return h + same[:, None] * v


def scan(h: Tensor, v: Tensor) -> Tensor:
    state = h[:, 0]
    for at in range(1, LENGTH):
        state = state * 0.5 + v[:, at]
        _ = h[:, at].copy_(state)
    return h


def change_no_view(h: Tensor, v: Tensor) -> Tensor:
    picked = h[:, [0, 3]]
    picked += 1
    flipped = h.flip(1)
    flipped += v
    return h + flipped + picked.sum(1, keepdim=True)


WRITES = (
    add_to_row, copy_into_row, change_slice_of_view, rectify_slice, change_detached, change_integers,
    read_after_the_change, scan, change_no_view,
)  # fmt: skip


class Writing(nn.Module):
    """Changes selections of positions in place, after its first call."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.called = False
        self.attention = Attention()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        v = self.second(x)
        return self.attention(self.write(h * 1, v) if self.called else h + v)


@pytest.mark.parametrize(
    "write",
    [pytest.param(each, marks=[] if each is copy_into_row else pytest.mark.slow) for each in WRITES],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_written_into_a_selection_is_kept(
    ranks: Simulator, write: Callable[[Tensor, Tensor], Tensor], trains: bool
) -> None:
    whole = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    plain = Writing(write).double()
    plain.called = True
    expected = plain(whole)
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = cut(ctx, {"x": whole})["x"]
        wrapped = accel.prepare_model(ctx, copy.deepcopy(plain))
        model: Any = accel.unwrap_model(wrapped)
        model.called = False
        _ = wrapped(own)
        model.called = True
        with contextlib.nullcontext() if trains else torch.inference_mode():
            out = wrapped(own)
        off = float((out.detach() - own_of(ctx, expected.detach(), out)).abs().max())
        if trains:
            wrapped.zero_grad()
            out.square().sum().backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            off = max(off, *(float((accel.reduce(ctx, mine.grad) - want.grad).abs().max()) for mine, want in pairs))
        return off

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-9


class Extra(nn.Module):
    """Attention over tokens, with a further input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.more = nn.Embedding(8, 4), nn.Embedding(32, 4)
        self.attention = Body(nn.Identity())

    def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.kind in ("pictures", "features", "scales"):
            return self.attention(x + extra.flatten(1).sum(1)[:, None, None] * self.more.weight[0])
        if self.kind == "bounds of documents":
            extra = torch.searchsorted(extra, torch.arange(x.shape[1]), right=True)
        elif self.kind == "images":
            extra = extra.flatten(1).sum(1)
        added = self.more(extra)
        return self.attention(x + (added[:, None] if self.kind in ("times", "images") else added))


EXTRAS = {  # with four samples, and four own positions of eight
    "bounds of documents": torch.tensor([0, 3, 5, LENGTH]),
    "times": torch.tensor([7, 1, 20, 3]),
    "images": torch.arange(4)[:, None, None, None].expand(4, 3, 2, 2) % 3,
    "pictures": torch.arange(4 * 3 * 4 * 4).view(4, 3, 4, 4) % 5,
    "features": torch.randn(4, 4, 3, dtype=torch.float64),
    "scales": torch.randn(4, 4, dtype=torch.float64),
    "positions": torch.arange(LENGTH) * 2,
    "positions of rows": torch.arange(LENGTH)[None] * 3,
}


@pytest.mark.parametrize("samples", [4, 3])
@pytest.mark.parametrize("kind", EXTRAS)
def test_an_input_as_long_as_the_own_positions_by_chance_stays_whole(ranks: Simulator, kind: str, samples: int) -> None:
    extra = EXTRAS[kind][:samples] if len(EXTRAS[kind]) == 4 and kind != "bounds of documents" else EXTRAS[kind]
    ids = torch.randint(8, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Extra(kind).double()
    copied = copy.deepcopy(plain)
    plain(ids, extra).square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(copied))
        own = cut(ctx, {"ids": ids, "extra": extra.view(-1, LENGTH)} if kind.startswith("positions") else {"ids": ids})
        given = own.get("extra", extra)
        model(own["ids"], given.flatten() if kind == "positions" else given).square().sum().backward()
        pairs = zip(accel.unwrap_model(model).parameters(), plain.parameters(), strict=True)
        return max(float((accel.reduce(ctx, own.grad) - want.grad).abs().max()) for own, want in pairs)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


def added_in_place(a: Tensor, b: Tensor) -> Tensor:
    return (a * 1).add_(b)


def chosen_experts(a: Tensor, b: Tensor) -> Tensor:
    weights, experts = b.topk(2, -1)
    return torch.einsum("nd,ne,nd->nd", a, torch.zeros_like(b).scatter(1, experts, weights), b)


TOGETHER: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    added_in_place,
    chosen_experts,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: (a * 1).copy_(b),
    lambda a, b: torch.cat([a, b], -1)[:, :4] + torch.cat([b, a], 0)[: len(a)],
    lambda a, b: torch.stack([a, b]).sum(0),
    lambda a, b: torch.einsum("nd,nd->nd", a, b) + torch.bmm(a[:, None], b[:, :, None])[:, 0],
    lambda a, b: functional.cosine_similarity(a, b)[:, None] * a,
    lambda a, b: functional.mse_loss(a, b) * a,
    lambda a, b: functional.cross_entropy(a, b.argmax(-1)) * a,
    lambda a, b: b.cumsum(0) + b.flip(0) * b.sort(0)[0] + a * b.roll(1, 0),
]


class Flattened(nn.Module):
    """Tokens of all samples in one dimension, in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(32, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.linear(self.embed(ids))
        one = x.flatten(0, 1)
        other = x.transpose(0, 1).reshape(len(one), -1)
        found = [change(one, each) for change in TOGETHER for each in (one + 1, other)]
        return [each.view(*ids.shape, -1) for each in found]


@pytest.mark.slow
def test_tokens_of_all_samples_in_one_dimension_meet_others_in_another_order(ranks: Simulator) -> None:
    assert off(ranks, Handwritten("flattened", Flattened, MODELS[0].draw, MODELS[0].loss), 2) < 1e-10
