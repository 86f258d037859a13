"""Pictures in a dark theme: every colour has a counterpart that can be told from the background."""

import re
from xml.etree import ElementTree

import matplotlib.colors
from matplotlib.figure import Figure

from bayesrule.gallery import style
from bayesrule.gallery.dark_theme import BACKGROUND, PALETTE, follow_theme, to_dark
from bayesrule.gallery.page import draw_entry, entries


def contrast(color, other):
    """The ratio of WCAG 2, from 1 to 21."""

    def luminance(text):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(text)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(color), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_palette_can_be_read_on_both_pages():
    for color in (style.INK, style.PLAIN, style.BAYESIAN, style.THIRD):
        assert contrast(color, "#ffffff") > 3
        assert contrast(PALETTE[color], BACKGROUND) > 4.5


def test_light_and_dark_change_places():
    greys = [f"#{level:02x}{level:02x}{level:02x}" for level in (8, 64, 128, 192, 240)]
    turned = [contrast(to_dark(grey), BACKGROUND) for grey in greys]
    assert turned == sorted(turned, reverse=True)
    assert turned[0] > 10
    assert turned[-1] < 1.5


def test_a_picture_has_a_rule_for_each_of_its_colours():
    drawn = draw_entry(next(entry for entry in entries() if entry.name == "gradient_descent")).svg.decode()
    ElementTree.fromstring(drawn)
    before, _, rules = drawn.rpartition("<style>")
    assert "@media (prefers-color-scheme: dark)" in rules
    used = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", before))
    assert len(used) > 3
    for each in used:
        assert f'[style*="{each}"]' in rules


def test_a_picture_for_a_light_page_stays_as_it_was():
    figure = Figure()
    figure.add_subplot().plot([0, 1], color="#123456")
    import io

    file = io.StringIO()
    figure.savefig(file, format="svg")
    drawn = file.getvalue()
    changed = follow_theme(drawn)
    assert re.sub("<style>@media.*?</style>", "", changed) == drawn
