# SPDX-License-Identifier: Apache-2.0
"""Memory and time of training, estimated from shapes before anything is loaded.

Begin with `_model.py`: one description of a model's tensors, which every estimate reads. `_sources.py` makes it from
code (`_build.py`), a configuration (`_configs.py`) or headers. `_step.py` has the step and the parameters that a rank
holds, `_kept.py` the activations; `_memory.py` adds that up moment by moment, `_cost.py` finds messages and time by the
speeds of `_efficiencies.py`, `_choices.py` compares meshes by both.
`_summary.py` is separate: the table of a model that exists, with a forward on fake tensors. The others are pure,
but for `_build.py` and `_sources.py`. Names resolve on first use: headers and arithmetic do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.estimate._build import Input, measure
    from accel.estimate._choices import Job, choose_meshes, list_meshes, mesh_problem
    from accel.estimate._configs import read_transformer
    from accel.estimate._cost import step_time, step_traffic
    from accel.estimate._efficiencies import Efficiencies, Hosts, measure_efficiencies, read_efficiencies
    from accel.estimate._memory import rank_memory, strategy_memory
    from accel.estimate._model import Latent, Tower, Transformer
    from accel.estimate._sources import find_source, read_source
    from accel.estimate._step import EstimatedStep
    from accel.estimate._summary import ModelSummary, ModuleRow, summary

__all__ = [
    "Efficiencies",
    "EstimatedStep",
    "Hosts",
    "Input",
    "Job",
    "Latent",
    "ModelSummary",
    "ModuleRow",
    "Tower",
    "Transformer",
    "choose_meshes",
    "find_source",
    "list_meshes",
    "measure",
    "measure_efficiencies",
    "mesh_problem",
    "rank_memory",
    "read_efficiencies",
    "read_source",
    "read_transformer",
    "step_time",
    "step_traffic",
    "strategy_memory",
    "summary",
]

__getattr__ = exports(__name__, declared(), {"Step": "The estimate of a step is `EstimatedStep`."})
__dir__ = __all__.copy
