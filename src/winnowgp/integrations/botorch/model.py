"""A fitted model behind BoTorch's acquisition functions."""

from copy import deepcopy
from typing import Any, final

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import FantasizeMixin, Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.transformed import TransformedPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from linear_operator import to_linear_operator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import SparseGPRegressor
from winnowgp.models import JointPosterior, Posterior


@final
class SparseGPModel(Model, FantasizeMixin):
    """A fitted model as BoTorch wants it: joint over q rows, in batches, differentiable in them.

    Inputs and outcomes are in the user's units; standardising, which is affine, is undone exactly
    in means and covariances. Outcomes are those of the function f: with counts, for example, the
    logarithm of the rate. Nothing is trained here: fit again, or see `updated`.

    >>> import numpy as np
    >>> X = np.linspace(0, 6, 40)[:, None]
    >>> model = SparseGPModel.of(SparseGPRegressor(random_state=0).fit(X, np.sin(X[:, 0])))
    >>> model.posterior(torch.zeros(5, 2, 1, dtype=torch.float64)).mean.shape
    torch.Size([5, 2, 1])

    Args:
        posterior: such as `SparseGP.posterior(data)` or `fit(...).posterior`.
        inputs: units of the inputs; if not given, those that the posterior was fitted in.
        targets: units of the outcomes; likewise.
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
        # A copy: `.to()` and `.float()` of this model must not move the regressor's.
        process = (
            JointPosterior(deepcopy(posterior)) if isinstance(posterior, Posterior) else posterior
        )
        q = process.posterior
        inputs = Standardiser.none(q.Z.new_zeros(1, q.Z.shape[1])) if inputs is None else inputs
        targets = Standardiser.none(q.q_mean.new_zeros(1, q.P)) if targets is None else targets
        self.process = process
        self.likelihood = q.likelihood
        for name, units in (("x", inputs), ("y", targets)):
            self.register_buffer(f"{name}_shift", units.shift.to(q.Z))
            self.register_buffer(f"{name}_scale", units.scale.to(q.Z))
        self.eval()

    @classmethod
    def of(cls, regressor: SparseGPRegressor) -> "SparseGPModel":
        """A fitted regressor's function, in the units of its `X` and `y`."""
        if not isinstance(regressor, SparseGPRegressor):
            raise InputError(
                f"`regressor` must be a SparseGPRegressor; got {type(regressor).__name__}. "
                "A posterior of a model goes to `SparseGPModel(posterior)`."
            )
        check_is_fitted(regressor)
        return cls(
            regressor.posterior_, inputs=regressor._x_scaler, targets=regressor._y_scaler.columns
        )

    @property
    def num_outputs(self) -> int:
        """Number of outcomes."""
        return self.process.posterior.P

    @property
    def batch_shape(self) -> torch.Size:
        """Of the fantasies or other alternatives that the model was conditioned on, if any."""
        return self.process.batch_shape

    # The signatures of BoTorch's two parents differ; this is `Model`'s.
    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> GPyTorchPosterior | TransformedPosterior:
        """The joint distribution of q rows, for each batch; O(M²) a row, whatever N was.

        Args:
            output_indices: which outcomes; all if not given.
            observation_noise: whether Gaussian noise is added, or its variances `[*b q m]`.
            posterior_transform: of BoTorch's, applied last.
        """
        self._check(X, "X")
        mean, cov = self.process((X - self.x_shift) / self.x_scale)
        mean = mean * self.y_scale[:, None] + self.y_shift[:, None]
        cov = cov * self.y_scale.square()[:, None, None]
        if observation_noise is not False:
            given = observation_noise if isinstance(observation_noise, Tensor) else None
            cov = cov + torch.diag_embed(self._noise(given, X.shape[-2]).mT)
        if output_indices is not None:
            mean, cov = mean[..., output_indices, :], cov[..., output_indices, :, :]
        found = GPyTorchPosterior(_normal(mean, cov))
        if posterior_transform is None:
            return found
        # Whatever a transform of the user's makes of it.
        return posterior_transform(posterior=found, X=X)  # pyright: ignore[reportReturnType]

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> "SparseGPModel":
        """The exact conditional of q(f) given further observations; see `JointPosterior`.

        Args:
            X: `[*b n d]`.
            Y: `[*c n m]`, where c broadcasts with b: one b of rows may have many fantasies.
            kwargs: `noise`, variances `[*c n m]`; the fitted noise if not given.
        """
        noise = kwargs.pop("noise", None)
        if kwargs:
            raise InputError(f"`condition_on_observations` takes `noise` alone; got {[*kwargs]}.")
        self._check(X, "X")
        self._check_outcomes(X, Y)
        return SparseGPModel(
            self._own_process().condition_on(
                self._x_scaler.forward(X),
                self._y_scaler.forward(Y),
                noise=self._noise(noise, X.shape[-2]) / self.y_scale.square(),
            ),
            inputs=self._x_scaler,
            targets=self._y_scaler,
        )

    def updated(self, X: Float[Tensor, "n d"], Y: Float[Tensor, "n m"]) -> "SparseGPModel":
        """The model that has seen more rows through the same inducing points, for good.

        What fitting all rows together would give at the same parameters, without the old rows; see
        `Posterior.condition_on`. It costs O(M² (M + n)) and forgets the rows, so that it may go on for
        ever, but values where inducing points are far are hardly believed:
        `condition_on_observations` is for those.
        """
        if self.process.X.shape[-2] > 0:
            raise InputError("update the model first, then condition it on observations.")
        self._check(X, "X")
        self._check_outcomes(X, Y)
        data = Dataset.of(self._x_scaler.forward(X), self._y_scaler.forward(Y))
        return SparseGPModel(
            self.process.posterior.condition_on(data),
            inputs=self._x_scaler,
            targets=self._y_scaler,
        )

    def subset_output(self, idcs: list[int]) -> "SparseGPModel":
        """The model of some of the outcomes."""
        q, process = self.process.posterior, self.process
        kept = Posterior(
            q.kernel,
            q.Z,
            mean=q.mean,
            likelihood=q.likelihood,
            q_mean=q.q_mean[:, idcs],
            q_factor=q.q_factor[idcs] if len(q.q_factor) > 1 else q.q_factor,
            L=q.L,
        )
        return SparseGPModel(
            JointPosterior(
                kept, X=process.X, Y=process.Y[..., idcs], noise=process.noise[..., idcs]
            ),
            inputs=self._x_scaler,
            targets=Standardiser(self.y_shift[idcs], self.y_scale[idcs]),
        )

    def _own_process(self) -> JointPosterior:
        """The process of another model: parameters are copied, and moving one leaves the other.

        Buffers are shared, for what moves a module replaces them: a step of a search that looks
        ahead copies no matrix.
        """
        q, process = self.process.posterior, self.process
        own = deepcopy(q, {id(tensor): tensor for tensor in q.buffers()})
        return JointPosterior(own, X=process.X, Y=process.Y, noise=process.noise)

    @property
    def _x_scaler(self) -> Standardiser:
        return Standardiser(self.x_shift, self.x_scale)

    @property
    def _y_scaler(self) -> Standardiser:
        return Standardiser(self.y_shift, self.y_scale)

    def _noise(self, given: Tensor | float | None, rows: int) -> Float[Tensor, "*b n m"]:
        """Variances in the user's units."""
        if given is not None:
            like = self.x_shift
            noise = torch.as_tensor(given, dtype=like.dtype, device=like.device)
            fits = noise.dim() == 0 or noise.shape[-1] in (1, self.num_outputs)
            fits = fits and (noise.dim() < 2 or noise.shape[-2] in (1, rows))
            if not fits or not bool((noise >= 0).all()):
                raise InputError(
                    f"the noise must be variances, not negative, [..., {rows}, "
                    f"{self.num_outputs}] or one number; got {list(noise.shape)} down to "
                    f"{noise.min().item()}."
                )
            return noise.expand(*noise.shape[:-2], rows, self.num_outputs)
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                f"{type(self.likelihood).__name__} has no Gaussian noise; ask for the function "
                "itself, or say what the noise is, variances `[*b n m]`."
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


def _normal(mean: Float[Tensor, "*b m q"], cov: Float[Tensor, "*b m q q"]) -> MultivariateNormal:
    """Independent outcomes, each joint over q rows."""
    if mean.shape[-2] == 1:
        return MultivariateNormal(mean[..., 0, :], to_linear_operator(cov[..., 0, :, :]))
    each = MultivariateNormal(mean, to_linear_operator(cov))
    return MultitaskMultivariateNormal.from_batch_mvn(each, task_dim=-1)
