"""Models of tables as objects."""

import numpy as np
import pytest

from helpers.short_fits import short_fits
from winnowgp import fit_table


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
def test_repr_is_one_line_without_the_summary() -> None:
    x = np.linspace(0, 6, 24)
    table = {"x": x, "side": ["left", "right"] * 12, "y": np.sin(x)}
    with short_fits():
        model = fit_table(table, "y", kernel="rbf", hyper="point", test_size=0)
    assert repr(model) == (
        "TabularModel(target='y', columns=['x', 'side'], "
        "estimator=SparseGPRegressor(hyper='point', kernel='rbf', random_state=0))"
    )
