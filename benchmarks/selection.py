"""Is choosing by exact flips worth it? Measures it and prints tables of what was measured.

    python benchmarks/selection.py                      # everything
    python benchmarks/selection.py estimators --data concrete energy
    python benchmarks/selection.py --report             # tables of what the files hold

Data come from the folder that WINNOWGP_DATA names. One thread; compare CPU seconds, for the
wall's clock also counts whatever else the machine is doing. Rows go to benchmarks/results.
"""

import argparse

import torch

import equal_size
import estimators
import synthetic
from problems import ALPHAS

PARTS = ("estimators", "synthetic", "equal-size")


def main() -> None:
    """Words typed by a person to calls of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--seeds", type=int, default=None, help="3 for estimators, 5 otherwise")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    words = parser.parse_args()
    parts = words.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    if "estimators" in parts:
        if not words.report:
            estimators.run(words.data, seeds=words.seeds or 3)
        estimators.report()
    if "synthetic" in parts:
        if not words.report:
            synthetic.run(seeds=words.seeds or 5)
        synthetic.report()
    if "equal-size" in parts:
        if not words.report:
            equal_size.run(words.data, seeds=words.seeds or 5)
        equal_size.report()


if __name__ == "__main__":
    main()
