"""Reports are made from result files alone, and their numbers are those that one computes by hand."""

import csv
import io
import json
import re
import statistics
from dataclasses import replace

import pytest

from dlcft.bench.experiment import RESULT_FORMAT, Experiment, Result
from dlcft.bench.report import Spread, read_results, summarise, to_csv, to_html, to_latex, to_markdown
from dlcft.bench.report.figures import LEVEL, PALETTE, increase
from dlcft.bench.report.summary import common_settings, curve, labels, own_settings, probe, sections
from dlcft.methods.recipes import named_recipe

ENVIRONMENT = {
    "dlcft": "0.1",
    "torch": "2.13",
    "python": "3.11",
    "commit": "abc1234",
    "gpu": None,
    "backbone": "f00d" * 4,
}
FINAL = {
    "none": 0.31,
    "lwf": 0.46,
    "ewc": 0.38,
    "osla": 0.44,
    "er": 0.55,
    "none-linear": 0.42,
    "dlcft-paper": 0.63,
    "dlcft": 0.71,
    "ranpac": 0.79,
    "dlcft-exact": 0.86,
    "none (joint)": 0.88,
    "none-linear (joint)": 0.85,
}
CLOSED = ("ranpac", "dlcft-exact")


def made(experiment, final, *, settled=True):
    """A plausible result that ends at this accuracy: older tasks are worse, and everything falls towards the end."""
    tasks = experiment.rounds
    one_test = experiment.scenario == "data-il" and not experiment.turn
    history = []
    for task in range(tasks):
        level = final if task == tasks - 1 else 0.95 - (0.95 - final) * (task + 1) / tasks
        if experiment.joint and task < tasks - 1:
            accuracy = None  # a linearised network learns the first task before all of them
        elif experiment.joint:
            accuracy = [level] * (1 if one_test else experiment.tasks)
        elif one_test:
            accuracy = [0.5 * final + 0.5 * final * (task + 1) / tasks]
        else:
            slope = 0.04 * (1 - final)
            accuracy = [level + slope * (index - task / 2) for index in range(task + 1)]
        trained = experiment.method not in CLOSED
        entry = {
            "task": task,
            "loss": [9.0, 5.0, 4.99 if settled else 4.0] if trained else [],
            "predicted_increase": 0.02 * (task + 1) / final if "dlcft" in experiment.method and task else None,
            "seconds_training": 4.0 * trained,
            "seconds_remembering": 1.5,
            "accuracy": accuracy,
        }
        history.append(entry)
    seconds = sum(entry["seconds_training"] + entry["seconds_remembering"] for entry in history)
    size = 2_900_000 + 14_000_000 * ("dlcft" in experiment.method)
    recipe = experiment.recipe.to_dict()
    return Result(experiment, history, seconds + 3, seconds, size, dict(ENVIRONMENT), recipe)


def named(base, title, **changes):
    """The experiment of a method, joint or not, by its title."""
    return replace(base, method=title.removesuffix(" (joint)"), joint=title.endswith(" (joint)"), **changes)


def several(base, methods=FINAL, seeds=(0, 1, 2), unsettled=("ewc",)):
    return [
        made(
            named(base, method, seed=seed, settings={} if method in CLOSED else {"epochs": 3}),
            FINAL[method] + 0.01 * (seed - 1),
            settled=method not in unsettled,
        )
        for method in methods
        for seed in seeds
    ]


NEW_CLASSES = Experiment(dataset="digits", scenario="class-il", tasks=5)
TURNED = Experiment(dataset="digits", scenario="data-il", tasks=3, turn=40.0)
SPLIT = Experiment(dataset="seq-cifar100", scenario="data-il", tasks=10, per_class=50)


@pytest.fixture(scope="module")
def results():
    return several(NEW_CLASSES) + several(TURNED, seeds=(1,)) + several(SPLIT, seeds=(0, 2))


@pytest.fixture(scope="module")
def page(results):
    return to_html(results, title="Digits & <others>", warnings=["x.json is <no> result."])


