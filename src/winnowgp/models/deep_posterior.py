"""Predictors of deep models: mixtures of Gaussians over propagated samples."""

from collections.abc import Sequence
from copy import deepcopy
from math import log, sqrt
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.errors import InputError
from winnowgp.models.deep_layer import DeepLayer, LayerPoints, layer_inputs, propagated
from winnowgp.models.likelihoods import observation_model, predicted_quantiles
from winnowgp.models.observations import Prediction
from winnowgp.models.quadrature import normal_nodes


@final
class DeepPosterior(nn.Module):
    """q(f_L(…f_1(x))) as an equal mixture of Gaussians, one for each propagated sample.

    The samples are fixed quasi-random nodes, the same for every row. Predictions are therefore
    smooth in x, reproducible, and independent of the other rows of a call.

    Args:
        layers: layers from the input to the output; copied.
        likelihood: a GPyTorch likelihood; copied.
        skip_connections: whether later layers also receive the observed input.
        samples: number of samples per row; rounded up to an even number, and to four times the
            number of hidden outputs. Zero propagates the means of hidden functions, for those of
            negligible variance.
        factors: Cholesky factors of each layer's K_uu, if they are known, such as those of a saved
            posterior.
    """

    def __init__(
        self,
        layers: Sequence[DeepLayer],
        *,
        likelihood: Likelihood,
        skip_connections: bool,
        samples: int = 64,
        factors: Sequence[Float[Tensor, "_ _"]] | None = None,
    ) -> None:
        super().__init__()
        if samples < 0:
            raise InputError(f"`samples` must be zero or more; got {samples}.")
        self._layers = nn.ModuleList(deepcopy(layer) for layer in layers).requires_grad_(False)
        for layer in self.layers:
            # Once, not in every prediction: with 16,000 inducing points a copy takes a second.
            layer.q_factor.copy_(layer.q_factor.tril())
        self.likelihood = deepcopy(likelihood).requires_grad_(False)
        self.skip_connections = skip_connections
        self.samples = samples
        if factors is None:
            factors = [layer.points().L for layer in self.layers]
        for number, factor in enumerate(factors):
            self.register_buffer(f"_L{number}", factor.detach().clone())

    @property
    def layers(self) -> list[DeepLayer]:
        """Layers from the input to the output."""
        return [layer for layer in self._layers if isinstance(layer, DeepLayer)]

    @property
    def M(self) -> tuple[int, ...]:
        """Number of inducing points of each layer."""
        return tuple(layer.K for layer in self.layers)

    @property
    def P(self) -> int:
        """Number of latent functions of the last layer."""
        return self.layers[-1].P

    @property
    def factors(self) -> list[Tensor]:
        """Cholesky factor of each layer's K_uu, `[M M]`."""
        return [self.get_buffer(f"_L{number}") for number in range(len(self._layers))]

    def with_samples(self, samples: int) -> "DeepPosterior":
        """Return the same posterior with another number of samples per row."""
        return DeepPosterior(
            self.layers,
            likelihood=self.likelihood,
            skip_connections=self.skip_connections,
            samples=samples,
            factors=self.factors,
        )

    def components(self, X: Float[Tensor, "N D"]) -> Prediction:
        """Return the Gaussians of the mixture, `[T N P]`: q(f_L | sample t) of each row."""
        self._check(X)
        layers = self.layers
        widths = [layer.P for layer in layers[:-1]]
        eps: Sequence[Tensor] = []
        if self.samples == 0:
            eps = [X.new_zeros(1, 1, width) for width in widths]
        elif widths:
            nodes = normal_nodes((self.samples + 1) // 2, sum(widths)).to(X)
            eps = nodes[:, None].split(widths, dim=-1)
        return propagated(
            layers, self._points(), X, eps=eps, skip_connections=self.skip_connections
        ).last

    def predict(self, X: Float[Tensor, "N D"], *, observed: bool = False) -> Prediction:
        """Return mean and variance of each row under the mixture.

        Args:
            observed: whether to predict an observation y rather than f_L. Classes have one column
                each, whose mean is a probability.
        """
        components = self.components(X)
        return _mixed(self._observed(components) if observed else components)

    def predict_matched(self, X: Float[Tensor, "N D"], *, observed: bool = False) -> Prediction:
        """Return mean and variance by moment matching: faster than `predict`, and approximate.

        The output of every layer is approximated by independent Gaussians, whose moments in the
        next layer follow from the spherical cubature rule: 2H points at ±√H standard deviations
        along each of the H hidden outputs, exact for cubic functions. Each layer is evaluated 2H
        times instead of `samples` times.
        """
        if self.samples == 0:
            return self.predict(X, observed=observed)
        self._check(X)
        points = self._points()
        output = self.layers[0].marginals(X, points[0])
        for layer, layer_points in zip(self.layers[1:], points[1:], strict=True):
            H = output.mean.shape[-1]
            axes = sqrt(H) * torch.eye(H, dtype=X.dtype, device=X.device)
            nodes = torch.cat([axes, -axes])[:, None]
            hidden = output.mean + output.variance.sqrt() * nodes
            inputs = layer_inputs(hidden, X, skip_connections=self.skip_connections)
            output = _mixed(layer.marginals(inputs, layer_points))
        if observed:
            return observation_model(self.likelihood).predict(output.mean, output.variance)
        return output

    def log_density(self, X: Float[Tensor, "N D"], Y: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Return log p(y) of each row and target under the mixture, in nats."""
        components = self.components(X)
        T = len(components.mean)
        model = observation_model(self.likelihood).for_mixture(T)
        latents = components.mean.flatten(0, 1), components.variance.flatten(0, 1)
        nats = model.log_density(Y.repeat(T, 1), *latents)
        return nats.reshape(T, *Y.shape).logsumexp(0) - log(T)

    def quantiles(
        self, X: Float[Tensor, "N D"], probabilities: Float[Tensor, " Q"], *, observed: bool = True
    ) -> Float[Tensor, "Q N P"]:
        """Return quantiles of the mixture, which invert its distribution function.

        Args:
            probabilities: Q probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of an observation y rather than f_L.
        """
        return predicted_quantiles(
            self.likelihood, self.components(X), probabilities, observed=observed
        )

    def _observed(self, mixture: Prediction) -> Prediction:
        model = observation_model(self.likelihood).for_mixture(len(mixture.mean))
        observed = model.predict(mixture.mean.flatten(0, 1), mixture.variance.flatten(0, 1))
        shape = (*mixture.mean.shape[:2], observed.mean.shape[-1])
        return Prediction(observed.mean.reshape(shape), observed.variance.reshape(shape))

    def _points(self) -> list[LayerPoints]:
        return [
            LayerPoints(
                layer.candidates,
                factor,
                layer.q_mean,
                layer.q_factor,
                torch.ones(layer.K, dtype=torch.bool, device=layer.candidates.device),
            )
            for layer, factor in zip(self.layers, self.factors, strict=True)
        ]

    def _check(self, X: Tensor) -> None:
        D = self.layers[0].D
        if X.dim() != 2 or X.shape[1] != D:
            raise InputError(f"`X` must have {D} columns as in training; got {list(X.shape)}.")


def _mixed(mixture: Prediction) -> Prediction:
    """Return mean and variance of an equal mixture over the first axis: E Var + Var E."""
    mean = mixture.mean.mean(0)
    spread = (mixture.mean - mean).square().mean(0)
    return Prediction(mean, mixture.variance.mean(0) + spread)
