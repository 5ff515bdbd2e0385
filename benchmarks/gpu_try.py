"""Temporary: correctness over many formats, then timings."""
import sys, time, traceback
sys.path[:0] = ["src", "tests/ops"]
import torch, numpy as np
from cuda_cases import Case, build, relative_error
from kvbits.spec import *
from kvbits.ops.attend_pages import cuda, reference
from kvbits.ops.attend_pages.cuda_format import Shape
Q = QuantSpec
dev = torch.device("cuda")
def S(f, g=PerGroup(64), **k): return Q(format=f, granularity=g, **k)
R = Q.raw()
t, c = PerToken(), PerChannel()
L = (1000, 64, 0, 333, 2500)
cases = [Case(key=R, value=R, lengths=L)]
for f in ("int8", "int4", "int2", "int3", "fp8_e4m3", "fp8_e5m2"):
    cases.append(Case(key=S(f), value=S(f), lengths=L, tail=64, sinks=4))
    cases.append(Case(key=S(f, t), value=S(f, t), lengths=L))
    cases.append(Case(key=S(f, c), value=S(f, c), lengths=L))
    if f.startswith("int"):
        cases.append(Case(key=S(f, PerGroup(32), symmetric=False), value=S(f, PerGroup(32), symmetric=False), lengths=L, group=8))
        cases.append(Case(key=S(f, c, symmetric=False), value=S(f, t, symmetric=False), lengths=L, tail=20, magnitude=50.0))
        cases.append(Case(key=S(f, center="channel"), value=S(f, center="channel"), lengths=L, tail=20, magnitude=1e-3))
        cases.append(Case(key=S(f, c, symmetric=False), value=S(f, c, symmetric=False), lengths=L))
        cases.append(Case(key=S(f, c, static=True), value=S(f, c, static=True), lengths=L))
        cases.append(Case(key=S(f, c, static=True, symmetric=False), value=S(f, PerGroup(64), static=True, symmetric=False), lengths=L, tail=20))
        cases.append(Case(key=S(f, scale_dtype="float32"), value=S(f, scale_dtype="bfloat16"), lengths=L))
for f in ("int8", "int4", "int2"):
    for d in (64, 80, 96, 256):
        g = PerGroup(d // 2) if d in (64, 256) else t
        cases.append(Case(key=S(f, g), value=S(f, g), lengths=(1000, 70), head_dim=d, tail=20))
    for grp in (1, 2, 8, 16, 12):
        cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), group=grp, tail=20, dtype=torch.float16))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), window=300, tail=20))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), crop=13))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), softcap=20.0, tail=20))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), page_size=256, tail=20))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), page_size=32, tail=20))
    cases.append(Case(key=S(f), value=S(f), lengths=(1000, 70), num_queries=5, tail=20, group=3, window=500))
cases.append(Case(key=S("int8"), value=S("int4"), lengths=L))
cases.append(Case(key=S("int4", c, symmetric=False), value=S("int2", PerGroup(32), symmetric=False), lengths=L))
cases.append(Case(key=R, value=R, lengths=L, head_dim=80, window=100, sinks=4))
cases.append(Case(key=R, value=R, lengths=L, head_dim=256, group=16, dtype=torch.float16))

def want_kernels(shapes):
    from kvbits.ops.attend_pages.cuda_format import columns, kernel_for
    from kvbits.ops.attend_pages.cuda import DTYPES
    found = {}
    for case in cases:
        lay = PageLayout(key=case.key, value=case.value, page_size=case.page_size, num_kv_heads=case.heads, head_dim=case.head_dim, raw_dtype=case.raw_dtype)
        p = [] if case.key.is_raw else [lay]
        found[kernel_for(p[0] if p else None, case.head_dim, columns(case.head_dim, case.group * case.num_queries, p), DTYPES[case.dtype], case.raw_dtype, case.softcap is not None, 232448, None)] = 1
    for f, ss in shapes.items():
        for s in ss:
            lay = PageLayout(key=S(f), value=S(f), page_size=64, num_kv_heads=8, head_dim=128)
            found[kernel_for(lay, 128, 8, "bfloat16", "bfloat16", False, 232448, s)] = 1
    return list(found)

