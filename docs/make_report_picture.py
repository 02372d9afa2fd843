"""Draw docs/report.png, the top of a report as Chromium shows it: python docs/make_report_picture.py report.html"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    page = Path(sys.argv[1]).resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        window = browser.new_page(viewport={"width": 1060, "height": 1800}, color_scheme="light")
        window.goto(page)
        window.screenshot(path=Path(__file__).parent / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
