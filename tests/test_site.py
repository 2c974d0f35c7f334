"""The site builds without a warning, loads nothing from elsewhere, and can be read and searched."""

import functools
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from filelock import FileLock

from kvt.commands import COMMANDS, LIGHTNING, command_parser
from kvt.run.config import RunConfig
from tests.conftest import CONFIGS, REPOSITORY

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
PAGES = ["index", "idea", "symmetry", "claims", "results/table2-laptop/report", "notebooks/study", "notebooks/train"]
PAGES += ["guides/studies", "reference/commands", "reference/python", "how-it-is-built", "comparison"]


CUT_OFF = """
const scrolls = part => part.tagName != "ARTICLE" &&
  (/auto|scroll/.test(getComputedStyle(part).overflowX) || scrolls(part.parentElement));
const ends = part => part.getBoundingClientRect().right;
const parts = [...document.querySelectorAll("article *")].filter(part => ends(part) > innerWidth && !scrolls(part));
return parts.map(part => part.outerHTML.slice(0, 200));
"""
"""Returns what ends beyond the window, and in nothing that scrolls by itself: the theme lets the whole text scroll."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, once for all processes of the tests."""
    pytest.importorskip("myst_nb")
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            words = ["-W", "-q", "-d", f"{folder}.doctrees", str(REPOSITORY / "docs"), f"{folder}.part"]
            subprocess.run([sys.executable, "-m", "sphinx", *words], check=True)
            folder.with_suffix(".part").rename(folder)
    return folder


class Loads(HTMLParser):
    """Collects what a page loads by itself; a link that is followed by a click is not among it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and {"stylesheet", "icon", "preload", "modulepreload", "preconnect"} & {*attrs["rel"].split()}:
            self.found.append(attrs["href"])
        if attrs.get(LOADED.get(tag)):
            self.found.append(attrs[LOADED[tag]])


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert [place for place in loads.found if re.match(r"(https?:)?//", place)] == [], page
        missing = [place for place in loads.found if not (page.parent / place.partition("?")[0]).exists()]
        assert [place for place in missing if not place.startswith("data:")] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style


@pytest.mark.slow
def test_the_reference_has_every_flag_and_every_setting(site):
    commands, settings = ((site / "reference" / f"{name}.html").read_text() for name in ("commands", "settings"))
    for name in (*LIGHTNING, *COMMANDS):
        assert f"<h2>kvt {name}<" in commands
    for name in COMMANDS:
        for action in command_parser(name)[1]._actions[1:]:  # the first is --help
            assert f">{(action.option_strings or [action.dest.upper()])[0]}<" in commands
    for path in CONFIGS.glob("*.yaml"):
        for section in ("model", "data"):
            for setting in getattr(RunConfig.from_name(path.stem), section)["init_args"]:
                assert f">{setting}<" in settings, setting


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture
def visit(browser, site):
    """Open a page in a window of a width; at the end none has logged an error."""
    handler = functools.partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def open_page(page, width=1200):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(f"http://127.0.0.1:{server.server_port}/{page}")
            return browser

        yield open_page
        errors = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        browser.get("about:blank")  # the search goes on loading what it has found
        server.shutdown()
    assert errors == []


def wait(browser, css):
    wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait(browser, 20)
    return wait.until(lambda driver: driver.find_elements("css selector", css))


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_wide_as_the_window(visit, page, width):
    opened = visit(f"{page}.html", width)
    if opened.find_elements("css selector", ".math"):
        wait(opened, "mjx-container svg")
    root = "document.documentElement"
    assert opened.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") == 0
    assert opened.execute_script(CUT_OFF) == []


@pytest.mark.browser
def test_every_formula_is_drawn(visit):
    page = visit("symmetry.html")
    wait(page, "mjx-container svg")
    drawn, written = (len(page.find_elements("css selector", css)) for css in ("mjx-container", ".math"))
    assert drawn == written > 50
    assert page.find_elements("css selector", "mjx-merror, [data-mjx-error]") == []


@pytest.mark.browser
@pytest.mark.parametrize("words", ["kv+pos", "KV+Pos"])
def test_the_search_finds_an_attention(visit, words):
    page = visit(f"search.html?q={words.replace('+', '%2B')}")
    found = [link.text for link in wait(page, "#search-results .search li a")]
    assert "KV+Pos is KV with a bias" in found
