# SPDX-License-Identifier: Apache-2.0
"""`found_plan`: styles and parts of a model that are found in its forward and proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from accel.parallel._modules import example_of, without_cache
from accel.parallel.axes.tensor._found import Styles, StyleSearch
from accel.parallel.axes.tensor._part_search import found_regions
from accel.parallel.axes.tensor._prove import proved_in_parts, short
from accel.parallel.axes.tensor._rules import is_in
from accel.parallel.axes.tensor._trace import trace
from accel.parallel.parts import RowLayout


class FoundPlan(NamedTuple):
    """A plan that is found and proved.

    Attributes:
        styles: by path.
        left: why candidates stay whole, by the path of their unit.
        is_seen: whether a forward was recorded; without, the model's known layers may be right.
        regions: layouts of parameters that no style divides.
    """

    styles: Styles
    left: Mapping[str, str]
    is_seen: bool = True
    regions: Mapping[str, Mapping[str, RowLayout]] = {}


def found_plan(
    model: nn.Module,
    size: int,
    example: Mapping[str, Any] | Sequence[Any] | None = None,
    in_parts: Callable[[Styles], Styles] | None = None,
    within: Sequence[str] = ("",),
    *,
    regions_in: Sequence[str] = (),
) -> FoundPlan:
    """Return the plan by which so many ranks compute what the model does. No communication; the model and torch's
    streams are unchanged.

    `example` are arguments of the model's forward; None for small ones by the config of a model of transformers.
    `in_parts` returns styles by which blocks work on parts of the tokens; `PrepareError` where these are not proved.
    `within` are paths of the modules to look in; without, all blocks and ends of the model. In modules of the
    paths `regions_in`, what styles leave whole is divided by layouts of parameters.
    """
    inputs = example_of(model, size if in_parts else 1) if example is None else without_cache(model, example)
    if inputs is None:
        return FoundPlan({}, {"": "no example of its inputs"}, is_seen=False)
    try:
        recorded = trace(model, inputs)
    except Exception as error:  # whatever a forward raises without values
        return FoundPlan({}, {"": f"its forward, run without values, failed: {short(error)}"}, is_seen=False)
    search = StyleSearch(model, recorded, size)
    styles, left = search.blocks(within)
    styles |= search.ends(styles) if "" in within else {}
    read = search.read(within)
    regions: Mapping[str, Mapping[str, RowLayout]] = {}
    if regions_in:
        regions, more = found_regions(model, recorded, size, read | styles, regions_in)
        divided = {name for layouts in regions.values() for name in layouts}
        left = {unit: each for unit, each in left.items() if not any(is_in(name, unit) for name in divided)}
        left |= {unit: each for unit, each in more.items() if unit not in left}
    if not styles and not regions:
        return FoundPlan({}, left)
    styles = read | styles
    if in_parts is not None:
        return FoundPlan(proved_in_parts(recorded, in_parts(styles), search.verdict), left)
    return FoundPlan(styles, left, regions=regions)
