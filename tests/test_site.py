"""The site that `make docs` builds: every page is there, no link is dead, nothing is foreign, search finds."""

import functools
import html.parser
import http.server
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse

import pytest

import dlcft
import dlcft.backbones
import dlcft.methods
from tests.support.documents import ROOT

REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))


class Page(html.parser.HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        elif tag != "a":
            self.loaded |= {given[name] for name in ("src", "href") if given.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from copies, so that the project's folder stays as it is."""
    pytest.importorskip("zensical", reason="zensical is not installed; make docs installs it")
    folder = tmp_path_factory.mktemp("project")
    for name in ("docs", "overrides"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    write_commands(folder / "docs" / "reference" / "commands.md")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def write_commands(path):
    command = [sys.executable, ROOT / "overrides" / "commands.py"]
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_document_is_a_page_and_in_the_navigation(pages):
    nav = (ROOT / "zensical.toml").read_text()
    documents = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert len(documents) > 15
    assert [name for name in documents if f'"{name}"' not in nav] == []
    assert [name for name in documents if name.replace(".md", ".html") not in pages] == []


@pytest.mark.slow
def test_no_link_is_dead(site, pages):
    dead = []
    for name, page in pages.items():
        for link in page.links | page.loaded:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc or (name == "404.html" and link.startswith("/")):
                continue
            there = (site / name).parent / urllib.parse.unquote(parts.path) if parts.path else site / name
            there = there / "index.html" if there.is_dir() else there
            target = there.resolve().relative_to(site.resolve()).as_posix() if there.exists() else None
            if target is None or (parts.fragment and target in pages and parts.fragment not in pages[target].anchors):
                dead.append(f"{name}: {link}")
    assert dead == []


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(pages):
    loaded = {link for page in pages.values() for link in page.loaded}
    assert loaded
    assert [link for link in loaded if "//" in link and not link.startswith("data:")] == []


@pytest.mark.parametrize("module", [dlcft, dlcft.backbones, dlcft.methods])
def test_every_public_name_has_an_entry(module):
    names = [name for name in module.__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf"(?:^::: |`)dlcft\.[\w.]*\b{name}\b", REFERENCE, re.M)] == []


@pytest.fixture(scope="module")
def served(site):
    """The site's address on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["served", "folder"])
def address(request, site):
    """The same pages from a server, and opened from a folder."""
    return site.as_uri() if request.param == "folder" else request.getfixturevalue("served")


@pytest.mark.slow
def test_search_finds(browser, address):
    page = browser.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}/why.html")
    page.get_by_role("button", name="Search").first.click()
    box = page.locator("input[type=text], input:not([type])").first
    box.wait_for()
    page.wait_for_timeout(1000)  # its index is read
    page.keyboard.type("reservoir", delay=60)
    found = page.locator("a[href*='paper-to-code.html']", has_text=re.compile("symbols", re.I))
    found.first.wait_for(timeout=10_000)
    assert complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_fetch_nothing_outside(browser, site, pages, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    outside, complaints, wide = [], [], []
    page.on("request", lambda request: outside.append(request.url) if request.url.startswith("http") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    for name in pages:
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(name)
    context.close()
    assert (outside, complaints, wide) == ([], [], [])
