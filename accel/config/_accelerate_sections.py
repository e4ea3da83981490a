# SPDX-License-Identifier: Apache-2.0
"""Sections of Accelerate's files as records: FSDP and parallelism as a plan, fp8 as a precision, DeepSpeed, dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast, get_args

from accel.formats import StrategyName

_FILE = "config_file"
_OFFLOADS = {"offload_optimizer": "offload_optimizer_", "offload_parameters": "offload_param_"}
_EMPTY = (None, "", "none", "None", False)
_LEFT = {
    "zero3_init_flag": "build the model with accel.init_empty_weights in the script",
    "zero3_save_16bit_model": "accel.save_model gathers the weights at any stage",
    "hostfile": "accel launch --hostfile",
    "inclusion_filter": "accel launch --include",
    "exclusion_filter": "accel launch --exclude",
    "multinode_launcher": "accel launch --hostfile starts hosts by ssh, accel launch --slurm by Slurm",
}
_INERT = {"multinode_launcher": ("standard", "pdsh")}
_TAKEN = ("zero_stage", "gradient_clipping", "gradient_accumulation_steps", "moe_layer_cls_names", _FILE)


class Translated(NamedTuple):
    """The setting `deepspeed`, a path or the fields of a record; and keys without a counterpart, with the fix."""

    setting: str | dict[str, Any]
    left_out: dict[str, str]


def translate_deepspeed(section: Mapping[str, Any]) -> Translated:
    """Return the settings of a section; a DeepSpeed JSON that it names has all, as Accelerate's launcher refuses other
    keys with it."""
    left = {
        key: _LEFT.get(key, "nothing here corresponds to it")
        for key, value in section.items()
        if not _is_taken(key) and value not in _EMPTY and value not in _INERT.get(key, ())
    }
    if section.get(_FILE) not in _EMPTY:
        return Translated(section[_FILE], left)
    fields: dict[str, Any] = {"stage": 2 if section.get("zero_stage") is None else section["zero_stage"]}
    for field, prefix in _OFFLOADS.items():
        device = section.get(f"{prefix}device")
        if device not in _EMPTY:
            path = section.get(f"{prefix}nvme_path")
            fields[field] = {"device": device} | ({"path": path} if device == "nvme" and path not in _EMPTY else {})
    names = section.get("moe_layer_cls_names")
    if names not in _EMPTY:
        fields["leaf_modules"] = [name.strip() for name in str(names).split(",")]
    clipping = section.get("gradient_clipping")
    if clipping not in _EMPTY:
        fields["settings"] = {"gradient_clipping": clipping}
    return Translated(fields, left)


def _is_taken(key: str) -> bool:
    return key in _TAKEN or key.startswith(tuple(_OFFLOADS.values()))


class Taken(NamedTuple):
    """The fields that a section sets, and its keys left out with what to do instead."""

    fields: dict[str, Any]
    left: dict[str, str]


def take_sections(values: Mapping[str, Any]) -> dict[str, Taken]:
    """Return the settings of each section of a file, by the section's key; sections without an effect are left out."""
    found: dict[str, Taken] = {}
    for key, take in _SECTIONS.items():
        section: Any = values.get(key)
        if isinstance(section, str) and key == "dynamo_config":
            section = {"backend": section}  # as files before it had sections
        if section and isinstance(section, dict):
            prefix = f"{key}_" if key == "parallelism_config" else key.removesuffix("config")
            pairs = cast("dict[object, Any]", section).items()
            plain = {str(name).removeprefix(prefix): value for name, value in pairs}
            if (taken := take(plain, values)) is not None:
                found[key] = taken
    return found


