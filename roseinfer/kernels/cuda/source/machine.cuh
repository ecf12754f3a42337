// Instructions of the GPU: barriers in shared memory, copies of tiles, tensor cores, loads and stores.
// tests/kernels/cuda/whole_step/machine.h has the same names for machines without a GPU.
#pragma once

#define DEV __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void mbar_init(u64* b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n) : "memory");
}
DEV bool mbar_try(u64* b, u32 parity) {
    u32 ok;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ok) : "r"(shared_address(b)), "r"(parity) : "memory");
    return ok != 0;
}
DEV void mbar_arrive(u64* b) {
    asm volatile("{\n\t.reg .b64 s;\n\tmbarrier.arrive.shared::cta.b64 s, [%0];\n\t}"
                 ::"r"(shared_address(b)) : "memory");
}
DEV void mbar_expect(u64* b, u32 bytes) {
    asm volatile("{\n\t.reg .b64 s;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;\n\t}"
                 ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEV u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// A tensor map, the copy engine's description of a matrix (tensor_maps.py).
struct alignas(64) TensorMap { u64 opaque[16]; };
// The copy engine reads maps through a cache of its own, which may still have the
// bytes from before the host's write.
DEV void acquire_map(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copy the tile with this first output and first group of inputs.
DEV void copy_tile(void* to, const TensorMap* map, int row, int group, u64* b, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(shared_address(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(shared_address(b)), "l"(policy) : "memory");
}
DEV void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}
DEV void barrier_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
// True in one thread of a warp, for which alone the compiler generates code without a loop over lanes.
DEV bool elect_one() {
    u32 ok;
    asm volatile(
        "{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(ok));
    return ok != 0;
}
DEV void sync_warp() { __syncwarp(); }
DEV float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

DEV u32 atomic_increment(u32* p) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
// Relaxed loads and stores of whole words, in any order, bypassing the L1 cache.
template <int V, class Word>
DEV void load_relaxed(const Word* p, Word* w);
template <>
DEV void load_relaxed<1, u32>(const u32* p, u32* w) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
template <>
DEV void load_relaxed<2, u32>(const u32* p, u32* w) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
template <>
DEV void load_relaxed<4, u32>(const u32* p, u32* w) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
template <>
DEV void load_relaxed<1, u64>(const u64* p, u64* w) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(w[0]) : "l"(p) : "memory");
}
DEV void store_relaxed(u64* p, u64 w) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(w) : "memory");
}
DEV void store_relaxed(u32* p, u32 w) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(w) : "memory");
}

// Load a value that no program of this launch writes.
DEV u16 load_constant(const u16* p) {
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
// Load two elements of an earlier launch's token from the KV cache, next to the token that this launch writes.
DEV u32 load_pair(const u16* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// One GEMM of 16 rows by 8 columns over 16 inputs, accumulated into d.
DEV void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8.
DEV void load_matrices(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// The same, with each matrix transposed.
DEV void load_matrices_transposed(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// Transpose a matrix of 8 rows; each lane has two of its elements.
DEV u32 transpose_matrix(u32 two) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(two));
    return r;
}

// Arithmetic by the Triton kernels' instructions.
DEV u32 pack_bf16(float first, float second) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
// The instruction for a single value takes several times as long.
DEV u16 to_bf16(float v) { return (u16)pack_bf16(v, 0.0f); }
DEV float exp2_ftz(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
DEV float divide(float a, float b) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// The reciprocal of a number that is one or more, in fewer instructions.
DEV float reciprocal(float v) {
    float r;
    bool large = v > 8.50705917e37f;  // two to the 126th
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(large ? v * 0.25f : v));
    return large ? r * 0.25f : r;
}
DEV float reciprocal_sqrt(float v) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
DEV float fmadd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float as_float(u32 v) { return __uint_as_float(v); }
DEV u32 as_bits(float v) { return __float_as_uint(v); }
DEV void yield() {}
// Hide where v comes from: the compiler recomputes values derived from it, and holds none of them in
// registers until here.
DEV void launder(int& v) { asm volatile("" : "+r"(v)); }
// A value that is the same in all threads of a warp, for which the compiler uses one register of the warp.
DEV int warp_uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
#define BLOCK ((int)blockIdx.x)
#define THREAD ((int)threadIdx.x)
// The kernel of a file: a program runs `program` on its Params and its Shared.
#define KERNEL(name, ...)                                                                 \
    extern __shared__ __align__(1024) unsigned char memory[];                             \
    extern "C" __global__ void __VA_ARGS__ name(const __grid_constant__ Params params) {  \
        program(params, (Shared*)memory);                                                 \
    }
