"""Deep GPs: how is a model best trained on after points have been removed?

    python benchmarks/deep_continuation.py kin8nm --device cuda --seeds 0 1
    python benchmarks/deep_continuation.py kin40k --device cuda --seeds 0 1
    python benchmarks/deep_continuation.py summary

Two layers with 150 candidates each are trained for 3,000 updates, in which the last layer loses
some points, and are then pruned to one or two smaller allocations after one another, each with
1,500 updates:

- `at once`: all points are removed in one step, as `DeepGPRegressor` does for its smaller models.
- `refined`: and q(u) of every layer then takes natural-gradient steps to its optimum for the
  layer's sites, in turns, as long as the ELBO rises.
- `gradual`: points are removed in four rounds, each with refined q(u), and a tenth of the updates
  between them.
- `early`: a model of its own for each allocation; points are removed in four rounds in the first
  fifth of all updates, whose learning rate is constant, and all others follow.
- `kmeans`: as many k-means centres of the inputs, and as many updates in all.

The splits are those on which settings are chosen. Results are in
benchmarks/results/deep/continuation.jsonl. Its rows without `versions` were written by a script
that this one was made from, with the same steps, and were renamed; this script has not been run
since.
"""

from collections.abc import Sequence
from math import log
from typing import final

import torch

from deep_curves import DEFAULTS, initial_model, scores
from deep_frontier import CANDIDATES, ROWS, UPDATES, Split
from measure import RESULTS, Row, grouped, parser_of, table
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.experiments.deep import STARTS
from winnowgp.experiments.runs import Runs
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import seeded_elbo
from winnowgp.models.deep_sites import deep_sites
from winnowgp.selection import elimination_frontier
from winnowgp.training.adam import Minibatches
from winnowgp.training.fast_deep import pruned_model
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import draw_seed, training_context

RUNS = Runs(RESULTS / "deep" / "continuation.jsonl")
SIZES = {"kin8nm": ((112, 52), (70, 22)), "kin40k": ((140, 90),)}
CHAINS, EACH, ROUNDS = ("at once", "gradual", "refined"), UPDATES // 2, 4
# Turns of refinement, shortened steps of each, and the gain in nats per observation that ends it.
TURNS, SHORTENED, LEAST = 5, 4, 1e-3


