"""Pictures that follow the reader's dark theme: rules for their own colours, added to the SVG that matplotlib writes.

A picture keeps its colours for light pages, print and viewers without style sheets. In a dark theme every colour of the
picture is replaced by its counterpart, those of the palette by the page's own, others by turning light into dark.
"""

from __future__ import annotations

import colorsys
import re

from .style import BAYESIAN, INK, PLAIN, QUIET, THIRD

# The dark page's colours for the palette (`page.css` of the report); white is what lies behind a picture.
BACKGROUND = "#1e2126"
PALETTE = {
    INK: "#e8e6e1",
    PLAIN: "#f0a25c",
    BAYESIAN: "#82b7f0",
    THIRD: "#6ecfa8",
    QUIET: "#8a9099",
    "#000000": "#e8e6e1",
    "#ffffff": BACKGROUND,
}
_COLOR = re.compile(r"(fill|stroke|stop-color): (#[0-9a-f]{6})")
_DARKEST, _LIGHTEST = 0.13, 0.92  # the lightness of the background and of the brightest ink


def to_dark(color: str) -> str:
    """The counterpart of a colour on a dark page: the same hue, light where it was dark.

    >>> to_dark("#ffffff"), to_dark("#ececec"), to_dark("#101010")
    ('#1e2126', '#303030', '#dedede')
    """
    if color in PALETTE:
        return PALETTE[color]
    red, green, blue = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    turned = _DARKEST + (1 - lightness) * (_LIGHTEST - _DARKEST)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, turned, saturation))


def follow_theme(svg: str) -> str:
    """An SVG of matplotlib's with rules for dark themes; otherwise as it was."""
    used = sorted(set(_COLOR.findall(svg)))
    rules = [f'[style*="{name}: {color}"]{{{name}:{to_dark(color)}!important}}' for name, color in used]
    # Text without a colour of its own is black; images have no colours that a rule could name.
    inherited = f"svg{{fill:{PALETTE['#000000']};background:{BACKGROUND}}}image{{filter:invert(1) hue-rotate(180deg)}}"
    style = f"<style>@media (prefers-color-scheme: dark){{{inherited}{''.join(rules)}}}</style>"
    return svg.replace("</svg>", f"{style}</svg>")
