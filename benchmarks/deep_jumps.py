"""Deep GPs on a square wave: what do models of the same sizes differ by?

    python benchmarks/deep_jumps.py --seeds 0 1 2 3 4
    python benchmarks/deep_jumps.py --summary

Three layers whose inducing points are selected (α = 0.5), random rows or k-means centres, after
as many updates, as in `winnow reproduce square-wave`. Besides the test log density of all rows
there is that of the rows that are not next to a jump, and the number of training rows that the mean
misses by more than half of the jump: the noise is learnt, so that a single missed row of 200
doubles it and lowers the density of all others. `--rounds` is the number of rounds in which points
are removed. Rows that exist already are not run again. Results are in
benchmarks/results/deep/jumps.jsonl.
"""

from statistics import fmean, stdev

import torch

from measure import RESULTS, Row, grouped, parser_of, run_missing, table, timed
from winnowgp.experiments.base import Scope
from winnowgp.experiments.deep import STARTS
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.square_wave import SquareWave, square_wave, train_square_wave
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.initialization import noise_of

# The mean misses a row if it is further away than this; the jumps are twice as high.
MISSED = 1.0
KEYS = ("seed", "rounds")


def compare(seed: int, rounds: int) -> Row:
    """Train the selected model and both others of a seed."""
    torch.set_num_threads(1)
    row: Row = {"seed": seed, "rounds": rounds}
    fast = [each for each in SquareWave().settings(Scope(), []) if each["kind"] == "fast"]
    selected = {**fast[0], "seed": seed, "rounds": rounds}
    model, seconds = timed(lambda: _trained(selected))
    row |= {"sizes": list(model.sizes), "selected": {**_scores(model, seed), **seconds.row()}}
    for start in STARTS:
        settings = {**selected, "kind": start, "sizes": list(model.sizes)}
        other, seconds = timed(lambda settings=settings: _trained(settings))
        row[start] = {**_scores(other, seed), **seconds.row()}
    return row


def _trained(settings: Row) -> DeepGP:
    generator = torch.Generator().manual_seed(settings["seed"])
    return train_square_wave(settings, square_wave(seed=settings["seed"]), generator)


@torch.no_grad()
def _scores(model: DeepGP, seed: int) -> Row:
    data, test = square_wave(seed=seed), square_wave(seed=seed + 1000)
    posterior = model.posterior(samples=100)
    nats = posterior.log_density(test.X, test.Y)[:, 0]
    level = data.Y[:, 0].sign()
    jump = level[1:] != level[:-1]
    none = torch.zeros(1, dtype=torch.bool)
    beside = torch.cat([jump, none]) | torch.cat([none, jump])
    missed = (posterior.predict(data.X).mean - data.Y).abs() > MISSED
    noise = noise_of(model.likelihood)
    assert noise is not None
    elbo = estimate_elbo(model, data, generator=torch.Generator().manual_seed(seed), samples=32)
    return {
        "elbo": elbo / data.N,
        "log_density": nats.mean().item(),
        "log_density_between": nats[~beside].mean().item(),
        "missed": int(missed.sum()),
        "noise": noise.value.item(),
    }


def summary(rows: list[Row]) -> str:
    """Return a line for each run, and the paired gains of selected points."""
    lines, kinds = [], ("selected", *STARTS)
    for row in sorted(rows, key=lambda r: (r["rounds"], r["seed"])):
        cells = [
            f"{row[kind]['log_density']:.3f} · {row[kind]['missed']} missed · "
            f"{row[kind]['log_density_between']:.3f}"
            for kind in kinds
        ]
        lines.append((row["rounds"], row["seed"], row["sizes"], *cells))
    texts = [table(("rounds", "seed", "sizes", *kinds), lines)]
    for (rounds,), group in grouped(rows, "rounds").items():
        for start in STARTS:
            for name in ("elbo", "log_density", "log_density_between"):
                gains = [row["selected"][name] - row[start][name] for row in group]
                error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
                texts.append(
                    f"{rounds} rounds, against {start}, {name}: {fmean(gains):+.4f} ± {error:.4f}"
                )
        missed = {kind: sum(row[kind]["missed"] > 0 for row in group) for kind in kinds}
        texts.append(f"{rounds} rounds, seeds with a missed row of {len(group)}: {missed}")
    return "\n".join(texts)


def main() -> None:
    parser = parser_of(__doc__, seeds=range(15), file=RESULTS / "deep" / "jumps.jsonl")
    parser.add_argument("--rounds", type=int, nargs="+", default=[3])
    given = parser.parse_args()
    runs = Runs(given.file)
    if not given.summary:
        cases = [(seed, rounds) for seed in given.seeds for rounds in given.rounds]
        for row in run_missing(runs, compare, cases, keys=KEYS, jobs=given.jobs):
            print({name: row[name] for name in (*KEYS, "sizes")}, flush=True)
    print(summary(list(runs)))


if __name__ == "__main__":
    main()
