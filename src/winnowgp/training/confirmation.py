"""Optima of the evidence that generalise: few rows have others, which explain noise.

With one lengthscale per column, a kernel can place the outliers of a skewed target where no other
rows are. Held-out rows at the same hyper-parameters do not tell, because these were fitted to them
as well. So two things are asked of few rows:

1. The maximum of the evidence without some rows, next to the optimum in question, predicts these
   rows at least as well as a constant does.
   With many columns for so few rows, the evidence selects columns by chance. Maxima without some
   rows are then sought from equal lengthscales, since those next to the optimum have seen all rows,
   and a common lengthscale that is not learnt for each column is tried last.
2. Where outliers decide, an effect is also seen in the ranks of the targets (in their normal
   scores, the Gaussian quantiles of the ranks, whose noise is Gaussian). The lengthscales are then
   those of the scores, unless those of the targets predict held-out rows clearly better, or more
   than 200 rows leave no doubt that they predict better than a constant.

Few rows may satisfy this by chance. So the densities of the held-out rows also give the weight of a
constant in the average over hyper-parameters (`laplace`). Where predictions are such averages, it
suffices that the average of model and constant predicts held-out rows clearly better than the
constant: a row or two that the model alone predicts badly cost little then.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import exp, log, log1p, pi, sqrt
from operator import itemgetter

import torch
from gpytorch.means import ZeroMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.data.noise import measured_repeatedly
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.exact_gp import exact_log_density
from winnowgp.models.kernels import copy_module
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.training.cross_validation import PredictiveGap
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.hyperparameters import Initialization
from winnowgp.training.initialization import (
    scaled,
    starting_points,
    trainable_lengthscales,
    with_unit_weights,
)
from winnowgp.training.optima import Optimum

# Nats by which a model with points must exceed the constant one, and more per kernel parameter: the
# evidence of a kernel that fits pure noise exceeds the constant model's by about as much. Of few
# rows, which may be a design without noise, less is required.
_SIGNIFICANT, _PER_PARAMETER, _PER_ROW = 2.5, 0.4, 0.1
# Times this gain after which the evidence leaves no doubt.
_CERTAIN = 2.0
CONFIRMED_ROWS = 2000
"""Number of rows up to which held-out rows must confirm an optimum."""
# Rows up to which their ranks must if there are outliers, and up to which the ranks always must. Of
# more rows an optimum that predicts clearly better than a constant needs no ranks: the lengthscales
# of ranks lost 0.01 to 0.8 nats on eight of ten public tables of 292 to 596 rows (means of two
# splits), and gained at most 0.01 on the others.
_OUTLIER_ROWS, _RANKED_ROWS = 600, 200
# Excess kurtosis from which outliers may decide; that of uniform and Gaussian targets is below zero
# and near zero.
_KURTOSIS = 1.5
# Optima of the evidence that are tried.
_TRIED = 3
# Folds of many and of few rows, each of which counts in training.
_FOLDS, _SMALL_FOLDS = 5, 20
# Rows up to which the gain on held-out rows must be so many times its standard error; without the
# worst row if the median is so many nats, where a single row makes the error large.
_SMALL, _CONFIDENT, _MEDIAN = 100, 1.5, 0.5
# Lengthscales per row from which columns are selected by chance.
_MANY_COLUMNS = 0.5
# Common lengthscales that are tried, relative to √D.
_COMMON = (0.5, 1.0, 2.0, 4.0)
# Held-out rows after which a clear difference decides, fewer if nothing is averaged by them, and
# the standard errors that are clear.
_ENOUGH, _FEW_ENOUGH, _CLEAR = 60, 20, 3.0
# Held-out rows without which nothing is decided, even if the time is over.
_FEWEST = 10
# The weight w of the constant model has a density ∝ w^(prior − 1) before rows are held out, of few
# and of many rows; values of w over which its expectation is a sum.
_PRIOR, _UNIFORM, _NODES = 2.0, 1.0, 4096
# Rows beyond which held-out rows hardly decide whether a model is used, so that their gains are not
# too large on average, and up to which all rows are held out, in folds, where they weigh an
# average. Together with the uniform prior, this gained 0.0033 ± 0.0012 nats per test row on 36
# splits of 13 public tables of 231 to 436 rows.
_DECIDED_ROWS, _WEIGHED_ROWS = 200, 500
# Largest share that a constant adds to the predictive variance, in the mean over rows.
_ADDED_VARIANCE = 0.5


def significant_gain(model: InducingModel, N: int) -> float:
    """Return the nats by which the evidence must exceed a constant's to be more than chance."""
    parameters = sum(p.numel() for p in model.kernel.parameters() if p.requires_grad)
    return min(_SIGNIFICANT + _PER_PARAMETER * parameters, _PER_ROW * N)


