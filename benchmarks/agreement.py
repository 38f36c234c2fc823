"""Bounds, evidence and predictions of four libraries at the same parameters.

    make agreement                                # all libraries, each in its own environment
    python benchmarks/agreement.py                # write the cases, and the rows of winnowgp
    python benchmarks/agreement.py --summary      # print the results as Markdown

Zero-mean GPs with an ARD RBF kernel and Gaussian noise, 100 rows with two inputs and 20 test rows.
The peers (`peers/*_agreement.py`) evaluate the same cases. Rows of the library "80 digits" are
computed with mpmath from the formulas, without jitter; where inducing points are repeated, each
counts once. They tell which library is right where two of them differ.
"""

from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from numpy.typing import NDArray

import winnowgp
from measure import RESULTS, Row, grouped, markdown, new_results, read_results
from peers.agreement_rows import Case, Quantities, read_cases, rows_of
from winnowgp import SparseGP
from winnowgp.data import Dataset
from winnowgp.models import VariationalGP

CASES = Path(__file__).parents[1] / "reproduced" / "agreement.npz"
OURS, REFERENCE = "winnowgp", "80 digits"
QUANTITIES = (
    "collapsed bound",
    "upper bound",
    "uncollapsed bound",
    "exact evidence",
    "collapsed mean",
    "collapsed variance",
    "uncollapsed mean",
    "uncollapsed variance",
)
LARGE = 1e-3
"""Relative differences above this are printed in bold type."""

Values = NDArray[Any]


def case(
    *,
    M: int = 20,
    copies: int = 1,
    lengthscale: float = 0.3,
    variance: float = 1.0,
    noise: float = 0.1,
    N: int = 100,
) -> Case:
    """Return a smooth function with noise, and a q(u) near the optimal one.

    Inputs are in [−1, 1]², and test rows in [−1.5, 1.5]². The target is in units of the kernel's
    standard deviation.
    """
    rng = np.random.default_rng(0)
    X, X_test = rng.uniform(-1, 1, (N, 2)), rng.uniform(-1.5, 1.5, (20, 2))
    f = np.sqrt(variance) * np.sin(3 * X[:, 0]) * np.cos(2 * X[:, 1])
    y = f + np.sqrt(noise) * rng.normal(size=N)
    Z = np.tile(X[: M // copies], (copies, 1))
    lengthscales = lengthscale * np.array([1.0, 1.5])

    def covariance(A: Values, B: Values) -> Values:
        return variance * np.exp(-0.5 * (((A[:, None] - B) / lengthscales) ** 2).sum(-1))

    L = np.linalg.cholesky(covariance(Z, Z) + 1e-10 * variance * np.eye(len(Z)))
    V = np.linalg.solve(L, covariance(Z, X))
    S = np.linalg.inv(np.eye(len(Z)) + V @ V.T / noise)
    return Case(
        X=X,
        y=y,
        Z=Z,
        X_test=X_test,
        lengthscales=lengthscales,
        variance=np.array(variance),
        noise=np.array(noise),
        q_mean=0.9 * S @ V @ y / noise,
        q_factor=1.1 * np.linalg.cholesky(S),
    )


def cases() -> dict[str, Case]:
    """Return the cases by name: an easy one, and what makes factorisations difficult."""
    return {
        "easy": case(),
        "all rows as points": case(M=100),
        "points repeated": case(copies=2),
        "long lengthscales": case(lengthscale=5.0, M=40),
        "little noise": case(noise=1e-5, M=60),
        "small units": case(variance=1e-4, noise=1e-5),
        "large units": case(variance=1e6, noise=1e4),
    }


def write_cases(path: Path) -> None:
    """Write the file that every library reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}/{key}": a for name, c in cases().items() for key, a in asdict(c).items()}
    np.savez(path, **arrays)


def our_quantities(case: Case) -> Quantities:
    """Return the quantities of winnowgp's models."""
    X, Z, X_test, q_mean, q_factor = map(
        torch.from_numpy, (case.X, case.Z, case.X_test, case.q_mean, case.q_factor)
    )
    data = Dataset.of(X, torch.from_numpy(case.y))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=X.shape[1])).to(X)
    kernel.outputscale = torch.from_numpy(case.variance)
    kernel.base_kernel.lengthscale = torch.from_numpy(case.lengthscales)
    collapsed = SparseGP(kernel, Z, noise=float(case.noise))
    explicit = VariationalGP(kernel, Z, likelihood=collapsed.likelihood, mean=ZeroMean())
    explicit.q_mean.data.copy_(q_mean[:, None])
    explicit.q_factor.data.copy_(q_factor[None])

    def predicted(model: SparseGP | VariationalGP, moment: str) -> Values:
        return getattr(model.posterior(data).predict(X_test), moment).detach().numpy()

    return {
        "collapsed bound": lambda: collapsed.bound(data).item(),
        "upper bound": lambda: collapsed.upper_bound(data),
        "uncollapsed bound": lambda: explicit.bound(data).item(),
        "exact evidence": lambda: collapsed.evidence(data).lower,
        "collapsed mean": lambda: predicted(collapsed, "mean"),
        "collapsed variance": lambda: predicted(collapsed, "variance"),
        "uncollapsed mean": lambda: predicted(explicit, "mean"),
        "uncollapsed variance": lambda: predicted(explicit, "variance"),
    }


