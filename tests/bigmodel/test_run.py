# SPDX-License-Identifier: Apache-2.0
"""A model whose weights are elsewhere behaves as one that has them, in each home and with any number of slots."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from safetensors.torch import save_file
from streamed import Net, make_net, streamed_map, token_ids
from torch import nn

import accel
from accel.bigmodel import Dispatched
from accel.bigmodel.run import dispatch_model

Dispatch = Callable[..., Dispatched[Net]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the nets by seed."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        save_file(make_net(seed).state_dict(), folder / f"{seed}.safetensors")
    return folder


@pytest.fixture(
    scope="module", params=[(home, slots) for home in ("cpu", "mmap", "disk") for slots in (1, 2, 3)], ids=str
)
def dispatch(request: pytest.FixtureRequest, files: Path) -> Iterator[Dispatch]:
    """Dispatch a net of a seed, all of it streamed from one home; closed after the module's tests of it."""
    home, slots = request.param
    opened: list[Dispatched[Net]] = []

    def make(seed: int = 0, change: Callable[[Net], object] = lambda net: None) -> Dispatched[Net]:
        net = make_net(seed)
        change(net)
        source = None if home == "cpu" else files / f"{seed}.safetensors"
        opened.append(dispatch_model(net, streamed_map(net, home, slots), source=source))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


def expected(seed: int = 0) -> torch.Tensor:
    """The net's own answer."""
    with torch.no_grad():
        return make_net(seed)(token_ids())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_forward(dispatch: Dispatch, mode: Callable[[], object]) -> None:
    run = dispatch()
    with mode():  # type: ignore[attr-defined]
        for _ in range(3):
            torch.testing.assert_close(run.model(token_ids()), expected(), rtol=1e-4, atol=1e-5)


def test_any_order_of_calls(dispatch: Dispatch) -> None:
    run, twin = dispatch(), make_net()
    with torch.no_grad():
        for order in ([3, 2, 1, 0], [0, 0, 3, 0], [2], [1, 3, 1, 3, 2, 0]):
            run.model.order = twin.order = order
            assert torch.equal(run.model(token_ids()), twin(token_ids()))


def test_a_weight_used_alone(dispatch: Dispatch) -> None:
    run, twin = dispatch(), make_net()
    x = torch.ones(3, 16)
    with torch.no_grad():
        assert torch.equal(
            nn.functional.linear(x, run.model.blocks[3].up.weight), nn.functional.linear(x, twin.blocks[3].up.weight)
        )
        assert torch.equal(run.model.blocks[1].scale[2:5] * 2, twin.blocks[1].scale[2:5] * 2)


def test_the_state_dict_has_every_value(dispatch: Dispatch) -> None:
    run, twin = dispatch(), make_net()
    state = run.model.state_dict()
    assert state.keys() == twin.state_dict().keys()
    assert all(torch.equal(state[name] + 0, tensor) for name, tensor in twin.state_dict().items())
    tensors = dict(run.tensors())
    assert list(tensors) == list(state)
    assert all(type(each) is torch.Tensor and torch.equal(each, twin.state_dict()[n]) for n, each in tensors.items())


