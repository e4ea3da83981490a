# SPDX-License-Identifier: Apache-2.0
"""Messages beside products, in chunks: training is that of one process, and the messages are those on record."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from tensor_models import ENDS, loader, made, plans, shares_tokens, train, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel.axes.tensor import _overlap
from accel.tensors import full_tensor
from accel.testing import Simulator, _group

TOLERANCE = {"rtol": 0, "atol": 1e-10}
MESSAGES = Path(__file__).with_name("overlap_messages.txt")
Plan = accel.parallel.Plan


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a row or more, as models here are small."""
    monkeypatch.setattr(_overlap, "_LEAST_ROWS", 1)


def trained(
    ctx: accel.DistContext, plan: Any, model: dict[str, Any], steps: int, samples: int, *, divided: bool
) -> tuple[list[float], torch.Tensor, dict[str, torch.Tensor]]:
    """Norms, the sum of the losses of all ranks along dp, and parameters."""
    net = made(seed=1 + ctx.rank, **model)  # all begin with rank 0's
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    data = loader(samples, 4 // ctx.data_parallel[1])
    net, optimizer, data = accel.prepare(ctx, net, optimizer, data, plan=plan)
    losses = list[torch.Tensor]()
    norms = train(ctx, net, optimizer, data, steps, divided=divided, losses=losses)
    return norms, accel.reduce(ctx, torch.stack(losses).sum(), "sum") / ctx.axis("tp").size, whole(net)


def assert_trains_as_one_process(
    ranks: Simulator, mesh: str, size: int, name: str, model: dict[str, Any], **options: Any
) -> None:
    styles = plans(fused=model.get("fused", False))[name]
    if model.get("tied") and "head" not in styles:
        styles = styles | ENDS
    strategy = options.pop("strategy", "ddp")
    divided = styles.get("head") == "colwise"
    plan = Plan(tensor=styles, sequence=shares_tokens(name), overlap=True)
    expected = trained(accel.single(), plan, model, divided=False, **options)

    def rank(ctx: accel.DistContext) -> Any:
        return trained(accel.replace(ctx, mesh=mesh, strategy=strategy), plan, model, divided=divided, **options)

    for got in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


MODELS = st.fixed_dictionaries(
    {
        "heads_of_keys": st.sampled_from([4, 2, 1]),
        "fused": st.booleans(),
        "tied": st.booleans(),
        "frozen": st.booleans(),
    }
)


@settings(max_examples=share(0.04), deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    model=MODELS,
    name=st.sampled_from(["layers", "copies", "ends", "gathered", "sequence", "sequence, ends", "sequence, layers"]),
    samples=st.integers(5, 9),
    steps=st.sampled_from([1, 3]),
    least=st.sampled_from([1, 3, 5, 128]),
)
def test_every_plan_trains_as_one_process(ranks, size, model, name, samples, steps, least):
    """With AdamW, clipping, windows, a shorter last batch, and as many tokens as come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_overlap, "_LEAST_ROWS", least)  # chunks of equal and of other numbers of rows
        assert_trains_as_one_process(ranks, f"tp={size}", size, name, model, steps=steps, samples=samples)


@pytest.mark.parametrize("name", ["sequence", pytest.param("copies", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_data_parallelism_on_top_trains_as_one_process(ranks, name, strategy):
    assert_trains_as_one_process(
        ranks, "dp=2,tp=2", 4, name, {"heads_of_keys": 2}, steps=3, samples=7, strategy=strategy
    )


@given(length=st.integers(0, 999), rows=st.integers(1, 99), least=st.integers(1, 300))
def test_chunks_cover_a_length_in_order_and_differ_by_one(length, rows, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_overlap, "_LEAST_ROWS", least)
        chunks = _overlap._chunks(length, rows)
    assert [at for chunk in chunks for at in range(length)[chunk]] == list(range(length))
    sizes = {chunk.stop - chunk.start for chunk in chunks}
    assert max(sizes) - min(sizes) <= 1
    assert 1 <= len(chunks) <= 4
    assert len(chunks) == 1 or min(sizes) * rows >= least / 2


class Conv1D(nn.Module):
    """A linear layer that stores its weight as [in, out], as transformers' does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def layers() -> tuple[nn.Module, torch.Tensor, Plan]:
    return (
        nn.Sequential(Conv1D(32, 8), nn.GELU(), Conv1D(8, 32)),
        torch.randn(3, 7, 8),
        Plan(tensor={"0": "colwise", "2": "rowwise"}),
    )


def encoder() -> tuple[nn.Module, torch.Tensor, Plan]:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0), torch.randn(7, 3, 8), Plan()