def _cholesky(A: Values, scale: Any) -> Values:
    """Return the lower factor of a semi-definite matrix; a pivot of zero has a column of zeros."""
    L = np.full(A.shape, mpmath.mpf(0), dtype=object)
    for j in range(len(A)):
        column = A[j:, j] - L[j:, :j] @ L[j, :j] if j else A[:, 0]
        if column[0] > mpmath.mpf(10) ** -60 * scale:
            L[j:, j] = column / mpmath.sqrt(column[0])
    return L


def _solve(L: Values, A: Values) -> Values:
    """Return L⁻¹ A; zero in the rows in which L has a pivot of zero."""
    result = np.full(A.shape, mpmath.mpf(0), dtype=object)
    for i in range(len(L)):
        if L[i, i] != 0:
            result[i] = (A[i] - L[i, :i] @ result[:i] if i else A[i]) / L[i, i]
    return result


def reference_values(case: Case) -> dict[str, Any]:
    """Return all quantities with 80 digits from their formulas, without jitter."""
    with mpmath.workdps(80):
        exact = np.vectorize(mpmath.mpf, otypes=[object])
        exponential, log = np.vectorize(mpmath.exp, otypes=[object]), mpmath.log
        X, Z, X_test, y = (exact(a) for a in (case.X, case.Z, case.X_test, case.y))
        m, F, lengthscales = exact(case.q_mean), exact(case.q_factor), exact(case.lengthscales)
        variance, noise, N = mpmath.mpf(float(case.variance)), mpmath.mpf(float(case.noise)), len(y)

        def covariance(A: Values, B: Values) -> Values:
            squares = (((A[:, None] - B[None]) / lengthscales) ** 2).sum(-1)
            return variance * exponential(-squares / 2)

        def log_det(L: Values) -> Any:
            return 2 * sum(log(pivot) for pivot in L.diagonal())

        L = _cholesky(covariance(Z, Z), variance)
        V, V_test = _solve(L, covariance(Z, X)), _solve(L, covariance(Z, X_test))
        C, d, eye = V @ V.T, V @ y, exact(np.eye(len(Z)))

        def factors(noise: Any) -> tuple[Values, Values, Any]:
            LB = _cholesky(eye + C / noise, 1)
            c = _solve(LB, d) / noise
            return LB, c, y @ y / noise - c @ c

        def unexplained(V: Values) -> Values:
            return variance - (V**2).sum(0)

        LB, c, fit = factors(noise)
        trace = unexplained(V).sum()
        constant = N * log(2 * mpmath.pi)
        narrow = constant + N * log(noise) + log_det(LB)
        G = _solve(LB, V_test)
        residuals = (y - V.T @ m) ** 2 + unexplained(V) + ((F.T @ V) ** 2).sum(0)
        kl = (F**2).sum() + m @ m - len(m) - 2 * sum(log(pivot) for pivot in F.diagonal())
        K = _cholesky(covariance(X, X) + noise * exact(np.eye(N)), variance)
        values = {
            "collapsed bound": -(narrow + fit + trace / noise) / 2,
            "upper bound": -(narrow + factors(noise + trace)[2]) / 2,
            "uncollapsed bound": -(constant + N * log(noise) + residuals.sum() / noise + kl) / 2,
            "exact evidence": -(constant + log_det(K) + (_solve(K, y) ** 2).sum()) / 2,
            "collapsed mean": G.T @ c,
            "collapsed variance": unexplained(V_test) + (G**2).sum(0),
            "uncollapsed mean": V_test.T @ m,
            "uncollapsed variance": unexplained(V_test) + ((F.T @ V_test) ** 2).sum(0),
        }
        return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


def evaluate(path: Path) -> None:
    """Evaluate all cases with winnowgp, in both types, and with 80 digits."""
    runs = new_results("agreement/winnowgp")
    for dtype in ("float64", "float32"):
        common = {"library": OURS, "version": winnowgp.__version__, "dtype": dtype, "variant": ""}
        for name, content in read_cases(path, dtype):
            for row in rows_of(name, our_quantities(content)):
                runs.add(common | row)
    runs = new_results("agreement/reference")
    common = {"library": REFERENCE, "version": mpmath.__version__, "dtype": "mpf", "variant": ""}
    for name, content in read_cases(path):
        for quantity, value in reference_values(content).items():
            runs.add(common | {"case": name, "quantity": quantity, "value": value.tolist()})


