// Names for the instructions the kernels use, so that NVRTC needs no CUDA headers. One wrapper per instruction, nothing
// else.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }
DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float cos_approx(float x) { float y; asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float sin_approx(float x) { float y; asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float tanh_approx(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
/// 2**e for -126 <= e <= 127.
DEVICE float power_of_two(int e) { return __uint_as_float(u32(e + 127) << 23); }
/// floor(log2(x)) for a normal positive x.
DEVICE int exponent_of(float x) { return int(__float_as_uint(x) >> 23 & 255) - 127; }

DEVICE u32 pack_f16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE float f16_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE float bf16_to_float(u16 h) { return __uint_as_float(u32(h) << 16); }
DEVICE float low_f16(u32 w) { return f16_to_float(u16(w)); }
DEVICE float high_f16(u32 w) { return f16_to_float(u16(w >> 16)); }
DEVICE u32 mul_f16x2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 max_f16x2(u32 a, u32 b) { u32 d; asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 max_nan_f16x2(u32 a, u32 b) { u32 d; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 min_nan_f16x2(u32 a, u32 b) { u32 d; asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 max_nan_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 min_nan_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
/// Larger magnitude; the sign is undefined.
#if __CUDA_ARCH__ >= 860
DEVICE u32 max_size_nan_f16x2(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 max_size_nan_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
#else
DEVICE u32 max_size_nan_f16x2(u32 a, u32 b) { return max_nan_f16x2(a & 0x7fff7fffu, b & 0x7fff7fffu); }
DEVICE u32 max_size_nan_bf16x2(u32 a, u32 b) { return max_nan_bf16x2(a & 0x7fff7fffu, b & 0x7fff7fffu); }
#endif
#if __CUDA_ARCH__ >= 890
/// In the low byte, half to even, past the ends the largest finite number.
DEVICE u16 to_e4m3(float x) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(0.f), "f"(x));
    return d;
}
DEVICE u16 to_e5m2(float x) {
    u16 d;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(0.f), "f"(x));
    return d;
}
#endif
/// Bits of `a` where the mask has them, of b elsewhere. With a constant mask the compiler makes two instructions of it.
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
/// Any function of three bits, bit by bit: TABLE is what it gives for a = 0xf0, b = 0xcc, c = 0xaa.
template <u32 TABLE>
DEVICE u32 bitwise(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return d;
}
DEVICE u32 rotate_left(u32 w, u32 bits) {
    u32 d;
    asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(d) : "r"(w), "r"(bits));
    return d;
}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

/// One half of `a` times both of b (plus c): a broadcast half is an operand's modifier, where a byte permutation would
/// be an instruction.
DEVICE u32 low_mul(u32 a, u32 b) {
    u32 d;
    asm("{.reg .f16 l, h; .reg .b32 t; mov.b32 {l, h}, %1; mov.b32 t, {l, l}; mul.rn.f16x2 %0, t, %2;}"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}
DEVICE u32 high_mul(u32 a, u32 b) {
    u32 d;
    asm("{.reg .f16 l, h; .reg .b32 t; mov.b32 {l, h}, %1; mov.b32 t, {h, h}; mul.rn.f16x2 %0, t, %2;}"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}
DEVICE u32 low_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("{.reg .f16 l, h; .reg .b32 t; mov.b32 {l, h}, %1; mov.b32 t, {l, l}; fma.rn.f16x2 %0, t, %2, %3;}"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 high_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("{.reg .f16 l, h; .reg .b32 t; mov.b32 {l, h}, %1; mov.b32 t, {h, h}; fma.rn.f16x2 %0, t, %2, %3;}"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 high_fnma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("{.reg .f16 l, h; .reg .b32 t, n; mov.b32 {l, h}, %1; mov.b32 t, {h, h}; neg.f16x2 n, %2; fma.rn.f16x2 %0, t, n, %3;}"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/// a + b, at least 0 and at most `top`.
DEVICE int add_clamped(int a, int b, int top) {
#if __CUDA_ARCH__ >= 900
    int d;
    asm("{.reg .s32 sum; add.s32 sum, %1, %2; min.relu.s32 %0, sum, %3;}" : "=r"(d) : "r"(a), "r"(b), "r"(top));
    return d;
#else
    return max(min(a + b, top), 0);
#endif
}
/// a * b + c, in one instruction.
DEVICE u32 multiply_add(int a, int b, u32 c) {
    u32 d;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/// |a - b| + c.
DEVICE int distance(int a, int b, int c) {
    int d;
    asm("sad.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 low_twice(u32 a) { return permute_bytes(a, a, 0x1010); }
DEVICE u32 high_twice(u32 a) { return permute_bytes(a, a, 0x3232); }

/// d[16x8] = a[16x16] b[16x8] + c; lane (g = lane / 4, c = lane % 4) holds a rows g, g + 8, k 2c, 2c + 1 (+ 8); b k
/// likewise, column g.
DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2,
                    float c3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_f16(d, a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
}
DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/// d[16x8] = a[16x32] b[32x8] + c of bytes, a without sign; lane (g, c) holds a rows g, g + 8, k 4c .. 4c + 3 (+ 16); b
/// k likewise, column g; d as for `mma_f16`.
template <bool SIGNED>
DEVICE void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int c0, int c1, int c2, int c3) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
template <bool SIGNED>
DEVICE void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_bytes<SIGNED>(d, a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
}
DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
#if WARPGROUPS
/// Around `warpgroup_mma`s of a fresh y: what they read and write is in its place before; after, it is there.
DEVICE void warpgroup_begins(float (&y)[8][2][4]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "=f"(y[i / 8][i / 4 % 2][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void warpgroup_ends(float (&y)[8][2][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(y[i / 8][i / 4 % 2][i % 4])::"memory");
}
#define ACCUMULATORS(i)                                                                                         \
    "+f"(y[i][0][0]), "+f"(y[i][0][1]), "+f"(y[i][0][2]), "+f"(y[i][0][3]), "+f"(y[i][1][0]), "+f"(y[i][1][1]), \
        "+f"(y[i][1][2]), "+f"(y[i][1][3])
#define WARPGROUP_MMA(TYPE)                                                                                                                                                 \
    asm volatile(                                                                                                                                                           \
        "{.reg .pred p; setp.ne.b32 p, %69, 0;"                                                                                                                             \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE                                                                                                                 \
        " "                                                                                                                                                                 \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"                                                                                                                           \
        : ACCUMULATORS(0), ACCUMULATORS(1), ACCUMULATORS(2), ACCUMULATORS(3), ACCUMULATORS(4), ACCUMULATORS(5),                                                             \
          ACCUMULATORS(6), ACCUMULATORS(7)                                                                                                                                  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)))
/// Operand b of `warpgroup_mma` at a shared address: of k 0 .. 7, then of 8 .. 15, 128 columns of 16 bytes. One more
/// stands for 16 bytes further on.
DEVICE u64 warpgroup_operand(const void* b) {
    constexpr u64 BETWEEN_HALVES = 128 * 16 / 16, BETWEEN_TILES = 8 * 16 / 16;
    return shared_address(b) >> 4 | BETWEEN_HALVES << 16 | BETWEEN_TILES << 32;
}
/// y[64x128] (+)= a[64x16] b[16x128] of four warps, 16 rows each; lanes hold a and y as for `mma_f16`, y of tiles of 8
/// columns.
template <bool BF16>
DEVICE void warpgroup_mma(float (&y)[8][2][4], const u32 (&a)[4], u64 b, bool adds) {
    if (BF16) WARPGROUP_MMA("bf16.bf16");
    else WARPGROUP_MMA("f16.f16");
}
#endif
/// Transposes an 8x8 tile of 16-bit values: lane (g, c) gives row g, columns 2c, 2c + 1 and receives column g, rows 2c,
/// 2c + 1.
DEVICE u32 transpose_8x8(u32 a) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

/// Where dynamic shared memory starts: behind what the system takes of a block, if it does.
#if __CUDA_ARCH__ >= 900
constexpr u32 SHARED_START = 1024;
#else
constexpr u32 SHARED_START = 0;
#endif
/// A word at `address` + OFFSET of shared memory that no one writes while it is read.
template <int OFFSET>
DEVICE u32 load_shared_at(u32 address) {
    u32 w;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(w) : "r"(address), "n"(OFFSET));
    return w;
}
template <int OFFSET>
DEVICE uint2 load_shared2_at(u32 address) {
    uint2 w;
    asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(w.x), "=r"(w.y) : "r"(address), "n"(OFFSET));
    return w;
}
DEVICE void add_to_shared(u32 address, int x) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DEVICE int round_to_int(float x) { int y; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
DEVICE void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barrier_arrive(u32 bar) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(bar) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W;}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; W: mbarrier.test_wait.parity.shared.b64 p, [%0], %1; @!p bra W;}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#endif
}
/// Whether the phase that `barrier_wait` would wait for is over.
DEVICE bool barrier_test(u32 bar, u32 parity) {
    u32 over;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return over;
}
/// Bit positions: `lowest_bit` of a number that is not 0, `leading_zeros` of any.
DEVICE int lowest_bit(u32 x) { return __ffs(int(x)) - 1; }
DEVICE int leading_zeros(u32 x) { return __clz(int(x)); }
/// Leaves the issue slots to other warps for a moment.
DEVICE void pause() { asm volatile("nanosleep.u32 100;"); }
#if __CUDA_ARCH__ >= 900
DEVICE void barrier_arrive_expect(u32 bar, u32 bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}" ::"r"(bar), "r"(bytes) : "memory");
}
/// Bulk copy by the copy engine; 16-byte aligned, a multiple of 16 bytes; completes on `bar`.
DEVICE void copy_bulk(u32 to, i64 from, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
DEVICE void prefetch_l2(i64 from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/// This thread's ordinary writes come before bulk copies that a barrier orders after it.
DEVICE void shared_writes_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// Barriers that this thread has set up are there for bulk copies.
DEVICE void barriers_before_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// Cache pages are read once a step: they should not push anything else out of L2.
DEVICE u64 read_once_policy() {
    u64 p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
#else
DEVICE void shared_writes_before_copies() {}
DEVICE void barriers_before_copies() {}
DEVICE void copy_async_16(u32 to, i64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// Arrives on `bar` once all earlier copy_async of this thread have landed.
DEVICE void copy_async_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
#endif

/// threadIdx.x, read once more: keeping it in a register through a long loop for what follows cost spills.
DEVICE int thread_again() { int thread; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread)); return thread; }

/// For launches that may start before the kernel ahead of them has ended (driver.Kernel, early=True): nothing that
/// kernel writes may be read, and nothing it reads written, before `wait_for_previous_kernel`; unless that kernel lets
/// none start early. A kernel that does not call this one lets the next start when all its blocks have ended, and a
/// block ends once its writes are where bulk copies read them.
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Barrier among as many threads of a block: 1 of the first ones (0 is __syncthreads).
template <int BARRIER = 1>
DEVICE void sync_threads(u32 threads) { asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "r"(threads) : "memory"); }

DEVICE void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
/// 16 bytes that are read once, or zeros: a predicate, not a branch, so that many loads can be under way.
DEVICE uint4 load_global_once(i64 address, bool wanted) {
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "r"(int(wanted)));
    return v;
}
/// 8 and 16 bytes that are read once; and 16 that many blocks read: these are to stay in L1, those to leave it alone.
DEVICE uint2 load_once_8(const void* p) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE uint4 load_once_16(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}
/// Adds to a counter that blocks share, after all that this thread knows of is there for whoever sees the sum, and
/// before all that it reads then.
DEVICE int add_acquire_release(int* p, int x) {
    int old;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(x) : "memory");
    return old;
}
/// Reads past L1, which other blocks' writes do not reach.
DEVICE float4 load_global_l2(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
DEVICE float2 load_global_l2(const float2* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
}
