# SPDX-License-Identifier: Apache-2.0
"""All ranks decide alike about a gradient that one of them has spoilt after the exchange, if some are sharded."""

from __future__ import annotations

import math

import pytest
import torch
from steps import ByState
from torch import nn
from torch.optim import SGD

import accel

NORMS = [1.0, 2.0, math.inf]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("spoilt", ["sharded", "replicated"])
def test_a_gradient_that_one_rank_spoils_is_seen_by_all(ranks, norm_type, bad, spoilt):
    def rank(ctx):
        models = {
            "sharded": accel.prepare_model(accel.replace(ctx, strategy="fsdp"), nn.Linear(4, 2)),
            "replicated": accel.prepare_model(ctx, nn.Linear(4, 2)),
        }
        optimizers = [SGD(model.parameters(), lr=0.1) for model in models.values()]
        run, stepped = ByState(ctx), []
        for spoils in (False, True, False):
            run.begin()
            with run.accumulate(*models.values()):
                loss = torch.stack([model(torch.ones(3, 4)).square().mean() for model in models.values()]).sum()
                run.backward(loss)
            if spoils and ctx.rank == 1:
                next(models[spoilt].parameters()).grad.mul_(bad)
            run.step(optimizers, nonfinite="skip", max_norm=1.0, norm_type=norm_type)
            stepped.append(run.stepped)
        return stepped

    assert ranks.run(rank, 2, default_group=True) == [[True, False, True]] * 2
