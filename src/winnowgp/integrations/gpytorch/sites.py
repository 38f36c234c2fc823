"""The ELBO of a user's GPyTorch model, and the Gaussian sites of each of its functions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood, SoftmaxLikelihood
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.gplvm import BayesianGPLVM
from gpytorch.variational import DeltaVariationalDistribution
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.sites import SiteSums
from winnowgp.errors import InputError, NotPositiveDefiniteError, WinnowError
from winnowgp.integrations.gpytorch.checks import (
    check_output,
    check_prior,
    check_samples,
    check_targets,
)
from winnowgp.integrations.gpytorch.distribution import (
    EarlierRows,
    GaussianQ,
    PriorBlocks,
    Whitening,
    prior_blocks,
)
from winnowgp.integrations.gpytorch.strategies import (
    Call,
    InducingStrategy,
    Recorder,
    copy_module,
    inducing_strategies,
)
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.site_inference import gauss_newton_precisions
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.elimination import DataRoot, Roots

# Rows evaluated at once, and rows times samples for models that draw samples.
_ROWS, _DRAWN, _MOST_SAMPLES = 1024, 32_768, 8
# Samples of f for a likelihood that GPyTorch integrates by sampling.
_LIKELIHOOD_SAMPLES = 64


@final
@dataclass(frozen=True, slots=True)
class ModelELBO:
    """The ELBO of a model on its data, as GPyTorch's `VariationalELBO` defines it.

        L = Σ_i E_q(f_i)[log p(y_i | f_i)] − Σ_f KL[q(u_f) ‖ p(u_f)]

    Terms that do not depend on q(u), such as priors on hyper-parameters or the KL of latent inputs,
    are left out. A point mass costs ½‖m‖² in whitened coordinates; GPyTorch uses −log p(m), which
    adds a constant ½ log 2π per point (and ½ log|K_uu| if q is not whitened).

    The model is a copy in float64, with its networks in eval mode and its strategies in train mode,
    and is not modified. GPyTorch draws samples from the global generator, whose state is restored;
    every evaluation uses the same samples.
    """

    model: Any
    likelihood: Likelihood
    x: Tensor | None
    """Rows `[N D]`; None if the model has latent inputs of its own."""
    y: Tensor
    seed: int
    earlier: EarlierRows | None = None
    """Rows that are remembered, for a model with one strategy."""

    @classmethod
    def of(
        cls, model: Any, likelihood: Likelihood, x: Tensor | None, y: Tensor, *, seed: int
    ) -> "ModelELBO":
        """Copy a model and its likelihood, and check that they can be evaluated."""
        jitters = [inducing.jitter for inducing in inducing_strategies(model)]
        working = copy_module(model).double().requires_grad_(False).eval()
        for inducing, jitter in zip(inducing_strategies(working), jitters, strict=True):
            # The jitter of the user's own precision.
            inducing.strategy.jitter_val = jitter
            *path, name = inducing.name.split(".")
            setattr(working.get_submodule(".".join(path)), name, Recorder(inducing.strategy))
        own = copy_module(likelihood).double().requires_grad_(False).eval()
        # As in a training loop, where GPyTorch samples each function of a row independently.
        own.training = True
        elbo = cls(working, own, x, y, seed)
        elbo._probe()
        return elbo

    def with_model(self, model: Any) -> "ModelELBO":
        """Return the ELBO of a modified copy of `model` on the same data."""
        return replace(self, model=model)

    @property
    def strategies(self) -> tuple[InducingStrategy, ...]:
        """Inducing strategies of the copied model."""
        return inducing_strategies(self.model)

    @property
    def N(self) -> int:
        """Number of rows."""
        if self.x is not None:
            return self.x.shape[-2]
        return self.y.shape[-1]

    @property
    def observations(self) -> int | float:
        """Number of rows, those that are remembered included."""
        return self.N if self.earlier is None else self.N + self.earlier.N

    @property
    def passes(self) -> int:
        """Number of samples of each row, for models that draw samples."""
        if not isinstance(self.model, DeepGP | BayesianGPLVM):
            return 1
        return max(1, min(_MOST_SAMPLES, _DRAWN // self.N))

    @torch.no_grad()
    def bound(self) -> float:
        """Return the ELBO in nats, a mean over samples if the model draws any."""
        nats = 0.0
        with self._same_draws():
            for output, y in self._evaluated():
                nats += self._expected(output, y).item() / self.passes
        if self.earlier is not None:
            nats += self.earlier.expected(Whitening.of(self.strategies[0]))
        return nats - self.divergence()

    @torch.no_grad()
    def divergence(self) -> float:
        """Return Σ_f KL[q(u_f) ‖ p(u_f)], in nats."""
        total = 0.0
        for inducing in self.strategies:
            # Not `kl_divergence()`: if the rows are the inducing points, GPyTorch's unwhitened one
            # uses another jitter, 1e-3, than its q(f).
            whitened = inducing.whitened
            q = GaussianQ.of(inducing.q) if whitened else Whitening.of(inducing).read()
            total += q.divergence(point=isinstance(inducing.q, DeltaVariationalDistribution))
        return total

    @torch.no_grad()
    def sites(self) -> "tuple[StrategySites, ...]":
        """Return the summed sites of every strategy, in one pass over the rows."""
        strategies = self.strategies
        sites = [StrategySites.none(Whitening.of(each), self.observations) for each in strategies]
        recorders = [_recorder(self.model, each) for each in strategies]
        with self._same_draws():
            for output, y in self._evaluated(differentiable=True):
                calls = [(n, call) for n, r in enumerate(recorders) for call in r.calls]
                with torch.enable_grad():
                    nats = self._expected(output, y) / self.passes
                per_call = _sites(nats, [call for _, call in calls])
                for (n, call), (slope, precision) in zip(calls, per_call, strict=True):
                    blocks = prior_blocks(strategies[n], call.x, call.arguments)
                    sites[n] = sites[n].added(blocks, call.mean.detach(), slope, precision)
        if self.earlier is not None:
            sites = [sites[0].plus(self.earlier)]
        return tuple(sites)

    def _evaluated(self, *, differentiable: bool = False) -> Iterator[tuple[Any, Tensor]]:
        """Yield outputs and targets in blocks of rows, once per sample."""
        recorders = [m for m in self.model.modules() if isinstance(m, Recorder)]
        whole = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        size = self.N if whole else _ROWS
        for _ in range(self.passes):
            x = self._latent() if self.x is None else self.x
            for start in range(0, self.N, size):
                for recorder in recorders:
                    recorder.calls.clear()
                    recorder.base_variational_strategy.train()
                rows = slice(start, min(start + size, self.N))
                track = torch.set_grad_enabled(differentiable)
                with track, settings.num_likelihood_samples(1):
                    output = self.model(x.detach()[..., rows, :])
                yield output, self._targets(output, rows)
        for recorder in recorders:
            recorder.calls.clear()

    def _latent(self) -> Tensor:
        x = self.model.sample_latent_variable()
        if x.shape[-2] != self.N:
            raise InputError(
                f"`data` must have a row for each of the model's {x.shape[-2]} latent inputs; got "
                f"{self.N} rows."
            )
        return x

    def _targets(self, output: Any, rows: slice) -> Tensor:
        if isinstance(output, MultitaskMultivariateNormal):
            return self.y[rows]
        return self.y[..., rows]

    def _expected(self, output: Any, y: Tensor) -> Tensor:
        """Return Σ_i E[log p(y_i | f_i)] of some rows."""
        if isinstance(self.likelihood, SoftmaxLikelihood):
            # Fixed nodes, where GPyTorch draws ten samples.
            labels = y.to(output.mean.dtype)[:, None]
            observations = observation_model(self.likelihood)
            return observations.expected_log_prob(labels, output.mean, output.variance).sum()
        with settings.num_likelihood_samples(_LIKELIHOOD_SAMPLES):
            return self.likelihood.expected_log_prob(y, output).sum()

    @torch.no_grad()
    def _probe(self) -> None:
        """Evaluate some rows, so that errors are raised now and q(u) is initialised."""
        try:
            nats = self._first_rows()
        except WinnowError:
            raise
        except Exception as error:  # the user's code may raise any
            x = "latent inputs" if self.x is None else f"`train_x` {list(self.x.shape)}"
            first = next(iter(str(error).splitlines()), "")
            reason = f"{type(error).__name__}: {first}".rstrip(".: ")
            raise InputError(
                f"`model` and `likelihood` cannot be evaluated on {x} and targets "
                f"{list(self.y.shape)}: {reason}. Check that their ELBO accepts these tensors. A "
                "copy of both is evaluated in float64, which leaves out tensors that are neither "
                "parameters nor buffers."
            ) from error
        if not torch.isfinite(nats):
            raise InputError(
                "the likelihood has no finite expectation at the model's q(f); check that `y` "
                f"suits {type(self.likelihood).__name__}, and that the model is trained."
            )

    def _first_rows(self) -> Tensor:
        """Return Σ_i E[log p(y_i | f_i)] of the first rows, after checking shapes."""
        for inducing in self.strategies:
            check_prior(inducing)
        with self._same_draws():
            output, y = next(self._evaluated())
            check_output(output, self.likelihood)
            for inducing in self.strategies:
                check_samples(inducing, _recorder(self.model, inducing).calls)
            check_targets(self.y, output, self.N)
            return self._expected(output, y)

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Seed the generators that models draw from, and restore their state afterwards."""
        device = self.y.device
        cuda = device.type == "cuda"
        with torch.random.fork_rng([device] if cuda else []):
            # `torch.manual_seed` would seed every device.
            torch.default_generator.manual_seed(self.seed)
            if cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(self.seed)
            yield


