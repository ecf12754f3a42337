// What a warpgroup does, and how kernels follow on each other.

DEV void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV void ask_for_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A tile that other programs fetch too.
DEV void copy_rows(void* to, const TensorMap* map, int row, int group, u64* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(at(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(at(b)) : "memory");
}

// Where tensor cores find a tile of rows of 128 bytes, in the order that the copy engine lays them.
DEV u64 tile_at(const void* p) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | 1ull << 16 | (at(p) & 0x3ffff) >> 4;
}
DEV void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEV void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
template <int WIDE>
DEV void multiply_tiles(float* d, const void* a, const void* b);
