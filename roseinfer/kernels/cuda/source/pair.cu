// Cooperation of the two programs of a pair, and stores of tiles by the copy engine.

#define PAIRED __cluster_dims__(2, 1, 1)

// Synchronise all threads of both programs: before it, neither may access the other, and after it, neither
// may have exited.
DEV void meet_in_pair() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Arrive at one program's barrier. It orders no memory accesses: it only signals that tiles were read.
DEV void arrive_of_pair(u64* b, int program) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(at(b)), "r"(program) : "memory");
}
// Copy a tile to both programs, each of which has a barrier for it at the same offset.
DEV void copy_rows_to_both(void* to, const TensorMap* map, int row, int group, u64* b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(at(to)), "l"(map), "r"(0), "r"(row), "r"(group), "r"(at(b)), "h"((u16)3) : "memory");
}
// Store tiles from one thread, and wait until they have been read.
DEV void take_tile_away(const TensorMap* map, int row, int group, const void* from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(map), "r"(0), "r"(row), "r"(group), "r"(at(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEV void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
