"""Running a rule: the loop, its result, checkpoints, predictions, hyper-parameters by the evidence."""
