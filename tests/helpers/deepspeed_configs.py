# SPDX-License-Identifier: Apache-2.0
"""Configurations of DeepSpeed and facts of a run that Hypothesis makes up."""

from __future__ import annotations

from hypothesis import strategies as st

from accel.engines.deepspeed import DeepSpeed, Offload, RunFacts
from accel.formats import precision

COUNTS = st.integers(1, 64)
FACTS = st.builds(
    RunFacts,
    ranks=COUNTS,
    precision=st.sampled_from([precision(name) for name in ("fp32", "tf32", "bf16", "fp16")]),
    rows=st.none() | COUNTS,
    accumulation=st.none() | COUNTS,
    max_norm=st.none() | st.floats(0.1, 10),
    hidden_size=st.none() | COUNTS,
    optimizer=st.sampled_from(["", "AdamW", "SGD"]),
)
BUCKETS = st.sampled_from(["default", "auto"]) | st.integers(0, 10**9)


@st.composite
def configs(draw: st.DrawFn) -> DeepSpeed:
    """A configuration that contradicts nothing."""
    stage = draw(st.sampled_from([0, 1, 2, 3]))
    offloads = st.none() | st.just("cpu") | st.just(Offload(pin_memory=False))
    disks = st.just(Offload("nvme", "/local"))
    third = BUCKETS if stage == 3 else st.sampled_from(["default", "auto"])
    return DeepSpeed(
        stage=stage,
        offload_optimizer=draw(offloads | disks if stage == 3 else offloads) if stage else None,
        offload_parameters=draw(offloads | disks) if stage == 3 else None,
        reduce_bucket=draw(BUCKETS.filter(lambda size: size != 0)),
        gather_bucket=draw(BUCKETS),
        prefetch_bucket=draw(third),
        persist_below=draw(third),
        overlap=draw(st.just("default") | st.booleans()),
        leaf_modules=draw(st.sampled_from([(), ("Experts",)])) if stage == 3 else (),
        settings=draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "train_batch_size": st.just("auto"),
                    "train_micro_batch_size_per_gpu": st.just("auto"),
                    "gradient_accumulation_steps": st.just("auto"),
                    "gradient_clipping": st.just("auto"),
                    "bf16": st.just({"enabled": "auto"}),
                    "fp16": st.just({"enabled": "auto", "loss_scale": 0}),
                    "aio": st.just({"block_size": 1048576}),
                    "steps_per_print": st.just(10),
                },
            )
        ),
    )
