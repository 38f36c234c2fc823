"""Cases and result rows of `benchmarks/agreement.py`, for the peers that are compared there.

`cases.npz` has the arrays `CASE/X`, `y`, `Z`, `X_test`, `lengthscales`, `variance`, `noise`,
`q_mean` and `q_factor`. A peer evaluates quantities of a zero-mean GP with an ARD RBF kernel and
writes one JSON row for each: a number, a list with one entry per test row, or an `error`.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

SMALL_JITTER = "relative jitter 1e-12"
"""The variant in which a jitter of 1e-12 times the kernel's variance is added, as in winnowgp."""
Quantities = dict[str, Callable[[], object]]


def use_one_cpu_thread() -> None:
    """Set the environment that libraries read when they are imported."""
    threads = ("OMP", "OPENBLAS")
    for variable in (*(f"{name}_NUM_THREADS" for name in threads), "TF_NUM_INTRAOP_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


@dataclass(frozen=True, slots=True)
class Case:
    """Data and parameters, all in one floating-point type.

    q(u) is N(L m, L F Fᵀ Lᵀ) with K_uu = L Lᵀ, and F is lower-triangular.
    """

    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    X_test: np.ndarray
    lengthscales: np.ndarray
    variance: np.ndarray
    noise: np.ndarray
    q_mean: np.ndarray
    q_factor: np.ndarray

    @property
    def small_jitter(self) -> float:
        """The jitter of the variant `SMALL_JITTER`."""
        return 1e-12 * float(self.variance)


FIELDS = tuple(field.name for field in fields(Case))


def read_cases(path: Path, dtype: str = "float64") -> Iterator[tuple[str, Case]]:
    """Yield the name and the content of each case."""
    with np.load(path) as arrays:
        for name in dict.fromkeys(key.split("/")[0] for key in arrays):
            content = {key: arrays[f"{name}/{key}"].astype(dtype) for key in FIELDS}
            yield name, Case(**content)


def rows_of(name: str, quantities: Quantities) -> Iterator[dict]:
    """Evaluate the quantities of a case; one that raises an exception gives a row with `error`."""
    for quantity, evaluate in quantities.items():
        row = {"case": name, "quantity": quantity}
        try:
            values = np.asarray(evaluate(), dtype=np.float64)
        except Exception as failure:
            lines = str(failure).splitlines() or [""]
            yield row | {"error": f"{type(failure).__name__}: {lines[0]}"}
        else:
            yield row | {"value": values.item() if values.ndim == 0 else values.ravel().tolist()}


def main(
    library: str,
    version: str,
    quantities: Callable[[Case, str, str], Quantities],
    *,
    variant: str = SMALL_JITTER,
) -> None:
    """Evaluate all cases with the library's own settings, and with a variant of them.

    Args:
        library: its name.
        version: its version.
        quantities: a function of case, dtype and variant ("" for the library's own settings).
        variant: the variant that is evaluated in float64.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path, help="JSON lines; overwritten")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    arguments = parser.parse_args()
    common = {"library": library, "version": version, "dtype": arguments.dtype}
    variants = ("", variant) if arguments.dtype == "float64" else ("",)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w") as file:
        for name, case in read_cases(arguments.cases, arguments.dtype):
            for settings in variants:
                for row in rows_of(name, quantities(case, arguments.dtype, settings)):
                    file.write(json.dumps(common | {"variant": settings} | row) + "\n")
                    file.flush()
