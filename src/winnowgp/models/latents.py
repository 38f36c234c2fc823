"""Where the rows of a table lie in latent space, and how sure we are of it."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds import latent_kl
from winnowgp.errors import InputError
from winnowgp.typing import Scalar


@final
class Latents(nn.Module):
    """q(x_i) = N(μ_i, diag s_i) of N rows in Q dimensions, under a prior N(0, I).

    Args:
        mean: μ, `[N Q]`; copied and learnt.
        variance: s, a number for all or `[N Q]`; learnt by its logarithm.
    """

    def __init__(self, mean: Float[Tensor, "N Q"], *, variance: float | Tensor = 0.1) -> None:
        super().__init__()
        spread = torch.as_tensor(variance, dtype=mean.dtype, device=mean.device).expand(mean.shape)
        if mean.dim() != 2 or not mean.dtype.is_floating_point or not torch.isfinite(mean).all():
            raise InputError(
                "`mean` must be finite floating-point numbers [N Q]; "
                f"got {mean.dtype} of shape {list(mean.shape)}."
            )
        if not bool((spread > 0).all()):
            raise InputError(f"`variance` must be positive; got {spread.min().item()}.")
        self.mean = nn.Parameter(mean.detach().clone())
        self.log_variance = nn.Parameter(spread.detach().log())

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.mean.shape[0]

    @property
    def Q(self) -> int:
        """Number of latent dimensions."""
        return self.mean.shape[1]

    @property
    def variance(self) -> Float[Tensor, "N Q"]:
        """s."""
        return self.log_variance.exp()

    def kl(self, rows: Int[Tensor, " B"] | None = None) -> Scalar:
        """Σ_i KL[q(x_i) ‖ N(0, I)] in nats, of all rows or of some."""
        mean, variance = self.at(rows)
        return latent_kl(mean, variance).sum()

    def at(self, rows: Int[Tensor, " B"] | None) -> tuple[Tensor, Tensor]:
        """Means and variances of some rows; of all if None."""
        if rows is None:
            return self.mean, self.variance
        return self.mean[rows], self.log_variance[rows].exp()

    def sample(
        self, rows: Int[Tensor, " B"] | None = None, *, generator: torch.Generator
    ) -> Float[Tensor, "B Q"]:
        """One draw of each row, differentiable in mean and variance."""
        mean, variance = self.at(rows)
        normal = torch.randn(
            mean.shape, generator=generator, dtype=mean.dtype, device=generator.device
        )
        return mean + variance.sqrt() * normal.to(mean.device)