def _take_fsdp(section: dict[str, Any], values: Mapping[str, Any]) -> Taken | None:
    if values.get("distributed_type") != "FSDP":
        return None
    plan: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    left: dict[str, str] = {}
    sharding = str(section.pop("sharding_strategy", "FULL_SHARD")).upper()
    reshard = section.pop("reshard_after_forward", None)
    if isinstance(reshard, str):  # the older sharding strategy, under the newer key
        reshard, sharding = None, reshard.upper()
    sharding = _NUMBERED.get(sharding, sharding)
    if sharding == "NO_SHARD":
        fields["strategy"] = "ddp"
    elif sharding.startswith("HYBRID_SHARD"):
        if mesh := _hybrid_mesh(values):
            fields["mesh"] = mesh
        else:
            left["sharding_strategy"] = 'set mesh = "dp_replicate=HOSTS,dp_shard=RANKS_OF_A_HOST"'
    if reshard is not None:
        plan["reshard_after_forward"] = reshard
    elif sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        plan["reshard_after_forward"] = False
    if section.pop("offload_params", False):
        plan["offload"] = True
    if section.pop("forward_prefetch", False):
        plan["prefetch"] = 1
    units = _units(section)
    if units is not None:
        plan["units"] = units
    left |= {name: _FSDP_WHY.get(name, _NOTHING) for name, value in section.items() if not _asks(_FSDP, name, value)}
    if plan:
        fields["plan"] = plan
    return Taken(fields, left)


def _units(section: dict[str, Any]) -> object:
    """Return what `Plan.units` has for a policy of wrapping; None for its default."""
    policy = section.pop("auto_wrap_policy", None)
    classes = section.pop("transformer_layer_cls_to_wrap", None)
    least = section.pop("min_num_params", None)
    if policy == "SIZE_BASED_WRAP" and least:
        return least
    if policy == "NO_WRAP":
        return []
    if policy == "TRANSFORMER_BASED_WRAP" and classes:
        return [each.strip() for each in classes.split(",")] if isinstance(classes, str) else classes
    return None


def _hybrid_mesh(values: Mapping[str, Any]) -> str:
    """Return the mesh of shards within a host; nothing where the file has no number of them."""
    hosts = values.get("num_machines")
    ranks = values.get("num_processes")
    if (
        type(hosts) is int
        and type(ranks) is int
        and hosts > 1
        and ranks > hosts
        and not values.get("parallelism_config")
    ):
        return f"dp_replicate={hosts},dp_shard={ranks // hosts}"
    return ""


def _take_deepspeed(section: dict[str, Any], values: Mapping[str, Any]) -> Taken | None:
    if values.get("distributed_type") != "DEEPSPEED" or "deepspeed" not in get_args(StrategyName):
        return None
    setting, left = translate_deepspeed(section)
    return Taken({"strategy": "deepspeed", "deepspeed": setting}, left)


def _take_fp8(section: dict[str, Any], values: Mapping[str, Any]) -> Taken | None:
    if values.get("mixed_precision") != "fp8":
        return None
    backend = str(section.pop("backend", "TE")).upper()
    recipe: dict[str, Any] = {}
    left: dict[str, str] = {}
    if backend in ("AO", "TORCHAO"):
        recipe["backend"] = "torchao"
        if section.pop("enable_fsdp_float8_all_gather", False):
            recipe["fp8_all_gather"] = True
    elif backend == "TE":
        recipe["backend"] = "transformer_engine"
        if section.pop("use_mxfp8_block_scaling", False):
            recipe["scaling"] = "mxfp8"
        for name, ours in (("margin", "margin"), *((each, "amax_history") for each in _HISTORIES)):
            if (value := section.pop(name, None)) is not None and "scaling" not in recipe:
                recipe[ours] = value
    else:
        return Taken({}, {"backend": "not used: it is no longer maintained; Fp8 has torchao and transformer_engine"})
    left |= {name: _FP8_WHY.get(name, _NOTHING) for name, value in section.items() if not _asks(_FP8, name, value)}
    return Taken({"precision": {"compute": "bf16", "fp8": recipe}}, left)


def _take_dynamo(section: dict[str, Any], _values: Mapping[str, Any]) -> Taken | None:
    backend = str(section.pop("backend", "NO")).lower()
    if backend in ("no", "none", ""):
        return Taken({}, {})
    fields: dict[str, Any] = {"backend": backend}
    if section.pop("use_regional_compilation", False):
        fields["regions"] = "repeated"
    if (mode := section.pop("mode", None)) not in (None, "default"):
        fields["mode"] = mode
    if section.pop("use_fullgraph", False):
        fields["fullgraph"] = True
    if (dynamic := section.pop("use_dynamic", None)) is not None:
        fields["dynamic"] = dynamic
    left = {name: _NOTHING for name, value in section.items() if value is not None}
    return Taken({"compile": fields}, left)


