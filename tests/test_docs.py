"""The documentation: its code runs, its links resolve, and its reference has every public name."""

import importlib.util
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

import bayesrule

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
EXTRAS = {
    "coming_from": "numpyro torch",
    "larger_than_memory": "torch",
    "modules": "flax",
    "probabilistic_programs": "numpyro",
    "pytorch": "torch",
    "tables_on_dask": "dask",
}
NEEDED = {
    "flax_network": "flax",
    "larger_than_memory": "dask",
    "numpyro_verdict": "numpyro",
    "pytorch_network": "torch",
    "table_uncertainty": "pandas",
}


def skip_without(extras):
    """A page or script runs in a process of its own, so that the test itself imports nothing."""
    for extra in extras.split():
        if importlib.util.find_spec(extra) is None:
            pytest.skip(f"needs {extra}")


def has_code(page):
    return re.search(r"^ *```python", page.read_text(encoding="utf-8"), re.MULTILINE)


def run(program, path, folder):
    """Run a page or a script in a process of its own, in an empty folder, as a reader would."""
    settings = os.environ | {
        "JAX_ENABLE_X64": "0",
        "MPLBACKEND": "Agg",
        "PYTHONIOENCODING": "utf-8",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    (folder / "out").mkdir()
    command = [sys.executable, str(program), str(path), str(folder / "out")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=settings, encoding="utf-8", cwd=folder
    )


@pytest.mark.extended
@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    skip_without(EXTRAS.get(page.stem, ""))
    ran = run(ROOT / "tests" / "run_page.py", page, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.extended
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_runs(script, tmp_path):
    skip_without(NEEDED.get(script.stem, ""))
    ran = run(DOCS / "site" / "run_script.py", script, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "out" / "cells.json").stat().st_size > 0


def test_a_cell_that_fails_fails_the_script_and_names_its_line(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text('"""A title."""\n\n# %% [markdown]\n# Text.\n\n# %%\nprint(1)\n\n\n# %%\nprint(1 / 0)\n')
    ran = run(DOCS / "site" / "run_script.py", script, tmp_path)
    assert ran.returncode != 0
    assert 'broken.py", line 11' in ran.stderr
    assert "ZeroDivisionError" in ran.stderr


def test_a_broken_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- setup: n = 2 -->\n\n```python\n>>> n\n2\n\n```\n\n```python\nassert n == 3\n```\n")
    ran = run(ROOT / "tests" / "run_page.py", page, tmp_path)
    assert ran.returncode == 1
    assert 'page.md", line 10' in ran.stdout


# Links.

FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$|<!--.*?-->", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def load(name):
    """A module of the site's own code."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slug(heading):
    """The anchor of a heading, as Markdown's table of contents makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*?)(?: \{.*\})?$", text, re.MULTILINE)} | set(
        re.findall(r"\{[^}]*#([\w.-]+)[^}]*\}", text)
    )


def sources():
    """The pages, and the tutorials with their text."""
    for path in [ROOT / "README.md", *PAGES]:
        yield path, FENCE.sub("", path.read_text(encoding="utf-8"))
    for path in TUTORIALS:
        lines = path.read_text(encoding="utf-8").splitlines()
        yield path, "\n".join(line for line in lines if line.startswith("#"))


def test_every_internal_link_resolves():
    generated = {DOCS / "table_1.md"} | {path.with_suffix(".md") for path in TUTORIALS}
    reference = DOCS / "reference"
    broken, links = [], 0
    for path, text in sources():
        for target in (match["target"] for match in LINK.finditer(text)):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            name, _, anchor = target.partition("#")
            at = (path.parent / name).resolve() if name else path
            if at in generated or (at.parent == reference and at.stem in reference_pages()):
                continue
            if not at.exists() or (anchor and anchor not in anchors(at)):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken
    assert links > 20


# The reference.


def reference_pages():
    if not hasattr(reference_pages, "found"):
        reference_pages.found = load("reference").pages()
    return reference_pages.found


def test_the_reference_has_every_public_name():
    text = "\n".join(content for _, content in reference_pages().values())
    entries = set(re.findall(r"^(?:      heading: |### )(\w+)$", text, re.MULTILINE))
    assert set(bayesrule.__all__) <= entries
    for module in ("estimators", "factors", "models"):
        assert set(getattr(bayesrule, module).__all__) <= entries
    assert {"nll", "Optimizer", "transformation", "NumpyroPosterior", "smooth", "Matern32"} <= entries
