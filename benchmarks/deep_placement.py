"""Deep GPs: what is the place of an inducing point worth before and after training moves it?

    python benchmarks/deep_placement.py --problems kin8nm "square wave" --seeds 3 4 5 6 7 8
    python benchmarks/deep_placement.py --summary --page

A deep model is trained with all candidates, and backward elimination by sites selects the points of
its layers. As many random candidates, random rows or k-means centres of each layer's inputs take
their place in the same model, so that hidden functions, kernels and noise are equal. (Locations of
candidates have been trained with the model; rows and centres have not.) q(u) has the optimum of the
sites. The models are compared by the ELBO of all rows, with the same samples, and by the log
density of test rows:

- "placed": before any training,
- "fixed": after training of everything but the locations,
- "moved": after as many steps that train the locations as well.

kin8nm has 1,000 training rows, two layers and 40 candidates in each, of which those within 0.1 nats
per observation remain; the square wave is that of `winnow reproduce square-wave`, with three layers
of 50 candidates, α = 0.5, and half of its steps with all candidates. Nothing was tuned. Rows that
exist already are not run again. Results are in benchmarks/results/deep/placement.jsonl.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import final

import torch
from torch import Tensor

from deep_curves import DEFAULTS, initial_model, scores
from measure import (
    RESULTS,
    Row,
    grouped,
    markdown,
    parser_of,
    replace_sections,
    run_missing,
    table,
)
from right_number_problems import split_table
from winnowgp.data import Dataset
from winnowgp.experiments.base import Scope
from winnowgp.experiments.deep import STARTS
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.square_wave import SquareWave, square_wave, train_square_wave
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import prediction_prices, seeded_elbo
from winnowgp.models.deep_sites import LayerSites, deep_sites
from winnowgp.selection import elimination_frontier
from winnowgp.training.adam import Minibatches
from winnowgp.training.fast_deep import pruned_model
from winnowgp.training.goals import FixedAlpha, Goal, Tolerance
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

ROWS, CANDIDATES, TOLERANCE = 1000, 40, 0.1
PRE, POST = 600, 400
ALPHA = 0.5
# Strength of a prior that removes nothing but points without any effect.
NOTHING = 1e-8
STAGES = ("placed", "fixed", "moved")
KEYS = ("problem", "seed")
OTHERS = {"subset": "candidates at random", "random": "random rows", "kmeans": "k-means centres"}
STAGE_NAMES = {
    "placed": "before training",
    "fixed": "trained, locations fixed",
    "moved": "trained, locations moved",
}


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """A model with all candidates, and how it is trained further."""

    model: DeepGP
    data: Dataset
    test: Dataset
    training: LayerTraining
    goal: Goal
    predict_samples: int | None
    """Number of samples of a prediction whose cost weights the layers; None weights them alike."""

    @classmethod
    def of(cls, problem: str, seed: int) -> "Trained":
        """Return a problem's model with all candidates, trained."""
        generator = torch.Generator().manual_seed(seed)
        if problem == "square wave":
            data, test = square_wave(seed=seed), square_wave(seed=seed + 1000)
            (settings, *_) = [s for s in SquareWave().settings(Scope(), []) if s["kind"] == "fast"]
            steps = {name: count // 2 for name, count in settings["steps"].items()}
            whole = {**settings, "seed": seed, "steps": steps, "alpha": NOTHING, "rounds": 1}
            rates = settings["learning_rate"], settings["samples"], settings["natural_rate"]
            training = LayerTraining(*rates, cooling=0.03)
            model = train_square_wave(whole, data, generator)
            return cls(model, data, test, training, FixedAlpha(ALPHA), None)
        rows = split_table(problem, seed=seed, train=ROWS).standardised()
        data = Dataset(torch.tensor(rows.X), torch.tensor(rows.y)[:, None])
        test = Dataset(torch.tensor(rows.X_test), torch.tensor(rows.y_test)[:, None])
        settings = {**DEFAULTS, "width": None, "sizes": (CANDIDATES,) * 2}
        training = LayerTraining(0.03, natural_rate=0.3, cooling=0.03)
        whole = cls(
            initial_model(data.X, settings, generator),
            data,
            test,
            training,
            Tolerance(TOLERANCE),
            64,
        )
        whole.train(whole.model, PRE, seed=seed)
        return whole

    def train(self, model: DeepGP, steps: int, *, seed: int) -> None:
        """Train a model, in place."""
        generator = torch.Generator().manual_seed(seed)
        with training_context(None, generator=generator, callbacks=()) as context:
            batches = Minibatches(self.data, 1024, generator)
            self.training.run(model, batches, "all", steps=steps, context=context)

    def elbo(self, model: DeepGP) -> float:
        """Return the ELBO per observation, with the same samples for every model."""
        generator = torch.Generator().manual_seed(0)
        return seeded_elbo(model, self.data, generator, seed=1) / self.data.N

    def sites(self, model: DeepGP) -> list[LayerSites]:
        eps = model.base_samples(self.data.N, 8, torch.Generator().manual_seed(2))
        return deep_sites(model, self.data, eps=eps)

    def selected(self) -> list[Tensor]:
        """Return the mask of each layer that backward elimination selects."""
        model, total = self.model, self.elbo(self.model) * self.data.N
        frontiers = [
            elimination_frontier(each.statistics(layer, bound=total, N=self.data.N))
            for layer, each in zip(model.layers, self.sites(model), strict=True)
        ]
        prices = None
        if self.predict_samples is not None:
            prices = prediction_prices(model.layers, model.sizes, samples=self.predict_samples)
        alphas = self.goal.alphas(frontiers, prices)
        pairs = zip(frontiers, alphas, strict=True)
        masks = [frontier.best_for_alpha(alpha).mask for frontier, alpha in pairs]
        # No layer may be empty.
        return [m if m.any() else f.masks[1] for m, f in zip(masks, frontiers, strict=True)]

    @torch.no_grad()
    def replaced(self, start: str, sizes: Sequence[int], *, seed: int) -> DeepGP:
        """Return the model with as many points at random rows or k-means centres of the inputs."""
        generator = torch.Generator().manual_seed(seed)
        eps = self.model.base_samples(self.data.N, 1, generator)
        inputs = self.model.evaluated(self.data, eps=eps).passed.inputs
        layers, masks = [], []
        for layer, each, size in zip(self.model.layers, inputs, sizes, strict=True):
            # The same q(f), of which the new points then have their marginal.
            layers.append(layer.grown(STARTS[start](each[0], size, generator)))
            masks.append(torch.arange(layers[-1].K) >= layer.K)
        return self.pruned(self.model.with_layers(layers), masks)

    def pruned(self, model: DeepGP, masks: Sequence[Tensor]) -> DeepGP:
        generator = torch.Generator().manual_seed(3)
        return pruned_model(model, self.data, self.sites(model), masks, generator)

    def scores(self, model: DeepGP) -> Row:
        density = scores(model, self.test)["standardised_log_density"]
        return {"elbo": self.elbo(model), "log_density": density}


def compare(problem: str, seed: int) -> Row:
    """Place as many points in three ways, and train each model with and without moving them."""
    torch.set_num_threads(1)
    whole = Trained.of(problem, seed)
    masks = whole.selected()
    sizes = [int(mask.sum()) for mask in masks]
    row: Row = {"problem": problem, "seed": seed, "sizes": sizes, "all": whole.scores(whole.model)}
    models = {"selected": whole.pruned(whole.model, masks)}
    models["subset"] = whole.pruned(whole.model, _random(masks, seed))
    models |= {start: whole.replaced(start, sizes, seed=seed) for start in STARTS}
    for name, model in models.items():
        row[name] = {"placed": whole.scores(model)}
        for stage in STAGES[1:]:
            trained = deepcopy(model)
            for layer in trained.layers:
                layer.candidates.requires_grad_(stage == "moved")
            whole.train(trained, POST, seed=seed)
            row[name][stage] = whole.scores(trained)
    return row


def _random(masks: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random masks of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [mask[torch.randperm(len(mask), generator=generator)] for mask in masks]


def _gains(rows: list[Row], start: str, stage: str, score: str) -> str:
    gains = [row["selected"][stage][score] - row[start][stage][score] for row in rows]
    error = f"{stdev(gains) / len(gains) ** 0.5:.4f}" if len(gains) > 1 else "one seed"
    return f"{fmean(gains):+.4f} ± {error}"


def lines_of(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return a line for every problem and other placement: the gains of selected points."""
    lines = []
    for (problem,), group in grouped(rows, "problem").items():
        sizes = zip(*(row["sizes"] for row in group), strict=True)
        points = " + ".join(f"{fmean(each):.0f}" for each in sizes)
        for start, against in OTHERS.items():
            both = [row for row in group if start in row]
            for score, name in (("elbo", "ELBO"), ("log_density", "test log density")):
                if both:
                    gains = (_gains(both, start, stage, score) for stage in STAGES)
                    lines.append((problem, str(len(both)), points, against, name, *gains))
    return lines


HEADER = ("problem", "seeds", "inducing points, mean", "against", "nats per observation")


def main() -> None:
    parser = parser_of(__doc__, seeds=range(3, 9), file=RESULTS / "deep" / "placement.jsonl")
    parser.add_argument("--problems", nargs="+", default=["kin8nm", "square wave"])
    parser.add_argument("--page", action="store_true", help="write the table of the page")
    given = parser.parse_args()
    runs = Runs(given.file)
    if not given.summary:
        cases = [(problem, seed) for problem in given.problems for seed in given.seeds]
        for row in run_missing(runs, compare, cases, keys=KEYS, jobs=given.jobs):
            print({name: row[name] for name in (*KEYS, "sizes")}, flush=True)
    lines = lines_of(list(runs))
    print(table((*HEADER, *STAGE_NAMES.values()), lines))
    if given.page:
        page = Path(__file__).parents[1] / "docs" / "benchmarks" / "deep.md"
        header = (*HEADER, *(f">{name}" for name in STAGE_NAMES.values()))
        replace_sections(page, placement=markdown(header, lines))


if __name__ == "__main__":
    main()