def confirmed_optima(
    steps: FastSteps[Model],
    initial: Initialization[Model],
    *,
    reported: bool = True,
    averaged: bool = False,
) -> Initialization[Model] | None:
    """Return the optima, first one that also predicts rows it was not fitted to; None if none does.

    The optima are returned as they are if there are many rows, also if they were pooled to few, if
    these cannot be held out, have known noise or lack targets, and if an earlier fit is continued.

    Args:
        reported: whether the weight of a constant is used; if not, a clear difference on a few
            held-out rows decides.
        averaged: whether predictions are averaged with a constant, which limits what a row that is
            predicted badly costs.
    """
    enough = _ENOUGH if reported else _FEW_ENOUGH
    # Many rows may have been pooled to few.
    few = steps.data.N <= CONFIRMED_ROWS and not (
        steps.data.observations > CONFIRMED_ROWS and measured_repeatedly(steps.sample)
    )
    known = initial.complete and steps.can_hold_out and few
    if not known or steps.warm_start or not isinstance(steps.model, SparseGP):
        return initial
    data = with_unit_weights(steps.model, steps.sample)
    if data.noise is not None or not data.complete:
        return initial
    if data.N <= _OUTLIER_ROWS and excess_kurtosis(data.Y) > _KURTOSIS:
        return _clearly_better(steps, initial, data) or _robust(steps, initial, averaged)
    early = not (averaged and _DECIDED_ROWS < data.N <= _WEIGHED_ROWS)
    for index, optimum in enumerate(initial.optima[:_TRIED]):
        refit = partial(_refitted, steps, optimum.model)
        gain = held_out_gain(
            data, refit, early_stopping=early, enough=enough, is_late=steps.is_late
        )
        certain = _is_certain(optimum, data)
        if confirms(gain, data.N, data.P, certain=certain, averaged=averaged):
            others = (*initial.optima[:index], *initial.optima[index + 1 :])
            return _weighed(replace(initial, optima=(optimum, *others)), gain, data)
    return _with_common_lengthscale(steps, initial, data)


def _has_many_columns(model: InducingModel, N: int) -> bool:
    lengthscales = sum(k.lengthscale.numel() for k in trainable_lengthscales(model.kernel))
    return lengthscales > _MANY_COLUMNS * N


def _with_common_lengthscale(
    steps: FastSteps[Model], initial: Initialization[Model], data: Dataset
) -> Initialization[Model] | None:
    """Return the best optimum with one lengthscale for all columns, which stays as it is."""
    if not _has_many_columns(initial.best, data.N):
        return None
    optima = []
    for times in _COMMON:
        start = scaled(starting_points(initial.best, data)[1], lengthscale=times)
        for kernel in trainable_lengthscales(start.kernel):
            kernel.raw_lengthscale.requires_grad_(False)
        optima.append(steps.maximise_evidence_of(start, data))
    model, evidence = max(optima, key=itemgetter(1))
    if not _exceeds_constant(model, evidence, data):
        return None
    refit = partial(_refitted, steps, model)
    gain = held_out_gain(data, refit, early_stopping=False, is_late=steps.is_late)
    gap = PredictiveGap.of(gain, torch.zeros_like(gain))
    if gap.nats < _CONFIDENT * gap.standard_error:
        return None
    best = initial.optima[0]
    optimum = Optimum(model, evidence, best.observations, best.kernel)
    return _weighed(replace(initial, optima=(optimum,)), gain, data)