def prebuild(shapes):
    import concurrent.futures as cf
    from pathlib import Path
    from kvbits.ops.cuda.compile import compile_source
    t0 = time.time()
    ks = want_kernels(shapes)
    def one(k):
        r = compile_source(Path(cuda.__file__).parent, "attend.cu", dict(k.defines), "sm_90").resources("attend")
        return r.spill_bytes
    with cf.ThreadPoolExecutor(16) as ex:
        sp = list(ex.map(one, ks))
    print(f"built {len(ks)} in {time.time()-t0:.0f}s, with spills: {sum(x > 0 for x in sp)}", flush=True)

def check():
    bad = 0; worst = {}
    t0 = time.time()
    for case in cases:
        try:
            call, q, strides = build(case, dev)
            plan = cuda.Plan(call, q.shape[2], q.dtype, dev, num_queries=case.num_queries)
            plan.out.fill_(float("nan")); plan.lse.fill_(float("nan"))
            pos = plan.q_positions.long().cpu()
            out, lse = plan.run(q)
            torch.cuda.synchronize()
            out1 = out.clone(); plan.out.fill_(float("nan")); plan.run(q); torch.cuda.synchronize()
            again = bool(torch.equal(out1, plan.out))
            want, wlse = reference.attend(q, call, pos, torch.float64)
            e = relative_error(out1, want)
            fin = torch.isfinite(wlse)
            le = float(((lse.double() - wlse.to(lse.device)).abs() / (1 + 0.02 * wlse.abs()))[fin].max())
            ok = e < 5e-3 and le < 2e-2 and bool((torch.isfinite(lse) == fin).all())
            if not ok: bad += 1
            if not ok or not again or case in cases[:3]:
                print("OK " if ok else "BAD", f"{e:.1e} lse {le:.1e} same={again}", case, flush=True)
            worst[case.key.format] = max(worst.get(case.key.format, 0), e)
        except Exception as ex:
            bad += 1
            print("EXC", case, str(ex)[:300].replace("\n", " "), flush=True)
            if "CUDA error" in str(ex): raise
    print(f"checked {len(cases)} bad {bad} worst {worst} in {time.time()-t0:.0f}s", flush=True)

def time_graph(fns, reps=20):
    for f in fns: f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for f in fns: f()
    for _ in range(3): g.replay()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / len(fns))
    return float(np.median(ts))

def copy_bw():
    x = torch.empty(2 << 30, dtype=torch.uint8, device=dev); y = torch.empty_like(x)
    def t(f, n=10):
        f(); torch.cuda.synchronize(); ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
        return float(np.median(ts))
    xf, yf = x.view(torch.float32), y.view(torch.float32)
    xf.normal_()
    us = t(lambda: y.copy_(x)); us2 = t(lambda: torch.mul(xf, 1.0, out=yf)); us3 = t(lambda: torch.sum(xf))
    print(f"copy_ {2 * x.numel() / us / 1e6:.3f} mul {2 * x.numel() / us2 / 1e6:.3f} sum (read) {x.numel() / us3 / 1e6:.3f} TB/s", flush=True)
    return 2 * x.numel() / min(us, us2) / 1e6

SHAPES = [(1, 32, 131072), (32, 64, 4096), (8, 32, 32768)]
def pool(layout, pages, layers):
    slab = torch.randint(0, 256, (pages, layers, layout.num_kv_heads, layout.head_bytes), dtype=torch.uint8, device=dev)
    for name in ("k_scale", "v_scale"):
        s = layout.sections[name]
        v = (torch.rand(1024, device=dev) * 0.02 + 0.01).to(torch.float16).view(torch.uint8)
        n = s.nbytes
        slab[..., s.offset:s.offset + n] = v[:n]
    return slab

