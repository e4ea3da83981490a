# SPDX-License-Identifier: Apache-2.0
"""A script: a run on the stand-in device, whose operations compute on the host, ends with the weights of the CPU.

Every operation of the device's dispatch key runs in one fallback, on host tensors kept by storage. Its tensors have no
addresses, by which a checkpoint tells shared ones, and no random streams: a run on it cannot be saved.
"""

from __future__ import annotations

from typing import Any

import torch
from standin_device import Standin
from torch import nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

HOSTS: dict[int, tuple[torch.Tensor, Any]] = {}  # with the storages, so that no address is used twice


def on_device(host: torch.Tensor) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor(tuple(host.shape), host.dtype)  # type: ignore[attr-defined]
    storage = made.untyped_storage()
    HOSTS[storage._cdata] = (host, storage)
    return made


def host_of(each: Any) -> Any:
    if isinstance(each, torch.Tensor) and each.device.type == "standin":
        return HOSTS[each.untyped_storage()._cdata][0]
    return torch.device("cpu") if isinstance(each, torch.device) else each


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on host tensors; what it returns is an argument, or new on the device."""
    if op is torch.ops.aten._copy_from.default:
        host_of(args[1]).copy_(host_of(args[0]))
        return args[1]
    live = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    hosts: Any = tree_map(host_of, (args, kwargs))
    out = op(*hosts[0], **hosts[1])
    for each in live:
        if each.shape != host_of(each).shape:  # of an `out=` that was resized
            each.data = on_device(host_of(each))
    known = {id(host_of(each)): each for each in live}
    to_host = getattr(kwargs.get("device"), "type", None) == "cpu"
    return tree_map(
        lambda each: (
            known.get(id(each), each if to_host else on_device(each)) if isinstance(each, torch.Tensor) else each
        ),
        out,
    )


def train(device: str, precision: Any, updates: int) -> tuple[list[torch.Tensor], float]:
    import accel

    ctx = accel.single(device, precision=precision)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(rows), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    state = accel.train_state(ctx, seed=0, accumulation=2)
    while state.updates < updates:
        for batch in accel.batches(ctx, loader, state):
            assert batch.data[0].device == next(model.parameters()).device == ctx.device
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = model(batch.data[0].to(next(model.parameters()).dtype)).float().square().mean()
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
            if state.updates == updates:
                break
    assert state.grad_norm is not None
    return [each.detach().cpu().float() for each in model.parameters()], float(state.grad_norm)


def main() -> None:
    register: Any = vars(backend_registration)["_setup_privateuseone_for_python_backend"]
    register("standin", Standin())
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    import accel

    masters = accel.precision.Precision(params="bf16", master_weights="fp32")
    for precision, tolerance in (("fp32", 1e-6), (masters, 1e-2)):
        there, here = train("standin:0", precision, 6), train("cpu", precision, 6)
        torch.testing.assert_close(there, here, rtol=0, atol=tolerance)
    print("trained")


if __name__ == "__main__":
    main()