def _clearly_better(
    steps: FastSteps[Model], initial: Initialization[Model], data: Dataset
) -> Initialization[Model] | None:
    """Return the optima if the best one of enough rows predicts clearly better than a constant."""
    if data.N <= _RANKED_ROWS:
        return None
    # Few of the rows that are predicted badly may be in the first folds.
    refit = partial(_refitted, steps, initial.best)
    gain = held_out_gain(data, refit, early_stopping=False, is_late=steps.is_late)
    gap = PredictiveGap.of(gain, torch.zeros_like(gain))
    if gap.nats <= _CLEAR * gap.standard_error:
        return None
    return _weighed(initial, gain, data)


def _robust(
    steps: FastSteps[Model], initial: Initialization[Model], averaged: bool
) -> Initialization[Model] | None:
    """Return the optimum of targets with outliers at lengthscales that their ranks confirm."""
    data, best = with_unit_weights(steps.model, steps.sample), initial.optima[0]
    scores = replace(data, Y=normal_scores(data.Y))
    ranked = steps.evidence_optima(scores)
    if not _exceeds_constant(ranked.best, ranked.optima[0].evidence, scores):
        return None
    lengthscales = {id(k.raw_lengthscale) for k in trainable_lengthscales(ranked.best.kernel)}
    held = tuple(n for n, p in ranked.best.kernel.named_parameters() if id(p) in lengthscales)
    model, evidence = steps.maximise_evidence_of(_holding(ranked.best, held), data)

    def refitted_to_ranks(rows: Dataset) -> Model | None:
        scores = replace(rows, Y=normal_scores(rows.Y))
        found = _refitted(steps, ranked.best, scores)
        return None if found is None else _refitted(steps, _holding(found, held), rows)

    gain, own = (
        held_out_gain(data, refit, early_stopping=False, is_late=steps.is_late)
        for refit in (refitted_to_ranks, partial(_refitted, steps, best.model))
    )
    n = min(len(own), len(gain))  # Fewer folds of one of them if the time is over.
    advantage = PredictiveGap.of(own[:n], gain[:n])
    if confirms(own, data.N) and advantage.nats > 2 * advantage.standard_error:
        return _weighed(initial, own, data)
    if not confirms(gain, data.N, data.P, averaged=averaged):
        return None
    optimum = Optimum(model, evidence, best.observations, ranked.optima[0].kernel)
    return _weighed(replace(ranked, optima=(optimum,), held=held), gain, data)


def _holding(model: Model, names: Iterable[str]) -> Model:
    """Return a copy of a model in which some kernel parameters stay as they are."""
    copy = copy_module(model)
    for name in names:
        copy.kernel.get_parameter(name).requires_grad_(False)
    return copy


def confirms(
    gain: Float[Tensor, " n"], N: int, P: int = 1, *, certain: bool = False, averaged: bool = False
) -> bool:
    """Return whether the gain on held-out rows says that a model generalises.

    Args:
        gain, N, P: as in `constant_weight`.
        certain: whether the evidence leaves no doubt, so that a loss within its error is accepted.
        averaged: whether it suffices that the average with a constant, of the weight that these
            gains give it, predicts clearly better than the constant alone: one or two rows that are
            predicted badly do not outweigh all others then.
    """
    if averaged:
        average = averaged_gain(gain, constant_weight(gain, N, P))
        gap = PredictiveGap.of(average, torch.zeros_like(average))
        if gap.nats > _CLEAR * gap.standard_error:
            return True
    gap = PredictiveGap.of(gain, torch.zeros_like(gain))
    if N > _SMALL:
        return gap.nats >= (-gap.standard_error if certain else 0.0)
    if gain.median() > _MEDIAN and gap.nats >= 0:
        others = gain.sort().values[1:]
        gap = PredictiveGap.of(others, torch.zeros_like(others))
    return gap.nats >= _CONFIDENT * gap.standard_error


