# SPDX-License-Identifier: Apache-2.0
"""What a run under DeepSpeed may meet: layers that a window leaves out, and a configuration that contradicts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import begin_batch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import accel


class Fork(nn.Module):
    """Two layers, of which a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(x)


def left_out(under: accel.DistContext) -> dict[str, bool]:
    """Return whether windows leave alone the layer that they leave out, and move the other one as torch does."""
    with accel.seeding.seeded(under, 0):
        net, plain = Fork(), Fork()
    plain.load_state_dict(net.state_dict())
    model, optimizer = accel.prepare(under, net, torch.optim.SGD(net.parameters(), lr=0.1))
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows = torch.linspace(-1, 1, 16).view(4, 4)
    untouched = alike = True
    for way, other in (("left", "right"), ("right", "left"), ("left", "right")):
        before = accel.get_state_dict(under, model, dst=None)
        state = accel.train_state(under, accumulation=2)
        for _ in range(2):
            state = begin_batch(under, state)
            with accel.accumulate(under, state, model):
                loss = model(rows[under.rank :: 2], way).square().mean()
                state = accel.backward(under, loss, state, weight=2.0)
        _ = accel.optimizer_step(under, optimizer, state)
        by_hand.zero_grad()
        plain(rows, way).square().mean().backward()
        by_hand.step()
        after = accel.get_state_dict(under, model, dst=None)
        untouched &= all(torch.equal(each, before[name]) for name, each in after.items() if other in name)
        alike &= all(torch.allclose(each, after[name], atol=1e-6) for name, each in plain.state_dict().items())
    return {"untouched": untouched, "alike": alike}


def micro_batches(ctx: accel.DistContext, run: Callable[[accel.DistContext], dict[str, Any]]) -> dict[str, Any]:
    """Return what a loop of 2 micro-batches a step gets from JSONs that say 2 and 4, and from a context that says 2."""

    def under(steps: int, **settings: Any) -> accel.DistContext:
        config = accel.engines.deepspeed.read_deepspeed(
            {"gradient_accumulation_steps": steps, "zero_optimization": {"stage": 2}}
        )
        return accel.replace(ctx, strategy="deepspeed", deepspeed=config, **settings)

    found: dict[str, Any] = {"2": run(under(2))["weights"]}
    for name, settings in (("4", {}), ("4 in a context of 2", {"accumulation": 2})):
        try:
            _ = run(under(4, **settings))
        except accel.errors.ConfigError as error:
            found[name] = f"{error.where}: {error.got}"
    return found


# settings by a name: what DeepSpeed documents that arranges weights, gradients or their exchange otherwise
_EVERYWHERE: dict[str, dict[str, Any]] = {
    "contiguous_gradients": {"contiguous_gradients": False},
    "reduce_scatter": {"reduce_scatter": False},
    "small buckets": {"reduce_bucket_size": 10, "allgather_bucket_size": 4},
    "round_robin_gradients": {"round_robin_gradients": True},
    "parameter_alignment": {"parameter_alignment": True},
    "offload": {"round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}},
}
_FIRST_TWO: dict[str, dict[str, Any]] = {
    "both orders": {"round_robin_gradients": True, "parameter_alignment": True},
    "use_multi_rank_bucket_allreduce": {"use_multi_rank_bucket_allreduce": False},
    "allgather_partitions": {"allgather_partitions": False},
    "elastic_checkpoint": {"elastic_checkpoint": True},
    "ignore_unused_parameters": {"ignore_unused_parameters": False},
}
_SECOND: dict[str, dict[str, Any]] = {"overlap_comm": {"overlap_comm": True, "reduce_bucket_size": 10}}
_THIRD: dict[str, dict[str, Any]] = {
    "sub_group_size": {"sub_group_size": 20},
    "sub_group_size, offload": {"sub_group_size": 20, "offload_optimizer": {"device": "cpu", "pipeline_read": True}},
    "offload_param": {"offload_param": {"device": "cpu"}},
    "persistence": {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0},
    "all persist": {"stage3_param_persistence_threshold": 1000},
    "reuse": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 4},
    "stage3_use_all_reduce_for_fetch_params": {"stage3_use_all_reduce_for_fetch_params": True},
    "stage3_allgather_sequential": {"stage3_allgather_sequential": True},
    "zero_hpz_partition_size": {"zero_hpz_partition_size": 2},
    "memory_efficient_linear": {"memory_efficient_linear": False},
    "override_module_apply": {"override_module_apply": False},
}
_TOP: dict[str, dict[str, Any]] = {
    "prescale_gradients": {"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}},
    "disable_allgather": {"disable_allgather": True},
    "hybrid_engine": {"hybrid_engine": {"enabled": False}},
}
_TOP_FIRST_TWO: dict[str, dict[str, Any]] = {
    "gradient_predivide_factor": {"gradient_predivide_factor": 2.0, "zero_optimization": {"reduce_scatter": False}},
}


def layouts() -> dict[str, dict[str, Any]]:
    """JSONs for each stage, by its number and what they set."""
    found: dict[str, dict[str, Any]] = {}
    for stage in (1, 2, 3):
        inner = _EVERYWHERE | (_THIRD if stage == 3 else _FIRST_TWO) | (_SECOND if stage == 2 else {})
        whole = _TOP | (_TOP_FIRST_TWO if stage < 3 else {})
        for name, zero in {"plain": {}, **inner}.items():
            found[f"{stage} {name}"] = {"zero_optimization": {"stage": stage, **zero}}
        for name, asked in whole.items():
            zero = asked.get("zero_optimization", {})
            found[f"{stage} {name}"] = asked | {"zero_optimization": {"stage": stage, **zero}}
    return found


class Uneven(nn.Module):
    """Weights of sizes that no number of ranks divides, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.third, self.last = nn.Linear(3, 9, bias=False), nn.Linear(9, 1)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.third(self.second(self.norm(self.first(x))))))


class Scaled(Uneven):
    """The same with a trained weight of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def stepped(under: accel.DistContext, parts: Callable[[Uneven], list[dict[str, Any]]]) -> tuple[Uneven, Any, Any]:
    """Take two steps of SGD with momentum; return the bare net, the model and the optimizer."""
    with accel.seeding.seeded(under, 0):
        net = Uneven()
    model, optimizer = accel.prepare(under, net, torch.optim.SGD(parts(net), lr=0.1, momentum=0.9))
    state = accel.train_state(under)
    rows = torch.linspace(-1, 1, 40).view(8, 5)
    for turn in range(2):
        with accel.autocast(under):
            loss = model(rows.roll(turn, 0)[under.rank :: under.world_size]).float().square().mean()
        state = accel.backward(under, loss, begin_batch(under, state))
        state = accel.optimizer_step(under, optimizer, state)
    return net, model, optimizer


def one_group(net: Uneven) -> list[dict[str, Any]]:
    """All trained parameters in one group."""
    return [{"params": [each for each in net.parameters() if each.requires_grad]}]


def arranged(ctx: accel.DistContext) -> dict[str, dict[str, float]]:
    """Return how far, for each layout, whole weights are from the live ones, and the live ones from those of ddp."""
    from accel.engines.deepspeed import gathered

    found: dict[str, dict[str, float]] = {}
    straight = accel.get_state_dict(ctx, stepped(ctx, one_group)[1], dst=None)
    for name, asked in layouts().items():
        under = accel.replace(ctx, strategy="deepspeed", deepspeed=accel.engines.deepspeed.read_deepspeed(asked))
        net, model, _ = stepped(under, one_group)
        whole = accel.get_state_dict(under, model, dst=None)
        with gathered(under, net.parameters()):
            live = {key: each.detach().clone() for key, each in net.named_parameters()}
        found[name] = {
            "whole": max(float((whole[key] - each).abs().max()) for key, each in live.items()),
            "ddp": max(float((straight[key] - each).abs().max()) for key, each in live.items()),
        }
    return found


def _split(net: Scaled) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    trained = [each for each in net.parameters() if each.requires_grad]
    wide = [each for each in trained if each.dim() > 1]
    return wide, [each for each in trained if each.dim() <= 1], list(net.frozen.parameters())


def _two(net: Scaled) -> list[dict[str, Any]]:
    wide, narrow, _ = _split(net)
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]


