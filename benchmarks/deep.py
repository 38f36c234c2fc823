"""The cost of a step of the point process of a deep GP, relative to an ordinary training step.

    python benchmarks/deep.py

Kin8nm, two layers of 150 candidates, minibatches of 4,096 of 7,000 rows, four subsets per step, one
thread. All subsets go through all layers in one batched pass, padded to the largest subset. The
ratio depends on how many candidates a draw includes, so it is measured at three inclusion
probabilities. Results are in benchmarks/results/deep.
"""

import argparse
from functools import partial

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood

from measure import Seconds, new_results, timed
from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.gradients import ScoreFunction
from winnowgp.models import DeepGP, deep_layers
from winnowgp.point_processes import Bernoulli

K, S, ROWS, BATCH, REPEATS = 150, 4, 7000, 4096, 8


def problem() -> tuple[DeepGP, Dataset]:
    """Return the model before training, and one minibatch."""
    table = load_table("kin8nm").dataset()
    X = Standardiser.of(table.X).forward(table.X)[:ROWS]
    Y = Standardiser.of(table.Y).forward(table.Y)[:ROWS]

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[:K], kernel=kernel, widths=(8, 1), q_scale=0.1)
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    return model, Dataset(X[:BATCH], Y[:BATCH])


def main() -> None:
    """Alternate ordinary steps and steps of the point process, and compare their CPU times."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(1)
    model, batch = problem()
    generator = torch.Generator().manual_seed(0)
    ordinary_optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

    def ordinary() -> None:
        ordinary_optimiser.zero_grad()
        (-model.bound(batch, total=ROWS, generator=generator)).backward()
        ordinary_optimiser.step()

    def process(logits: torch.Tensor, optimiser: torch.optim.Adam) -> None:
        optimiser.zero_grad()
        objective = model.subset_objective(batch, total=ROWS, generator=generator)
        gradient = ScoreFunction(S)
        step = gradient.step(
            Bernoulli(logits), objective.value, state=gradient.init(), generator=generator
        )
        (-step.surrogate).backward()
        optimiser.step()

    results = new_results("deep/process_step")
    ordinary()
    for inclusion in (0.3, 0.5, 0.95):
        start = torch.full((sum(model.sizes),), inclusion, dtype=torch.float64)
        logits = torch.nn.Parameter(torch.logit(start))
        optimiser = torch.optim.Adam([*model.parameters(), logits], lr=1e-4)
        process(logits, optimiser)
        process_time, ordinary_time = Seconds(0, 0), Seconds(0, 0)
        for _ in range(REPEATS):
            ordinary_time += timed(ordinary)[1]
            process_time += timed(partial(process, logits, optimiser))[1]
        ratio = process_time.cpu / (S * ordinary_time.cpu)
        results.add(
            {
                "inclusion": inclusion,
                "ordinary_cpu_s": ordinary_time.cpu / REPEATS,
                "process_cpu_s": process_time.cpu / REPEATS,
                "ratio": ratio,
            }
        )
        print(
            f"inclusion {inclusion}: a step of {S} subsets takes {process_time.cpu / REPEATS:.2f} "
            f"s, {ratio:.2f} times {S} ordinary steps of {ordinary_time.cpu / REPEATS:.2f} s"
        )


if __name__ == "__main__":
    main()
