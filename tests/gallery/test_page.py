"""The gallery: a picture for every row of Table 1, drawn by a run of the rule, and a page that shows them."""

import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.gallery import page as gallery
from bayesrule.gallery.page import Entry, draw_entry, entries, render_gallery

ENTRIES = {entry.name: entry for entry in entries()}
QUICK = ["gradient_descent", "ogn", "exponential_weights"]
REST = [name for name in ENTRIES if name not in QUICK]


class Tags(HTMLParser):
    """Which pictures a page shows, the text of it, and whether its tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.sources.append(dict(attrs)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.fixture(scope="module")
def pictures():
    return [draw_entry(ENTRIES[name]) for name in QUICK]


def size(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [float(x) for x in root.attrib["viewBox"].split()[2:]]


def checked(picture):
    """An SVG of a sensible size, of the row's own algorithm."""
    width, height = size(picture.svg)
    assert 300 < width < 700
    assert 150 < height < 450
    assert len(picture.svg) < 500_000
    rows = {row.recipe: row.rule for row in blr.table()}
    if picture.entry.name in rows:
        own = rows[picture.entry.name]
        assert picture.rule.name == own.name
        assert picture.rule.section == own.section
        assert [type(picture.rule.points), type(picture.rule.curvature)] == [type(own.points), type(own.curvature)]
        assert picture.rule.family.kind is own.family.kind


def test_every_row_has_a_picture_and_a_caption():
    assert {row.recipe for row in blr.table()} == set(ENTRIES) - {"wall", "sharp_and_flat", "two_minima"}
    for entry in ENTRIES.values():
        assert 40 < len(entry.caption) < 400
        assert "`" not in entry.caption
        assert entry.caption.endswith(".")


def test_pictures_are_drawn(pictures):
    for picture in pictures:
        checked(picture)


@pytest.mark.sampled("straight_through", "adam", "sgd", "conjugate", "bayesbinn", "newton", "von")
@pytest.mark.parametrize("name", REST)
def test_the_other_pictures_are_drawn(name):
    checked(draw_entry(ENTRIES[name]))


def test_a_picture_is_the_same_every_time(pictures):
    assert draw_entry(ENTRIES["ogn"]).svg == pictures[1].svg


def test_a_picture_does_not_depend_on_the_precision_of_the_process(pictures):
    with jax.enable_x64(False):
        assert draw_entry(ENTRIES["ogn"]).svg == pictures[1].svg


def test_a_picture_shows_what_ran(pictures, monkeypatch):
    """With another rate the run, and so the picture, is another."""
    from bayesrule.gallery import deep_learning as drawing

    monkeypatch.setattr(drawing.recipes, "ogn", lambda rate, **options: blr.ogn(2 * rate, **options))
    assert draw_entry(ENTRIES["ogn"]).svg != pictures[1].svg


def test_the_page(pictures):
    text = render_gallery(pictures)
    parsed = Tags(text)
    assert parsed.sources == [f"{name}.svg" for name in QUICK]
    assert parsed.open in ([], ["html"])
    for picture in pictures:
        assert picture.entry.title in parsed.text
        assert picture.entry.caption in parsed.text
        assert str(picture.rule.steps) in parsed.text
        assert repr(picture.rule.points) in parsed.text
        assert picture.entry.where in parsed.text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "http" not in text, "nothing is fetched"


def fake(monkeypatch, *, fails=False):
    from matplotlib.figure import Figure

    def draw():
        """A caption <with> a bracket."""
        if fails:
            raise RuntimeError("no picture")
        figure = Figure()
        figure.add_subplot().plot(np.arange(3))
        return figure

    first = [Entry("one", "One & only", "nowhere", "Block", draw), Entry("two", "Two", "nowhere", "Block", draw)]
    monkeypatch.setattr(gallery, "entries", lambda: first)


def test_files_are_written_whole_and_others_left_alone(tmp_path, monkeypatch):
    fake(monkeypatch)
    out = tmp_path / "deep" / "gallery"
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("mine")
    (out / "one.svg").write_text("old")
    result = CliRunner().invoke(app, ["gallery", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 pictures" in result.stdout
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "mine.txt", "one.svg", "two.svg"]
    assert (out / "mine.txt").read_text() == "mine"
    assert size((out / "one.svg").read_bytes())
    text = (out / "index.html").read_text()
    assert "One &amp; only" in text
    assert "&lt;with&gt;" in text


def test_a_picture_that_fails_leaves_everything_as_it_was(tmp_path, monkeypatch):
    fake(monkeypatch, fails=True)
    (tmp_path / "one.svg").write_text("old")
    result = CliRunner().invoke(app, ["gallery", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["one.svg"]
    assert (tmp_path / "one.svg").read_text() == "old"
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in CliRunner().invoke(app, ["gallery", "--out", str(tmp_path / "file" / "in")]).output
    assert "must be a directory" in CliRunner().invoke(app, ["gallery", "--out", str(tmp_path / "file")]).output


def test_help_is_quick_to_import():
    """Neither JAX nor matplotlib nor rich's tables for the list of commands."""
    code = "import sys, bayesrule.cli; sys.exit(any(name in sys.modules for name in ('jax', 'matplotlib', 'sklearn')))"
    subprocess.run([sys.executable, "-c", code], check=True)
