"""The number of layers by held-out log density, on models that are not trained further."""

import pytest
import torch

from helpers.deep_problems import started, step_data
from winnowgp.errors import TrainingError
from winnowgp.models import DeepGP
from winnowgp.training.adam import Minibatches
from winnowgp.training.depth import DepthScore, select_depth
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import TrainingContext

DATA = step_data(N=60)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(layers: int, *, steps: int) -> DeepGP:
    """Return a model after so many steps."""
    made = started(data=DATA, widths=(1,) * (layers - 1))
    training, batches = LayerTraining(0.03, natural_rate=0.5), Minibatches(DATA, None, seeded())
    training.run(made, batches, "x", steps=steps, context=TrainingContext(seeded()))
    return made


def selected(*starts: DeepGP, rows: int = 60) -> tuple[int, tuple[DepthScore, ...]]:
    return select_depth(
        starts,
        DATA.part(slice(0, rows)),
        training=LayerTraining(0.03),
        layerwise=0,
        steps=0,
        batch_size=None,
        generator=seeded(3),
    )


def test_select_depth_prefers_the_model_that_predicts_held_out_rows() -> None:
    poor, good = model(1, steps=1), model(2, steps=25)
    before = {name: value.clone() for name, value in good.state_dict().items()}
    best, scores = selected(poor, good)
    assert best == 1
    assert [score.layers for score in scores] == [1, 2]
    # Six rows are held out; the same generator draws them again.
    held = DATA.part(torch.randperm(60, generator=seeded(3))[:6])
    nats = [each.posterior().log_density(held.X, held.Y)[:, 0].detach() for each in (poor, good)]
    assert [s.log_density for s in scores] == pytest.approx([n.mean().item() for n in nats])
    difference = nats[1] - nats[0]
    assert scores[1].gain == pytest.approx(difference.mean().item())
    assert scores[1].gain_error == pytest.approx(difference.std().item() / 6**0.5)
    assert selected(good, poor)[0] == 0
    for name, value in good.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_select_depth_gain_within_its_error_adds_no_layer() -> None:
    good = model(2, steps=25)
    best, scores = selected(good, good, good)
    assert best == 0
    assert [score.gain for score in scores] == [0.0, 0.0, 0.0]


def test_select_depth_model_that_fails_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    poor, good = model(1, steps=1), model(2, steps=25)
    run = LayerTraining.run

    def failing(self, trained: DeepGP, *given, **options) -> None:
        if len(trained.layers) == 2:
            raise TrainingError("steps failed")
        run(self, trained, *given, **options)

    monkeypatch.setattr(LayerTraining, "run", failing)
    assert selected(poor, good)[0] == 0
    best, scores = selected(good, poor)
    assert best == 1
    assert scores[0].log_density == scores[0].elbo == -torch.inf


def test_select_depth_few_rows_prefer_the_first() -> None:
    assert selected(model(1, steps=0), model(2, steps=0), rows=19) == (0, ())
