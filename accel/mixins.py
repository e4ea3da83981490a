# SPDX-License-Identifier: Apache-2.0
"""Classes put before the class of a live object, and taken away again; the object keeps its type's name and pickles."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from accel.errors import ConfigError

_MARK = "_accel_mixed"  # attribute of each class made here: its description


class Inserted(NamedTuple):
    """A class, or its subclasses, in front of users' classes."""

    name: str  # of the class
    home: str  # its file in `accel/`
    by: str  # the function that inserts it
    until: str = ""  # event that removes it; "" for none


# The order of the classes in a call. It does not depend on the order of insertion. `fully_shard` puts a class in front
# of the present ones. Classes that are inserted later stand in front of that class, also in this order.
INSERTED = (
    Inserted("AttributesWatched", "parallel/_calls.py", "forwards that are recorded", "the recorded forward ends"),
    Inserted("_Unseen", "parallel/axes/tensor/_trace.py", "traces of a copied model", "the copy is freed"),
    Inserted("Answered", "parallel/_calls.py", "forwards that are replayed", "the replayed forward ends"),
    Inserted("_Shows", "parallel/_entries.py", "prepare_model: methods= under DDP"),
    # The first batches are compared before anything computes with them.
    Inserted("_Compared", "parallel/_same_batches.py", "prepare_model: tp, cp"),
    Inserted("_HasMethods", "parallel/_entries.py", "prepare_model: methods="),
    Inserted("_Part", "parallel/_entries.py", "prepare_model: methods="),
    Inserted("Elsewhere", "parallel/axes/pipeline/_held.py", "prepare_model: pp"),
    Inserted("PartlyHeld", "parallel/axes/pipeline/_held.py", "prepare_model: pp"),
    Inserted("Pipelined", "parallel/axes/pipeline/_pipeline.py", "prepare_model: pp"),
    Inserted("DefersLogits", "parallel/logits/_deferred.py", "defer_logits", "prepare_model, which adds it again"),
    # A later stage stops the forward by an exception, which nothing below may take for an error.
    Inserted("Stoppable", "parallel/axes/pipeline/_replayed.py", "prepare_model: pp"),
    # torch keeps graphs by the first frame that is not torch's own.
    Inserted("_Traced", "parallel/_compile.py", "compile_model"),
    # What follows sees parts in the place of a compiled region's arguments.
    Inserted("PositionRegion", "parallel/axes/context/_inner.py", "prepare_model: cp"),
    Inserted("PartRegion", "parallel/parts/_region.py", "prepare_model: tp"),
    Inserted("GraphedCall", "parallel/axes/tensor/_part_layers.py", "prepare_model: tp"),
    Inserted("WholeBuffers", "parallel/parts/_region.py", "prepare_model: tp, cp"),
    Inserted("EndedUnit", "parallel/axes/shard/_running.py", "prepare_model: fsdp"),
    # A call of the unit copies and fills containers anew.
    Inserted("CalledUnit", "parallel/axes/shard/_running.py", "prepare_model: fsdp"),
    # A second forward in backward does not change the caller's containers again.
    Inserted("FillsContainers", "parallel/_containers.py", "prepare_model: fsdp; dispatch_model", "hooks are removed"),
    # Only the inputs of a recomputed block leave the device.
    Inserted("Offloaded", "parallel/_offload.py", "offload_activations"),
    Inserted("InAutocast", "parallel/axes/shard/_options.py", "prepare_model: fsdp"),
    # Recomputation goes through all that computes.
    Inserted("Recomputed", "parallel/_compile.py", "checkpoint_activations", "a proof of a plan, on its copy"),
    Inserted("NormInFp32", "parallel/axes/shard/_options.py", "prepare_model: fsdp"),
    Inserted("SeesPlain", "parallel/axes/shard/_whole.py", "prepare_model: fsdp"),
    # Each part of the sequence goes through the division along tp.
    Inserted("Chunked", "parallel/_chunked.py", "chunk_sequence"),
    Inserted("_ByPositions", "parallel/axes/context/_forward.py", "prepare_model: cp"),
    Inserted("RegionEnd", "parallel/axes/tensor/_part_layers.py", "prepare_model: tp"),
    Inserted("LocalParameters", "parallel/axes/tensor/_layers.py", "prepare_model: tp"),
    Inserted("ListedBlock", "parallel/axes/experts/_listed.py", "prepare_model: ep"),
    Inserted("ListedExperts", "parallel/axes/experts/_listed.py", "prepare_model: ep"),
    Inserted("ListedExpert", "parallel/axes/experts/_listed.py", "prepare_model: ep"),
    Inserted("SharedExperts", "parallel/axes/experts/_layer.py", "prepare_model: ep"),
    # An entry runs in the place of the model's own forward.
    Inserted("_Entered", "parallel/_entries.py", "prepare_model: methods="),
    Inserted("WithOutputs", "precision/_model.py", "apply_precision: outputs="),
    Inserted("InFp32", "precision/_model.py", "apply_precision: fp32_modules="),
    Inserted("KeepsParameters", "parallel/_modules.py", "copies without values", "the copy is freed"),
)  # fmt: skip
_PLACES = {each.name: at for at, each in enumerate(INSERTED)}


