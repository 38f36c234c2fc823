"""Controls of the deep experiments: so many points in every layer, placed without a choice."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from helpers.deep_problems import normal, started
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.experiments.fixed_points import kmeans_centres, spread_rows, train_held
from winnowgp.models import DeepGP
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, fit
from winnowgp.training.layer_training import LayerTraining

SIZES = (3, 6, 4)
STEPS = (2, 3, 4)


def rows() -> Dataset:
    X = normal(90, 2, seed=0)
    return Dataset.of(X, torch.sin(2 * X[:, 0]))


class Watched:
    """What each layer sees and where its points are when its own training begins, and all steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps: Counter[str] = Counter()
        run = LayerTraining.run

        def watched(training: LayerTraining, model: DeepGP, parts, phase: str, **told) -> None:
            together = not phase.startswith("layer")
            self.steps["all layers" if together else phase] += told["steps"]
            points = model.layers[0].candidates.detach().clone()
            self.seen[phase] = parts.next().X.clone(), points
            run(training, model, parts, phase, **told)

        monkeypatch.setattr(LayerTraining, "run", watched)


def held(start: str, *, hidden_mean: str = "zero") -> DeepGP:
    data = rows()
    return train_held(
        started(data=data, widths=(2, 2), hidden_mean=hidden_mean, K=max(SIZES)),
        data,
        sizes=SIZES,
        start=start,
        training=LayerTraining(0.01, natural_rate=0.5),
        steps=STEPS,
        generator=torch.Generator().manual_seed(0),
    )


def assert_centres(points: Tensor, inputs: Tensor) -> None:
    """Every point is the mean of the rows that are nearer to it than to any other: k-means ended
    there, which no part of a larger number of centres and no random rows satisfy."""
    nearest = torch.cdist(inputs, points).argmin(1)
    means = torch.stack([inputs[nearest == k].mean(0) for k in range(len(points))])
    assert (means - points).abs().max() < 0.02 * inputs.std()


def assert_rows(points: Tensor, inputs: Tensor) -> None:
    distance = torch.cdist(points, inputs)
    assert distance.amin(1).max() < 1e-6
    assert len(distance.argmin(1).unique()) == len(points)


@pytest.mark.parametrize(("start", "check"), [("kmeans", assert_centres), ("random", assert_rows)])
def test_every_layer_begins_with_its_own_number_of_points_among_its_inputs(
    start: str, check, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    found = held(start)
    assert found.sizes == SIZES
    for number, size in enumerate(SIZES, start=1):
        inputs, points = watched.seen[f"layer {number}"]
        assert points.shape == (size, 2)
        check(points, inputs)


def test_layers_around_the_identity_are_placed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    found = held("kmeans", hidden_mean="identity")
    inputs, first = watched.seen["train"]
    assert torch.equal(inputs, rows().X)
    assert_centres(first, inputs)
    # Nothing has moved the first two layers: the third sees the rows themselves.
    inputs, last = watched.seen["layer 3"]
    assert (inputs - rows().X).abs().max() < 1e-9
    assert_centres(last, inputs)
    assert found.sizes == SIZES


def test_controls_take_as_many_updates_as_the_fast_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, counts = rows(), []
    alone, first, last = STEPS
    for run in (
        lambda: held("kmeans"),
        lambda: held("random"),
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
            watched = Watched(patch)
            run()
            counts.append(watched.steps)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] == {"layer 1": 2, "layer 2": 2, "layer 3": 2, "all layers": 7}


def test_fewer_rows_than_points_give_a_centre_a_row() -> None:
    X = normal(3, 2, seed=1)
    centres = kmeans_centres(X, 5, torch.Generator().manual_seed(0))
    assert centres.shape == (3, 2)
    assert torch.cdist(X, centres).amin(1).max() < 1e-9


def test_centres_are_drawn_from_the_generator_alone() -> None:
    X = normal(60, 2, seed=1)
    first, again = (kmeans_centres(X, 7, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)


def test_spread_rows_are_different_rows() -> None:
    X = normal(11, 2, seed=1)
    assert len(spread_rows(X, 11).unique(dim=0)) == 11


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(InputError, match="one of random, kmeans; got 'grid'"):
        held("grid")
