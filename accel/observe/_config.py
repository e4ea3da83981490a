# SPDX-License-Identifier: Apache-2.0
"""A run's configuration as plain values, without credentials."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from accel.errors import ConfigError
from accel.run_folder import hide_in_config


def plain_config(config: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration that may be stored.

    Args:
        config: a mapping, msgspec Struct, dataclass, object with attributes such as argparse's Namespace, or None.

    Returns:
        Values as JSON has them, other objects as their text, and stars in place of credentials; and the dotted names of
        these.

    Raises:
        ConfigError: not a configuration.
    """
    if config is None:
        return {}, ()
    fields: object
    if isinstance(config, Mapping | msgspec.Struct) or _is_dataclass(config):
        fields = cast(object, config)
    elif hasattr(config, "__dict__") and not isinstance(config, type) and not callable(config):
        fields = vars(config)
    else:
        raise ConfigError(
            "not a configuration",
            expected="a mapping, a Struct, a dataclass or a Namespace",
            got=type(config).__name__,
            where="tracking, config=",
        )
    plain = cast("dict[str, Any]", msgspec.to_builtins(fields, str_keys=True, enc_hook=str))
    return hide_in_config(plain)


def _is_dataclass(config: object) -> bool:
    return dataclasses.is_dataclass(config) and not isinstance(config, type)
