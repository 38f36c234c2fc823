"""Alarms: each sounds where it must, names what it saw, and is silent otherwise."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.short_fits import short_fits, shortest_fits
from winnowgp import DataTable, SparseGP, SparseGPRegressor, TabularModel, fit_table
from winnowgp.data import Dataset
from winnowgp.errors import (
    AllCandidatesWarning,
    ConvergenceWarning,
    CoverageWarning,
    DependentResidualsWarning,
    ExtrapolationWarning,
    FewRowsWarning,
    FitWarning,
    HeavyTailsWarning,
    LeakageWarning,
    NoInducingPointsWarning,
    PeriodicResidualsWarning,
    WorseThanConstantWarning,
)
from winnowgp.estimators.kernels import parse_kernel
from winnowgp.tabular import diagnose
from winnowgp.tabular.diagnostics import constant_alarm, coverage_alarm, leakage_alarm
from winnowgp.tabular.quality import constant_densities
from winnowgp.tabular.residuals import (
    Column,
    class_alarm,
    explained_shares,
    largest_peak,
    residual_alarms,
)
from winnowgp.training import FastSchedule, MaxPoints, fit
from winnowgp.training.fast_steps import FastSteps

N = 160


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def plain_columns() -> dict[str, Any]:
    draw = rng(4)
    x, u = draw.uniform(0, 6, N), draw.uniform(0, 1, N)
    town = draw.choice(["Oslo", "Rome"], N)
    y = np.sin(x) + 0.5 * (town == "Oslo") + 0.2 * draw.normal(size=N) + 3
    return {"x": x, "u": u, "town": town, "y": y}


def fitted(columns: dict[str, Any], **settings: Any) -> tuple[TabularModel, list[Warning | str]]:
    """Fit a table; return the model and the warnings that were issued."""
    settings = {"max_points": 12, "kernel": "rbf", **settings}
    with shortest_fits(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit_table(DataTable.of(columns), "y", **settings)
    return model, [each.message for each in caught if issubclass(each.category, FitWarning)]


@pytest.fixture(scope="module")
def sound() -> TabularModel:
    """A model of a table in which nothing is wrong."""
    model, issued = fitted(plain_columns())
    assert issued == []
    return model


def held_out(z: np.ndarray, **columns: np.ndarray) -> list[FitWarning]:
    """Return the alarms of residuals along columns."""
    named = [Column(name, "number", values) for name, values in columns.items()]
    predicted = rng(9).normal(size=len(z))
    return residual_alarms(z, named, predicted=predicted, positive=False, likelihood="gaussian")


def test_sound_fit_has_no_alarm(sound: TabularModel) -> None:
    assert sound.summary["alarms"] == []


def test_warnings_have_one_base_and_summary_has_them_too() -> None:
    columns = plain_columns() | {"cents": np.round(100 * plain_columns()["y"], 1)}
    model, issued = fitted(columns)
    (alarm,) = issued
    assert isinstance(alarm, LeakageWarning)
    assert isinstance(alarm, FitWarning)
    assert "column 'cents' alone determines the target" in str(alarm)
    assert model.summary["alarms"] == [{"warning": "LeakageWarning", "message": str(alarm)}]


def test_leaking_column_is_named_for_numbers_categories_and_classes() -> None:
    y = rng().normal(size=60)
    other = Column("other", "number", rng(1).normal(size=60))
    copy = Column("copy", "number", np.exp(y))
    assert "'copy'" in str(leakage_alarm([other, copy], y, 1.0))
    labels = np.where(y > 0, "yes", "no")
    assert "'copy'" in str(leakage_alarm([other, copy], labels, 1.0))
    code = Column("code", "category", np.where(y > 0, "J", "N"))
    assert "'code'" in str(leakage_alarm([other, code], labels, 1.0))
    levels = np.where(y > 0, 2.0, np.where(y > -1, 1.0, 0.0))
    tier = Column("tier", "category", levels.astype(str))
    assert "'tier'" in str(leakage_alarm([other, tier], levels, 1.0))


def test_good_predictions_without_a_leak_have_no_alarm() -> None:
    y = rng().normal(size=60)
    one, two = (Column(name, "number", rng(i).normal(size=60)) for i, name in ((1, "a"), (2, "b")))
    assert leakage_alarm([one, two], y, 1.0) is None
    # The only input may determine the target, and a rough copy is not one.
    assert leakage_alarm([Column("y", "number", y)], y, 1.0) is None
    assert leakage_alarm([one, Column("y", "number", y)], y, 0.99) is None
    # One positive among 30 rows is the largest of a column by chance.
    labels = np.array(["no"] * 29 + ["yes"])
    rank = Column("rank", "number", np.arange(30.0))
    assert leakage_alarm([rank, one], labels, 1.0) is None


@pytest.mark.usefixtures("quickly")
def test_no_inducing_points_is_an_alarm() -> None:
    draw = rng(1)
    with pytest.warns(NoInducingPointsWarning, match="predicts the same for every row"):
        model = SparseGPRegressor("rbf", random_state=0).fit(
            draw.normal(size=(60, 1)), draw.normal(size=60)
        )
    assert model.n_inducing_ == 0


def test_constant_target_is_an_alarm_and_no_other() -> None:
    _, issued = fitted({"x": np.arange(40.0), "y": np.full(40, 3.0)})
    assert [type(alarm) for alarm in issued] == [NoInducingPointsWarning]
    assert "'y' is 3 in all 32 training rows" in str(issued[0])


@pytest.mark.parametrize(("rows", "sounds"), [(9, True), (10, False)])
def test_few_training_rows_are_an_alarm(rows: int, sounds: bool) -> None:
    x = np.arange(float(rows))
    model, issued = fitted({"x": x, "y": x + 0.1 * rng().normal(size=rows)}, test_size=0)
    assert [type(alarm) for alarm in issued] == [FewRowsWarning] * sounds
    assert [alarm["warning"] for alarm in model.summary["alarms"]] == ["FewRowsWarning"] * sounds


def test_all_candidates_is_an_alarm() -> None:
    X = rng(2).uniform(0, 6, (40, 1))
    y = np.sin(3 * X[:, 0]) + 0.1 * rng(3).normal(size=40)
    model = SparseGPRegressor("rbf", alpha=1e-6, candidates=X[:4], random_state=0)
    every = pytest.warns(AllCandidatesWarning, match="all 4 candidates were selected")
    with short_fits(starts=2), every:
        model.fit(X, y)


@pytest.mark.parametrize("sign", [-1, 1])
def test_constant_alarm_compares_paired_densities(sign: int) -> None:
    nats = -1 + 0.1 * rng().normal(size=50)
    constant = nats - sign * 0.2
    alarm = constant_alarm(nats, constant)
    assert (alarm is None) == (sign > 0)
    if alarm is not None:
        assert isinstance(alarm, WorseThanConstantWarning)
        assert "difference -0.2 ± " in str(alarm)


def test_outliers_in_held_out_rows_are_worse_than_constant(sound: TabularModel) -> None:
    """One gross outlier costs a confident model more than a constant prediction."""
    table, rows = DataTable.of(plain_columns()), np.arange(40)
    X, y = sound.encoder.encode(table), plain_columns()["y"]
    assert diagnose(sound.estimator, X, y, held_out=rows) == []
    y[[3, 9]] += 8
    found = {type(alarm) for alarm in diagnose(sound.estimator, X, y, held_out=rows)}
    assert WorseThanConstantWarning in found


@pytest.mark.parametrize(
    ("within", "rows", "sounds"),
    [
        (94, 100, False),
        (80, 100, True),
        (17, 20, False),
        (12, 20, True),
        (400, 400, True),
        (40, 40, False),
        # Significantly fewer than 95 %, and close to it all the same.
        (9300, 10_000, False),
    ],
)
def test_coverage_alarm_is_a_binomial_test(within: int, rows: int, sounds: bool) -> None:
    alarm = coverage_alarm(np.arange(rows) < within, likelihood="gaussian")
    assert isinstance(alarm, CoverageWarning) == sounds
    if alarm is not None:
        assert ("too wide" if within == rows else "too narrow") in str(alarm)
        assert f"{within} of {rows}" in str(alarm)


def test_coverage_of_counts_may_exceed_its_level() -> None:
    """Intervals that end at integers hold more than 95 %."""
    assert coverage_alarm(np.ones(400, dtype=bool), likelihood="poisson") is None
    narrow = np.arange(100) < 80
    assert "--likelihood negative-binomial" in str(coverage_alarm(narrow, likelihood="poisson"))
    assert "--likelihood" not in str(coverage_alarm(narrow, likelihood="negative-binomial"))


@pytest.mark.parametrize("within", [300, 400])
@pytest.mark.parametrize("likelihood", ["heteroscedastic", "student-t", "beta"])
def test_coverage_alarm_does_not_suggest_the_likelihood_of_the_model(
    likelihood: str, within: int
) -> None:
    alarm = coverage_alarm(np.arange(400) < within, likelihood=likelihood)
    assert alarm is not None
    assert f"--likelihood {likelihood}" not in str(alarm)
    assert likelihood != "beta" or "student-t" not in str(alarm)


def test_normal_residuals_set_off_few_alarms() -> None:
    """Of 200 sets of standard normal residuals; with p = 0.01, 8 have a probability of 0.001."""
    draw = rng(5)
    sounded = sum(
        bool(held_out(draw.normal(size=60), a=draw.uniform(size=60), b=draw.normal(size=60)))
        for _ in range(200)
    )
    assert sounded < 8


def test_residuals_that_depend_on_a_column_are_an_alarm() -> None:
    draw = rng(6)
    a, b = draw.uniform(-1, 1, 80), draw.uniform(-1, 1, 80)
    z = draw.normal(size=80)
    assert held_out(z, a=a, b=b) == []
    (alarm,) = held_out(z + 3 * a**2, a=a, b=b)
    assert isinstance(alarm, DependentResidualsWarning)
    assert "depend on column 'a'" in str(alarm)


def test_suggested_kernel_can_be_used_whatever_the_name_of_the_column() -> None:
    draw = rng(6)
    values = draw.uniform(-1, 1, 80)
    (alarm,) = held_out(draw.normal(size=80) + 3 * values**2, **{"wind [m/s]": values})
    kernel = str(alarm).split('`kernel="')[1].split('"`')[0]
    assert parse_kernel(kernel, 1, columns={"wind [m/s]": [0]}) == parse_kernel("rbf + matern32", 1)


def test_residuals_that_drift_with_the_rows_are_an_alarm() -> None:
    columns = plain_columns()
    columns["y"] = columns["y"] + np.linspace(0, 3, N)
    _, issued = fitted(columns)
    assert [type(each) for each in issued] == [DependentResidualsWarning]
    assert "depend on the order of the rows" in str(issued[0])


def test_noise_that_grows_with_the_target_suggests_a_logarithm() -> None:
    draw = rng(7)
    mean = draw.uniform(1, 9, 120)
    z = draw.normal(size=120) * mean / 5
    (alarm,) = residual_alarms(z, [], predicted=mean, positive=True, likelihood="gaussian")
    assert isinstance(alarm, DependentResidualsWarning)
    assert "logarithm of the target" in str(alarm)
    assert "`--likelihood heteroscedastic`" in str(alarm)
    (alarm,) = residual_alarms(z, [], predicted=mean, positive=False, likelihood="gaussian")
    assert "logarithm" not in str(alarm)
    assert "`--likelihood heteroscedastic`" in str(alarm)
    (alarm,) = residual_alarms(z, [], predicted=mean, positive=False, likelihood="heteroscedastic")
    assert "heteroscedastic" not in str(alarm)


def test_noise_that_depends_on_a_column_has_its_p_value() -> None:
    a = np.arange(100.0)
    size = np.where(a < 50, 0.2, 1.0)
    (alarm,) = held_out(rng(7).normal(size=100) * size, a=a)
    p = float(str(alarm).split("(p = ")[1].split(")")[0])
    assert 0 < p < 1e-4


def test_noise_that_is_small_somewhere_has_wide_intervals_there() -> None:
    draw = rng(7)
    a = np.arange(100.0)
    (alarm,) = held_out(draw.normal(size=100) * np.where(a < 20, 0.02, 1.0), a=a)
    assert "0.0 times as large as on average where it is 0 to 19" in str(alarm)
    assert "too wide there and too narrow elsewhere" in str(alarm)


@pytest.mark.parametrize(
    ("likelihood", "suggested"),
    [
        ("laplace", "student-t"),
        ("student-t", None),
        ("poisson", "negative-binomial"),
        ("negative-binomial", None),
    ],
)
def test_heavy_tails_suggest_a_likelihood_for_the_same_targets(
    likelihood: str, suggested: str | None
) -> None:
    z = rng(8).standard_t(2, size=200)
    mean = rng(9).normal(size=200)
    (alarm,) = residual_alarms(z, [], predicted=mean, positive=False, likelihood=likelihood)
    found = re.findall(r"`--likelihood ([\w-]+)`", str(alarm))
    assert found == ([] if suggested is None else [suggested])


def test_constant_of_a_negative_binomial_model_has_the_mean_and_variance_of_the_rows() -> None:
    y = np.array([0.0, 0.0, 1.0, 2.0, 9.0])
    model = SparseGPRegressor(likelihood="negative-binomial")
    counts = np.arange(2000.0)
    p = np.exp(constant_densities(model, counts, y))
    assert p.sum() == pytest.approx(1)
    assert p @ counts == pytest.approx(y.mean())
    assert p @ (counts - y.mean()) ** 2 == pytest.approx(y.var())
    # Counts that vary less are Poisson counts.
    p = np.exp(constant_densities(model, counts, np.array([2.0, 2.0, 3.0])))
    assert p @ (counts - 7 / 3) ** 2 == pytest.approx(7 / 3)


def test_heavy_tails_suggest_student_t() -> None:
    draw = rng(8)
    u = draw.uniform(size=100)
    assert held_out(draw.normal(size=100), u=u) == []
    (alarm,) = held_out(draw.standard_t(1.5, 100), u=u)
    assert isinstance(alarm, HeavyTailsWarning)
    assert "student-t" in str(alarm)


def test_class_frequencies_that_depart_along_a_column_are_an_alarm() -> None:
    draw = rng(10)
    a = Column("a", "number", draw.uniform(size=200))
    p = np.stack([1 - a.values, a.values], 1)
    truth = draw.uniform(size=200) < a.values
    both = np.stack([~truth, truth], 1)
    assert class_alarm(p, both, ["no", "yes"], [a]) is None
    flat = np.full((200, 2), 0.5)
    alarm = class_alarm(flat, both, ["no", "yes"], [a])
    assert isinstance(alarm, DependentResidualsWarning)
    assert "class 'yes' is predicted with 50 %" in str(alarm)


def test_explained_shares_equal_least_squares() -> None:
    draw = rng(11)
    t, z = np.sort(draw.uniform(0, 10, 40)), draw.normal(size=40)
    frequencies = np.array([0.31, 0.7, 1.9])
    for f, share in zip(frequencies, explained_shares(t, z, frequencies), strict=True):
        A = np.stack([np.ones(40), np.cos(2 * np.pi * f * t), np.sin(2 * np.pi * f * t)], 1)
        residual = z - A @ np.linalg.lstsq(A, z, rcond=None)[0]
        assert share == pytest.approx(1 - residual @ residual / ((z - z.mean()) ** 2).sum())


def test_largest_peak_has_the_period_and_few_false_alarms() -> None:
    draw = rng(12)
    hours = np.sort(draw.choice(500, 100, replace=False)).astype(float)
    peak = largest_peak(hours, np.sin(2 * np.pi * hours / 24) + draw.normal(size=100))
    assert peak is not None
    assert peak.period == pytest.approx(24, rel=0.02)
    assert peak.probability < 1e-4
    # 200 series without a period: with p = 0.05, a count above 20 has a probability below 0.002.
    peaks = [largest_peak(hours, draw.normal(size=100)) for _ in range(200)]
    assert sum(each is not None and each.probability < 0.05 for each in peaks) <= 20
    assert largest_peak(hours[:10], hours[:10]) is None


def gappy_hours(days: float, seed: int) -> np.ndarray:
    """Hours of some days, without a gap of a fifth of them and without one hour in four."""
    draw = rng(seed)
    hours = np.arange(24.0 * days)
    start = draw.uniform(0.2, 0.6) * hours[-1]
    kept = (hours < start) | (hours > start + 0.2 * hours[-1])
    return hours[kept & (draw.uniform(size=len(hours)) < 0.75)]


@pytest.mark.parametrize("seed", range(4))
def test_largest_peak_of_few_cycles_with_gaps_and_a_trend_is_precise(seed: int) -> None:
    hours = gappy_hours(4.3, seed)
    z = np.sin(2 * np.pi * hours / 23.5) + hours / 50 + 0.1 * rng(seed).normal(size=len(hours))
    peak = largest_peak(hours, z)
    assert peak is not None
    assert peak.period == pytest.approx(23.5, rel=0.01)


@pytest.mark.parametrize("harmonic", [2, 3])
def test_largest_peak_prefers_the_fundamental_to_a_harmonic(harmonic: int) -> None:
    for seed in range(4):
        hours = gappy_hours(12, seed)
        angle, noise = 2 * np.pi * hours / 24, 0.4 * rng(seed).normal(size=len(hours))
        overtone = np.sin(harmonic * angle + 1)
        # Without the fundamental, the shorter period is the right one.
        for weight, period in ((0.6, 24.0), (0.0, 24.0 / harmonic)):
            peak = largest_peak(hours, weight * np.sin(angle) + overtone + noise)
            assert peak is not None
            assert peak.period == pytest.approx(period, rel=0.02)


def test_periodic_residuals_suggest_a_term_that_silences_the_alarm() -> None:
    draw = rng(13)
    t = np.arange(160) / 16
    y = 0.1 * t + np.sin(2 * np.pi * t) + 0.3 * draw.normal(size=160)
    columns = {"place": t, "u": draw.normal(size=160), "y": y}
    _, issued = fitted(columns, max_points=4)
    (alarm,) = issued
    assert isinstance(alarm, PeriodicResidualsWarning)
    assert re.search(r"repeat every (1 unit|[\d.]+ units) of column 'place'", str(alarm))
    kernel = str(alarm).split('`kernel="')[1].split('"`')[0]
    assert kernel.startswith("rbf + periodic[place](period=")
    _, issued = fitted(columns, kernel=kernel)
    assert issued == []


@pytest.mark.parametrize("amplitude", [3.0, 0.0])
def test_period_that_a_constant_model_misses_is_an_alarm(amplitude: float) -> None:
    draw = rng(7)
    # The rows are too far apart for a smooth function to follow the weeks.
    days = np.sort(draw.choice(700, 200, replace=False)).astype(float)
    y = amplitude * np.sin(2 * np.pi * days / 7) + draw.normal(size=200)
    model, issued = fitted({"day": days, "y": y}, max_points=None)
    assert model.estimator.n_inducing_ == 0
    periodic = [str(alarm) for alarm in issued if isinstance(alarm, PeriodicResidualsWarning)]
    if amplitude == 0.0:
        assert periodic == []
    else:
        term = re.search(r"rbf \+ periodic\[day\]\(period=([\d.]+)\)", periodic[0])
        assert term is not None
        assert float(term[1]) == pytest.approx(7, abs=0.01)


@pytest.mark.usefixtures("one_size")
def test_optimisation_that_does_not_settle_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # Comparing the starts optimises them; without that two iterations are not enough.
    monkeypatch.setattr(FastSteps, "successive_halving", lambda _, starts, **_settings: starts[:1])
    X = torch.linspace(0, 6, 120).double()[:, None]
    data = Dataset.of(X, torch.sin(X[:, 0] ** 2))
    model = SparseGP(ScaleKernel(RBFKernel()), X[:0], noise=0.1)
    settings: dict[str, Any] = {"rounds": 1, "inclusion_steps": 5}
    short, whole = (FastSchedule(MaxPoints(6), iterations=i, **settings) for i in (2, 400))
    with pytest.warns(ConvergenceWarning, match="did not settle"):
        fit(model, data, schedule=short, generator=torch.Generator().manual_seed(0))
    fit(model, data, schedule=whole, generator=torch.Generator().manual_seed(0))


def test_rows_far_outside_the_training_rows_are_an_alarm(sound: TabularModel) -> None:
    inside = DataTable.of({"x": [0.1, 7.0], "u": [0.2, 1.3], "town": ["Oslo", "Rome"]})
    sound.predict(inside)
    outside = DataTable.of({"x": [0.1, 70.0, 7], "u": [0.2, 1.3, 1], "town": ["Oslo"] * 3})
    with pytest.warns(ExtrapolationWarning, match="1 of 3 rows .* column 'x' is 70 in row 2"):
        whole = sound.predict(outside)
    with pytest.warns(ExtrapolationWarning) as issued:
        blocks = list(sound.predict_blocks([outside.part(slice(1)), outside.part(slice(1, 3))]))
    assert len(issued) == 1
    assert "1 of 3 rows" in str(issued[0].message)
    np.testing.assert_allclose(np.concatenate([b["mean"] for b in blocks]), whole["mean"])


def test_unseen_categories_are_an_alarm(sound: TabularModel) -> None:
    rows = {"x": [0.1, 7.0], "u": [0.2, 1.3], "town": ["Oslo", "Bergen"]}
    with pytest.warns(ExtrapolationWarning, match="intervals may be too narrow") as issued:
        sound.predict(rows)
    (warning,) = issued
    assert "'town' has 1 value that was not in the training rows ('Bergen')" in str(warning.message)
