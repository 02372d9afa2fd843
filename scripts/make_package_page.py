"""Writes docs/package-page.md, the page of the package index, from README.md.

    python scripts/make_package_page.py

Files of the repository cannot be linked from there: a link to one becomes its path, and pictures are left out. A test
compares the page with README.md.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "package-page.md"


def package_page(readme: str) -> str:
    """The same text without pictures, and with paths in place of links to files."""

    def path_of(link: re.Match[str]) -> str:
        words, target = link.groups()
        if target.startswith(("https://", "#")):
            return link.group(0)
        return words if words in (target, f"`{target}`") else f"{words} (`{target}`)"

    without_pictures = re.sub(r"!\[[^\]]*\]\([^)]*\)\n\n", "", readme)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", path_of, without_pictures)
    return text.replace("Each line above is one method", "In its report each line is one method")


if __name__ == "__main__":
    PAGE.write_text(package_page((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name} written")
