// The machine that the kernel of a whole step runs on, emulated on one core.
//
// Threads are fibers that run in turns, some of which are left out at random. A copy is over at
// some later time, at random too (copies.h), and so is it with words. Shared memory begins full of NaN.

#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <set>
#include <utility>
#include <vector>

#define KERNEL(...)
#define DEV inline
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };

struct Lane { u32 seq; u64 value[2][2]; };
struct Fiber { ucontext_t context; void* left_at[5]; int block, thread; bool begun, over; };
struct Named { int count; u32 generation; };
static const int MOST_NAMED = 4;  // barriers of a program
static Fiber* fibers;
static int here, threads_of_block;
static size_t shared_of_block;  // bytes from a program's shared memory to the next one's
static Lane* lanes;
static Named* named;
static void* top_left_at[5];
#define BLOCK (fibers[here].block)
#define THREAD (fibers[here].thread)
// Turns change by jumps of the compiler's, since swapcontext asks the system twice each time. It must not
// look into these functions (noipa): other fibers change the registers that they leave alone. Nor is it told
// that a jump does not return, since a sanitizer would tidy up the stack before each.
#define OPAQUE [[gnu::noinline, gnu::noipa, gnu::no_sanitize_address]]
OPAQUE static void jump_to(void** left_at) { __builtin_longjmp(left_at, 1); }
OPAQUE static void yield() {
    if (!__builtin_setjmp(fibers[here].left_at)) jump_to(top_left_at);
}
OPAQUE static void give_turn(Fiber* f) {
    if (__builtin_setjmp(top_left_at)) return;
    if (f->begun) jump_to(f->left_at);
    f->begun = true;
    setcontext(&f->context);
}
static void launder(int&) {}
static int warp_uniform(int v) { return v; }
static void refuse(const char* why) { puts(why); fflush(stdout); abort(); }
static void refuse_if_gone(int block) {
    for (int i = 0; i < threads_of_block; i++)
        if (!fibers[block * threads_of_block + i].over) return;
    refuse("something comes to a program that is gone");
}
static u64 progress;  // counts what others may have waited for

// ---------------------------------------------------------------- barriers
struct Mbar { unsigned char count, pending, phase, pad; int bytes; };
static void settle(Mbar* m) {
    if (m->phase > 1) refuse("a barrier is used before it is there");
    if (!m->pending && !m->bytes) { m->pending = m->count; m->phase ^= 1; progress++; }
}
static void mbar_init(u64* b, int n) { *(Mbar*)b = {(unsigned char)n, (unsigned char)n, 0, 0, 0}; }
static bool mbar_try(u64* b, u32 parity) {
    if (((Mbar*)b)->phase != parity) return true;
    yield();
    return ((Mbar*)b)->phase != parity;
}
static void mbar_arrive(u64* b) {
    Mbar* m = (Mbar*)b;
    if (!m->pending) refuse("a barrier has more arrivals than it waits for");
    m->pending--;
    settle(m);
}
static void mbar_expect(u64* b, u32 bytes) { ((Mbar*)b)->bytes += bytes; mbar_arrive(b); }
static void fence_init() {}
static void barrier_sync(int id, int n) {
    Named* b = &named[BLOCK * MOST_NAMED + id];
    u32 before = b->generation;
    if (++b->count == n) { b->count = 0; b->generation++; progress++; return; }
    while (b->generation == before) yield();
}
static u32 atomic_increment(u32* p) { progress++; return (*p)++; }

