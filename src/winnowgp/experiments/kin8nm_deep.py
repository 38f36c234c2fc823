"""Figure 6 of the paper: a two-layer deep GP on kin8nm, its points chosen or set by hand.

    python -m winnowgp.experiments.kin8nm_deep RESULTS.jsonl --kind fast --device cuda

Four kinds of runs, five folds each:

- `paper`: the paper's model (the input added to the second layer) and phases, 150 candidates a
  layer, four strengths of the prior.
- `fast`: hidden functions around the identity, elimination by sites, as many updates.
- `fixed`: no choice; a model of the sizes that `fast` kept at α = 1, its points random rows or
  k-means centres, as many updates.
- `grid`: no choice; 10, 40, 70 and 100 points in each layer (the paper: 10, 20, .., 100).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from sklearn.cluster import KMeans
from sklearn.model_selection import KFold
from torch import Tensor

from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.experiments.runs import Row, Runs
from winnowgp.models import DeepGP, deep_layers
from winnowgp.training import (
    DeepFast,
    DeepFit,
    DeepThreePhases,
    LayerAlphas,
    LayerTraining,
    Parts,
    deep_silent,
    estimated_bound,
    fit_deep,
    train_layerwise,
)

FOLDS = 5
CANDIDATES = 150
ALPHAS = (0.5, 1.0, 2.0, 5.0)
GRID = (10, 40, 70, 100)
KINDS = ("paper", "fast", "fixed", "grid")


@final
@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of updates; the paper's, or fewer for a quick look."""

    layerwise: int = 200
    pre: int = 1000
    process: int = 500
    post: int = 1500

    share: float = 0.5
    """Of all updates, that the fast schedule takes before the choice."""
    rounds: int = 3
    """In which the fast schedule drops points."""

    @property
    def total(self) -> int:
        """Updates of all layers together, the same for every kind."""
        return self.pre + self.process + self.post

    @property
    def fast(self) -> tuple[int, int, int]:
        """Of the fast schedule: before and after the choice, and the rounds before."""
        before = round(self.share * self.total)
        return before, self.total - before, self.rounds


@final
@dataclass(frozen=True, slots=True)
class Fold:
    """A standardised training part and its test part."""

    number: int
    train: Dataset
    test: Dataset
    scale: float
    """Of the target, for densities in its own units."""

    @classmethod
    def of(cls, number: int, device: str) -> "Fold":
        """One of five parts of kin8nm as test rows."""
        data = load_table("kin8nm").dataset()
        splits = list(KFold(FOLDS, shuffle=True, random_state=0).split(data.X))
        train, test = (torch.from_numpy(rows) for rows in splits[number])
        x, y = Standardiser.of(data.X[train]), Standardiser.of(data.Y[train])

        def part(rows: Tensor) -> Dataset:
            return Dataset(x.forward(data.X[rows]).to(device), y.forward(data.Y[rows]).to(device))

        return cls(number, part(train), part(test), y.scale.item())

    @torch.no_grad()
    def score(self, model: DeepGP) -> Row:
        """Test log density and error in the target's own units, a mixture of 100 samples."""
        posterior = model.posterior(samples=100)
        pairs = list(zip(self.test.X.split(512), self.test.Y.split(512), strict=True))
        nats = torch.cat([posterior.log_density(x, y) for x, y in pairs]).mean().item()
        mean = torch.cat([posterior.predict(x).mean for x, _ in pairs])
        error = (mean - self.test.Y).square().mean().sqrt().item()
        log_scale = torch.tensor(self.scale).log().item()
        return {"log_density": nats - log_scale, "rmse": error * self.scale}


