"""Formulas as MathML: the site needs no script to show them, and they can be read without a network.

`pymdownx.arithmatex` finds `$…$` and `$$…$$` in pages and docstrings; this hook replaces what it leaves by MathML.
Docstrings are written to be read in a terminal too, with λ, ∇ and ← as characters. latex2mathml takes characters that
it does not know for identifiers, so that operators among them are corrected here.
"""

from __future__ import annotations

import re
from html import escape, unescape

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_OPERATORS = "←→⇒↦−∓±×·∘⊙⊗∈∉≈≤≥≠∝∇∂∑∏∼∣|⟨⟩‖…∞"
_FENCES = "⟨⟩‖|"
_NUMBERS = "½¼¾"
_NAMED = re.compile(r"\\(arg|diag|tr|Var|Cov|KL)(?![A-Za-z])")
_POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))


def to_mathml(latex: str, *, block: bool = False) -> str:
    """A formula as MathML; ValueError names a command that is not known.

    >>> to_mathml("ρ ← ½").partition(">")[2]
    '<mrow><mi>ρ</mi><mo>←</mo><mn>½</mn></mrow></math>'
    """
    prepared = _NAMED.sub(r"\\mathrm{\1}", latex)
    prepared = re.sub(
        f"[{''.join(_POWERS)}]+", lambda match: "^{" + "".join(map(_POWERS.get, match[0])) + "}", prepared
    )
    made = convert(prepared, display="block" if block else "inline")
    made = re.sub(r"<mi>(.)</mi>", _correct, made)
    unknown = re.search(r"\\\w+", re.sub(r"&#x0005C;", r"\\", made))
    if unknown:
        raise ValueError(f"{unknown[0]} in the formula {latex!r} is not known to latex2mathml.")
    return made


def _correct(match: re.Match[str]) -> str:
    character = match[1]
    if character in _FENCES:
        return f'<mo stretchy="false">{character}</mo>'
    if character in _OPERATORS:
        return f"<mo>{character}</mo>"
    if character in _NUMBERS:
        return f"<mn>{character}</mn>"
    return match[0]


def _replace(match: re.Match[str]) -> str:
    block = match["kind"] == "["
    latex = unescape(match["latex"]).strip()
    formula = to_mathml(latex, block=block)
    if not block:
        return f'<span class="formula">{formula}</span>'
    return f'<div class="formula" tabindex="0" aria-label="{escape(latex)}">{formula}</div>'


def on_page_content(html: str, **_: object) -> str:
    """Replace every formula of a page."""
    return _FORMULA.sub(_replace, html)
