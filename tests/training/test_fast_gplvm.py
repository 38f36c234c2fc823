import torch

from winnowgp.training.fast_gplvm import maximise_each


def bowls(generator) -> tuple:
    """Concave quadratics bent by a quartic, each with its own summit and scales."""
    summit = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    scale = torch.rand(9, 3, generator=generator, dtype=torch.float64).mul(6).sub(3).exp()

    def problems(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        off = scale[rows] * (x - summit[rows])
        return 5.0 - (off.square() + 0.3 * off.square().square()).sum(1) - off.prod(1)

    return problems, summit


def test_maximise_each_reaches_every_maximum(generator) -> None:
    problems, summit = bowls(generator)
    x, value = maximise_each(problems, torch.zeros(9, 3, dtype=torch.float64))
    torch.testing.assert_close(x, summit, rtol=0, atol=1e-5)
    torch.testing.assert_close(value, torch.full_like(value, 5.0))


def test_maximise_each_problems_are_independent(generator) -> None:
    problems, _ = bowls(generator)
    start = torch.zeros(9, 3, dtype=torch.float64)
    together, _ = maximise_each(problems, start, iterations=7)
    alone, _ = maximise_each(lambda _, x: problems(torch.tensor([4]), x), start[4:5], iterations=7)
    torch.testing.assert_close(alone[0], together[4], rtol=0, atol=1e-12)


def test_maximise_each_failing_problem_stays(generator) -> None:
    def broken(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        value = -x.square().sum(1)
        return value + torch.where(rows == 1, torch.nan, 0.0)

    x, value = maximise_each(broken, torch.ones(3, 2, dtype=torch.float64))
    assert torch.equal(x[1], torch.ones(2, dtype=torch.float64))
    assert value[1] == -torch.inf
    torch.testing.assert_close(x[[0, 2]], torch.zeros(2, 2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_maximise_each_distant_maximum_is_reached() -> None:
    tops = torch.tensor([[3000.0, 10.0], [-0.5, 2000.0]], dtype=torch.float64)

    def nats(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return -0.5 * (x - tops[rows]).square().sum(1)

    x, _ = maximise_each(nats, torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(x, tops, rtol=1e-8, atol=1e-6)
