# SPDX-License-Identifier: Apache-2.0
"""Reads that fail, files that change, maps and sources that do not fit, and processes that end while blocks travel."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share
from safetensors.torch import save_file
from streamed import make_net, streamed_map, token_ids

import accel
import accel.testing
from accel.bigmodel import StoredTensor, open_weights, swap_models
from accel.bigmodel.run import cpu_offload, disk_offload, dispatch_model
from accel.bigmodel.run._stream import ObservedOrder, choose_fill


class Flaky:
    """A source that fails on request."""

    def __init__(self, path: Path) -> None:
        self.inner = open_weights(path)
        self.failing = ""
        self.reads: list[str] = []

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        return self.inner.entries

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.reads += [name for name, _ in targets]
        if self.failing and any(name.startswith(self.failing) for name, _ in targets):
            raise OSError(5, "Input/output error")
        self.inner.read(targets)

    def close(self) -> None:
        self.inner.close()


class Quantized(torch.nn.Parameter):
    """A parameter of a class of its own."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(make_net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_read_that_fails_is_raised_in_the_block_that_needs_it_and_the_next_call_works(
    weights: Path, slots: int
) -> None:
    net, source = make_net(), Flaky(weights)
    expected = net(token_ids())
    with torch.no_grad(), dispatch_model(net, streamed_map(net, "disk", slots), source=source) as run:
        run.model(token_ids())
        source.failing = "blocks.2"
        for _ in range(2):
            with assert_raises(
                accel.errors.StreamError, problem=r"blocks\.2.*could not be fetched", got="Input/output error"
            ):
                run.model(token_ids())
        run.model.order = [0, 1, 3]
        run.model(token_ids())  # others are not touched by it
        source.failing = ""
        run.model.order = range(4)
        assert torch.equal(run.model(token_ids()), expected)
    source.close()


@pytest.mark.parametrize("change", ["truncated", "replaced", "rewritten"])
def test_a_file_that_changes_after_it_was_opened(weights: Path, change: str) -> None:
    net = make_net()
    expected = net(token_ids())
    with torch.no_grad(), dispatch_model(net, streamed_map(net, "disk", 1), source=weights, prefetch=False) as run:
        assert torch.equal(run.model(token_ids()), expected)
        if change == "replaced":  # by a rename: the open file is still the old one
            save_file(make_net(1).state_dict(), other := weights.with_name("other.safetensors"))
            other.rename(weights)
            assert torch.equal(run.model(token_ids()), expected)
            return
        with weights.open("r+b") as file:
            file.truncate(2000) if change == "truncated" else file.write(b"x")
        with assert_raises(accel.errors.CheckpointError, problem="too short|changed"):
            run.model(token_ids())


