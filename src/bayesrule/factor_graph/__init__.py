"""Models of several unknowns: named blocks, factors of their log-joint, and messages by differentiation.

A `Model` is an objective for the rule: a product of `Factor`s over blocks of exponential families. A factor computes
E_q log f from views of its blocks (`block_view`), and the message to a block is the derivative in the view's
displacement. `expected_log` has the equations of the ready-made factors; `sites` keeps every message by itself, and
`leave_one_out` removes one.
"""
