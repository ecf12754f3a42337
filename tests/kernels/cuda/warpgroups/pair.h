// What two programs of a pair do with each other, on the emulated machine, and tiles that are taken away.

static std::vector<Named> pairs_that_meet;
static void meet_in_pair() {
    size_t pair = BLOCK / 2;
    if (pairs_that_meet.size() <= pair) pairs_that_meet.resize(pair + 1);
    u32 before = pairs_that_meet[pair].generation;
    if (++pairs_that_meet[pair].count == 2 * threads_of_block) {
        pairs_that_meet[pair].count = 0;
        pairs_that_meet[pair].generation++;
        progress++;
        return;
    }
    while (pairs_that_meet[pair].generation == before) yield();
}
template <class Where>
static Where* in_program(Where* own, int program) {
    return (Where*)((char*)own + (program - BLOCK % 2) * (long long)shared_of_block);
}
static void arrive_of_pair(u64* b, int program) {
    refuse_if_gone(BLOCK / 2 * 2 + program);
    mbar_arrive(in_program(b, program));
}
static void copy_rows_to_both(void* to, const TensorMap* map, int row, int group, u64* b) {
    for (int program = 0; program < 2; program++) {
        copy_rows(in_program((char*)to, program), map, row, group, in_program(b, program));
        copies.back().program = BLOCK / 2 * 2 + program;
    }
}

struct Taken { const TensorMap* map; int at[3]; const char* from; };
static std::vector<std::vector<Taken>> taken;  // by each thread, and not yet read
static std::vector<Taken>& own_taken() {
    if (taken.size() <= (size_t)here) taken.resize(here + 1);
    return taken[here];
}
static void take_tile_away(const TensorMap* map, int row, int group, const void* from) {
    if (!met_front.count(here)) refuse("a tile is taken where the kernel in front may still read");
    own_taken().push_back({map, {0, row, group}, (const char*)from});
}
static void wait_until_read() {
    for (int i = rand() & 1 ? rand() % 200 : 0; i; i--) yield();
    for (const Taken& t : own_taken()) {
        const TensorMap* m = t.map;
        u64 place = 0;
        for (u32 k = 0; k < m->box[2]; k++)
            for (u32 j = 0; j < m->box[1]; j++)
                for (u32 i = 0; i < m->box[0]; i++, place += 2) {
                    u64 to[3] = {(u64)t.at[0] + i, (u64)t.at[1] + j, (u64)t.at[2] + k};
                    if (to[0] >= m->sizes[0] || to[1] >= m->sizes[1] || to[2] >= m->sizes[2]) continue;
                    char* held = (char*)m->base + to[0] * 2 + to[1] * m->strides[0] + to[2] * m->strides[1];
                    memcpy(held, t.from + (place ^ (place >> 7 & 7) << 4), 2);
                }
    }
    own_taken().clear();
}
