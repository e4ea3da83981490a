# SPDX-License-Identifier: Apache-2.0
"""Files without ranks: durable writing, distrustful reading, safetensors, and folders that appear by one rename."""

from typing import TYPE_CHECKING

from accel.lazy import exports
from accel.storage._digests import FileEntry as FileEntry
from accel.storage._digests import Span as Span
from accel.storage._either import Lock as Lock
from accel.storage._either import list_names as list_names
from accel.storage._either import lock_place as lock_place
from accel.storage._either import open_directory as open_directory
from accel.storage._either import write_file as write_file
from accel.storage._files import AFTER_WRITE as AFTER_WRITE
from accel.storage._files import OpenDirectory as OpenDirectory
from accel.storage._files import disk_errors as disk_errors
from accel.storage._files import is_file_name as is_file_name
from accel.storage._files import make_folder as make_folder
from accel.storage._files import sync_folder as sync_folder
from accel.storage._header import MOST_TENSORS as MOST_TENSORS
from accel.storage._header import Header as Header
from accel.storage._header import TensorHeader as TensorHeader
from accel.storage._header import encode_header as encode_header
from accel.storage._header import read_header as read_header
from accel.storage._lock import LOCK as LOCK
from accel.storage._lock import FolderLock as FolderLock
from accel.storage._lock import take_lock as take_lock
from accel.storage._place import Place as Place
from accel.storage._place import RemotePath as RemotePath
from accel.storage._place import as_place as as_place
from accel.storage._publish import publish_file as publish_file
from accel.storage._publish import publish_weights as publish_weights
from accel.storage._publish import stage_files as stage_files
from accel.storage._remote import get_object as get_object
from accel.storage._remote import list_objects as list_objects
from accel.storage._remote import list_tree as list_tree
from accel.storage._remote import put_object as put_object
from accel.storage._remote import remove_objects as remove_objects
from accel.storage._remote_lock import Beat as Beat
from accel.storage._remote_lock import RemoteLock as RemoteLock
from accel.storage._shards import INDEX as INDEX
from accel.storage._shards import WEIGHTS as WEIGHTS
from accel.storage._shards import Index as Index
from accel.storage._shards import decode_index as decode_index
from accel.storage._shards import encode_index as encode_index
from accel.storage._shards import file_names as file_names
from accel.storage._shards import parse_size as parse_size
from accel.storage._shards import plan_shards as plan_shards
from accel.storage._stage import Leftover as Leftover
from accel.storage._stage import commit as commit
from accel.storage._stage import leftovers as leftovers
from accel.storage._stage import make_stage as make_stage
from accel.storage._stage import remove_flat as remove_flat
from accel.storage._stage import set_aside as set_aside

if TYPE_CHECKING:
    from accel.storage._reference import read_reference as read_reference
    from accel.storage._safetensors import dtype_name as dtype_name
    from accel.storage._safetensors import memory_of as memory_of
    from accel.storage._safetensors import stored_dtype as stored_dtype
    from accel.storage._safetensors import view_tensors as view_tensors
    from accel.storage._safetensors import write_tensors as write_tensors

_WITH_TORCH = {
    "_reference": ("read_reference",),
    "_safetensors": ("dtype_name", "memory_of", "stored_dtype", "view_tensors", "write_tensors"),
}
__getattr__ = exports("accel.storage", _WITH_TORCH)
