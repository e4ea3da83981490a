# SPDX-License-Identifier: Apache-2.0
"""What `accel.parallel` plans for a model before it spreads it: FSDP units, styles it finds and proves, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel.parallel._blocks import blocks_of as blocks_of
from accel.parallel._compile import Recomputed as Recomputed
from accel.parallel._fakes import without_memory as without_memory
from accel.parallel._micro_batches import split_batch as split_batch
from accel.parallel._modules import (
    matching as matching,
    named_modules as named_modules,
    note_module as note_module,
    note_prepared as note_prepared,
    notes_of as notes_of,
    stage_modules as stage_modules,
)
from accel.parallel._private import is_compiled as is_compiled
from accel.parallel._record import ForwardRecord as ForwardRecord
from accel.parallel._recorder import record_forward as record_forward
from accel.parallel._spread import ModelView as ModelView
from accel.parallel.axes.context._kernels import WRITTEN_OUT as WRITTEN_OUT, Masked as Masked, kernel_of as kernel_of
from accel.parallel.axes.pipeline._cut import Cut as Cut, cut_record as cut_record
from accel.parallel.axes.pipeline._planned import planned as planned
from accel.parallel.axes.pipeline._replayed import Calls as Calls
from accel.parallel.axes.shard._units import plan_units, together_ids
from accel.parallel.axes.tensor._found_plan import found_plan as found_plan
from accel.parallel.axes.tensor._prove import Verdict as Verdict, prove as prove
from accel.parallel.axes.tensor._rules import rules_of as rules_of
from accel.parallel.axes.tensor._trace import trace

CPU = torch.device("cpu")


def fsdp_units(model: nn.Module, *, units: Any = "auto", together: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the FSDP units of a model; modules that match `together` stay in one unit."""
    view = ModelView(model)
    return plan_units(view, units=units, together=together_ids(view, together))


def verdict_of(block: nn.Module, example: Sequence[Any], path: str, styles: Mapping[str, Any], size: int) -> Verdict:
    """Prove styles of a module by its first call in the forward of a block."""
    call = next(each for each in trace(block, example).calls if each.path == path)
    return prove(block.get_submodule(path), call, styles, size)


def record_of(model: nn.Module, units: Sequence[str], *args: Any) -> ForwardRecord:
    """Record the forward of a model without memory."""
    return record_forward(without_memory(model, CPU), units, args, {})
