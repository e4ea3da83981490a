# SPDX-License-Identifier: Apache-2.0
"""`Plan`: how a model is spread along the axes of a mesh, as one value that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Patterns = tuple[str, ...]
Count = Annotated[int, Meta(ge=1)]
FromModel = Literal["model"]
ContextMethod = Literal["gather", "ring", "heads"]
WireDtype = Literal["auto", "fp32", "bf16", "fp16"]
TensorStyle = Literal[
    "colwise",
    "colwise_gather_output",
    "packed_colwise_2",
    "packed_colwise_3",
    "rowwise",
    "rowwise_split_input",
    "rowwise_sequence",
    "embedding_rowwise",
    "multihead_attention",
    "replicated",
    "replicated_with_grad_allreduce",
    "copy_input",
    "split_sequence",
    "gather_sequence",
    "sequence_parallel",
    "sequence_parallel_gather_output",
]
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Styles, stages and units by which a model is spread along the axes of a mesh.

    What it says of an axis of one rank has no effect, so one plan and one script serve all meshes. Patterns are paths
    of modules in the model, in which `*` stands for one component, as in "layers.*.mlp.up".

    Attributes:
        tensor: tensor-parallel styles by pattern; "model" for what `tensor_plan` finds in the model. Modules that no
            pattern names are replicated, so an empty mapping leaves the model whole on every rank along tp.
        sequence: whether ranks along tp share the tokens between the layers that they share (sequence parallelism);
            beside `tensor="model"`, since styles of one's own say it themselves.
        context: method by which ranks along cp see each other's keys and values: "gather" all at once, "ring" one
            rank's after another's, or "heads" of the whole sequence for some of the heads each.
        stages: paths of the modules of each pipeline stage; None for what `stage_plan` finds in the model.
        schedule: order in which a pipeline runs its stages and micro-batches.
        stages_per_rank: number of stages on each rank along pp.
        micro_batches: number of micro-batches that `forward_backward` makes of a batch; None for the number of stages,
            1 without a pipeline.
        experts: expert-parallel styles by pattern; "model" for what the model says of itself.
        units: modules that `fully_shard` shards one by one: "auto" for the repeated blocks and what the model names in
            `_no_split_modules`; patterns or class names; or the least number of parameters of a module.
        ignored: patterns of modules that sharding leaves alone; every rank along dp holds them whole.
        reshard_after_forward: whether the parameters of a unit are put apart after its forward; a number for the ranks
            that share the parts then; None for True in all units but the last.
        gather_dtype: dtype in which sharded parameters travel; "auto" for that in which the context computes.
        reduce_dtype: dtype in which gradients are summed over ranks; "auto" for fp32.
        prefetch: number of units whose parameters are gathered ahead; None for torch's choice.
        offload: whether sharded parameters, gradients and optimizer state lie in the host's memory between uses.
    """

    tensor: Mapping[str, TensorStyle] | FromModel = "model"
    sequence: bool = False
    context: ContextMethod = "gather"
    stages: tuple[Patterns, ...] | None = None
    schedule: Schedule = "1F1B"
    stages_per_rank: Count = 1
    micro_batches: Count | None = None
    experts: Mapping[str, str] | FromModel = "model"
    units: Literal["auto"] | Patterns | Count = "auto"
    ignored: Patterns = ()
    reshard_after_forward: bool | Count | None = None
    gather_dtype: WireDtype = "auto"
    reduce_dtype: WireDtype = "auto"
    prefetch: Count | None = None
    offload: bool = False