@final
@dataclass(frozen=True, slots=True)
class StrategySites:
    """Sites of all rows, summed in a strategy's whitened coordinates (see `bounds.sites`).

    With V = L⁻¹ K_uf, λ and w the sites of f less its prior mean, and t the conditional variance of
    each row given the inducing points:

        C = V W Vᵀ,  D = V λ,  open = Σ_i w_i t_i.

    They are accumulated over calls, with an axis of roles R: a decoupled strategy has inducing
    points of its own for means and for covariances. `sums` returns the `SiteSums` of a role. The
    scores of subsets are exact if the likelihood is Gaussian and each function is observed alone,
    and of first order otherwise.
    """

    whitening: Whitening
    N: int | float
    C: Float[Tensor, "R F K K"]
    D: Float[Tensor, "R F K"]
    open: Float[Tensor, "R F"]

    @classmethod
    def none(cls, whitening: Whitening, N: int | float) -> "StrategySites":
        """Return the sums over no rows."""
        inducing = whitening.inducing
        D = whitening.L.new_zeros(inducing.roles, inducing.F, inducing.K)
        return cls(whitening, N, torch.diag_embed(D), D, D[..., 0].clone())

    def added(
        self,
        blocks: PriorBlocks,
        mean: Float[Tensor, "*batch B"],
        slope: Float[Tensor, "*batch B"],
        precision: Float[Tensor, "*batch B"],
    ) -> "StrategySites":
        """Return the sums with the sites of some more rows; O(F B K²)."""
        F, B = self.D.shape[1], mean.shape[-1]
        V = solve_lower(self.whitening.L, blocks.Kuf)
        w = precision.reshape(F, B)
        t = (blocks.kff - V.square().sum(-2)).clamp_min(0)
        # λ = ∂E/∂μ + w (μ − prior mean); the mean is the first role's.
        linear = slope.reshape(F, B) + w * (mean.reshape(F, B) - blocks.mean[0])
        VW = V * w[:, None, :]
        return replace(
            self,
            C=self.C + VW @ V.mT,
            D=self.D + (V @ linear[..., None])[..., 0],
            open=self.open + (w * t).sum(-1),
        )

    def plus(self, earlier: EarlierRows) -> "StrategySites":
        """Return the sums with rows that are remembered."""
        C, D, trace = earlier.at(self.whitening.inducing.locations[0])
        return replace(self, C=self.C + C, D=self.D + D, open=self.open + trace)

    def sums(self) -> list[SiteSums]:
        """Return the sums of each role, with I + C factorised."""
        inner = self.C.clone()
        inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
        try:
            roots = definite_cholesky(inner)
        except NotPositiveDefiniteError as error:
            raise NotPositiveDefiniteError(
                f"the sites of `{self.whitening.inducing.name}` are not finite; check that the "
                "model is trained, and that its inputs are on the scale of its kernel."
            ) from error
        return [SiteSums(*each) for each in zip(roots, self.D.mT, self.open, strict=True)]

    def best_q(self) -> GaussianQ:
        """Return the optimal q(v) for the sites."""
        each = [sums.posterior() for sums in self.sums()]
        return GaussianQ(each[0][0].mT, each[-1][1])

    def excess(self, q: GaussianQ, best: Float[Tensor, "F K"], *, point: bool) -> float:
        """Return Σ_f KL[q ‖ best]: the nats that q(v) is below the optimal one for these sites.

        Args:
            best: mean of the optimal one.
            point: whether q is a point mass, which has no covariance to optimise.
        """
        B = self.C + torch.eye(self.C.shape[-1]).to(self.C)
        off = (q.mean - best)[..., None]
        total = 0.5 * (off * (B[0] @ off)).sum()
        if not point:
            inside = (q.factor * (B[-1] @ q.factor)).sum()
            volume = torch.linalg.slogdet(B[-1]).logabsdet + 2 * half_log_det(q.lower())
            total = total + 0.5 * (inside - off.numel() - volume.sum())
        return total.item()

    def statistics(self, bound: float) -> tuple[SubsetStatistics, ...]:
        """Return statistics that score subsets of each set of inducing points, on the CPU.

        Selection takes thousands of sequential steps on small matrices.

        Args:
            bound: ELBO of all points, in nats, to which the values of all full sets add up.
        """
        inducing = self.whitening.inducing
        role_sums = self.sums()
        sets = [
            SubsetStatistics(self._set(role, role_sums[role], members))
            for role in range(inducing.roles)
            for members in self._members(role)
        ]
        everything = torch.ones(1, inducing.K, dtype=torch.bool)
        total = sum(statistics.value(everything).item() for statistics in sets)
        offset = (bound - total) / len(sets)
        return tuple(statistics.shifted(offset) for statistics in sets)

    def _members(self, role: int) -> list[Bool[Tensor, " F"]]:
        """Return which functions use each of the sets of a role."""
        index = self.whitening.inducing.set_of(role)
        return [index == g for g in index.unique()]

    def _set(self, role: int, sums: SiteSums, members: Bool[Tensor, " F"]) -> tuple[Roots, ...]:
        """Return roots for each distinct kernel matrix of the functions of a set."""
        decoupled = self.whitening.inducing.roles == 2
        L = self.whitening.L[role].cpu()
        roots, D, rest = sums.roots.cpu(), sums.D.cpu(), sums.open.cpu()
        C = self.C[role].cpu()
        groups: list[tuple[Tensor, list[int]]] = []
        for f in members.nonzero()[:, 0].tolist():
            own = L[0] if len(L) == 1 else L[f]
            same = next((g for factor, g in groups if torch.equal(factor, own)), None)
            groups.append((own, [f])) if same is None else same.append(f)
        terms = []
        for factor, functions in groups:
            data, empty = [], factor.new_zeros(())
            for f in functions:
                y = solve_lower(roots[f], D[:, f : f + 1])
                covariance = not decoupled or role == 1
                y = y[:, :0] if decoupled and role == 1 else y
                data.append(DataRoot(R=roots[f], LR=factor @ roots[f], y=y, P=int(covariance)))
                if covariance:
                    empty = empty - 0.5 * (rest[f] + C[f].diagonal().sum())
            terms.append(Roots(L=factor, data=tuple(data), empty=empty, N=self.N))
        return tuple(terms)


