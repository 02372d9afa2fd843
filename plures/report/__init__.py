"""One self-contained page about runs, and the same figures as files for papers.

`runs` reads run folders, `numbers` and `states` compute what is shown, `interactive` draws it for the page,
`printed` draws it for papers, and `page` puts the page together. Nothing of this is imported before it is needed.
"""

from pathlib import Path


def write(folders: list[Path], to: Path, figures: Path | None = None) -> Path:
    """Write the page about some runs; and their figures as SVG, PDF and PNG, if a folder for them is given."""
    from plures.report.gather import gather
    from plures.report.page import write_page

    material = gather(folders)
    if figures is not None:
        from plures.report.printed import write_files

        write_files(material, figures)
    return write_page(material, to)
