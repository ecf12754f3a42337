// What a warpgroup does, and how kernels and programs follow on each other.

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

// What was stored before `count` by the threads that have met is there for whoever has seen the count.
DEV void count(u32* p) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
DEV u32 see(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// The copy engine reads by a way of its own. Who stores says that it may read, and who has copies made
// meets what was stored.
DEV void leave_to_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEV void meet_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// What other programs have stored, past the first-level cache.
DEV void see4(const float* p, float* v) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
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
