# SPDX-License-Identifier: Apache-2.0
"""Files of Accelerate: what they say in our words, what is left out, and YAML that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel import Compile
from accel.config import LaunchConfig
from accel.config._accelerate import import_accelerate
from accel.errors import ConfigError
from accel.parallel import Plan
from accel.precision import Fp8, Precision

INERT = """
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
main_process_ip: null
deepspeed_config: {}
"""
# Shapes that its versions have written: 0.11, one without precision, MPI (0.28), SageMaker (0.30), fp8 (0.34), FSDP.
V11 = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
fsdp_config: {}
mixed_precision: 'no'
num_processes: 1
use_cpu: false
"""
LEGACY = """
distributed_type: MULTI_GPU
fp16: true
num_processes: 2
"""
MPI = """
distributed_type: MULTI_CPU
ipex_config:
  ipex: true
main_process_ip: 127.0.0.1
main_process_port: 29500
mixed_precision: 'no'
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /home/ada/hosts
num_machines: 4
num_processes: 16
use_cpu: true
"""
SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: NO
mixed_precision: fp16
debug: false
ec2_instance_type: MINE
iam_role_name: ME
"""
FP8 = """
distributed_type: MULTI_GPU
fp8_config:
  amax_history_len: 1024
  override_linear_precision: (false, false, false)
gpu_ids: 0,3
mixed_precision: fp8
num_processes: 2
"""
FSDP = """
debug: true
distributed_type: FSDP
dynamo_config:
  dynamo_backend: INDUCTOR
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
gpu_ids: all
mixed_precision: bf16
num_processes: -1
"""
DEEPSPEED = """
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 2
distributed_type: DEEPSPEED
num_processes: 2
"""
PARALLEL = """
distributed_type: FSDP
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
CONTEXT = """
num_processes: 2
parallelism_config:
  parallelism_config_cp_comm_strategy: allgather
  parallelism_config_cp_size: 2
"""
TPU = """
distributed_type: XLA
downcast_bf16: 'yes'
num_processes: 8
tpu_name: pod
"""
OTHERS = """
commands:
- pip list
- 'echo: 1'
gpu_ids: 1
mixed_precision: no
use_cpu: true
"""
HOSTS = """
enable_cpu_affinity: true
machine_rank: 1
main_process_ip: node0
num_machines: 2
num_processes: 16
rdzv_backend: c10d
"""
FSDP2 = """
distributed_type: FSDP
dynamo_config:
  dynamo_backend: 'NO'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block, Head
  fsdp_version: 2
main_process_ip: node0
num_machines: 2
num_processes: 8
"""
SIZED = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
  fsdp_reshard_after_forward: SHARD_GRAD_OP
"""
NO_SHARD = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: 3
  fsdp_state_dict_type: FULL_STATE_DICT
"""
TORCHAO = """
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: max-autotune
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: true
  dynamo_use_regional_compilation: true
fp8_config:
  backend: AO
  enable_fsdp_float8_all_gather: true
  pad_inner_dim: true
mixed_precision: fp8
"""
HEADS = """
num_processes: 4
parallelism_config:
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length: 4096
  parallelism_config_sp_size: 4
"""
OLD_DYNAMO = """
dynamo_backend: EAGER
num_processes: 1
"""
TE = Precision(compute="bf16", fp8=Fp8(backend="transformer_engine", amax_history=1024))
AO = Precision(compute="bf16", fp8=Fp8(fp8_all_gather=True))
REPEATED = Compile(regions="repeated", mode="max-autotune", fullgraph=True, dynamic=False)
SHARDED: dict[str, Any] = {
    "strategy": "fsdp",
    "mesh": "dp_replicate=2,dp_shard=4",
    "plan": Plan(units=("Block", "Head"), reshard_after_forward=True, offload=True),
    "rdzv_endpoint": "node0:29500",
}
FILES = [
    (HOSTS, LaunchConfig(nproc_per_node=8, nnodes=2, node_rank=1, rdzv_endpoint="node0:29500", bind_cores=True), set()),
    (V11 + INERT, LaunchConfig(nproc_per_node=1, precision="fp32"), set()),
    (LEGACY, LaunchConfig(nproc_per_node=2, precision="fp16"), set()),
    (
        MPI,
        LaunchConfig(nproc_per_node=4, nnodes=4, rdzv_endpoint="127.0.0.1:29500", device="cpu", precision="fp32"),
        {"ipex_config", "mpirun_config"},
    ),
    (SAGEMAKER, LaunchConfig(precision="fp16"), {"compute_environment", "ec2_instance_type", "iam_role_name"}),
    (FP8 + INERT, LaunchConfig(nproc_per_node=2, gpu_ids=(0, 3), precision=TE), set()),
    (FSDP, LaunchConfig(precision="bf16", strategy="fsdp", compile=Compile()), {"debug"}),
    (FSDP2, LaunchConfig(nproc_per_node=4, nnodes=2, **SHARDED), {"fsdp_config.activation_checkpointing"}),
    (
        FSDP2.replace("fsdp_offload_params", "offload_params"),
        LaunchConfig(nproc_per_node=4, nnodes=2, **SHARDED),
        {"fsdp_config.activation_checkpointing"},
    ),
    (SIZED, LaunchConfig(strategy="fsdp", plan=Plan(units=1000, reshard_after_forward=False)), set()),
    (NO_SHARD, LaunchConfig(strategy="ddp"), {"fsdp_config.state_dict_type"}),
    (TORCHAO, LaunchConfig(precision=AO, compile=REPEATED), {"fp8_config.pad_inner_dim"}),
    (TORCHAO.replace("AO", "MSAMP"), LaunchConfig(precision="fp8", compile=REPEATED), {"fp8_config.backend"}),
    (
        HEADS,
        LaunchConfig(nproc_per_node=4, mesh="cp=4", plan=Plan(context="heads")),
        {"parallelism_config.sp_seq_length"},
    ),
    (OLD_DYNAMO, LaunchConfig(nproc_per_node=1, compile=Compile(backend="eager")), set()),
    (DEEPSPEED, LaunchConfig(nproc_per_node=2, accumulation=4, strategy="deepspeed", deepspeed='{"stage": 2}'), set()),
    (PARALLEL, LaunchConfig(nproc_per_node=8, strategy="fsdp", mesh="dp_replicate=2,dp_shard=2,tp=2"), set()),
    (CONTEXT, LaunchConfig(nproc_per_node=2, mesh="cp=2"), set()),
    (
        CONTEXT.replace("allgather", "alltoall"),
        LaunchConfig(nproc_per_node=2, mesh="cp=2", plan=Plan(context="ring")),
        set(),
    ),
    (TPU, LaunchConfig(nproc_per_node=8, device="xla"), {"downcast_bf16", "tpu_name"}),
    (TPU.replace("XLA", "TPU") + INERT, LaunchConfig(nproc_per_node=8, device="xla"), {"downcast_bf16", "tpu_name"}),
    (OTHERS, LaunchConfig(device="cpu", precision="fp32"), {"commands", "gpu_ids"}),
]


