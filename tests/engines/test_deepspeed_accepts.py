# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed itself takes what a configuration settles to."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
from deepspeed_configs import FACTS, configs
from hypothesis import given, settings
from profiles import share

from accel.engines.deepspeed import DeepSpeed, RunFacts, resolve


@pytest.fixture(scope="module")
def checked() -> Any:
    """DeepSpeed's own check of its configuration, as one rank has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        return pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig


@pytest.mark.engine
@pytest.mark.slow
@given(configs(), FACTS.map(lambda facts: msgspec.structs.replace(facts, ranks=1)))
@settings(max_examples=share(0.8))
def test_deepspeed_takes_what_is_settled_and_means_the_same(checked: Any, c: DeepSpeed, f: RunFacts) -> None:
    resolved = resolve(c, f)
    taken = checked(resolved.settings)
    assert taken.train_batch_size == resolved.settings["train_batch_size"]
    assert int(taken.zero_optimization_stage) == c.stage
    assert taken.bfloat16_config.enabled is (f.precision.name == "bf16")
    assert taken.float16_config.enabled is (f.precision.name == "fp16")
    offloads = taken.zero_config.offload_optimizer
    assert (offloads is not None) is (c.offload_optimizer is not None)
    if c.leaf_modules:
        assert taken.zero_config.leaf_module.classes == list(c.leaf_modules)
