# SPDX-License-Identifier: Apache-2.0
"""Parameters without a dimension or an element, which cannot be sharded: replicated, and trained like the sharded ones.

They are stored as replicated DTensors, so that optimizers, norms and checkpoints see parameters of one kind. While the
forward of their FSDP unit or module runs, plain tensors replace them, as in `fully_shard`. Their gradients await the
mean over the ranks that share them; a step takes the mean before it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import own_gradient
from accel.errors import PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._leftovers import await_mean, awaited_of, watch_whole
from accel.parallel._modules import is_in, note_module, notes_of
from accel.parallel._private import is_no_parameter, untraced
from accel.parallel._spread import ModelView
from accel.parallel._watches import computed_as_kept
from accel.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def stays_whole(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has no dimension, or no element, as optional tokens that a model does without."""
    return parameter.ndim == 0 or parameter.numel() == 0


class _Place(NamedTuple):
    """A module with such a parameter, and its name there."""

    module: nn.Module
    name: str


# The places that a module's forward reads, of the module, or of all modules of its unit; each with the placements of
# its gradient.
_Places = list[tuple[_Place, "Sequence[Placement]"]]


@untraced
def _enter(places: _Places) -> list[tuple[_Place, nn.Parameter]]:
    """Put plain tensors in the place of replicated ones, and return these."""
    plain: dict[int, torch.Tensor] = {}
    stored: list[tuple[_Place, nn.Parameter]] = []
    for place, placements in places:
        own = cast(Any, place.module)._parameters
        parameter = own[place.name]
        if not is_dtensor(parameter):
            continue  # the forward around this one has put it there
        if id(parameter) not in plain:
            plain[id(parameter)] = _plain(cast(nn.Parameter, parameter), placements)
        stored.append((place, cast(nn.Parameter, parameter)))
        own[place.name] = plain[id(parameter)]
    return stored


@untraced
def _leave(stored: list[tuple[_Place, nn.Parameter]]) -> None:
    for (module, name), parameter in stored:
        cast(Any, module)._parameters[name] = parameter


class SeesPlain(Mixin):
    """Computes with plain tensors in the place of replicated parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        places: _Places | None = notes_of(cast(nn.Module, self)).get("plain")
        if places is None:
            return super().forward(*args, **kwargs)
        stored = _enter(places)
        try:
            return super().forward(*args, **kwargs)
        except AttributeError as error:
            if is_no_parameter(error):
                raise computed_as_kept(error) from error
            raise
        finally:
            _leave(stored)


def see_plain(view: ModelView, units: Sequence[str], kept: frozenset[int]) -> Mapping[int, Sequence[_Places]]:
    """Let modules with parameters that stay whole, and their units, compute with plain tensors.

    Returns places by the parameter's `id`, for `keep_whole` to fill; parameters of `kept` stay unchanged.
    """
    tables: dict[str, _Places] = {}
    by_parameter: dict[int, list[_Places]] = {}
    for key, found in _places(view, kept).items():
        unit = next(each for each in units if all(is_in(path, each) for path, _ in found))
        paths = dict.fromkeys([unit, *(path for path, _ in found)])
        by_parameter[key] = [tables.setdefault(path, []) for path in paths]
    modules = {path: view.modules[path] for path in tables}
    for path, module in modules.items():
        note_module(module, plain=tables[path])
    add_mixin(list(modules.values()), SeesPlain)
    return by_parameter


def keep_whole(
    view: ModelView,
    mesh: DeviceMesh,
    tables: Mapping[int, Sequence[_Places]],
    kept: frozenset[int],
    *,
    watch: bool,
) -> None:
    """Replace parameters that stay whole by replicated ones, watched by `watch_whole` if asked. Mutates the model;
    its FSDP units are sharded."""
    for key, found in _places(view, kept).items():
        places = [place for _, place in found]
        old = places[0].module.get_parameter(places[0].name)
        new, placements = _replicated(view.model, mesh, old, places[0])
        for module, name in places:
            setattr(module, name, new)
        if watch and new.requires_grad:
            watch_whole(new)
        for table in tables[key]:
            table += [(place, placements) for place in places]


def _places(view: ModelView, kept: frozenset[int]) -> Mapping[int, Sequence[tuple[str, _Place]]]:
    """Return the modules of each parameter that stays whole, with their paths, by the parameter's `id`."""
    found: dict[int, list[tuple[str, _Place]]] = {}
    for path, module in view.modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if stays_whole(parameter) and id(parameter) not in kept:
                found.setdefault(id(parameter), []).append((path, _Place(module, name)))
    return found


def _replicated(
    root: nn.Module, mesh: DeviceMesh, old: nn.Parameter, place: _Place
) -> tuple[nn.Parameter, Sequence[Placement]]:
    """Return the parameter to store, and the placements of its gradients."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    along: list[Placement] = [Partial("avg")] * mesh.ndim
    if is_dtensor(old):  # which tensor parallelism has put on every rank along tp
        wanted = mesh.ndim + old.device_mesh.ndim
        mesh = _wider(root, wanted, place.name)
        layer = getattr(place.module, "accel_layer", None)
        summands = layer is not None and layer.rule.summands
        along += [Partial() if summands else Replicate()] * (wanted - len(along))
    stored = DTensor.from_local(local_part(old), mesh, [Replicate()] * mesh.ndim, run_check=False)
    new = nn.Parameter(stored, old.requires_grad)
    await_mean(new, along)
    return new, along


def _wider(root: nn.Module, ndim: int, name: str) -> DeviceMesh:
    """Return the mesh of the parameters that `fully_shard` took after tensor parallelism."""
    for each in root.parameters():
        if is_dtensor(each) and each.device_mesh.ndim == ndim:
            return each.device_mesh
    raise PrepareError(
        "a scalar parameter has no sharded parameter next to it",
        expected="one that fully_shard has taken, of the same model",
        got="none",
        where=f"prepare_model, strategy fsdp, {name}",
        fix="Give it the shape [1], or leave fewer modules out of the plan.",
    )


def _plain(stored: nn.Parameter, placements: Sequence[Placement]) -> torch.Tensor:
    if not (stored.requires_grad and torch.is_grad_enabled()):
        return local_part(stored)
    if not awaited_of(stored):  # a new parameter, as model.to(dtype) makes
        await_mean(stored, placements)
    watch_whole(stored, again=True)
    return own_gradient(cast(Any, stored).to_local(grad_placements=placements))
