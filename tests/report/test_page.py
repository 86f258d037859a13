"""The report of a run: well-formed, complete, safe from what strangers write into files, and small."""

import json
import math
import re
import shutil
import subprocess
import tempfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bayesrule.report.page import SECTIONS, render_report
from report import runs

VOID = {"meta", "br", "hr", "col", "img", "input", "link"}
HOSTILE = '<script>alert("1")</script>&amp;\'"\u202e\x00\ud800 עברית ' + "x" * 500
WITHOUT_TARGET = ["groups", "topics", "factors"]
ANCHORS = [anchor for anchor, _, _ in SECTIONS if anchor not in WITHOUT_TARGET]


class Reader(HTMLParser):
    """Elements that close in order, what they are, and the text between them."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.text, self.links = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        assert len(values) == len(attrs), f"an attribute twice in {tag}"
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[key] for key in ("href", "src") if key in values]
        assert not any(key.startswith("on") for key in values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def read(run):
    """The page, parsed; every drawing is XML, and nothing comes from elsewhere."""
    text = render_report(run)
    text.encode("utf-8")
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert len(reader.ids) == len(set(reader.ids))
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        tree = ElementTree.fromstring(svg)
        assert tree.get("aria-label") or tree.get("aria-hidden")
        paths = " ".join(each.get("d", "") for each in tree.iter())
        assert not re.search("nan|inf", paths)
    assert "nan" not in [word.strip(".,()") for word in " ".join(reader.text).lower().split()]
    return text, " ".join(" ".join(reader.text).split()), reader


@pytest.mark.parametrize("name", runs.TASKS)
def test_a_page_is_well_formed_and_small(name):
    text, _, _ = read(runs.TASKS[name]())
    assert text.startswith("<!doctype html>")
    assert len(text) < 100_000


def test_uncertain_rows_of_several_classes_are_in_the_order_of_their_confidence():
    """Two of three classes at a half are less certain than all three at a third only by their entropy."""
    run = runs.TASKS["classes"]()
    count = len(run.test["row"])
    sure = np.tile([0.98, 0.01, 0.01], (count, 1))
    sure[:3] = [[0.5, 0.5, 0.0], [0.52, 0.24, 0.24], [0.4, 0.3, 0.3]]
    run.test = {**run.test, "probabilities": sure}
    _, visible_text, _ = read(run)
    shown = visible_text[visible_text.index("Most uncertain") :]
    confidences = [float(share) for share in re.findall(r"(\d+(?:\.\d+)?) %", shown)][:4]
    assert confidences == [40.0, 50.0, 52.0, 98.0]


def test_an_exact_posterior_was_not_cut_short():
    run = runs.TASKS["regression"]()
    run.facts["reason"] = "exact"
    _, visible_text, _ = read(run)
    assert "one step gives the exact posterior" in visible_text
    assert "number of steps was reached" not in visible_text


def test_everything_is_there_for_two_classes():
    text, visible_text, reader = read(runs.binary())
    assert reader.ids == ANCHORS
    for words in (
        "Predicting diagnosis from 31 columns of breast_cancer",
        "On 142 held-out rows: accuracy 97.9 % (baseline 64.8 %), NLL 0.0688 nats (baseline 0.650), calibrated within",
        "Bayesian logistic regression trained on 427 rows by newton in 36 steps",
        "higher is better",
        "the classes' frequencies in training",
        "Most uncertain",
        "Most influential",
        "10 more are not shown",
        "the prior's precision was updated",
        "Which distributions q are candidates?",
        "Backtracking(monotone=True)",
        "has the same value in every row",
        "seed: 0",
        "numpy 2.3.5",
    ):
        assert words in visible_text.replace("\u202f", " "), words
    assert text.count('class="correct') + text.count('class="number correct') == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("regression", ["RMSE 54.3", "outside their interval; about 10 % should be", "Log evidence, nats −1,432.9"]),
        ("network", ["a Bayesian neural network", "0.w", "held-out NLL, nats", "MonteCarlo(1)", "4,000"]),
        ("counts", ["Poisson or negative binomial", "Bayesian Poisson regression"]),
        ("sequence", ["Forecasting passengers from its past", "On the last 24 values", "Most surprising"]),
        ("classes", ["setosa", "virginica", "true ↓"]),
        ("many_classes", ["the pairs that are confused most often", "underconfident by 51 %"]),
    ],
)
def test_each_task_says_its_own(name, words):
    _, visible_text, _ = read(runs.TASKS[name]())
    for each in words:
        assert each.lower() in visible_text.lower(), each


def test_what_is_not_there_is_left_out():
    _, visible_text, reader = read(runs.bare())
    assert not reader.ids
    assert "nav" not in reader.tags
    assert visible_text.startswith("Predicting the target from the data")
    run = runs.binary()
    run.influence, run.weights, run.trace, run.facts, run.derivation = {}, {}, {}, {}, ""
    run.metrics = {"model": {}, "baseline": {}}
    _, visible_text, reader = read(run)
    assert reader.ids == ["next", "calibration", "ranking", "predictions", "rows", "data", "reproduction"]
    assert "influential" not in visible_text
    run.test = {}
    assert read(run)[2].ids == ["data", "reproduction"]


@pytest.mark.parametrize("name", ["binary", "classes", "regression", "sequence"])
def test_names_from_strangers_stay_text(name):
    run = runs.TASKS[name]()
    run.config |= {
        "target": HOSTILE,
        "data": HOSTILE,
        "estimator": HOSTILE,
        "recipe": HOSTILE,
        "params": {HOSTILE: HOSTILE},
    }
    run.summary["source"] = HOSTILE
    run.summary["guesses"] = [HOSTILE]
    run.classes = [HOSTILE] * len(run.classes)
    for column in (*run.summary["columns"], run.summary["target"]):
        column |= {"name": HOSTILE, "note": HOSTILE}
        if column["kind"] == "category":
            column |= {"levels": [HOSTILE] * 3, "top": [[HOSTILE, 3]]}
    if run.weights:
        run.weights["name"] = [HOSTILE] * len(run.weights["name"])
    run.metrics["baseline_name"] = HOSTILE
    run.metrics["model"][HOSTILE] = 1.0
    run.facts[HOSTILE] = HOSTILE
    run.versions = {HOSTILE: HOSTILE}
    run.seconds = {HOSTILE: 1.0}
    run.derivation = f"{HOSTILE}\n  family     {HOSTILE}  {HOSTILE}\n  points     {HOSTILE}\n  update     {HOSTILE}"
    text, visible_text, _ = read(run)
    assert "<script" not in text
    assert '<script>alert("1")</script>&amp;' in visible_text
    assert not set(text) & set("\u202e\x00\ud800")
    run.derivation = HOSTILE
    read(run)


def test_the_bound_is_shown_with_its_error():
    run = runs.binary()
    run.facts["bound_error"] = 0.0512
    assert "−32.100 ± 0.051" in read(run)[1]
    run.facts["bound_error"] = None  # an expansion at the mean
    visible_text = read(run)[1]
    assert "−32.1" in visible_text
    assert "bound_error" not in visible_text
    assert "up to the prior's constant" not in visible_text
    run.facts["bound_normalized"] = False  # a flat prior
    assert "up to the prior's constant" in read(run)[1]


def test_the_folders_of_the_data_are_nobodys_business():
    run = runs.binary()
    run.summary["source"] = "/home/someone/secret/table.csv"
    _, visible_text, _ = read(run)
    assert "of table.csv" in visible_text
    assert "secret" not in visible_text


@pytest.mark.parametrize("name", ["binary", "classes", "regression", "counts", "sequence", "network"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_what_is_not_finite_breaks_nothing(name, bad, share):
    run, rng = runs.TASKS[name](), np.random.default_rng(0)

    def spoilt(values):
        array = np.array(values, float)
        array[rng.random(array.shape) < share] = bad
        return array

    for part in (run.test, run.history, run.trace, run.influence):
        for key in part:
            if key not in ("row", "time", "heldout_step"):
                part[key] = spoilt(part[key])
    run.weights |= {key: spoilt(run.weights[key]) for key in ("mean", "std") if key in run.weights}
    run.metrics["model"] = dict.fromkeys(run.metrics["model"], bad)
    run.facts = dict.fromkeys(run.facts, bad)
    for column in run.summary["columns"]:
        column |= {key: bad for key in ("mean", "std", "min", "max") if key in column}
    read(run)


@pytest.mark.parametrize("name", ["binary", "classes", "regression", "counts", "sequence"])
def test_one_held_out_row(name):
    run = runs.TASKS[name]()
    run.test = {key: values[:1] for key, values in run.test.items()}
    run.summary["test_rows"] = 1
    _, visible_text, _ = read(run)
    assert "1 held-out row:" in visible_text or "the last 1 value," in visible_text


def test_constant_predictions_and_no_spread():
    run = runs.regression()
    for key in ("y", "mean", "low", "high"):
        run.test[key] = np.full(len(run.test["y"]), 3.0)
    run.test["std"] = np.zeros(len(run.test["y"]))
    run.weights |= {"mean": np.zeros(10), "std": np.zeros(10)}
    run.trace = {"bound": np.zeros(30), "objective": np.zeros(30)}
    read(run)


@pytest.mark.extended
def test_large_runs_make_small_pages():
    run = runs.regression(100_000)
    names = [f"feature {place}" for place in range(1000)]
    run.weights = {"name": names, "mean": np.linspace(-1, 1, 1000), "std": np.full(1000, 0.2)}
    run.summary["columns"] = [
        {"name": name, "kind": "number", "missing": 0, "used": True, "mean": 0.0} for name in names
    ]
    run.summary["columns"][-1]["missing"] = 7
    run.summary["features"] = names
    run.trace = {"bound": -np.geomspace(1e6, 1, 100_000)}
    run.fits = list(range(0, 100_000, 10_000))
    text, visible_text, _ = read(run)
    assert len(text) < 150_000
    assert "980 more are not shown" in visible_text
    assert "40 of 1,000 columns, those with remarks first" in visible_text
    assert "feature 999 number 0 7" in visible_text
    assert "At most 200 rows are drawn" in visible_text
    many = runs.many_classes()
    many.test = {key: np.concatenate([values] * 250) for key, values in many.test.items()}
    assert len(read(many)[0]) < 100_000


def test_a_long_past_and_dates():
    run = runs.sequence(5000)
    days = np.datetime64("2010-01-01") + np.arange(5024)
    run.history["time"], run.test["time"] = days[:5000], days[5000:]
    _, visible_text, _ = read(run)
    assert "The last 300 of 5,000 values of the history are drawn" in visible_text
    assert "2023-10-03" in visible_text
    run.history["time"], run.test["time"] = days[:5000].astype(str), days[5000:].astype(str)
    assert "2023-10-03" in read(run)[1]
    run.history, run.test["time"] = {}, np.arange(1990, 2014)
    _, visible_text, _ = read(run)
    assert "2000" in visible_text
    assert "2,000" not in visible_text


def test_a_bound_that_falls_is_told_of():
    run = runs.binary()
    assert "it fell" not in read(run)[1]  # where a fit begins it may
    run.trace["bound"][[5, 20]] -= 30
    assert "it fell at 2 of 36 steps" in read(run)[1]
    run.facts = {}
    assert "a new fit began" in read(run)[1]


def test_a_model_that_is_worse_than_the_baseline_says_so():
    run = runs.binary()
    assert "worse than the baseline" not in read(run)[1]
    run.metrics["model"]["nll"] = 0.9
    assert "Its likelihood is worse than the baseline's." in read(run)[1]


# In a browser.

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FRAMES = """<!doctype html><body>{frames}<script>
onload = () => {{
  const found = [...document.querySelectorAll('iframe')].map(frame => {{
    const root = frame.contentDocument.documentElement, inner = frame.contentWindow.innerWidth;
    const wide = [...root.querySelectorAll('body *')].filter(each => !each.closest('.scroll, pre, svg')
      && each.getBoundingClientRect().right > inner + 0.5).map(each => each.tagName + '.' + each.className);
    const cut = [...root.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1);
    return {{name: frame.name, inner, width: root.scrollWidth, wide, cut: cut.length}};
  }});
  document.body.dataset.found = JSON.stringify(found);
}};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_nothing_overflows_and_nothing_complains(tmp_path):
    """Every page at 390 and 1400 pixels in one browser: no element leaves the page, no table is cut off."""
    pages = {name: runs.TASKS[name]() for name in runs.TASKS}
    pages["hostile"] = runs.binary()
    pages["hostile"].config["target"], pages["hostile"].classes = (
        HOSTILE.replace(" ", ""),
        [HOSTILE.replace(" ", "")] * 2,
    )
    pages["hostile"].weights["name"] = [HOSTILE.replace(" ", "")] * 30
    pages["hostile"].metrics["train"] = pages["hostile"].metrics["model"]
    pages["hostile"].metrics["references"] = [{"name": "trees", "metrics": pages["hostile"].metrics["model"]}] * 2
    pages["hostile"].summary["warnings"] = [{"kind": "leak", "finding": HOSTILE.replace(" ", ""), "advice": HOSTILE}]
    pages["hostile"].config["out"] = HOSTILE.replace(" ", "")
    frames = []
    for name, run in pages.items():
        (tmp_path / f"{name}.html").write_text(render_report(run), encoding="utf-8")
        frames += [
            f'<iframe name="{name}" src="{name}.html" style="width:{width}px;height:900px;border:0"></iframe>'
            for width in (390, 1400)
        ]
    (tmp_path / "frames.html").write_text(FRAMES.format(frames="".join(frames)), encoding="utf-8")
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
        "--disable-component-update --allow-file-access-from-files --enable-logging=stderr --v=0 --dump-dom "
        "--virtual-time-budget=10000 --hide-scrollbars --window-size=1600,1000"
    )
    with tempfile.TemporaryDirectory() as profile:
        place = Path(tmp_path / "frames.html").as_uri()
        command = [str(BROWSER), *options.split(), f"--user-data-dir={profile}", place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    actual = re.search(r'data-found="(.*?)"', done.stdout)
    assert actual, done.stderr
    found = json.loads(unescape(actual[1]))
    assert len(found) == 2 * len(pages)
    for each in found:
        assert each["width"] <= each["inner"] in (390, 1400), each
        assert not each["wide"], each
        assert not each["cut"] or each["name"] == "hostile", each
    assert "CONSOLE" not in done.stderr
