# SPDX-License-Identifier: Apache-2.0
"""Scripts written for Accelerate, rewritten on accel. Begin with `_rewrite.py`: it has the order of the passes.

`_files.py` reads and writes scripts and notebooks. A pass reads the facts of a script (`_script.py`) and leaves notes
(`_tree.py`): `_reading.py` writes loops over a loader, `_loops.py` the training loop from its sorted statements
(`_window.py`), `_checkpoints.py` saves and loads, `_session.py` the session, `_names.py` the names that are left.
"""

from accel.migrate._files import (
    FileResult as FileResult,
    find_scripts as find_scripts,
    in_order as in_order,
    launch_files as launch_files,
    migrate_bytes as migrate_bytes,
    migrate_file as migrate_file,
    read_shared as read_shared,
    write as write,
)
