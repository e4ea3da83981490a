# SPDX-License-Identifier: Apache-2.0
"""The last import of a process that forks: collections in its children skip what it has imported, and copy no page."""

import gc

gc.collect()
gc.freeze()
