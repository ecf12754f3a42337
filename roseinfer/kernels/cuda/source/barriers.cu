// Wait until a phase of a barrier in shared memory is over.
DEV void wait_for(u64* b, u32 parity) {
    while (!mbar_try(b, parity)) yield();
}
// Position of a thread in a ring of tiles: the phases of a tile's barriers alternate.
template <int TILES>
struct RingTurn {
    int slot;
    u32 parity;
    DEV void forward() {
        if (++slot < TILES) return;
        slot = 0;
        parity ^= 1;
    }
};