// ---------------------------------------------------------------- what the lanes of a warp exchange
static void post(u64 first, u64 second, u64 (*all)[2]) {
    Lane *own = &lanes[BLOCK * threads_of_block + THREAD], *warp = own - THREAD % 32;
    u32 n = own->seq;
    own->value[n & 1][0] = first;
    own->value[n & 1][1] = second;
    own->seq = n + 1;
    for (bool ready = false; !ready;) {
        ready = true;
        for (int i = 0; i < 32; i++) ready = ready && (int)(warp[i].seq - n) >= 1;
        if (!ready) yield();
    }
    if (all)
        for (int i = 0; i < 32; i++) memcpy(all[i], warp[i].value[n & 1], sizeof(all[i]));
}
static bool elect_one() { return THREAD % 32 == 0; }
static void sync_warp() { post(0, 0, 0); }
static float shuffle_xor(float v, int mask) {
    u64 all[32][2], bits = 0;
    memcpy(&bits, &v, 4);
    post(bits, 0, all);
    memcpy(&v, all[THREAD % 32 ^ mask], 4);
    return v;
}
static float half_of(u64 v, int i) {
    u32 bits = (u32)(v >> (i * 16)) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u64 a[32][2], b[32][2];
    post(a0 | (u64)a1 << 32, a2 | (u64)a3 << 32, a);
    post(b0 | (u64)b1 << 32, 0, b);
    int lane = THREAD % 32;
    for (int e = 0; e < 4; e++) {
        int row = lane / 4, lower = e / 2, column = lane % 4 * 2 + e % 2;
        float sum = d[e];
        for (int k = 0; k < 16; k++) {
            int holder = k % 8 / 2, upper = k / 8;
            float x = half_of(a[row * 4 + holder][upper], lower * 2 + k % 2);
            sum += x * half_of(b[column * 4 + holder][0], upper * 2 + k % 2);
        }
        d[e] = sum;
    }
}
static void see_matrices(u64 (*all)[2], const void* row) {
    u64 own[2], later[2];
    if ((u64)row % 16) refuse("a row of a matrix is not aligned");
    memcpy(own, row, 16);
    post(own[0], own[1], all);  // it may be read when its thread comes, and until the last one has come
    memcpy(later, row, 16);
    if (memcmp(own, later, 16)) refuse("a row of a matrix is written while it is read");
}
static void load_matrices(u32* r, const void* row) {
    u64 all[32][2];
    see_matrices(all, row);
    int lane = THREAD % 32;
    for (int m = 0; m < 4; m++) memcpy(&r[m], (char*)all[m * 8 + lane / 4] + lane % 4 * 4, 4);
}
static void load_matrices_transposed(u32* r, const void* row) {
    u64 all[32][2];
    see_matrices(all, row);
    int lane = THREAD % 32;
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) memcpy((char*)&r[m] + i * 2, (char*)all[m * 8 + lane % 4 * 2 + i] + lane / 4 * 2, 2);
}
static u32 transpose_matrix(u32 two) {
    u64 all[32][2];
    post(two, 0, all);
    int lane = THREAD % 32;
    u32 turned = 0;
    for (int i = 0; i < 2; i++) {
        u32 held = (u32)all[(lane % 4 * 2 + i) * 4 + lane / 8][0];
        turned |= (held >> lane / 4 % 2 * 16 & 0xffff) << i * 16;
    }
    return turned;
}

// ---------------------------------------------------------------- memory and arithmetic
// Words of different places are seen in any order, some time after they were stored.
struct Stored { void* to; u64 word; int size; };
static std::vector<Stored> on_their_way;
static void store_relaxed(u32* p, u32 w) { on_their_way.push_back({p, w, 4}); }
static void store_relaxed(u64* p, u64 w) { on_their_way.push_back({p, w, 8}); }
static void see_some_words(bool all) {
    std::set<void*> older;
    size_t left = 0;
    for (const Stored& each : on_their_way)
        if ((all || rand() & 1) && !older.count(each.to)) memcpy(each.to, &each.word, each.size), progress++;
        else on_their_way[left++] = each, older.insert(each.to);
    on_their_way.resize(left);
}
template <int V, class Word>
static void load_relaxed(const Word* p, Word* w) {
    if ((u64)p % (V * sizeof(Word))) refuse("words are not aligned");
    memcpy(w, p, V * sizeof(Word));
}
static u16 load_constant(const u16* p) { return *p; }
static u32 load_pair(const u16* p) { return *(const u32*)p; }
static float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 as_bits(float f) { u32 v; memcpy(&v, &f, 4); return v; }
static u16 to_bf16(float v) {
    u32 b;
    memcpy(&b, &v, 4);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
static u32 pack_bf16(float first, float second) { return to_bf16(first) | (u32)to_bf16(second) << 16; }
static float exp2_ftz(float v) { return exp2f(v); }
static float divide(float a, float b) { return a / b; }
static float reciprocal(float v) { return 1 / v; }
static float reciprocal_sqrt(float v) { return 1 / sqrtf(v); }
static float fmadd(float a, float b, float c) { return fmaf(a, b, c); }