def row_of(rows, method, base=NEW_CLASSES):
    (found,) = [
        row
        for row in rows
        if (row.experiment.title, row.experiment.scenario, row.experiment.turn) == (method, base.scenario, base.turn)
    ]
    return found


def test_mean_and_deviation_over_seeds(results):
    row = row_of(summarise(results), "dlcft")
    values = [0.70, 0.71, 0.72]
    assert row.accuracy.mean == pytest.approx(statistics.mean(values))
    assert row.accuracy.sd == pytest.approx(statistics.stdev(values))
    assert [result.experiment.seed for result in row.results] == [0, 1, 2]
    assert row.seconds.mean == pytest.approx(5 * 5.5)
    assert row_of(summarise(results), "dlcft", TURNED).accuracy.sd is None


def test_a_figure_that_a_seed_lacks_is_not_averaged():
    assert Spread.of([1.0, None]) is None
    assert Spread.of([1.0, float("nan")]) is None
    assert Spread.of([]) is None


def test_backward_transfer_and_forgetting_by_hand():
    experiment = Experiment(scenario="task-il", tasks=2, method="ewc")
    result = made(experiment, 0.5)
    result.history[0]["accuracy"], result.history[1]["accuracy"] = [0.9], [0.6, 0.8]
    (row,) = summarise([result])
    assert row.bwt.mean == pytest.approx(-0.3)
    assert row.forgetting.mean == pytest.approx(0.3)
    assert row.accuracy.mean == pytest.approx(0.7)


def test_without_a_whole_matrix_there_is_no_backward_transfer():
    result = made(replace(NEW_CLASSES, method="ewc", evaluate_every=5), 0.5)
    for entry in result.history[:-1]:
        entry["accuracy"] = None
    (row,) = summarise([result])
    assert row.bwt is None
    assert row.forgetting is None
    assert summarise(several(SPLIT, ["ewc"]))[0].bwt is None


def test_recovered_distance_is_that_of_the_same_model_and_loss(results):
    rows = summarise(results)
    assert row_of(rows, "dlcft").recovered == pytest.approx((0.71 - 0.42) / (0.85 - 0.42))
    assert row_of(rows, "ewc").recovered == pytest.approx((0.38 - 0.31) / (0.88 - 0.31))
    # the paper's: from the nonlinear None, to the Joint of the method's own model
    assert row_of(rows, "dlcft").recovered_mixed == pytest.approx((0.71 - 0.31) / (0.85 - 0.31))
    assert row_of(rows, "ewc").recovered_mixed == pytest.approx(row_of(rows, "ewc").recovered)
    assert row_of(rows, "none-linear").recovered_mixed == pytest.approx((0.42 - 0.31) / (0.85 - 0.31))
    # closed form has no None of its own
    assert row_of(rows, "ranpac").recovered is None
    assert row_of(rows, "ranpac").recovered_mixed == pytest.approx((0.79 - 0.31) / (0.88 - 0.31))
    assert row_of(rows, "none").recovered is row_of(rows, "none (joint)").recovered_mixed is None


def test_recovered_distance_needs_both_ends_and_a_distance():
    both = several(NEW_CLASSES, ["none", "ewc", "none (joint)"], seeds=(0,))
    assert row_of(summarise(both[:2]), "ewc").recovered is None
    upside_down = [both[0], both[1], made(both[2].experiment, 0.2)]
    assert row_of(summarise(upside_down), "ewc").recovered is None
    for joint, told in ((0.315, False), (0.325, True)):  # None is at 0.30
        rows = summarise([*both[:2], made(both[2].experiment, joint)])
        assert (row_of(rows, "ewc").recovered is not None) is told
    elsewhere = made(replace(both[2].experiment, per_class=7), 0.9)
    assert all(row.recovered is None for row in summarise([*both[:2], elsewhere]))


