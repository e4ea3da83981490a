# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model by the fields of its configuration, read as from a file of transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.estimate import Transformer, read_transformer


def transformer_of(fields: Mapping[str, Any]) -> Transformer:
    """Return what `read_transformer` finds in a `config.json` of these fields."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        _ = path.write_text(json.dumps(fields, default=str))
        return read_transformer(path)
