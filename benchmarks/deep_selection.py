"""Deep GPs: does the allocation of inducing points to two layers improve by swaps or joint flips?

    python benchmarks/deep_selection.py swaps
    python benchmarks/deep_selection.py flips
    python benchmarks/deep_selection.py summary

All candidates of a small model are trained, and backward elimination by sites selects the points of
both layers at once, weighted by the cost of predictions. `swaps` moves points from one layer to the
other at equal cost, along the frontiers of both layers. `flips` learns the inclusion probabilities
of all layers jointly instead, by natural updates with the true marginal gain of every candidate
(the ELBO with and without it, the same samples), under the same prior. All sets are compared by the
ELBO before and after the same further training. Results are in benchmarks/results/deep.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from deep_curves import DEFAULTS, initial_model, scores
from measure import RESULTS, Row, parser_of, table, timed
from right_number_problems import split_table
from winnowgp.data import Dataset
from winnowgp.experiments.runs import Runs
from winnowgp.models.deep_gp import prediction_prices, seeded_elbo
from winnowgp.models.deep_sites import deep_sites
from winnowgp.selection import elimination_frontier
from winnowgp.training.adam import Minibatches
from winnowgp.training.fast_deep import pruned_model
from winnowgp.training.goals import Tolerance
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

ROWS, K, SAMPLES = 1500, 40, 64
PRE, POST = 500, 200
TOLERANCES = (0.02, 0.1)
# Factors of the number of points in the first layer.
SHIFTS = (0.6, 0.8, 1.0, 1.25)
# Joint flips: updates, rows that marginal gains are computed with, and the weight of an update.
UPDATES, FLIP_ROWS, RATE = 60, 500, 0.3
RUNS = Runs(RESULTS / "deep" / "selection.jsonl")


@final
class Selections:
    """A trained two-layer model, and the frontiers of its layers."""

    def __init__(self, name: str, seed: int) -> None:
        rows = split_table(name, seed=seed, train=ROWS).standardised()
        self.train = Dataset(torch.tensor(rows.X), torch.tensor(rows.y)[:, None])
        self.test = Dataset(torch.tensor(rows.X_test), torch.tensor(rows.y_test)[:, None])
        self.identity = {"table": name, "seed": seed}
        self.generator = torch.Generator().manual_seed(seed)
        settings = {**DEFAULTS, "width": None, "sizes": (K, K)}
        self.model = initial_model(self.train.X, settings, self.generator)
        self.fit(self.model, PRE)
        self.reference = self.elbo(self.model)
        self.prices = prediction_prices(self.model.layers, (K, K), samples=SAMPLES)

    def fit(self, model, steps: int) -> None:
        """Train a model, in place."""
        training = LayerTraining(0.03, natural_rate=0.3, cooling=0.03)
        with training_context(None, generator=self.generator, callbacks=()) as context:
            batches = Minibatches(self.train, 1024, self.generator)
            training.run(model, batches, "all", steps=steps, context=context)

    def elbo(self, model) -> float:
        """Return the ELBO per observation, with the same samples for every model."""
        return seeded_elbo(model, self.train, self.generator, seed=1) / self.train.N

    @cached_property
    def sites(self):
        eps = self.model.base_samples(self.train.N, 8, self.generator)
        return deep_sites(self.model, self.train, eps=eps)

    @cached_property
    def frontiers(self):
        total = self.reference * self.train.N
        pairs = zip(self.model.layers, self.sites, strict=True)
        return [
            elimination_frontier(each.statistics(layer, bound=total, N=self.train.N))
            for layer, each in pairs
        ]

    def cost(self, masks: Sequence[Tensor]) -> float:
        """Return the cost of a prediction, relative to that of one point in every layer."""
        pairs = zip(self.prices, masks, strict=True)
        return sum(price * int(mask.sum()) ** 2 for price, mask in pairs)

    def add(self, kind: str, tolerance: float, masks: Sequence[Tensor], **more: object) -> None:
        """Prune, train, and write a row."""
        model = pruned_model(self.model, self.train, self.sites, masks, self.generator)
        before = self.elbo(model)
        self.fit(model, POST)
        row = {**self.identity, "kind": kind, "tolerance": tolerance, "sizes": list(model.sizes)}
        row |= {"cost": self.cost(masks), "gap": self.reference - before}
        row |= {"trained_gap": self.reference - self.elbo(model), **scores(model, self.test)}
        print(RUNS.add({**row, **more})["kind"], {k: row[k] for k in COLUMNS[3:]}, flush=True)

    def selected(self, tolerance: float) -> tuple[tuple[float, ...], list[Tensor]]:
        """Return the strengths of the prior, and the sets that elimination selects."""
        alphas = Tolerance(tolerance).alphas(self.frontiers, self.prices)
        pairs = zip(self.frontiers, alphas, strict=True)
        return alphas, [frontier.best_for_alpha(alpha).mask for frontier, alpha in pairs]

    def swap(self, tolerance: float) -> None:
        """Compare allocations of the same cost."""
        _, masks = self.selected(tolerance)
        cost, first = self.cost(masks), int(masks[0].sum())
        done = set[tuple[int, int]]()
        for shift in SHIFTS:
            M = min(round(shift * first), K)
            rest = max(cost - self.prices[0] * M**2, self.prices[1]) / self.prices[1]
            sizes = M, min(round(rest**0.5), K)
            if sizes not in done:
                pairs = zip(self.frontiers, sizes, strict=True)
                moved = [frontier.masks[size] for frontier, size in pairs]
                self.add("elimination" if shift == 1 else "swaps", tolerance, moved)
            done.add(sizes)

    def flip(self, tolerance: float) -> None:
        """Compare with sets from joint natural updates, from all points and from the selected."""
        alphas, masks = self.selected(tolerance)
        self.add("elimination", tolerance, masks)
        for start in ("all", "selected"):
            initial = torch.cat([torch.full((K,), 0.9)] * 2) if start == "all" else None
            if initial is None:
                initial = torch.cat(masks).double() * 0.8 + 0.1
            inclusion, seconds = timed(lambda initial=initial: self.inclusion(initial, alphas))
            chosen = [(each > 0.5) for each in inclusion.split(K)]
            for each, mask in zip(chosen, masks, strict=True):
                if not each.any():
                    each |= mask
            self.add(f"joint flips from {start}", tolerance, chosen, **seconds.row())

    @torch.no_grad()
    def inclusion(self, initial: Tensor, alphas: Sequence[float]) -> Tensor:
        """Return inclusion probabilities of all layers after joint natural updates."""
        logits, alpha = torch.logit(initial.double()), torch.tensor(alphas).repeat_interleave(K)
        for _ in range(UPDATES):
            order = torch.randperm(self.train.N, generator=self.generator)[:FLIP_ROWS]
            objective = self.model.subset_objective(
                self.train.part(order), total=self.train.N, generator=self.generator
            )
            inclusion = logits.sigmoid()
            mask = torch.rand(2 * K, generator=self.generator, dtype=torch.float64) < inclusion
            mask[0] |= not mask[:K].any()
            mask[K] |= not mask[K:].any()
            flipped = mask.repeat(2 * K, 1) ^ torch.eye(2 * K, dtype=torch.bool)
            values = torch.cat([objective.value(part) for part in flipped.split(20)])
            gains = torch.where(mask, 1, -1) * (objective.value(mask[None]) - values)
            counts = torch.cat([each.sum().expand(K) for each in inclusion.split(K)]) - inclusion
            logits = (1 - RATE) * logits + RATE * (gains - alpha * (1 + 2 * counts))
            logits = logits.clamp(-20, 20)
        return logits.sigmoid()


COLUMNS = ("table", "seed", "kind", "tolerance", "sizes", "cost", "gap", "trained_gap")
COLUMNS = (*COLUMNS, "standardised_log_density")


def summary() -> str:
    """Return a table of all rows."""

    def cells(row: Row) -> tuple[object, ...]:
        values = (row[name] for name in COLUMNS)
        return tuple(f"{v:.4f}" if isinstance(v, float) else str(v) for v in values)

    return table(COLUMNS, [cells(row) for row in RUNS])


def main() -> None:
    parser = parser_of(__doc__, seeds=(0, 1))
    parser.add_argument("what", choices=("swaps", "flips", "summary"))
    parser.add_argument("--tables", nargs="+", default=["kin8nm"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what != "summary":
        for seed in given.seeds:
            for name in given.tables:
                model = Selections(name, seed)
                for tolerance in TOLERANCES:
                    (model.swap if given.what == "swaps" else model.flip)(tolerance)
    print(summary())


if __name__ == "__main__":
    main()
