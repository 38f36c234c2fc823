"""The determinantal point process: inclusion with repulsion between similar candidates."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli, PointProcess, poisson_binomial
from winnowgp.point_processes.priors import CardinalityPrior
from winnowgp.typing import Masks, Nats, Scalar, SizeTable


@final
@dataclass(frozen=True, slots=True)
class Determinantal(PointProcess):
    """An L-ensemble q(Z) = det(A_ZZ) / det(I + A) with quality and diversity.

        A = diag(e^{a/2}) (I + V Vᵀ) diag(e^{a/2})

    The logits a_k make a candidate likely, and candidates with similar features v_k exclude each
    other: inclusions are never positively correlated (Kulesza and Taskar 2012). With V = 0
    candidates are independent with inclusion probabilities σ(a), the process `Bernoulli(a)`.

    With R features per candidate all quantities are found from R by R matrices, in O(K R²):

        log q(Z) = Σ_{k∈Z} a_k + log|I + V_Zᵀ V_Z| − Σ_k log(1 + e^{a_k}) − log|I + Vᵀ diag(σ(a)) V|

    and the marginal kernel I − (I + A)⁻¹ is a diagonal plus a matrix of rank R.

    >>> V = torch.tensor([[2.0], [2.0], [0.0]], dtype=torch.float64)
    >>> q = Determinantal(torch.zeros(3, dtype=torch.float64), V)
    >>> bool(q.pairwise_inclusion()[0, 1] < q.inclusion[0] * q.inclusion[1])
    True
    """

    logits: Float[Tensor, " K"]
    features: Float[Tensor, "K R"]

    def __post_init__(self) -> None:
        if len(self.features) != len(self.logits):
            raise InputError(
                f"`features` must have one row for each of {len(self.logits)} candidates; got "
                f"{len(self.features)}."
            )

    @classmethod
    def independent(cls, q: Bernoulli) -> "Determinantal":
        """Return an independent process as a determinantal one, without features."""
        return cls(q.logits, q.logits[:, None][:, :0])

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """P(k ∈ Z) = σ(a_k) + σ(a_k) σ(−a_k) v_kᵀ G v_k, G⁻¹ = I + Vᵀ diag(σ(a)) V."""
        U, G = self._marginals()
        return torch.sigmoid(self.logits) + ((U @ G) * U).sum(1)

    def marginal_kernel(self) -> Float[Tensor, "K K"]:
        """Return I − (I + A)⁻¹, whose minors det(·_SS) are the probabilities P(S ⊆ Z); O(K² R)."""
        U, G = self._marginals()
        return torch.diag(torch.sigmoid(self.logits)) + U @ G @ U.mT

    def pairwise_inclusion(self) -> Float[Tensor, "K K"]:
        """Return P(j ∈ Z and k ∈ Z) of every pair, and P(k ∈ Z) on the diagonal; O(K² R)."""
        kernel = self.marginal_kernel()
        inclusion = kernel.diagonal()
        pairs = inclusion[:, None] * inclusion - kernel.square()
        return pairs.diagonal_scatter(inclusion)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Masks:
        """Return `n` independent subsets, exactly; O(K R²) per subset.

        Candidates are decided one after another (Launay, Galerne and Desolneux 2020). Given the
        candidates before, k is included with probability p = σ(a_k) + u_kᵀ G u_k; then
        G ← G − (G u_k)(G u_k)ᵀ/(p − [k ∉ Z]).
        """
        with torch.no_grad():
            U, G = self._marginals()
            alone = torch.sigmoid(self.logits)
            like = {"dtype": G.dtype, "device": G.device}
            uniform = torch.rand((n, self.K), generator=generator, **like)
            G = G.expand(n, -1, -1).clone()
            columns = []
            for k in range(self.K):
                Gu = G @ U[k]  # [n R]
                p = alone[k] + Gu @ U[k]
                included = uniform[:, k] < p
                scale = torch.where(included, p, p - 1)
                G.sub_(Gu[:, :, None] * (Gu / scale[:, None])[:, None, :])
                columns.append(included)
            if not columns:
                return uniform.bool()
            return torch.stack(columns, dim=1)

    def log_prob(self, mask: Masks) -> Nats:
        """Return log q(Z) of each subset, in nats; O(K R²) per subset."""
        chosen = (self.logits * mask).sum(-1)
        return chosen + self.log_diversity(mask) - self._log_normaliser()

    def log_diversity(self, mask: Masks) -> Nats:
        """Return log|I + V_Zᵀ V_Z| of each subset, zero if its features are orthogonal to zero."""
        return torch.linalg.cholesky(self._gram(mask)).diagonal(dim1=1, dim2=2).log().sum(1) * 2

    def conditional_logits(self, mask: Masks) -> Float[Tensor, "S K"]:
        """Return a_k + log(1 + v_kᵀ C⁻¹ v_k), C = I + V_Iᵀ V_I with I = Z \\ k; O(K R²) each.

        For k inside the quadratic form t with C of the whole subset gives −log(1 − t).
        """
        root = torch.linalg.cholesky(self._gram(mask))
        V = torch.linalg.solve_triangular(root, self.features.mT, upper=False)  # [S R K]
        quadratic = V.square().sum(1)
        inside = -torch.log1p(-torch.where(mask, quadratic, 0.0))
        outside = torch.log1p(torch.where(mask, 0.0, quadratic))
        return self.logits + inside + outside

    def mean_count(self) -> Scalar:
        """Return E|Z| = Σ_k P(k ∈ Z)."""
        return self.inclusion.sum()

    def variance_count(self) -> Scalar:
        """Return Var|Z| = tr(K − K²) with the marginal kernel K; O(K R²)."""
        U, G = self._marginals()
        alone = torch.sigmoid(self.logits)
        cross = ((U @ G) * U).sum(1)
        overlap = U.mT @ U @ G
        square = (alone.square() + 2 * alone * cross).sum() + (overlap * overlap.mT).sum()
        return (alone + cross).sum() - square

    def count_probs(self) -> SizeTable:
        """Return P(|Z| = m) for m = 0..K from the eigenvalues of A; O(K³).

        |Z| is a sum of independent inclusions with odds equal to the eigenvalues.
        """
        root = torch.exp(0.5 * self.logits)[:, None]
        eye = torch.eye(self.K, dtype=root.dtype, device=root.device)
        A = root * (eye + self.features @ self.features.mT) * root.mT
        eigenvalues = torch.linalg.eigvalsh(A)
        return poisson_binomial(eigenvalues.clamp_min(torch.finfo(A.dtype).tiny).log())

    def _gram(self, mask: Masks) -> Float[Tensor, "S R R"]:
        """Return I + V_Zᵀ V_Z of each subset."""
        V = self.features
        eye = torch.eye(V.shape[1], dtype=V.dtype, device=V.device)
        return eye + (mask[:, :, None] * V).mT @ V

    def _marginals(self) -> tuple[Float[Tensor, "K R"], Float[Tensor, "R R"]]:
        """Return U and G of the marginal kernel diag(σ(a)) + U G Uᵀ."""
        V, a = self.features, self.logits
        scale = torch.exp(0.5 * (logsigmoid(a) + logsigmoid(-a)))
        return scale[:, None] * V, torch.cholesky_inverse(torch.linalg.cholesky(self._inner()))

    def _inner(self) -> Float[Tensor, "R R"]:
        """Return I + Vᵀ diag(σ(a)) V."""
        V = self.features
        eye = torch.eye(V.shape[1], dtype=V.dtype, device=V.device)
        return eye + V.mT @ (torch.sigmoid(self.logits)[:, None] * V)

    def _log_normaliser(self) -> Scalar:
        """Return log|I + A|."""
        inner = torch.linalg.cholesky(self._inner()).diagonal().log().sum() * 2
        return softplus(self.logits).sum() + inner


def sampled_kl_divergence(q: Determinantal, p: CardinalityPrior, mask: Masks) -> Nats:
    """Return an unbiased estimate of KL[q(Z) ‖ p(Z)] in nats from each of S draws of q.

        KL = Σ_k a_k P(k ∈ Z) + E log|I + V_Zᵀ V_Z| − log|I + A| − E w(|Z|) − log C

    Only the expected log determinant has no closed form; the other terms are exact. O(K³) for
    priors that need the distribution of the count, O(K R²) otherwise.

    Args:
        q: determinantal process.
        p: prior over as many candidates.
        mask: draws of q, such as `q.sample(S)`.
    """
    if q.K != p.K:
        raise InputError(
            f"`p` must be a prior over the {q.K} candidates of `q`; got one over {p.K}. Build the "
            f"prior with K={q.K}."
        )
    quality = (q.logits * q.inclusion).sum() - q._log_normaliser()
    exact = quality - p.expected_log_weight(q) + p.log_normaliser(q.logits)
    return exact + q.log_diversity(mask)