@pytest.mark.parametrize(("text", "config", "left_out"), FILES)
def test_files_of_every_version_are_taken_over(
    text: str, config: LaunchConfig, left_out: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(text)
    imported = import_accelerate(str(path))
    assert imported.config == config
    assert {left.key for left in imported.left_out} == left_out
    assert all(left.why for left in imported.left_out)


def test_its_json_files_too(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"mixed_precision": "bf16", "num_processes": 2, "distributed_type": "MULTI_GPU"}))
    imported = import_accelerate(str(path))
    assert imported.config == LaunchConfig(nproc_per_node=2, precision="bf16")
    assert imported.fields == ("nproc_per_node", "precision")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2\n", "a has two different values - at a.yaml, line 2"),
        ("num_processes: two\n", "processes do not divide into machines"),
        ("num_processes: 3\nnum_machines: 2\n", "got 3 and 2 - at a.yaml"),
        ("num_processes: 4\nnum_machines: 2\nmachine_rank: 2\n", "there is no such host: got node_rank=2, nnodes=2"),
        ("num_processes: 0\n", "processes do not divide into machines"),
        ("mixed_precision: bf61\n", "got 'bf61' - at a.yaml, key precision"),
        ("parallelism_config:\n  parallelism_config_tp_size: two\n", "got 'tp=two' - at a.yaml, key mesh"),
        ("deepspeed_config:\n  gradient_accumulation_steps: 0\n", "got 0 - at a.yaml, key accumulation"),
        ("gpu_ids: 0,x\n", "got [0, 'x'] - at a.yaml, key gpu_ids"),
    ],
)
def test_what_is_wrong_in_yaml_is_told_with_its_place(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_accelerate("a.yaml")
    assert told in str(caught.value)


def test_roles_and_options_of_the_rendezvous_come_along(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    shared = "num_machines: 2\nnum_processes: 4\nmain_process_ip: h0\nrole: trainer\nrdzv_id: job-7\nmax_restarts: 2\n"
    for conf in (
        "'timeout=900,last_call_timeout=10,read_timeout=5'",
        "\n  timeout: 900\n  last_call_timeout: 10\n  read_timeout: 5",
    ):
        path.write_text(f"{shared}rdzv_conf: {conf}\n")
        config, fields, left = import_accelerate(str(path))
        assert (config.role, config.rdzv_id, config.max_restarts) == ("trainer", "job-7", 2)
        assert (config.rdzv_timeout_s, config.rdzv_last_call_s) == (900.0, 10.0)
        assert {"role", "rdzv_id", "rdzv_timeout_s", "rdzv_last_call_s", "max_restarts"} <= set(fields)
        assert [each.key for each in left] == ["rdzv_conf.read_timeout"]
