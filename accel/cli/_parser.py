# SPDX-License-Identifier: Apache-2.0
"""A parser of flags with typed errors and without abbreviations."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from accel.cli._other_flags import other_flag
from accel.errors import ConfigError, did_you_mean

_CLOSE = 0.8  # likeness of a misspelt flag; one of a script may be as like as 0.75


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations that raises instead of leaving the process.

    Args:
        prog: the command.
        usage: its words.
        description: text above the flags. Its lines stay if it has several.
        script: word that ends the flags, if other flags may follow it; empty for none.
    """

    def __init__(self, prog: str, *, usage: str, description: str, script: str = "") -> None:
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self._script = script
        if "\n" in description:
            self.formatter_class = argparse.RawDescriptionHelpFormatter

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words, all of them.

        Raises:
            ConfigError: a flag is unknown, lacks its value, or has one that it cannot take.
        """
        known, unknown = self.parse_known_args(words)
        for word in unknown:
            name = word.partition("=")[0]
            fix = other_flag(word, self.flags()) or self._advice(name)
            raise ConfigError("unknown flag", got=repr(name), where=self.prog, fix=fix)
        return known

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where=self.prog, fix=f"`{self.prog} --help` shows the flags.")

    def _advice(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.flags(), n=1, cutoff=_CLOSE if self._script else 0.6)
        if near or not self._script:
            return did_you_mean(name, self.flags())
        right = f"`{self.prog} {self._script} {name}`"
        return f"Flags of the script come after it: {right}; {self.prog} --help lists others."

    def flags(self) -> list[str]:
        """Return the flags that it knows, by their long names."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
