// One thread fetches the program's rows of all matrices, in the order of their use, into a ring of tiles in
// shared memory: one instruction per tile. It only waits for free tiles, since weights depend on nothing.
// The ring continues in a launch that times out too: a warp that did not wait for a tile would use a slot
// that is still being filled.

struct Producer {
    Shared* s;
    u64 policy;
    const TensorMap *map, *last;  // maps of the matrix that is fetched, and of the last one
    int slot, old;                // slots of the next tile, and of the tile IN_FLIGHT before it
    u32 turn, old_turn;

    DEV void start(const Params& p, Shared* shared) {
        s = shared; policy = policy_first();
        map = p.maps; last = map + p.num_layers * MATRICES;
        // The first round waits for no barrier: the phase before its first counts as over.
        slot = 0; old = STAGES - IN_FLIGHT;
        turn = old_turn = 1;
        acquire_map(map);
    }
    DEV void next(int row, int group, u32 bytes) {
        wait_for(&s->empty[slot], turn);
        // More concurrent requests than this delay each other (docs/performance.md).
        wait_for(&s->full[old], old_turn);
        mbar_expect(&s->full[slot], bytes);
        copy_tile(s->ring + slot * SLOT, map, row, group, &s->full[slot], policy);
        forward(1, &slot, &turn);
        forward(1, &old, &old_turn);
    }
    // The next matrix: one or two strips, MLP rows apart, `count` rows each. A tile with fewer than ROWS of
    // them contains the following rows of the matrix, or zeros: their sums are ignored.
    DEV void fetch(int first, int count, Cut cut, int strips) {
        int blocks = blocks_of(count), chains = blocks * strips * cut.parts;
        if (map != last) acquire_map(map + 1);
#pragma unroll 1
        for (int wave = 0; wave < chains; wave += WARPS) {
            int end = chains - wave < WARPS ? chains : wave + WARPS;
#pragma unroll 1
            for (int depth = 0; depth < cut.depth; depth++)
#pragma unroll 1
                for (int chain = wave; chain < end; chain++) {
                    int block = chain / cut.parts, part = chain % cut.parts;
                    int row = first + block * ROWS;
                    if (block >= blocks) row += MLP - blocks * ROWS;
                    next(row, (part * cut.depth + depth) * cut.groups, OF_GROUP * cut.groups);
                }
        }
        map++;
    }
};

DEV void produce(const Params& p, Shared* s) {
    Producer q;
    q.start(p, s);
    int first, count;
#pragma unroll 1
    for (int matrix = 0; matrix <= p.num_layers * MATRICES; matrix++) {
        int half = matrix / 2, mlp = half % 2;
        bool second = matrix % 2, head = matrix == p.num_layers * MATRICES;
        share(second ? WIDTH : head ? VOCAB : mlp ? MLP : QKV, phase_of(half, second ? SECOND : FIRST), &first,
              &count);
        Cut of_half = second_cut(mlp);
        Cut cut = {second ? of_half.parts : OF_WIDTH.parts, second ? of_half.depth : OF_WIDTH.depth,
                   second ? of_half.groups : OF_WIDTH.groups};
        q.fetch(first, count, cut, mlp && !second ? 2 : 1);
    }
}