def bench(shapes_by_format, bw):
    from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
    for f, shapes in shapes_by_format.items():
        for (B, Hq, T) in SHAPES:
            layout = PageLayout(key=S(f), value=S(f), page_size=64, num_kv_heads=8, head_dim=128)
            n = B * T // 64
            per = n * layout.page_size_bytes
            layers = max(2, int(3e8 // per) + 1)
            slab = pool(layout, n, layers)
            store = PageStore(layout, (slab[:, 0],))
            table = PageTable(np.arange(B + 1, dtype=np.int64) * (T // 64), np.random.permutation(n).astype(np.int64), np.tile(np.arange(T // 64) * 64, B).astype(np.int64), np.full(n, 64, np.int32))
            call = AttendCall((Part(store, table),), 128 ** -0.5)
            q = torch.randn(B, 1, Hq, 128, device=dev, dtype=torch.bfloat16)
            for shape in shapes:
                try:
                    plan = cuda.Plan(call, Hq, q.dtype, dev, layer_strides=(layout.page_size_bytes,), shape=shape)
                    fns = [(lambda l=l: plan.run(q, layer=l)) for l in range(layers)] * max(1, 12 // layers)
                    us = time_graph(fns)
                    print(f"{f:9s} B={B} Hq={Hq} T={T} {shape} {us:8.2f} us  {per/us/1e6:.2f} TB/s  {per/us/1e6/bw:.3f} of copy", flush=True)
                except Exception as ex:
                    print("EXC", f, shape, str(ex)[:300], flush=True)
                    if "CUDA error" in str(ex): raise
            del slab, store, call
    

PATCHES = [
    ("attend.cu", "    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;", "    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;\n    PROBE(0);"),
    ("attend.cu", "    for (int i = blockIdx.x; i >= 0;) {", "    PROBE(1);\n    for (int i = blockIdx.x; i >= 0;) {"),
    ("attend.cu", "    Softmax softmax;\n    softmax.clear();\n    PackedWalk walk;", "    PROBE(2);\n    Softmax softmax;\n    softmax.clear();\n    PackedWalk walk;"),
    ("attend.cu", "    int iteration = chunks_so_far(s, warp);", "    PROBE(3);\n    int iteration = chunks_so_far(s, warp);"),
    ("attend.cu", "        int2 tokens = ring.tokens[warp][stage];", "        PROBE(4);\n        int2 tokens = ring.tokens[warp][stage];"),
    ("attend.cu", "    constexpr bool has_bias_sum", "    PROBE(5);\n    constexpr bool has_bias_sum"),
    ("finish.cuh", "    if (s.slot >= 0) {", "    PROBE(6);\n    if (s.slot >= 0) {"),
    ("finish.cuh", "    sync_threads(CONSUMERS);  // the next segment writes the same memory", "    PROBE(7);\n    sync_threads(CONSUMERS);  //"),
    ("columns.cuh", "struct Unit {", """DEVICE u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ u64 probes[132 * 64];
__device__ int probe_count[132];
#define PROBE(n) if (threadIdx.x == 0) { if (n == 0) probe_count[blockIdx.x] = 0; int i_ = probe_count[blockIdx.x]; if (i_ < 64 && (n != 4 || last_probe() != 4)) { probes[blockIdx.x * 64 + i_] = now() * 8 + n; probe_count[blockIdx.x] = i_ + 1; } }
DEVICE int last_probe() { int i = probe_count[blockIdx.x]; return i ? probes[blockIdx.x * 64 + i - 1] % 8 : -1; }
struct Unit {"""),
]
def profile(f, B, Hq, T):
    import shutil, ctypes
    from pathlib import Path
    from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
    from kvbits.ops.cuda import driver, compile as cc
    src = Path(cuda.__file__).parent
    dst = Path("/tmp/probe"); shutil.rmtree(dst, ignore_errors=True); shutil.copytree(src, dst)
    for name, a, b in PATCHES:
        t = (dst / name).read_text(); assert a in t, a
        (dst / name).write_text(t.replace(a, b, 1))
    layout = PageLayout(key=S(f), value=S(f), page_size=64, num_kv_heads=8, head_dim=128)
    n = B * T // 64
    slab = pool(layout, n, 2)
    table = PageTable(np.arange(B + 1, dtype=np.int64) * (T // 64), np.random.permutation(n).astype(np.int64), np.tile(np.arange(T // 64) * 64, B).astype(np.int64), np.full(n, 64, np.int32))
    call = AttendCall((Part(PageStore(layout, (slab[:, 0],)), table),), 128 ** -0.5)
    q = torch.randn(B, 1, Hq, 128, device=dev, dtype=torch.bfloat16)
    plan = cuda.Plan(call, Hq, q.dtype, dev, layer_strides=(layout.page_size_bytes,))
    L = plan._launches[0]
    binary = cc.compile_source(dst, "attend.cu", dict(L.kernel.defines), "sm_90")
    k = driver.Kernel(binary, "attend", L.kernel.shared_bytes)
    object.__setattr__(L, "loaded", k)
    module = k.module
    def read(name, ct, cnt):
        p, sz = ctypes.c_uint64(), ctypes.c_size_t()
        driver._check(driver._driver().cuModuleGetGlobal_v2(ctypes.byref(p), ctypes.byref(sz), module, name.encode()), name)
        buf = (ct * cnt)()
        driver._check(driver._driver().cuMemcpyDtoH_v2(buf, p, sz), "read")
        return np.array(buf)
    loops = []
    for l in (0, 1, 0, 1):
        plan.run(q, layer=l); torch.cuda.synchronize()
        pr = read("probes", ctypes.c_uint64, 132 * 64).reshape(132, 64); ct = read("probe_count", ctypes.c_int, 132)
        t0 = min(int(pr[b, 0]) // 8 for b in range(132))
        loops.append([max(((int(x) // 8 - t0) / 1e3 for x in pr[b, :ct[b]] if int(x) % 8 == 5), default=0) for b in range(132)])
    print("   loop ends: percentiles", np.percentile(loops[2], [0, 10, 25, 50, 75, 90, 95, 100]).round(1), "same blocks late in two launches:", np.corrcoef(loops[1], loops[3])[0, 1].round(2), "late:", np.argsort(loops[1])[-8:], np.argsort(loops[3])[-8:], flush=True)
    pr = read("probes", ctypes.c_uint64, 132 * 64).reshape(132, 64); ct = read("probe_count", ctypes.c_int, 132)
    t0 = min(int(pr[b, 0]) // 8 for b in range(132))
    for b in (0, 1, 70, 131):
        print(f, B, T, "block", b, " ".join(f"{int(x) % 8}@{(int(x) // 8 - t0) / 1e3:.1f}" for x in pr[b, :min(ct[b], 40)]), flush=True)
    ends = [(int(pr[b, ct[b] - 1]) // 8 - t0) / 1e3 for b in range(132)]; starts = [(int(pr[b, 0]) // 8 - t0) / 1e3 for b in range(132)]
    print("   starts", min(starts), max(starts), "ends", min(ends), np.median(ends), max(ends), flush=True)

VARIANTS = {
    "int8": [None],
    "int4": [None, Shape(11, 1, 64, 2)],
    "int2": [None, Shape(15, 2, 64, 1), Shape(15, 3, 64, 1)],
    "fp8_e4m3": [None],
}
def alternative(label, patches, which, bw):
    import shutil, functools
    from pathlib import Path
    from kvbits.ops.cuda import driver, compile as cc
    dst = Path("/tmp/alt"); shutil.rmtree(dst, ignore_errors=True); shutil.copytree(Path(cuda.__file__).parent, dst)
    for name, a, b in patches:
        t = (dst / name).read_text(); assert a in t, a
        (dst / name).write_text(t.replace(a, b))
    old = cuda._load
    cuda._load = lambda k, i: driver.Kernel(cc.compile_source(dst, "attend.cu", dict(k.defines), "sm_90"), "attend", k.shared_bytes, early=True)
    print("--", label, flush=True)
    bench({f: [None] for f in which}, bw)
    cuda._load = old

if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    prebuild(VARIANTS)
    if len(sys.argv) < 2 or sys.argv[1] == "check": check()
    if "check" in sys.argv: sys.exit()
    for f in ("int8", "int2"):
        for B, Hq, T in SHAPES[:1]: profile(f, B, Hq, T)
    bw = copy_bw(); print("copy TB/s", bw, flush=True)
    bench(VARIANTS, bw)
    alternative("no prefetch", [("attend.cu", "        prefetch_first_chunks(a, lane);", "")], ["int8", "int4", "int2"], bw)
    alternative("double prefetch", [("attend.cu", "i < PREFETCH_ROUNDS", "i < 2 * PREFETCH_ROUNDS")], ["int8", "int4", "int2"], bw)
