"""L-BFGS on functions whose maximum is known, and against dense BFGS."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from winnowgp.errors import TrainingError
from winnowgp.training.lbfgs import Curvature, Objective, Stop, _cubic, _Line, maximise

TIGHT = Stop(gain=1e-13, window=5, iterations=1000)


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def differentiated(f: Callable[[Tensor], Tensor]) -> Objective:
    def objective(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_()
        value = f(x)
        return value.item(), torch.autograd.grad(value, x)[0]

    return objective


def rosenbrock(x: Tensor) -> Tensor:
    """Maximum 0 at (1, 1), along a bent ridge."""
    return -(100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2)


def quadratic(n: int, condition: float) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """−½ (x − c)ᵀ A (x − c), and c."""
    g = torch.Generator().manual_seed(n)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    A = Q @ torch.logspace(0, math.log10(condition), n, dtype=torch.float64).diag() @ Q.mT
    c = torch.randn(n, generator=g, dtype=torch.float64)
    return lambda x: -0.5 * (x - c) @ A @ (x - c), c


@pytest.mark.parametrize("memory", [2, 50])
@pytest.mark.parametrize(("n", "condition"), [(1, 1.0), (8, 1e2), (20, 1e3)])
def test_lbfgs_quadratic_reaches_maximum(n: int, condition: float, memory: int) -> None:
    f, c = quadratic(n, condition)
    found = maximise(differentiated(f), torch.zeros_like(c), stop=TIGHT, memory=memory)
    torch.testing.assert_close(found.x, c, rtol=0, atol=1e-5)
    assert -1e-10 < found.value <= 0
    if memory < n:
        assert found.iterations > memory


def test_lbfgs_rosenbrock_reaches_maximum() -> None:
    found = maximise(differentiated(rosenbrock), vector(-1.2, 1.0), stop=TIGHT)
    torch.testing.assert_close(found.x, vector(1, 1), rtol=0, atol=1e-6)
    # SciPy's needs 35 or so.
    assert found.iterations < 60
    assert found.rejected == 0


@pytest.mark.parametrize("seed", range(10))
def test_lbfgs_rugged_function_never_decreases(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    W = 2 * torch.randn(6, 4, generator=g, dtype=torch.float64)
    start = torch.randn(4, generator=g, dtype=torch.float64)
    objective = differentiated(lambda x: torch.sin(W @ x).sum() - 0.01 * x @ x)
    first = objective(start)
    assert first is not None
    trace = [first[0]]
    found = maximise(objective, start, stop=TIGHT, on_step=lambda _, value: trace.append(value))
    assert all(b >= a for a, b in pairwise(trace))
    assert found.value == trace[-1]
    last = objective(found.x)
    assert last is not None
    assert last[0] == found.value
    assert last[1].norm() < 1e-3


def test_lbfgs_wrong_gradient_returns_start() -> None:
    def wrong(x: Tensor) -> tuple[float, Tensor]:
        return -float(x @ x), 2 * x

    found = maximise(wrong, vector(0.3, -0.2), stop=Stop())
    assert torch.equal(found.x, vector(0.3, -0.2))
    assert found.iterations == 0


def test_lbfgs_start_at_maximum_stays() -> None:
    found = maximise(differentiated(rosenbrock), vector(1.0, 1.0), stop=Stop())
    assert torch.equal(found.x, vector(1, 1))
    assert found.iterations == 0


NAN = math.nan
FAILURES: dict[str, Callable[[Tensor], tuple[float, Tensor] | None]] = {
    "none": lambda x: None,
    "nan value": lambda x: (NAN, x),
    "infinite value": lambda x: (math.inf, x),
    "nan gradient": lambda x: (1e9, x * NAN),
}
failing = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())


@failing
def test_lbfgs_failing_region_is_approached(failure) -> None:
    """The objective rises up to x = 0.5, beyond which it cannot be computed."""
    inside = differentiated(lambda x: x[0] + 0.1 * torch.sin(3 * x[0]))
    found = maximise(
        lambda x: failure(x) if x[0] > 0.5 else inside(x),
        vector(-3.0),
        stop=Stop(gain=1e-9, window=10, iterations=300),
    )
    assert 0.499 < found.x[0].item() <= 0.5
    assert found.rejected > 0


@failing
def test_lbfgs_failing_region_beyond_maximum(failure) -> None:
    """Rosenbrock's function, which cannot be computed below its ridge."""
    inside = differentiated(rosenbrock)
    found = maximise(
        lambda x: failure(x) if x[1] < x[0] ** 2 - 0.2 or x[0] > 1.5 else inside(x),
        vector(-1.2, 2.0),
        stop=TIGHT,
    )
    torch.testing.assert_close(found.x, vector(1, 1), rtol=0, atol=1e-5)


