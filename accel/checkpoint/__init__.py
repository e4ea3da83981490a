# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors and values: planned purely, written by all ranks, committed by one rename.

What lists and checks folders works without torch; all else is loaded when it is asked for.
"""

from typing import TYPE_CHECKING

from accel.checkpoint._directory import latest_checkpoint as latest_checkpoint
from accel.checkpoint._directory import manifest_of as manifest_of
from accel.checkpoint._manifest import RANKS as RANKS
from accel.checkpoint._manifest import Item as Item
from accel.checkpoint._manifest import ItemKind as ItemKind
from accel.checkpoint._manifest import Manifest as Manifest
from accel.checkpoint._manifest import Piece as Piece
from accel.checkpoint._manifest import TensorEntry as TensorEntry
from accel.checkpoint._manifest import decode_manifest as decode_manifest
from accel.checkpoint._manifest import encode_manifest as encode_manifest
from accel.checkpoint._manifest import step_of as step_of
from accel.checkpoint._plan import Box as Box
from accel.checkpoint._plan import plan_checks as plan_checks
from accel.checkpoint._plan import plan_writes as plan_writes
from accel.checkpoint._retention import Keep as Keep
from accel.checkpoint._retention import check_keep as check_keep
from accel.checkpoint._retention import check_metrics as check_metrics
from accel.checkpoint._survey import all_tensors as all_tensors
from accel.checkpoint._survey import compare as compare
from accel.checkpoint._survey import describe as describe
from accel.checkpoint._survey import find_checkpoint as find_checkpoint
from accel.checkpoint._survey import prune as prune
from accel.checkpoint._survey import survey as survey
from accel.checkpoint._survey import verify as verify
from accel.lazy import exports

if TYPE_CHECKING:
    from accel.checkpoint._background import Saving as Saving
    from accel.checkpoint._background import save_async as save_async
    from accel.checkpoint._codec import Kept as Kept
    from accel.checkpoint._codec import Making as Making
    from accel.checkpoint._codec import check_tensor as check_tensor
    from accel.checkpoint._codec import decode as decode
    from accel.checkpoint._codec import encode as encode
    from accel.checkpoint._codec import encode_record as encode_record
    from accel.checkpoint._codec import has_records as has_records
    from accel.checkpoint._codec import record_tag as record_tag
    from accel.checkpoint._codec import stored_field as stored_field
    from accel.checkpoint._codec import tensors_in as tensors_in
    from accel.checkpoint._live_tensors import checksum as checksum
    from accel.checkpoint._live_tensors import held_box as held_box
    from accel.checkpoint._live_tensors import memory_id as memory_id
    from accel.checkpoint._live_tensors import tied as tied
    from accel.checkpoint._merge import differing_values as differing_values
    from accel.checkpoint._merge import merge as merge
    from accel.checkpoint._newest import Held as Held
    from accel.checkpoint._newest import SkippedCheckpoints as SkippedCheckpoints
    from accel.checkpoint._newest import hold_newest as hold_newest
    from accel.checkpoint._read import Saved as Saved
    from accel.checkpoint._read import open_checkpoint as open_checkpoint
    from accel.checkpoint._records import Classes as Classes
    from accel.checkpoint._records import MisfitError as MisfitError
    from accel.checkpoint._records import is_record as is_record
    from accel.checkpoint._records import make_record as make_record
    from accel.checkpoint._records import named_classes as named_classes
    from accel.checkpoint._records import stored_names as stored_names
    from accel.checkpoint._save import save as save
    from accel.checkpoint._statements import Content as Content

_WITH_TORCH = {
    "_background": ("Saving", "save_async"),
    "_codec": (
        "Kept",
        "Making",
        "check_tensor",
        "decode",
        "encode",
        "encode_record",
        "has_records",
        "record_tag",
        "stored_field",
        "tensors_in",
    ),
    "_merge": ("differing_values", "merge"),
    "_newest": ("Held", "SkippedCheckpoints", "hold_newest"),
    "_read": ("Saved", "open_checkpoint"),
    "_records": ("Classes", "MisfitError", "is_record", "make_record", "named_classes", "stored_names"),
    "_save": ("save",),
    "_live_tensors": ("checksum", "held_box", "memory_id", "tied"),
    "_statements": ("Content",),
}
__getattr__ = exports("accel.checkpoint", _WITH_TORCH)
