# SPDX-License-Identifier: Apache-2.0
"""Settings of a run and of a launch: typed records, their files, and the order of their sources. Free of torch.

Begin with `_settings.py`, where each setting is declared once. `_schema.py` derives flags, variables and file keys from
it, `_files.py` reads and writes files, `_resolve.py` decides between sources. `_accelerate.py` imports others' files.
Names resolve on first use: a launch without a file loads no parser of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.config._accelerate import (
        Imported as Imported,
        LeftOut as LeftOut,
        import_accelerate as import_accelerate,
    )
    from accel.config._accelerate_sections import translate_deepspeed as translate_deepspeed
    from accel.config._files import (
        DEFAULT_FILE as DEFAULT_FILE,
        decode as decode,
        decode_values as decode_values,
        encode as encode,
        read_config as read_config,
        read_text as read_text,
        refuse_yaml as refuse_yaml,
    )
    from accel.config._resolve import (
        CONFIG_VARIABLE as CONFIG_VARIABLE,
        TORCHRUN_VARIABLES as TORCHRUN_VARIABLES,
        ConfigFile as ConfigFile,
        Resolved as Resolved,
        Source as Source,
        resolve as resolve,
        update_values as update_values,
    )
    from accel.config._schema import (
        Field as Field,
        from_plain as from_plain,
        from_text as from_text,
        to_text as to_text,
    )
    from accel.config._settings import (
        FIELDS as FIELDS,
        SETTINGS as SETTINGS,
        SOURCES_VARIABLE as SOURCES_VARIABLE,
        GroupKeywords as GroupKeywords,
        LaunchConfig as LaunchConfig,
        SettingKeywords as SettingKeywords,
        Settings as Settings,
    )

__getattr__ = exports(
    __name__,
    {
        "_accelerate": (
            "Imported",
            "LeftOut",
            "import_accelerate",
        ),
        "_accelerate_sections": ("translate_deepspeed",),
        "_files": (
            "DEFAULT_FILE",
            "decode",
            "decode_values",
            "encode",
            "read_config",
            "read_text",
            "refuse_yaml",
        ),
        "_resolve": (
            "update_values",
            "CONFIG_VARIABLE",
            "ConfigFile",
            "Resolved",
            "Source",
            "resolve",
            "TORCHRUN_VARIABLES",
        ),
        "_settings": (
            "FIELDS",
            "LaunchConfig",
            "SETTINGS",
            "SOURCES_VARIABLE",
            "GroupKeywords",
            "SettingKeywords",
            "Settings",
        ),
        "_schema": (
            "Field",
            "from_plain",
            "from_text",
            "to_text",
        ),
    },
)