@failing
def test_lbfgs_failure_at_start_raises(failure) -> None:
    with pytest.raises(TrainingError, match="standardise the inputs"):
        maximise(failure, vector(0.0), stop=Stop())


@pytest.mark.parametrize(("gain", "window"), [(1e9, 4), (0.5, 3), (1e-2, 5), (0.3, 1)])
def test_lbfgs_stops_after_small_gains(gain: float, window: int) -> None:
    """With memory for four pairs, too few to predict the gain."""
    start = vector(-1.2, 1.0)
    trace = [rosenbrock(start).item()]
    found = maximise(
        differentiated(rosenbrock),
        start,
        stop=Stop(gain, window, 1000),
        memory=4,
        on_step=lambda _, value: trace.append(value),
    )
    poor = [t for t in range(window, len(trace)) if trace[t] - trace[t - window] < gain]
    assert poor == [found.iterations] == [len(trace) - 1]


@pytest.mark.parametrize("gain", [1e-1, 1e-3, 1e-6])
def test_lbfgs_predicted_gain_stops_only_near_maximum(gain: float) -> None:
    start, told = vector(-1.2, 1.0), []
    found = maximise(
        differentiated(rosenbrock),
        start,
        stop=Stop(gain, 20, 1000),
        on_step=lambda _, value: told.append(value),
    )
    assert -found.value < gain
    assert (
        found.iterations
        < maximise(
            differentiated(rosenbrock), start, stop=Stop(gain, 20, 1000), memory=4
        ).iterations
    )


def test_lbfgs_continued_with_its_curvature_takes_the_same_steps() -> None:
    f, start = differentiated(rosenbrock), vector(-1.2, 1.0)
    whole = maximise(f, start, stop=Stop(1e-13, 50, 20))
    curvature = Curvature()
    part = maximise(f, start, stop=Stop(1e-13, 50, 8), curvature=curvature)
    rest = maximise(f, part.x, stop=Stop(1e-13, 50, 12), curvature=curvature)
    assert (part.iterations, rest.iterations) == (8, 12)
    torch.testing.assert_close(rest.x, whole.x, rtol=1e-9, atol=0)
    without = maximise(f, part.x, stop=Stop(1e-13, 50, 12))
    assert without.value < rest.value


def test_lbfgs_curvature_of_its_pairs_has_the_same_directions() -> None:
    f, start = differentiated(rosenbrock), vector(-1.2, 1.0)
    curvature = Curvature()
    maximise(f, start, stop=Stop(1e-13, 50, 8), curvature=curvature)
    again = Curvature.of(curvature.pairs())
    assert len(again) == len(curvature) == 8
    gradient = vector(0.3, -2.0)
    torch.testing.assert_close(again.direction(gradient), curvature.direction(gradient))
    assert len(Curvature.of(curvature.pairs(), memory=3)) == 3
    assert Curvature().pairs().shape == (0, 2, 0)


@pytest.mark.parametrize(("share", "iterations"), [(0.5, False), (2.0, True)])
def test_lbfgs_known_curvature_stops_below_the_expected_gain(
    share: float, iterations: bool
) -> None:
    """½ gᵀA⁻¹g nats, of which the curvature along n steps knows nearly all."""
    f, c = quadratic(6, 3.0)
    curvature = Curvature()
    maximise(differentiated(f), torch.zeros_like(c), stop=TIGHT, curvature=curvature)
    start = c + 0.1
    gain = -f(start).item()
    found = maximise(
        differentiated(f), start, stop=Stop(1e-13, 5, 9, expected=gain / share), curvature=curvature
    )
    assert (found.iterations > 0) == iterations


def test_lbfgs_recent_gain_is_that_of_four_iterations() -> None:
    f, start = differentiated(rosenbrock), vector(-1.2, 1.0)
    values = [maximise(f, start, stop=Stop(1e-13, 50, n)).value for n in (5, 9)]
    nine = maximise(f, start, stop=Stop(1e-13, 50, 9))
    assert nine.recent_gain == pytest.approx(values[1] - values[0], rel=1e-9)


