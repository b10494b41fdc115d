"""The dashboard in a real browser: it shows the pool, follows alpha, fits a phone, and needs no colour."""

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import helmrec
from helmrec.clock import MonotonicClock
from helmrec.engine.choose import device_name
from helmrec.engine.engine import Engine
from helmrec.errors import RequestError
from helmrec.serve import problems
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.control import Steering
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine
from tests.serve.asgi import on_loopback, wait_for
from tests.serve.cases import as_request, rank_body

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHECKS = Path(__file__).with_name("browser_checks.js")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install 'helmrec[web]'")


class Watched:
    """A server somebody looks at."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine = engine
        self.url = url


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    engine = tiny_engine(clock=MonotonicClock(), audit_every=1)
    port = InProcessPort(engine, Steering("static:0.4", slo_ms=80, tick_s=5.0))
    with on_loopback(make_app(port, ServeConfig())) as number:
        url = f"http://127.0.0.1:{number}"
        with Client(url) as client:
            wait_for(client.is_ready)
        yield Watched(engine, url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Watched) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.wait_for_selector("text=✓ ready")
    page.wait_for_selector("#tiles dd")
    page.add_script_tag(content=CHECKS.read_text())
    yield page
    page.close()
    assert problems == []
    assert all(url.startswith((server.url, "data:")) for url in asked), "it asks nobody but the server"


def text(page: Any, selector: str) -> str:
    found: str = page.inner_text(selector)
    return found


def test_the_page_sees_alpha_move(page: Any, server: Watched) -> None:
    assert "alpha 0.400" in page.get_attribute("#split", "aria-label")
    assert "12 pages embedding rows" in page.get_attribute("#map", "aria-label")
    server.engine.move_alpha(0.6)
    page.wait_for_selector("#split[aria-label^='alpha 0.600']", timeout=10_000)
    assert "18 pages embedding rows" in page.get_attribute("#map", "aria-label")
    wait_for(lambda: "alpha 0.600" in text(page, "#alpha .legend"))
    page.wait_for_selector("#split[aria-label^='alpha 0.400']", timeout=10_000)
    assert "0.400" in text(page, "#moves"), "the policy brought it back, and the page says so"


def test_requests_show_in_tiles_and_charts(page: Any, server: Watched) -> None:
    with Client(server.url) as client:
        for _ in range(20):
            client.rank(as_request(rank_body()))
    wait_for(lambda: "no requests" not in text(page, "#tiles"))
    assert " SLO, 80 ms" in text(page, "#tiles")
    assert "0 wrong" in text(page, "#tiles")
    wait_for(lambda: len(page.get_attribute("#latency path", "d")) > 0)
    assert "row-miss" in text(page, "#causes")
    assert text(page, "#mode") == "static:0.4, adaptive"


def show_large(page: Any) -> None:
    """Show a look with long values, and stop asking the server."""
    page.evaluate("showLarge()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("is_large", [False, True])
def test_nothing_is_clipped_or_runs_off_the_side(page: Any, width: int, scheme: str, is_large: bool) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    if is_large:
        show_large(page)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("clipped()") == []
    assert page.evaluate("overlapping()") == []
    too_small = (
        "[...document.querySelectorAll('dd, td, li, p')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 11)"
    )
    assert page.evaluate(f"{too_small}.length") == 0


def test_words_can_be_read_in_light_and_dark(page: Any) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("contrast()") >= 4.5, scheme


# What a reader may not know: titles, names of tiles, columns, lines of charts, owners of pages, causes.
_LABELS = "dt, h2, th, .legend li, #causes td:first-child, #errors td:first-child, #layers td:first-child"


def test_every_label_explains_itself(page: Any) -> None:
    show_large(page)
    labels = page.evaluate(
        f"[...document.querySelectorAll('{_LABELS}')].map(e => [e.textContent, e.querySelectorAll('.term').length])"
    )
    assert len(labels) > 50
    assert [name for name, num in labels if num != 1] == []
    assert (
        page.evaluate(
            "[...document.querySelectorAll('.term')].filter(e => meaning(e.dataset.about).length < 12).length"
        )
        == 0
    )
    known = page.evaluate("Object.keys(TERMS).filter(term => !document.querySelector(`[data-about='${term}']`))")
    assert set(known) <= {"row-update"}, "nothing is explained that is not shown"


def test_every_error_a_client_can_see_is_explained(page: Any) -> None:
    explained = set(page.evaluate("Object.keys(ERRORS)"))
    assert {kind.__name__ for kind in problems._STATUS} <= explained


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_tooltips_open_by_pointer_keyboard_and_touch_and_stay_on_the_page(
    browser: Any, server: Watched, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 700}, has_touch=True)
    page.goto(server.url)
    page.wait_for_selector("#tiles dd")
    tip = page.locator("#tip")
    assert not tip.is_visible()
    first, last = page.locator("#tiles .term").first, page.locator("#causes th .term").last
    first.hover()
    assert "99 of 100" in tip.inner_text()
    page.mouse.move(1, 1)
    assert not tip.is_visible()
    first.focus()
    page.keyboard.press("Tab")
    assert "Half of the ranking calls" in tip.inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.wait_for_timeout(1_500)
    assert tip.is_visible(), "the next look does not take it away"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    last.tap()
    assert "Since this server was started" in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.touchscreen.tap(2, 690)
    assert not tip.is_visible()
    page.close()


def test_errors_show_by_cause(page: Any, server: Watched) -> None:
    with Client(server.url) as client, pytest.raises(RequestError):
        client.rank(as_request(rank_body() | {"candidates": [10**6, 2, 3]}))
    page.wait_for_selector("#errors td:has-text('RequestError')", timeout=10_000)
    wait_for(lambda: "RequestError" in text(page, "#tiles"))
    row = page.locator("#errors tr", has_text="RequestError")
    assert "A field of a request is wrong" in row.locator(".term").evaluate("e => meaning(e.dataset.about)")
    wait_for(lambda: row.locator("td").all_inner_texts()[1:] == ["1", "1", "1"])


def test_the_page_names_model_version_device_and_engines(page: Any) -> None:
    facts = text(page, "#facts")
    assert "tiny" in facts
    assert helmrec.__version__ in facts
    assert device_name("cpu") in facts
    assert not page.locator("#replica-card").is_visible()
    show_large(page)
    assert "3, 3 restarts" in text(page, "#facts")
    assert page.locator("#replicas tbody tr").count() == 3


def test_the_tile_of_filled_pages_is_not_the_share_that_was_assigned(page: Any, server: Watched) -> None:
    with Client(server.url) as client:
        client.rank(as_request(rank_body()))
    pool = server.engine.stats().pool
    assert 0 < pool.resident_rows < pool.row_capacity
    wait_for(lambda: f"{pool.resident_rows} of {pool.row_capacity} rows" in text(page, "#tiles"))
    share = f"{100 * pool.resident_rows / pool.row_capacity:.1f} %"
    assert share in text(page, "#tiles div[data-key=fill]")
    solid, assigned = (page.get_attribute(f"#split rect:nth-of-type({i})", "width") for i in (2, 3))
    assert float(solid) == pytest.approx(float(assigned) * pool.resident_rows / pool.row_capacity, rel=0.02)


def test_a_longer_range_shows_older_samples(page: Any) -> None:
    page.evaluate("answerOldSamples()")
    for label, axis, most in (("1 h", "15 min ago", 3600), ("1 min", "60 s ago", 60), ("10 min", "10 min ago", 600)):
        page.locator("#range label", has_text=label).first.click()
        page.wait_for_function("axis => document.querySelector('#alpha > svg').textContent.includes(axis)", arg=axis)
        assert page.evaluate("asked").endswith(f"most={most}")
    assert page.evaluate("location.hash") == "#10min"


def test_owners_and_lines_differ_without_colour(page: Any) -> None:
    inks = page.evaluate(
        """() => [...document.querySelectorAll('#owners canvas')].map(canvas => {
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return Array.from({ length: data.length / 4 }, (_, i) => data[4 * i + 3] > 127 ? 1 : 0);
        })"""
    )
    assert len(inks) == 4
    shares = sorted(sum(ink) / len(ink) for ink in inks)
    assert all(later - earlier > 0.05 for earlier, later in pairwise(shares)), shares
    dashes = page.evaluate(
        "[...document.querySelectorAll('#load .legend line')].map(e => e.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 3


def test_the_page_shows_that_the_server_is_gone(browser: Any) -> None:
    with on_loopback(make_app(InProcessPort(tiny_engine(clock=MonotonicClock())), ServeConfig())) as number:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{number}")
        page.wait_for_selector("text=✓ ready", timeout=20_000)
    page.wait_for_selector("text=✗ no answer", timeout=10_000)
    page.close()


def shown_of(page: Any, control: dict[str, Any]) -> list[str]:
    """What the page says of a controller; at once, before it looks at the server again."""
    script = """control => {
        showControl(control);
        return ["decision", "predicted", "last-move", "layers"].map(id => document.getElementById(id).textContent);
    }"""
    found: list[str] = page.evaluate(script, control)
    return found


def test_the_page_shows_predicted_beside_measured_latency_and_what_came_of_the_last_move(page: Any) -> None:
    control = {
        "policy": "helm",
        "mode": "adaptive",
        "asked_alpha": 0.5,
        "reason": "residual: predicts less",
        "expected_gain_ms": 0.5,
        "measured_ms": 12.5,
        "predicted_ms": 11.0,
        "last_move": "0.400 -> 0.500 by base, +0.310 ms predicted, +0.270 ms realised",
        "layers": [{"name": "residual", "alpha": 0.5, "note": "predicts less"}],
        "moves": [],
    }
    decision, predicted, last_move, layers = shown_of(page, control)
    assert "Asked for 0.500: residual: predicts less" in decision
    assert "12.5 ms measured, 11.0 ms predicted" in predicted
    assert last_move == f"Last move: {control['last_move']}."
    assert "residual0.500predicts less" in layers
    unknown = control | {"measured_ms": None, "predicted_ms": None, "last_move": None}
    assert shown_of(page, unknown)[1:3] == ["", ""]
    assert "nothing was predicted yet" in shown_of(page, control | {"predicted_ms": None})[1]
