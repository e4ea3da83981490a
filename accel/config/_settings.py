# SPDX-License-Identifier: Apache-2.0
"""What a run asks for: every setting declared once, for flags, variables, files, ranks and the makers of contexts.

A setting is a field of `Settings` and a keyword of the same name; a test holds the two alike. The flag, the `ACCEL_*`
variable, the key in a file, the words of `--help`, of a template and of the docs page follow from the annotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta

from accel.config._schema import Field, fields_of
from accel.formats import Precision, PrecisionName, StrategyName
from accel.topology import MESH_TEXT

if TYPE_CHECKING:
    import torch

SOURCES_VARIABLE = "ACCEL_SOURCES"  # from a launcher to its ranks: the flag or file behind each setting
Auto = Literal["auto"]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]

_PRECISIONS = {
    "auto": "what the script says, fp32 if it says nothing",
    "fp32": "full precision: exact, slow on GPUs",
    "tf32": "fp32 with faster, rounded products; NVIDIA GPUs since Ampere",
    "bf16": "half the memory traffic, much faster; needs no loss scale",
    "fp16": "for GPUs without bf16; needs the loss scale",
    "pure-bf16": "parameters in bf16 too: least memory, less exact updates",
    "fp8": "bf16 with linear layers in fp8; Hopper or newer, extra `torchao`",
}
_STRATEGIES = {
    "auto": "what the script says, ddp if it says nothing",
    "ddp": "every rank holds the whole model, and gradients are averaged",
    "fsdp": "ranks share out parameters, gradients and optimizer state: less memory, more messages",
}
_DEVICES = {
    "auto": "GPUs where there are any, else the CPU",
    "cpu": "the CPU, even where there are GPUs",
    "cuda": "GPUs, and an error where there are none",
    "xla": "TPUs, through torch_xla",
}


class GroupKeywords(TypedDict, total=False):
    """Settings as keywords of every maker of contexts; None says nothing."""

    device: torch.device | str | None
    precision: Precision | PrecisionName | None
    accumulation: int | None
    strategy: StrategyName | None
    timeout_s: float | None


class SettingKeywords(GroupKeywords, total=False):
    """All settings as keywords, for makers that open a process group."""

    mesh: str | None
    backend: str | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks for; `auto`, or an empty text, asks for nothing.

    The extra `fallback` of a field holds where nobody asks for anything.
    """

    device: Annotated[
        str,
        Meta(
            pattern=r"^[a-z]+(:[0-9]+)?$",
            examples=["auto", "cpu", "cuda", "cuda:1", "xla"],
            description="What kind of device to compute on; auto: the GPU of each process, the CPU without GPUs.",
            extra={"shorthand": ("--cpu", "cpu"), "choices": _DEVICES},
        ),
    ] = "auto"
    precision: Annotated[
        Precision | PrecisionName | Auto,
        Meta(
            description="What to compute in; auto: what the script says.",
            extra={"choices": _PRECISIONS, "fallback": "fp32"},
        ),
    ] = "auto"
    accumulation: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | Auto,
        Meta(
            description="How many micro-batches make one optimizer step; auto: what the script says.",
            extra={"fallback": 1},
        ),
    ] = "auto"
    strategy: Annotated[
        StrategyName | Auto,
        Meta(
            description="How a model is spread over the ranks; auto: what the script says.",
            extra={"choices": _STRATEGIES, "fallback": "ddp"},
        ),
    ] = "auto"
    mesh: Annotated[
        str,
        Meta(
            pattern=MESH_TEXT,
            examples=["dp=2,tp=2", "fsdp=-1"],
            description="Dimensions of the mesh of all ranks, neighbours last; -1: all that is left; empty: no mesh.",
        ),
    ] = ""
    backend: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z][A-Za-z0-9_]*$",
            examples=["auto", "gloo", "nccl"],
            description="What carries messages between the processes; auto: nccl between GPUs, gloo between CPUs.",
        ),
    ] = "auto"
    timeout_s: Annotated[
        Seconds | Auto,
        Meta(
            description="Seconds until a collective that misses a rank fails; auto: what the script says, else 300.",
            extra={"fallback": 300.0},
        ),
    ] = "auto"


SETTINGS: tuple[Field, ...] = fields_of(Settings)