def test_of_several_references_the_one_trained_alike_then_the_best():
    base = replace(NEW_CLASSES, method="none")
    long = made(replace(base, settings={"epochs": 9}), 0.2)
    short = made(replace(base, settings={"epochs": 3}), 0.3)
    stronger = made(replace(base, settings={"epochs": 3, "clip": 1.0}), 0.4)
    joint = made(replace(base, joint=True), 0.9)
    ewc = made(replace(base, method="ewc", settings={"epochs": 3}), 0.6)
    assert stronger.recipe == short.recipe, "clip=1 is the recipe's"
    rows = summarise([long, short, stronger, joint, ewc])
    assert row_of(rows, "ewc").recovered == pytest.approx((0.6 - 0.4) / (0.9 - 0.4))
    nones = [row for row in rows if row.experiment.title == "none"]
    assert sorted(labels(nones)) == ["none (clip=1.0, epochs=3)", "none (epochs=3)", "none (epochs=9)"]


def test_names_of_variants_say_what_differs_or_are_numbered():
    def labelled(*settings):
        return labels(summarise([made(replace(NEW_CLASSES, method="ewc", settings=one), 0.5) for one in settings]))

    assert labelled({"epochs": 3}) == ["ewc"]
    assert set(labelled({"epochs": 3, "strength": 2.0}, {"epochs": 3})) == {"ewc (strength=2.0)", "ewc"}
    several = labelled({}, {"curvature": "kfac"}, {"curvature": "kfac", "draws": 2})
    assert set(several) == {"ewc (kfac, draws=2)", "ewc (kfac)", "ewc"}
    long = [{"curvature_samples": count, "lr": 0.125, "strength": 2.0 * count} for count in (1, 2)]
    assert labelled(*long) == ["ewc [1]", "ewc [2]"]
    assert set(labelled({}, {"strength": 1.0})) == {"ewc", "ewc (strength=1.0)"}


def test_settings_that_all_share_are_told_once():
    rows = summarise(several(NEW_CLASSES, ["ewc", "none", "ranpac"], seeds=(0,)))
    other = summarise([made(replace(NEW_CLASSES, method="mas", settings={"epochs": 3, "strength": 7.0}), 0.5)])
    assert common_settings([*rows, *other]) == {"epochs": 3}
    assert own_settings(other[0], [*rows, *other]) == "strength=7.0"
    assert own_settings(other[0], other) == "epochs=3, strength=7.0"
    zero = {"head_start": "zero"}
    heads = [made(replace(NEW_CLASSES, method="none-linear", settings=one), 0.5) for one in ({}, zero)]
    other = made(replace(NEW_CLASSES, method="none", settings=zero), 0.5)
    assert common_settings(summarise([*heads, other])) == {}


def test_what_is_looked_at_is_no_condition():
    base = replace(NEW_CLASSES, method="ewc")
    probed = made(replace(base, method="none", knn=2, evaluate_every=2), 0.5)
    probed.history[-1]["knn"] = 0.625
    (section,) = sections(summarise([made(base, 0.5), probed]))
    assert [(task, spread.mean) for task, spread in probe(section[0])] == [(5, 0.625)]
    assert "nearest neighbours over tasks" in to_html([probed])
    assert "nearest neighbours over tasks" not in to_html([made(base, 0.5)])


def test_rows_share_a_section_only_under_the_same_conditions(results):
    found = sections(summarise(results))
    assert [len(section) for section in found] == [len(FINAL)] * 3
    other = replace(made(NEW_CLASSES, 0.5), environment={**ENVIRONMENT, "backbone": "beef"})
    assert len(sections(summarise([made(NEW_CLASSES, 0.5), other]))) == 2


def test_a_seed_may_count_only_once():
    with pytest.raises(ValueError, match="twice"):
        summarise([made(NEW_CLASSES, 0.5), made(NEW_CLASSES, 0.6)])


def test_unconverged_runs_are_marked(results):
    rows = summarise(results)
    assert row_of(rows, "ewc").converged is False
    assert row_of(rows, "ewc").unconverged == (0, 1, 2)
    assert row_of(rows, "dlcft").converged is True
    assert row_of(rows, "ranpac").converged is None
    assert re.search(r"^\| ewc† ", to_markdown(results), re.M)
    assert r"ewc$^\dagger$" in to_latex(results)


