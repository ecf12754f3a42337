// Instructions of Hopper GPUs: the ordering of kernels, products of warpgroups, asynchronous copies, and
// clusters of two programs. tests/kernels/cuda/warpgroups/warpgroup.h has the same names for machines without a GPU.
#pragma once

#include "machine.cuh"

// Wait until the previous kernel has ended, and let the next one start.
DEV void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copy a tile that other programs fetch too.
DEV void copy_tile(void* to, const TensorMap* map, int row, int group, u64* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(shared_address(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(shared_address(b)) : "memory");
}

// The tensor cores' descriptor of a tile in the copy engine's swizzled order: of rows of 128 bytes, or of
// columns, in strips of 64 that lie `strip` bytes apart, which are added up over the tile's rows.
typedef u64 TileDescriptor;
DEV TileDescriptor describe_rows(const void* p) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | 1ull << 16 | (shared_address(p) & 0x3ffff) >> 4;
}
DEV TileDescriptor describe_columns(const void* p, int strip) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | (u64)(strip >> 4) << 16 | (shared_address(p) & 0x3ffff) >> 4;
}
DEV TileDescriptor advance_descriptor(TileDescriptor tile, int bytes) { return tile + (bytes >> 4); }

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING committed groups are unfinished.
template <int PENDING>
DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Wait for all groups. Each SITE in the source has a number, since the compiler would merge equal ones.
template <int SITE>
DEV void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0; // %0" ::"n"(SITE) : "memory"); }
// Multiply 64 rows of 16 elements by N columns: accumulate, or overwrite the sums. The functions for
// the numbers of columns that a kernel needs are in the header wgmma.cuh, which toolchain.py generates.
template <int N>
DEV void wgmma_accumulate(float* sums, TileDescriptor rows, TileDescriptor columns);
template <int N>
DEV void wgmma_overwrite(float* sums, TileDescriptor rows, TileDescriptor columns);
// The same with rows in registers.
template <int N>
DEV void wgmma_registers(float* sums, const u32* rows, TileDescriptor columns, bool accumulate);

// Make threads' writes to shared memory visible to tensor cores, and to the copy engine.
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Make the compiler use the operands or results of products here and not before.
template <int COUNT>
DEV void pin_registers(float* values) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}
template <int COUNT>
DEV void pin_registers(u32* values) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(values[i])::"memory");
}
// True for a warp where it is true in one of its threads.
DEV bool any_lane(bool v) { return __any_sync(0xffffffffu, v); }
// Copy 16 bytes to shared memory asynchronously; a thread waits for all its copies.
DEV void copy_16_bytes_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEV void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Prefetch into the L1 cache.
DEV void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// Set the registers of each thread of a warpgroup: one warpgroup releases what another may claim.
template <int COUNT>
DEV void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEV void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Store a tile from one thread, and wait until all its stored tiles have been read.
DEV void store_tile(const TensorMap* map, int row, int group, const void* from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(map), "r"(0), "r"(row), "r"(group), "r"(shared_address(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEV void wait_for_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// A pair: a cluster of two programs.
#define PAIRED __cluster_dims__(2, 1, 1)

// Synchronise all threads of both programs: before it, neither may access the other, and after it, neither
// may have exited.
DEV void sync_pair() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Arrive at one program's barrier. It orders no memory accesses: it only signals that tiles were read.
DEV void mbar_arrive_in_pair(u64* b, int program) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(b)), "r"(program) : "memory");
}
// Copy a tile to both programs, each of which has a barrier for it at the same offset.
DEV void multicast_tile(void* to, const TensorMap* map, int row, int group, u64* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(shared_address(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(shared_address(b)), "h"((u16)3) : "memory");
}
