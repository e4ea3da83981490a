# SPDX-License-Identifier: Apache-2.0
"""Configuration files of Accelerate as fields of a launch, with the keys that have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from accel.config._accelerate_sections import join, take_sections
from accel.config._files import decode_values, read_text
from accel.config._resolve import ConfigFile, rendezvous_fields, resolve
from accel.config._settings import LaunchConfig
from accel.errors import ConfigError
from accel.errors._checks import import_extra

_MOST_DEPTH = 64
_MOST_NODES = 100_000  # with each alias counted as all of its values


def decode_yaml(text: str, path: str) -> dict[str, Any]:
    """Return the keys and values of a document.

    A malformed one, or one nested or repeated by aliases beyond reason, is a `ConfigError` with line and column.
    """
    otherwise = ", or convert the file to JSON"
    yaml = import_extra("yaml", "a configuration in YAML", extra="yaml", where=path, otherwise=otherwise)
    try:
        _check_events(yaml, text, path)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(yaml, node, path, set())
        values: object = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _malformed(str(error.problem or error.context), path, mark.line + 1, mark.column + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _malformed(f"a character that YAML does not allow: U+{error.character:04X}", path, line, 1) from None
    except (ValueError, OverflowError) as error:  # such as a date that no calendar has
        raise _malformed(str(error), path, 1, 1) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "the file does not hold a mapping", expected="key: value", got=type(values).__name__, where=path
        )
    for key in cast("dict[object, object]", values):
        if not isinstance(key, str):
            raise ConfigError("a key is not text", expected="a name", got=repr(key), where=path, fix="Quote it.")
    return cast("dict[str, Any]", values)


def _malformed(reason: str, path: str, line: int, column: int) -> ConfigError:
    """Make the error of a document, with its place."""
    return ConfigError("malformed YAML", got=reason, where=f"{path}, line {line}, column {column}")


def _check_events(yaml: Any, text: str, path: str) -> None:
    """Refuse what would exhaust a reader: deep nesting, and aliases of aliases."""
    sizes, total = dict[str, int](), 0
    opened: list[tuple[str | None, int]] = []  # anchor of each open collection, and how many nodes came before it
    problem = ""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        if isinstance(event, yaml.NodeEvent):
            anchor = event.anchor if isinstance(event, yaml.AliasEvent) else None
            total += sizes.get(anchor, 1) if anchor is not None else 1
            if anchor is not None and anchor in (name for name, _ in opened):
                problem = "the value contains itself"
        if len(opened) > _MOST_DEPTH:
            problem = f"nested more than {_MOST_DEPTH} deep"
        if total > _MOST_NODES:
            problem = f"more than {_MOST_NODES} values"
        if problem:
            mark = event.start_mark
            raise _malformed(problem, path, mark.line + 1, mark.column + 1)


def _check_keys(yaml: Any, node: Any, path: str, seen: set[int]) -> None:
    """Refuse a key with two values in one mapping; the loader would take the last."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(yaml, value, path, seen)
        return
    found = dict[str, Any]()
    for key, value in node.value:
        first = found.setdefault(key.value, value) if isinstance(key, yaml.ScalarNode) else value
        if first is not value and _plain(yaml, first) != _plain(yaml, value):
            mark = key.start_mark
            raise _malformed(f"{key.value} has two different values", path, mark.line + 1, mark.column + 1)
        _check_keys(yaml, value, path, seen)


def _plain(yaml: Any, node: Any) -> Any:
    """Return a node as values that can be compared."""
    if isinstance(node, yaml.MappingNode):
        return node.tag, [(_plain(yaml, key), _plain(yaml, value)) for key, value in node.value]
    return node.tag, [_plain(yaml, each) for each in node.value] if isinstance(node, yaml.SequenceNode) else node.value


