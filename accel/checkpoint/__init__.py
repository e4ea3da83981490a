# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors and values: planned purely, written by all ranks, committed by one rename.

Begin with `_save.py`. Ranks' statements (`_snapshot.py`, from `_live_tensors.py`, values by `_encoding.py`) become a
plan (`_plan.py`) and the manifest (`_manifest.py`); each rank writes its share, rank 0 commits, and `_retention.py`
deletes. `_newest.py` finds the checkpoint to load, `_read.py` reads its boxes, by `_recipes.py` under other names.
`_background.py` saves in a thread; `_hosts.py` has what a save asks of its folder, one of all ranks or one of each host.
Names for listing and checking load without torch.
"""

from typing import TYPE_CHECKING

from accel.checkpoint._manifest import (
    RANKS as RANKS,
    Item as Item,
    ItemKind as ItemKind,
    Manifest as Manifest,
    StoredPiece as StoredPiece,
    TensorEntry as TensorEntry,
    decode_manifest as decode_manifest,
    encode_manifest as encode_manifest,
    has_records as has_records,
    is_list as is_list,
    is_object as is_object,
    latest_checkpoint as latest_checkpoint,
    manifest_of as manifest_of,
    record_names as record_names,
    step_of as step_of,
    stored_field as stored_field,
    tensors_in as tensors_in,
)
from accel.checkpoint._plan import (
    Box as Box,
    main_readers as main_readers,
    plan_checks as plan_checks,
    plan_writes as plan_writes,
    whole as whole,
)
from accel.checkpoint._recipes import (
    Recipe as Recipe,
    Strided as Strided,
    StridedPart as StridedPart,
    apply_recipes as apply_recipes,
    check_recipes as check_recipes,
    cut as cut,
    file_order as file_order,
    in_file as in_file,
    inverse as inverse,
    is_contiguous as is_contiguous,
    runs as runs,
)
from accel.checkpoint._retention import (
    Keep as Keep,
    all_tensors as all_tensors,
    check_keep as check_keep,
    check_metrics as check_metrics,
    compare as compare,
    describe as describe,
    find_checkpoint as find_checkpoint,
    prune as prune,
    survey as survey,
    verify as verify,
)
from accel.lazy import exports

if TYPE_CHECKING:
    from accel.checkpoint._background import Saving as Saving, save_async as save_async
    from accel.checkpoint._encoding import (
        Kept as Kept,
        Making as Making,
        decode as decode,
        encode as encode,
        encode_record as encode_record,
    )
    from accel.checkpoint._live_tensors import (
        check_tensor as check_tensor,
        checksum as checksum,
        held_box as held_box,
        memory_id as memory_id,
        tied as tied,
    )
    from accel.checkpoint._merge import differing_values as differing_values, merge as merge
    from accel.checkpoint._newest import (
        Held as Held,
        SkippedCheckpoints as SkippedCheckpoints,
        agree_on_readers as agree_on_readers,
        hold_newest as hold_newest,
    )
    from accel.checkpoint._read import Saved as Saved, open_checkpoint as open_checkpoint
    from accel.checkpoint._records import (
        Classes as Classes,
        DiffersByRank as DiffersByRank,
        JoinsRanks as JoinsRanks,
        MisfitError as MisfitError,
        is_record as is_record,
        make_record as make_record,
        named_classes as named_classes,
        record_tag as record_tag,
        stored_names as stored_names,
    )
    from accel.checkpoint._save import save as save
    from accel.checkpoint._snapshot import Content as Content

_WITH_TORCH = {
    "_background": (
        "Saving",
        "save_async",
    ),
    "_encoding": (
        "Making",
        "decode",
        "Kept",
        "encode",
        "encode_record",
    ),
    "_merge": (
        "differing_values",
        "merge",
    ),
    "_newest": (
        "Held",
        "SkippedCheckpoints",
        "agree_on_readers",
        "hold_newest",
    ),
    "_read": (
        "Saved",
        "open_checkpoint",
    ),
    "_records": (
        *("Classes", "DiffersByRank", "JoinsRanks"),
        "MisfitError",
        "is_record",
        "make_record",
        "named_classes",
        "record_tag",
        "stored_names",
    ),
    "_save": ("save",),
    "_live_tensors": (
        "check_tensor",
        "checksum",
        "held_box",
        "memory_id",
        "tied",
    ),
    "_snapshot": ("Content",),
}
__getattr__ = exports("accel.checkpoint", _WITH_TORCH)
