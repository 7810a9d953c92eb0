"""The report in a browser: it fits any width, fetches nothing, and its table sorts."""

import re

import pytest

from dlcft.bench.experiment import Experiment
from dlcft.bench.report import to_html
from tests.bench.test_report import NEW_CLASSES, SPLIT, made, several
from tests.bench.test_report_artefacts import everything


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    long = Experiment(dataset="the-data-set-with-a-name-that-no-telephone-can-show-in-one-line-" * 2, tasks=2)
    results = several(NEW_CLASSES, seeds=(0, 1)) + several(SPLIT, seeds=(0,)) + [made(long, 0.5)]
    path.write_text(to_html(results, warnings=["runs/" + "x" * 200 + ".json is no result."]))
    return path.as_uri()


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """Some rows of every artefact."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    results, traces = everything("small", 1)
    some = [one for one in results if one.experiment.method in ("none", "ewc", "dlcft-paper", "ridge")]
    path.write_text(to_html(some, traces=traces))
    return path.as_uri()


@pytest.fixture(params=["address", "papers"])
def page_address(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_fetches_nothing(browser, page_address, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_address)
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(fits)
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.evaluate(fits)
    assert [url for url in requests if not url.startswith("data:")] == [page_address]
    assert complaints == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")
    context.close()


def test_the_table_sorts_and_the_legend_singles_out(browser, address):
    page = browser.new_page()
    page.goto(address)
    table = page.locator("table.figures").first

    def methods():
        return table.locator("tbody th").evaluate_all("cells => cells.map(cell => cell.dataset.value)")

    assert methods()[0] == "none (joint)"
    table.get_by_role("button", name="accuracy").click()
    assert methods()[0] == "none"
    # what has no figure stays below, whichever way
    for _ in range(2):
        table.get_by_role("button", name="BWT").click()
        assert set(methods()[-2:]) == {"none (joint)", "none-linear (joint)"}
    table.get_by_role("button", name="method").click()
    assert methods() == sorted(methods())
    legend = page.locator(".legend").first
    legend.locator("button").nth(2).click()
    page.mouse.move(0, 0)
    assert page.locator("#s1 figure .dim").count() > 0
    assert page.locator("#s1-curves-row-2.dim").count() == 0
    page.close()


def test_a_number_leads_to_what_is_behind_it(browser, papers):
    page = browser.new_page()
    page.goto(papers)
    line = page.locator("#a1 tbody tr", has=page.locator("th[data-value='EWC']"))
    assert "78.88" in line.inner_text()
    link = line.locator("a").first
    target = page.locator(link.get_attribute("href"))
    assert not target.locator("pre").is_visible()
    link.click()
    target.locator("pre").wait_for(state="visible")
    behind = target.locator("pre").inner_text()
    assert '"method": "ewc"' in behind
    assert '"strength": 1.0' in behind, "not the row whose λ is tuned"
    page.close()


def test_claims_come_first(browser, papers):
    page = browser.new_page()
    page.goto(papers)
    assert page.locator("h2").first.inner_text() == "The paper's claims (scale small)"
    table = page.locator("#c1 table.figures")
    assert table.locator("tbody tr").count() > 0
    assert set(table.locator("tbody tr td:last-child").all_inner_texts()) == {"one seed", "–"}
    page.close()


def test_one_legend_for_the_curves_of_few_and_of_many_tasks(browser, papers):
    page = browser.new_page()
    page.goto(papers)
    section = page.locator("section", has=page.get_by_role("heading", name="accuracy after each task"))
    section.locator(".legend button", has_text=re.compile(r"^\s*EWC\s*$")).click()
    page.mouse.move(0, 0)
    dimmed = section.locator("figure").evaluate_all("all => all.map(one => one.querySelectorAll('.dim').length)")
    assert len(dimmed) == 2
    assert all(count > 0 for count in dimmed)
    page.close()
