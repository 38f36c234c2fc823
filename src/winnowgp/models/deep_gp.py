"""Doubly stochastic deep Gaussian processes, and the cost of their predictions."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models.base import SelectableModel
from winnowgp.models.deep_layer import DeepLayer, Propagation, propagated
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.likelihoods import copy_likelihood, observation_model
from winnowgp.selection import SubsetObjective
from winnowgp.typing import Masks, Nats, Scalar


@final
@dataclass(frozen=True, slots=True)
class DeepObjective(SubsetObjective):
    """The bound of any combination of subsets, one per layer.

    A mask concatenates those of all layers, from the first to the last. All S masks use the same ε
    (common random numbers), so that differences of scores have a small variance. Each score is
    unbiased, and all are computed in one batched pass.
    """

    layers: Sequence[DeepLayer]
    X: Float[Tensor, "N D"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """A function from means and variances `[S T N F]` to nats of each row and target."""
    eps: Sequence[Tensor]
    scale: float
    """Number of rows that each row represents."""
    skip_connections: bool

    @property
    def K(self) -> int:
        return sum(layer.K for layer in self.layers)

    def value(self, mask: Masks) -> Nats:
        masks = mask.split([layer.K for layer in self.layers], dim=1)
        points = [layer.subset_points(m) for layer, m in zip(self.layers, masks, strict=True)]
        top = propagated(
            self.layers, points, self.X, eps=self.eps, skip_connections=self.skip_connections
        ).last
        nats = self.expected_log_prob(top.mean, top.variance).sum((-2, -1)).mean(-1)
        for layer_points in points:
            nats = nats - layer_points.kl() / self.scale
        return self.scale * nats


@dataclass(frozen=True, slots=True)
class DeepEvaluation:
    """A bound and the forward pass it was computed from, differentiable."""

    fit: Scalar
    """Expected log-likelihood of all rows, in nats."""
    bound: Scalar
    """The expected log-likelihood less the KL divergence of every layer."""
    passed: Propagation


@final
class DeepGP(SelectableModel[Dataset]):
    """A deep Gaussian process whose layers have candidate inducing points of their own.

        y ~ p(y | f_L(… f_2(f_1(x)))),  q = Π_l q(u_l)

    Inference is doubly stochastic (Salimbeni & Deisenroth 2017): rows are propagated by samples,
    and the bound is estimated without bias from minibatches and a few samples per row.

    Args:
        layers: from the input to the output; copied. `deep_layers` creates them.
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
        """Layers from the input to the output."""
        return [layer for layer in self._layers if isinstance(layer, DeepLayer)]

    @property
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates, one tensor `[K D]` per layer."""
        return tuple(layer.candidates for layer in self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of candidates of each layer."""
        return tuple(layer.K for layer in self.layers)

    def check(self, data: Dataset) -> None:
        """Raise an `InputError` if the model cannot have generated such data."""
        D = self.layers[0].D
        if data.D != D or self.targets != data.P:
            raise InputError(
                f"the model has {D} inputs and {self.targets} target columns and the data have "
                f"{data.D} and {data.P}; make them the same."
            )
        data.require_plain_targets("`DeepGP`")
        observation_model(self.likelihood).check_targets(data.Y)

    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return an unbiased estimate of the lower bound on log p(Y) with all candidates, in nats.

        scale · Σ_i E[log p(y_i | f_i)] − Σ_l KL[q(u_l) ‖ p(u_l)], with scale = total / rows.

        Args:
            total: number of rows that the given ones are a random minibatch of.
            samples: number of samples that are propagated for each row.
        """
        self.check(data)
        return self.evaluated(
            data, total=total, eps=self.base_samples(data.N, samples, generator)
        ).bound

    def evaluated(
        self, data: Dataset, *, total: int | None = None, eps: Sequence[Tensor]
    ) -> "DeepEvaluation":
        """Return the bound for given ε of the hidden layers, and the forward pass.

        The rows are not checked: a check waits for a GPU.
        """
        expected = self._expected(data)
        points = [layer.points() for layer in self.layers]
        passed = propagated(
            self.layers, points, data.X, eps=eps, skip_connections=self.skip_connections
        )
        nats = expected(passed.last.mean, passed.last.variance)
        scale = 1.0 if total is None else total / data.N
        fit = scale * nats.sum((-2, -1)).mean()
        return DeepEvaluation(fit, fit - torch.stack([used.kl() for used in points]).sum(), passed)

    def last_bound(
        self, data: Dataset, inputs: Float[Tensor, "T N D"], *, total: int | None = None
    ) -> Scalar:
        """Return the bound given the inputs of the last layer, without the other layers' KL."""
        last = self.layers[-1]
        points = last.points()
        top = last.marginals(inputs, points)
        nats = self._expected(data)(top.mean, top.variance)
        scale = 1.0 if total is None else total / data.N
        return scale * nats.sum((-2, -1)).mean() - points.kl()

    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
        eps: Sequence[Tensor] | None = None,
    ) -> DeepObjective:
        """Return the bound in nats as a function of the subsets of candidates that layers use.

        Args:
            eps: ε of the hidden layers, instead of drawing them.
        """
        self.check(data)
        return DeepObjective(
            layers=self.layers,
            X=data.X,
            expected_log_prob=self._expected(data),
            eps=self.base_samples(data.N, samples, generator) if eps is None else eps,
            scale=1.0 if total is None else total / data.N,
            skip_connections=self.skip_connections,
        )

    def base_samples(self, N: int, samples: int, generator: torch.Generator | None) -> list[Tensor]:
        """Return standard normal ε for each layer but the last, `[T N H]`."""
        like = self.layers[0].candidates.detach()
        return [
            torch.randn(
                (samples, N, layer.P), generator=generator, dtype=like.dtype, device=like.device
            )
            for layer in self.layers[:-1]
        ]

    def _pruned(self, *masks: Tensor) -> "DeepGP":
        pairs = zip(self.layers, masks, strict=True)
        return self.with_layers([layer.prune(mask) for layer, mask in pairs])

    def with_layers(self, layers: Sequence[DeepLayer]) -> "DeepGP":
        """Return a new model with the same likelihood and other layers."""
        return DeepGP(
            layers,
            likelihood=self.likelihood,
            targets=self.targets,
            skip_connections=self.skip_connections,
        )

    def posterior(self, data: Dataset | None = None, *, samples: int = 64) -> DeepPosterior:
        """Return the predictor. q(u) has been learnt from the data, which are not used.

        Args:
            samples: number of samples that predictions propagate for each row.
        """
        return DeepPosterior(
            self.layers,
            likelihood=self.likelihood,
            skip_connections=self.skip_connections,
            samples=samples,
        )

    def _expected(self, data: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
        observations = observation_model(self.likelihood)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            return data.weighted(observations.expected_log_prob(data.Y, mean, variance))

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


@torch.no_grad()
def estimate_elbo(
    model: DeepGP,
    data: Dataset,
    *,
    generator: torch.Generator,
    samples: int = 4,
    rows: int = 4096,
) -> float:
    """Return the ELBO of a deep GP on all rows, in nats, averaged over samples.

    Args:
        rows: number of rows that are propagated at once.
    """
    expected = 0.0
    for start in range(0, data.N, rows):
        chunk = data.part(slice(start, start + rows))
        eps = model.base_samples(chunk.N, samples, generator)
        expected += model.evaluated(chunk, eps=eps).fit.item()
    return expected - sum(layer.points().kl().item() for layer in model.layers)


def seeded_elbo(model: DeepGP, data: Dataset, generator: torch.Generator, *, seed: int) -> float:
    """Return `estimate_elbo` with common random numbers: equal seeds draw equal samples."""
    seeded = torch.Generator(device=generator.device).manual_seed(seed)
    return estimate_elbo(model, data, generator=seeded)


# Rows that are predicted to measure the time, and predictions.
_TIMED_ROWS, _REPEATS = 200, 7
# Seconds after which a prediction is not repeated.
_LONG = 5.0
# Cost of a multiplication of the products of all outputs, and of an evaluation of the kernel,
# relative to a multiplication of a triangular solve.
_PRODUCT, _EVALUATION = 1 / 16, 10.0


@final
@dataclass(frozen=True, slots=True)
class Allocation:
    """Numbers of inducing points of the layers of a deep GP, what they cost and what they reach."""

    sizes: tuple[int, ...]
    """Number of inducing points of each layer."""
    predict_us: float
    """Microseconds per row that mean and variance take on the CPU (`deep_predict_us`)."""
    elbo: float
    """ELBO after training, in nats."""
    elbo_gap: float
    """Nats per observation below the best model of the fit."""
    log_density: float | None = None
    """Mean log density of held-out rows, in nats per observation, if it was computed."""


def prediction_prices(
    layers: Sequence[DeepLayer], sizes: Sequence[int], *, samples: int
) -> tuple[float, ...]:
    """Return the cost of M² in every layer when a row is predicted, relative to their mean.

    It is the derivative of the layer's part of `prediction_cost` with respect to M², at M points:
    where few points remain, the evaluation of the kernel costs more than the O(M²) products.

    Args:
        sizes: number of inducing points of each layer.
        samples: number of samples propagated for each row.
    """
    costs = [
        inputs * (_quadratic(layer) + _EVALUATION / (2 * M))
        for layer, M, inputs in zip(layers, sizes, _inputs(layers, samples), strict=True)
    ]
    return tuple(cost * len(costs) / sum(costs) for cost in costs)


def prediction_cost(layers: Sequence[DeepLayer], *, samples: int) -> float:
    """Return the cost of the prediction of a row: Σ inputs · (M² (1 + P/16) + 10 M) over layers.

    The unit is a multiplication of a triangular solve, one of which takes each input of a layer to
    its M inducing points. The products of P outputs are one matrix product, which is quicker per
    multiplication than a solve, and an evaluation of the kernel takes as long as ten. The constants
    are fitted to times on a CPU. The first layer has one input per row; the others have `samples`.
    """
    return sum(
        inputs * layer.K * (_quadratic(layer) * layer.K + _EVALUATION)
        for layer, inputs in zip(layers, _inputs(layers, samples), strict=True)
    )


def _quadratic(layer: DeepLayer) -> float:
    return 1 + _PRODUCT * layer.P


def _inputs(layers: Sequence[DeepLayer], samples: int) -> list[int]:
    # Without samples, later layers have one input, the mean.
    return [max(samples, 1) if number else 1 for number in range(len(layers))]


@torch.no_grad()
def deep_predict_us(model: DeepGP, sizes: Sequence[int], *, samples: int) -> float:
    """Return the microseconds per row that mean and variance of 200 rows take on the CPU.

    The time depends on the numbers of inducing points and not on their locations, so that each
    layer has random ones. It is the shortest of seven, or of fewer that take five seconds: other
    processes only make it longer.

    Args:
        sizes: number of inducing points of each layer.
        samples: number of samples propagated for each row.
    """
    generator = torch.Generator().manual_seed(0)
    layers, like = [], model.layers[0].candidates
    for layer, M in zip(model.layers, sizes, strict=True):
        points = torch.randn(M, layer.D, generator=generator, dtype=like.dtype).to(like.device)
        eye = torch.eye(M, dtype=like.dtype, device=like.device)
        zeros = points.new_zeros(M, layer.P)
        layers.append(layer.with_q(points, zeros, eye.repeat(layer.P, 1, 1)))
    posterior = model.with_layers(layers).posterior(samples=samples).cpu()
    X = torch.randn(_TIMED_ROWS, model.layers[0].D, generator=generator, dtype=like.dtype)
    seconds = []
    for _ in range(1 + _REPEATS):
        start = perf_counter()
        posterior.predict(X)
        seconds.append(perf_counter() - start)
        if sum(seconds) > _LONG:
            break
    # The first prediction allocates memory.
    return 1e6 * min(seconds[1:] or seconds) / _TIMED_ROWS