def relative_difference(quantity: str, value: Any, expected: Any) -> float:
    """Return |value − expected| relative to |expected|; NaN unless all values are finite.

    Means are compared by their largest difference, relative to the largest expected mean, and
    variances by the largest relative difference of a row.
    """
    a, b = np.ravel(value), np.ravel(expected)
    scale = np.abs(b).max() if quantity.endswith("mean") else np.abs(b)
    return float((np.abs(a - b) / scale).max()) if np.isfinite(a).all() else float("nan")


def cell(row: Row | None, expected: Row) -> str:
    """Return a cell of a table: the relative difference, bold if it is large, or what failed."""
    if row is None:
        return "–"
    if "error" in row:
        return "**fails**"
    difference = relative_difference(row["quantity"], row["value"], expected["value"])
    if not isfinite(difference):
        return "**not finite**"
    text = f"{difference:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"**{text}**" if difference > LARGE else text


def _by_key(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    keys = ("library", "dtype", "variant", "case", "quantity")
    return {key: own[-1] for key, own in grouped(rows, *keys).items()}


def float64_table(rows: list[Row]) -> str:
    """Return relative differences to winnowgp in float64, and those of winnowgp to 80 digits."""
    by_key = _by_key(rows)
    versions = {row["library"]: row["version"] for row in rows if row["dtype"] == "float64"}
    lines = []
    for name in dict.fromkeys(row["case"] for row in rows):
        first = name
        # winnowgp first, in the table of each case.
        for library in sorted(versions, key=lambda library: (library != OURS, library)):
            cells = [
                cell(
                    by_key.get((library, "float64", "", name, quantity)),
                    by_key[(*_expected(library), name, quantity)],
                )
                for quantity in QUANTITIES
            ]
            against = f", against {REFERENCE}" if library == OURS else ""
            lines.append([first, f"{library} {versions[library]}{against}", *cells])
            first = ""
    return markdown(["case", "library", *(f">{quantity}" for quantity in QUANTITIES)], lines)


def variant_table(rows: list[Row]) -> str:
    """Return the largest relative difference to winnowgp over the quantities, by variant.

    Quantities whose difference is large in some case have a line of their own.
    """
    by_key = _by_key(rows)
    names = list(dict.fromkeys(row["case"] for row in rows))
    variants = sorted({(r["library"], r["version"], r["variant"]) for r in rows if r["variant"]})
    lines = []
    for library, version, variant in variants:
        cells = {
            quantity: [
                cell(
                    by_key.get((library, "float64", variant, name, quantity)),
                    by_key[(*_expected(library), name, quantity)],
                )
                for name in names
            ]
            for quantity in QUANTITIES
        }
        large = [q for q, own in cells.items() if any(text.startswith("**") for text in own)]
        others = [own for quantity, own in cells.items() if quantity not in large]
        label = [f"{library} {version}", variant]
        if others:
            largest = [max(texts, key=_size) for texts in zip(*others, strict=True)]
            lines.append([*label, "the others" if large else "all", *largest])
        lines += [[*label, quantity, *cells[quantity]] for quantity in large]
    header = ["library", "variant", "quantities", *(f">{name}" for name in names)]
    return markdown(header, lines)


def _size(text: str) -> float:
    """Return the number in a cell; negative without one."""
    return -1.0 if text == "–" else float(text)


def _expected(library: str) -> tuple[str, str, str]:
    """Return the library, dtype and variant that a library is compared with in float64."""
    return (REFERENCE, "mpf", "") if library == OURS else (OURS, "float64", "")


def float32_table(rows: list[Row]) -> str:
    """Return how far variances in float32 are from 80 digits."""
    by_key = _by_key(rows)
    libraries = sorted({(r["library"], r["version"]) for r in rows if r["dtype"] == "float32"})
    names = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        [quantity, f"{library} {version}"]
        + [
            cell(
                by_key.get((library, "float32", "", name, quantity)),
                by_key[REFERENCE, "mpf", "", name, quantity],
            )
            for name in names
        ]
        for quantity in ("collapsed variance", "uncollapsed variance")
        for library, version in libraries
    ]
    return markdown(["float32", "library", *(f">{name}" for name in names)], lines)


def main() -> None:
    """Parse the command line."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=Path, default=CASES, help="file that is written")
    parser.add_argument("--summary", action="store_true", help="print the results and run nothing")
    arguments = parser.parse_args()
    if arguments.summary:
        rows = read_results("agreement/*")
        print("\n\n".join(table(rows) for table in (float64_table, variant_table, float32_table)))
        return
    torch.set_num_threads(1)
    write_cases(arguments.cases)
    evaluate(arguments.cases)
    print(f"{arguments.cases} has the cases, {RESULTS / 'agreement'} the results of {OURS}.")


if __name__ == "__main__":
    main()
