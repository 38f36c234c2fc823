"""`fit` of deep GPs, and the ELBO that it reports."""

import math

import pytest
import torch

from helpers.deep_problems import deep, dense_bound, dense_kl, rows, started, step_data
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, Progress, fit

QUICK = FastSchedule(
    FixedAlpha(0.5), inclusion_steps=3, deep=DeepTraining(layerwise=2, pre=3, post=2)
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_estimate_elbo_in_chunks_matches_dense_bound() -> None:
    model, data = deep(skip_connections=True), rows(N=10)
    found = estimate_elbo(model, data, generator=seeded(), samples=3, rows=4)
    g, fits = seeded(), []
    kl = torch.stack([dense_kl(layer) for layer in model.layers]).sum()
    for X, Y in zip(data.X.split(4), data.Y.split(4), strict=True):
        noise = model.base_samples(len(X), 3, g)
        fits.append(dense_bound(model, Dataset.of(X, Y), noise) + kl)
    assert len(fits) == 3
    assert found == pytest.approx((torch.stack(fits).sum() - kl).item(), rel=1e-8)


def test_estimate_elbo_more_samples_have_less_variance() -> None:
    model, data = deep(), rows(N=8)
    spread = [
        torch.tensor(
            [estimate_elbo(model, data, generator=seeded(s), samples=T) for s in range(12)]
        ).std()
        for T in (1, 100)
    ]
    assert spread[1] < spread[0] / 4


def test_fit_deep_same_seed_same_result_and_input_unchanged() -> None:
    data, model = step_data(), started()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    fits = [fit(model, data, schedule=QUICK, generator=seeded(s)) for s in (0, 0, 1)]
    by_default = fit(model, data, schedule=QUICK)
    assert fits[0].elbo == fits[1].elbo == by_default.elbo
    assert fits[0].elbo != fits[2].elbo
    for a, b in zip(fits[0].model.parameters(), fits[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_fit_deep_callback_exception_ends_fit() -> None:
    def stop(progress: Progress) -> None:
        if progress.phase == "pre-train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(started(), step_data(), schedule=QUICK, callbacks=stop)


def test_fit_deep_single_precision() -> None:
    data = step_data()
    single = Dataset.of(data.X.float(), data.Y.float())
    fitted = fit(started().float(), single, schedule=QUICK)
    assert math.isfinite(fitted.elbo)
    assert fitted.posterior.predict(single.X).mean.dtype == torch.float32


def test_fit_deep_unsuitable_data_raises() -> None:
    data, model = step_data(), started()
    with pytest.raises(InputError, match=r"candidates are torch.float64 .*data torch.float32"):
        fit(model, Dataset.of(data.X.float(), data.Y.float()), schedule=QUICK)
    with pytest.raises(InputError, match=r"with 1 columns.*with 2 on"):
        fit(model, Dataset.of(data.X.repeat(1, 2), data.Y), schedule=QUICK)
    with pytest.raises(InputError, match="must be 0 or 1"):
        fit(started("bernoulli"), data, schedule=QUICK)
