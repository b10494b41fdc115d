"""The documentation builds without a warning, and a browser that shows it asks no other host for anything."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
REMOTE = re.compile(r"^(https?:)?//")
REMOTE_STYLE = re.compile(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"')\s]+)""")


class Loads(HTMLParser):
    """Collects the addresses that a browser loads to show a page. Links that a reader may follow are none."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name == LOADED.get(tag)]
        self.addresses += [
            part.split()[0] for name, value in attrs if name == "srcset" for part in (value or "").split(",")
        ]


def remote_in(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return [each for each in parser.addresses if REMOTE.match(each)] + REMOTE_STYLE.findall(page)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "docs",
        str(out / "html"),
    ]
    done = subprocess.run([*command, "-d", str(out / "read")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yield out / "html"


def test_the_site_has_a_page_for_every_topic(site: Path) -> None:
    topics = "quickstart concepts glossary configuration python-api serving deploy cluster tuning troubleshooting"
    names = [*topics.split(), "alternatives", "evaluation", "log", "decisions/index", "decisions/0001-states-per-token"]
    assert [name for name in ("index", *names) if not (site / f"{name}.html").exists()] == []


def test_generated_references_are_on_their_pages(site: Path) -> None:
    assert 'id="engineconfig-pool-bytes"' in (site / "configuration.html").read_text()
    assert "/v1/admin/rows</span>" in (site / "serving.html").read_text()
    assert 'id="helmrec.Engine.rank"' in (site / "python-api.html").read_text()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = {path: remote_in(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 40
    assert {path.name: found for path, found in pages.items() if found} == {}


def test_no_style_and_no_image_loads_anything_from_another_host(site: Path) -> None:
    files = [path for kind in ("css", "svg") for path in site.rglob(f"*.{kind}")]
    assert {path.name: found for path in files if (found := REMOTE_STYLE.findall(path.read_text()))} == {}


def test_a_page_that_loads_from_another_host_is_found() -> None:
    page = '<a href="https://a.org"></a><script src="//b.org/x.js"></script><style>@import "https://c.org/f";</style>'
    assert remote_in(page) == ["//b.org/x.js", "https://c.org/f"]
    assert remote_in('<img src="x.png" srcset="https://d.org/2x.png 2x">') == ["https://d.org/2x.png"]
