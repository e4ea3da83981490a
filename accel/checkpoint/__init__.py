# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors and values: planned purely, written by all ranks, committed by one rename."""

from accel.checkpoint._codec import check_tensor as check_tensor
from accel.checkpoint._codec import decode as decode
from accel.checkpoint._codec import encode as encode
from accel.checkpoint._directory import Saved as Saved
from accel.checkpoint._directory import latest_checkpoint as latest_checkpoint
from accel.checkpoint._directory import read_checkpoint as read_checkpoint
from accel.checkpoint._manifest import RANKS as RANKS
from accel.checkpoint._manifest import Item as Item
from accel.checkpoint._manifest import ItemKind as ItemKind
from accel.checkpoint._manifest import Manifest as Manifest
from accel.checkpoint._manifest import Piece as Piece
from accel.checkpoint._manifest import TensorEntry as TensorEntry
from accel.checkpoint._manifest import decode_manifest as decode_manifest
from accel.checkpoint._manifest import encode_manifest as encode_manifest
from accel.checkpoint._plan import Plan as Plan
from accel.checkpoint._plan import plan_writes as plan_writes
from accel.checkpoint._plan import tied as tied
from accel.checkpoint._save import Content as Content
from accel.checkpoint._save import save as save
from accel.checkpoint._settle import settle as settle
