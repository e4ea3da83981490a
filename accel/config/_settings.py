# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, each declared once, for flags, variables, files, ranks and the makers of contexts.

A setting is a field of `Settings` and a keyword of the same name; a test holds the two alike. The flag, the `ACCEL_*`
variable, the key in a file, the words of `--help`, of a template and of the docs page follow from the annotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta

from accel.config._schema import Field, fields_of
from accel.formats import Compile, CompileName, Precision, PrecisionName, StrategyName
from accel.topology import MESH_TEXT, Plan

if TYPE_CHECKING:
    import torch

SOURCES_VARIABLE = "ACCEL_SOURCES"  # from a launcher to its ranks: the flag or file behind each setting
Auto = Literal["auto"]
LogLevel = Literal["auto", "debug", "info", "warning", "error", "critical"]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]

_PRECISIONS = {
    "auto": "the script's choice, else fp32",
    "fp32": "full precision: exact, slow on GPUs",
    "tf32": "fp32 with faster, rounded products; NVIDIA GPUs since Ampere",
    "bf16": "half the memory traffic, much faster; needs no loss scale",
    "fp16": "for GPUs without bf16; needs the loss scale",
    "pure-bf16": "parameters in bf16 too: least memory, less exact updates",
    "fp8": "bf16 with linear layers in fp8; Hopper or newer, extra `torchao`",
}
_STRATEGIES = {
    "auto": "the script's choice, else ddp",
    "ddp": "every rank holds the whole model, and gradients are averaged",
    "fsdp": "ranks shard parameters, gradients and optimizer state: less memory, more messages",
    "deepspeed": "ZeRO by DeepSpeed, extra `deepspeed`, with the options of the setting deepspeed",
}
_COMPILATIONS = {
    "auto": "the script's choice, else off",
    "off": "models run as they are written",
    "whole": "each model as one, by inductor",
    "repeated": "the repeated blocks of each model, by inductor; starts faster",
}
_DEVICES = {
    "auto": "the machine's accelerator of any vendor, else the CPU",
    "cpu": "the CPU, even where there are GPUs",
    "cuda": "GPUs; an error if there are none",
    "xla": "TPUs, through torch_xla",
}
_LOG_LEVELS = {
    "auto": "the script's choice, else that of Python's logging",
    "debug": "everything",
    "info": "what a run does",
    "warning": "what may be wrong",
    "error": "what failed",
    "critical": "what ends the run",
}


class GroupKeywords(TypedDict, total=False):
    """Settings as keywords of every maker of contexts; None says nothing."""

    device: torch.device | str | None
    precision: Precision | PrecisionName | None
    accumulation: int | None
    strategy: StrategyName | None
    deepspeed: str | msgspec.Struct | None
    plan: Plan | str | None
    compile: Compile | CompileName | str | None
    timeout_s: float | None
    log_level: LogLevel | None


class SettingKeywords(GroupKeywords, total=False):
    """All settings as keywords, for makers that open a process group."""

    mesh: str | None
    backend: str | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run; `auto`, or an empty text, leaves the choice open.

    If every source leaves it open, the extra `fallback` of the field holds.
    """

    device: Annotated[
        str,
        Meta(
            pattern=r"^[a-z]+(:[0-9]+)?$",
            examples=["auto", "cpu", "cuda", "cuda:1", "xla"],
            description="Device to compute on; auto: the accelerator of each process, else the CPU.",
            extra={"shorthand": ("--cpu", "cpu"), "choices": _DEVICES},
        ),
    ] = "auto"
    precision: Annotated[
        Precision | PrecisionName | Auto,
        Meta(
            examples=["compute=bf16,fp8.scaling=rowwise"],
            description="Number format to compute in, or the fields of a Precision; auto: the script's choice.",
            extra={"choices": _PRECISIONS, "fallback": "fp32"},
        ),
    ] = "auto"
    accumulation: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | Auto,
        Meta(
            description="Micro-batches of one optimizer step; auto: the script's choice.",
            extra={"fallback": 1},
        ),
    ] = "auto"
    strategy: Annotated[
        StrategyName | Auto,
        Meta(
            description="Strategy that spreads a model over the ranks; auto: the script's choice.",
            extra={"choices": _STRATEGIES, "fallback": "ddp"},
        ),
    ] = "auto"
    plan: Annotated[
        Plan | Auto,
        Meta(
            examples=["units=Block,offload=true"],
            description="Fields of the Plan by which prepare spreads models over the mesh; auto: the script's choice.",
        ),
    ] = "auto"
    compile: Annotated[
        Compile | CompileName | Auto,
        Meta(
            examples=["regions=repeated,mode=max-autotune"],
            description="What torch compiles of the models that prepare takes; auto: the script's choice.",
            extra={"choices": _COMPILATIONS, "fallback": "off"},
        ),
    ] = "auto"
    mesh: Annotated[
        str,
        Meta(
            pattern=MESH_TEXT,
            examples=["dp=2,tp=2", "dp=-1,tp=8"],
            description="Axes of the mesh of all ranks: pp, dp or dp_replicate and dp_shard, cp, tp, ep; -1: the rest.",
        ),
    ] = ""
    backend: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z][A-Za-z0-9_]*$",
            examples=["auto", "gloo", "nccl"],
            description="Backend of the process group; auto: nccl between GPUs, gloo between CPUs.",
        ),
    ] = "auto"
    timeout_s: Annotated[
        Seconds | Auto,
        Meta(
            description="Seconds until a collective that misses a rank fails; auto: the script's choice, else 300.",
            extra={"fallback": 300.0},
        ),
    ] = "auto"
    deepspeed: Annotated[
        str,
        Meta(
            pattern=r"^[^\x00]*$",
            examples=["ds_config.json"],
            description="Options of the strategy deepspeed: a DeepSpeed JSON, or a section of this name in accel.toml.",
            extra={"section": True},
        ),
    ] = ""
    log_level: Annotated[
        LogLevel,
        Meta(
            description="Lowest level that the loggers of accel.get_logger log; auto: the script's choice.",
            extra={"choices": _LOG_LEVELS},
        ),
    ] = "auto"


SETTINGS: tuple[Field, ...] = fields_of(Settings)
