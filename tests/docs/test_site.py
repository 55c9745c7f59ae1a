"""The built site in a browser, from the disk: pages load, pictures are seen, search finds, no complaints.

`python tests/docs/test_site.py` keeps the first screen's pictures, with which a test compares it.
"""

import contextlib
import io
import shutil
from pathlib import Path

import pytest

FIRST_SCREENS = Path(__file__).parent / "first_screens"
SITE = Path(__file__).parents[2] / "docs" / "_build"
PAGES = sorted(
    path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if "_static" not in path.parts
)
WIDTHS = 390, 1400
# What a picture is on the screen: whether it has loaded, is shown, and stays inside the page.
SEEN = """() => [...document.querySelectorAll("main img")].map(image => ({
    name: image.src, shown: image.offsetParent !== null, loaded: image.complete && image.naturalWidth > 0,
    right: (image.closest('figure.wide') ?? image).getBoundingClientRect().right }))"""
# Boxes of code whose lines go on beyond their edge.
CUT = """() => [...document.querySelectorAll("main pre")].filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => box.textContent.slice(0, 60))"""

pytestmark = pytest.mark.site


@contextlib.contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "no Chromium is installed"
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def first_screen(browser, width, theme):
    """Return a small picture of the first screen: what is where, but no letters."""
    from PIL import Image

    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=theme)
    page.goto((SITE / "index.html").as_uri())
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("L")
    page.close()
    return picture.resize((width // 5, 844 // 5), Image.Resampling.BOX)


@pytest.fixture(params=WIDTHS)
def page(request, browser):
    """Yield a page of some width, and the messages of its console."""
    made = browser.new_page(viewport={"width": request.param, "height": 900})
    made.said = []
    made.on("console", lambda message: made.said.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: made.said.append(str(error)))
    made.on("requestfailed", lambda asked: made.said.append(asked.url))
    yield made
    made.close()


def test_there_is_a_site():
    """Built by `make docs`."""
    for name in (
        "index.html",
        "search.html",
        "concepts.html",
        "reference/kvkit.html",
        "reference/kvkit.tools.html",
        "reference/kvkit.integrations.onnx.html",
        "reference/kvkit.integrations.transformers.html",
        "install.html",
        "from/hugging_face.html",
        "tools/study.html",
        "tutorials/bring_up.html",
        "specifications/pmx.html",
    ):
        assert name in PAGES


def test_every_page_loads(page):
    for name in PAGES:
        page.goto((SITE / name).as_uri())
        assert page.locator("main").count() == 1, name
        assert page.said == [], name
        assert page.evaluate(CUT) == [], name
        for picture in page.evaluate(SEEN):
            if picture["shown"]:
                assert picture["loaded"], (name, picture)
                assert picture["right"] <= page.viewport_size["width"], (name, picture)


@pytest.mark.parametrize(("name", "count"), [("concepts", 7), ("gallery", 5), ("tools/study", 2)])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_of_the_theme(page, theme, name, count):
    page.emulate_media(color_scheme=theme)
    page.goto((SITE / f"{name}.html").as_uri())
    shown = [each["name"].rpartition("/")[2] for each in page.evaluate(SEEN) if each["shown"]]
    assert len(shown) == count
    assert all(name.endswith(f"-{theme}.svg") for name in shown)


def test_search_finds(page):
    """Results come one by one, so each is waited for."""
    page.goto((SITE / "search.html").as_uri() + "?q=seqstarts")
    for found in "concepts.html", "reference/kvkit.dynamic_batching.html":
        page.wait_for_selector(f'#search-results li a[href*="{found}"]', timeout=20_000)
    assert page.said == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_screen_is_as_it_was(browser, width, theme):
    """Other fonts move letters, so a few shades of grey are allowed; a lost picture or box is more."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    kept = np.asarray(image.open(FIRST_SCREENS / f"{width}-{theme}.png"), int)
    now = np.asarray(first_screen(browser, width, theme), int)
    assert abs(now - kept).mean() < 8


if __name__ == "__main__":
    with chromium() as opened:
        FIRST_SCREENS.mkdir(exist_ok=True)
        for width in WIDTHS:
            for theme in ("light", "dark"):
                first_screen(opened, width, theme).save(FIRST_SCREENS / f"{width}-{theme}.png", optimize=True)
