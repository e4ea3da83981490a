# SPDX-License-Identifier: Apache-2.0
"""Settings of a run and of a launch: typed records, their files, and the order of their sources. Free of torch.

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
    from accel.config._accelerate_deepspeed import translate_deepspeed as translate_deepspeed
    from accel.config._files import (
        DEFAULT_FILE as DEFAULT_FILE,
        decode as decode,
        decode_values as decode_values,
        encode as encode,
        read_config as read_config,
        read_text as read_text,
        refuse_yaml as refuse_yaml,
    )
    from accel.config._format import update_values as update_values
    from accel.config._record import FIELDS as FIELDS, LaunchConfig as LaunchConfig
    from accel.config._resolve import (
        CONFIG_VARIABLE as CONFIG_VARIABLE,
        ConfigFile as ConfigFile,
        Resolved as Resolved,
        Source as Source,
        resolve as resolve,
    )
    from accel.config._schema import (
        Field as Field,
        from_plain as from_plain,
        from_text as from_text,
        to_text as to_text,
    )
    from accel.config._settings import (
        SETTINGS as SETTINGS,
        SOURCES_VARIABLE as SOURCES_VARIABLE,
        GroupKeywords as GroupKeywords,
        SettingKeywords as SettingKeywords,
        Settings as Settings,
    )
    from accel.config._torchrun import TORCHRUN_VARIABLES as TORCHRUN_VARIABLES

__getattr__ = exports(
    __name__,
    {
        "_accelerate": ("Imported", "LeftOut", "import_accelerate"),
        "_accelerate_deepspeed": ("translate_deepspeed",),
        "_files": ("DEFAULT_FILE", "decode", "decode_values", "encode", "read_config", "read_text", "refuse_yaml"),
        "_format": ("update_values",),
        "_record": ("FIELDS", "LaunchConfig"),
        "_resolve": ("CONFIG_VARIABLE", "ConfigFile", "Resolved", "Source", "resolve"),
        "_schema": ("Field", "from_plain", "from_text", "to_text"),
        "_settings": ("SETTINGS", "SOURCES_VARIABLE", "GroupKeywords", "SettingKeywords", "Settings"),
        "_torchrun": ("TORCHRUN_VARIABLES",),
    },
)
