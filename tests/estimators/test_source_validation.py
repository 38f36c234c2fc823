"""Invalid parameters are refused before the rows of a source are read."""

from typing import Any

import numpy as np
import pytest

from winnowgp import GPLVM, SparseGPClassifier, SparseGPRegressor
from winnowgp.data import ArraySource, Dataset
from winnowgp.errors import InputError

X = np.linspace(0, 6, 30)[:, None]
Y = np.sin(X[:, 0])


class Unread(np.ndarray[Any, Any]):
    """An array of which nobody is to see a row."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError(f"rows {key} were read")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device": "abacus"}, "`device` must be a device"),
        ({"alpha": -1.0}, "`alpha` must be a positive number"),
        ({"kernel": "rbx"}, "`kernel` cannot contain 'rbx'"),
        ({"kernel": "rbf[3]"}, "`kernel`"),
        ({"precision": "half"}, "`precision` must be"),
        ({"schedule": "paper", "alpha": 0.1}, "needs all 30 rows in memory at once"),
        ({"likelihood": "poisson"}, "needs all 30 rows in memory at once"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_invalid_parameter_is_refused_before_rows_are_read(
    words: dict[str, Any], message: str
) -> None:
    source = ArraySource(X.view(Unread), Y)
    with pytest.raises(InputError, match=message):
        SparseGPRegressor(**words).fit(source)
    with pytest.raises(AssertionError, match="were read"):
        SparseGPRegressor().fit(source)


@pytest.mark.filterwarnings("ignore:the latent positions of all rows are 0")
@pytest.mark.usefixtures("quickly")
def test_estimator_without_source_support_refuses_a_source() -> None:
    source = ArraySource(X, Y)
    with pytest.raises(InputError, match="classification needs all 30 rows in memory at once"):
        SparseGPClassifier().fit(source)
    with pytest.raises(
        InputError, match=r"must be a table \[N P\]; got a ArraySource\. GPLVM does not support"
    ):
        GPLVM().fit(source)
    table = np.c_[X, Y, Y * X[:, 0]]
    model = GPLVM(1, schedule="paper", alpha=0.01, epochs=1, n_candidates=3, random_state=0).fit(
        table
    )
    with pytest.raises(
        InputError, match=r"must be a table \[N P\]; got a ArraySource\. GPLVM does not support"
    ):
        model.transform(source)
    model = SparseGPRegressor(max_points=5, random_state=0).fit(source)
    for ask in (model.predict, lambda rows: model.log_density(rows, Y)):
        with pytest.raises(InputError, match=r"got a ArraySource\. Predict its rows in chunks"):
            ask(source)
    # What the message says to do gives the predictions of all rows.
    parts: list[Dataset] = list(source.chunks(7))
    found = np.concatenate([model.predict(rows.X.numpy()) for rows in parts])
    np.testing.assert_allclose(found, model.predict(X), rtol=1e-10)