def _weighed(
    initial: Initialization[Model], gain: Float[Tensor, " n"], data: Dataset
) -> Initialization[Model]:
    """Return the optima with the weight of a constant that the gains on held-out rows give it."""
    w = constant_weight(gain, data.N, data.P)
    pays = (averaged_gain(gain, w) - gain).mean().item()
    return replace(initial, constant_weight=w, constant_gain=pays)


def averaged_gain(gain: Float[Tensor, " n"], weight: float) -> Float[Tensor, " n"]:
    """Return the gains over a constant of the average of a model with it.

    Args:
        gain: gains of the model, in nats.
        weight: weight of the constant.
    """
    return torch.logaddexp(gain + log1p(-weight), torch.full_like(gain, log(weight)))


def constant_weight(gain: Float[Tensor, " n"], N: int, P: int = 1) -> float:
    """Return the expected share of observations that a constant describes, not the model.

    If that share is w, a held-out row with the gain g_i over the constant has the likelihood
    (1 − w) exp(g_i) + w relative to the constant. The n rows that were held out stand for all N.
    With the prior p(w) = 2 w and l(w) = Π_i ((1 − w) exp(g_i) + w)^(N/n),

        E[w | g] = ∫ w² l(w) dw / ∫ w l(w) dw,

    which is 2/(N + 3) if the model predicts all rows better by far, and the larger the less it
    gains. Beyond 200 rows the prior is uniform: 1/(N + 2).

    The model leaves about v = exp(−2 ḡ/P) of the variance of the targets and explains 1 − v, the
    mean square of its distance from the constant. So a share w multiplies the predictive variance
    by 1 + w (2 − w) (1/v − 1) in the mean over rows. This factor is at most 3/2, where ḡ is the
    mean or the median of the gains, whichever is less: an outlier that other rows explain gains
    many nats, and says nothing about a new one.

    The gains of up to 200 rows decided that the model is used, so that their mean is too large on
    average. One standard error is subtracted from each, at most a third of their median.

    Args:
        gain: gains of the held-out rows, in nats, summed over P targets.
        N: number of all rows.
        P: number of targets.

    >>> round(constant_weight(torch.full((8,), 1.0), 8), 3)
    0.039
    """
    few = N <= _DECIDED_ROWS
    if few and len(gain) > 1:
        error = (gain.std() / sqrt(len(gain))).item()
        gain = gain - min(error, max(gain.median().item() / 3, 0.0))
    nodes = (torch.arange(_NODES, dtype=torch.double, device=gain.device) + 0.5) / _NODES
    rows = torch.logaddexp(torch.log1p(-nodes)[:, None] + gain, nodes.log()[:, None])
    prior = _PRIOR if few else _UNIFORM
    density = (N * rows.mean(1) + (prior - 1) * nodes.log()).softmax(0)
    typical = min(gain.mean().item(), gain.median().item())
    ratio = exp(min(2 * typical / P, 700.0))
    limit = _ADDED_VARIANCE / 2
    return min((density @ nodes).item(), limit / max(ratio - 1, limit))


def _is_certain(optimum: Optimum[Model], rows: Dataset) -> bool:
    """Return whether the evidence exceeds a constant's several times as much as chance would."""
    return _exceeds_constant(optimum.model, optimum.evidence, rows, times=_CERTAIN)


def _refitted(steps: FastSteps[Model], model: Model, rows: Dataset) -> Model | None:
    """Return the optimum of the evidence of some rows next to a model, if it is significant."""
    if _has_many_columns(model, rows.N):
        model = starting_points(model, rows)[1]
    found, evidence = steps.maximise_evidence_of(model, rows)
    return found if _exceeds_constant(found, evidence, rows) else None


def _exceeds_constant(
    model: InducingModel, evidence: float, rows: Dataset, *, times: float = 1.0
) -> bool:
    constant = (rows.counts @ _constant(model, rows, rows)).item()
    return evidence - constant > times * significant_gain(model, rows.N)


