"""The settings of the released scripts: declared, used by the runs, judged and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from winnowgp.errors import InputError
from winnowgp.experiments import gplvm, kin8nm_deep, square_wave
from winnowgp.experiments.base import Experiment, Row, Scope, process_options
from winnowgp.experiments.gplvm import Gplvm
from winnowgp.experiments.kin8nm_deep import Kin8nmDeep, deep_predict_us
from winnowgp.experiments.real import Real
from winnowgp.experiments.runner import all_experiments, run_experiment, run_status
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.sizes import Level, SizeStudy, standardised
from winnowgp.experiments.square_wave import SquareWave
from winnowgp.experiments.synthetic import Synthetic, sampled
from winnowgp.gradients import ScoreFunction
from winnowgp.models import DeepPosterior
from winnowgp.training import PaperSchedule

RELEASED = Scope(released=True)
EXPERIMENTS = [experiment for experiment in all_experiments() if experiment.has_released]


def first(experiment: Experiment, kind: str = "released", **changes: object) -> Row:
    """Return the settings of the first run of a kind, changed and as they are read from a file."""
    settings = next(s for s in experiment.settings(RELEASED, []) if s["kind"] == kind)
    assert changes.keys() <= settings.keys()
    return json.loads(json.dumps({**settings, **changes}))


def test_released_settings_equal_those_of_the_scripts() -> None:
    point_process = {
        experiment.name: [
            first(experiment)[name]
            for name in ("alpha", "subsets", "process_learning_rate", "start_inclusion")
        ]
        for experiment in EXPERIMENTS
    }
    assert point_process == {
        "synthetic": [0.1, 16, 0.3, 0.99],
        "real": [0.5, 64, 0.3, 0.5],
        "square-wave": [0.5, 16, 0.3, 0.5],
        "kin8nm-deep": [1.0, 32, 0.3, 0.8],
        "gplvm": [5.0, 64, 0.5, 0.1],
    }
    assert {first(experiment)["learning_rate"] for experiment in EXPERIMENTS} == {0.02}
    assert first(Synthetic(), "fixed")["updates"] == 300
    assert first(Real(), "fixed")["updates"] == 1000
    deep = first(Kin8nmDeep())
    assert (deep["weights"], deep["batch_size"]) == ([8.0, 1.0], 4096)
    assert (first(Synthetic())["N"], first(SquareWave())["N"]) == (1000, 100)


def test_released_runs_are_apart_from_printed_ones() -> None:
    for experiment in EXPERIMENTS:
        kinds = {s["kind"] for s in experiment.settings(RELEASED, [])}
        assert kinds <= {"released", "fixed", "grid"}
        assert "released" not in {s["kind"] for s in experiment.settings(Scope(), [])}
        quick = Scope(released=True, quick=True)
        assert len(experiment.settings(quick, [])) <= len(experiment.settings(RELEASED, []))


def test_process_options_are_those_of_the_schedule() -> None:
    settings = {"subsets": 7, "process_learning_rate": 0.4, "start_inclusion": 0.2, "alpha": 1.0}
    schedule = PaperSchedule(1.0, **process_options(settings))
    assert isinstance(schedule.gradient, ScoreFunction)
    used = (schedule.gradient.samples, schedule.inclusion_learning_rate, schedule.initial_inclusion)
    assert used == (7, 0.4, 0.2)
    assert process_options({"alpha": 1.0}) == {}


@pytest.mark.parametrize("module", [square_wave, kin8nm_deep], ids=["square-wave", "kin8nm-deep"])
def test_deep_schedule_uses_every_setting(module) -> None:
    experiment = SquareWave() if module is square_wave else Kin8nmDeep()
    steps = {"layerwise": 3, "pre": 5, "process": 7, "post": 9}
    schedule = module._schedule(
        first(experiment, steps=steps, subsets=6, learning_rate=0.07, start_inclusion=0.3)
    )
    assert (schedule.layerwise, schedule.pre, schedule.joint, schedule.post) == (3, 5, 7, 9)
    assert (schedule.gradient.samples, schedule.learning_rate) == (6, 0.07)
    assert (schedule.initial_inclusion, schedule.inclusion_learning_rate) == (0.3, 0.3)
    assert schedule.batch_size == (None if module is square_wave else 4096)


def test_size_study_starts_as_set() -> None:
    data = standardised(sampled("noise", 0.3, rows=30, seed=0), "cpu")
    start = {"locations": "kmeans", "noise": 0.2, "lengthscale": 0.5}
    model: Any = SizeStudy(data, 0, start).fixed(30, steps=0)
    assert model.noise.item() == pytest.approx(0.2)
    assert model.kernel.base_kernel.lengthscale.item() == pytest.approx(0.5)
    # With as many clusters as rows, the centres are the rows in another order.
    centres, rows = (A.detach().sort(0).values for A in (model.candidates, data.X))
    torch.testing.assert_close(centres, rows)
    usual = SizeStudy(data, 0).fixed(4, steps=0)
    assert usual.noise.item() == pytest.approx(1.0)


def test_synthetic_run_is_not_standardised() -> None:
    steps = {"pre": 2, "process": 2, "post": 2}
    settings = first(Synthetic(), N=40, candidates=8, steps=steps, draws=2, subsets=3)
    row = Synthetic().run(settings, RELEASED)
    sample = sampled("noise", 0.3, rows=40, seed=0, process=settings["process"])
    assert row["target_variance"] == pytest.approx(sample.Y.var(correction=0).item(), abs=1e-4)
    assert len(row["kl"]) == len(row["kept"]) == 2
    assert min(row["kl"]) > -1e-3


def test_level_all_noise_depends_on_the_targets_variance() -> None:
    def level(variance: float) -> Level:
        row = {"kind": "released", "seed": 0, "elbo": [-160.0], "kept": [3], "expected": 3.4}
        return Level("noise", 0.3, 100, ({**row, "target_variance": variance},))

    # Noise alone has −141.9 nats at variance 1, and −176.6 at variance 2.
    assert level(1.0).noise_count("released") == 1
    assert level(2.0).noise_count("released") == 0
    assert level(2.0).sizes("released") == {0: 3.4}


def test_gplvm_run_moves_candidates_after_they_were_held(paper_data, tmp_path: Path) -> None:
    epochs = {"held": 2, "free": 2, "process": 4, "post": 2}
    settings = first(Gplvm(), epochs=epochs, candidates=9, subsets=2)
    training = gplvm.run_gplvm(settings)
    assert len(training.frames) == epochs["process"]
    assert not torch.equal(training.frames[0].candidates, gplvm.grid(3))
    row = json.loads(json.dumps({**settings, **Gplvm().run(settings, RELEASED)}))
    assert len(row["moments"][0]["candidates"]) == 9
    near, switched, quality = Gplvm().claims([row])
    assert near.split(" (")[0].endswith("the latent positions, the released settings")
    assert switched.split(" (")[0].endswith("move, the released settings")
    assert "the released settings" in quality
    assert Gplvm().draw([row], tmp_path / "gplvm.png").stat().st_size > 10_000


def test_kin8nm_deep_times_single_rows(monkeypatch) -> None:
    settings = first(Kin8nmDeep())
    rows = [{**settings, "sizes": [5, 7]}]
    (timing,) = (s for s in Kin8nmDeep().settings(RELEASED, rows) if s["kind"] == "time")
    assert (timing["sizes"], timing["calls"], timing["best_of"]) == ((5, 7), 1000, 1)
    shape = {"skip_connections": True, "samples": 2, "best_of": 1}
    sizes: list[int] = []
    monkeypatch.setattr(DeepPosterior, "predict", lambda self, X: sizes.append(len(X)))
    deep_predict_us([3, 3], **shape, calls=5)
    # The first call is not timed.
    assert sizes == [5, 1, 1, 1, 1, 1]


def test_kin8nm_deep_claims_without_a_grid_judge_the_last_layer_alone() -> None:
    run = {"kind": "released", "alpha": 1.0, "connected": True, "log_density": 1.0, "fold": 0}
    time = {"kind": "time", "sizes": [5, 7], "connected": True, "predict_us": 3.0}
    (line,) = Kin8nmDeep().claims([{**run, "sizes": [5, 7]}, time])
    assert line.startswith("agrees: more inducing points in the last layer, the released settings")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_run_experiment_released_quick_gives_figure_and_claims(
    paper_data, experiment: Experiment, tmp_path: Path
) -> None:
    scope = Scope(quick=True, seeds=1, released=True)
    result = run_experiment(experiment, scope, tmp_path, jobs=1)
    assert Path(result.results).name == f"{experiment.name}-released-quick.jsonl"
    assert not run_status(experiment, Runs(Path(result.results)), scope).missing
    assert any("the released settings" in line for line in result.claims)


def test_run_experiment_without_released_settings_raises(tmp_path: Path) -> None:
    experiment = next(each for each in all_experiments() if not each.has_released)
    with pytest.raises(InputError, match="no released settings are known; `--as released` is for"):
        run_experiment(experiment, RELEASED, tmp_path)
