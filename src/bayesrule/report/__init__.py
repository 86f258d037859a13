"""The HTML report of a run: one file, without scripts, that needs no network.

It is made from a `Run` alone (see `bayesrule.runs.run`), so a report can be made again from a saved run without
fitting anything. `page` puts the sections together, `svg` and `charts` draw, `markup` escapes.
"""