class Mixin:
    """Base of the classes to put before others. Objects are pickled by their own class and the mixins before it."""

    if TYPE_CHECKING:  # of the class behind: on Python 3.12 torch.compile follows `super().forward`, and no cast of it

        def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object. FSDP's classes make objects of the classes behind them, as for a slice of an `nn.Sequential`,
        but only if they are asked without the mixins in front."""
        mixed = _description(cls)
        if mixed is None or mixed.bare.__new__ is object.__new__:
            make = super().__new__
            return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)
        found = mixed.bare.__new__(mixed.bare, *args, **kwargs)
        if type(found) is mixed.bare:
            found.__class__ = cls
        return found

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        kind = type(self)
        mixed = _description(kind)
        if mixed is None:
            return super().__reduce_ex__(protocol)
        reduced = cast("Any", mixed.bare).__reduce_ex__(self, max(protocol, 2))
        if isinstance(reduced, str):
            return reduced
        make, given, *rest = reduced
        make, *given = (mixed.bare if each is kind else each for each in (make, *given))
        return _restored, (mixed, make, tuple(given)), *rest


class KeepsFormat(Mixin):
    """Base of mixins of modules that compute in the dtype in which their parameters are stored, whatever the run's."""


def add_mixin(objects: Iterable[object], mixin: type[Mixin], **settings: object) -> None:
    """Put a class before the class of each object that lacks it, in its place of `INSERTED`. Mutates the objects.

    A class without a place goes in front. What is behind another library's class stays there. Objects of one class
    stay of one class, for which torch.compile compiles once. The settings become class attributes.
    Functions of the mixin have separate code in each class that is made: see `_own_code`.
    """
    made: dict[type, type] = {}
    for each in objects:
        own = type(each)
        if not issubclass(own, mixin):
            if own not in made:
                place = place_of(mixin)
                above, rest = _parted(own, lambda other, place=place: place_of(other) >= place)
                made[own] = _stacked(above, _Mixed(mixin, rest, settings))
            each.__class__ = made[own]


def remove_mixin(objects: Iterable[object], mixin: type[Mixin]) -> None:
    """Remove the class that `add_mixin` has put before others, unless a library's is before it. Mutates the objects."""
    made: dict[type, type] = {}
    for each in objects:
        own = type(each)
        if issubclass(own, mixin):
            if own not in made:
                made[own] = _without(own, mixin)
            each.__class__ = made[own]


