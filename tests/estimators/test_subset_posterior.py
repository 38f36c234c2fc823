"""`posterior="mean-field" | "determinantal" | "gibbs"` of estimators, tables and commands."""

import json
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import winnowgp
from helpers.selection_problems import problem
from helpers.short_fits import shortest_fits
from winnowgp import SparseGPClassifier, SparseGPRegressor
from winnowgp.cli.app import run
from winnowgp.data import Dataset
from winnowgp.errors import ConvergenceWarning, InputError
from winnowgp.gradients import all_masks
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.models import MixturePosterior, Posterior, SparseGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.report.summary import selection_lines
from winnowgp.selection import sample_subsets
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.tabular.export import export_numpy
from winnowgp.training import subset_posterior

RNG = np.random.default_rng(0)
X = RNG.uniform(0, 6, (40, 1))
Y = 20 + 3 * np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=40)
KINDS = ("mean-field", "determinantal", "gibbs")


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subset_posterior, "_SWEEPS", 60)
        patch.setattr(subset_posterior, "MEMBERS", 5)
        yield


def fitted(kind: str, cls: Any = SparseGPRegressor, y: Any = Y, **settings: Any) -> Any:
    hyper = {"hyper": "point"} if cls is SparseGPRegressor else {}
    with shortest_fits(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return cls("rbf", posterior=kind, random_state=0, **hyper, **settings).fit(X, y)


@pytest.fixture(scope="module")
def models() -> dict[str, SparseGPRegressor]:
    return {kind: fitted(kind) for kind in KINDS}


def test_default_is_the_mean_field_and_others_keep_the_selection(models) -> None:
    assert SparseGPRegressor().posterior == "mean-field"
    for kind, model in models.items():
        posterior = model.subset_posterior_
        assert posterior.kind == kind
        np.testing.assert_allclose(model.inclusion_, posterior.inclusion.numpy())
        assert posterior.pairwise_inclusion().shape == (len(model.candidates_),) * 2
        low, high = posterior.credible_size(0.99)
        assert low <= model.n_inducing_ <= high
        np.testing.assert_array_equal(model.inducing_points_, models["gibbs"].inducing_points_)
        assert model.elbo_ == models["gibbs"].elbo_


def test_gibbs_samples_are_those_of_the_fitted_model_and_prior(models) -> None:
    model = models["gibbs"]
    samples, mode = model.subset_posterior_.q, model.posterior_.mode
    assert isinstance(samples, SubsetSamples)
    inputs, candidates = (
        model._x_scaler.forward(torch.from_numpy(values)) for values in (X, model.candidates_)
    )
    targets = model._y_scaler.columns.forward(torch.from_numpy(Y)[:, None])
    noise = mode.likelihood.noise.item()
    gp = SparseGP(mode.kernel, candidates, noise=noise, mean=mode.mean).requires_grad_(False)
    values = gp.subset_statistics(Dataset(inputs, targets)).value(samples.pooled)
    torch.testing.assert_close(samples.bounds.flatten(), values, rtol=1e-4, atol=1e-4)
    weights = SquaredCardinality(len(candidates), model.alpha_).log_weights(values)
    torch.testing.assert_close(samples.log_weights, weights)


def test_gibbs_predictions_average_over_subsets(models) -> None:
    mixture = models["gibbs"].posterior_
    assert isinstance(mixture, MixturePosterior)
    assert mixture.S == 5
    assert models["gibbs"].n_inducing_ == mixture.M
    sizes = {member.M for member in mixture.members}
    low, high = models["gibbs"].subset_posterior_.credible_size(0.99)
    assert all(low <= size <= high for size in sizes)
    # All members share the hyper-parameters of the fit and predict nearly the same.
    np.testing.assert_allclose(
        models["gibbs"].predict(X), models["mean-field"].predict(X), atol=0.3
    )
    for kind in ("mean-field", "determinantal"):
        assert isinstance(models[kind].posterior_, Posterior)


def test_intervals_samples_and_exports_are_those_of_the_mixture(models, tmp_path: Path) -> None:
    model = models["gibbs"]
    outputs = runpy.run_path(str(export_numpy(model, tmp_path / "m.py")))["predict"](X)
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(outputs["variance"]), sd, rtol=1e-6)
    lower, upper = model.predict_interval(X, 0.9)
    assert (lower < mean).all()
    assert (mean < upper).all()
    drawn = model.sample_functions(3, random_state=0)(X[:4])
    assert np.isfinite(drawn).all()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_model_has_the_posterior(models, kind: str, tmp_path: Path) -> None:
    model = models[kind]
    model.save(tmp_path / "m.winnow")
    loaded = winnowgp.load(tmp_path / "m.winnow")
    a, b = model.subset_posterior_, loaded.subset_posterior_
    assert (a.kind, a.credible_size(), a.r_hat) == (b.kind, b.credible_size(), b.r_hat)
    torch.testing.assert_close(a.pairwise_inclusion(), b.pairwise_inclusion())
    np.testing.assert_allclose(model.predict(X), loaded.predict(X))