def _take_parallelism(section: dict[str, Any], _values: Mapping[str, Any]) -> Taken | None:
    sizes = {name: section.pop(f"{name}_size", None) for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp")}
    heads = sizes.pop("sp")
    by_heads = heads not in (None, 1)
    if by_heads and sizes["cp"] in (None, 1):
        sizes["cp"] = heads  # ranks that share a sequence by heads are ranks along cp
    sizes = {name: size for name, size in sizes.items() if size not in (None, 1)}
    fields: dict[str, Any] = {"mesh": ",".join(f"{name}={size}" for name, size in sizes.items())} if sizes else {}
    exchange = section.pop("cp_comm_strategy", None)
    if by_heads:
        fields["plan"] = {"context": "heads"}
    elif exchange == "alltoall" and "cp" in sizes:
        fields["plan"] = {"context": "ring"}
    left = {name: _AXES_WHY.get(name, _NOTHING) for name, value in section.items() if not _asks(_AXES, name, value)}
    return Taken(fields, left)


def _asks(inert: Mapping[str, tuple[object, ...]], name: str, value: object) -> bool:
    """Return whether a value has no effect, or is the only behaviour."""
    return value is None or value == "" or value in inert.get(name, ())


def join(taken: Mapping[str, Taken], fields: dict[str, Any]) -> None:
    """Merge the fields of sections into the fields of a file; plans of two sections become one. Mutates `fields`."""
    for each in taken.values():
        for name, value in each.fields.items():
            fields[name] = {**fields[name], **value} if isinstance(fields.get(name), dict) else value


_SECTIONS: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], Taken | None]] = {
    "fsdp_config": _take_fsdp,
    "deepspeed_config": _take_deepspeed,
    "fp8_config": _take_fp8,
    "dynamo_config": _take_dynamo,
    "parallelism_config": _take_parallelism,
}
_HISTORIES = ("amax_history_len", "amax_history_length")
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_NOTHING = "nothing here corresponds to it"
_FSDP: dict[str, tuple[object, ...]] = {
    "version": (1, 2, "1", "2"),
    "backward_prefetch": ("BACKWARD_PRE",),
    "state_dict_type": ("SHARDED_STATE_DICT",),
    "use_orig_params": (True, False),
    "sync_module_states": (True, False),
    "cpu_ram_efficient_loading": (True, False),
    "activation_checkpointing": (False,),
    "activation_checkpointing_offload": (False,),
}
_FSDP_WHY = {
    "backward_prefetch": "gradients are reduced as torch's fully_shard does",
    "state_dict_type": "save_state writes shards, save_model and get_state_dict full tensors",
    "activation_checkpointing": "call accel.checkpoint_activations in the script",
    "activation_checkpointing_offload": "call accel.checkpoint_activations in the script",
    "ignored_modules": "name them by patterns in Plan(ignored=...)",
}
_FP8: dict[str, tuple[object, ...]] = {
    "use_autocast_during_eval": (False,),
    "interval": (1,),
    "format": ("HYBRID",),
    "amax_compute_algo": ("max",),
    "amax_compute_algorithm": ("max",),
    "override_linear_precision": (False, [False, False, False], "(false, false, false)"),
    "pad_inner_dim": (False,),
    "enable_fsdp_float8_all_gather": (False,),
    "use_mxfp8_block_scaling": (False,),
}
_FP8_WHY = {
    "use_autocast_during_eval": "fp8 is used in the block of accel.autocast",
    "format": "Transformer Engine's HYBRID is used",
    "amax_compute_algo": "the largest of the history is used",
    "amax_compute_algorithm": "the largest of the history is used",
    "pad_inner_dim": "layers with sizes that are no multiples of 16 are not converted",
}
_AXES: dict[str, tuple[object, ...]] = {
    "cp_backend": ("torch",),
    "cp_comm_strategy": ("allgather",),
    "sp_backend": ("deepspeed",),
    "sp_seq_length_is_variable": (True,),
}
_AXES_WHY = {
    "sp_seq_length": "a batch has its own length",
    "sp_seq_length_is_variable": "a batch has its own length",
    "sp_attn_implementation": "attention of torch and transformers is found by itself",
}