def block() -> tuple[nn.Module, torch.Tensor, Plan]:
    return made(), torch.arange(32).view(4, 8) % 7, Plan(tensor=plans(fused=False)["sequence"], sequence=True)


@pytest.mark.parametrize("make", [layers, encoder, block])
@pytest.mark.parametrize("keep", [None, (), "products"])
def test_gradients_are_those_of_the_whole_module(ranks, make, keep):
    """Of torch's own attention, transposed weights and recomputed blocks, beside a loop without gradients."""

    def gradients(ctx: accel.DistContext, overlap: bool) -> Any:
        torch.manual_seed(0)
        model, inputs, plan = make()
        model = accel.prepare_model(ctx, model.double(), plan=msgspec.structs.replace(plan, overlap=overlap))
        if keep is not None:
            accel.checkpoint_activations(model, type(model), keep=keep)
        inputs = inputs.double().requires_grad_() if inputs.is_floating_point() else inputs
        with torch.inference_mode():
            output = model(inputs).clone()
        torch.testing.assert_close(model(inputs), output, **TOLERANCE)
        model(inputs).square().sum().backward()
        own = {
            name: None if each.grad is None else full_tensor(each.grad)
            for name, each in accel.unwrap_model(model).named_parameters()
        }
        return output, inputs.grad, own

    expected = gradients(accel.single(), False)
    for got in ranks.run(lambda ctx: gradients(accel.replace(ctx, mesh="tp=2"), True), 2, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


STYLES: dict[str, Any] = {"0.mlp.up": "colwise", "0.mlp.down": "rowwise"}
COPIED: dict[str, Any] = {"*.mlp": "copy_input", "*.mlp.up": "colwise", "*.mlp.down": "rowwise"}


class Events(TorchDispatchMode):
    """Lines on the products of a rank, and on the bytes that it sends along tp and waits for."""

    def __init__(self, group: Any, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lines = list[str]()
        join, wait = _group.SimulatedGroup._join, _group.SimulatedWork.wait
        own = set[Any]()

        def sends(at: Any, call: Any, buffers: Any, *others: Any) -> Any:
            work = join(at, call, buffers, *others)
            if at is group:
                own.add(work)
                self.lines.append(f"send {call.name} {max(sum(each.nbytes for each in side) for side in buffers)}")
            return work

        def waits(work: Any, timeout: Any = None) -> bool:
            if work in own:
                own.remove(work)
                self.lines.append("wait")
            return wait(work, timeout)

        patch.setattr(_group.SimulatedGroup, "_join", sends)
        patch.setattr(_group.SimulatedWork, "wait", waits)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            rows, matrix = args[-2:]
            self.lines.append(f"product {rows.shape[0]} x {rows.shape[1]} x {matrix.shape[1]}")
        return func(*args, **(kwargs or {}))


def events(ranks: Simulator, mesh: str, *, sequence: bool, overlap: bool) -> list[str]:
    """Products and messages of a forward and backward on rank 0: of one block, or of two that share tokens."""
    blocks = 1 + sequence
    plan = Plan(tensor=COPIED if sequence else STYLES, sequence=sequence, overlap=overlap, units=("0", "1")[:blocks])

    def rank(ctx: accel.DistContext) -> list[str]:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp" if "dp" in mesh else "ddp")
        model = nn.Sequential(*(Block() for _ in range(blocks)), nn.LayerNorm(8))
        model = accel.prepare_model(ctx, model, plan=plan)
        x = torch.ones(2, 14, 8)  # tokens that chunks do not divide
        model(x).sum().backward()  # the first pass has messages of its own
        accel.wait_for_everyone(ctx)
        if ctx.rank:
            model(x).sum().backward()
            return []
        with pytest.MonkeyPatch.context() as patch, Events(ctx.mesh["tp"].get_group(), patch) as found:
            output = model(x)
            found.lines.append("backward")
            output.sum().backward()
        return found.lines

    return ranks.run(rank, 4 if "dp" in mesh else 2, default_group=True)[0]


def on_record(ranks: Simulator) -> str:
    """The text of the file: a section for each mesh and plan, equal lines together."""
    sections = list[str]()
    for mesh in ("tp=2", "dp=2,tp=2"):
        for sequence in (False, True):
            for overlap in (False, True):
                lines = [f"# {mesh}{', sequence' if sequence else ''}{', overlap' if overlap else ''}"]
                for line, same in itertools.groupby(events(ranks, mesh, sequence=sequence, overlap=overlap)):
                    count = len(list(same))
                    lines.append(line if count == 1 else f"{line} ({count} times)")
                sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def test_messages_travel_beside_products_in_the_order_on_record(ranks):
    """After a wanted change: python tests/parallel/test_tensor_overlap.py."""
    assert on_record(ranks) == MESSAGES.read_text()


@pytest.mark.filterwarnings("ignore")
def test_layers_that_store_their_weights_transposed_send_in_chunks(ranks: Simulator) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = transformers.Conv1D(24, 8), transformers.Conv1D(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    def rank(ctx: accel.DistContext, *, overlap: bool) -> tuple[torch.Tensor | None, list[str]]:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh="tp=2")
        plan = Plan(tensor={"0.up": "colwise", "0.down": "rowwise"}, overlap=overlap)
        model = accel.prepare_model(ctx, nn.Sequential(Pair()).double(), plan=plan)
        x = torch.linspace(-1, 1, 128, dtype=torch.float64).view(2, 8, 8).requires_grad_()
        accel.wait_for_everyone(ctx)
        if ctx.rank:
            model(x).square().sum().backward()
            return x.grad, []
        with pytest.MonkeyPatch.context() as patch, Events(ctx.mesh["tp"].get_group(), patch) as found:
            model(x).square().sum().backward()
        return x.grad, [line for line in found.lines if line.startswith("send")]

    expected, few = ranks.run(lambda ctx: rank(ctx, overlap=False), 2, default_group=True)[0]
    assert len(few) == 2  # the sum of the outputs, and of the gradients of the input
    found = ranks.run(lambda ctx: rank(ctx, overlap=True), 2, default_group=True)
    for grad, _ in found:
        torch.testing.assert_close(grad, expected, **TOLERANCE)
    assert len(found[0][1]) == 2 * 4  # chunks


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def refusal(ctx: accel.DistContext, case: str) -> str:
    ctx = accel.replace(ctx, mesh="tp=2", **({"compile": "whole"} if case == "compiled by the context" else {}))
    net = nn.Sequential(Block())
    if case == "a forward of its own":
        net[0].mlp.up = Scaled(8, 24)
    if case == "compiled before":
        accel.compile_model(net, Mlp, backend="aot_eager")
    try:
        model = accel.prepare_model(ctx, net, plan=Plan(tensor={"0.mlp": "copy_input", **STYLES}, overlap=True))
        if case == "compiled after":
            accel.compile_model(model, Mlp, backend="aot_eager")
        model(torch.ones(2, 8))
    except (ConfigError, PrepareError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("a forward of its own", r"0\.mlp\.up \(Scaled\)"),
        ("compiled before", r"got 0\.mlp"),
        ("compiled after", r"got 0\.mlp\.up, 0\.mlp\.down"),
        ("compiled by the context", r"got --compile"),
    ],
)
def test_what_cannot_send_beside_products_is_refused_with_the_line_to_write(ranks, case, said):
    for text in ranks.run(lambda ctx: refusal(ctx, case), 2, default_group=True):
        assert re.search(said, text)
        assert "plan=accel.parallel.Plan(overlap=False)" in text


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, when it traces a function of autograd
def test_compiled_regions_of_a_script_send_as_without_overlap(ranks):
    """torch.compile by hand is known at the call."""

    def gradients(ctx: accel.DistContext, *, compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(Block()).double()
        net = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), net, plan=Plan(tensor=STYLES, overlap=True))
        if compiles:
            net[0].compile(backend="eager", fullgraph=True)
        net(torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)).square().sum().backward()
        return [full_tensor(each.grad) for each in net.parameters()]

    expected, got = (
        ranks.run(lambda ctx, on=on: gradients(ctx, compiles=on), 2, default_group=True) for on in (False, True)
    )
    torch.compiler.reset()
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize(("styles", "sequence"), [(STYLES, False), (COPIED, False), (STYLES, True), (COPIED, True)])
def test_under_autocast_products_and_sums_are_those_without_overlap(ranks, styles, sequence):
    def run(ctx: accel.DistContext, *, overlap: bool) -> Any:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh="tp=2", precision="bf16")
        net = nn.Sequential(Block(), nn.LayerNorm(8))
        net = accel.prepare_model(ctx, net, plan=Plan(tensor=styles, sequence=sequence, overlap=overlap))
        x = torch.randn(2, 6, 8, requires_grad=True)
        with accel.autocast(ctx):
            output = net(x)
        output.float().square().sum().backward()
        grads = [full_tensor(each.grad) for each in net.parameters()]
        assert {each.dtype for each in grads} == {torch.float32}
        return output.detach(), x.grad, grads

    plain, beside = (ranks.run(lambda ctx, on=on: run(ctx, overlap=on), 2, default_group=True) for on in (False, True))
    torch.testing.assert_close(beside, plain, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    with Simulator() as opened:
        _overlap._LEAST_ROWS = 1
        _ = MESSAGES.write_text(on_record(opened))
