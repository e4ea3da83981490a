# SPDX-License-Identifier: Apache-2.0
"""Memory and time of training, estimated from shapes before anything is loaded.

Begin with `_model.py`: one description of a model's tensors, which every estimate reads. `_sources.py` makes it from
code (`_build.py`), a configuration or headers. `_step.py` has the step and what a rank holds of model and activations;
`_memory.py` adds that up moment by moment, `_cost.py` finds messages and time, `_choices.py` compares meshes by both.
All but `_build.py` and `_sources.py` is pure. Names resolve on first use: headers and arithmetic do without torch.
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
    from accel.estimate._memory import (
        PARTS as PARTS,
        STRATEGIES as STRATEGIES,
        RankMemory as RankMemory,
        Strategy as Strategy,
        fewest_ranks as fewest_ranks,
        largest_parts as largest_parts,
        rank_memory as rank_memory,
        strategy_memory as strategy_memory,
    )
    from accel.estimate._model import (
        Activations as Activations,
        Model as Model,
        Parameter as Parameter,
        Transformer as Transformer,
        read_transformer as read_transformer,
        units_of as units_of,
    )
    from accel.estimate._sources import (
        ModelSource as ModelSource,
        cached_model as cached_model,
        describe_source as describe_source,
        find_source as find_source,
        from_headers as from_headers,
        is_model_name as is_model_name,
        name_headers as name_headers,
        read_headers as read_headers,
        read_source as read_source,
    )
    from accel.estimate._step import (
        OPTIMIZERS as OPTIMIZERS,
        EstimatedStep as EstimatedStep,
    )

__getattr__ = exports(
    __name__,
    {
        "_build": (
            "DescribedModel",
            "Input",
            "built",
            "from_config",
            "function_of",
            "measure",
            "read_config",
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
            "Traffic",
            "step_time",
            "step_traffic",
        ),
        "_memory": (
            "PARTS",
            "STRATEGIES",
            "RankMemory",
            "Strategy",
            "fewest_ranks",
            "largest_parts",
            "rank_memory",
            "strategy_memory",
        ),
        "_model": (
            "Activations",
            "Model",
            "Parameter",
            "Transformer",
            "read_transformer",
            "units_of",
        ),
        "_sources": (
            "ModelSource",
            "cached_model",
            "describe_source",
            "find_source",
            "from_headers",
            "is_model_name",
            "name_headers",
            "read_headers",
            "read_source",
        ),
        "_step": (
            "OPTIMIZERS",
            "EstimatedStep",
        ),
    },
    {"Step": "The estimate of a step is `EstimatedStep`."},
)
