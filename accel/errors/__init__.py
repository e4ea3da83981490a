# SPDX-License-Identifier: Apache-2.0
"""The error tree: every error reports the expected value, the actual one, the place, and the fix.

All errors derive from `AccelError`, with these facts as fields for programs. Begin with `_base.py`: the base, and
errors as plain values, by which all ranks raise the same one. `_checks.py` refuses names with the closest valid one.
"""

from __future__ import annotations

from accel.errors._base import AccelError as AccelError, escaped

__all__ = [
    "AccelError",
    "CheckpointError",
    "CollectiveMismatch",
    "ConfigError",
    "ContextClosedError",
    "DataError",
    "DeviceError",
    "EnvError",
    "LaunchError",
    "MissingExtraError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerError",
    "PlacementError",
    "PrepareError",
    "ServerError",
    "StageError",
    "StepError",
    "StreamError",
    "TrackerError",
    "TreeError",
]
__dir__ = __all__.copy


class EnvError(AccelError, ValueError):
    """The environment contradicts itself, or a variable has an invalid value."""


class ConfigError(AccelError, ValueError):
    """An argument is outside its range, or has no effect where it was given."""


class PlacementError(ConfigError):
    """A model does not fit into the memory that a device map may use; nothing has been read."""


class TreeError(AccelError, TypeError):
    """A nested value holds a container of an unknown kind."""


class ContextClosedError(AccelError, RuntimeError):
    """A context was used after the end of its scope."""


class DeviceError(AccelError, RuntimeError):
    """A device is missing, or a value is on another device than the context's."""


class PrepareError(AccelError, ValueError):
    """Objects passed to `prepare` do not fit together."""


class DataError(AccelError, ValueError):
    """A loader, cursor or batch cannot be used as asked."""


class StepError(AccelError, RuntimeError):
    """The calls of a training step came in an order that would lose or double gradients."""


class StageError(AccelError, RuntimeError):
    """A stage of a pipeline failed, or the model cannot run as stages; stage, micro-batch and rank are named."""


class NonFiniteError(AccelError, FloatingPointError):
    """A gradient holds inf or NaN; parameters have not been changed."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit; nothing has changed unless the message reports it.

    Its text escapes characters that terminals act on, as names from files may hold them; its fields do not.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


class TrackerError(AccelError, RuntimeError):
    """A tracker lost records, and the trackers are strict; every rank raises this."""


class StreamError(AccelError, RuntimeError):
    """A weight that is not in memory cannot be used as asked, or could not be fetched."""


class CollectiveMismatch(AccelError, RuntimeError):  # noqa: N818 - the name users know from DESIGN and from the reports
    """Ranks called different collectives, or one collective with mismatched values."""


class PeerError(AccelError, RuntimeError):
    """Another rank failed in a call that all ranks make together."""


class ServerError(AccelError, RuntimeError):
    """A server that samples is gone, stale, half loaded, or has other weights than were sent."""


class LaunchError(AccelError, RuntimeError):
    """A launch cannot start as asked."""


class OutOfMemoryError(AccelError, MemoryError):
    """A rank ran out of memory; every rank raises this."""


class MissingExtraError(AccelError, ImportError):
    """An optional package is missing; the message has the install line."""
