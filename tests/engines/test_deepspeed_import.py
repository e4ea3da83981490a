# SPDX-License-Identifier: Apache-2.0
"""Accelerate's section on DeepSpeed as a configuration of ours."""

from __future__ import annotations

from typing import Any

import pytest

from accel.config._accelerate_sections import translate_deepspeed
from accel.engines.deepspeed import DeepSpeed, Offload, RunFacts, resolve
from accel.engines.deepspeed._options import from_section


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, DeepSpeed()),
        ({"zero_stage": 0, "offload_optimizer_device": "none", "gradient_clipping": None}, DeepSpeed(stage=0)),
        (
            {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5},
            DeepSpeed(stage=3, offload_optimizer=Offload("cpu"), settings={"gradient_clipping": 0.5}),
        ),
        (
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/local"},
            DeepSpeed(stage=3, offload_parameters=Offload("nvme", "/local")),
        ),
        (
            {"zero_stage": 3, "moe_layer_cls_names": "Moe, Experts"},
            DeepSpeed(stage=3, leaf_modules=("Moe", "Experts")),
        ),
    ],
)
def test_a_section_becomes_a_record(section: dict[str, Any], expected: DeepSpeed) -> None:
    setting, left = translate_deepspeed(section)
    assert isinstance(setting, dict)
    assert from_section(setting, source="") == expected
    assert left == {}
    _ = resolve(expected, RunFacts())


def test_a_json_stands_for_itself_and_what_has_no_counterpart_names_the_way_out() -> None:
    section = {"config_file": "ds.json", "hostfile": "hosts", "zero3_init_flag": True}
    setting, left = translate_deepspeed(section | {"multinode_launcher": "standard"})
    assert setting == "ds.json"
    assert left == {
        "hostfile": "accel launch --hostfile",
        "zero3_init_flag": "build the model with accel.init_empty_weights in the script",
    }
