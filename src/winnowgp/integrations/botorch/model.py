"""Fitted sparse GPs as BoTorch models, for acquisition functions, and functions drawn from them."""

from copy import deepcopy
from typing import Any, final

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import FantasizeMixin, Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.transformed import TransformedPosterior
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Float
from linear_operator import to_linear_operator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.bounds.streaming import matches
from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import SparseGPRegressor
from winnowgp.models import MixturePosterior, Posterior, SparseGP
from winnowgp.models.observations import target_noise
from winnowgp.models.online import OnlineGP
from winnowgp.models.pathwise import PosteriorPaths
from winnowgp.models.posterior import JointPosterior


@final
class SparseGPModel(Model, FantasizeMixin):
    """A fitted sparse GP as a BoTorch `Model`: joint over q rows, batched, and differentiable.

    Inputs and outcomes are in the units of the data; standardisation, which is affine, is undone
    exactly in means and covariances. Outcomes are values of the latent function f: for counts, for
    example, the logarithm of the rate. The model is not trained further; fit again, or see
    `updated`.

    >>> import numpy as np
    >>> X = np.linspace(0, 6, 40)[:, None]
    >>> regressor = SparseGPRegressor("rbf", random_state=0).fit(X, np.sin(X[:, 0]))
    >>> model = SparseGPModel.of(regressor)
    >>> model.posterior(torch.zeros(5, 2, 1, dtype=torch.float64)).mean.shape
    torch.Size([5, 2, 1])

    Args:
        posterior: a posterior such as `SparseGP.posterior(data)` or `fit(...).posterior`.
        inputs: scaler of the inputs; the identity if None.
        targets: scaler of the outcomes; the identity if None.
    """

    x_shift: Tensor
    x_scale: Tensor
    y_shift: Tensor
    y_scale: Tensor

    def __init__(
        self,
        posterior: Posterior | JointPosterior,
        *,
        inputs: Standardiser | None = None,
        targets: Standardiser | None = None,
    ) -> None:
        super().__init__()
        if isinstance(posterior, MixturePosterior):
            raise InputError(
                "`posterior` must be Gaussian; got one that averages over hyper-parameters. Pass "
                "its `mode`, or the regressor to `SparseGPModel.of`."
            )
        if not isinstance(posterior, Posterior | JointPosterior):
            raise InputError(
                f"`posterior` must be a Posterior; got {type(posterior).__name__}. Pass a fitted "
                "regressor to `SparseGPModel.of`, and the `posterior` of a `FitResult`."
            )
        # A copy: `.to()` and `.float()` of this model must not change the regressor.
        joint = (
            JointPosterior(deepcopy(posterior)) if isinstance(posterior, Posterior) else posterior
        )
        q = joint.posterior
        inputs = Standardiser.none(q.Z.new_zeros(1, q.Z.shape[1])) if inputs is None else inputs
        targets = Standardiser.none(q.q_mean.new_zeros(1, q.P)) if targets is None else targets
        self.joint = joint
        self.likelihood = q.likelihood
        for name, scaler in (("x", inputs), ("y", targets)):
            self.register_buffer(f"{name}_shift", scaler.shift.to(q.Z))
            self.register_buffer(f"{name}_scale", scaler.scale.to(q.Z))
        self.eval()

    @classmethod
    def of(cls, regressor: SparseGPRegressor) -> "SparseGPModel":
        """Return the function of a fitted regressor, in the units of its `X` and `y`."""
        if not isinstance(regressor, SparseGPRegressor):
            raise InputError(
                f"`regressor` must be a SparseGPRegressor; got {type(regressor).__name__}. "
                "Pass a posterior to `SparseGPModel(posterior)`."
            )
        check_is_fitted(regressor)
        regressor._refuse_logarithm("BoTorch's Gaussian posteriors")
        return cls(
            regressor._gaussian_posterior("BoTorch's Gaussian posteriors"),
            inputs=regressor._x_scaler,
            targets=regressor._y_scaler.columns,
        )

    @property
    def num_outputs(self) -> int:
        """Number of outcomes."""
        return self.joint.posterior.P

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the observations, such as fantasies, that the model is conditioned on."""
        return self.joint.batch_shape

    # The signatures of BoTorch's two base classes differ; this is that of `Model`.
    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> GPyTorchPosterior | TransformedPosterior:
        """Return the joint distribution of q rows, for each batch; O(M²) per row, for any N.

        Args:
            output_indices: indices of the outcomes; all if None.
            observation_noise: whether to add Gaussian noise, or its variances `[*b q m]`.
            posterior_transform: a BoTorch transform, applied last.
        """
        self._check(X, "X")
        mean, cov = self.joint((X - self.x_shift) / self.x_scale)
        mean = mean * self.y_scale[:, None] + self.y_shift[:, None]
        if not mean.requires_grad:
            # A model without inducing points is constant: optimisers still need its zero gradient.
            mean = mean + 0.0 * X.sum(-1)[..., None, :]
        cov = cov * self.y_scale.square()[:, None, None]
        if observation_noise is not False:
            noise = observation_noise if isinstance(observation_noise, Tensor) else None
            cov = cov + torch.diag_embed(self._noise(noise, X.shape[-2]).mT)
        if output_indices is not None:
            mean, cov = mean[..., output_indices, :], cov[..., output_indices, :, :]
        joint = GPyTorchPosterior(_normal(mean, cov))
        if posterior_transform is None:
            return joint
        # A transform may return any posterior.
        return posterior_transform(posterior=joint, X=X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> "SparseGPModel":
        """Return the model conditioned exactly on further observations; see `JointPosterior`.

        Args:
            X: rows `[*b n d]`.
            Y: observations `[*c n m]`, where c broadcasts with b: rows may have many fantasies.
            kwargs: `noise`, variances `[*c n m]`; the fitted noise by default.
        """
        noise = kwargs.pop("noise", None)
        if kwargs:
            raise InputError(f"`condition_on_observations` accepts `noise` only; got {[*kwargs]}.")
        self._check(X, "X")
        self._check_outcomes(X, Y)
        return SparseGPModel(
            self._own_joint().condition_on(
                self._x_scaler.forward(X),
                self._y_scaler.forward(Y),
                noise=self._noise(noise, X.shape[-2]) / self.y_scale.square(),
            ),
            inputs=self._x_scaler,
            targets=self._y_scaler,
        )

    def updated(
        self, X: Float[Tensor, "n d"], Y: Float[Tensor, "n m"], *, add_points: bool = False
    ) -> "SparseGPModel":
        """Return the model with q(u) updated by more rows; see `Posterior.condition_on`.

        The result is that of fitting all rows together at the same parameters and inducing points.
        It costs O(M² (M + n)) and does not store the rows, so that it can be repeated any number
        of times. Observations far from the inducing points hardly take effect, unless the rows
        become inducing points.

        Args:
            add_points: whether the rows become inducing points: the result is then exactly that of
                `condition_on_observations`, and can be updated again. `partial_fit` of a regressor
                learns hyper-parameters as well, and drops points that are no longer needed.
        """
        if self.joint.X.shape[-2] > 0:
            raise InputError(
                "a model that is conditioned on observations cannot be updated; call `updated` "
                "first, and `condition_on_observations` afterwards."
            )
        self._check(X, "X")
        self._check_outcomes(X, Y)
        data = Dataset.of(self._x_scaler.forward(X), self._y_scaler.forward(Y))
        q = self.joint.posterior
        return SparseGPModel(
            condition_with_points(q, data) if add_points else q.condition_on(data),
            inputs=self._x_scaler,
            targets=self._y_scaler,
        )

    def subset_output(self, idcs: list[int]) -> "SparseGPModel":
        """Return the model of some of the outcomes."""
        q, joint = self.joint.posterior, self.joint
        subset = Posterior(
            q.kernel,
            q.Z,
            mean=q.mean,
            likelihood=_likelihood_of(q.likelihood, idcs),
            q_mean=q.q_mean[:, idcs],
            q_factor=q.q_factor[idcs] if len(q.q_factor) > 1 else q.q_factor,
            L=q.L,
        )
        return SparseGPModel(
            JointPosterior(subset, X=joint.X, Y=joint.Y[..., idcs], noise=joint.noise[..., idcs]),
            inputs=self._x_scaler,
            targets=Standardiser(self.y_shift[idcs], self.y_scale[idcs]),
        )

    def _own_joint(self) -> JointPosterior:
        """Return a copy for another model, so that moving one does not affect the other.

        Buffers are shared, because moving a module replaces them; look-ahead acquisition functions
        therefore copy no matrices.
        """
        q, joint = self.joint.posterior, self.joint
        own = deepcopy(q, {id(tensor): tensor for tensor in q.buffers()})
        return JointPosterior(own, X=joint.X, Y=joint.Y, noise=joint.noise)

    @property
    def _x_scaler(self) -> Standardiser:
        return Standardiser(self.x_shift, self.x_scale)

    @property
    def _y_scaler(self) -> Standardiser:
        return Standardiser(self.y_shift, self.y_scale)

    def _noise(self, noise: Tensor | float | None, rows: int) -> Float[Tensor, "*b n m"]:
        """Return noise variances in the units of the data; those of the fit if `noise` is None."""
        if noise is not None:
            like = self.x_shift
            noise = torch.as_tensor(noise, dtype=like.dtype, device=like.device)
            fits = noise.dim() == 0 or noise.shape[-1] in (1, self.num_outputs)
            fits = fits and (noise.dim() < 2 or noise.shape[-2] in (1, rows))
            if not fits or not bool((noise >= 0).all()):
                raise InputError(
                    f"the noise must be variances of at least 0, [..., {rows}, "
                    f"{self.num_outputs}] or one number; got shape {list(noise.shape)} and a "
                    f"minimum of {noise.min().item()}."
                )
            return noise.expand(*noise.shape[:-2], rows, self.num_outputs)
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                f"{type(self.likelihood).__name__} has no Gaussian noise; leave the noise out, or "
                "pass its variances `[*b n m]`."
            )
        return (self.likelihood.noise * self.y_scale.square()).expand(rows, -1)

    def _check(self, X: Tensor, name: str) -> None:
        D, dtype = self.x_shift.shape[0], self.x_shift.dtype
        if X.dim() < 2 or X.shape[-1] != D or X.dtype != dtype:
            raise InputError(
                f"`{name}` must be [..., q, {D}] of {dtype}, as in training; "
                f"got {list(X.shape)} of {X.dtype}."
            )

    def _check_outcomes(self, X: Tensor, Y: Tensor) -> None:
        if Y.dim() < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise InputError(
                f"`Y` must be [..., {X.shape[-2]}, {self.num_outputs}], a row for each of `X` and "
                f"a column for each outcome; got {list(Y.shape)}."
            )
        if not bool(torch.isfinite(Y).all()):
            raise InputError("`Y` has entries that are NaN or infinite; leave those rows out.")


def _likelihood_of(likelihood: Likelihood, outcomes: list[int]) -> Likelihood:
    """Return the likelihood of some of the outcomes."""
    if not isinstance(likelihood, GaussianLikelihood):
        return likelihood
    if target_noise(likelihood).dim() == 0:
        return likelihood
    own: Any = deepcopy(likelihood.noise_covar)
    own.raw_noise = torch.nn.Parameter(own.raw_noise.detach()[outcomes], requires_grad=False)
    copied = deepcopy(likelihood)
    copied.noise_covar = own
    return copied


def _normal(mean: Float[Tensor, "*b m q"], cov: Float[Tensor, "*b m q q"]) -> MultivariateNormal:
    """Return the distribution of independent outcomes, each joint over q rows."""
    if mean.shape[-2] == 1:
        return MultivariateNormal(mean[..., 0, :], to_linear_operator(cov[..., 0, :, :]))
    each = MultivariateNormal(mean, to_linear_operator(cov))
    return MultitaskMultivariateNormal.from_batch_mvn(each, task_dim=-1)


@final
class SparseGPPath(SamplePath):
    """Functions drawn from a model, in the units of its data.

    They have the shapes of BoTorch's own paths: values `[*sample_shape q]` at rows `[q d]`, with an
    axis of outcomes before the last if there are several. Batch axes of the rows are broadcast with
    those of the sample.

    Args:
        model: the model; it must not be conditioned on observations.
        sample_shape: shape of the sample.
    """

    def __init__(self, model: SparseGPModel, sample_shape: torch.Size) -> None:
        super().__init__()
        if model.joint.X.shape[-2] > 0:
            raise InputError(
                "functions cannot be drawn from a model that is conditioned on observations; use "
                "`updated` instead of `condition_on_observations`, or fit the model again."
            )
        self._model, self._sample_shape = model, sample_shape
        self._paths = PosteriorPaths(model.joint.posterior, sample_shape.numel())

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Do nothing: the model is not an ensemble."""

    def forward(self, X: Float[Tensor, "*b q d"]) -> Tensor:
        """Return the values of the functions at the rows."""
        model, single = self._model, self._model.num_outputs == 1
        if not single and X.dim() > 2 and X.shape[-3] == 1:
            # BoTorch adds an axis for the outcomes.
            X = X[..., 0, :, :]
        rows, axes = (X - model.x_shift) / model.x_scale, len(self._sample_shape)
        if axes == 0:
            values = self._paths(rows[..., None, :, :])[..., 0, :, :]
        elif axes == 1:
            values = self._paths(rows)
        else:
            batch = torch.broadcast_shapes(rows.shape[:-2], self._sample_shape)
            rows = rows.expand(*batch, *rows.shape[-2:]).flatten(-2 - axes, -3)
            values = self._paths(rows).unflatten(-3, self._sample_shape)
        values = values * model.y_scale + model.y_shift
        return values[..., 0] if single else values.mT