def _recorder(model: Any, inducing: InducingStrategy) -> Recorder:
    return model.get_submodule(inducing.name.rpartition(".")[0])


@torch.enable_grad()
def _sites(nats: Tensor, calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    """Return ∂/∂mean of each call, and the precision of its sites.

    The precision is w = −2 ∂/∂variance if the likelihood acts on the function itself. Functions of
    hidden layers act through others, and have Gauss-Newton precisions.
    """
    means, variances = [c.mean_shift for c in calls], [c.variance_shift for c in calls]
    slopes = torch.autograd.grad(
        nats, [*means, *variances], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    precisions = [(-2 * s).clamp_min(0) for s in slopes[len(calls) :]]
    hidden = _hidden(calls)
    if hidden:
        outputs: list[Tensor] = []
        weights: list[Tensor] = []
        for top in set(range(len(calls))) - set(hidden):
            mean = calls[top].mean
            functions = list(mean.flatten(0, -2)) if mean.dim() > 1 else [mean]
            outputs += functions
            weights += precisions[top].reshape(len(functions), -1).unbind()
        through = gauss_newton_precisions(outputs, weights, [means[n] for n in hidden])
        for n, precision in zip(hidden, through, strict=True):
            precisions[n] = precision
    return list(zip(slopes[: len(calls)], precisions, strict=True))


@torch.enable_grad()
def _hidden(calls: Sequence[Call]) -> list[int]:
    """Return the calls whose functions are inputs of others."""
    inputs = [call.x.sum() for call in calls if call.x.requires_grad]
    if not inputs:
        return []
    reached = torch.autograd.grad(
        torch.stack(inputs).sum(),
        [c.mean_shift for c in calls],
        retain_graph=True,
        allow_unused=True,
    )
    return [n for n, slope in enumerate(reached) if slope is not None]