@final
class Kin8nmDeep:
    """All runs of one fold, each added to the results unless it is there already."""

    def __init__(
        self,
        runs: Runs,
        fold: Fold,
        *,
        steps: Steps,
        alphas: Sequence[float] = ALPHAS,
    ) -> None:
        self.runs, self.fold, self.steps, self.alphas = runs, fold, steps, alphas
        self.device = fold.train.X.device

    def paper(self) -> None:
        """The paper's procedure; what comes before the choice is shared by all strengths."""
        steps = self.steps
        missing = [alpha for alpha in self.alphas if not self._done("paper", alpha=alpha)]
        if not missing:
            return
        generator, start = self._generator(), time.perf_counter()
        model = self._model(self._random(CANDIDATES), connected=True)
        training = LayerTraining(0.01)
        self._layerwise(model, training, steps.layerwise, generator)
        self._train(model, training, steps.pre, generator)
        seconds = time.perf_counter() - start
        for alpha in missing:
            schedule = DeepThreePhases(
                alpha, layerwise=0, pre=0, process=steps.process, post=steps.post
            )
            self._fit("paper", deepcopy(model), schedule, seconds, alpha=alpha)

    def fast(self) -> None:
        """The default schedule, as many updates in all as the paper's has."""
        for alpha in self.alphas:
            if not self._done("fast", alpha=alpha):
                pre, post, rounds = self.steps.fast
                schedule = DeepFast(
                    LayerAlphas(alpha),
                    layerwise=self.steps.layerwise,
                    pre=pre,
                    post=post,
                    rounds=rounds,
                )
                model = self._model(self._random(CANDIDATES), connected=False)
                self._fit("fast", model, schedule, 0.0, alpha=alpha)

    def fixed(self) -> None:
        """Random rows and k-means centres in the numbers that `fast` kept at α = 1."""
        chosen = self.runs.find(kind="fast", fold=self.fold.number, alpha=1.0)
        if not chosen:
            raise ValueError("run the kind `fast` first: it says how many points there are to be.")
        sizes = tuple(chosen[0]["sizes"])
        for start, points in (("random", self._random), ("kmeans", self._centres)):
            if not self._done("fixed", start=start):
                self._hold("fixed", sizes, points, start=start)

    def grid(self, *, part: int = 0, parts: int = 1) -> None:
        """Every combination of sizes; or one share of them, for several processes."""
        pairs = [(a, b) for a in GRID for b in GRID]
        for sizes in pairs[part::parts]:
            if not self._done("grid", sizes=list(sizes)):
                self._hold("grid", sizes, self._random, start="random")

    def _hold(
        self,
        kind: str,
        sizes: tuple[int, ...],
        points: Callable[[int], Tensor],
        *,
        start: str,
    ) -> None:
        """Train a model whose points nobody chose, for as many updates as `fast` has."""
        generator, began = self._generator(), time.perf_counter()
        model = self._model(points(max(sizes)), connected=False)
        masks = [
            torch.arange(layer.K, device=self.device) < size
            for layer, size in zip(model.layers, sizes, strict=True)
        ]
        model = model.prune(masks)
        training = LayerTraining(0.03, natural_rate=0.3)
        self._layerwise(model, training, self.steps.layerwise, generator)
        self._train(model, training, self.steps.fast[0], generator)
        cooled = LayerTraining(0.03, natural_rate=0.3, cooling=0.03)
        self._train(model, cooled, self.steps.fast[1], generator)
        bound = estimated_bound(model, self.fold.train, generator=generator)
        self._add(kind, model, bound, time.perf_counter() - began, start=start)

    def _fit(
        self,
        kind: str,
        model: DeepGP,
        schedule: DeepFast | DeepThreePhases,
        seconds: float,
        *,
        alpha: float,
    ) -> None:
        start = time.perf_counter()
        fitted: DeepFit = fit_deep(
            model, self.fold.train, schedule=schedule, generator=self._generator()
        )
        seconds += time.perf_counter() - start
        expected = [found.inclusion.sum().item() for found in fitted.selections]
        self._add(kind, fitted.model, fitted.bound, seconds, alpha=alpha, expected_sizes=expected)

    def _add(self, kind: str, model: DeepGP, bound: float, seconds: float, **settings: Any) -> None:
        assert isinstance(model.likelihood, GaussianLikelihood)
        row: Row = {
            "kind": kind,
            "fold": self.fold.number,
            **settings,
            "sizes": list(model.sizes),
            **self.fold.score(model),
            "elbo": bound / self.fold.train.N,
            "noise": model.likelihood.noise.item() * self.fold.scale**2,
            "seconds": seconds,
            "steps": asdict(self.steps),
            "device": self.device.type,
        }
        self.runs.add(row)

    def _done(self, kind: str, **settings: Any) -> bool:
        return bool(self.runs.find(kind=kind, fold=self.fold.number, **settings))

    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(self.fold.number)

    def _random(self, count: int) -> Float[Tensor, "K 8"]:
        order = torch.randperm(self.fold.train.N, generator=self._generator(), device=self.device)
        return self.fold.train.X[order[:count]]

    def _centres(self, count: int) -> Float[Tensor, "K 8"]:
        rows = self.fold.train.X.cpu().numpy()
        found = KMeans(count, n_init="auto", max_iter=50, random_state=self.fold.number).fit(rows)
        return torch.from_numpy(found.cluster_centers_).to(self.fold.train.X)

    def _model(self, points: Float[Tensor, "K 8"], *, connected: bool) -> DeepGP:
        def kernel(number: int, inputs: int) -> Kernel:
            made = kernel_from("rbf", inputs)
            if not connected:
                made.initialize(outputscale=0.1 if number == 0 else 1.0)
                made.initialize(**{"base_kernel.lengthscale": inputs**0.5})
            return made

        likelihood = GaussianLikelihood()
        likelihood.noise = torch.tensor(1.0 if connected else 0.1)
        layers = deep_layers(
            self.fold.train.X,
            points,
            kernel=kernel,
            widths=(8, 1),
            connected=connected,
            hidden_mean="zero" if connected else "identity",
        )
        return DeepGP(layers, likelihood=likelihood, connected=connected).to(self.device)

    def _layerwise(
        self, model: DeepGP, training: LayerTraining, steps: int, generator: torch.Generator
    ) -> None:
        train_layerwise(
            model,
            self.fold.train,
            training=training,
            steps=steps,
            batch_size=None,
            generator=generator,
            on_progress=deep_silent,
        )

    def _train(
        self, model: DeepGP, training: LayerTraining, steps: int, generator: torch.Generator
    ) -> None:
        training.run(
            model,
            Parts(self.fold.train, None, generator),
            "train",
            steps=steps,
            generator=generator,
            on_progress=deep_silent,
        )


def main() -> None:
    """Words typed by a person to runs."""
    parser = argparse.ArgumentParser(description="Figure 6: kin8nm, two layers.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--fold", nargs="+", type=int, default=list(range(FOLDS)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="0/1", help="share of the grid, such as 1/3")
    parser.add_argument("--steps", nargs=4, type=int, default=[200, 1000, 500, 1500])
    parser.add_argument("--share", type=float, default=0.5, help="of updates before the choice")
    parser.add_argument("--rounds", type=int, default=3, help="in which points are dropped")
    parser.add_argument("--alpha", nargs="+", type=float, default=list(ALPHAS))
    words = parser.parse_args()
    part, parts = (int(number) for number in words.part.split("/"))
    for number in words.fold:
        fold = Fold.of(number, words.device)
        steps = Steps(*words.steps, share=words.share, rounds=words.rounds)
        runs = Kin8nmDeep(Runs(words.results), fold, steps=steps, alphas=words.alpha)
        for kind in words.kind:
            if kind == "grid":
                runs.grid(part=part, parts=parts)
            else:
                {"paper": runs.paper, "fast": runs.fast, "fixed": runs.fixed}[kind]()


if __name__ == "__main__":
    main()