def test_a_source_that_does_not_fit_changes_nothing(weights: Path) -> None:
    net = make_net()
    before = list(net.parameters())
    state = net.state_dict()
    wrong = {name: tensor for name, tensor in state.items() if "blocks.1.up" not in name} | {
        "blocks.2.scale": torch.ones(3)
    }
    with assert_raises(accel.errors.CheckpointError, problem="3 weights", got=r"missing 'blocks.1.up.weight'.*\(16,\)"):
        dispatch_model(net, streamed_map(net, "disk"), source=wrong)
    with assert_raises(accel.errors.ConfigError, problem="22 weights have their home on a disk"):
        dispatch_model(net, streamed_map(net, "disk"))
    quantized = make_net()
    quantized.blocks[1].scale = Quantized(quantized.blocks[1].scale.data)
    with assert_raises(
        accel.errors.ConfigError, problem="as quantizers have", got="Quantized", where="'blocks.1.scale'"
    ):
        dispatch_model(quantized, streamed_map(quantized, "cpu"))
    with assert_raises(accel.errors.ConfigError, problem="another model"):
        dispatch_model(torch.nn.Linear(2, 2), streamed_map(net, "cpu"))
    with pytest.raises(accel.errors.CheckpointError):
        dispatch_model(net, streamed_map(net, "disk"), source=weights.with_name("none.safetensors"))
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True))
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
class Rotary(torch.nn.Module):
    """A linear layer beside a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.frequencies


def test_a_model_made_on_meta_is_sent_to_what_computes_its_buffers(tmp_path: Path) -> None:
    ctx = accel.single("cpu")
    whole = Rotary()
    accel.save_model(ctx, whole, tmp_path)
    with torch.device("meta"):
        empty = Rotary()
    device_map = accel.infer_device_map(accel.bigmodel.describe(empty), {"cpu": "1MB"})
    with assert_raises(accel.errors.ConfigError, got="'frequencies'", fix="by accel.init_empty_weights"):
        accel.load_checkpoint_and_dispatch(ctx, empty, tmp_path, device_map)
    built = accel.init_empty_weights(Rotary)
    with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, built, tmp_path, device_map) as run:
        assert torch.equal(run.model(torch.ones(1, 4)), whole(torch.ones(1, 4)))


def test_a_device_that_is_not_there_is_refused() -> None:
    net = make_net()
    with assert_raises(accel.errors.DeviceError, got="'cuda:0'"):
        cpu_offload(net, 0)
    with assert_raises(accel.errors.DeviceError, got="'cuda:0'"):
        swap_models("cuda:0", net, make_net())


def test_a_dispatched_model_is_neither_dispatched_again_nor_loaded(weights: Path) -> None:
    net = make_net()
    expected = net(token_ids())
    with torch.no_grad(), dispatch_model(net, streamed_map(net, "disk"), source=weights) as run:
        with assert_raises(accel.errors.StreamError, problem="dispatched already", fix=r"run.close\(\)"):
            dispatch_model(net, streamed_map(net, "disk"), source=weights)
        with assert_raises(accel.errors.StreamError, problem="a load into a model with weights that dispatch_model"):
            accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), net, weights)
        assert torch.equal(run.model(token_ids()), expected)
    with torch.no_grad(), dispatch_model(net, streamed_map(net, "disk"), source=weights) as run:
        assert torch.equal(run.model(token_ids()), expected)
    with assert_raises(accel.errors.ConfigError, problem="the device map is not valid", got="None"):
        dispatch_model(net, None)  # type: ignore[arg-type]


def test_an_empty_model_is_filled_from_its_source(weights: Path) -> None:
    expected = make_net()(token_ids())
    for home in ("cpu", "mmap", "disk"):
        with torch.device("meta"):
            net = type(make_net())()
        with torch.no_grad(), dispatch_model(net, streamed_map(net, home), source=weights) as run:
            torch.testing.assert_close(run.model(token_ids()), expected)
        assert net.embed.weight.device.type == "cpu"


def test_stored_values_are_cast_to_the_dtype_of_the_map(weights: Path) -> None:
    net = make_net()
    twin = make_net().to(torch.bfloat16)
    device_map = streamed_map(twin, "disk")
    with torch.no_grad(), dispatch_model(net, device_map, source=weights) as run:
        assert run.model.blocks[0].scale.dtype == torch.bfloat16
        assert torch.equal(run.model(token_ids()), twin(token_ids()))


def test_offloads_by_one_call(weights: Path) -> None:
    net = make_net()
    expected = net(token_ids())
    with torch.no_grad():
        with cpu_offload(net, "cpu:0") as run:
            assert torch.equal(run.model(token_ids()), expected)
        with disk_offload(net, weights, "cpu", slots=1) as run:
            assert torch.equal(run.model(token_ids()), expected)
            assert run.stats().moved_bytes > 0
    with assert_raises(accel.errors.ConfigError, problem="host computes"):
        cpu_offload(make_net(), "cpu")


def test_a_checkpoint_is_loaded_and_dispatched_by_one_call_on_every_rank(weights: Path) -> None:
    expected = make_net().to(torch.float64)(token_ids())

    def rank(ctx: accel.DistContext) -> bool:
        with torch.device("meta"):
            net = type(make_net())()
        skeleton = accel.bigmodel.describe(net, dtype=torch.float64)
        names = [each.name for each in skeleton.segments]
        homes = dict(zip(names, ["cpu:0", "cpu", "mmap", "disk", "cpu", "disk"], strict=True))
        device_map = accel.bigmodel.DeviceMap(
            skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, "cpu:0"), slots=1
        )
        with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, net, weights, device_map) as run:
            torch.testing.assert_close(run.model(token_ids()), expected)
            fetches = run.stats().moved_bytes
        other = torch.nn.ModuleDict({"extra": torch.nn.Linear(2, 2)})
        with assert_raises(accel.errors.ConfigError, problem="another model", got="no 'extra.weight'"):
            accel.load_checkpoint_and_dispatch(ctx, other, weights, device_map)
        return fetches > 0

    assert accel.testing.simulate(rank, 2, default_group=True) == [True, True]


def test_an_embedding_away_from_its_device_sends_rows(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(20_000, 16), torch.nn.Linear(16, 2))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    ids = torch.tensor([[3, 19_999], [3, 0]])
    expected = net(ids)
    with torch.no_grad(), disk_offload(net, tmp_path / "model.safetensors", "cpu") as run:
        assert torch.equal(net(ids), expected)
        stats = run.stats()
        assert [(each.rows, each.rows_bytes, each.fetches) for each in stats.segments] == [(4, 4 * 16 * 4, 0)]
        assert torch.equal(net[0].weight[19_999], dict(run.tensors())["0.weight"][19_999])


def test_models_take_turns() -> None:
    first, second = make_net(0), make_net(1)
    expected = [net(token_ids()) for net in (first, second)]
    memory = first.embed.weight.data_ptr()
    with torch.no_grad(), swap_models("cpu:0", first, second) as swap:
        for _ in range(2):
            assert torch.equal(first(token_ids()), expected[0])
            assert first.embed.weight.data_ptr() != memory
            assert torch.equal(second(token_ids()), expected[1])
            assert first.embed.weight.data_ptr() == memory
        with swap.use(first):
            first.embed.weight[0] = 7.0
            first(token_ids())
            with assert_raises(accel.errors.StreamError, problem="two models at a time"):
                second(token_ids())
        first.blocks[0].error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            first(token_ids())
        second(token_ids())
        assert first.embed.weight.data_ptr() == memory
        assert bool((first.embed.weight[0] == 7.0).all())
        with assert_raises(accel.errors.ConfigError, problem="not swapped"), swap.use(make_net()):
            pass
    assert not first._forward_pre_hooks


def test_closing_wakes_a_thread_that_waits(weights: Path) -> None:
    reading, release = threading.Event(), threading.Event()

    class Stuck(Flaky):
        def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
            reading.set()
            assert release.wait(60)
            super().read(targets)

    net, source = make_net(), Stuck(weights)
    run = dispatch_model(net, streamed_map(net, "disk"), source=source)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with torch.no_grad():
                run.model(token_ids())
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert reading.wait(60)
    while not run.stats().waits:
        time.sleep(0.001)
    closer = threading.Thread(target=run.close)
    closer.start()
    caller.join(60)
    release.set()
    closer.join(60)
    source.close()
    assert not caller.is_alive()
    assert [type(error) for error in errors] == [accel.errors.StreamError]


@given(
    st.data(),
    st.integers(1, 4),
    st.integers(1, 9),
)
@settings(max_examples=share(1.2))
def test_fills_are_worth_their_while(data: st.DataObject, slots: int, blocks: int) -> None:
    order = ObservedOrder(blocks)
    for block in data.draw(st.lists(st.integers(0, blocks - 1), max_size=12)):
        expected = order.ahead(1)
        surprise = order.ran(block)
        assert not expected or surprise == (expected != [block])
    ahead = order.ahead(2 * slots)
    assert len(set(ahead)) == len(ahead) <= min(2 * slots, blocks - 1)
    held = data.draw(st.lists(st.none() | st.integers(0, blocks - 1), min_size=slots, max_size=slots))
    free = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    demanded = data.draw(st.lists(st.integers(0, blocks - 1), max_size=2, unique=True))
    chosen = choose_fill(held, free, demanded, ahead)
    missing = [block for block in demanded if block not in held]
    if chosen is None:
        assert not any(free) or not missing
        return
    block, slot = chosen
    assert free[slot]
    assert block not in held
    assert block == missing[0] if missing else block in ahead
    if not missing and held[slot] in ahead:
        assert ahead.index(block) < ahead.index(held[slot])  # type: ignore[arg-type]


EXITS = """
import gc, os, sys, torch
sys.path.insert(0, {helpers!r})
from streamed import make_net, streamed_map, token_ids
from accel import dispatch_model
net = make_net()
dispatch_model(net, streamed_map(net, "disk"), source={path!r}).close()  # imports are done once, before the forks
gc.collect()
gc.freeze()  # exits collect garbage several times; without torch's modules each takes a quarter of the time
for at in range(0, {exits}, 2):
    for block in (at, at + 1):
        if os.fork() == 0:
            net = make_net()
            run = dispatch_model(net, streamed_map(net, "disk"), source={path!r})
            with torch.no_grad():
                run.model.blocks[block % 4](torch.ones(1, 16))
            sys.exit(0)  # while the next blocks travel
    ended = [os.wait()[1] for _ in range(2)]
    assert ended == [0, 0], (at, ended)
