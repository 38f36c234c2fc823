"""Models of one data set that differ in their points: so many set by hand, or chosen."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.estimators import kernel_from
from winnowgp.experiments.runs import Row
from winnowgp.models import SparseGP
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.training import Adam, Fast, Fit, FixedAlpha, Goal, ThreePhases, Tolerance, fit

LEARNING_RATE = 0.01
"""Of Adam on everything but λ."""


def standardised(data: Dataset, device: str) -> Dataset:
    """Columns of mean zero and unit variance, on a device."""
    X, Y = (Standardiser.of(A).forward(A).to(device) for A in (data.X, data.Y))
    return Dataset(X, Y)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a procedure settled on."""

    expected: float
    """E|Z|, the expected number of points under its process."""
    models: list[SparseGP]
    """Of the sets that it keeps: draws from the process, or the one set that a search found."""


@final
@dataclass(frozen=True, slots=True)
class SizeStudy:
    """The paper's model of some rows (appendix C): RBF-ARD, every hyper-parameter starts at 1.

    Candidates are random rows, and a smaller number of points set by hand is the beginning of a
    larger one.

    Args:
        data: standardised.
        seed: of the rows that points start at, and of all that is drawn later.
    """

    data: Dataset
    seed: int

    def run(self, settings: Row) -> tuple[list[SparseGP], Row]:
        """Models of one run, and what there is to say of the choice behind them, if any.

        Args:
            settings: `kind`, and what that kind needs: `fixed` has `sizes`, `updates` and a
                `learning_rate`; `paper` that, `candidates`, `alpha`, `steps` and `draws`;
                `fast` `candidates` and `alpha`; `auto` a `tolerance` and, unless it picks its
                own, `candidates`.
        """
        if settings["kind"] == "fixed":
            how = {"steps": settings["updates"], "learning_rate": settings["learning_rate"]}
            return [self.by_hand(M, **how) for M in settings["sizes"]], {}
        chosen = self._chosen(settings)
        kept = [model.K for model in chosen.models]
        return chosen.models, {"expected": round(chosen.expected, 2), "kept": kept}

    def _chosen(self, settings: Row) -> Chosen:
        K = settings.get("candidates", 0)
        if settings["kind"] == "auto":
            return self.by_search(K, goal=Tolerance(settings["tolerance"]))
        alpha = settings["alpha"]
        if settings["kind"] == "fast":
            return self.by_search(K, goal=FixedAlpha(alpha))
        names = ("steps", "draws", "learning_rate")
        return self.by_paper(K, alpha=alpha, **{name: settings[name] for name in names})

    def by_hand(self, M: int, *, steps: int, learning_rate: float = LEARNING_RATE) -> SparseGP:
        """M points that nobody chose, trained by Adam."""
        model = self._model(M)
        self._train(model, steps, learning_rate)
        return model

    def by_paper(
        self,
        K: int,
        *,
        alpha: float,
        steps: Row,
        draws: int,
        learning_rate: float = LEARNING_RATE,
    ) -> Chosen:
        """The paper's three phases, the last of them for each of several draws from q(Z).

        Args:
            K: candidates.
            steps: numbers of updates, `pre`, `process` and `post`.
        """
        generator, model = self._generator(), self._model(K)
        self._train(model, steps["pre"], learning_rate)
        schedule = ThreePhases(
            SquaredCardinality(K, alpha),
            pre=0,
            process=steps["process"],
            post=0,
            learning_rate=learning_rate,
        )
        fitted = fit(model, self.data, schedule=schedule, generator=generator)
        q = Bernoulli.from_inclusion(fitted.selection.inclusion)
        kept = [
            fitted.model.with_candidates(fitted.candidates[mask])
            for mask in q.sample(draws, generator=generator)
        ]
        for one in kept:
            self._train(one, steps["post"], learning_rate)
        return Chosen(q.mean_count().item(), kept)

    def by_search(self, K: int, *, goal: Goal) -> Chosen:
        """The fast schedule among the same random rows, or among those it picks if K = 0."""
        schedule = Fast(goal, n_candidates=K) if K else Fast(goal)
        found: Fit[SparseGP] = fit(
            self._model(K), self.data, schedule=schedule, generator=self._generator()
        )
        return Chosen(found.selection.inclusion.sum().item(), [found.model])

    def _model(self, count: int) -> SparseGP:
        return SparseGP(kernel_from("rbf", self.data.D), self._rows(count))

    def _rows(self, count: int) -> Float[Tensor, "K D"]:
        # Drawn where every device draws the same.
        order = torch.randperm(self.data.N, generator=torch.Generator().manual_seed(self.seed))
        return self.data.X[order[:count].to(self.data.X.device)]

    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def _train(self, model: SparseGP, steps: int, learning_rate: float) -> None:
        """Adam on the ordinary bound."""
        # Chunks are several times quicker on a CPU; a GPU waits for each, and has the memory.
        whole = self.data.X.device.type != "cpu"
        objective = model.chunked_bound(self.data)
        Adam(steps).maximise(
            (lambda: model.bound(self.data)) if whole else objective,
            [(model.parameters(), learning_rate)],
            scale=self.data.N,
            on_step=lambda step, value: None,
        )
