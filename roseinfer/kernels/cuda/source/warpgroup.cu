// Instructions of a warpgroup, and the ordering of kernels.

DEV void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV void ask_for_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copy a tile that other programs fetch too.
DEV void copy_rows(void* to, const TensorMap* map, int row, int group, u64* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(at(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(at(b)) : "memory");
}

// The tensor cores' descriptor of a tile of rows of 128 bytes, in the copy engine's swizzled order.
typedef u64 TilePlace;
DEV TilePlace tile_at(const void* p) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | 1ull << 16 | (at(p) & 0x3ffff) >> 4;
}
DEV void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEV void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Wait for all, at one of several places in the source, which the compiler would merge if they were equal.
template <int PLACE>
DEV void wait_for_last_products() { asm volatile("wgmma.wait_group.sync.aligned 0; // %0" ::"n"(PLACE) : "memory"); }
// Their descriptor of a tile of columns, in strips of 64, that is added up over its rows.
DEV TilePlace columns_at(const void* p, int strip) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | (u64)(strip >> 4) << 16 | (at(p) & 0x3ffff) >> 4;
}
DEV TilePlace further(TilePlace place, int bytes) { return place + (bytes >> 4); }
// Multiply 64 rows of 16 elements by as many columns as the sums have; accumulate, or overwrite the sums.
template <int WIDE>
DEV void multiply_places(float* d, TilePlace a, TilePlace b);
template <int WIDE>
DEV void multiply_places_afresh(float* d, TilePlace a, TilePlace b);
template <int WIDE>
DEV void multiply_tiles(float* d, const void* a, const void* b) { multiply_places<WIDE>(d, tile_at(a), tile_at(b)); }
// The same with rows in registers: sums are kept, or overwritten.
template <int WIDE>
DEV void multiply_held(float* d, const u32* a, TilePlace b, bool kept);

// Make threads' writes to shared memory visible to tensor cores, and to the copy engine.
DEV void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Operands or results of GEMMs: the compiler must use them here and not before.
template <int COUNT>
DEV void settled(float* numbers) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(numbers[i])::"memory");
}
template <int COUNT>
DEV void settled(u32* numbers) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(numbers[i])::"memory");
}
// True for a warp where it is true in one of its threads.
DEV bool any(bool v) { return __any_sync(0xffffffffu, v); }
// Copy 16 bytes to shared memory asynchronously; a thread waits for all its copies.
DEV void copy_piece(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to)), "l"(from) : "memory");
}
DEV void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Prefetch into the L1 cache.
DEV void ask_for(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// Set the registers of each thread of a warpgroup: one warpgroup releases what another may claim.
template <int COUNT>
DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
