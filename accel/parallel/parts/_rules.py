# SPDX-License-Identifier: Apache-2.0
"""The table of rules by the names of torch's functions, methods and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from accel.parallel._private import OPERATORS, is_pointwise, overloads_of
from accel.parallel.parts import (
    _attention,
    _contractions,
    _convolutions,
    _elementwise,
    _indexing,
    _local_map,
    _reductions,
    _shapes,
)
from accel.parallel.parts._layout import no_rule
from accel.parallel.parts._part import Args, Named, Rule, name_of

RULES: Mapping[str, Rule] = {
    **_elementwise.RULES,
    **_shapes.RULES,
    **_reductions.RULES,
    **_contractions.RULES,
    **_convolutions.RULES,
    **_attention.RULES,
    **_indexing.RULES,
    **_local_map.RULES,
}


def find_rule(func: Callable[..., Any]) -> Rule | None:
    """Return the rule of a function of torch; None for none. An operator of torch.library, which may have the name of
    another function, has one if its tags say that it computes each element independently."""
    if not isinstance(func, OPERATORS):
        return RULES.get(name_of(func))
    if is_dynamo_compiling():  # which cannot trace a question about an operator
        return None
    overloads = overloads_of(func)
    if overloads[0].namespace == "aten" and func not in overloads:
        return RULES.get(name_of(func))
    return _elementwise.of_tags if all(map(is_pointwise, overloads)) else None


def written_into(out: Any, func: Any, args: Args, kwargs: Named) -> Tensor:
    """Run a function with `out=`; return that tensor, with a copy of the result, which has its shape."""
    if not isinstance(out, Tensor):
        raise no_rule("with several tensors in out=")
    found = func(*args, **kwargs)
    if out.shape != found.shape or (found.requires_grad and torch.is_grad_enabled()):
        raise no_rule("with out= of another shape, or of a result that has a gradient")
    return out.copy_(found)