_INERT: dict[str, tuple[object, ...]] = {  # values that ask for nothing
    "compute_environment": ("LOCAL_MACHINE",),
    "debug": (False,),
    "distributed_type": ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "TPU", "XLA", False),
    "downcast_bf16": ("no", False),
    "enable_cpu_affinity": (False,),
    "main_process_port": (0,),
    "gpu_ids": ("all",),
    "machine_rank": (0,),
    "main_training_function": ("main",),
    "num_machines": (1,),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
}
_ONE_MACHINE = "has no effect on one machine; a free port is found by itself"
_LAYOUT = "not of this kind of launch"
_SHARDED = 'not used; strategy = "fsdp" shards a model, its optimizer and gradients'
_TPU = "the hosts of a TPU pod are named by nnodes and rdzv_endpoint"
_SAGEMAKER = "SageMaker jobs are not submitted"
_WHY = {
    "machine_rank": _ONE_MACHINE,
    "main_process_ip": _ONE_MACHINE,
    "main_process_port": _ONE_MACHINE,
    "rdzv_backend": "hosts meet at a TCP address",
    "same_network": "all hosts must reach the first one",
    "mpirun_config": "start the script with mpirun yourself",
    "distributed_type": "the strategies are ddp, fsdp and deepspeed",
    "deepspeed_config": "it has an effect with distributed_type DEEPSPEED only",
    "fsdp_config": _LAYOUT,
    "megatron_lm_config": f"Megatron-LM is {_SHARDED}",
    "parallelism_config": _LAYOUT,
    "dynamo_config": "no backend is named",
    "fp8_config": 'it has an effect with mixed_precision "fp8" only',
    "debug": "calls of the ranks are always compared",
    "main_training_function": "used in notebooks and on TPUs only",
    "downcast_bf16": 'not used; precision = "bf16" computes in bf16',
    "compute_environment": _SAGEMAKER,
    "ec2_instance_type": _SAGEMAKER,
    "iam_role_name": _SAGEMAKER,
    "gpu_ids": "has no effect on the CPU",
}


class LeftOut(NamedTuple):
    """A key without a counterpart: its value, and what to do instead."""

    key: str
    value: object
    why: str


class Imported(NamedTuple):
    """An imported file of Accelerate: the record, the fields that it sets, and the keys left out."""

    config: LaunchConfig
    fields: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def import_accelerate(path: str) -> Imported:
    """Read a configuration file of Accelerate, of any version: JSON if its name ends in `.json`, else YAML.

    Raises `ConfigError` for a value that it never takes, and `MissingExtraError` for YAML without PyYAML.
    """
    if path.lower().endswith(".toml"):
        fix = f"A file of accel needs no import: `accel launch --config {path}`."
        raise ConfigError(
            "the file is not a configuration of Accelerate",
            expected="a name in .yaml or .json",
            got=repr(path),
            fix=fix,
        )
    text = read_text(path)
    values = decode_values(text, path) if path.lower().endswith(".json") else decode_yaml(text, path)
    values = {"dynamo_config" if key == "dynamo_backend" else key: value for key, value in values.items()}
    taken = translate(values, path)
    sections = take_sections(values)
    known = (*_TAKEN, *_OF_MACHINES) if "nnodes" in taken else _TAKEN
    known = (*known, *sections, *(("distributed_type",) if "deepspeed_config" in sections else ()))
    left = tuple(
        LeftOut(key, value, _why(key))
        for key, value in values.items()
        if key not in known and not _is_inert(key, value)
    )
    if "gpu_ids" not in taken and not _is_inert("gpu_ids", values.get("gpu_ids")):
        left += (LeftOut("gpu_ids", values["gpu_ids"], _why("gpu_ids")),)
    left += tuple(
        LeftOut(f"{key}.{name}", _inside(values[key], name), why)
        for key, section in sections.items()
        for name, why in section.left.items()
    )
    conf = values.get("rdzv_conf")
    left += tuple(LeftOut(f"rdzv_conf.{name}", conf, "torch's own value holds") for name in _rendezvous(conf)[1])
    config = resolve({}, {}, ConfigFile(path=path, values=taken)).config
    return Imported(config, tuple(taken), left)


