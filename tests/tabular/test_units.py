"""Units of the rows of an update."""

import numpy as np
import pytest
from numpy.typing import NDArray

from winnowgp.errors import ExtrapolationWarning, InputError
from winnowgp.tabular.updates import check_column_units, check_target_units


def predictions(N: int = 60) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return predictive means and standard deviations."""
    return np.linspace(80, 120, N), np.full(N, 10.0)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_check_target_units_other_scale_is_an_error(factor: float) -> None:
    mean, sd = predictions()
    y = factor * (mean + sd * np.random.default_rng(0).standard_normal(len(mean)))
    with pytest.raises(InputError, match=r"'price' has a median of .* in other units"):
        check_target_units("price", y, mean=mean, sd=sd, noise_sd=5.0, first=(100.0, 20.0))


def test_check_target_units_mostly_equal_values_are_accepted() -> None:
    """More than half of the values are zero: their quartiles have no spread to compare."""
    rng = np.random.default_rng(0)
    y = np.where(rng.random(60) < 0.8, 0.0, rng.exponential(150.0, 60))
    mean, sd = np.full(60, 30.0), np.full(60, 90.0)
    check_target_units("claim", y, mean=mean, sd=sd, noise_sd=80.0, first=(30.0, 90.0))
    with pytest.raises(InputError, match="in other units"):
        check_target_units(
            "claim", 100 * y + 1e5, mean=mean, sd=sd, noise_sd=80.0, first=(30.0, 90.0)
        )


def test_check_target_units_neighbouring_rows_are_accepted() -> None:
    """Rows of a sorted stream are spread less than the uncertain predictions of a new region."""
    y = 0.9 + 0.02 * np.random.default_rng(0).standard_normal(20)
    check_target_units(
        "wave", y, mean=np.zeros(20), sd=np.full(20, 1.4), noise_sd=0.02, first=(0.0, 0.7)
    )


def test_check_column_units_far_outside_is_an_error() -> None:
    check_column_units("area", np.full(3, 300.0), low=20.0, high=120.0)
    with pytest.raises(InputError, match="'area' has a median of 70000"):
        check_column_units("area", np.full(3, 7e4), low=20.0, high=120.0)


@pytest.mark.parametrize(
    ("values", "low", "high", "message"),
    [
        ([1.7, 1.8, 1.6], 145.0, 190.0, "a median of 1.7, and was 145 to 190 in training"),
        ([300.0, 700.0, 800.0], 18.0, 80.0, "a median of 700, and was 18 to 80 in training"),
        ([1.0, 5.0, 5.0], 1.0, 1.0, "a median of 5, and was 1 in all training rows"),
    ],
)
def test_check_column_units_outside_is_warned_of(
    values: list[float], low: float, high: float, message: str
) -> None:
    with pytest.warns(ExtrapolationWarning, match=f"{message}. If it is in other units, convert"):
        check_column_units("x", np.array(values), low=low, high=high)


def test_check_column_units_same_constant_is_accepted() -> None:
    check_column_units("x", np.ones(3), low=1.0, high=1.0)
