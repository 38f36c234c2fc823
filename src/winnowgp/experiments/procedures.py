"""What the two ways of choosing points are called, wherever both are shown."""

PROCEDURE_NAMES = {"paper": "the paper's procedure", "fast": "the fast schedule"}
