"""The printed derivation: every update is a formula, and the formula is what a step computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.rule.describe import update_formulas
from bayesrule.rule.update import measure

BOX = jnp.array([-2.0]), jnp.array([2.0])
RECIPES = {
    "gradient_descent": blr.gradient_descent(0.1),
    "heavy ball": blr.gradient_descent(0.1, momentum=0.9),
    "newton": blr.newton(),
    "newton with momentum": blr.newton(0.5).replace(guard=blr.NoGuard(), steps=blr.Steps(0.5, momentum=0.5)),
    "von": blr.von(),
    "multimodal": blr.multimodal(bounds=BOX),
    "sgd": blr.sgd(0.1),
    "rmsprop": blr.rmsprop(0.1),
    "adam": blr.adam(0.1),
    "adamw": blr.adamw(0.1),
    "vadam": blr.vadam(0.1),
    "sgd with a trace": blr.sgd(0.1, momentum=0.9),
    "nesterov": blr.sgd(0.1, momentum=0.9, nesterov=True),
    "dropout": blr.dropout(0.1),
    "dropout of Adam": blr.ogn(0.1, relative=False).replace(
        family=blr.ogn(0.1).family.dropped(0.9), points=blr.Masks()
    ),
    "ogn": blr.ogn(0.1),
    "oggn": blr.oggn(0.1),
    "vogn": blr.vogn(0.1),
    "vogn, relative=False": blr.vogn(0.1, relative=False),
    "voggn": blr.voggn(0.1),
    "ivon": blr.ivon(0.1),
    "ivon, relative=False": blr.ivon(0.1, relative=False),
    "slang": blr.slang(0.1),
    "straight_through": blr.straight_through(0.1, averaging=0.9),
    "bayesbinn": blr.bayesbinn(0.1),
    "conjugate": blr.conjugate(),
    "laplace": blr.laplace(),
    "vmp": blr.vmp(),
    "ncvmp": blr.ncvmp(),
    "svi": blr.svi(0.5),
    "em": blr.em("theta"),
    "cvi": blr.cvi(0.5),
    "exponential_weights": blr.exponential_weights(0.1),
    "exponential_weights, lazy": blr.exponential_weights(0.1, lazy=True),
    "mirror descent": blr.newton().replace(guard=blr.NoGuard(), steps=blr.Steps(0.1, reverse=True)),
}
# The only words that a formula may have: names of operations, and which index it is for.
WORDS = {"log", "diag", "argmax", "projection", "of", "for", "each", "component", "in", "place", "the", "parameters"}


def test_every_recipe_is_listed():
    recipes = {name for name in blr.recipes.__all__ if name not in ("table", "Row")}
    assert recipes <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_printed_update_is_a_formula(name):
    rule = RECIPES[name]
    formula, *definitions = update_formulas(rule)
    assert formula in str(rule)
    assert all(text in str(rule) for text in definitions)
    statement, _, label = formula.rpartition("  (")
    assert re.fullmatch(r"(eq:|section )[^()]*\)", label) or name == "slang"
    assert "←" in statement
    assert set(re.findall(r"[a-z]{2,}", re.sub(r"\((eq|section)[^()]*\)", "", statement))) <= WORDS
    for symbol in ("û", "v̂", "f_k", "D"):  # what a formula uses is defined beside it
        if symbol in statement and symbol + " ←" not in statement:
            assert any(f"{symbol} =" in text for text in formula.split(",  ") + definitions), symbol


# The formulas of scaled steps, read by a small calculator and compared with what a step does.

TOKENS = re.compile(r"√v̂|√v|√\d[\d.]*|ρ₁|ρ₂|v̂|∇R|û|\d+(?:\.\d+)?(?:e[-+]?\d+)?|[½ρτβδNuvmĝĥst²ᵗ+*/()-]")


def evaluated(expression, values):
    """The value of a formula's right side: juxtaposition is multiplication."""
    code, before = [], ""
    for token in TOKENS.findall(expression.replace("−", "-").replace("ĝ", "ĝ")):
        text = {"½": "0.5", "²": "**2", "ᵗ": "**values['t']"}.get(token, token)
        if token.startswith("√"):
            inner = token[1:]
            text = f"np.sqrt({inner if inner[0].isdigit() else f'values[{inner!r}]'})"
        elif token in values:
            text = f"values[{token!r}]"
        operand = text[0].isalnum() or text[0] == "("
        if operand and before and (before[-1].isalnum() or before[-1] in ")]"):
            code.append("*")
        code.append(text)
        before = text
    return eval("".join(code), {"np": np, "values": values})


