# SPDX-License-Identifier: Apache-2.0
"""Files without ranks: durable writing, distrustful reading, safetensors, and folders that appear by one rename.

Begin with `_place.py`: a `Place` is a folder on disk (`_files.py`) or in a store (`_objects.py`,
`_store.py`), with one writer at a time (`_lock.py`). Checkpoints write and read through it. Ranges of large files are
planned in `_ranges.py` and read past the page cache by `_local_ranges.py`. `_safetensors.py` has the format,
`_weight_files.py` the layout of other libraries.
"""

from accel.storage._files import (
    AFTER_WRITE as AFTER_WRITE,
    Digest as Digest,
    FileEntry as FileEntry,
    OpenDirectory as OpenDirectory,
    Span as Span,
    is_file_name as is_file_name,
    open_directory as open_directory,
    write_file as write_file,
)
from accel.storage._local_ranges import LocalRanges as LocalRanges
from accel.storage._lock import LOCK as LOCK, host_name as host_name, take_lock as take_lock
from accel.storage._objects import RemotePath as RemotePath, RemoteRanges as RemoteRanges
from accel.storage._place import (
    HostFolder as HostFolder,
    Lock as Lock,
    Place as Place,
    as_place as as_place,
    commit as commit,
    folder_of as folder_of,
    lag_of as lag_of,
    leftovers as leftovers,
    make_folder as make_folder,
    make_stage as make_stage,
    remove_flat as remove_flat,
    set_aside as set_aside,
)
from accel.storage._ranges import (
    CHUNK as CHUNK,
    PAGE as PAGE,
    ByteRanges as ByteRanges,
    Passed as Passed,
    Wanted as Wanted,
)
from accel.storage._safetensors import (
    DTYPE_NAMES as DTYPE_NAMES,
    FLOATS as FLOATS,
    ITEM_BITS as ITEM_BITS,
    MEMORY_BITS as MEMORY_BITS,
    MOST_TENSORS as MOST_TENSORS,
    WEIGHT_FLOATS as WEIGHT_FLOATS,
    Header as Header,
    TensorHeader as TensorHeader,
    dtype_name as dtype_name,
    encode_tensors as encode_tensors,
    fetch_header as fetch_header,
    memory_of as memory_of,
    read_header as read_header,
    read_reference as read_reference,
    storable_dtype as storable_dtype,
    stored_dtype as stored_dtype,
    tensor_bytes as tensor_bytes,
    torch_dtypes as torch_dtypes,
    view_tensors as view_tensors,
    write_tensors as write_tensors,
)
from accel.storage._weight_files import (
    INDEX as INDEX,
    WEIGHTS as WEIGHTS,
    decode_index as decode_index,
    encode_index as encode_index,
    file_names as file_names,
    local_target as local_target,
    parse_size as parse_size,
    plan_shards as plan_shards,
    publish_file as publish_file,
    publish_weights as publish_weights,
    staged as staged,
)