@pytest.mark.parametrize("kind", ["determinantal", "gibbs"])
def test_classifier_has_the_posterior_of_its_sites(kind: str) -> None:
    model = fitted(kind, SparseGPClassifier, Y > 20)
    assert model.subset_posterior_.kind == kind
    assert isinstance(model.posterior_, Posterior)  # Predictions are those of the selected points.
    np.testing.assert_allclose(model.inclusion_, model.subset_posterior_.inclusion.numpy())


def test_many_candidates_keep_the_mean_field(monkeypatch) -> None:
    monkeypatch.setattr(subset_posterior, "MOST_CANDIDATES", 3)
    with shortest_fits(), pytest.warns(ConvergenceWarning, match="at most 3 candidates"):
        model = SparseGPRegressor("rbf", posterior="gibbs", random_state=0).fit(X, Y)
    assert model.subset_posterior_.kind == "mean-field"


def test_chains_that_do_not_mix_start_again_from_the_best_subset(monkeypatch) -> None:
    statistics = problem(22, K=5, noise=1.0).statistics
    starts: list[Any] = []

    def sample(*args: Any, start: Any, **options: Any) -> SubsetSamples:
        starts.append(start)
        return sample_subsets(*args, start=start, **options)

    monkeypatch.setattr(subset_posterior, "sample_subsets", sample)
    monkeypatch.setattr(SubsetSamples, "mixed", property(lambda _: False))
    monkeypatch.setattr(subset_posterior, "_MOST_SWEEPS", 120)
    generator = torch.Generator().manual_seed(0)
    prior, selected = SquaredCardinality(5, 0.5), torch.zeros(5, dtype=torch.bool)
    with pytest.warns(ConvergenceWarning, match="around the best subset"):
        subset_posterior._mixed_samples(statistics, prior, generator, selected=selected)
    assert starts[0] is None
    masks = all_masks(5)
    scores = statistics.value(masks) - 0.5 * masks.sum(1) ** 2
    expected = masks[scores.argmax()].expand(4, -1)  # K = 5: the chains have seen the best one.
    torch.testing.assert_close(starts[-1], expected)


def test_constant_model_has_one_subset() -> None:
    with shortest_fits(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SparseGPRegressor("rbf", posterior="gibbs", random_state=0).fit(X, np.ones(40))
    assert model.predict(X[:2]).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"posterior": "poisson"}, "'mean-field', 'determinantal' or 'gibbs'"),
        ({"posterior": "gibbs", "schedule": "paper", "alpha": 0.1}, "`schedule` must be 'fast'"),
        ({"posterior": "determinantal", "inducing_points": X[:3]}, "nothing to select"),
        ({"posterior": "gibbs", "hyper": "laplace"}, "`hyper` must be 'auto' or 'point'"),
        ({"posterior": "gibbs", "log_target": True}, "`log_target` must be False"),
        ({"posterior": "gibbs", "max_predict_us": 9.0}, "`max_predict_us` must be None"),
        ({"posterior": "gibbs", "likelihood": "heteroscedastic"}, "candidates of their own"),
    ],
)
def test_refused_combinations_say_why(settings: dict[str, Any], match: str) -> None:
    model = SparseGPRegressor(**settings)
    with pytest.raises(InputError, match=match):
        model.fit(X, Y)
    assert not hasattr(model, "posterior_")


def test_determinantal_does_not_refuse_what_only_averages_cannot_have() -> None:
    model = fitted("determinantal", log_target=True)
    assert model.subset_posterior_.kind == "determinantal"


def test_partial_fit_and_botorch_refuse_averages(models) -> None:
    with pytest.raises(InputError, match="`posterior` must be 'mean-field'"):
        models["gibbs"].partial_fit(X, Y)
    with pytest.raises(InputError, match="`posterior` must be 'mean-field'"):
        SparseGPClassifier(posterior="gibbs").partial_fit(X, Y > 20)
    with pytest.raises(InputError, match="averaged over subsets"):
        SparseGPModel.of(models["gibbs"])


def test_command_says_which_posterior(tmp_path: Path, capsys) -> None:
    path, file = tmp_path / "table.csv", str(tmp_path / "m.winnow")
    path.write_text("x,y\n" + "\n".join(f"{x},{y}" for x, y in zip(X[:, 0], Y, strict=True)))
    words = ["fit", str(path), "-t", "y", "--kernel", "rbf", "--quiet", "--posterior"]
    assert run([*words, "poisson"]) != 0
    assert "'determinantal'" in capsys.readouterr().err
    with shortest_fits():
        assert run([*words, "gibbs", "-o", file]) == 0
    table = winnowgp.load(file)
    low, high = table.estimator.subset_posterior_.credible_size()
    capsys.readouterr()
    assert run(["info", file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["subset_posterior"]["kind"] == "gibbs"
    assert shown["subset_posterior"]["credible_size"] == [low, high]
    assert shown["subset_posterior"]["averaged"] == 5
    assert shown["hyper_posteriors"] is None
    lines = dict(selection_lines(table.summary["choice"]))
    assert lines["subsets"].startswith(f"gibbs posterior: between {low} and {high} inducing points")
    assert "average over 5 subsets (R-hat" in lines["subsets"]
