# SPDX-License-Identifier: Apache-2.0
"""Whose value holds: the laws of `resolve`, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from catching import assert_raises
from configs import FIELDS, VALUES, Source, by_name, configs, some_values, to_text
from hypothesis import assume, given, strategies as st
from tables import rows

from accel.config import ConfigFile, LaunchConfig, resolve
from accel.config._schema import from_plain, from_text
from accel.errors import ConfigError, EnvError


def spelled(values: dict[str, Any]) -> dict[str, str]:
    return {name: to_text(value) for name, value in values.items()}


def variables(values: dict[str, Any]) -> dict[str, str]:
    return {by_name(name).variable: text for name, text in spelled(values).items()}


@given(flags=some_values(), environ=some_values(), file=some_values(), noise=st.dictionaries(st.text(), st.text()))
def test_the_strongest_source_that_says_anything_holds(
    flags: dict[str, Any], environ: dict[str, Any], file: dict[str, Any], noise: dict[str, str]
) -> None:
    assume(not any(name.startswith("ACCEL_") for name in noise))
    environ = {name: value for name, value in environ.items() if value != ""}  # an empty variable says nothing
    flags = {name: value for name, value in flags.items() if to_text(value).strip() == to_text(value)}
    environ = {name: value for name, value in environ.items() if to_text(value).strip() == to_text(value)}
    expected = {field.name: (field.default, Source("default")) for field in FIELDS}
    expected |= {name: (value, Source("file", "a.toml")) for name, value in file.items()}
    expected |= {name: (value, Source("environment", by_name(name).variable)) for name, value in environ.items()}
    expected |= {name: (value, Source("flag", by_name(name).flag)) for name, value in flags.items()}
    values = {name: value for name, (value, _) in expected.items()}
    try:
        config = LaunchConfig(**values)
    except ConfigError:  # fields that contradict each other, whoever set them
        with pytest.raises(ConfigError):
            resolve(spelled(flags), variables(environ) | noise, ConfigFile(path="a.toml", values=file))
        return
    resolved = resolve(spelled(flags), variables(environ) | noise, ConfigFile(path="a.toml", values=file))
    assert resolved.config == config
    assert resolved.sources == {name: source for name, (_, source) in expected.items()}


@given(configs())
def test_a_default_that_is_given_is_given(config: LaunchConfig) -> None:
    file = ConfigFile(path="a.toml", values={field.name: getattr(config, field.name) for field in FIELDS})
    defaults = {field.name: to_text(field.default) for field in FIELDS}
    resolved = resolve(defaults, {}, file)
    assert resolved.config == LaunchConfig()
    assert {source.kind for source in resolved.sources.values()} == {"flag"}


@given(st.data(), st.sampled_from(sorted(VALUES)))
def test_text_and_value_are_the_same_value(data: st.DataObject, name: str) -> None:
    field, value = by_name(name), data.draw(VALUES[name])
    assert from_plain(field, value, where="here") == value
    text = to_text(value)
    assert from_text(field, f" {text} ", where="here") == (text.strip() if name == "log_dir" else value)


def test_a_record_made_in_python_is_checked_too() -> None:
    assert LaunchConfig(gpu_ids=[0, 1], timeout_s=5) == LaunchConfig(gpu_ids=(0, 1), timeout_s=5.0)  # type: ignore[arg-type]
    with assert_raises(ConfigError, where=r"LaunchConfig\.nproc_per_node"):
        LaunchConfig(nproc_per_node="two")  # type: ignore[arg-type]
    with assert_raises(ConfigError, where=r"LaunchConfig\.gpu_ids and LaunchConfig\.device"):
        LaunchConfig(gpu_ids=(0,), device="cpu")


def test_every_field_is_described_and_has_names_of_its_own() -> None:
    for field in FIELDS:
        assert field.doc.endswith("."), field.name
        assert field.expects
        assert set(field.choices) <= {"auto", *map(str, get_choices(field.name))}
    for names in ([field.flag for field in FIELDS], [field.variable for field in FIELDS]):
        assert len(set(names)) == len(FIELDS)


def get_choices(name: str) -> list[str]:
    field = by_name(name)
    return [choice for choice in field.choices if from_text(field, choice, where="here") == choice]


@rows(
    "flags, environ, file, told",
    [
        ({"nproc_per_node": "0"}, {}, {}, "an integer from 1 to 4096 or auto, got '0' - at --nproc-per-node"),
        ({"nproc_per_node": "9" * 5000}, {}, {}, "an integer from 1 to 4096 or auto, got '9999"),
        ({"nproc_per_nod": "1"}, {}, {}, "Did you mean `nproc_per_node`?"),
        ({"timeout_s": "nan"}, {}, {}, "a number above 0"),
        ({"timeout_s": "inf"}, {}, {}, "a number above 0"),
        ({"gpu_ids": "0,,1"}, {}, {}, "a list of integers such as 0,1 or all, got '0,,1' - at --gpu-ids"),
        ({"gpu_ids": "1,1"}, {}, {}, "a GPU is named twice: got 1,1 - at --gpu-ids"),
        ({"gpu_ids": "0", "nproc_per_node": "2"}, {}, {}, "Start at most 1, or name more GPUs"),
        ({"device": "cpu", "gpu_ids": "0"}, {}, {}, "at --gpu-ids and --device"),
        ({"device": "cpu"}, {"ACCEL_GPU_IDS": "0"}, {}, "at ACCEL_GPU_IDS and --device"),
        ({"nnodes": "0"}, {}, {}, "an integer from 1 to 4096 or a text such as 1:4, got '0' - at --nnodes"),
        ({"nnodes": "4:1"}, {}, {}, "more hosts at least than at most: got nnodes=4:1 - at --nnodes"),
        ({}, {}, {"nnodes": "1:"}, "got '1:' - at a.toml, key nnodes"),
        ({"node_rank": "1"}, {}, {}, "there is no such host: got node_rank=1, nnodes=1 - at --node-rank"),
        ({"node_rank": "2"}, {"ACCEL_NNODES": "2"}, {}, "Hosts count from 0 to 1"),
        ({"node_rank": "0", "nnodes": "1:2"}, {}, {}, "Leave node_rank out, or fix the number of hosts"),
        ({"rdzv_endpoint": "node0"}, {}, {}, "a text such as node0:29400, got 'node0' - at --rdzv-endpoint"),
        ({"rdzv_endpoint": "node0:0"}, {}, {}, "got 'node0:0'"),
        ({"accumulation": "0"}, {}, {}, "an integer from 1 to 1000000 or auto, got '0' - at --accumulation"),
        (
            {"strategy": "fdsp"},
            {},
            {},
            "one of ddp, deepspeed, fsdp or auto, got 'fdsp' - at --strategy. Did you mean `fsdp`?",
        ),
        ({"mesh": "dp:2"}, {}, {}, "a text such as dp=2,tp=2 or dp=-1,tp=8, got 'dp:2' - at --mesh"),
        ({"mesh": "dp=2,dp=2"}, {}, {}, "an axis is repeated: got 'dp=2,dp=2' - at --mesh. Name dp once."),
        ({}, {"ACCEL_MESH": "stage=2"}, {}, "unknown axis of a mesh: got 'stage' in 'stage=2' - at ACCEL_MESH."),
        ({}, {}, {"mesh": "dp=-1,tp=-1"}, "two sizes are -1: got 'dp=-1,tp=-1' - at a.toml, key mesh"),
        (
            {"mesh": "dp=2", "nnodes": "1:2"},
            {},
            {},
            "the mesh fits one number of hosts only: got mesh=dp=2, nnodes=1:2",
        ),
        ({"max_restarts": "-1"}, {}, {}, "an integer from 0 to 100000, got '-1'"),
        ({"device": "cpu", "backend": "nccl"}, {}, {}, "nccl carries messages between GPUs only"),
        ({"precision": "fb16"}, {}, {}, "Did you mean `fp16`?"),
        ({"precision": "bf16"}, {"ACCEL_PRECISION": "fp17"}, {}, "got 'fp17' - at ACCEL_PRECISION"),
        ({}, {"ACCEL_PRECISON": "bf16"}, {}, "Did you mean `ACCEL_PRECISION`?"),
        ({}, {"ACCEL_QUIET": "perhaps"}, {}, "true or false, got 'perhaps' - at ACCEL_QUIET"),
        ({}, {}, {"quiet": 1}, "true or false, got 1 - at a.toml, key quiet"),
        ({}, {}, {"nproc_per_node": True}, "got True - at a.toml, key nproc_per_node"),
        ({}, {}, {"nproc_per_node": 1.5}, "got 1.5 - at a.toml, key nproc_per_node"),
        ({}, {}, {"timeout_s": "5"}, "got '5' - at a.toml, key timeout_s. Write it without quotes: 5."),
        ({}, {}, {"gpu_ids": []}, "got [] - at a.toml, key gpu_ids"),
        ({}, {}, {"precison": "bf16"}, "unknown key: got 'precison' - at a.toml. Did you mean `precision`?"),
        ({}, {}, {"device": {"name": "cpu"}}, "a text such as auto, cpu, cuda, cuda:1"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(
    flags: dict[str, str], environ: dict[str, str], file: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, EnvError)) as caught:
        resolve(flags, environ, ConfigFile(path="a.toml", values=file))
    assert told in str(caught.value)
    assert len(str(caught.value)) < 400