def test_results_of_a_recipe_that_has_changed_are_left_out(tmp_path):
    for seed, share in enumerate([1.0, 0.5]):
        recipe = named_recipe("dlcft-exact", {"augment": "flip", "tangent_share": share}).to_dict()
        result = replace(made(Experiment(method="dlcft-exact", seed=seed), 0.8), recipe=recipe)
        (tmp_path / result.experiment.file).write_text(json.dumps(result.to_dict()))
    foreign = []
    assert [result.experiment.seed for result in read_results(tmp_path, foreign=foreign)] == [0]
    assert len(foreign) == 1
    assert "is a result with tangent_share=0.5, now 1.0" in foreign[0]


def test_reading_a_folder_names_what_is_foreign(tmp_path, results, caplog):
    for place, result in enumerate(results):
        path = tmp_path / f"part{place % 2}" / result.experiment.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result.to_dict()))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "manifest.json").write_text("{}")
    whole = results[0].to_dict()
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text('{"format": 1')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "newer.json").write_text(json.dumps({**whole, "format": 99}))
    (tmp_path / "older.json").write_text(json.dumps({**whole, "format": 1}))
    (tmp_path / "unknown.json").write_text(json.dumps({**whole, "experiment": {"method": "magic"}}))
    (tmp_path / "empty.json").write_text(json.dumps({**whole, "history": []}))
    (tmp_path / "again.json").write_text(json.dumps(whole))
    foreign = []
    found = read_results(tmp_path, foreign=foreign)
    assert {r.experiment.key for r in found} == {r.experiment.key for r in results}
    assert len(found) == len(results)
    for name in ("list", "broken", "binary", "newer", "older", "unknown", "empty"):
        assert sum(f"{name}.json" in sentence for sentence in foreign) == 1, name
    assert sum("repeats" in sentence for sentence in foreign) == 1
    for name, found_format in (("newer", 99), ("older", 1)):
        (said,) = [sentence for sentence in foreign if f"{name}.json" in sentence]
        assert said.endswith(f"{name}.json has result format {found_format}; this version reads {RESULT_FORMAT}.")
    assert len(foreign) == 8
    assert not caplog.records
    read_results(tmp_path)
    assert len(caplog.records) == 8
    assert to_csv(found) == to_csv(results)


def test_no_folder_and_no_results_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        read_results(tmp_path / "absent")
    assert read_results(tmp_path) == []
    for write in (to_markdown, to_csv, to_latex, to_html):
        with pytest.raises(ValueError, match="no results"):
            write([])


def test_csv_is_read_back(results):
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert len(lines) == 3 * len(FINAL)
    (line,) = [x for x in lines if x["dataset"] == "seq-cifar100" and x["method"] == "dlcft-paper"]
    mean = 100 * statistics.mean([0.62, 0.64])
    assert float(line["accuracy_percent"]) == pytest.approx(mean)
    assert float(line["accuracy_percent_sd"]) == pytest.approx(100 * statistics.stdev([0.62, 0.64]))
    assert float(line["ours"]) == pytest.approx(mean)
    assert line["artefact"] == ""
    assert json.loads(line["settings"]) == {"epochs": 3}
    assert line["bwt_points"] == ""
    assert line["seeds"] == "0 2"
    assert line["per_class"] == "50"


def test_markdown_tables_are_regular_and_escape():
    odd = [
        made(replace(NEW_CLASSES, dataset="a_b|c", method=method, settings={"augment": "x|y:_Z_"}), 0.5)
        for method in ("ewc", "mas")
    ]
    text = to_markdown(odd)
    assert r"a\_b\|c" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(rows) == 4
    assert text.count("**") == 2


def test_latex_escapes():
    odd = made(
        replace(NEW_CLASSES, dataset=r"50%_a&b{c}\d^~#$", method="ewc", settings={"augment": "my_module:K"}), 0.5
    )
    text = to_latex([odd])
    assert r"50\%\_a\&b\{c\}\textbackslash{}d\textasciicircum{}\textasciitilde{}\#\$" in text
    assert r"my\_module:K" in text
    assert "±" not in text
    assert not re.search(r"(?<!\\)[%#]", text)
    table = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip()
    width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1])
    assert len(re.findall(r"(?<!\\)&", table)) == width - 1
    assert table.endswith(r"\\")


