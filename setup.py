"""Give the distribution its addresses, and a README whose links lead there. setup.cfg has everything else."""

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!https?:|#)([^)"]+)')
PICTURES = ".svg", ".png"


def addresses(repository: str, version: str) -> dict[str, str]:
    """Return what PyPI's sidebar shows, by its label."""
    files = f"{repository}/blob/v{version}"
    return {
        "Homepage": repository,
        "Source": repository,
        "Documentation": f"{files}/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }


def absolute(text: str, repository: str, version: str) -> str:
    """Return a page whose links and pictures name files of the repository by their full address."""

    def full(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith(PICTURES) else "blob"
        return f"{link[1]}{repository}/{kind}/v{version}/{link[2]}"

    return LINK.sub(full, text)


def main() -> None:
    """Build. Without an address of the repository there are no addresses, and links stay as they are."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    repository = settings["tool"]["kvkit"]["repository"].rstrip("/")
    version = runpy.run_path(str(ROOT / "kvkit" / "version.py"))["__version__"]
    text = (ROOT / "README.md").read_text()
    setup(
        long_description=absolute(text, repository, version) if repository else text,
        long_description_content_type="text/markdown",
        project_urls=addresses(repository, version) if repository else {},
    )


if __name__ == "__main__":
    main()
