# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of quantized weights that state another format, or lack what the model has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from quantized_nets import Net, TensorSource, make_net, token_ids
from torch.distributed.device_mesh import init_device_mesh

import accel
from accel.testing import simulate

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
Config = accel.engines.quantized.Bitsandbytes | accel.engines.quantized.Torchao


@pytest.mark.parametrize(
    "config",
    [
        accel.engines.quantized.Bitsandbytes(),
        accel.engines.quantized.Bitsandbytes(bits=8),
        accel.engines.quantized.Torchao(),
    ],
    ids=str,
)
def test_a_missing_weight_of_a_model_with_values_is_quantized(tmp_path: Path, config: Config) -> None:
    _ = pytest.importorskip("torchao" if isinstance(config, accel.engines.quantized.Torchao) else "bitsandbytes")
    ctx, name = accel.single("cpu"), "blocks.0.up.weight"
    full = accel.save_model(ctx, make_net(), tmp_path)
    part = {key: each for key, each in make_net().state_dict().items() if key != name}
    expected = accel.engines.quantized.load_quantized(ctx, accel.init_empty_weights(Net).eval(), full, config=config)
    model = accel.engines.quantized.load_quantized(
        ctx, make_net(), TensorSource(part), config=config, allow_missing=name
    )
    with torch.no_grad():
        assert torch.equal(model(token_ids()), expected(token_ids()))
    blank = accel.init_empty_weights(Net)
    assert (
        accel.engines.quantized.load_quantized(ctx, blank, TensorSource(part), config=config, allow_missing=name)
        .get_parameter(name)
        .is_meta
    )


def test_weights_of_another_format_are_refused() -> None:
    _ = pytest.importorskip("bitsandbytes")
    ctx, net = accel.single("cpu"), make_net()

    def stored(config: Config) -> dict[str, torch.Tensor]:
        source = TensorSource(net.state_dict())
        model = accel.engines.quantized.load_quantized(ctx, accel.init_empty_weights(Net), source, config=config)
        return accel.get_state_dict(ctx, model, dst=None)

    def refused(fields: dict[str, str], tensors: Mapping[str, torch.Tensor], config: Config) -> None:
        with assert_raises(accel.errors.CheckpointError, **fields):
            accel.engines.quantized.load_quantized(
                ctx, accel.init_empty_weights(Net), TensorSource(tensors), config=config
            )

    eight = accel.engines.quantized.Bitsandbytes(bits=8, skip="head")
    turing = {"blocks.0.up.weight_format": torch.tensor(2, dtype=torch.uint8)}
    refused({"problem": r"blocks\.0\.up\.weight is not stored by rows"}, {**stored(eight), **turing}, eight)
    four = accel.engines.quantized.Bitsandbytes(double=True, skip="head")
    packed, key = stored(four), "blocks.0.up.weight.quant_state.bitsandbytes__nf4"
    facts = json.loads(bytes(packed[key].tolist()))

    def told(**changes: Any) -> dict[str, torch.Tensor]:
        text = json.dumps(facts | changes).encode()
        return {**packed, key: torch.tensor(list(text), dtype=torch.uint8)}

    refused({"problem": r"up\.weight: expected shape \[128, 64\], got \[64, 128\]"}, told(shape=[64, 128]), four)
    refused({"problem": "not quantized by.*nested_blocksize=128"}, told(nested_blocksize=128), four)
    refused(
        {"problem": "bitsandbytes does not have this format", "got": "'int8'", "where": r"blocks\.0\.up"},
        told(dtype="int8"),
        four,
    )


@pytest.mark.parametrize(
    "config", [accel.engines.quantized.Bitsandbytes(skip="head"), accel.engines.quantized.Torchao(skip="head")], ids=str
)
def test_quantized_weights_are_not_divided(config: Config) -> None:
    _ = pytest.importorskip("torchao" if isinstance(config, accel.engines.quantized.Torchao) else "bitsandbytes")
    source = TensorSource(make_net().state_dict())

    def divide(ctx: accel.DistContext) -> None:
        model = accel.engines.quantized.load_quantized(
            accel.single("cpu"), accel.init_empty_weights(Net), source, config=config
        )
        with assert_raises(accel.errors.PrepareError, got=r"6 quantized: blocks\.0\.\w+\.weight", fix="ddp"):
            accel.prepare(accel.replace(ctx, strategy="fsdp"), model)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = accel.parallel.Plan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
        with assert_raises(accel.errors.PrepareError, got=r"6 quantized.*plan\.tensor"):
            accel.prepare(accel.replace(ctx, mesh=mesh), model, plan=plan)

        record = accel.engines.deepspeed.DeepSpeed(
            stage=3 if isinstance(config, accel.engines.quantized.Bitsandbytes) else 2
        )
        under = accel.replace(ctx, strategy="deepspeed", deepspeed=record)
        optimizer = torch.optim.AdamW(model.head.parameters())
        with assert_raises(accel.errors.PrepareError, got=r"stage \d, 6 weights such as blocks\.0", fix="ddp"):
            accel.prepare(under, model, optimizer)

    _ = simulate(divide, 2, default_group=True)