def held_out_gain(
    data: Dataset,
    refit: Callable[[Dataset], InducingModel | None],
    *,
    early_stopping: bool = True,
    enough: int = _ENOUGH,
    is_late: Callable[[], bool] = lambda: False,
) -> Float[Tensor, " n"]:
    """Return by how much refitted models predict held-out rows better than a constant, in nats.

    With weights, each row counts by its weight, relative to their mean.

    Args:
        data: all rows.
        refit: returns the model of some rows, without candidates; None if a constant is as good.
        early_stopping: whether a clear difference after some folds decides.
        enough: number of held-out rows after which it may.
        is_late: tells whether the folds so far must do, because the time is over.
    """
    gains: list[Tensor] = []
    for rest, held in _splits(data):
        model = refit(rest)
        gain = held.X.new_zeros(held.N)
        if model is not None:
            gain = _log_density(model, rest, held) - _constant(model, rest, held)
        if held.weights is not None:
            gain = gain * held.weights * (data.N / data.observations)
        gains.append(gain)
        seen = torch.cat(gains)
        if early_stopping and len(seen) >= enough:
            gap = PredictiveGap.of(seen, torch.zeros_like(seen))
            if abs(gap.nats) > _CLEAR * gap.standard_error:
                break
        if is_late() and len(seen) >= _FEWEST:
            break
    return torch.cat(gains)


def constant_log_density(
    rest: Dataset, held: Dataset, *, centred: bool = False
) -> Float[Tensor, " n"]:
    """Return the log density of rows under mean and variance of other rows, summed over targets.

    Args:
        centred: whether the mean is zero, as that of the model is.
    """
    mean = (
        torch.zeros_like(rest.Y[0]) if centred else rest.weighted(rest.Y).sum(0) / rest.observations
    )
    variance = rest.mean_square(mean).clamp_min(LEAST_NOISE)
    return -0.5 * ((held.Y - mean).square() / variance + variance.log() + log(2 * pi)).sum(1)


def _log_density(model: InducingModel, rest: Dataset, held: Dataset) -> Float[Tensor, " n"]:
    assert isinstance(model, SparseGP)
    try:
        return exact_log_density(
            model.kernel, data=rest, mean=model.mean, noise=model.noise, rows=held
        )
    except NotPositiveDefiniteError:
        return _constant(model, rest, held)


def _constant(model: InducingModel, rest: Dataset, held: Dataset) -> Float[Tensor, " n"]:
    """Return the log density of the model without its kernel."""
    return constant_log_density(rest, held, centred=isinstance(model.mean, ZeroMean))


def _splits(data: Dataset) -> Iterator[tuple[Dataset, Dataset]]:
    """Iterate over the rows without a fold, and the rows of the fold.

    Rows are dealt out in the order of their distance from the mean, so that each fold has its share
    of outliers.
    """
    order = (data.Y - data.Y.mean(0)).square().sum(1).argsort(descending=True, stable=True)
    folds = min(_SMALL_FOLDS if data.N <= _SMALL else _FOLDS, data.N)
    fold = torch.empty_like(order)
    fold[order] = torch.arange(data.N, device=order.device) % folds
    for index in range(folds):
        yield data.part((fold != index).nonzero()[:, 0]), data.part((fold == index).nonzero()[:, 0])


def excess_kurtosis(Y: Float[Tensor, "N P"]) -> float:
    """Return the largest excess kurtosis of a column.

    >>> excess_kurtosis(torch.tensor([[-1.0], [1.0], [-1.0], [1.0]]))
    -2.0
    """
    z = (Y - Y.mean(0)) / Y.std(0, correction=0).clamp_min(1e-12)
    return z.pow(4).mean(0).max().item() - 3.0


def normal_scores(Y: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
    """Return standardised Gaussian quantiles of the ranks, column by column; ties share a rank.

    >>> normal_scores(torch.tensor([[1.0], [100.0], [3.0], [2.0]])).flatten()
    tensor([-1.3629,  1.3629,  0.3775, -0.3775])
    """
    columns = []
    for y in Y.T:
        _, index, count = y.unique(return_inverse=True, return_counts=True)
        count = count.to(Y)
        rank = count.cumsum(0) - 0.5 * count  # Mean rank of tied values, less a half.
        score = torch.special.ndtri(rank / len(y))[index]
        columns.append((score - score.mean()) / score.std(correction=0).clamp_min(1e-12))
    return torch.stack(columns, 1)
