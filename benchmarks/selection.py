"""Selection of inducing points: methods, number of points at a tolerance, quality at equal size.

    python benchmarks/selection.py                      # all parts
    python benchmarks/selection.py estimators --data concrete energy
    python benchmarks/selection.py --report             # print the results

The parts are `estimators` (selection_methods.py), `synthetic` (selection_sizes.py) and `equal-size`
(selection_equal_size.py). Data are read from WINNOWGP_DATA. One thread; compare CPU seconds:
wall-clock time depends on the load of the machine. Results are in benchmarks/results.
"""

import argparse

import torch

import selection_equal_size
import selection_methods
import selection_sizes
from selection_problems import ALPHAS

PARTS = ("estimators", "synthetic", "equal-size")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--seeds", type=int, default=None, help="3 for estimators, 5 otherwise")
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    if "estimators" in parts:
        if not arguments.report:
            selection_methods.run(arguments.data, seeds=arguments.seeds or 3)
        selection_methods.report()
    if "synthetic" in parts:
        if not arguments.report:
            selection_sizes.run(seeds=arguments.seeds or 5)
        selection_sizes.report()
    if "equal-size" in parts:
        if not arguments.report:
            selection_equal_size.run(arguments.data, seeds=arguments.seeds or 5)
        selection_equal_size.report()


if __name__ == "__main__":
    main()
