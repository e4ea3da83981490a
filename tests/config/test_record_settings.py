# SPDX-License-Identifier: Apache-2.0
"""Settings that are records: one text for flags and variables, tables in files, and what is wrong in them."""

from __future__ import annotations

from typing import get_args

import msgspec
from catching import assert_raises
from configs import to_text
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows

import accel
from accel import Compile
from accel.config import ConfigFile, LaunchConfig, decode, encode, resolve
from accel.errors import ConfigError
from accel.formats import CompileMode
from accel.parallel import Plan
from accel.precision import Fp8, Precision
from accel.topology import ContextMethod, TensorStyle, WireDtype

relaxed = settings(deadline=None, max_examples=share(0.6))
PATTERNS = st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8), max_size=3).map(tuple)
PLANS = st.builds(
    Plan,
    tensor=st.just("model") | st.dictionaries(st.text(max_size=8), st.sampled_from(get_args(TensorStyle)), max_size=2),
    overlap=st.booleans(),
    context=st.sampled_from(get_args(ContextMethod)),
    stages=st.none() | st.lists(PATTERNS, max_size=2).map(tuple),
    micro_batches=st.none() | st.integers(1, 9),
    units=st.just("auto") | PATTERNS | st.integers(1, 10**9),
    ignored=PATTERNS,
    reshard_after_forward=st.none() | st.booleans() | st.integers(1, 8),
    gather_dtype=st.sampled_from(get_args(WireDtype)),
    offload=st.booleans(),
)
COMPILATIONS = st.builds(
    Compile,
    regions=st.sampled_from(["whole", "repeated"]),
    backend=st.sampled_from(["inductor", "aot_eager"]),
    mode=st.none() | st.sampled_from(get_args(CompileMode)),
    dynamic=st.none() | st.booleans(),
)
PRECISIONS = st.sampled_from(
    [
        Precision(compute="bf16", fp32_modules=("head", "*.router"), outputs="fp32"),
        Precision(compute="bf16", fp8=Fp8(scaling="rowwise", skip=("head",))),
        Precision(compute="bf16", fp8=Fp8(backend="transformer_engine", margin=1, amax_history=16)),
        Precision(),
    ]
)


@relaxed
@given(plan=PLANS, compile_=COMPILATIONS, precision=PRECISIONS)
def test_what_a_script_can_say_a_flag_a_variable_and_a_file_can(plan, compile_, precision):
    config = LaunchConfig(plan=plan, compile=compile_, precision=precision)
    texts = {name: to_text(getattr(config, name)) for name in ("plan", "compile", "precision")}
    assert resolve(texts, {}).config == config
    assert resolve({}, {f"ACCEL_{name.upper()}": text for name, text in texts.items()}).config == config
    assert decode(encode(config)) == decode(encode(config, "accel.json"), "accel.json") == config
    table = {name: msgspec.to_builtins(getattr(config, name)) for name in texts}
    assert resolve({}, {}, ConfigFile(path="accel.toml", values=table)).config == config


def test_pairs_name_fields_of_records_inside_and_entries_of_lists_and_mappings():
    flags = {
        "plan": "units=Block, units=Head,tensor.layers.*.up=colwise,reshard_after_forward=false",
        "precision": "compute=bf16,fp8.backend=transformer_engine,fp8.margin=2",
        "compile": "repeated",
    }
    config = resolve(flags, {}).config
    assert config.plan == Plan(units=("Block", "Head"), tensor={"layers.*.up": "colwise"}, reshard_after_forward=False)
    assert config.precision == Precision(compute="bf16", fp8=Fp8(backend="transformer_engine", margin=2))
    assert accel.single(compile=config.compile).settings.compile == Compile(regions="repeated")
    assert to_text(Plan(units=1000, offload=True)) == "units=1000,offload=true"
    assert to_text(Plan(stages=(("a",), ("b",)))) == '{"stages":[["a"],["b"]]}'


@rows(
    "name, text, fields",
    [
        ("plan", "unit=Block", {"problem": "unknown field", "got": "'unit'", "fix": "Did you mean `units`"}),
        ("plan", "offload", {"expected": "pairs such as units=Block,offload=true or auto", "got": "'offload'"}),
        ("plan", "offload=maybe", {"fix": r"\$\.offload"}),
        ("plan", "offload=true,offload=false", {"problem": "a field is named twice"}),
        ("plan", "offload=true,units", {"problem": "the text is not a pair", "got": "'units'"}),
        ("plan", "offload.more=true", {"problem": "no such field"}),
        ("plan", "{", {"problem": "malformed JSON"}),
        ("plan", '{"fp9": 1}', {"problem": "unknown field"}),
        (
            "precision",
            "compute=bf16,fp8.scale=rowwise",
            {"problem": "unknown field", "got": "'scale'", "fix": "Did you mean `scaling`"},
        ),
        ("precision", "compute=fp32,fp8.scaling=rowwise", {"problem": "fp8 layers need bf16 around them"}),
        ("compile", "whle", {"fix": "Did you mean `whole`"}),
        ("compile", "mode=fast", {"fix": "Invalid enum value 'fast'"}),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_flag(name, text, fields):
    with assert_raises(ConfigError, **fields) as caught:
        resolve({name: text}, {})
    assert f"--{name}" in str(caught.value)
    with assert_raises(accel.errors.EnvError, **fields):
        accel.read_env({f"ACCEL_{name.upper()}": text})
