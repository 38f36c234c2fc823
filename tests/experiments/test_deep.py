"""Baselines of the deep experiments: a fixed number of inducing points in every layer."""

from collections import Counter
from statistics import fmean

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from helpers.deep_problems import normal, started
from helpers.figures import scattered
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.experiments.deep import (
    draw_layer_sizes,
    equal_size_claims,
    kmeans_centres,
    spread_rows,
    train_fixed_sizes,
)
from winnowgp.models import DeepGP
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, fit
from winnowgp.training.layer_training import LayerTraining

SIZES = (3, 6, 4)
STEPS = (2, 3, 4)


def rows() -> Dataset:
    X = normal(90, 2, seed=0)
    return Dataset.of(X, torch.sin(2 * X[:, 0]))


class TrainingRecord:
    """The inputs and inducing points of each layer when its own training begins, and all steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps: Counter[str] = Counter()
        run = LayerTraining.run

        def recorded(
            training: LayerTraining, model: DeepGP, batches, phase: str, **options
        ) -> None:
            together = not phase.startswith("layer")
            self.steps["all layers" if together else phase] += options["steps"]
            points = model.layers[0].candidates.detach().clone()
            self.starts[phase] = batches.next().X.clone(), points
            run(training, model, batches, phase, **options)

        monkeypatch.setattr(LayerTraining, "run", recorded)


def trained(start: str, *, hidden_mean: str = "zero") -> DeepGP:
    data = rows()
    return train_fixed_sizes(
        started(data=data, widths=(2, 2), hidden_mean=hidden_mean, K=max(SIZES)),
        data,
        sizes=SIZES,
        start=start,
        training=LayerTraining(0.01, natural_rate=0.5),
        steps=STEPS,
        generator=torch.Generator().manual_seed(0),
    )


def assert_centres(points: Tensor, inputs: Tensor) -> None:
    """Check that every point is the mean of the rows nearest to it, a fixed point of k-means.

    Neither random rows nor a part of a larger number of centres satisfy this.
    """
    nearest = torch.cdist(inputs, points).argmin(1)
    means = torch.stack([inputs[nearest == k].mean(0) for k in range(len(points))])
    assert (means - points).abs().max() < 0.02 * inputs.std()


def assert_rows(points: Tensor, inputs: Tensor) -> None:
    distance = torch.cdist(points, inputs)
    assert distance.amin(1).max() < 1e-6
    assert len(distance.argmin(1).unique()) == len(points)


@pytest.mark.parametrize(("start", "check"), [("kmeans", assert_centres), ("random", assert_rows)])
def test_train_fixed_sizes_places_points_among_inputs_of_each_layer(
    start: str, check, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = TrainingRecord(monkeypatch)
    model = trained(start)
    assert model.sizes == SIZES
    for number, size in enumerate(SIZES, start=1):
        inputs, points = record.starts[f"layer {number}"]
        assert points.shape == (size, 2)
        check(points, inputs)


def test_train_fixed_sizes_identity_mean_places_points(monkeypatch: pytest.MonkeyPatch) -> None:
    record = TrainingRecord(monkeypatch)
    model = trained("kmeans", hidden_mean="identity")
    inputs, first = record.starts["train"]
    assert torch.equal(inputs, rows().X)
    assert_centres(first, inputs)
    # The first two layers are still the identity: the third has the rows as its inputs.
    inputs, last = record.starts["layer 3"]
    assert (inputs - rows().X).abs().max() < 1e-9
    assert_centres(last, inputs)
    assert model.sizes == SIZES


def test_train_fixed_sizes_takes_as_many_updates_as_fast_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, counts = rows(), []
    alone, first, last = STEPS
    for run in (
        lambda: trained("kmeans"),
        lambda: trained("random"),
        lambda: fit(
            started(data=data, widths=(2, 2), hidden_mean="zero", K=max(SIZES)),
            data,
            schedule=FastSchedule(
                FixedAlpha(0.1), deep=DeepTraining(layerwise=alone, pre=first, post=last)
            ),
            generator=torch.Generator().manual_seed(0),
        ),
    ):
        with monkeypatch.context() as patch:
            record = TrainingRecord(patch)
            run()
            counts.append(record.steps)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] == {"layer 1": 2, "layer 2": 2, "layer 3": 2, "all layers": 7}


def test_kmeans_centres_fewer_rows_gives_one_centre_per_row() -> None:
    X = normal(3, 2, seed=1)
    centres = kmeans_centres(X, 5, torch.Generator().manual_seed(0))
    assert centres.shape == (3, 2)
    assert torch.cdist(X, centres).amin(1).max() < 1e-9


def test_kmeans_centres_same_generator_same_centres() -> None:
    X = normal(60, 2, seed=1)
    first, again = (kmeans_centres(X, 7, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)


def test_spread_rows_all_rows_distinct() -> None:
    X = normal(11, 2, seed=1)
    assert len(spread_rows(X, 11).unique(dim=0)) == 11


def test_train_fixed_sizes_unknown_start_raises() -> None:
    with pytest.raises(InputError, match="one of random, kmeans; got 'grid'"):
        trained("grid")


@pytest.mark.parametrize(
    ("theirs", "word", "error"),
    [
        ([0.9, 0.7, 0.9, 0.7], "agrees", 0.0577),
        # The mean gain comes from one fold.
        ([0.6, 1.0, 1.0, 1.0], "does not agree", 0.1),
        ([1.1, 1.3, 1.1, 1.3], "does not agree", 0.0577),
    ],
)
def test_equal_size_claims_gain_must_exceed_two_standard_errors(
    theirs: list[float], word: str, error: float
) -> None:
    selected = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 99.0}
    baselines = {"random": dict(enumerate(theirs)), "kmeans": {}}
    (line,) = equal_size_claims(selected, baselines, unit="fold")
    statement = "beyond the paper: selected inducing points beat as many random rows"
    assert line.startswith(f"{word}: {statement}")
    assert f"1.000 against {fmean(theirs):.3f} nats" in line
    assert f"higher on {sum(each < 1 for each in theirs)} of 4 folds" in line
    assert f"gain {1 - fmean(theirs):+.4f} with a standard error of {error:.4f}" in line


def test_equal_size_claims_single_fold_does_not_agree() -> None:
    (line,) = equal_size_claims({0: 5.0}, {"random": {0: 1.0}}, unit="fold")
    assert line.startswith("does not agree")
    assert "higher on 1 of 1 fold; gain +4.0000 with a standard error of inf" in line


def test_draw_layer_sizes_groups_by_label_and_layer() -> None:
    sizes = {"weak": [(30, 40), (32, 44)], "strong": [(10, 12), (10, 14)]}
    ax = draw_layer_sizes(sizes, ax=Figure().subplots())
    heights = [sorted(offsets[:, 1]) for offsets in scattered(ax)]
    assert heights == [[30, 32], [10, 10], [40, 44], [12, 14]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["weak", "strong"]
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["layer 1", "layer 2"]
