# SPDX-License-Identifier: Apache-2.0
"""Cost of a streamed block whose weights are ready, inside a tiny Llama: processor time beyond the whole model's.

    OMP_NUM_THREADS=1 python tests/benchmarks/big_model_overhead.py --rounds 200

Neither bytes nor arithmetic count at this size. Ways alternate, pass by pass, in one process: weights all resident;
the same with hooks of torch's that do nothing; streamed with a slot for each block, so that nothing is fetched; and
with 2 slots from host memory, so that each call wakes the feeder and each block is fetched anew. Printed are
microseconds a block, of all but the first over the whole model: of the calling thread, and of the process, which adds
the feeder's; and how often the calling thread gave its processor away. `--profile WAY` prints where it spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import pstats
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accel.bigmodel import DeviceMap, describe
from accel.bigmodel.run import dispatch_model

LAYERS = 16


def llama() -> nn.Module:
    """A Llama of which a layer takes as little as torch's calls take."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=LAYERS, **sizes)).eval()


def streamed(model: nn.Module, slots: int, opened: ExitStack) -> nn.Module:
    """Stream the layers of a model from host memory."""
    skeleton = describe(model)
    home = {each.name: "cpu" if ".layers." in each.name else "cpu:0" for each in skeleton.segments}
    device_map = DeviceMap(skeleton=skeleton, home=home, runs=dict.fromkeys(home, "cpu:0"), slots=slots)
    return opened.enter_context(dispatch_model(model, device_map)).model


def hooked(model: Any) -> nn.Module:
    """Give each layer two hooks that do nothing: what torch takes for them."""
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: None)
        layer.register_forward_hook(lambda module, args, output: None, always_call=True)
    return model


def offloaded(model: nn.Module) -> nn.Module:
    """Offload all by Accelerate."""
    accelerate: Any = importlib.import_module("accelerate")
    return accelerate.cpu_offload(model, torch.device("cpu"))


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", choices=["ready", "fetched"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.tensor([[1, 2, 3]])
    with ExitStack() as opened, torch.no_grad():
        ways = {
            "whole": llama(),
            "empty hooks": hooked(llama()),
            "ready": streamed(llama(), LAYERS, opened),
            "fetched": streamed(llama(), 2, opened),
        }
        if importlib.util.find_spec("accelerate") is not None and args.profile is None:
            ways["Accelerate"] = offloaded(llama())
        for model in ways.values():
            for _ in range(3):
                model(ids)
        if args.profile is not None:
            _profile(lambda: ways[args.profile](ids), args.rounds)
            return
        taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, model in ways.items():
                switches = _switches()
                thread, process = time.thread_time(), time.process_time()
                model(ids)
                times = time.thread_time() - thread, time.process_time() - process
                taken[name].append((*times, _switches() - switches))
    print("us a block          thread: least, median   process: least, median   switches of the thread")
    base = [0.0] * 4
    for name, rows in taken.items():
        found = [pick(row[at] for row in rows) / LAYERS * 1e6 for at in (0, 1) for pick in (min, statistics.median)]
        cells = [mine - least for mine, least in zip(found, base, strict=True)]
        base = base if any(base) else found
        switches = statistics.mean(row[2] for row in rows) / LAYERS
        print(f"{name:20s} {cells[0]:13.1f} {cells[1]:7.1f} {cells[2]:16.1f} {cells[3]:7.1f} {switches:15.2f}")


def _switches() -> int:
    """Return how often the calling thread has given its processor away."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


def _profile(call: Callable[[], object], rounds: int) -> None:
    with cProfile.Profile() as profile:
        for _ in range(rounds):
            call()
    stats = pstats.Stats(profile).sort_stats("tottime")
    stats.print_stats(r"bigmodel|_queue|threading|lock", 25)


if __name__ == "__main__":
    main()
