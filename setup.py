# SPDX-License-Identifier: Apache-2.0
"""The README as the page of a package index shows it, where links to files of the repository lead nowhere.

Links to docs/ become those of the documentation, at the URL `Documentation` of `[project.urls]` in pyproject.toml.
While there is none, their text alone stays. All else of the package is declared in pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"\[([^\]]+)\]\((?!https://|#)(?:docs/([\w/-]+)\.md(#[\w-]+)?|[^)\s]+)\)")


def index_page(text: str, site: str | None) -> str:
    """Point links to pages of docs/ at a site; without one, and of links to other files, keep the text.

    Args:
        text: Markdown.
        site: URL of the documentation, in which docs/train.md is `train/`.
    """

    def lead(found: re.Match[str]) -> str:
        if site is None or not found[2]:
            return found[1]
        return f"[{found[1]}]({site.rstrip('/')}/{found[2]}/{found[3] or ''})"

    return LINK.sub(lead, text)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    setup(
        long_description=index_page((ROOT / "README.md").read_text(), urls.get("Documentation")),
        long_description_content_type="text/markdown",
    )
