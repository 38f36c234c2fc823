"""Regressors that learn from a stream: `partial_fit`, and the noise of its rows."""

from abc import ABC
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Self

import torch
from gpytorch.likelihoods import GaussianLikelihood

from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset, Source
from winnowgp.data.scaling import StandardisedSource
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.estimators.rows import check_magnitude, check_source_columns
from winnowgp.estimators.selection import refuse_stream
from winnowgp.estimators.streaming import StreamingEstimator, batches_of, fitted_attributes
from winnowgp.models import MixturePosterior, Posterior, SparseGP
from winnowgp.models.likelihoods import is_plain, observation_model
from winnowgp.models.observations import LEAST_NOISE, target_noise
from winnowgp.models.online import OnlineGP

NEGLIGIBLE = 2 * LEAST_NOISE
"""Noise variance of standardised targets that is added to noise which is known. It is not zero: the
covariance of rows without any noise may be singular."""


@dataclass(kw_only=True, eq=False, repr=False)
class StreamingRegressor(StreamingEstimator, NumericTargets, ABC):
    """The base class of a regressor with `partial_fit`."""

    hyper: str = "auto"

    def partial_fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, noise_variance: Any = None
    ) -> Self:
        """Learn from one more batch of rows; those of earlier batches need not be passed again.

        The first call is `fit` at the most probable hyper-parameters, without the models, inclusion
        probabilities and densities that are only reported, and from two starts if it has at most
        250 rows, or three with the hyper-parameters of a kernel object; it fixes the kernel and the
        scaling of inputs and targets.
        The estimator may also have been fitted or loaded. Later calls update the hyper-parameters,
        add rows of the batch to the inducing points, and drop those that are no longer needed, so
        that the ELBO gap of all selections together is at most `tolerance` nats per observation.
        After an error the estimator is as it was.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`, which is
                read in batches of 4,096 rows. With a `checkpoint` an update that was interrupted
                goes on after its last batch.
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: weights `[N]`, as in `fit`.
            noise_variance: known variances of the noise, as in `fit`. If the learnt
                noise changes later, rows that were seen have the precision that is right to first
                order in this change.
        """
        self._check_stream()
        params = self._validate_stream()
        if not hasattr(self, "posterior_"):
            # A stream goes on with one posterior: an average over hyper-parameters is not used.
            first = copy(self).set_params(hyper="point")
            first._fit_targets(first._validate_stream(), X, y, sample_weight, noise_variance)
            first._keep_first(first._stream_rows(X, y, sample_weight, noise_variance)[0])
            vars(self).update(fitted_attributes(first))
            self._warn_of_limits()
            return self
        self._check_columns(params, self.n_features_in_)
        self._check_same_noise()
        rows, source = self._stream_rows(X, y, sample_weight, noise_variance)
        self._check_noise(params, source, missing=False)
        return self._update(rows, params, source=source)

    def _stream_rows(
        self, X: Any, y: Any, sample_weight: Any, noise_variance: Any
    ) -> tuple[Iterator[Dataset], Source]:
        """Return standardised batches of the rows, and the rows in the user's units."""
        if isinstance(X, Source):
            self._refuse_logarithm_of_source()
            check_source_columns(self, X, y, sample_weight, noise_variance)
            source: Source = X
        else:
            source = self._rows_of_arrays(X, y, sample_weight, noise_variance, reset=False)[0]
        return map(self._standardised, batches_of(source)), source

    def _note_rows(self, rows: Source) -> None:
        if self._stream is None:
            return
        missing = isinstance(rows, Dataset) and not rows.complete
        each = self.likelihood == "gaussian" and self.noise == "target" and rows.P > 1
        if missing:
            # Later batches would mistake them for others.
            self._stream = replace(self._stream, remembered=nan)
        elif (each or rows.has_noise) and isinstance(self.posterior_, Posterior | MixturePosterior):
            # The posterior does not say which part of its precision depends on the learnt noise,
            # and the ELBO not which part of it is of which target.
            self._stream = replace(self._stream, memories=(self._memory_of(rows),))

    def _memory_of(self, rows: Source) -> Memory:
        """Return what the inducing points remember of rows, at the fitted hyper-parameters."""
        posterior = self._mode
        model = SparseGP(
            deepcopy(posterior.kernel),
            posterior.Z,
            mean=posterior.mean,
            noise=target_noise(posterior.likelihood).detach(),
        )
        if isinstance(rows, StandardisedSource):
            parts = map(self._standardised, batches_of(rows.source))
        else:
            parts = (replace(p, X=self._x_scaler.forward(p.X)) for p in batches_of(rows))
        online = OnlineGP.start(model, outputs=rows.P)
        for part in parts:
            online = online.after(part)
        return online.memory

    def _check_stream(self) -> None:
        """Raise an error if the noise is of a kind that a stream does not remember."""
        refuse_stream(self.posterior)
        if self.hyper == "laplace":
            raise InputError(
                "`hyper` must be 'point' or 'auto' to learn from further batches; got "
                f"{self.hyper!r}: one posterior is remembered. Fit all rows together, or pass "
                "'point'."
            )
        if self.likelihood == validation.HETEROSCEDASTIC:
            raise InputError(
                "`likelihood` must be one whose noise does not depend on the inputs to learn from "
                f"further batches; got {self.likelihood!r}. Fit all rows together, or pass "
                "'gaussian'."
            )

    def _check_same_noise(self) -> None:
        """Raise an error if noise was learnt from earlier rows and is known now, or vice versa."""
        if not is_plain(self.likelihood_, GaussianLikelihood):
            return
        known = abs(self.likelihood_.noise.max().item() / NEGLIGIBLE - 1) < 1e-3
        if known != (self.noise == "known"):
            raise InputError(
                f"`noise` must be that of the earlier batches, {'known' if known else 'learnt'}; "
                f"got {self.noise!r}. Set it back, or fit all rows together."
            )

    def _standardised(self, rows: Dataset) -> Dataset:
        """Return a batch in the units of the first one."""
        if not rows.complete:
            raise InputError(
                "further batches must not have missing targets; leave such rows out, or fit all "
                "rows together."
            )
        scaler, noise = self._y_scaler, rows.noise
        if rows.P != scaler.P:
            raise InputError(f"`y` must have {scaler.P} target columns as before; got {rows.P}.")
        if noise is not None:
            noise = noise / scaler.columns.scale.square()
        data = Dataset(
            self._x_scaler.forward(rows.X), scaler.columns.forward(rows.Y), rows.weights, noise
        )
        check_magnitude("X", data.X)
        check_magnitude("y", data.Y)
        observation_model(self.likelihood_).check_targets(data.Y)
        return data

    def _mean_log_density(self, data: Dataset) -> float:
        nats = self._log_density(data.X, data.Y, noise=data.noise)
        each = torch.from_numpy(self._y_scaler.log_densities(nats, data.Y)).reshape(data.N, -1)
        return float(data.weighted(each.mean(1)[:, None]).sum() / data.observations)

    def _update_once(self, data: Dataset, params: validation.Parameters) -> None:
        super()._update_once(data, params)
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)
