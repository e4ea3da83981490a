# SPDX-License-Identifier: Apache-2.0
"""Memory of training, estimated from shapes before anything is loaded; sources of the shapes.

`plan_memory` is pure. `from_headers` reads the headers of safetensors files; `from_config` and `from_function` build a
model whose tensors have no memory. Names resolve on first use: headers and arithmetic do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.estimate._build import (
        DescribedModel as DescribedModel,
        Input as Input,
        built as built,
        from_config as from_config,
        from_function as from_function,
        from_timm as from_timm,
        function_of as function_of,
        measure as measure,
        read_config as read_config,
        timm_maker as timm_maker,
    )
    from accel.estimate._choices import (
        Choice as Choice,
        Choices as Choices,
        Job as Job,
        Refusal as Refusal,
        choose_meshes as choose_meshes,
        list_meshes as list_meshes,
        mesh_problem as mesh_problem,
    )
    from accel.estimate._cost import (
        Hosts as Hosts,
        StepTime as StepTime,
        Traffic as Traffic,
        step_time as step_time,
        step_traffic as step_traffic,
    )
    from accel.estimate._headers import (
        cached_model as cached_model,
        from_headers as from_headers,
        has_weights as has_weights,
        is_model_name as is_model_name,
        name_headers as name_headers,
        read_headers as read_headers,
    )
    from accel.estimate._plan import (
        OPTIMIZERS as OPTIMIZERS,
        STRATEGIES as STRATEGIES,
        Activations as Activations,
        Memory as Memory,
        Model as Model,
        Parameter as Parameter,
        Strategy as Strategy,
        fewest_ranks as fewest_ranks,
        plan_memory as plan_memory,
    )
    from accel.estimate._rank_memory import RankMemory as RankMemory, rank_memory as rank_memory
    from accel.estimate._transformer import (
        EstimatedStep as EstimatedStep,
        Transformer as Transformer,
        read_transformer as read_transformer,
    )

__getattr__ = exports(
    __name__,
    {
        "_build": (
            "DescribedModel",
            "Input",
            "built",
            "from_config",
            "from_function",
            "function_of",
            "measure",
            "read_config",
            "from_timm",
            "timm_maker",
        ),
        "_choices": (
            "Choice",
            "Choices",
            "Job",
            "Refusal",
            "choose_meshes",
            "list_meshes",
            "mesh_problem",
        ),
        "_cost": (
            "Hosts",
            "StepTime",
            "step_time",
            "Traffic",
            "step_traffic",
        ),
        "_headers": (
            "cached_model",
            "is_model_name",
            "from_headers",
            "has_weights",
            "name_headers",
            "read_headers",
        ),
        "_plan": (
            "OPTIMIZERS",
            "STRATEGIES",
            "Activations",
            "Memory",
            "Model",
            "Parameter",
            "Strategy",
            "fewest_ranks",
            "plan_memory",
        ),
        "_rank_memory": (
            "RankMemory",
            "rank_memory",
        ),
        "_transformer": (
            "EstimatedStep",
            "Transformer",
            "read_transformer",
        ),
    },
)