X = jnp.array([[1.0, -0.5], [0.3, 2.0], [-1.2, 0.4], [0.8, 0.9]])
Y = jnp.array([0.5, -1.0, 1.5, 0.2])
LOSS = lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2
PRIOR = 0.7
VADAM = blr.adam(0.1, damping="prior", initial_precision=9.0).replace(points=blr.MonteCarlo(2))
PUBLISHED = {"decay": 0.999, "curvature": 1.0}
SCALED = {
    "rmsprop": blr.rmsprop(0.1, damping=0.01),
    "adam": blr.adam(0.1, damping=0.01),
    "vadam": VADAM,
    "ogn": blr.ogn(0.1, **PUBLISHED),
    "ogn without average": blr.ogn(0.1, averaging=0.0, damping=0.2, **PUBLISHED),
    "vogn": blr.vogn(0.1, samples=2, decay=0.999, curvature=0.4, temperature=0.5),
    "vogn with damping": blr.vogn(0.1, samples=2, decay=0.999, curvature=0.4, damping=0.3, relative=False),
    "ivon": blr.ivon(0.1, samples=2, curvature=0.6, decay=0.9, temperature=0.5),
    "a root and a first divisor": blr.ogn(0.1, **PUBLISHED).replace(
        steps=blr.Steps(blr.Rates(0.1, 0.05), scaling=blr.Scaling(0.1, root=True, start=4.0), units="fraction")
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_formula_is_the_arithmetic(name):
    """Three steps of each rule, with a prior, beside the printed formulas."""
    rule = SCALED[name]
    objective = blr.Objective(LOSS, size=4, regularizer=PRIOR)
    state, batch = rule.init(jnp.array([0.5, -0.3]), objective), (X, Y)
    temperature, rates, average = rule.steps.temperature, rule.steps.rates, rule.steps.average
    values = {"N": 4, "δ": PRIOR, "τ": temperature, "ρ₁": rates.mean, "ρ₂": rates.precision / temperature}
    values |= {"β": 0.0 if average is None else average.decay, "u": np.zeros(2), "m": np.asarray(state.q.mean)}
    values["v"] = (temperature * np.asarray(state.q.precision) - PRIOR) / 4
    formula, definitions, _ = update_formulas(rule)
    statements = definitions.split(",  ") + formula.rpartition("  (")[0].split(",  ")
    parts = dict(re.split(r" (?:←|=) ", statement, maxsplit=1) for statement in statements)
    measured = jax.jit(lambda q, key: measure(rule, objective, q, batch, None, key))
    step = jax.jit(lambda state, key: rule.step(objective, state, batch, key))
    for count in range(3):
        key = jax.random.key(count)
        actual = measured(state.q, jax.random.clone(key))
        values |= {"ĝ": np.asarray(actual.gradient) / 4, "ĥ": np.asarray(actual.curvature) / 4, "t": count + 1}
        values["∇R"] = PRIOR * values["m"]
        for symbol in ("u", "û", "v", "v̂", "m"):
            if symbol in parts:
                values[symbol] = evaluated(parts[symbol], values)
        state, _ = step(state, key)
        np.testing.assert_allclose(state.q.mean, values["m"], rtol=2e-5)
        np.testing.assert_allclose(temperature * state.q.precision, 4 * values["v"] + PRIOR, rtol=2e-5)


# What differs.


def test_what_differs_between_two_rules():
    actual = blr.difference(blr.vogn(0.1), blr.ivon(0.1))
    assert actual.pieces == ("curvature", "steps", "guard")
    assert len(actual) == 3
    assert actual
    assert ("curvature", "", "GaussNewton()", "Stein()") in list(actual)
    assert ("steps", "rates.precision.epochs", "1", "5") in list(actual)
    lines = str(actual).splitlines()
    assert lines[0].split() == ["vogn", "ivon"]
    assert len(lines) == 6
    assert repr(actual) == str(actual)


def test_equal_rules_do_not_differ():
    actual = blr.difference(blr.newton(), blr.laplace())
    assert len(actual) == 0
    assert not actual
    assert actual.pieces == ()
    assert str(actual) == "newton and laplace are made of the same pieces."


@pytest.mark.parametrize("first", ["newton", "adam", "vogn", "svi", "multimodal", "dropout"])
def test_a_difference_is_empty_just_where_rules_are_equal(first):
    for other in RECIPES.values():
        assert (len(blr.difference(RECIPES[first], other)) == 0) == (RECIPES[first] == other)


def test_fields_of_one_piece():
    actual = blr.difference(blr.newton(), blr.newton().replace(guard=blr.Backtracking(3, monotone=True)))
    assert list(actual) == [("guard", "halvings", "100", "3")]
    actual = blr.difference(blr.adam(0.1), blr.rmsprop(0.1))
    assert actual.pieces == ("steps",)
    assert ("steps", "scaling.debias", "True", "False") in list(actual)
    assert next((p, a, second) for p, a, _, second in actual if a == "average") == ("steps", "average", "none")