def test_device_shape_and_class_of_a_weight(dispatch: Dispatch) -> None:
    run, twin = dispatch(), make_net()
    for (name, here), there in zip(run.model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(here, nn.Parameter), name
        assert (here.shape, here.dtype, here.device, here.stride()) == (
            there.shape,
            there.dtype,
            there.device,
            there.stride(),
        )
        assert here.requires_grad == there.requires_grad
        assert name == "embed.weight" or "Absent" in repr(here)


def test_two_models_in_two_threads(dispatch: Dispatch) -> None:
    runs = [dispatch(seed) for seed in (0, 1)]
    _in_threads([(run.model, expected(seed)) for seed, run in enumerate(runs)])


def test_one_model_in_two_threads_with_and_without_gradients(dispatch: Dispatch) -> None:
    run = dispatch()
    _in_threads([(run.model, expected())] * 2)
    _in_threads([(run.model, expected())] * 2, with_grad=True)


def _in_threads(work: list[tuple[nn.Module, torch.Tensor]], *, with_grad: bool = False) -> None:
    wrong: list[object] = []

    def go(at: int) -> None:
        model, answer = work[at]
        try:
            with torch.set_grad_enabled(with_grad and at == 1):
                wrong.extend(at for _ in range(5) if not torch.equal(model(token_ids()), answer))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=go, args=(at,), daemon=True) for at in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_gradients_of_inputs_through_frozen_weights(dispatch: Dispatch) -> None:
    run, twin = dispatch(change=lambda net: net.requires_grad_(False)), make_net().requires_grad_(False)
    grads: list[torch.Tensor] = []
    for net in (run.model, twin):
        x = torch.ones(2, 5, 16, requires_grad=True)
        y = x
        for block in net.blocks:
            y = block(y)
        y.square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_gradients_of_weights(dispatch: Dispatch) -> None:
    run, twin = dispatch(), make_net()
    for net in (run.model, twin):
        net(token_ids()).square().mean().backward()
    named = dict(run.model.named_parameters())
    for name, parameter in twin.named_parameters():
        grad = named[name].grad
        assert grad is not None
        torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_exception_in_a_forward(dispatch: Dispatch, error: BaseException) -> None:
    run = dispatch()
    with torch.no_grad():
        run.model.blocks[2].error = error
        for _ in range(3):
            with pytest.raises(type(error)):
                run.model(token_ids())
        run.model.blocks[2].error = None
        assert torch.equal(run.model(token_ids()), expected())
    assert "Absent" in repr(run.model.blocks[2].scale)
    waits = run.stats()
    with torch.no_grad():
        run.model(token_ids())
    assert run.stats().since(waits).fetches <= 2  # those of the convolution: no slot is lost


def test_forward_is_nobodys_but_torchs(dispatch: Dispatch) -> None:
    run = dispatch()
    assert not any("forward" in vars(module) for module in run.model.modules())
    assert all(type(module._parameters) is dict for module in run.model.modules())


@pytest.mark.parametrize(
    "inside", [lambda x: x, lambda x: (x, None), lambda x: {"deep": [x[2:]]}], ids=["alone", "tuple", "dict"]
)
def test_a_weight_that_a_block_returns_is_the_callers(
    dispatch: Dispatch, inside: Callable[[torch.Tensor], object]
) -> None:
    run = dispatch()
    block = run.model.blocks[0]
    block.forward = lambda x: inside(block.scale)  # type: ignore[method-assign, assignment, return-value]
    with torch.no_grad():
        kept = block(torch.ones(1))
        before = copy.deepcopy(kept)
        for other in (1, 2, 3):
            run.model.blocks[other](torch.ones(1, 16))
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sparse", "vmap"])
def test_outputs_without_a_storage(dispatch: Dispatch, kind: str) -> None:
    run, x = dispatch(), torch.ones(3, 1, 16)
    block = run.model.blocks[0]
    with torch.no_grad():
        plain = block(x)
        if kind == "vmap":
            assert torch.equal(torch.func.vmap(block)(x), plain)
            return
        handle = block.register_forward_hook(lambda module, args, output: output.to_sparse(), prepend=True)
        assert torch.equal(block(x).to_dense(), plain)
        handle.remove()


@pytest.mark.parametrize("copied", ["deepcopy", "torch.save"])
def test_copies_are_refused_with_the_way_out(dispatch: Dispatch, copied: str) -> None:
    run = dispatch()
    with assert_raises(accel.errors.StreamError, where=r"blocks\.0", fix="(save_model|dispatch_model)"):
        copy.deepcopy(run.model) if copied == "deepcopy" else torch.save(run.model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda net: torch.save(net, io.BytesIO())])
