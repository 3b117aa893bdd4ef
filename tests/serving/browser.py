"""A person at the page: a real Chromium, what it shows, and what it sends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect
from serving_examples import TOKEN

expect.set_options(timeout=60_000)  # a busy machine may be slow
# Small and without motion, because the browser draws without a GPU.
WINDOW = {"viewport": {"width": 1000, "height": 600}, "reduced_motion": "reduce"}
PHONE = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}
# The profile of windows without settings of their own: a new one starts more processes.
_profiles: dict[Browser, BrowserContext] = {}


def empty_profile(browser: Browser) -> BrowserContext:
    """A profile without open windows; what earlier windows stored is deleted with `forget`."""
    if browser not in _profiles:
        _profiles[browser] = browser.new_context(**WINDOW)
    shared = _profiles[browser]
    return browser.new_context(**WINDOW) if shared.pages else shared


def forget(page: Page, url: str) -> None:
    """Delete what a server's pages have stored in the browser."""
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
    session.detach()


class Person:
    """Someone with the page open in a window of their own."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        address: str = "",
        prepare: Callable[[Page], None] = lambda page: None,
        **settings: Any,
    ) -> None:
        self.url = url
        new = browser.new_context
        self.context = new(**WINDOW | settings) if settings else empty_profile(browser)
        self._shared = self.context is _profiles.get(browser)
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        if self._shared:
            forget(self.page, url)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        prepare(self.page)
        self.page.goto(url + "/" + address)

    def leave(self, expected: str = "") -> None:
        """Close the window; only `expected` was complained of, and nobody else was asked."""
        (self.page if self._shared else self.context).close()
        self.check(expected)

    def check(self, expected: str = "") -> None:
        """Nothing was complained of but `expected`, and nobody but the server was asked."""
        assert [line for line in self.complaints if not expected or expected not in line] == []
        asked = {urlsplit(url)[:2] for url in self.requests if not url.startswith("blob:")}
        assert asked <= {urlsplit(self.url)[:2]}

    def begin(self) -> None:
        """Begin again in the same window, which costs much less than to load the page again.

        What the page has stored is deleted, and it goes to its start.
        """
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.evaluate(
            """() => {
              for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
              localStorage.clear();
              sessionStorage.clear();
            }"""
        )
        self.page.mouse.move(0, 0)
        self.page.evaluate("location.hash = '#/?'")  # the page makes it #/
        self.page.wait_for_url(f"{self.url}/#/")
        self.see("#start")
        self.requests.clear()
        self.complaints.clear()
        # As before the first search: `wait` waits for one.
        self.page.evaluate("document.getElementById('results').removeAttribute('aria-busy')")

    def sign_in(self, name: str = "Ann") -> None:
        """Act as someone with a name and the token of the server."""
        self.page.evaluate(f"sessionStorage['listwise-token'] = {TOKEN!r}")
        self.page.evaluate(f"localStorage['listwise-name'] = {name!r}")

    def go_to(self, address: str) -> None:
        """Go to an address of the page."""
        self.page.evaluate("address => { location.hash = address; }", address)

    def see(self, selector: str) -> Locator:
        """Something that is to be there."""
        found = self.page.locator(selector)
        found.wait_for()
        return found

    def put_in(self, *photos: Path, more: bool = False) -> None:
        """Choose photos, as examples beside those there are if `more`, and wait for results."""
        before = self.page.locator(".example").count() if more else 0
        self.page.set_input_files("#more-files" if more else "#files", list(photos))
        expect(self.page.locator(".example")).to_have_count(before + len(photos), timeout=60_000)
        self.wait()

    def wait(self) -> None:
        """Until the search that was begun is done.

        `expect` would describe all results, for its message, each time that it finds none of them.
        """
        self.page.locator("#results[aria-busy='false']").wait_for(state="attached")

    def found(self) -> list[str]:
        """The keys of the results that are on the page, in order."""
        found: list[str] = self.page.evaluate(
            "[...document.querySelectorAll('#results .tile')].map(tile => tile.dataset.key)"
        )
        return found

    def box(self) -> list[int]:
        """The box on the photo, in its pixels; empty without one."""
        text = self.page.locator("#stage").get_attribute("data-box") or ""
        return [int(edge) for edge in text.split(",") if edge]

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag over the photo; places are parts of its width and height."""
        at = self.page.locator("#stage").bounding_box()
        assert at is not None
        places = [(at["x"] + x * at["width"], at["y"] + y * at["height"]) for x, y in (start, end)]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        self.page.mouse.move(*places[1], steps=4)
        self.page.mouse.up()

    def notice(self) -> str:
        """The line that tells what is wrong, once there is one."""
        self.see("#notice")
        return self.page.locator("#notice-text").inner_text()

    def fits(self) -> bool:
        """Whether nothing sticks out sideways."""
        wide: bool = self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )
        return not wide
