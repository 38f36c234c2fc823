"""Programs of posteriors: latent functions, processes and their mixtures, observations."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from gpytorch import likelihoods, means
from torch import Tensor

from winnowgp.io.program import Program, add_kernel, not_exportable
from winnowgp.linalg import solve_lower
from winnowgp.models import MultiOutputPosterior, Posterior
from winnowgp.models.classes import SOFTMAX_DENSITY_NODES
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
)
from winnowgp.models.likelihoods import is_plain
from winnowgp.models.multi_output_posterior import ProcessMixture
from winnowgp.models.observations import DENSITY_NODES, target_noise
from winnowgp.models.quadrature import normal_nodes
from winnowgp.models.target_likelihoods import TargetLikelihoods


def add_latents(program: Program, posterior: Posterior, X: str) -> tuple[str, str]:
    """Add the mean `[N P]` and variance `[N P or 1]` of the latent functions; return their names.

        mean = m(x) + k L⁻ᵀ m,   variance = κ − ‖k L⁻ᵀ‖² + ‖k L⁻ᵀ F‖²

    L⁻¹ is a constant; its rounding error is at most ten times that of a triangular solve.
    """
    k, prior = add_kernel(program, posterior.kernel, X, posterior.Z)
    eye = torch.eye(posterior.M, dtype=posterior.L.dtype)
    inverse = solve_lower(posterior.L, eye)
    residual = program.apply("MatMul", k, program.tensor(posterior.weights))
    mean = program.apply("Sub", residual, _negative_mean(program, posterior.mean, X))
    V = program.apply("MatMul", k, program.tensor(inverse.mT))
    explained = program.apply("RowSum", program.apply("Mul", V, V))
    conditional = program.apply("Sub", prior, explained)
    spreads = []
    for factor in posterior.q_factor:
        FV = program.apply("MatMul", V, program.tensor(factor))
        spreads.append(program.apply("RowSum", program.apply("Mul", FV, FV)))
    spread = program.apply("Concat", *spreads) if len(spreads) > 1 else spreads[0]
    variance = program.apply(
        "Max", program.apply("Add", conditional, spread), program.constant(0.0)
    )
    return mean, variance


def add_processes(program: Program, posterior: MultiOutputPosterior, X: str) -> tuple[str, str]:
    """Add the mean and variance `[N P]` of mixtures of several processes; return their names.

    With V_q = k_q L_q⁻ᵀ and E_q = V_q F_q, F_q the rows of F that belong to process q,

        mean_p = c_p + Σ_q W_pq V_q m_q
        variance_p = Σ_q W_pq² (κ_q − ‖V_q‖²) + Σ_qs W_pq W_ps ⟨E_q, E_s⟩.
    """
    W, sizes = posterior.mixing, list(posterior.sizes)
    means, factors = posterior.q_mean.split(sizes), posterior.q_factor.split(sizes)
    # [N 1] zeros: the number of rows is not known here.
    zero = program.apply("MatMul", X, program.tensor(torch.zeros(posterior.Z.shape[1], 1)))
    mean = program.apply("Add", zero, program.tensor(posterior.offset[None]))
    features, weights = [], []
    spreads: dict[int, str] = {}
    for q, (kernel, Z, L) in enumerate(
        zip(posterior.kernels, posterior.inducing_points, posterior.factors, strict=True)
    ):
        k, prior = add_kernel(program, kernel, X, Z if len(Z) else torch.zeros(1, Z.shape[1]).to(Z))
        if not len(Z):
            features.append(program.apply("Add", zero, prior))
            weights.append(W[:, q].square())
            continue
        V = program.apply("MatMul", k, program.tensor(solve_lower(L, torch.eye(len(L)).to(L)).mT))
        mean = program.apply(
            "Add",
            mean,
            program.apply("MatMul", V, program.tensor(torch.outer(means[q], W[:, q]))),
        )
        explained = program.apply("RowSum", program.apply("Mul", V, V))
        left = program.apply("Sub", program.apply("Add", zero, prior), explained)
        features.append(program.apply("Max", left, program.constant(0.0)))
        weights.append(W[:, q].square())
        spreads[q] = program.apply("MatMul", V, program.tensor(factors[q]))
        for s in spreads:
            features.append(program.apply("RowSum", program.apply("Mul", spreads[q], spreads[s])))
            weights.append((1 if s == q else 2) * W[:, q] * W[:, s])
    total = program.apply(
        "MatMul", program.apply("Concat", *features), program.tensor(torch.stack(weights))
    )
    return mean, program.apply("Max", total, program.constant(0.0))


def add_targets(
    program: Program, likelihood: TargetLikelihoods, mean: str, variance: str
) -> tuple[str, str]:
    """Add means and variances of observations, each target with a likelihood of its own."""
    columns = []
    for p, part in enumerate(likelihood.parts):
        pick = program.constant(np.eye(len(likelihood.parts))[:, p : p + 1])
        own = program.apply("MatMul", mean, pick), program.apply("MatMul", variance, pick)
        m, v = add_observation(program, part, *own)
        if v is None:
            # Probabilities of two classes: p and p (1 − p) of the second.
            m = program.apply("MatMul", m, program.constant([[0.0], [1.0]]))
            v = program.apply("Sub", m, program.apply("Mul", m, m))
        columns.append((m, v))
    if len(columns) == 1:
        return columns[0]
    means, variances = zip(*columns, strict=True)
    return program.apply("Concat", *means), program.apply("Concat", *variances)


def add_observation(
    program: Program, likelihood: Any, mean: str, variance: str
) -> tuple[str, str | None]:
    """Add mean and variance of a new observation, or probabilities of classes and None."""
    if is_plain(likelihood, likelihoods.GaussianLikelihood):
        return mean, program.plus(variance, likelihood.noise)
    if is_plain(likelihood, likelihoods.LaplaceLikelihood):
        return mean, program.plus(variance, 2 * likelihood.noise)
    if is_plain(likelihood, likelihoods.StudentTLikelihood):
        nu = likelihood.deg_free
        return mean, program.plus(variance, likelihood.noise * nu / (nu - 2))
    if is_plain(likelihood, likelihoods.BernoulliLikelihood):
        scale = program.apply("Sqrt", program.plus(variance, torch.ones(1)))
        second = program.apply("Ndtr", program.apply("Div", mean, scale))
        first = program.apply("Sub", program.constant(1.0), second)
        return program.apply("Concat", first, second), None
    if is_plain(likelihood, likelihoods.SoftmaxLikelihood):
        return _softmax(program, likelihood, mean, variance), None
    counts = (likelihoods.PoissonLikelihood, likelihoods.NegativeBinomialLikelihood)
    if is_plain(likelihood, *counts):
        return _counts(program, likelihood, mean, variance)
    if is_plain(likelihood, likelihoods.BetaLikelihood):
        return _proportions(program, likelihood, mean, variance)
    raise not_exportable(likelihood)


def _softmax(program: Program, likelihood: Any, mean: str, variance: str) -> str:
    """Add the mean of softmax over the quadrature nodes of `predict`, `[N C]`."""
    nodes = normal_nodes(SOFTMAX_DENSITY_NODES, likelihood.num_features)
    spread = program.apply("Sqrt", variance)
    # [N 1 F] and [T F] give [N T F].
    f = program.apply(
        "Add",
        program.apply("Unsqueeze1", mean),
        program.apply("Mul", program.apply("Unsqueeze1", spread), program.tensor(nodes)),
    )
    if likelihood.mixing_weights is not None:
        f = program.apply("MatMul", f, program.tensor(likelihood.mixing_weights.mT))
    return program.apply("Mean1", program.apply("Softmax", f))


def _counts(program: Program, likelihood: Any, mean: str, variance: str) -> tuple[str, str]:
    """Add the moments of counts with mean c · softplus(f) and variance d times that, of one target.

    Poisson counts have c = d = 1; negative binomial ones d = 1 / (1 − p), and c = 1 or p / (1 − p).
    """
    factor = dispersion = 1.0
    if is_plain(likelihood, likelihoods.NegativeBinomialLikelihood):
        p = float(likelihood.probs.clamp(1e-6, 1 - 1e-6))
        dispersion = 1 / (1 - p)
        factor = p / (1 - p) if likelihood.num_failures_param else 1.0
    rate, weights = _at_nodes(program, "Softplus", mean, variance)
    rate = program.apply("Mul", rate, program.constant(np.full((1, DENSITY_NODES), factor)))
    own = program.apply("Mul", rate, program.constant(np.full((1, DENSITY_NODES), dispersion)))
    return _mixed_moments(program, rate, own, weights)


def _proportions(program: Program, likelihood: Any, mean: str, variance: str) -> tuple[str, str]:
    """Add the moments of Beta(s σ(f) + 1, s (1 − σ(f)) + 1) of one target.

    The mean is μ = (s σ(f) + 1) / (s + 2), and the variance μ (1 − μ) / (s + 3).
    """
    scale = float(likelihood.scale)
    share, weights = _at_nodes(program, "Sigmoid", mean, variance)
    row = np.ones((1, DENSITY_NODES))
    slope, level = (program.constant(v / (scale + 2) * row) for v in (scale, 1.0))
    centre = program.apply("Add", program.apply("Mul", share, slope), level)
    rest = program.apply("Sub", program.constant(row), centre)
    own = program.apply("Mul", centre, rest)
    own = program.apply("Mul", own, program.constant(row / (scale + 3)))
    return _mixed_moments(program, centre, own, weights)


def _at_nodes(program: Program, op: str, mean: str, variance: str) -> tuple[str, str]:
    """Add a function of f at Gauss–Hermite nodes `[N T]`; return it and their weights."""
    locations, weights = np.polynomial.hermite.hermgauss(DENSITY_NODES)
    spread = program.apply("Sqrt", program.apply("Mul", variance, program.constant(2.0)))
    f = program.apply("Add", mean, program.apply("Mul", spread, program.constant(locations[None])))
    return program.apply(op, f), program.constant((weights / weights.sum())[:, None])


def _mixed_moments(program: Program, mean: str, variance: str, weights: str) -> tuple[str, str]:
    """Add mean and variance of a mixture of distributions in columns."""
    centre = program.apply("MatMul", mean, weights)
    deviation = program.apply("Sub", mean, centre)
    square = program.apply("Add", variance, program.apply("Mul", deviation, deviation))
    return centre, program.apply("MatMul", square, weights)


def _negative_mean(program: Program, mean: Any, X: str) -> str:
    if isinstance(mean, means.ZeroMean):
        return program.constant(0.0)
    if isinstance(mean, means.ConstantMean):
        level: Any = mean.constant
        return program.tensor(-level.reshape(1))
    if isinstance(mean, means.LinearMean):
        weights: Any = mean.weights
        slope = program.apply("MatMul", X, program.tensor(-weights.reshape(-1, 1)))
        return slope if mean.bias is None else program.plus(slope, -mean.bias)
    raise not_exportable(mean)


def add_fidelities(program: Program, posterior: FidelityModel, X: str) -> tuple[str, str]:
    """Add mean and variance `[N 1]` of an observation of each row at its fidelity.

    They are NaN where the fidelity is none of the levels.
    """
    D = len(_others(posterior)) + 1
    eye = torch.eye(D, dtype=posterior.levels.dtype)
    column = program.apply(
        "MatMul", X, program.tensor(eye[:, posterior.column : posterior.column + 1])
    )
    inputs = program.apply("MatMul", X, program.tensor(eye[:, _others(posterior)]))
    if isinstance(posterior, NonlinearFidelityPosterior):
        mean, variance = _chain(program, posterior, inputs)
    else:
        assert isinstance(posterior, FidelityPosterior)
        mean, variance = _members(program, posterior, inputs)
    indicator = program.apply("Indicator", column, program.tensor(posterior.levels[None]))
    return (
        program.apply("RowSum", program.apply("Mul", mean, indicator)),
        program.apply("RowSum", program.apply("Mul", variance, indicator)),
    )


def _others(posterior: FidelityModel) -> list[int]:
    """Return the columns of the inputs other than the fidelity."""
    D = posterior.Z.shape[1] + 1
    return [d for d in range(D) if d != posterior.column]


def _members(program: Program, posterior: FidelityPosterior, X: str) -> tuple[str, str]:
    """Add the moments of all fidelities `[N F]`, mixed over the members of a linear relation."""
    function = posterior.function
    members = function.members if isinstance(function, ProcessMixture) else [function]
    each = []
    for member in members:
        mean, variance = add_processes(program, member, X)
        each.append((mean, program.plus(variance, target_noise(member.likelihood))))
    return add_mixture(program, each, posterior.component_weights.tolist())


def _chain(program: Program, posterior: NonlinearFidelityPosterior, X: str) -> tuple[str, str]:
    """Add the moments of all fidelities `[N F]` of a nonlinear relation.

    Columns of the intermediate values `[N S]` are the S values that are followed upwards.
    """
    uniform, d = posterior.uniform, posterior.Z.shape[1]
    S, F = len(uniform), len(posterior.functions)
    weights = program.constant(np.full((S, 1), 1 / S))
    lower: list[str] = []
    means, variances = [], []
    for t, function in enumerate(posterior.functions):
        below = function.mode.inducing_points[0].shape[1] - d
        member = function.member_of(uniform[:, t])
        mean = latent = noisy = ""
        for number in member.unique().tolist():
            own = (member == number).nonzero().flatten()
            place = program.tensor(torch.eye(S, dtype=uniform.dtype)[own])
            inputs = _rows_of_draws(program, X, lower[len(lower) - below :], own, d=d, S=S)
            one = function.members[number]
            m, v = add_processes(program, one, inputs)
            y = program.plus(v, target_noise(one.likelihood))
            # Without a lower fidelity the rows of all draws are equal.
            width = len(own) if below else 1
            if not below:
                place = program.tensor(torch.eye(S, dtype=uniform.dtype)[own].sum(0)[None])
            parts = [
                program.apply("MatMul", program.reshape(value, width), place) for value in (m, v, y)
            ]
            mean, latent, noisy = (
                program.apply("Add", total, part) if total else part
                for total, part in zip((mean, latent, noisy), parts, strict=True)
            )
        centre, spread = _mixed_moments(program, mean, noisy, weights)
        means.append(centre)
        variances.append(spread)
        if t + 1 < F:
            normal = torch.special.ndtri(uniform[:, F + t])
            sd = program.apply("Sqrt", program.apply("Max", latent, program.constant(0.0)))
            step = program.apply("Mul", sd, program.tensor(normal[None]))
            lower.append(program.apply("Add", mean, step))
    mean, variance = (program.apply("Concat", *each) for each in (means, variances))
    scale = posterior.scale.numpy()
    mean = program.plus(program.scaled(mean, scale), posterior.shift)
    return mean, program.scaled(variance, np.square(scale))


def _rows_of_draws(
    program: Program, X: str, lower: list[str], own: Tensor, *, d: int, S: int
) -> str:
    """Add the inputs of some draws, one row for each row and draw; X if nothing is below.

    Args:
        lower: values of the fidelities below, `[N S]` each.
        own: the draws.
    """
    if not lower:
        return X
    pick = program.tensor(torch.eye(S, dtype=torch.float64)[:, own])
    zero = program.constant(np.zeros((1, len(own), d)))
    repeated = program.apply("Add", program.apply("Unsqueeze1", X), zero)
    columns = [program.reshape(program.apply("MatMul", f, pick), 1) for f in lower]
    return program.apply("Concat", program.reshape(repeated, d), *columns)


def add_mixture(
    program: Program, each: Sequence[tuple[str, str | None]], weights: Sequence[float]
) -> tuple[str, str]:
    """Add m = Σ w_s m_s and Σ w_s (v_s + (m_s − m)²), as `mixture_moments`."""
    mean = _sum(program, [one for one, _ in each], weights)
    spreads = []
    for one, variance in each:
        assert variance is not None
        offset = program.apply("Sub", one, mean)
        spreads.append(program.apply("Add", variance, program.apply("Mul", offset, offset)))
    return mean, _sum(program, spreads, weights)


def _sum(program: Program, terms: Sequence[str], weights: Sequence[float]) -> str:
    """Add Σ w_s t_s."""
    weighted = [
        program.apply("Mul", term, program.constant(weight))
        for term, weight in zip(terms, weights, strict=True)
    ]
    return reduce(partial(program.apply, "Add"), weighted)
