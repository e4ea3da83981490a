# SPDX-License-Identifier: Apache-2.0
"""Scripts written for Accelerate, rewritten on accel. Begin with `_rewrite.py`: it has the order of the passes."""

from accel.migrate._files import (
    FileResult as FileResult,
    find_scripts as find_scripts,
    launch_files as launch_files,
    migrate_bytes as migrate_bytes,
    migrate_file as migrate_file,
    write as write,
)
