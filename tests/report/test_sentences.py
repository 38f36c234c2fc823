"""Sentences about the selection of inducing points."""

from typing import Any

import pytest

from winnowgp.report.sentences import evidence_sentence, growth_sentence, kernel_sentence


def choice(lower: float, upper: float, method: str) -> Any:
    """Return the entries that the sentence reads."""
    return {"kl": (lower, upper), "evidence_method": method, "rows": 200}


def test_evidence_sentence_distinguishes_exact_and_bounded() -> None:
    exact = evidence_sentence(choice(3.2, 3.2, "exact"))
    assert exact == (
        "exact, ELBO is 0.0160 nats per observation below (KL[q ‖ posterior] = 3.2 nats)"
    )
    bounded = evidence_sentence(choice(1.0, 5.0, "conjugate-gradient"))
    assert bounded.startswith("between 0.0050 and 0.0250 nats per observation above the ELBO")
    assert "between 1 and 5 nats" in bounded


@pytest.mark.parametrize(
    ("limit", "gain", "expected"),
    [
        (None, 0.0, "more candidates gain less than the tolerance"),
        ("work", 0.21, "still pay: the last doubling gained 0.21 nats per observation"),
        ("memory", 1e-5, "may still pay"),
        ("max_points", 0.3, "twice as many inducing points would gain at least 0.3 nats"),
        ("work", float("nan"), "an unknown number of nats"),
    ],
)
def test_growth_sentence_names_limit_and_gain(
    limit: str | None, gain: float, expected: str
) -> None:
    sentence = growth_sentence(limit, gain)
    assert expected in sentence
    assert (f"(limit: {limit})" in sentence) == (limit is not None)


def test_kernel_sentence_ranks_kernels_and_omits_failures() -> None:
    sentence = kernel_sentence("rbf", {"matern52": -0.5, "rbf": 0.0, "matern32": None})
    assert sentence.endswith("relative to the best: rbf 0, matern52 -0.5")
    assert kernel_sentence("periodic", {}) == "periodic"
