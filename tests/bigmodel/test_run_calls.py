# SPDX-License-Identifier: Apache-2.0
"""Calls that fail, are interrupted or overlap: no other call waits for ever, and no weight is lost or wrong."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from streamed import make_net, streamed_map, token_ids
from torch import nn

import accel
from accel.bigmodel import StoredTensor, open_weights
from accel.bigmodel.run import cpu_offload, dispatch_model
from accel.tensors import is_absent

PATIENCE_S = 60


class Gated:
    """A source whose reads of one block wait, and then fail."""

    def __init__(self, path: Path, failing: str) -> None:
        self.inner = open_weights(path)
        self.failing = failing
        self.reading, self.release = threading.Event(), threading.Event()

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        return self.inner.entries

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        if any(name.startswith(self.failing) for name, _ in targets):
            self.reading.set()
            assert self.release.wait(PATIENCE_S)
            raise OSError(5, "Input/output error")
        self.inner.read(targets)

    def close(self) -> None:
        self.inner.close()


@contextmanager
def thread(call: Callable[[], object]) -> Iterator[list[object]]:
    """Run a function in a thread; give the list that receives its result or its error."""
    found: list[object] = []

    def run() -> None:
        try:
            with torch.no_grad():
                found.append(call())
        except BaseException as error:
            found.append(error)

    started = threading.Thread(target=run, daemon=True)
    started.start()
    yield found
    started.join(PATIENCE_S)
    assert not started.is_alive()


def test_a_thread_gets_the_slot_of_a_call_whose_read_failed(tmp_path: Path) -> None:
    net, x = make_net(), torch.ones(1, 16)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    source = Gated(tmp_path / "model.safetensors", "blocks.0")
    with torch.no_grad():
        expected = net.blocks[1](x)
    with (
        dispatch_model(net, streamed_map(net, "disk", 1), source=source, prefetch=False) as run,
        thread(lambda: net.blocks[0](x)) as failed,
    ):
        assert source.reading.wait(PATIENCE_S)
        with thread(lambda: net.blocks[1](x)) as waited:
            while sum(each.waits for each in run.stats().segments) < 2:
                time.sleep(0.001)
            source.release.set()
    source.close()
    assert isinstance(failed[0], accel.errors.StreamError)
    assert torch.equal(waited[0], expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 2])
def test_closing_after_an_interrupt_gives_every_weight_back(slots: int) -> None:
    net = make_net()
    before = dict(net.named_parameters())
    expected = net(token_ids())
    net.blocks[1].error = KeyboardInterrupt()
    with (
        pytest.raises(KeyboardInterrupt),
        torch.no_grad(),
        cpu_offload(net, "cpu:0", slots=slots),
    ):
        net(token_ids())
    net.blocks[1].error = None
    assert all(each is before[name] for name, each in net.named_parameters())
    assert torch.equal(net(token_ids()), expected)


def test_each_call_that_ran_beside_a_change_of_its_weights_is_told() -> None:
    net, x = make_net(), torch.ones(1, 16)
    block = net.blocks[0]
    with torch.no_grad():
        expected = block(x)
    inside, leave = threading.Event(), threading.Event()
    writer: list[int] = []

    def change(module: torch.nn.Linear, _: object) -> None:
        if threading.get_ident() in writer:
            module.bias.add_(1)
        else:
            inside.set()
            assert leave.wait(PATIENCE_S)

    def write() -> object:
        writer.append(threading.get_ident())
        return block(x)

    with cpu_offload(net, "cpu:0"):
        handle = block.up.register_forward_pre_hook(change)
        with thread(lambda: block(x)) as stayed:
            assert inside.wait(PATIENCE_S)
            with thread(write) as wrote:
                pass
            leave.set()
        handle.remove()
        assert [type(each[0]) for each in (wrote, stayed)] == [accel.errors.StreamError] * 2
        with torch.no_grad():
            assert torch.equal(block(x), expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_autograd_keeps_no_casts_of_autocast(frozen: bool) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(3))).requires_grad_(not frozen)
    twin, x = copy.deepcopy(net), torch.randn(2, 32)
    kept: list[torch.Tensor] = []
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with accel.cpu_offload(net, "cpu:0") as run, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for model in (twin, run.model):
            kept.clear()
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(given)
            casts = [each for each in kept if each.shape == (32, 32)]
            assert casts
            assert all(is_absent(each) == (model is net) for each in casts)
            out.float().sum().backward()
            found += [out, given.grad]
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert not is_absent(net[0][0].weight.to(torch.bfloat16))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    for here, there in zip(net.parameters(), twin.parameters(), strict=True):
        assert (here.grad is None) == frozen
        assert frozen or torch.equal(here.grad, there.grad)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_is_told_to_dispatch_anew() -> None:
    def stop(*_: object) -> None:
        raise RuntimeError  # before anything computes: torch's threads are not in the child either

    net = make_net()
    with cpu_offload(net, "cpu:0"), torch.no_grad():
        expected = net(token_ids())
        handles = [block.register_forward_pre_hook(stop) for block in net.blocks]
        time.sleep(0.05)  # the feeder, done with what it fetches ahead, holds no lock
        child = os.fork()
        if not child:
            for block in net.blocks:  # some of them lie on slots
                try:
                    block(token_ids())
                except accel.errors.StreamError as error:
                    os._exit(7 if "Dispatch the model after the fork" in str(error) else 8)
                except RuntimeError:
                    continue
            os._exit(9)
        assert os.waitstatus_to_exitcode(_waited(child)) == 7
        for handle in handles:
            handle.remove()
        assert torch.equal(net(token_ids()), expected)


def _waited(child: int) -> int:
    """Return the status of a process, which is killed if it takes too long."""
    until = time.monotonic() + PATIENCE_S
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return found[1]
