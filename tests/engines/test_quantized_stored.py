# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of quantized weights that state another format, or lack what the model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_nets import Net, TensorSource, make_net, token_ids

import accel

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
Config = accel.Bitsandbytes | accel.Torchao


@pytest.mark.parametrize("config", [accel.Bitsandbytes(), accel.Bitsandbytes(bits=8), accel.Torchao()], ids=str)
def test_a_missing_weight_of_a_model_with_values_is_quantized(tmp_path: Path, config: Config) -> None:
    _ = pytest.importorskip("torchao" if isinstance(config, accel.Torchao) else "bitsandbytes")
    ctx, name = accel.single("cpu"), "blocks.0.up.weight"
    full = accel.save_model(ctx, make_net(), tmp_path)
    part = {key: each for key, each in make_net().state_dict().items() if key != name}
    expected = accel.load_quantized(ctx, accel.init_empty_weights(Net).eval(), full, config=config)
    model = accel.load_quantized(ctx, make_net(), TensorSource(part), config=config, allow_missing=name)
    with torch.no_grad():
        assert torch.equal(model(token_ids()), expected(token_ids()))
    blank = accel.init_empty_weights(Net)
    assert (
        accel.load_quantized(ctx, blank, TensorSource(part), config=config, allow_missing=name)
        .get_parameter(name)
        .is_meta
    )
