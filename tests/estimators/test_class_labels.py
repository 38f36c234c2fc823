"""Labels that cannot be classes are named."""

import numpy as np
import pytest

from winnowgp.errors import InputError
from winnowgp.estimators.classification import ClassLabels


def test_labels_of_two_types_are_refused() -> None:
    labels = np.array(["a", 1, "b", 2.5], dtype=object)
    with pytest.raises(InputError, match=r"`y` must have labels of one type; got str and int.*'a'"):
        ClassLabels.of(labels)


def test_words_in_an_array_of_objects_are_classes() -> None:
    found, index = ClassLabels.of(np.array(["b", "a", "b"], dtype=object))
    assert found.classes.tolist() == ["a", "b"]
    assert index.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("label", "words"), [(1, "1"), ("yes", "'yes'"), (True, "True")])
def test_the_only_class_is_shown_as_its_user_wrote_it(label: object, words: str) -> None:
    with pytest.raises(InputError, match=f"got one class only, {words}\\."):
        ClassLabels.of(np.array([label, label]))