@final
class Continuation:
    """The models of one split."""

    def __init__(self, name: str, seed: int, device: str) -> None:
        self.split, self.seed = Split(name, seed, device), seed
        self.train, self.sizes = self.split.train, SIZES[name]
        self.generator = torch.Generator(device).manual_seed(seed)

    def start(self, sizes: tuple[int, ...], start: str) -> DeepGP:
        """Return an initial model, whose hidden layer is the identity."""
        X = self.train.X
        settings = {**DEFAULTS, "sizes": sizes}
        model = initial_model(X.cpu(), settings, torch.Generator().manual_seed(self.seed))
        model = model.to(X.device)
        with torch.no_grad():
            for layer in model.layers:
                layer.candidates.copy_(STARTS[start](X, layer.K, self.generator))
        return model

    def fit(self, model: DeepGP, steps: int, *, cooling: float = 0.03) -> None:
        """Train a model, in place."""
        with training_context(None, generator=self.generator, callbacks=()) as context:
            batches = Minibatches(self.train, ROWS, self.generator)
            training = LayerTraining(0.03, 1, 0.3, cooling=cooling)
            training.run(model, batches, "all", steps=steps, context=context)

    def elbo(self, model: DeepGP, seed: int = 7) -> float:
        return seeded_elbo(model, self.train, self.generator, seed=seed)

    def sites(self, model: DeepGP):
        samples = max(1, min(16, 65_536 // self.train.N))
        eps = model.base_samples(self.train.N, samples, self.generator)
        return deep_sites(model, self.train, eps=eps)

    def pruned(self, model: DeepGP, sizes: Sequence[int]) -> DeepGP:
        """Return the model with so many points in every layer, by backward elimination."""
        sites, total = self.sites(model), self.elbo(model)
        masks = [
            elimination_frontier(each.statistics(layer, bound=total, N=self.train.N)).masks[size]
            for each, layer, size in zip(sites, model.layers, sizes, strict=True)
        ]
        return pruned_model(model, self.train, sites, masks, self.generator)

    def refined(self, model: DeepGP, turns: int = TURNS) -> DeepGP:
        """Return the model after natural-gradient steps of q(u) that raise the ELBO, in turns."""
        seed = draw_seed(self.generator)
        best, rates = self.elbo(model, seed), [1.0] * len(model.layers)
        for _ in range(turns):
            before = best
            for number in reversed(range(len(rates))):
                sites, rate, layers = self.sites(model)[number], rates[number], list(model.layers)
                for _ in range(SHORTENED):
                    try:
                        layers[number] = sites.improved(model.layers[number], rate=rate)
                        other = model.with_layers(layers)
                        elbo = self.elbo(other, seed)
                    except NotPositiveDefiniteError:
                        other, elbo = model, best
                    if elbo > best:
                        model, best = other, elbo
                        break
                    rate *= 0.3
                rates[number] = min(1.0, 2 * rate)
            if best - before < LEAST * self.train.N:
                break
        return model

    def chain(self, kind: str, model: DeepGP) -> None:
        """Prune a trained model to all sizes, one after another."""
        for number, sizes in enumerate(self.sizes, start=1):
            steps, before = EACH, list(model.sizes)
            for share in [(i + 1) / ROUNDS for i in range(ROUNDS)] if kind == "gradual" else [1.0]:
                model = self.pruned(model, between(before, sizes, share))
                if kind != "at once":
                    model = self.refined(model, 3 if kind == "gradual" else TURNS)
                if share < 1:
                    self.fit(model, EACH // 10, cooling=1.0)
                    steps -= EACH // 10
            self.fit(model, steps)
            self.write(kind, model, UPDATES + number * EACH)

    def run(self) -> None:
        """Train all models."""
        all_points = (CANDIDATES,) * 2
        base = self.start(all_points, "random")
        self.fit(base, UPDATES // 2)
        for share in (1 / 3, 2 / 3, 1.0):
            last = CANDIDATES, self.sizes[0][1] + 20
            base = self.pruned(base, between(all_points, last, share))
            self.fit(base, UPDATES // 6)
        self.write("before", base, UPDATES)
        for kind in CHAINS:
            self.chain(kind, base)
        for number, sizes in enumerate(self.sizes, start=1):
            updates = UPDATES + number * EACH
            model = self.start(sizes, "kmeans")
            self.fit(model, updates)
            self.write("kmeans", model, updates)
            model, steps = self.start(all_points, "random"), updates // 5 // ROUNDS
            for share in range(1, ROUNDS + 1):
                self.fit(model, steps, cooling=1.0)
                model = self.pruned(model, between(all_points, sizes, share / ROUNDS))
            self.fit(model, updates - ROUNDS * steps)
            self.write("early", model, updates)

    def write(self, kind: str, model: DeepGP, updates: int) -> None:
        nats = scores(model, self.split.test)["standardised_log_density"]
        row: Row = {"table": self.split.table, "seed": self.seed, "kind": kind}
        row |= {"sizes": list(model.sizes), "updates": updates}
        row |= {"elbo": self.elbo(model, 5) / self.train.N}
        row["log_density"] = nats - log(self.split.problem.scale)
        print(RUNS.add(row), flush=True)


def between(larger: Sequence[int], smaller: Sequence[int], share: float) -> tuple[int, ...]:
    """Return sizes on the geometric path from larger to smaller ones.

    >>> between((100, 64), (25, 16), 0.5)
    (50, 32)
    """
    pairs = zip(larger, smaller, strict=True)
    return tuple(round(a ** (1 - share) * b**share) for a, b in pairs)


def summary() -> str:
    """Return a table of all rows, and the gain over k-means centres."""
    lines = []
    for (name, seed, updates), group in grouped(list(RUNS), "table", "seed", "updates").items():
        other = {row["kind"]: row for row in group}.get("kmeans")
        for row in group:
            gain = "" if other is None else f"{row['log_density'] - other['log_density']:+.4f}"
            numbers = f"{row['elbo']:.4f}", f"{row['log_density']:.4f}", gain
            lines.append((name, seed, updates, row["kind"], row["sizes"], *numbers))
    header = ("table", "seed", "updates", "kind", "sizes", "ELBO", "log density", "over k-means")
    return table(header, lines)


def main() -> None:
    parser = parser_of(__doc__, seeds=(0, 1))
    parser.add_argument("what", choices=(*SIZES, "summary"))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what != "summary":
        for seed in given.seeds:
            Continuation(given.what, seed, given.device).run()
    print(summary())


if __name__ == "__main__":
    main()
