# SPDX-License-Identifier: Apache-2.0
"""Models on several devices: inputs go to the device of each segment once, outputs to that of the inputs.

Without GPUs, "meta" is a device that tensors can go to, and "cpu:0" is the host under another name.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.bigmodel.run._crossings import Arrivals, move_inputs

transformers = pytest.importorskip("transformers")


def on_devices(model: nn.Module, *devices: str, streamed: bool = False) -> accel.bigmodel.DeviceMap:
    """A map whose segments compute on the devices in turn; `streamed` ones are at home on the host."""
    skeleton = accel.bigmodel.describe(model)
    count = len(skeleton.segments)
    runs = {each.name: devices[at * len(devices) // count] for at, each in enumerate(skeleton.segments)}
    for group in skeleton.tied_segments():
        runs |= dict.fromkeys(group, runs[group[0]])
    movable = {each.name for each in skeleton.segments if each.moving and runs[each.name] != "cpu"}
    home = {name: "cpu" if streamed and name in movable else device for name, device in runs.items()}
    return accel.bigmodel.DeviceMap(skeleton=skeleton, home=home, runs=runs)


class Part(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, more: Any = None) -> torch.Tensor:
        self.seen.append((x, mask, more))
        return self.scale(x)


class Whole(nn.Module):
    """Parts on the second device compute nothing that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(4)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.parts[1](self.parts[0](x, mask=mask), mask=mask)
        _ = self.parts[3](self.parts[2](first, mask=mask, more={"deep": [mask]}), mask=mask)
        return {"first": first}


def test_inputs_go_to_the_device_of_each_segment_once() -> None:
    model = Whole()
    mask = torch.ones(2, 4)
    model.parts[2:].to("meta")
    with torch.no_grad(), ExitStack() as opened:
        move_inputs(model, on_devices(model, "cpu", "meta"), opened)
        found = model(torch.ones(2, 4), mask)
    assert found["first"].device.type == "cpu"
    seen = [part.seen[0] for part in model.parts]
    assert [(x.device.type, given.device.type) for x, given, _ in seen] == [("cpu", "cpu")] * 2 + [("meta", "meta")] * 2
    assert seen[0][1] is mask
    assert seen[2][1] is seen[3][1] is seen[2][2]["deep"][0]
    assert not any(part._forward_pre_hooks for part in model.parts)


def test_a_tensor_that_was_written_to_or_that_autograd_records_goes_again() -> None:
    arrivals = Arrivals(torch.device("meta"))
    mask = torch.ones(2)
    first = arrivals.take(mask)
    assert arrivals.take(mask) is first
    assert arrivals.take(first) is first
    _ = mask.add_(1)
    second = arrivals.take(mask)
    assert second is not first
    weight = torch.ones(2, requires_grad=True)
    assert arrivals.take(weight) is not arrivals.take(weight)
    assert arrivals.take(weight).grad_fn is not None
    with torch.inference_mode():
        inside = torch.ones(2)
        assert arrivals.take(inside).device.type == "meta"


@pytest.mark.parametrize(
    ("kind", "streamed"),
    [
        ("llama", True),
        ("t5", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", False), ("gpt2", True), ("t5", True))),
    ],
)
def test_models_generate_the_same_tokens_on_several_devices(kind: str, streamed: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=4, vocab_size=100, **sizes, **tokens)
        model: Any = transformers.LlamaForCausalLM(config).eval()
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=100, **tokens)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = transformers.T5Config(
            num_layers=2, d_model=32, d_kv=8, d_ff=48, num_heads=2, vocab_size=100, decoder_start_token_id=0, **tokens
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 100, (2, 6))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    device_map = on_devices(model, "cpu", "cpu:0", streamed=streamed)
    assert bool(device_map.order) == streamed
    with accel.dispatch_model(model, device_map) as run:
        assert torch.equal(run.model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_on_several_devices_is_not_pickled(streamed: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    x = torch.randn(2, 4)
    expected = model(x)
    with accel.dispatch_model(model, on_devices(model, "cpu:0", "cpu:1", streamed=streamed)):
        with assert_raises(accel.errors.StreamError, problem="cannot be pickled", fix=r"accel\.save_model"):
            pickle.dumps(model)
        if not streamed:
            assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(model(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
