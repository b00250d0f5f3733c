"""The site as a reader opens it: links have ends, pictures texts, and no page is wider than its window."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import ROOT

pytest.importorskip("sphinx")
AXE = find_spec("axe_playwright_python")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (1280, 390)
"""Of a desktop and of a phone, in CSS pixels."""


class Page(HTMLParser):
    """Links, anchors and pictures without a text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.without_text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag in ("a", "link", "script", "img", "iframe"):
            self.links += [given[key] for key in ("href", "src") if given.get(key)]
        if tag == "img" and not given.get("alt", "").strip():
            self.without_text.append(given.get("src", ""))
        if tag == "iframe" and not given.get("title"):
            self.without_text.append("a frame without a title")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_link_within_the_site_has_an_end(site, pages):
    assert len(pages) > 40
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[target].anchors if target in pages else set()
            missing_anchor = parts.fragment and target in pages and unquote(parts.fragment) not in known
            if not target.exists() or missing_anchor:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_picture_has_an_alt_text(site, pages):
    assert sum(len(page.without_text) for page in pages.values()) == 0, {
        str(path.relative_to(site)): page.without_text for path, page in pages.items() if page.without_text
    }


def told_by_browser(page: str, folder: Path, **values: object) -> list:
    """What a page writes into its element `found`; words of it in capitals stand for values."""
    for name, value in values.items():
        page = page.replace(name, json.dumps(value))
    harness = folder / "harness.html"
    harness.write_text(page)
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    browser += [
        f"--user-data-dir={folder}/profile",
        "--virtual-time-budget=6000000",
        "--window-size=1400,900",
    ]
    done = subprocess.run(
        [*browser, "--dump-dom", str(harness)], capture_output=True, text=True, timeout=1000
    )
    shown = re.search(r'<pre id="found">(.*?)END</pre>', done.stdout, re.DOTALL)
    assert shown, done.stderr[-2000:]
    return json.loads(html.unescape(shown.group(1)))


HARNESS = """<!doctype html><body><pre id="found"></pre><script>
const found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:800px;border:0`;
  frame.src = page;
  const loaded = new Promise(done => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const root = frame.contentDocument.documentElement;
  const wide = [...frame.contentDocument.querySelectorAll("article *")].filter(one => {
    const box = one.getBoundingClientRect();
    return box.width && box.right > width + 1 && !one.closest("div.highlight,div.table-wrapper,pre,iframe");
  });
  const name = one => one.tagName + "." + one.className;
  found.push([page, width, root.scrollWidth, wide.slice(0, 3).map(name)]);
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await look(page, width);
  document.getElementById("found").textContent = JSON.stringify(found) + "END";
})();
</script>"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_no_page_is_wider_than_a_desktop_or_a_phone(site, pages, tmp_path):
    names = [path.as_uri() for path in pages if path.name not in ("genindex.html", "search.html")]
    looked = told_by_browser(HARNESS, tmp_path, PAGES=names, WIDTHS=WIDTHS)
    assert len(looked) == len(names) * len(WIDTHS)
    too_wide = [
        (Path(page).name, width, *rest) for page, width, *rest in looked if rest[0] > width or rest[1]
    ]
    assert not too_wide


AXE_HARNESS = """<!doctype html><body><pre id="found"></pre><script>
const found = [];
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = "width:1280px;height:800px;border:0";
  frame.src = page;
  const loaded = new Promise(done => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const inner = frame.contentDocument;
  const script = inner.createElement("script");
  script.src = AXE_FILE;
  const ready = new Promise(done => { script.onload = done; });
  inner.head.append(script);
  await ready;
  for (const theme of ["light", "dark"]) {
    inner.body.dataset.theme = theme;
    const told = await frame.contentWindow.axe.run(inner, { runOnly: ["wcag2a", "wcag2aa"] });
    for (const one of told.violations) for (const node of one.nodes)
      found.push([page.split("/").pop(), theme, one.id, node.target.join(" ")]);
  }
  frame.remove();
}
(async () => {
  try { for (const page of PAGES) await look(page); } catch (error) { found.push([String(error)]); }
  document.getElementById("found").textContent = JSON.stringify(found) + "END";
})();
</script>"""


def found_by_axe(pages: list[str], folder: Path) -> list:
    """What axe-core finds against WCAG 2 A and AA on these pages, in the light and in the dark."""
    script = Path(AXE.origin).with_name("axe.min.js").as_uri()
    return told_by_browser(AXE_HARNESS, folder, AXE_FILE=script, PAGES=pages)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CHROMIUM is None or AXE is None, reason="needs chromium and axe-playwright-python")
def test_axe_finds_no_lack_of_contrast_names_or_texts_on_any_page(pages, tmp_path):
    assert found_by_axe([path.as_uri() for path in pages], tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or AXE is None, reason="needs chromium and axe-playwright-python")
def test_axe_finds_grey_on_white_and_a_picture_without_a_text(tmp_path):
    page = tmp_path / "bad.html"
    shown = (
        "<html lang=en><title>t</title><main><p style='color:#bbb;background:#fff'>grey</p><img src=a.png>"
    )
    page.write_text(shown)
    found = {row[2] for row in found_by_axe([page.as_uri()], tmp_path)}
    assert found == {"color-contrast", "image-alt"}