print("done")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("exits", [16, pytest.param(100, marks=pytest.mark.nightly)])
def test_processes_end_while_blocks_travel(weights: Path, exits: int) -> None:
    helpers = str(Path(__file__).parent.parent / "helpers")
    code = EXITS.format(helpers=helpers, path=str(weights), exits=exits)
    ended = subprocess.run([sys.executable, "-c", code], timeout=patience(200), capture_output=True, text=True)
    assert ended.stdout == "done\n", ended.stderr
    assert not ended.stderr


def test_values_that_no_file_has_are_written_to_scratch_files_for_the_run(weights: Path, tmp_path: Path) -> None:
    net, scratch = make_net(), tmp_path / "scratch"
    scratch.mkdir()
    with torch.no_grad():
        net.blocks[1].up.weight.add_(1)  # changed after it was loaded
        net.blocks[2].extra = torch.nn.Parameter(torch.ones(3, 5))  # in no file
        expected = net(token_ids())
    before = dict(net.named_parameters())
    values = {name: each.detach().clone() for name, each in before.items()}
    device_map = streamed_map(net, "disk")
    with assert_raises(accel.errors.CheckpointError, got=r"missing 'blocks\.2\.extra'", fix="scratch=folder"):
        dispatch_model(net, device_map, source=weights)
    with assert_raises(accel.errors.ConfigError, problem="home on a disk", fix="scratch=folder"):
        dispatch_model(net, device_map)
    for source in (None, weights):
        with torch.no_grad(), dispatch_model(net, device_map, source=source, scratch=scratch) as run:
            assert list(scratch.iterdir()) == []  # nothing is left behind by a crash
            assert before["blocks.1.up.weight"].nbytes == 0
            assert torch.equal(net(token_ids()), expected)
            assert torch.equal(net.blocks[2].extra + 0, values["blocks.2.extra"])
            assert all(torch.equal(each, values[name]) for name, each in run.tensors())
        assert all(each is before[name] for name, each in net.named_parameters())
        assert all(torch.equal(each, values[name]) for name, each in net.named_parameters())
    with torch.no_grad(), disk_offload(net, None, "cpu:0", scratch=scratch):
        assert torch.equal(net(token_ids()), expected)
    extra = "blocks.2.extra"  # the load leaves it as it is
    with accel.load_checkpoint_and_dispatch(
        accel.single("cpu"), net, weights, device_map, allow_missing=extra, scratch=scratch
    ) as run:
        assert torch.equal(dict(run.tensors())[extra], values[extra])
        assert torch.equal(dict(run.tensors())["blocks.1.up.weight"], make_net().blocks[1].up.weight)


def test_a_full_disk_of_scratch_files_leaves_the_model_and_the_folder_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()

    def full(*_: object) -> None:
        raise accel.errors.CheckpointError("No space left on device (ENOSPC)")

    monkeypatch.setattr("accel.bigmodel.run._sources.write_tensors", full)
    for folder, text in ((tmp_path, "No space left"), (tmp_path / "none", "No such file")):
        with assert_raises(accel.errors.CheckpointError, got=text) as caught:
            dispatch_model(net, streamed_map(net, "disk"), scratch=folder)
        assert "scratch=" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert torch.is_tensor(net(token_ids()))