def test_the_page_loads_nothing(page):
    assert "http:" not in page
    assert "https:" not in page
    assert not re.search(r"<(?:script|img|iframe|object|embed)\b[^>]*\bsrc=", page)
    assert set(re.findall(r'(?:href|src)="([^"#])', page)) <= {"d"}
    assert re.findall(r'<link[^>]*href="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"@import|@font-face|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_the_page_escapes_names():
    name = '<script>alert("x")</script>'
    result = made(replace(NEW_CLASSES, dataset=name, method="ewc", settings={"augment": "<b>&"}), 0.5)
    result.environment["machine"] = "<i>"
    text = to_html([result], title=name, warnings=[name])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "<b>" not in text
    assert "<i>&lt;" not in text
    assert "&lt;i&gt;" in text


def test_the_page_has_every_part(page):
    assert "<title>Digits &amp; &lt;others&gt;</title>" in page
    assert "x.json is &lt;no&gt; result." in page
    assert page.count("<section ") == 3
    assert page.count('aria-label="Accuracy over tasks') == 3
    # joint training has no matrix, nor have tasks that share a test set
    assert page.count('aria-label="Accuracy matrix of') == 2 * (len(FINAL) - 2)
    assert page.count('aria-label="Predicted rise') == 2
    assert page.count('aria-label="Seconds of') == page.count('aria-label="Size of') == 3
    assert "not converged, seed 0, 1, 2" in page
    assert "abc1234" in page
    assert "prefers-color-scheme: dark" in page
    identities = re.findall(r'\sid="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(identities)
    assert "#010203" not in page


def test_the_same_results_make_the_same_page():
    some = several(NEW_CLASSES, ["ewc", "dlcft", "none (joint)"], seeds=(0, 1))
    assert to_html(some) == to_html(some[::-1])


def test_measured_rise_of_the_loss_is_taken_where_it_is():
    result = made(replace(NEW_CLASSES, method="dlcft"), 0.7)
    (row,) = summarise([result])
    drops = increase(row, in_loss=False)
    before, after = result.history[0]["accuracy"], result.history[1]["accuracy"]
    assert drops[0] == pytest.approx((result.history[1]["predicted_increase"], 100 * (before[0] - after[0])))
    assert len(drops) == 4
    for entry in result.history[1:]:
        entry["measured_increase"] = 2 * entry["predicted_increase"]
    pairs = increase(*summarise([result]), in_loss=True)
    assert [measured / predicted for predicted, measured in pairs] == pytest.approx([2.0] * 4)
    assert "equal on the line" in to_html([result])


def test_a_curve_has_the_tasks_that_every_seed_was_tested_after():
    one, other = several(SPLIT, ["ewc"], seeds=(0, 1))
    other.history[3]["accuracy"] = None
    (row,) = summarise([one, other])
    assert [task for task, _ in curve(row)] == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_colours_can_be_seen_on_both_grounds():
    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark = luminance("#14171b")
    for colour in (*PALETTE, LEVEL):
        assert 1.05 / (luminance(colour) + 0.05) >= 3, colour
        assert (luminance(colour) + 0.05) / (dark + 0.05) >= 3, colour


def test_the_nonlinear_ends_may_have_a_network_of_their_own(results):
    relu = {"none", "ewc", "lwf", "osla", "er"}
    mixed = [
        replace(
            result, environment={**ENVIRONMENT, "backbone": "relu" if result.experiment.method in relu else "leaky"}
        )
        for result in results
    ]
    apart, together = summarise(mixed), summarise(results)
    for method in ("dlcft", "ranpac", "ewc"):
        assert row_of(apart, method).recovered_mixed == row_of(together, method).recovered_mixed
        assert row_of(apart, method).recovered == row_of(together, method).recovered


def test_the_page_shows_what_the_data_set_has_set():
    recipe = named_recipe("none", {"augment": "crop4+flip"}).to_dict()
    assert "crop4+flip" in to_html([replace(made(Experiment(method="none"), 0.5), recipe=recipe)])
