"""Sites of GPyTorch models: layers as Gaussian regression."""

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

from winnowgp.errors import InputError, NotPositiveDefiniteError, WinnowError
from winnowgp.integrations.gpytorch.checks import (
    check_output,
    check_prior,
    check_samples,
    check_targets,
)
from winnowgp.integrations.gpytorch.distribution import Frame, GaussianQ, PriorBlocks, prior_blocks
from winnowgp.integrations.gpytorch.pruning import copied
from winnowgp.integrations.gpytorch.strategies import (
    Call,
    InducingStrategy,
    Recorder,
    inducing_strategies,
)
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.models.likelihoods import observation_model
from winnowgp.selection import DataRoot, Roots, SearchObjective, SubsetStatistics, SummedStatistics

# Every function of a strategy as Gaussian regression on what the bound asks of it.


@final
@dataclass(frozen=True, slots=True)
class SiteTotals:
    """Sites of all rows, summed in a strategy's whitened coordinates (see `bounds.sites`).

    With V = L⁻¹ K_uf, λ and w the sites of f less its prior mean, and t what the points leave open
    of each row's variance:

        C = V W Vᵀ,  D = V λ,  open = Σ_i w_i t_i.

    The best q(v) for these sites is N((I + C)⁻¹ D, (I + C)⁻¹), and a subset of the points is worth
    what regression says: exactly where the likelihood is Gaussian and each function is seen alone,
    to first order elsewhere.
    """

    frame: Frame
    N: int
    C: Float[Tensor, "R F K K"]
    D: Float[Tensor, "R F K"]
    open: Float[Tensor, "R F"]

    @classmethod
    def none(cls, frame: Frame, N: int) -> "SiteTotals":
        """Of no rows yet."""
        found = frame.found
        D = frame.L.new_zeros(found.roles, found.F, found.K)
        return cls(frame, N, torch.diag_embed(D), D, D[..., 0].clone())

    def added(
        self,
        blocks: PriorBlocks,
        mean: Float[Tensor, "*batch B"],
        slope: Float[Tensor, "*batch B"],
        precision: Float[Tensor, "*batch B"],
    ) -> "SiteTotals":
        """With some rows more; O(F B K²)."""
        F, B = self.D.shape[1], mean.shape[-1]
        V = solve_lower(self.frame.L, blocks.Kuf)
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

    def best_q(self) -> GaussianQ:
        """The q(v) that is best for the sites."""
        roots = self._roots()
        eye = torch.eye(roots.shape[-1]).to(roots)
        inverse = solve_lower(roots, eye)
        mean = inverse[0].mT @ (inverse[0] @ self.D[0][..., None])
        return GaussianQ(mean[..., 0], inverse[-1].mT)

    def excess(self, q: GaussianQ, best: Float[Tensor, "F K"], *, point: bool) -> float:
        """Nats that q(v) is below the best one for these sites: Σ_f KL[q ‖ best].

        Args:
            best: mean of the best one.
            point: whether q is a point mass, whose covariance is no choice.
        """
        B = self.C + torch.eye(self.C.shape[-1]).to(self.C)
        off = (q.mean - best)[..., None]
        total = 0.5 * (off * (B[0] @ off)).sum()
        if not point:
            inside = (q.factor * (B[-1] @ q.factor)).sum()
            volume = torch.linalg.slogdet(B[-1]).logabsdet + 2 * half_log_det(q.lower())
            total = total + 0.5 * (inside - off.numel() - volume.sum())
        return total.item()

    def statistics(self, bound: float) -> tuple[SearchObjective, ...]:
        """What any subset of each set of points is worth, on the CPU.

        Choosing is thousands of steps on small matrices, one after another.

        Args:
            bound: of all points, in nats; all sets with all points add up to it.
        """
        found = self.frame.found
        sets = [self._set(role, g) for role in range(found.roles) for g in self._members(role)]
        everything = torch.ones(1, found.K, dtype=torch.bool)
        total = sum(part.value(everything).item() for parts in sets for part in parts)
        offset = (bound - total) / len(sets)
        return tuple(_summed(parts, offset) for parts in sets)

    def _members(self, role: int) -> list[Bool[Tensor, " F"]]:
        """Which functions use each of the sets of a role."""
        index = self.frame.found.set_of(role)
        return [index == g for g in index.unique()]

    def _set(self, role: int, members: Bool[Tensor, " F"]) -> list[SubsetStatistics]:
        """One statistics for each kernel matrix that the functions of a set have."""
        decoupled = self.frame.found.roles == 2
        L = self.frame.L[role].cpu()
        roots, D, rest = self._roots()[role].cpu(), self.D[role].cpu(), self.open[role].cpu()
        C = self.C[role].cpu()
        groups: list[tuple[Tensor, list[int]]] = []
        for f in members.nonzero()[:, 0].tolist():
            own = L[0] if len(L) == 1 else L[f]
            same = next((g for factor, g in groups if torch.equal(factor, own)), None)
            groups.append((own, [f])) if same is None else same.append(f)
        made = []
        for factor, functions in groups:
            data, empty = [], factor.new_zeros(())
            for f in functions:
                y = solve_lower(roots[f], D[f][:, None])
                covariance = not decoupled or role == 1
                y = y[:, :0] if decoupled and role == 1 else y
                data.append(DataRoot(R=roots[f], LR=factor @ roots[f], y=y, P=int(covariance)))
                if covariance:
                    empty = empty - 0.5 * (rest[f] + C[f].diagonal().sum())
            made.append(SubsetStatistics(Roots(L=factor, data=tuple(data), empty=empty, N=self.N)))
        return made

    def _roots(self) -> Float[Tensor, "R F K K"]:
        """Of I + C."""
        inner = self.C.clone()
        inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
        try:
            return definite_cholesky(inner)
        except NotPositiveDefiniteError as error:
            raise NotPositiveDefiniteError(
                f"the sites of `{self.frame.found.name}` are not finite; is the model trained, and "
                "are its inputs on the scale of its kernel?"
            ) from error


