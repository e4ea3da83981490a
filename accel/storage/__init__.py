# SPDX-License-Identifier: Apache-2.0
"""Files without ranks: durable writing, distrustful reading, safetensors, and folders that appear by one rename."""

from typing import TYPE_CHECKING

from accel.lazy import exports
from accel.storage._files import AFTER_WRITE as AFTER_WRITE
from accel.storage._files import FileEntry as FileEntry
from accel.storage._files import Span as Span
from accel.storage._files import disk_errors as disk_errors
from accel.storage._files import is_file_name as is_file_name
from accel.storage._files import write_file as write_file
from accel.storage._folders import commit as commit
from accel.storage._folders import leftovers as leftovers
from accel.storage._folders import make_folder as make_folder
from accel.storage._folders import make_stage as make_stage
from accel.storage._folders import remove_flat as remove_flat
from accel.storage._folders import set_aside as set_aside
from accel.storage._lock import LOCK as LOCK
from accel.storage._lock import take_lock as take_lock
from accel.storage._objects import RemotePath as RemotePath
from accel.storage._place import Lock as Lock
from accel.storage._place import Place as Place
from accel.storage._place import as_place as as_place
from accel.storage._publish import publish_file as publish_file
from accel.storage._publish import publish_weights as publish_weights
from accel.storage._publish import stage_files as stage_files
from accel.storage._reading import OpenDirectory as OpenDirectory
from accel.storage._reading import open_directory as open_directory
from accel.storage._safetensors import MOST_TENSORS as MOST_TENSORS
from accel.storage._safetensors import Header as Header
from accel.storage._safetensors import dtype_name as dtype_name
from accel.storage._safetensors import encode_tensors as encode_tensors
from accel.storage._safetensors import memory_of as memory_of
from accel.storage._safetensors import read_header as read_header
from accel.storage._safetensors import stored_dtype as stored_dtype
from accel.storage._safetensors import view_tensors as view_tensors
from accel.storage._safetensors import write_tensors as write_tensors
from accel.storage._weight_files import INDEX as INDEX
from accel.storage._weight_files import WEIGHTS as WEIGHTS
from accel.storage._weight_files import decode_index as decode_index
from accel.storage._weight_files import encode_index as encode_index
from accel.storage._weight_files import file_names as file_names
from accel.storage._weight_files import parse_size as parse_size
from accel.storage._weight_files import plan_shards as plan_shards

if TYPE_CHECKING:
    from accel.storage._foreign_safetensors import read_reference as read_reference

__getattr__ = exports("accel.storage", {"_foreign_safetensors": ("read_reference",)})