@pytest.mark.parametrize("iterations", [0, 1, 7])
def test_lbfgs_respects_iteration_limit(iterations: int) -> None:
    told: list[int] = []
    found = maximise(
        differentiated(rosenbrock),
        vector(-1.2, 1.0),
        stop=Stop(0.0, 20, iterations),
        on_step=lambda step, _: told.append(step),
    )
    assert found.iterations == iterations
    assert told == list(range(1, iterations + 1))


def test_lbfgs_empty_vector() -> None:
    found = maximise(lambda x: (3.5, x), vector(), stop=Stop())
    assert (found.value, found.iterations, found.rejected) == (3.5, 0, 0)


@pytest.mark.parametrize("count", [1, 3, 5, 12])
def test_lbfgs_direction_matches_dense_inverse_hessian(
    count: int, generator: torch.Generator
) -> None:
    """Both have the same pairs; with memory for five, the last five of twelve count.

    The first matrix is the diagonal of the BFGS update of a diagonal Hessian, for all twelve.
    """
    n, memory = 7, 5
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    A = A @ A.mT + torch.eye(n)
    S = torch.randn(count, n, generator=generator, dtype=torch.float64)
    gradient = torch.randn(n, generator=generator, dtype=torch.float64)
    pairs = Curvature()
    pairs.hold(memory, torch.device("cpu"))
    for s in S:
        pairs.add(s, A @ s)
    assert len(pairs) == min(count, memory)
    eye = torch.eye(n, dtype=torch.float64)
    H = eye
    for s in S:
        y = A @ s
        B = torch.linalg.inv(H * (s @ y) / (y @ H @ y))
        B = B - torch.outer(B @ s, B @ s) / (s @ B @ s) + torch.outer(y, y) / (s @ y)
        H = torch.linalg.inv(B.diagonal().diag())
    for s in S[-memory:]:
        y = A @ s
        V = eye - torch.outer(y, s) / (s @ y)
        H = V.mT @ H @ V + torch.outer(s, s) / (s @ y)
    torch.testing.assert_close(pairs.direction(gradient), H @ gradient, rtol=1e-9, atol=1e-10)


def test_lbfgs_given_curvature_has_the_memory_and_the_device_of_the_optimisation() -> None:
    curvature = Curvature()
    stop = Stop(1e-13, 50, 8)
    maximise(
        differentiated(rosenbrock), vector(-1.2, 2.0), stop=stop, memory=3, curvature=curvature
    )
    assert len(curvature) == 3
    restored = Curvature()
    restored.hold(3, torch.device("meta"))
    restored.load_state_dict(curvature.state_dict())
    assert {tensor.device.type for tensor in restored.state_dict().values()} == {"meta"}


def test_lbfgs_negative_curvature_is_not_stored() -> None:
    pairs = Curvature()
    pairs.add(vector(1, 0), vector(-1, 0))
    pairs.add(vector(1, 0), vector(0, 1))
    assert len(pairs) == 0
    assert torch.equal(pairs.direction(vector(2, 3)), vector(2, 3))


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e2])
def test_lbfgs_line_search_meets_wolfe_conditions(scale: float) -> None:
    """The weak Wolfe conditions, for directions far too long and far too short."""
    objective = differentiated(lambda x: -((x[0] - 1) ** 4) - torch.cosh(x[1]))
    line = _Line(objective)
    at = line.evaluate(vector(-2.0, 3.0))
    assert at is not None
    direction = scale * at.gradient
    slope = float(direction @ at.gradient)
    point = line.search(at, direction, fresh=False)
    assert point is not None
    step = float((point.x - at.x) @ direction / (direction @ direction))
    assert point.value >= at.value + 1e-4 * step * slope
    assert float(direction @ point.gradient) <= 0.9 * slope


def test_lbfgs_cubic_step_is_maximum_of_cubic() -> None:
    """f(t) = −t³ + 3t + 1 rises up to t = 1."""

    def at(t: float) -> tuple[float, float, float]:
        return t, -(t**3) + 3 * t + 1, -3 * t**2 + 3

    for a, b in ((0.0, 3.0), (-0.5, 0.5), (0.2, 1.1)):
        assert _cubic(at(a), at(b)) == pytest.approx(1.0)
    assert math.isnan(_cubic((0.0, 0.0, 1.0), (1.0, 0.9, 1.0)))
