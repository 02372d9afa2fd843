"""One self-contained page about runs, and the same figures as files for papers.

`records` reads run folders, `numbers` and `splits` compute what is shown, and `insides` has what methods bring of
their own; `interactive` draws it for the page, `printed` draws it for papers, and `page` puts the page together.
"""

from pathlib import Path

from plures.report.gather import gather_material
from plures.report.page import write_page
from plures.report.printed import write_files


def write(folders: list[Path], to: Path, figures: Path | None = None) -> Path:
    """Write the page about some runs; and their figures as SVG, PDF and PNG, if a folder for them is given."""
    material = gather_material(folders)
    if figures is not None:
        write_files(material, figures)
    return write_page(material, to)
