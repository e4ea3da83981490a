# SPDX-License-Identifier: Apache-2.0
"""Records the keys of the installed DeepSpeed's JSON, as `_keys.py` of its engine has them; run it to write them."""

from __future__ import annotations

import enum
import importlib.metadata
import types
import typing
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent.parent / "accel" / "engines" / "deepspeed" / "_keys.py"
_KINDS = {bool: "bool", int: "int", float: "float"}
_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""Keys of DeepSpeed's JSON and their kinds, recorded by `tests/helpers/deepspeed_keys.py` from the pinned version."""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "{version}"
'''


def _kind(annotation: Any) -> str:
    options = [each for each in typing.get_args(annotation) if each is not types.NoneType] or [annotation]
    found = {_KINDS.get(each, "any") for each in options}
    if len(found) > 1 or not found:
        return "any"
    [kind] = found
    is_enum = isinstance(options[0], type) and issubclass(options[0], enum.Enum) and issubclass(options[0], str)
    return "|".join(str(each.value) for each in options[0]) if is_enum and len(options) == 1 else kind


def _sections() -> dict[str, Any]:
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return {
        "bf16": DeepSpeedBF16Config,
        "comet": CometConfig,
        "compile": CompileConfig,
        "csv_monitor": CSVConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }


def recorded() -> str:
    """The text of the module for the installed version."""
    from deepspeed.runtime import config

    removed = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    removed += [f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS]
    lines = [_HEAD.format(version=importlib.metadata.version("deepspeed"))]
    renamed: dict[str, str] = {}
    lines.append("# Section: its keys, all that it has, with bool, int, float, the texts that it takes, or any.")
    lines.append("KINDS: Mapping[str, Mapping[str, str]] = {")
    for section, model in _sections().items():
        lines.append(f'    "{section}": {{')
        for name, field in sorted(model.model_fields.items()):
            key, extra = field.alias or name, field.json_schema_extra or {}
            if extra.get("deprecated"):
                renamed[f"{section}.{key}"] = extra["new_param"]
            else:
                names = sorted({key, name}) if model.model_config.get("populate_by_name") else [key]
                lines += [f'        "{each}": "{_kind(field.annotation)}",' for each in names]
        lines.append("    },")
    lines.append("}\n\n# Keys of older versions that this one refuses.\nREMOVED = (")
    lines += [f'    "{each}",' for each in sorted(removed)]
    lines.append(")\n\n# Older names, and those that took their places.\nRENAMED: Mapping[str, str] = {")
    lines += [f'    "{old}": "{new}",' for old, new in sorted(renamed.items())]
    return "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(recorded())