class _Mixed:
    """A mixin and the class behind it, from which the class of both is made.

    Copies keep one class, and what one pickle holds of it is unpickled once.

    Attributes:
        mixin: the class in front.
        own: the class behind it, or the description of one that is itself made here.
        settings: attributes of the made class.
        made: the class that objects get.
    """

    def __init__(self, mixin: type, own: type | _Mixed, settings: Mapping[str, object]) -> None:
        behind = own.made if isinstance(own, _Mixed) else own
        names = {"__module__": behind.__module__, "__qualname__": behind.__qualname__}
        self.mixin = mixin
        self.own = own
        self.settings = dict(settings)
        words = [each for each in settings.values() if isinstance(each, str)]
        label = re.sub(r"\W+", "_", "_".join([behind.__name__, *words]))
        copies = {name: _own_code(each, label) for name, each in _functions(mixin).items()}
        if "forward" in copies:
            _show_arguments(copies["forward"], cast(Any, behind).forward)
        self.made: type[Any] = type(behind.__name__, (mixin, behind), {**copies, **names, **settings, _MARK: self})

    @property
    def bare(self) -> type[Any]:
        """The class behind all mixins."""
        return self.own.bare if isinstance(self.own, _Mixed) else self.own

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mixed, (self.mixin, self.own, self.settings)

    def __deepcopy__(self, memo: object) -> Self:
        return self


def _functions(mixin: type) -> dict[str, FunctionType]:
    """The functions of a mixin, except decorated ones."""
    kinds = [each for each in reversed(mixin.__mro__) if issubclass(each, Mixin) and each is not Mixin]
    found: dict[str, Any] = {name: each for kind in kinds for name, each in vars(kind).items()}
    return {name: each for name, each in found.items() if isinstance(each, FunctionType) and not vars(each)}


def _own_code(function: FunctionType, label: str) -> FunctionType:
    """Copy a function with another code object, named by a label.

    torch.compile keeps its graphs, and the sizes that it has seen, by code object, and makes few graphs for each.
    """
    code = function.__code__
    code = code.replace(co_name="_".join((code.co_name, "of", label)))
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    made.__annotations__ = function.__annotations__
    return made


def _show_arguments(made: FunctionType, behind: Any) -> None:
    """Let `inspect.signature` see the arguments of the function behind, by which transformers' `generate` goes."""
    with contextlib.suppress(TypeError, ValueError):
        made.__signature__ = inspect.signature(behind)


def _description(kind: type) -> _Mixed | None:
    mixed = vars(kind).get(_MARK)
    return mixed if isinstance(mixed, _Mixed) else None


def place_of(mixin: type) -> int:
    """Return the place of a mixin in `INSERTED`; -1, in front of all, for one without a row."""
    return next((_PLACES[each.__name__] for each in mixin.__mro__ if each.__name__ in _PLACES), -1)


def _parted(kind: type, begins: Callable[[type], bool]) -> tuple[list[_Mixed], type | _Mixed]:
    """Part a class before the first of its mixins for which `begins` is true; it ends at another library's class."""
    above: list[_Mixed] = []
    rest = _description(kind) or kind
    while isinstance(rest, _Mixed) and not begins(rest.mixin):
        above.append(rest)
        rest = rest.own
    return above, rest


def _stacked(above: Sequence[_Mixed], rest: type | _Mixed) -> type:
    for each in reversed(above):
        rest = _Mixed(each.mixin, rest, each.settings)
    return rest.made if isinstance(rest, _Mixed) else rest


def _without(kind: type, mixin: type) -> type:
    """The class without a mixin; those before it are put before what was behind it."""
    above, rest = _parted(kind, lambda other: other is mixin)
    if not isinstance(rest, _Mixed):
        raise ConfigError(
            "a class cannot be removed behind another library's",
            expected=f"{mixin.__name__} in front",
            got=", ".join(each.__qualname__ for each in kind.__mro__),
            fix="Undo first what was done to the object last.",
        )
    return _stacked(above, rest.own)


def _restored(mixed: _Mixed, make: Any, given: tuple[Any, ...]) -> object:
    made = make(*given)
    made.__class__ = mixed.made
    return made
