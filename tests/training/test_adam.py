import pytest
import torch

from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.training import Adam


def test_it_climbs_and_reports_each_step() -> None:
    x = torch.zeros(2, requires_grad=True)
    told: list[tuple[int, float]] = []
    Adam(300).maximise(
        lambda: -((x - 1) ** 2).sum(),
        [([x], 0.05)],
        scale=1.0,
        on_step=lambda step, value: told.append((step, value)),
    )
    torch.testing.assert_close(x.detach(), torch.ones(2), atol=1e-2, rtol=0)
    assert [step for step, _ in told] == list(range(1, 301))
    assert told[0][1] == pytest.approx(-2.0)


@pytest.mark.parametrize("failure", ["raise", "nan"])
def test_a_step_that_fails_is_taken_back(failure: str) -> None:
    """Beyond x = 0.5 the objective cannot be computed; the climb stops short of it, unharmed."""
    x = torch.zeros((), requires_grad=True)

    def objective() -> torch.Tensor:
        if x > 0.5:
            if failure == "raise":
                raise NotPositiveDefiniteError("beyond")
            return x * float("nan")
        return x * 1.0

    Adam(60).maximise(objective, [([x], 0.2)], scale=1.0, on_step=lambda *_: None)
    assert 0.3 < x.item() < 0.6
    assert torch.isfinite(x)


def test_an_objective_that_never_works_is_an_error_and_not_a_loop() -> None:
    x = torch.zeros((), requires_grad=True)
    with pytest.raises(TrainingError, match="standardise"):
        Adam(5).maximise(lambda: x * float("nan"), [([x], 0.1)], scale=1.0, on_step=lambda *_: None)
