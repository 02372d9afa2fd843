"""One self-contained page about runs, and the same figures as files for papers.

`runs` reads run folders, `numbers` and `states` compute what is shown, `interactive` draws it for the page,
`printed` draws it for papers, and `page` puts the page together. Nothing of this is imported before it is needed.
"""

from pathlib import Path


def write(folders: list[Path], to: Path) -> Path:
    """Write the page about some runs."""
    from .page import write_page

    return write_page(folders, to)


def write_figures(folders: list[Path], to: Path) -> list[Path]:
    """Write the figures about some runs as SVG, PDF and PNG files of a folder."""
    from .printed import write_files

    return write_files(folders, to)
