# SPDX-License-Identifier: Apache-2.0
"""Configurations that Hypothesis makes up, from what the record says of itself."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from accel.alerts import AlertRule, Alerts
from accel.config import LaunchConfig
from accel.config._resolve import Source as Source
from accel.config._schema import Field as Field, to_text as to_text
from accel.config._settings import FIELDS as FIELDS, SETTINGS as SETTINGS, LogLevel
from accel.errors import ConfigError
from accel.formats import PrecisionName, StrategyName

COUNTS = st.integers(1, 99)
SECONDS = st.floats(min_value=0, max_value=1e9, exclude_min=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "nproc_per_node": COUNTS | st.just("auto"),
    "nnodes": COUNTS | st.tuples(COUNTS, COUNTS).map(lambda span: "{}:{}".format(*sorted(span))),
    "node_rank": st.just("auto") | st.integers(0, 4),
    "rdzv_endpoint": st.sampled_from(["", "node0:29400", "10.0.0.1:1", "[fe80::1]:65535"]),
    "rdzv_timeout_s": SECONDS,
    "rdzv_last_call_s": SECONDS,
    "rdzv_id": st.sampled_from(["", "job-17", "a/b:c"]),
    "role": st.sampled_from(["default", "trainer", "data.reader-2"]),
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3", "xpu"]),
    "gpu_ids": st.just("all") | st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple),
    "precision": st.sampled_from(["auto", *get_args(PrecisionName)]),
    "accumulation": st.just("auto") | st.integers(1, 1_000_000),
    "strategy": st.sampled_from(["auto", *get_args(StrategyName)]),
    "deepspeed": st.sampled_from(
        [
            "",
            "ds.json",
            "{}",
            '{"stage": 3, "offload_optimizer": {"device": "cpu"}, "settings": {"a b": [1, {"c": 0.5}]}}',
        ]
    ),
    "mesh": st.sampled_from(["", "dp=2,tp=2", "dp=-1", "dp_replicate=2,dp_shard=-1,tp=1"]),
    "backend": st.sampled_from(["auto", "gloo", "nccl", "mpi"]),
    "timeout_s": SECONDS | st.just("auto"),
    "log_level": st.sampled_from(get_args(LogLevel)),
    "alerts": st.sampled_from(
        [
            "none",
            Alerts(disk_full=0.5),
            Alerts(
                command=("a", "{title} of b"), webhook="https://a.b/c?d=1,2", rules=(AlertRule(metric="x", above=1.0),)
            ),
        ]
    ),
    "system": st.booleans(),
    "threads_per_process": COUNTS | st.just("auto"),
    "bind_cores": st.booleans(),
    "log_dir": TEXTS,
    "prefix": st.booleans(),
    "quiet": st.booleans(),
    "stop_grace_s": SECONDS,
    "max_restarts": st.integers(0, 100_000),
    "hang_timeout_s": SECONDS | st.just("never"),
    "slurm_options": st.sampled_from(["", "--partition=gpu --time=2:00:00", "--comment='a b'"]),
}


def by_name(name: str) -> Field:
    return next(field for field in FIELDS if field.name == name)


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    """Usable values for some of the fields."""
    names = draw(st.sets(st.sampled_from(sorted(VALUES))))
    return {name: draw(VALUES[name]) for name in sorted(names)}


@st.composite
def configs(draw: st.DrawFn) -> LaunchConfig:
    """Records whose fields do not contradict each other."""
    values = draw(some_values())
    try:
        return LaunchConfig(**values)
    except ConfigError:
        clashing = ("gpu_ids", "backend", "node_rank", "mesh", "deepspeed")
        return LaunchConfig(**{name: value for name, value in values.items() if name not in clashing})
