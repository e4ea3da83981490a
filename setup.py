# SPDX-License-Identifier: Apache-2.0
"""The steps of a build that pyproject.toml cannot state: the pages as text, and the README for a package index.

The pages of docs/ and the scripts of examples/ go into the wheel, for `accel docs` and `accel examples`. On the page
of an index, links to files of the repository lead nowhere: links to docs/ become those of the documentation, at the
URL `Documentation` of `[project.urls]` in pyproject.toml. While there is none, their text alone stays. All else of
the package is declared in pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https://|#)(?:docs/([\w/-]+)\.md(#[\w-]+)?|[^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(docs/([\w/.-]+)\)")
TEXTS = ("*.md", "api/*.md", "concepts/*.md", "recipes/*.md")


def index_page(text: str, site: str | None) -> str:
    """Point links and pictures of docs/ at a site; without one, and of links to other files, keep the text.

    Args:
        text: Markdown.
        site: URL of the documentation, in which docs/train.md is `train/`.
    """

    def lead(found: re.Match[str]) -> str:
        if site is None or not found[2]:
            return found[1]
        return f"[{found[1]}]({site.rstrip('/')}/{found[2]}/{found[3] or ''})"

    def show(found: re.Match[str]) -> str:
        return found[1] if site is None else f"![{found[1]}]({site.rstrip('/')}/{found[2]})"

    return PICTURE.sub(show, LINK.sub(lead, text))


class BuildWithPages(build_py):
    """Copy pages and examples to `accel/pages/` and `accel/examples/` of the build, unless it is editable."""

    def run(self) -> None:
        """Build the package, then copy them."""
        super().run()
        if self.editable_mode:
            return
        docs, examples = ROOT / "docs", ROOT / "examples"
        copies = {page: Path("pages", page.relative_to(docs)) for text in TEXTS for page in sorted(docs.glob(text))}
        copies |= {script: Path("examples", script.name) for script in sorted(examples.glob("*.py"))}
        for source, place in copies.items():
            target = Path(self.build_lib, "accel", place)
            target.parent.mkdir(parents=True, exist_ok=True)
            _ = self.copy_file(str(source), str(target))


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    setup(
        cmdclass={"build_py": BuildWithPages},
        long_description=index_page((ROOT / "README.md").read_text(), urls.get("Documentation")),
        long_description_content_type="text/markdown",
    )
