"""Which files of this folder are no tests."""

# These make a reference's numbers, and need what made them.
collect_ignore = [
    "reference/make_ivon.py",
    "reference/make_bayespy.py",
    "reference/make_nuts.py",
    "reference/make_dynamax.py",
    "reference/make_posterior_cases.py",
    "saved_files/make.py",
]
