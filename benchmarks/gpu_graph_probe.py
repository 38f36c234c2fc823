"""Time of a step on a GPU: profile, and whether its operations can be captured in a CUDA graph."""
import sys, time, torch
sys.path.insert(0, "benchmarks")
import deep_curves as dc
from measure import RESULTS
out = open(RESULTS / "deep" / "probe.txt", "w")
def say(*a):
    print(*a, file=out, flush=True); print(*a, flush=True)
say(torch.__version__, torch.cuda.get_device_name())
def t(f, n=20):
    f(); torch.cuda.synchronize(); s = time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return 1e3 * (time.perf_counter() - s) / n
for dt in (torch.float64, torch.float32):
    for M in (128, 512, 1024, 2048):
        Z = torch.randn(M, 8, device="cuda", dtype=dt); K = torch.exp(-0.5*torch.cdist(Z, Z)**2) + 1e-3*torch.eye(M, device="cuda", dtype=dt)
        L = torch.linalg.cholesky(K); B = torch.randn(M, 4096, device="cuda", dtype=dt); F = torch.randn(8*M, M, device="cuda", dtype=dt)
        say(dt, M, "chol", t(lambda: torch.linalg.cholesky_ex(K)), "trsm", t(lambda: torch.linalg.solve_triangular(L.mT, B.mT, upper=True, left=False)), "trsm left", t(lambda: torch.linalg.solve_triangular(L, B, upper=False)),
            "inv", t(lambda: torch.linalg.solve_triangular(L, torch.eye(M, device="cuda", dtype=dt), upper=False)), "gemm8", t(lambda: F @ B))
from torch.profiler import profile, ProfilerActivity
from winnowgp.training.adam import Minibatches
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context
from winnowgp.data import Dataset
for sizes, batch in (((100, 100), 1024), ((512, 1024), 4096), ((512, 512, 1024), 4096)):
    s = {**dc.DEFAULTS, "sizes": sizes}
    X = torch.randn(36000, 8, dtype=torch.float64); y = torch.sin(X.sum(1, keepdim=True))
    m = dc.initial_model(X, s, torch.Generator().manual_seed(0)).cuda()
    g = torch.Generator(device="cuda").manual_seed(0)
    with training_context(None, generator=g, callbacks=()) as c:
        b = Minibatches(Dataset(X, y).to("cuda"), batch, g); tr = LayerTraining(0.01, 1, 0.1, None)
        tr.run(m, b, "x", steps=10, context=c)
        torch.cuda.synchronize(); a = time.perf_counter(); tr.run(m, b, "x", steps=30, context=c); torch.cuda.synchronize()
        say(sizes, batch, "ms/step", 1e3*(time.perf_counter()-a)/30)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
            tr.run(m, b, "x", steps=10, context=c); torch.cuda.synchronize()
    say(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))
try:
    K = torch.eye(128, device="cuda", dtype=torch.float64).repeat(1, 1).requires_grad_(); B = torch.randn(128, 512, device="cuda", dtype=torch.float64)
    def f():
        L = torch.linalg.cholesky_ex(K)[0]; V = torch.linalg.solve_triangular(L.mT, B.mT, upper=True, left=False).mT
        v = V.square().sum(); (gr,) = torch.autograd.grad(v, K); return v, gr
    st = torch.cuda.Stream(); st.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(st):
        for _ in range(3): f()
    torch.cuda.current_stream().wait_stream(st)
    gph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gph): o = f()
    gph.replay(); torch.cuda.synchronize(); say("graph ok", o[0].item(), "ms", t(gph.replay), "eager ms", t(f))
except Exception as e:
    say("graph failed", repr(e)[:500])
