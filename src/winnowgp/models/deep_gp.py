"""Doubly stochastic deep Gaussian processes."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models.deep_layer import DeepLayer, Propagation, propagated
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.likelihoods import copy_likelihood, observation_model
from winnowgp.selection import SubsetObjective
from winnowgp.typing import Masks, Nats, Scalar

# A deep Gaussian process as a function of the subset that each of its layers uses.


@final
@dataclass(frozen=True, slots=True)
class DeepObjective(SubsetObjective):
    """The bound of any combination of subsets, the candidates of all layers in one row.

    A mask holds those of the first layer, then those of the second, and so on. All S masks meet the
    same ε (common random numbers), so that their scores differ by what the subsets are worth and
    not by luck; each score is unbiased, and all are one batched pass.
    """

    layers: Sequence[DeepLayer]
    X: Float[Tensor, "N D"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """From means and variances `[S T N F]` to nats of each row and target."""
    noise: Sequence[Tensor]
    scale: float
    """Rows that each row stands for."""
    skip_connections: bool

    @property
    def K(self) -> int:
        return sum(layer.K for layer in self.layers)

    def value(self, mask: Masks) -> Nats:
        parts = mask.split([layer.K for layer in self.layers], dim=1)
        pairs = zip(self.layers, parts, strict=True)
        points = [layer.subset_points(part) for layer, part in pairs]
        found = propagated(
            self.layers, points, self.X, noise=self.noise, skip_connections=self.skip_connections
        ).last
        nats = self.expected_log_prob(found.mean, found.variance).sum((-2, -1)).mean(-1)
        for used in points:
            nats = nats - used.kl() / self.scale
        return self.scale * nats


# Deep Gaussian processes: layers of sparse GPs, inferred by propagated samples.


@dataclass(frozen=True, slots=True)
class DeepEvaluation:
    """A bound and the pass through the layers behind it, all differentiable."""

    fit: Scalar
    """Expected log-likelihood of all rows, in nats."""
    bound: Scalar
    """The same less the KL of every layer."""
    passed: Propagation


@final
class DeepGP(nn.Module):
    """Layers of Gaussian processes, each with candidates for inducing points of its own.

        y ~ p(y | f_L(… f_2(f_1(x)))),  q = Π_l q(u_l)

    Doubly stochastic inference (Salimbeni & Deisenroth 2017): each row is propagated by samples, so
    the bound is estimated without bias from minibatches and a few samples a row.

    Args:
        layers: from the input to the output; copied. `deep_layers` makes them.
        likelihood: as for `VariationalGP`; copied.
        targets: number of target columns.
        skip_connections: whether every layer after the first also receives the observed input,
            after the outputs of the previous layer (Duvenaud et al. 2014; the paper's kin8nm
            model).

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> X = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    >>> data = Dataset.of(X, (X[:, 0] > 0).double())
    >>> kernel = ScaleKernel(RBFKernel())
    >>> first = DeepLayer(kernel, X[::4], outputs=1, slope=torch.eye(1), q_scale=1e-3)
    >>> last = DeepLayer(kernel, X[::8], outputs=1)
    >>> model = DeepGP([first, last], likelihood=GaussianLikelihood())
    >>> model.sizes
    (10, 5)
    >>> model.bound(data, samples=8, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([])
    """

    def __init__(
        self,
        layers: Sequence[DeepLayer],
        *,
        likelihood: Likelihood,
        targets: int = 1,
        skip_connections: bool = False,
    ) -> None:
        super().__init__()
        _check(layers, observation_model(likelihood).num_latents(targets), skip_connections)
        self._layers = nn.ModuleList(deepcopy(layer) for layer in layers)
        self.likelihood = copy_likelihood(likelihood).to(layers[0].candidates)
        self.targets = targets
        self.skip_connections = skip_connections

    @property
    def layers(self) -> list[DeepLayer]:
        """From the input to the output."""
        return [layer for layer in self._layers if isinstance(layer, DeepLayer)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of candidates of each layer."""
        return tuple(layer.K for layer in self.layers)

    def check(self, data: Dataset) -> None:
        """An error where the model cannot have produced such data."""
        D = self.layers[0].D
        if data.D != D or self.targets != data.P:
            raise InputError(
                f"the model was made for {D} inputs and {self.targets} target columns and the data "
                f"have {data.D} and {data.P}."
            )
        observation_model(self.likelihood).check_targets(data.Y)

    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Unbiased estimate of the lower bound on log p(Y) with all candidates, in nats.

        scale · Σ_i E[log p(y_i | f_i)] − Σ_l KL[q(u_l) ‖ p(u_l)], with scale = total / rows.

        Args:
            total: if given, the rows are a random part of so many.
            samples: propagated through the layers for each row.
        """
        return self.evaluated(data, total=total, noise=self.noise(data.N, samples, generator)).bound

    def evaluated(
        self, data: Dataset, *, total: int | None = None, noise: Sequence[Tensor]
    ) -> "DeepEvaluation":
        """The bound for given ε of the hidden layers, and all that was computed on the way."""
        expected = self._expected(data)
        points = [layer.points() for layer in self.layers]
        passed = propagated(
            self.layers, points, data.X, noise=noise, skip_connections=self.skip_connections
        )
        nats = expected(passed.last.mean, passed.last.variance)
        scale = 1.0 if total is None else total / data.N
        fit = scale * nats.sum((-2, -1)).mean()
        return DeepEvaluation(fit, fit - torch.stack([used.kl() for used in points]).sum(), passed)

    def last_bound(
        self, data: Dataset, inputs: Float[Tensor, "T N D"], *, total: int | None = None
    ) -> Scalar:
        """What the last layer's q(u) is worth given what the layer sees: the bound less the other
        layers' KL."""
        last = self.layers[-1]
        used = last.points()
        found = last.marginals(inputs, used.over_samples())
        nats = self._expected(data)(found.mean, found.variance)
        scale = 1.0 if total is None else total / data.N
        return scale * nats.sum((-2, -1)).mean() - used.kl()

    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
        noise: Sequence[Tensor] | None = None,
    ) -> DeepObjective:
        """What is the bound, in nats, if each layer uses only a subset of its candidates?

        Args:
            noise: ε of the hidden layers, instead of drawing them.
        """
        return DeepObjective(
            layers=self.layers,
            X=data.X,
            expected_log_prob=self._expected(data),
            noise=self.noise(data.N, samples, generator) if noise is None else noise,
            scale=1.0 if total is None else total / data.N,
            skip_connections=self.skip_connections,
        )

    def noise(self, N: int, samples: int, generator: torch.Generator | None) -> list[Tensor]:
        """ε of each layer but the last, standard normal, `[T N H]`."""
        like = self.layers[0].candidates.detach()
        return [
            torch.randn(
                (samples, N, layer.P), generator=generator, dtype=like.dtype, device=like.device
            )
            for layer in self.layers[:-1]
        ]

    def prune(self, masks: Sequence[Tensor]) -> "DeepGP":
        """A new model with only the candidates that each layer's mask, `[K]`, keeps."""
        pairs = zip(self.layers, masks, strict=True)
        return self.with_layers([layer.prune(mask) for layer, mask in pairs])

    def with_layers(self, layers: Sequence[DeepLayer]) -> "DeepGP":
        """A new model with the same likelihood and other layers."""
        return DeepGP(
            layers,
            likelihood=self.likelihood,
            targets=self.targets,
            skip_connections=self.skip_connections,
        )

    def posterior(self, *, samples: int = 64) -> DeepPosterior:
        """The predictor; the data are in q(u) already."""
        return DeepPosterior(
            self.layers,
            likelihood=self.likelihood,
            skip_connections=self.skip_connections,
            samples=samples,
        )

    def _expected(self, data: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
        self.check(data)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            return data.weighted(
                observation_model(self.likelihood).expected_log_prob(data.Y, mean, variance)
            )

        return expected


def _check(layers: Sequence[DeepLayer], outputs: int, skip_connections: bool) -> None:
    if not layers:
        raise InputError("`layers` must hold at least one layer; got none.")
    D = layers[0].D
    for number, (before, after) in enumerate(pairwise(layers), start=2):
        expected = before.P + D * skip_connections
        if expected != after.D:
            raise InputError(
                f"layer {number} must have {expected} inputs (the {before.P} outputs of the layer "
                f"before{f' and {D} observed inputs' * skip_connections}); it has {after.D}."
            )
    if outputs != layers[-1].P:
        raise InputError(
            f"the last layer must have {outputs} outputs, as many as the likelihood has latent "
            f"functions; it has {layers[-1].P}."
        )
