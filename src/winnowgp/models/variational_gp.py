"""A sparse Gaussian process for any likelihood, with an explicit q(u) and minibatches."""

from collections.abc import Callable
from copy import deepcopy
from math import inf
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds import (
    RowBlocks,
    WhitenedChunks,
    site_moments,
    subset_marginal,
    uncollapsed_bound,
)
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.chunked_bound import chunked_kernel
from winnowgp.models.inducing_model import InducingModel, check_parts
from winnowgp.models.kernel_blocks import covariance, kernel_blocks, prior_mean
from winnowgp.models.observations import check_targets, expected_log_prob, latent_functions, owned
from winnowgp.models.posterior import Posterior
from winnowgp.models.profiled_bound import CLIMBING, SETTLED, WARMING, ProfiledBound, best_q
from winnowgp.models.site_inference import Inferred
from winnowgp.models.uncollapsed_objective import UncollapsedObjective
from winnowgp.selection import SubsetStatistics, subset_statistics
from winnowgp.typing import Mask, Scalar


@final
class VariationalGP(InducingModel):
    """P latent Gaussian processes that share kernel, mean and K candidate inducing points.

    q(u_p) = N(L m_p, L F_p F_pᵀ Lᵀ) with K_uu = L Lᵀ and F_p lower-triangular (Hensman et al.
    2015). m and F are parameters like any other, so all can be learnt at once on minibatches; or
    `with_best_q` finds the best ones at fixed hyper-parameters, by sites (`site_inference`).

    Args:
        kernel: any GPyTorch kernel without batch shape; copied.
        candidates: where inducing points may be, `[K D]`; copied, and learnt unless frozen.
        likelihood: of GPyTorch: Gaussian, Bernoulli, softmax, Poisson, Student-t, Laplace, Beta,
            negative binomial, or your own that is integrated in one dimension; copied.
        targets: number of target columns. Softmax has one, and as many latent functions as classes.
        mean: prior mean of every latent function; copied, a constant to be learnt by default.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from gpytorch.likelihoods import BernoulliLikelihood
    >>> X = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    >>> data = Dataset.of(X, (torch.sin(X[:, 0]) > 0).double())
    >>> model = VariationalGP(ScaleKernel(RBFKernel()), X[::3], likelihood=BernoulliLikelihood())
    >>> better = model.with_best_q(data)
    >>> bool(model.bound(data) < better.bound(data) < 0)
    True
    """

    def __init__(
        self,
        kernel: Kernel,
        candidates: Float[Tensor, "K D"],
        *,
        likelihood: Likelihood,
        targets: int = 1,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        check_parts(kernel, candidates)
        self.kernel = deepcopy(kernel).to(candidates)
        self.mean = deepcopy(ConstantMean() if mean is None else mean).to(candidates)
        self.likelihood = owned(likelihood).to(candidates)
        self.candidates = nn.Parameter(candidates.detach().clone())
        self.targets = targets
        P = latent_functions(likelihood, targets)
        K, like = len(candidates), candidates.detach()
        self.q_mean = nn.Parameter(like.new_zeros(K, P))
        eye = torch.eye(K, dtype=like.dtype, device=like.device)
        self.q_factor = nn.Parameter(eye.repeat(P, 1, 1))

    @property
    def P(self) -> int:
        """Number of latent functions."""
        return self.q_mean.shape[1]

    def check(self, data: Source) -> None:
        """Other target columns than the model was made for, or targets it gives no probability."""
        if self.targets != data.P:
            raise InputError(
                f"the model was made for {self.targets} target columns and the data have {data.P}; "
                "say `targets=` when making it."
            )
        check_targets(self.likelihood, data.in_memory("`VariationalGP`").Y)

    def bound(self, data: Dataset, *, total: int | None = None) -> Scalar:
        """Uncollapsed lower bound on log p(Y) at this q(u), in nats.

        scale · Σ_i E_q[log p(y_i | f_i)] − KL[q(u) ‖ p(u)], with scale = total / rows.
        """
        blocks = kernel_blocks(self.kernel, self.candidates, data.X)
        return uncollapsed_bound(
            blocks.Kuu,
            blocks.Kuf,
            kff=blocks.kff,
            q_mean=self.q_mean,
            q_factor=self.q_factor.tril(),
            expected_log_prob=self._expected(data),
            scale=1.0 if total is None else total / data.N,
        )

    def subset_objective(self, data: Dataset, *, total: int | None = None) -> UncollapsedObjective:
        """The bound of any subset at this q(u): what its marginal q(u_Z) is worth."""
        return UncollapsedObjective(
            blocks=kernel_blocks(self.kernel, self.candidates, data.X),
            q_mean=self.q_mean,
            q_factor=self.q_factor.tril(),
            expected_log_prob=self._expected(data),
            scale=1.0 if total is None else total / data.N,
        )

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """What any subset is worth with the sites of the best q(u) of all candidates; O(P N K²).

        Exact for all candidates and for a Gaussian likelihood; to first order elsewhere, since a
        subset's own best sites differ a little.
        """
        chunks, found = self._inferred(data, gain=CLIMBING)
        moments = site_moments(found.sums, constant=found.constant(), N=data.observations)
        return subset_statistics(chunks.L, *moments)

    def fixed_bound(self, data: Source) -> float:
        """The bound with the best q(u), as a number."""
        return self._inferred(data, gain=SETTLED)[1].bound

    def chunked_bound(self, data: Source, *, tighter: bool = False) -> Callable[[], Scalar]:
        """The same bound as a function of the parameters when it is called."""
        if tighter:
            raise InputError("the tighter bound is for Gaussian noise; use `SparseGP`.")
        self.check(data)
        return self._profiled(data.in_memory("`VariationalGP`"), self.candidates, gain=CLIMBING)

    def chunked_cost(self, data: Source) -> float:
        # Two steps to the best q(u) of two passes each, and the gradient.
        return 12.0 * self.P * data.N * self.K**2

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """The same as if every row were an inducing point; O(P N³)."""
        self.check(data)
        return self._profiled(data, data.X, gain=WARMING)

    def upper_bound(self, data: Source) -> float:
        """Infinite: no upper bound on the evidence is known for all likelihoods."""
        return inf

    @torch.no_grad()
    def with_candidates(self, candidates: Float[Tensor, "J D"]) -> "VariationalGP":
        """A new model with the same parameters; its q(u) is that of the process at the new points.

        q(u') = ∫ p(u' | u) q(u) du, whose whitened factor is [A F, (I − A Aᵀ)^½] with
        A = L'⁻¹ K_u'u L⁻ᵀ.
        """
        L = cholesky(covariance(self.kernel, self.candidates, self.candidates)).L
        L_new = cholesky(covariance(self.kernel, candidates, candidates)).L
        cross = solve_lower(L, covariance(self.kernel, self.candidates, candidates))
        A = solve_lower(L_new, cross.mT)
        eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
        AF = A @ self.q_factor.tril()
        # I + A (F Fᵀ − I) Aᵀ, whose eigenvalues are at least those of q.
        factor = cholesky(AF @ AF.mT + eye - A @ A.mT).L
        return self._copied(candidates, A @ self.q_mean, factor)

    @torch.no_grad()
    def prune(self, mask: Mask) -> "VariationalGP":
        """A new model with only the candidates that `mask` keeps, and the marginal q(u) of them."""
        Kuu = covariance(self.kernel, self.candidates, self.candidates)
        mean, factor = subset_marginal(Kuu, self.q_mean, self.q_factor.tril(), mask=mask[None])
        return self._copied(self.candidates[mask], mean[0], factor[0])

    def with_best_q(self, data: Source) -> "VariationalGP":
        """A new model with the same parameters and the q(u) that maximises the bound."""
        mean, factor = self._inferred(data, gain=SETTLED)[1].sums.posterior()
        # The factor root⁻ᵀ is upper-triangular; parameters are lower-triangular.
        lower = torch.linalg.qr(factor.mT).R.mT
        return self._copied(self.candidates, mean, lower)

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """q(f) of this q(u); the data are in it already."""
        return Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=self.q_mean.detach(),
            q_factor=self.q_factor.detach().tril(),
        )

    def _profiled(self, data: Dataset, Z: Float[Tensor, "M D"], *, gain: float) -> ProfiledBound:
        return ProfiledBound(
            data,
            kernel=self.kernel,
            mean=self.mean,
            likelihood=self.likelihood,
            Z=Z,
            gain=gain,
        )

    @torch.no_grad()
    def _inferred(self, source: Source, *, gain: float) -> tuple[WhitenedChunks, Inferred]:
        self.check(source)
        data = source.in_memory("`VariationalGP`")
        blocks = RowBlocks.of(data, points=self.K)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)
        chunks = WhitenedChunks.for_values(kernel, blocks)
        found = best_q(chunks, data, mean=self.mean, likelihood=self.likelihood, gain=gain)
        return chunks, found

    def _expected(self, data: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
        self.check(data)
        centre = prior_mean(self.mean, data.X)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            nats = expected_log_prob(self.likelihood, data.Y, centre + mean, variance)
            return data.weighted(nats)

        return expected

    def _copied(
        self,
        candidates: Float[Tensor, "J D"],
        q_mean: Float[Tensor, "J P"],
        q_factor: Float[Tensor, "P J J"],
    ) -> "VariationalGP":
        copied = deepcopy(self)
        learnt = self.candidates.requires_grad
        copied.candidates = nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
        copied.q_mean = nn.Parameter(q_mean.detach().contiguous().clone())
        copied.q_factor = nn.Parameter(q_factor.detach().contiguous().clone())
        return copied
