"""The page of an update: it holds the facts, fits any width, and fetches nothing."""

import re

import pytest

from dlcft.update.incoming import Incoming
from dlcft.update.page import to_html
from dlcft.update.update import Disk, Flip, Update

KEPT = [
    {"version": 2, "bytes": 201_000_000, "created": "2026-11-16T06:00:00+00:00", "current": False},
    {"version": 3, "bytes": 202_000_000, "created": "2026-11-16T07:00:00+00:00", "current": True},
]


def made(labels=("cat", "dog", "owl"), **changes):
    facts = {
        "samples": 120,
        "learned": dict.fromkeys(labels[1:], 40),
        "new_labels": [labels[-1]],
        "predicted_increase": 0.031,
        "accuracy": 0.8,
        "accuracy_before": 0.9,
        "drop": 0.05,
        "flips": 0.1,
        "flipped": [Flip("holdout/" + "long-name-" * 20 + ".png", labels[0], labels[-1])] * 2,
        "per_class": dict.fromkeys(labels, (8, 10)),
        "per_class_before": dict.fromkeys(labels[:-1], 9),
        "temperature": 2.5,
        "calibration_error": 0.04,
        "calibration": [(0.5, 0.45, 10), (0.95, 1.0, 20)],
        "gates": [],
        "accepted": True,
        "version": 3,
        "seconds": 12.5,
        "tasks": [
            {"samples": 100, "predicted_increase": None, "accuracy": 0.9},
            {"samples": 90, "predicted_increase": 0.01, "accuracy": None},
            {"samples": 120, "predicted_increase": 0.031, "accuracy": 0.8},
        ],
        "disk": Disk(202_000_000, KEPT, [1]),
    }
    return Update(**facts | changes)


FIRST = made(
    per_class={},
    per_class_before={},
    flipped=[],
    calibration=[],
    tasks=[{"samples": 120, "predicted_increase": None, "accuracy": None}],
    disk=Disk(202_000_000, KEPT[1:], []),
    **dict.fromkeys(("accuracy", "accuracy_before", "drop", "flips", "temperature", "calibration_error")),
    predicted_increase=None,
)
LONG = tuple(f"a label with a long name, number {n}" for n in range(150))
MANY = made(
    labels=LONG,
    gates=["x"],
    accepted=False,
    incoming=[
        Incoming(label, 400, 100, 0 if n < 2 else 80, LONG[1 - n], 90 if n < 2 else 10, n < 2)
        for n, label in enumerate(LONG)
    ],
    doubts=["these two are swapped"],
    not_learned=[LONG[-1]],
    accuracy_known=0.9,
)


def figures(page):
    return re.findall(r'role="img" aria-label="([^"]*)"', page)


def test_the_facts_are_there():
    page = to_html(made(), model="scenes", origin=[("backbone", "shipped")])
    for words in ("scenes: version 3", "backbone shipped", "current", "New labels: owl", "10.0%", "+0.031", "202 MB"):
        assert words in page
    assert figures(page) == [
        "Right answers for each label: cat 8 of 10; dog 8 of 10; owl 8 of 10",
        "Answers before and now: right, as before 16, turned right 0, turned wrong 2, wrong, as before 2",
        "Probability given against share of right answers; calibration error 0.040",
        "Predicted rise of the old loss, over updates: update 2: 0.01; update 3: 0.031",
        "Accuracy, %, over updates: update 1: 90; update 3: 80",
        "Versions kept: version 2 201 MB, version 3, current 202 MB",
    ]
    assert "removed: version 1" in page


def test_a_first_update_without_a_holdout():
    page = to_html(FIRST, model="scenes")
    assert figures(page) == ["Versions kept: version 3, current 202 MB"]
    assert "no holdout was given" in page


def test_a_gate_and_many_labels():
    page = to_html(MANY, model="scenes")
    assert "Kept, but not current" in page
    assert "All 150 labels" in page
    assert len(re.findall("8 of 10", figures(page)[0])) == 24


def test_the_new_batch_before_it_was_learned():
    page = to_html(MANY, model="scenes")
    assert "Doubtful labels in the new batch" in page
    assert "these two are swapped" in page
    drawn = next(label for label in figures(page) if label.startswith("New samples answered as labelled"))
    assert drawn.count(" of 100") == 24
    assert len(re.findall("doubtful</span>", page)) == 2
    assert "Doubtful" not in to_html(made(), model="scenes")


def test_the_accuracy_with_and_without_labels_that_were_never_learned():
    page = to_html(MANY, model="scenes")
    assert "90.0%" in page
    assert "on held-out samples of labels that were learned: 1200 of 1490" in page
    assert "labels that were not learned yet count as errors: 1" in page
    assert "on all held-out samples" in to_html(made(), model="scenes")


def test_names_cannot_be_markup():
    page = to_html(made(labels=("<script>alert(1)</script>", "b&c", '"')), model="<b>")
    assert "<script>alert" not in page
    assert "<b>:" not in page


@pytest.mark.parametrize("done", [made(), FIRST, MANY], ids=["usual", "first", "many"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_fetches_nothing(browser, tmp_path, done, width):
    file = tmp_path / "page.html"
    file.write_text(to_html(done, model="scenes" * 12), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800})
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
    assert complaints == []
    page.close()


def test_a_backslash_in_a_label_is_text():
    assert r"a\d" in to_html(made(labels=(r"a\d", r"\g<9>", "owl")), model="m", origin=[])
