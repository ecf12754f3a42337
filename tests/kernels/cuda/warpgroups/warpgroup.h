// What warpgroups do, and how kernels follow on each other, on the emulated machine. A product is made
// when it is waited for, and so are the tiles that it is made of read.
#pragma once

#include "../whole_step/copies.h"

static std::set<int> met_front;  // threads
static void wait_for_previous_kernel() {
    for (int i = rand() & 1 ? rand() % 200 : 0; i; i--) yield();  // it may be over already
    met_front.insert(here);
}
static void launch_next_kernel() {}
static void prefetch_map(const TensorMap* map) { acquire_map(map), met_front.erase(here); }
static void copy_tile(void* to, const TensorMap* map, int row, int group, u64* b) {
    if (!met_front.count(here)) refuse("rows are fetched while the kernel in front makes them");
    copy_tile(to, map, row, group, b, 0);
}

// The first factor is a tile, or what the four threads of a row hold of it.
struct Multiplied {
    float* d;
    const char* a;
    const u32* held[4];
    const char* b;
    int columns, strip;
    bool overwrite;
    u64 rows;  // all the warpgroup's, when it asks: any of its warps may read any of them until all have waited
};
struct Products { std::vector<Multiplied> asked; std::vector<size_t> ends; };
static std::vector<Products> products;  // of all threads
static Products& own_products() {
    size_t at = (size_t)here;
    if (products.size() <= at) products.resize(at + 1);
    return products[at];
}
static float number_in(u64 place) {
    u16 v;
    memcpy(&v, (char*)(place ^ (place >> 7 & 7) << 4), 2);
    u32 bits = (u32)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static float number_at(const char* tile, int row, int k) { return number_in((u64)tile + row * 128 + k * 2); }
static float first_factor(const Multiplied& m, int row, int lower, int k) {
    return m.a ? number_at(m.a, row + lower * 8, k) : half_of(m.held[k % 8 / 2][k / 8 * 2 + lower], k % 2);
}
static float second_factor(const Multiplied& m, int column, int k) {
    if (!m.strip) return number_at(m.b, column, k);
    return number_in((u64)m.b + column / 64 * m.strip + k * 128 + column % 64 * 2);
}
static u64 all_rows(const char* a) {
    u64 sum = 0, eight;
    if (!a || THREAD % 32) return 0;  // one of a warp looks
    for (int i = 0; i < 64 * 128; i += 8) memcpy(&eight, (const char*)((u64)a & ~127ull) + i, 8), sum = sum * 31 + eight;
    return sum;
}
static void make(const Multiplied& m) {
    if (all_rows(m.a) != m.rows) refuse("rows change while they are multiplied");
    int t = THREAD, own = t % 128 / 32 * 16 + t % 32 / 4, first = t % 4 * 2;
    for (int i = 0; i < m.columns / 2; i++) {
        float sum = m.overwrite ? 0 : m.d[i];
        for (int k = 0; k < 16; k++)
            sum += first_factor(m, own, i / 2 % 2, k) * second_factor(m, first + i / 4 * 8 + i % 2, k);
        m.d[i] = sum;
    }
}
static void wgmma_fence() { sync_warp(); }  // as all that follows, it is done by a warp as one
static void wgmma_commit() { own_products().ends.push_back(own_products().asked.size()); }
template <int LEFT>
static void wgmma_wait() {
    sync_warp();
    Products& mine = own_products();
    size_t groups = mine.ends.size() > LEFT ? mine.ends.size() - LEFT : 0;
    size_t some = groups ? mine.ends[groups - 1] : 0;
    for (size_t i = 0; i < some; i++) make(mine.asked[i]);
    mine.asked.erase(mine.asked.begin(), mine.asked.begin() + some);
    mine.ends.erase(mine.ends.begin(), mine.ends.begin() + groups);
    for (size_t& end : mine.ends) end -= some;
    sync_warp();
}
template <int SITE>
static void wgmma_wait_all() { wgmma_wait<0>(); }
// A place is an address over 16, and where columns are in strips, how far these lie apart.
struct TileDescriptor {
    u64 sixteenths;
    int strip;
    const char* check(u64 most) const {
        u64 p = sixteenths << 4;
        if ((p & 1023) >= most) refuse("a tile does not lie where its order begins");
        return (const char*)p;
    }
};
static TileDescriptor describe_rows(const void* p) { return {(u64)p >> 4, 0}; }
static TileDescriptor describe_columns(const void* p, int strip) { return {(u64)p >> 4, strip}; }
static TileDescriptor advance_descriptor(TileDescriptor place, int bytes) { return {place.sixteenths + (bytes >> 4), place.strip}; }
template <int COLUMNS_>
static void wgmma_accumulate(float* d, TileDescriptor a, TileDescriptor b, bool overwrite = false) {
    own_products().asked.push_back({d, a.check(128), {}, b.check(128), COLUMNS_, 0, overwrite, all_rows(a.check(128))});
}
template <int COLUMNS_>
static void wgmma_overwrite(float* d, TileDescriptor a, TileDescriptor b) { wgmma_accumulate<COLUMNS_>(d, a, b, true); }
template <int COLUMNS_>
static void wgmma_registers(float* d, const u32* a, TileDescriptor b, bool accumulate) {
    u64 all[32][2];
    post((u64)a, 0, all);
    Multiplied m = {d, 0, {}, b.check(1), COLUMNS_, b.strip, !accumulate, 0};
    for (int i = 0; i < 4; i++) m.held[i] = (const u32*)all[THREAD % 32 / 4 * 4 + i][0];
    own_products().asked.push_back(m);
}
static void fence_async_proxy() {}
struct Piece { char* to; const char* from; };
static std::vector<std::vector<Piece>> pieces;  // on their way, of all threads
static void copy_16_bytes_async(void* to, const void* from) {
    if ((u64)to % 16 || (u64)from % 16) refuse("a piece does not begin at a multiple of its size");
    if (pieces.size() <= (size_t)here) pieces.resize(here + 1);
    if (rand() & 1) memcpy(to, from, 16);
    else pieces[here].push_back({(char*)to, (const char*)from});
}
static void wait_for_async_copies() {
    if (pieces.size() <= (size_t)here) return;
    for (const Piece& piece : pieces[here]) memcpy(piece.to, piece.from, 16);
    pieces[here].clear();
}
template <int COUNT, class Number>
static void pin_registers(Number*) {}
template <int COUNT>
static void release_registers() {}
template <int COUNT>
static void claim_registers() {}
static void prefetch(const void*) {}
static bool any_lane(bool v) {
    u64 all[32][2], one = 0;
    post(v, 0, all);
    for (int i = 0; i < 32; i++) one |= all[i][0];
    return one;
}

// ---------------------------------------------------------------- pairs of programs, and stores of tiles
static std::vector<Named> pairs_that_meet;
static void sync_pair() {
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
static void mbar_arrive_in_pair(u64* b, int program) {
    refuse_if_gone(BLOCK / 2 * 2 + program);
    mbar_arrive(in_program(b, program));
}
static void multicast_tile(void* to, const TensorMap* map, int row, int group, u64* b) {
    for (int program = 0; program < 2; program++) {
        copy_tile(in_program((char*)to, program), map, row, group, in_program(b, program));
        copies.back().program = BLOCK / 2 * 2 + program;
    }
}

struct Taken { const TensorMap* map; int at[3]; const char* from; };
static std::vector<std::vector<Taken>> taken;  // by each thread, and not yet read
static std::vector<Taken>& own_taken() {
    if (taken.size() <= (size_t)here) taken.resize(here + 1);
    return taken[here];
}
static void store_tile(const TensorMap* map, int row, int group, const void* from) {
    if (!met_front.count(here)) refuse("a tile is taken where the kernel in front may still read");
    own_taken().push_back({map, {0, row, group}, (const char*)from});
}
static void wait_for_stores_read() {
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
