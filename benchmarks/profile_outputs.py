import cProfile, pstats, signal, sys, time
from multi_output import speed, Runs, SPEED
import torch

device = sys.argv[1]
limit = int(sys.argv[2]) if len(sys.argv) > 2 else 470
from winnowgp.training import fast_multi_output as fm

t0 = time.time()


def stop(*_):
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, stop)
signal.alarm(limit)
for name in (
    "best_start",
    "grown",
    "frontier",
    "optimise",
    "hyperparameters",
    "best_of_size",
    "_maximise",
):

    def wrap(f, name=name):
        def g(self, *a, **k):
            if device == "cuda":
                torch.cuda.synchronize()
            t = time.time()
            try:
                return f(self, *a, **k)
            finally:
                if device == "cuda":
                    torch.cuda.synchronize()
                m = next((x for x in a if isinstance(x, fm.MultiOutputGP)), None)
                print(
                    f"{time.time() - t0:7.1f} {name} {time.time() - t:6.2f}s K={getattr(m, 'K', None)} budget={self.budget.remaining:.2e}",
                    flush=True,
                )

        return g

    setattr(fm._Steps, name, wrap(getattr(fm._Steps, name)))
old = fm.learn_inclusion


def li(*a, **k):
    t = time.time()
    r = old(*a, **k)
    if device == "cuda":
        torch.cuda.synchronize()
    print("learn_inclusion", time.time() - t, flush=True)
    return r


fm.learn_inclusion = li
p = cProfile.Profile()
try:
    p.enable()
    row = speed(device)
    p.disable()
    print(row)
    Runs(SPEED).add(row)
except KeyboardInterrupt:
    p.disable()
    print("stopped after", time.time() - t0)
pstats.Stats(p).sort_stats("cumulative").print_stats(60)
pstats.Stats(p).sort_stats("tottime").print_stats(40)