def _three(net: Scaled) -> list[dict[str, Any]]:
    wide, narrow, _ = _split(net)
    return [
        {"params": [net.scale]},
        {"params": wide, "lr": 3e-3},
        {"params": [each for each in narrow if each is not net.scale]},
    ]


def _frozen_beside(net: Scaled) -> list[dict[str, Any]]:
    return [{"params": _split(net)[2]}, *_two(net)]


def _frozen_within(net: Scaled) -> list[dict[str, Any]]:
    weight, bias = _split(net)[2]
    first, second = _two(net)
    return [first | {"params": [weight, *first["params"]]}, second | {"params": [*second["params"], bias]}]


def _of_other_kinds(net: Scaled) -> list[dict[str, Any]]:
    first, second = _two(net)
    return [first, second | {"amsgrad": True}]


def grouped(ctx: accel.DistContext, out: Path) -> dict[str, float]:
    """Return how far a run that is saved and goes on elsewhere ends from one of ddp, by groups and stages."""

    def objects(under: accel.DistContext, parts: Any) -> dict[str, Any]:
        with accel.seeding.seeded(under, 0):
            net = Scaled()
        adam = torch.optim.AdamW(parts(net), lr=1e-2)
        rates = [lambda step: 0.9**step for _ in adam.param_groups]
        model, optimizer, scheduler = accel.prepare(under, net, adam, LambdaLR(adam, rates))
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": accel.train_state(under)}

    def go(under: accel.DistContext, items: dict[str, Any], steps: int) -> dict[str, Any]:
        state = accel.train_state(under, scaler=items["state"].scaler)
        rows = torch.linspace(-1, 1, 40).view(8, 5)
        for turn in range(steps):
            loss = items["model"](rows.roll(turn, 0)[under.rank :: under.world_size]).square().mean()
            state = accel.backward(under, loss, begin_batch(under, state))
            state = accel.optimizer_step(under, items["optimizer"], state, scheduler=items["scheduler"])
        return items

    stages = {
        stage: accel.replace(ctx, strategy="deepspeed", deepspeed=accel.engines.deepspeed.DeepSpeed(stage=stage))
        for stage in (1, 2, 3)
    }
    found: dict[str, float] = {}
    for parts in (_two, _three, _frozen_beside, _frozen_within, _of_other_kinds):
        name = parts.__name__
        straight = accel.get_state_dict(ctx, go(ctx, go(ctx, objects(ctx, parts), 2), 2)["model"], dst=None)
        for stage, under in {0: ctx, **stages}.items():
            accel.save_state(under, out / f"{name} {stage}", go(under, objects(under, parts), 2), step=1)
        for source, goal in ((1, 1), (2, 2), (3, 3), (1, 0), (0, 3)):
            under = stages.get(goal, ctx)
            items = objects(under, parts)
            items |= accel.load_state(under, out / f"{name} {source}", items)
            whole = accel.get_state_dict(under, go(under, items, 2)["model"], dst=None)
            apart = (float((each - straight[key]).abs().max()) for key, each in whole.items())
            found[f"{name} {source} to {goal}"] = max(apart)
    return found