def _summed(parts: list[SubsetStatistics], offset: float) -> SearchObjective:
    first, *others = parts
    shifted = replace(first.roots, empty=first.roots.empty + offset)
    first = SubsetStatistics(shifted)
    return SummedStatistics((first, *others)) if others else first


# A user's model with its data: the bound in nats, and what it asks of every function.


# Rows evaluated at once, and rows times samples where a model draws samples.
_ROWS, _DRAWN, _MOST_SAMPLES = 1024, 32_768, 8
# Samples of f for a likelihood that GPyTorch integrates by sampling.
_LIKELIHOOD_SAMPLES = 64


@final
@dataclass(frozen=True, slots=True)
class Evidence:
    """The bound of a model on its data, as GPyTorch's `VariationalELBO` defines it.

        L = Σ_i E_q(f_i)[log p(y_i | f_i)] − Σ_f KL[q(u_f) ‖ p(u_f)]

    Terms that do not depend on q(u), such as priors on hyper-parameters or the KL of latent inputs,
    are left out. A point mass costs ½‖m‖² in whitened coordinates: GPyTorch takes −log p(m), whose
    ½ log 2π a point (and ½ log|K_uu| where q is not whitened) is a matter of units.

    The model is a copy in float64, its networks in eval mode and its strategies in train mode, and
    nothing here changes it. GPyTorch draws samples from the global generator, whose state is put
    back; every evaluation meets the same draws.
    """

    model: Any
    likelihood: Likelihood
    x: Tensor | None
    """Rows `[N D]`; None where the model has latent inputs of its own."""
    y: Tensor
    seed: int

    @classmethod
    def of(
        cls, model: Any, likelihood: Likelihood, x: Tensor | None, y: Tensor, *, seed: int
    ) -> "Evidence":
        """Of a copy; neither model nor likelihood is touched."""
        jitters = [found.jitter for found in inducing_strategies(model)]
        working = copied(model).double().requires_grad_(False).eval()
        for found, jitter in zip(inducing_strategies(working), jitters, strict=True):
            # As in the user's own precision.
            found.strategy.jitter_val = jitter
            *path, name = found.name.split(".")
            setattr(working.get_submodule(".".join(path)), name, Recorder(found.strategy))
        kept = copied(likelihood).double().requires_grad_(False).eval()
        # As in the user's loop, where GPyTorch samples each function of a row by itself.
        kept.training = True
        made = cls(working, kept, x, y, seed)
        made._probe()
        return made

    def with_model(self, model: Any) -> "Evidence":
        """The same data seen by another model, which must be one of ours already."""
        return Evidence(model, self.likelihood, self.x, self.y, self.seed)

    @property
    def strategies(self) -> tuple[InducingStrategy, ...]:
        """Of the copy."""
        return inducing_strategies(self.model)

    @property
    def N(self) -> int:
        """Number of rows."""
        if self.x is not None:
            return self.x.shape[-2]
        return self.y.shape[-1]

    @property
    def passes(self) -> int:
        """Samples of each row, where the model draws any."""
        if not isinstance(self.model, DeepGP | BayesianGPLVM):
            return 1
        return max(1, min(_MOST_SAMPLES, _DRAWN // self.N))

    @torch.no_grad()
    def bound(self) -> float:
        """In nats; the mean over the samples."""
        nats = 0.0
        with self._same_draws():
            for output, y in self._evaluated():
                nats += self._expected(output, y).item() / self.passes
        return nats - self.divergence()

    @torch.no_grad()
    def divergence(self) -> float:
        """Σ_f KL[q(u_f) ‖ p(u_f)], in nats."""
        total = 0.0
        for found in self.strategies:
            # Not `kl_divergence()`: where the rows are the points, GPyTorch's unwhitened one has
            # another jitter, 1e-3, than its q(f).
            q = GaussianQ.of(found.q) if found.whitened else Frame.of(found).read()
            total += q.divergence(point=isinstance(found.q, DeltaVariationalDistribution))
        return total

    @torch.no_grad()
    def totals(self) -> tuple[SiteTotals, ...]:
        """What the rows ask of every strategy's functions, one pass; see `SiteTotals`."""
        found = self.strategies
        frames = [Frame.of(each) for each in found]
        sums = [SiteTotals.none(frame, self.N) for frame in frames]
        recorders = [_recorder(self.model, each) for each in found]
        with self._same_draws():
            for output, y in self._evaluated(differentiable=True):
                calls = [(n, call) for n, r in enumerate(recorders) for call in r.calls]
                with torch.enable_grad():
                    nats = self._expected(output, y) / self.passes
                sites = _sites(nats, [call for _, call in calls])
                for (n, call), (slope, precision) in zip(calls, sites, strict=True):
                    blocks = prior_blocks(found[n], call.x, call.arguments)
                    sums[n] = sums[n].added(blocks, call.mean.detach(), slope, precision)
        return tuple(sums)

    def _evaluated(self, *, differentiable: bool = False) -> Iterator[tuple[Any, Tensor]]:
        """Outputs and targets, some rows at a time, as often as there are samples."""
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
        """Σ_i E[log p(y_i | f_i)] of some rows."""
        if isinstance(self.likelihood, SoftmaxLikelihood):
            # By fixed nodes, where GPyTorch draws ten samples.
            labels = y.to(output.mean.dtype)[:, None]
            return (
                observation_model(self.likelihood)
                .expected_log_prob(labels, output.mean, output.variance)
                .sum()
            )
        with settings.num_likelihood_samples(_LIKELIHOOD_SAMPLES):
            return self.likelihood.expected_log_prob(y, output).sum()

    @torch.no_grad()
    def _probe(self) -> None:
        """Some rows through the model: errors are the user's to see now; q(u) gets its start."""
        try:
            nats = self._first_rows()
        except WinnowError:
            raise
        except Exception as error:  # the user's code may raise any
            x = "latent inputs" if self.x is None else f"`train_x` {list(self.x.shape)}"
            first = next(iter(str(error).splitlines()), "")
            said = f"{type(error).__name__}: {first}".rstrip(".: ")
            raise InputError(
                f"`model` and `likelihood` cannot be evaluated on {x} and targets "
                f"{list(self.y.shape)}: {said}. Does their bound take these tensors as they are? A "
                "copy of both is evaluated in float64, which leaves out tensors that are neither "
                "parameters nor buffers."
            ) from error
        if not torch.isfinite(nats):
            raise InputError(
                "the likelihood has no finite expectation at the model's q(f); does `y` suit "
                f"{type(self.likelihood).__name__}, and is the model trained?"
            )

    def _first_rows(self) -> Tensor:
        """Σ_i E[log p(y_i | f_i)] of the first rows, whose shapes are looked at."""
        for found in self.strategies:
            check_prior(found)
        with self._same_draws():
            output, y = next(self._evaluated())
            check_output(output, self.likelihood)
            for found in self.strategies:
                check_samples(found, _recorder(self.model, found).calls)
            check_targets(self.y, output, self.N)
            return self._expected(output, y)

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """The two generators that models draw from, seeded, and put back."""
        device = self.y.device
        cuda = device.type == "cuda"
        with torch.random.fork_rng([device] if cuda else []):
            # `torch.manual_seed` would seed every device.
            torch.default_generator.manual_seed(self.seed)
            if cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(self.seed)
            yield


def _recorder(model: Any, found: InducingStrategy) -> Recorder:
    return model.get_submodule(found.name.rpartition(".")[0])


@torch.enable_grad()
def _sites(nats: Tensor, calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    """∂/∂mean of each call, and the precision of its sites.

    w = −2 ∂/∂variance where the likelihood meets the function itself. Functions of hidden layers
    meet it through others: there it is Gauss and Newton's, Σ_o (∂f_o/∂f)² w_o, as
    `models.deep_sites` has it, for the exact curvature of samples is noisy and has either sign.
    """
    means, variances = [c.mean_shift for c in calls], [c.variance_shift for c in calls]
    slopes = torch.autograd.grad(
        nats, [*means, *variances], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    precisions = [(-2 * s).clamp_min(0) for s in slopes[len(calls) :]]
    hidden = _hidden(calls)
    for n in hidden:
        precisions[n] = torch.zeros_like(precisions[n])
    for top in set(range(len(calls))) - set(hidden) if hidden else ():
        functions = calls[top].mean.flatten(0, -2) if calls[top].mean.dim() > 1 else None
        outputs = [calls[top].mean] if functions is None else list(functions)
        weights = precisions[top].reshape(len(outputs), -1)
        for output, weight in zip(outputs, weights, strict=True):
            J = torch.autograd.grad(
                output.sum(),
                [means[n] for n in hidden],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for n, slope in zip(hidden, J, strict=True):
                precisions[n] = precisions[n] + slope.square() * weight
    return list(zip(slopes[: len(calls)], precisions, strict=True))


@torch.enable_grad()
def _hidden(calls: Sequence[Call]) -> list[int]:
    """Calls whose functions are inputs of others."""
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