_AS_THEY_ARE = ("role", "rdzv_id", "max_restarts", "log_dir")
_TAKEN = (
    *("num_processes", "num_machines", "mixed_precision", "fp16", "use_cpu", "gpu_ids", "enable_cpu_affinity"),
    *("rdzv_conf", *_AS_THEY_ARE),
)
_OF_MACHINES = ("machine_rank", "main_process_ip", "main_process_port")
_PORT = 29500
_STEPS = "gradient_accumulation_steps"  # its files have it for DeepSpeed alone


def translate(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields that a file of Accelerate sets, unchecked, but for a number of processes that does not divide
    into its machines."""
    taken: dict[str, Any] = {}
    processes = values.get("num_processes")
    machines = values.get("num_machines") or 1
    if processes not in (None, -1):  # -1: the command line must give the number
        whole = type(processes) is int and type(machines) is int and 0 < machines <= processes
        if not whole or processes % machines:
            raise ConfigError(
                "processes do not divide into machines",
                expected="num_processes, a multiple of num_machines",
                got=f"{processes!r} and {machines!r}",
                where=path,
            )
        taken["nproc_per_node"] = processes // machines
    if type(machines) is int and machines > 1:
        taken["nnodes"] = machines
        if values.get("machine_rank") is not None:
            taken["node_rank"] = values["machine_rank"]
        if host := values.get("main_process_ip"):
            taken["rdzv_endpoint"] = f"{host}:{values.get('main_process_port') or _PORT}"
    taken |= {key: values[key] for key in _AS_THEY_ARE if values.get(key) not in (None, "")}
    taken |= _rendezvous(values.get("rdzv_conf"))[0]
    if values.get("enable_cpu_affinity") is True:
        taken["bind_cores"] = True
    if values.get("use_cpu") is True or values.get("distributed_type") == "MULTI_CPU":
        taken["device"] = "cpu"
    elif values.get("distributed_type") in ("TPU", "XLA"):  # its older name and its newer one
        taken["device"] = "xla"
    precision = values.get("mixed_precision", "fp16" if values.get("fp16") else None)
    if precision is not None:
        taken["precision"] = "fp32" if precision in ("no", False) else precision
    if values.get("distributed_type") == "FSDP":
        taken["strategy"] = "fsdp"
    deepspeed = values.get("deepspeed_config")
    if isinstance(deepspeed, dict) and (steps := cast(dict[str, Any], deepspeed).get(_STEPS)) is not None:
        taken["accumulation"] = steps
    join(take_sections(values), taken)
    ids = values.get("gpu_ids")
    if not _is_inert("gpu_ids", ids) and "device" not in taken:
        taken["gpu_ids"] = _ids(ids)
    return taken


def _rendezvous(conf: object) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that options of a rendezvous set, pairs or a section, and the names of the others."""
    if isinstance(conf, Mapping):
        conf = ",".join(f"{name}={value}" for name, value in cast(Mapping[str, Any], conf).items())
    found, left = rendezvous_fields(conf if isinstance(conf, str) else "")
    return {name: _number(value) for name, value in found.items()}, left


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _inside(section: Any, name: str) -> object:
    """Return the value of a key of a section, with or without the section's prefix."""
    return next((value for key, value in section.items() if str(key).endswith(name)), None)


def _ids(value: object) -> object:
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    if isinstance(parts, list):
        return [int(part) if str(part).strip().isdecimal() else part for part in parts]  # pyright: ignore
    return parts


def _is_inert(key: str, value: object) -> bool:
    return value in (None, "", {}, []) or value in _INERT.get(key, ())


def _why(key: str) -> str:
    return _WHY.get(key, _TPU if key.startswith("tpu_") else "nothing here corresponds to it")