def test_copies_of_blocks_without_weights_of_their_own_are_refused_too(copied: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))  # hooks are copied before weights
    wanted = assert_raises(accel.errors.StreamError, where="^0$", fix="save_model|dispatch_model")
    with accel.cpu_offload(net, "cpu:0") as run, wanted:
        copied(run.model)
    assert torch.equal(copy.deepcopy(net)[0][0].weight, net[0][0].weight)


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_a_state_dict_for_absent_weights_is_refused_before_any_is_loaded(
    dispatch: Dispatch, options: dict[str, bool]
) -> None:
    run = dispatch()
    other = make_net(1).state_dict()
    with assert_raises(accel.errors.StreamError, where=r"load_state_dict, .*blocks\.0", fix=r"run\.close\(\)"):
        run.model.load_state_dict(other, **options)
    with torch.no_grad():
        assert torch.equal(run.model(token_ids()), expected())
    run.close()
    if run.device_map.home["blocks.0"] == "cpu":
        run.model.load_state_dict(other)
        with torch.no_grad():
            assert torch.equal(run.model(token_ids()), expected(1))


def test_changes_in_place_are_refused(dispatch: Dispatch) -> None:
    run = dispatch()
    with torch.no_grad(), assert_raises(accel.errors.StreamError, problem="in place"):
        run.model.blocks[0].scale.add_(1)


def test_other_data_is_refused_and_the_same_is_not(dispatch: Dispatch) -> None:
    run = dispatch()
    weight = run.model.blocks[0].up.weight
    for values in (torch.zeros(weight.shape), weight.data * 2, run.model.blocks[1].up.weight):
        with assert_raises(
            accel.errors.StreamError, problem="in place", got=r"an assignment to \.data", where=r"blocks\.0\.up"
        ):
            weight.data = values
    weight.data = weight.data
    with torch.no_grad():
        assert torch.equal(run.model.cpu().float()(token_ids()), expected())


def test_a_block_that_changes_its_weights_is_an_error_once(dispatch: Dispatch) -> None:
    run = dispatch()
    block = run.model.blocks[0]
    handle = block.up.register_forward_pre_hook(lambda module, args: (module.bias.add_(1), None)[1])
    with torch.no_grad():
        with assert_raises(accel.errors.StreamError, problem="changed its own weights"):
            block(torch.ones(1, 16))
        handle.remove()
        assert torch.equal(run.model(token_ids()), expected())


def test_a_weight_that_was_replaced_is_an_error(dispatch: Dispatch) -> None:
    run = dispatch()
    run.model.blocks[1].to(torch.float32)  # as it is
    for change in (lambda: run.model.blocks[1].to(torch.float64), lambda: run.model.to_empty(device="cpu")):
        with assert_raises(accel.errors.StreamError, problem="cannot be moved or cast"):
            change()
    assert run.model.blocks[1].scale.double().dtype == torch.float64
    run.model.blocks[1].load_state_dict(make_net(1).blocks[1].state_dict(), assign=True)
    with torch.no_grad(), assert_raises(accel.errors.StreamError, problem="replaced"):
        run.model(token_ids())


def test_weights_that_were_added_later_train(dispatch: Dispatch) -> None:
    """As LoRA does: a frozen weight inside of a module that came after it."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.low = nn.Parameter(torch.full((base.in_features, 2), 0.1))
            self.high = nn.Parameter(torch.full((2, base.out_features), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.low @ self.high

    run, twin = dispatch(change=lambda net: net.requires_grad_(False)), make_net().requires_grad_(False)
    results: list[list[torch.Tensor]] = []
    for net in (run.model, twin):
        for block in net.blocks:
            block.up = Adapter(block.up)  # type: ignore[assignment]
        trained = [each for each in net.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(2):
            net(token_ids()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(trained)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_a_closed_model_says_so_or_is_whole(dispatch: Dispatch, files: Path) -> None:
    run = dispatch()
    homes = set(run.device_map.home.values())
    with torch.no_grad():
        run.model(token_ids())
        run.close()
        run.close()
        if homes & {"cpu", "mmap"}:
            assert torch.equal(run.model(token_ids()), expected())
            assert not any("Absent" in repr(each) for each in run.model.parameters())
            return
        with assert_raises(accel.errors.StreamError, problem="closed"):
            run.model(token_ids())
        again = dispatch_model(run.model, run.device_map, source=files / "0.safetensors")
        with again:
            assert torch.equal(again.model(token_ids()), expected())
