"""The documentation site in a browser: pages, links, and the numbers of docs/explore.md.

Needs playwright and a Chromium of the system. With SCREENSHOTS=folder in the environment it also
writes a picture of every page, at both widths.
"""

from __future__ import annotations

import functools
import http.server
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import torch

from tests.support.helpers import ROOT
from tests.support.model_configs import MODELS
from tests.support.tolerances import dynamic_drift
from tightrope import RopeSpec, angles

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENSHOTS = os.environ.get("SCREENSHOTS")
WIDTHS = (1280, 390)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """Serve the site in a folder of a host, as on GitHub, so that a link to /page is dead."""
    handler = functools.partial(Quiet, directory=folder.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/site/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    with browser.new_context(color_scheme="light") as context:
        context.set_default_timeout(120_000)
        yield context


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    with context.new_page() as page:
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        yield page


@dataclass
class Visit:
    """One page as the browser shows it: its problems, requests, links and ids."""

    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


# Each page would read the index of the search again, which takes half of the time.
NO_SEARCH = "Worker = class extends EventTarget { postMessage() {} }"

LOOK = """() => [
    [...document.querySelectorAll("a[href]")].map((a) => a.href),
    [...document.querySelectorAll("[id]")].map((node) => node.id),
]"""


@pytest.fixture(scope="module")
def visits(context: Any, folder: Path, site: str) -> dict[str, Visit]:
    """Load every page once. The keys are addresses."""
    found = {}
    with context.new_page() as page:
        page.add_init_script(NO_SEARCH)
        visit = Visit()
        page.on("request", lambda request: visit.requests.append(request.url))
        page.on("pageerror", lambda error: visit.problems.append(str(error)))
        page.on("console", lambda message: visit.problems.append(f"{message.type}: {message.text}"))
        for path in sorted(folder.rglob("index.html")):
            name = path.parent.relative_to(folder).as_posix()
            address = site if name == "." else f"{site}{name}/"
            visit = found[address] = Visit()
            page.goto(address)
            visit.links, visit.ids = page.evaluate(LOOK)
            for width in WIDTHS if SCREENSHOTS else ():
                page.set_viewport_size({"width": width, "height": 900})
                file = f"{SCREENSHOTS}/{name.replace('/', '-').replace('.', 'home')}-{width}.png"
                page.screenshot(path=file, full_page=True, animations="disabled")
    return found


# ---- All pages -----------------------------------------------------------------------------------


def test_pages_load_without_an_error_or_a_warning(visits: dict[str, Visit]) -> None:
    assert len(visits) > len(list((ROOT / "docs").glob("*.md"))) - 1
    assert {address: visit.problems for address, visit in visits.items() if visit.problems} == {}


def test_pages_request_nothing_from_another_host(visits: dict[str, Visit], site: str) -> None:
    requests = {url for visit in visits.values() for url in visit.requests}
    assert {url for url in requests if not url.startswith((site, "data:", "blob:"))} == set()


def test_links_and_anchors_lead_somewhere(
    visits: dict[str, Visit], folder: Path, site: str
) -> None:
    host = site.removesuffix("site/")
    dead = []
    for address, visit in visits.items():
        for link in visit.links:
            target, fragment = urldefrag(link)
            if not target.startswith(host) or "=" in fragment:  # elsewhere, or a link of explore.md
                continue
            if target in visits:
                alive = not fragment or unquote(fragment) in visits[target].ids
            else:
                alive = target.startswith(site) and (folder / target.removeprefix(site)).is_file()
            if not alive:
                dead.append(f"{address} -> {link}")
    assert dead == []


# ---- docs/explore.md -----------------------------------------------------------------------------

POSITIONS = (0, 1, 257, 4095, 10**6, 2**31 - 1)

# Words, wavelengths and angles of choices, at each position.
COMPUTE = """([choices, positions]) => {
    const { values, wrong } = explore.check(choices);
    if (Object.keys(wrong).length) throw new Error(JSON.stringify(wrong));
    return {
        python: explore.python(values),
        at: positions.map((position) => explore.pairsOf({ ...values, position })
            .map((pair) => ({ ...pair, word: String(pair.word), phase: String(pair.phase) }))),
    };
}"""


def cases(explore: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Choices of every model, and random ones for every rule."""
    yield from explore["models"].values()
    draw = random.Random(0)
    for rule in explore["rules"]:
        for _ in range(4):
            trained = draw.choice((512, 4096, 5000, 32768))
            low = round(draw.uniform(0.5, 3), 3)
            yield {
                **explore["models"]["Llama 2 7B"],
                "rule": rule,
                "base": str(draw.choice((1.5, 10000, 500000, 1e9, 12345.678))),
                "rotary_dim": str(draw.choice((2, 4, 64, 80, 128))),
                "original_max_position": str(trained),
                "length": str(draw.choice((1, trained, trained + 1, 100_000))),
                "factor": str(draw.choice((0.3, 1, 4, 8.5, 40))),
                "beta_slow": str(low),
                "beta_fast": str(low + draw.choice((0, 1, 31))),
                "low_freq_factor": str(low),
                "high_freq_factor": str(low + draw.choice((0, 0.1, 3))),
                "truncate": draw.choice(("true", "false")),
                "rotary_fraction": str(draw.choice((0, 0.25, 0.6, 1))),
                "short_factor": str(draw.choice((1, 1.1))),
                "long_factor": str(draw.uniform(0.5, 64)),
            }


@pytest.fixture
def explore(page: Any, site: str) -> Any:
    page.add_init_script(NO_SEARCH)
    page.goto(f"{site}explore/")
    page.locator("#explore-angles tbody tr").first.wait_for()
    return page


def models(explore: Any) -> dict[str, Any]:
    found: dict[str, Any] = explore.evaluate(
        """({
            rules: Object.keys(explore.RULES),
            repositories: Object.fromEntries(Object.keys(explore.MODELS).map(
                (model) => [model, explore.MODELS[model].repository])),
            models: Object.fromEntries(Object.keys(explore.MODELS).map(
                (model) => [model, explore.choicesOf(model)])),
        })"""
    )
    return found


def run(python: str) -> RopeSpec:
    names: dict[str, Any] = {}
    exec(python, names)
    spec: RopeSpec = names["spec"]
    assert names["inv_freq"].shape == (spec.rotary_dim // 2,)
    return spec


def float_errors(inv_freq: torch.Tensor, position: int, exact: torch.Tensor) -> torch.Tensor:
    """Return errors of three ways to compute angles with torch, ``[pairs, ways]``; see docs/explore.md."""
    at = torch.tensor([position])
    ways = [
        inv_freq.float() * at.float(),
        inv_freq.bfloat16().float() * at.float(),
        inv_freq.float() * at.bfloat16().float(),
    ]
    angle = torch.stack(ways).double()
    made = torch.stack([angle.cos(), angle.sin()]).float().double()
    return (made - exact[:, None]).abs().amax(0).T


def test_explore_equals_the_library(explore: Any) -> None:
    for choices in cases(models(explore)):
        got = explore.evaluate(COMPUTE, [choices, POSITIONS])
        spec = run(got["python"])
        seq_len = int(choices["length"])
        words, turns = spec.words_for(seq_len)
        inv_freq, drift = spec.frequencies(seq_len).inv_freq, 0.0
        if choices["rule"] == "dynamic":  # the library computes it in float64, and the page exactly
            factor, trained = float(choices["factor"]), int(choices["original_max_position"])
            drift = dynamic_drift(factor, trained, seq_len)
        for position, pairs in zip(POSITIONS, got["at"], strict=True):
            own = torch.tensor([int(pair["word"]) for pair in pairs])
            assert ((own - words.flatten()).abs() <= drift * own.double()).all(), choices
            words = own.view_as(words)
            ids = torch.tensor([[[position]]])
            phase = angles.phase_at(words, turns, ids, 0, False, 1).flatten()
            assert [int(pair["phase"]) for pair in pairs] == phase.tolist(), choices
            shown = torch.tensor(
                [(pair["cos"], pair["sin"]) for pair in pairs], dtype=torch.float64
            ).T
            exact = torch.stack(angles.cos_sin(phase, torch.float64))
            torch.testing.assert_close(shown, exact, rtol=0, atol=1e-15)
            wavelengths = torch.tensor([pair["after"] for pair in pairs], dtype=torch.float64)
            bound = max(drift, 1e-15)
            torch.testing.assert_close(wavelengths, 2 * torch.pi / inv_freq, rtol=bound, atol=0)
            errors = torch.tensor([pair["errors"] for pair in pairs], dtype=torch.float64)
            wanted = float_errors(inv_freq, position, exact)
            torch.testing.assert_close(errors, wanted, rtol=0, atol=1e-15)


def test_explore_has_the_models_as_published(explore: Any) -> None:
    found = models(explore)
    published = {model.name: model.wanted for model in MODELS}
    for name, choices in found["models"].items():
        wanted = published[found["repositories"][name]]
        if not isinstance(wanted, RopeSpec):
            wanted = wanted["full_attention"]
        spec = run(explore.evaluate(COMPUTE, [choices, []])["python"])
        assert (spec.rotary_dim, spec.base) == (wanted.rotary_dim, wanted.base), name
        for seq_len in (1, int(choices["length"])):
            got, exact = (each.words_for(seq_len)[0] for each in (spec, wanted))
            assert torch.equal(got, exact), name


def test_explore_shows_the_numbers_that_it_computes(explore: Any) -> None:
    explore.get_by_label("Start from the model").select_option("DeepSeek V3")
    explore.get_by_label("Position", exact=True).fill("123,456")
    choices = {**models(explore)["models"]["DeepSeek V3"], "position": "123456"}
    got = explore.evaluate(COMPUTE, [choices, [123456]])
    assert explore.locator("#explore-python").inner_text() == got["python"]
    rows = explore.locator("#explore-angles tbody tr").all()
    for row, pair in zip(rows, got["at"][0], strict=True):
        _, word, turns, cos, sin, *errors = row.locator("th, td").all_inner_texts()
        assert word == pair["word"]
        assert float(turns) == pytest.approx(int(pair["phase"]) * 2.0**-64, abs=1e-12)
        assert (float(cos), float(sin)) == pytest.approx((pair["cos"], pair["sin"]), abs=1e-12)
        assert [float(error) for error in errors] == pytest.approx(pair["errors"], rel=0.06)
    scaled = explore.locator("#explore-wavelengths-table tbody tr").last.inner_text().split("\t")
    assert scaled == ["31", "47,117", "1,884,690", "÷ 40", "0.08693"]


def test_explore_draws_the_largest_error_up_to_each_position(explore: Any) -> None:
    curves = explore.evaluate(
        """(() => {
            const pairs = explore.pairsOf(explore.check(explore.choicesOf("gpt-oss 20B")).values);
            return explore.curves(pairs.map((pair) => pair.omega), pairs.map((pair) => pair.word));
        })()"""
    )
    choices = models(explore)["models"]["gpt-oss 20B"]
    spec = run(explore.evaluate(COMPUTE, [choices, []])["python"])
    words, turns = spec.words_for(int(choices["length"]))
    positions = [position for position, _ in curves["float32 angles"]]
    assert (positions[0], positions[-1], len(positions)) == (1, 2**31 - 1, 655)
    phase = angles.phase_at(words, turns, torch.tensor([[positions]]), 0, False, len(positions))
    exact = torch.stack(angles.cos_sin(phase[0, 0], torch.float64))
    every = [
        float_errors(spec.frequencies().inv_freq, position, exact[:, at]).amax(0)
        for at, position in enumerate(positions)
    ]
    worst = torch.stack(every).cummax(0).values
    for way, points in enumerate(curves.values()):
        drawn = torch.tensor([error for _, error in points], dtype=torch.float64)
        torch.testing.assert_close(drawn, worst[:, way], rtol=0, atol=1e-15)


def test_explore_keeps_the_choices_in_the_address(explore: Any) -> None:
    explore.get_by_label("Start from the model").select_option("Qwen2.5 7B with YaRN")
    explore.get_by_label("Factor", exact=True).fill("2.5")
    explore.get_by_label("truncate").uncheck()
    address = explore.url
    assert explore.locator("#explore-link").evaluate("(link) => link.href") == address
    python = explore.locator("#explore-python").inner_text()
    assert "factor=2.5" in python
    explore.goto("about:blank")
    explore.goto(address)
    assert explore.locator("#explore-python").inner_text() == python
    explore.goto(f"{address.partition('#')[0]}#model=nonsense&rule=linear&factor=3&other=1")
    assert "frequencies.Linear(factor=3)" in explore.locator("#explore-python").inner_text()


# Rule, label of a field, its text, and the sentence after the label.
INVALID = [
    ("default", "Base", "1", "must be a number above 1"),
    ("default", "Base", "", "must be a number above 1"),
    ("default", "Rotary dim", "63", "must be even but is 63"),
    ("default", "Position", "-1", "must be a whole number from 0 to 2,147,483,647 but is “-1”."),
    ("default", "Sequence length", "1.5", "must be a whole number from 1 to 2,147,483,647"),
    ("yarn", "beta_fast", "0.5", "must be at least beta_slow, 1, but is 0.5."),
    ("longrope", "short_factor", "1 2", "must be one number, or 64 numbers"),
]


def test_explore_explains_invalid_input(explore: Any) -> None:
    sentences = explore.get_by_role("alert").filter(has_text="must")
    for rule, label, text, sentence in INVALID:
        explore.get_by_label("Frequency rule").select_option(rule)
        field = explore.get_by_label(label, exact=True)
        valid, python = field.input_value(), explore.locator("#explore-python").inner_text()
        field.fill(text)
        (said,) = sentences.all_inner_texts()
        assert said.startswith(f"{label} {sentence}")
        assert explore.locator("#explore-python").inner_text() == python
        field.fill(valid)
        assert sentences.count() == 0


def test_explore_works_without_a_server(page: Any, folder: Path) -> None:
    page.goto((folder / "explore" / "index.html").as_uri())
    assert page.locator("#explore-angles tbody tr").count() == 64
