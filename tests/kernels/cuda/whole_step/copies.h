// The copy engine of the emulated machine: maps of matrices as CUDA's driver makes them, and copies of
// tiles by them, which are over at some later time.
#pragma once

#include "machine.h"

struct alignas(64) TensorMap {
    const char* base;
    u64 sizes[3], strides[2];
    u32 box[3], unused[16];
};
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");
struct Copy { char* to; const TensorMap* map; int at[3]; u64* b; int rest, program; };
static std::vector<Copy> copies;
static std::set<std::pair<int, const TensorMap*>> acquired;  // by each program, in this launch
static u16 fill;  // what comes in place of numbers beyond a matrix

// The driver's cuTensorMapEncodeTiled, for what the kernel needs of it.
extern "C" int encode(TensorMap* map, int type, u32 rank, const char* base, const u64* sizes,
                      const u64* strides, const u32* box, const u32* steps, int interleave,
                      int swizzle, int, int filled) {
    if ((u64)map % 64 || type != 9 || rank != 3 || (u64)base % 16 || interleave || swizzle != 3 || filled)
        return 1;
    for (int i = 0; i < 3; i++)
        if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return 1;
    for (int i = 0; i < 2; i++)
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return 1;
    if (box[0] * 2 % 16 || box[0] * 2 > 128) return 1;
    *map = {base, {sizes[0], sizes[1], sizes[2]}, {strides[0], strides[1]}, {box[0], box[1], box[2]}};
    return 0;
}
static u32 bytes_of(const TensorMap* map) { return map->box[0] * map->box[1] * map->box[2] * 2; }
// Pieces of 16 bytes lie side by side, but for the lower bits of a piece's number in its 128 bytes,
// which are XORed with those of the number of the 128 bytes.
static void copy_now(const Copy& c) {
    const TensorMap* m = c.map;
    u64 to = 0, from[3];
    for (u32 k = 0; k < m->box[2]; k++)
        for (u32 j = 0; j < m->box[1]; j++)
            for (u32 i = 0; i < m->box[0]; i++, to += 2) {
                u64 place = to ^ (to >> 7 & 7) << 4;
                from[0] = c.at[0] + i, from[1] = c.at[1] + j, from[2] = c.at[2] + k;
                bool inside = from[0] < m->sizes[0] && from[1] < m->sizes[1] && from[2] < m->sizes[2];
                const char* held = m->base + from[0] * 2 + from[1] * m->strides[0] + from[2] * m->strides[1];
                memcpy(c.to + place, inside ? held : (const char*)&fill, 2);
            }
}
static void finish_some_copies() {
    for (size_t i = 0; i < copies.size();) {
        if (copies[i].rest-- > 0 || rand() & 1) { i++; continue; }
        Copy c = copies[i];
        copies[i] = copies.back();
        copies.pop_back();
        refuse_if_gone(c.program);
        copy_now(c);
        ((Mbar*)c.b)->bytes -= bytes_of(c.map);
        settle((Mbar*)c.b);
    }
}
static u64 evict_first_policy() { return 0; }
static void acquire_map(const TensorMap* map) { acquired.insert({BLOCK, map}); }
static void copy_tile(void* to, const TensorMap* map, int row, int group, u64* b, u64) {
    if ((u64)to % 1024) refuse("a tile does not lie where the engine's order of pieces begins");
    if ((u64)map % 64 || !acquired.count({BLOCK, map})) refuse("a map may be another's");
    int rest = rand() % 16 ? 0 : rand() % 200;  // some are far behind the others
    copies.push_back({(char*)to, map, {0, row, group}, b, rest, BLOCK});
}
// For tests: a tile as it lies, and what comes in place of numbers beyond a matrix.
extern "C" void copy_one(char* to, const TensorMap* map, int row, int group) {
    copy_now({to, map, {0, row, group}, 0, 0});
}
extern "C" void fill_with(int what) { fill = (u16)what; }