@DrawMatheronPaths.register(SparseGPModel)
def _draw_paths(model: SparseGPModel, *, sample_shape: torch.Size, **samplers: Any) -> SparseGPPath:
    """Draw functions; BoTorch's samplers of the prior and of the update are not needed."""
    del samplers
    return SparseGPPath(model, sample_shape)


@torch.no_grad()
def condition_with_points(posterior: Posterior, data: Dataset) -> Posterior:
    """Return q(f) after observing rows with Gaussian noise, with these rows as inducing points.

    The hyper-parameters are held, and the result is the exact conditional of the process q(f), at
    any distance from the earlier points: `Posterior.condition_on` with more points. O((M + N)³).
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, GaussianLikelihood) or len(posterior.q_factor) > 1:
        raise InputError(
            "rows can become inducing points of a posterior with a GaussianLikelihood and one "
            f"covariance for all outputs; this one has a {type(likelihood).__name__} and "
            f"{len(posterior.q_factor)} covariances. Fit the model to all rows instead."
        )
    noise = likelihood.noise.item()
    model = SparseGP(posterior.kernel, posterior.Z, mean=posterior.mean, noise=noise)
    # Bound and number of the earlier rows do not affect q(f).
    online = OnlineGP.of(model, posterior, elbo=0.0, N=1)
    fresh = data.X[matches(posterior.Z, data.X) < 0].unique(dim=0)
    wider = online.with_candidates(torch.cat([posterior.Z, fresh]))
    return wider.posterior(*wider.moments(data))
