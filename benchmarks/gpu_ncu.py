import sys
sys.path[:0] = ["benchmarks"]
import gpu_try as t
from gpu_try import *
from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
f, B, Hq, T = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
layout = PageLayout(key=S(f), value=S(f), page_size=64, num_kv_heads=8, head_dim=128)
n = B * T // 64
slab = pool(layout, n, 2)
table = PageTable(np.arange(B + 1, dtype=np.int64) * (T // 64), np.random.permutation(n).astype(np.int64), np.tile(np.arange(T // 64) * 64, B).astype(np.int64), np.full(n, 64, np.int32))
call = AttendCall((Part(PageStore(layout, (slab[:, 0],)), table),), 128 ** -0.5)
q = torch.randn(B, 1, Hq, 128, device=dev, dtype=torch.bfloat16)
plan = cuda.Plan(call, Hq, q.dtype, dev, layer_strides=(layout.page_size_bytes,))
for l in (0, 1, 0, 1): plan.run(q, layer=l)
torch.cuda.synchronize()
