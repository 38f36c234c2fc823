"""From arrays to tensors."""

import numpy as np
import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.estimators.validation import tensor


def test_numbers_are_copied_whatever_their_type_and_strides() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1]
    found = tensor(values)
    assert found.dtype == torch.float64
    assert found.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert tensor(np.array(["3", "4.5"])).tolist() == [3, 4.5]


def test_words_are_no_targets() -> None:
    with pytest.raises(InputError, match=r"`y` must be numbers; got 'many'\. Use a classifier"):
        tensor(np.array(["3", "many"]))
