// Linear layers of a few rows whose weights stream through shared memory.
//
// A program has 64 outputs of a layer (two strips of them where one gates the other) in a part of their
// inputs. Weights are the first factor of its GEMMs, so that rows may be as few as 16. One thread fetches
// tiles of weights into a ring as far ahead as it has space: they depend on no other kernel, and so are in
// flight while the previous kernel ends. Another fetches the rows when that has ended.
//
// Macros: COLUMNS, rows of a warpgroup's GEMM; GROUPS, warpgroups with as many rows each; STRIPS; DEPTH, by
// SIDE inputs of a tile; STAGES, tiles of the ring; IN_FLIGHT, tiles of weights that are requested at a
// time; SHARED_BYTES.

constexpr int OUTPUTS = 64;  // smallest number that a warpgroup's GEMM has
constexpr int SIDE = 64;     // contiguous inputs
constexpr int ROWS = COLUMNS * GROUPS;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 64;
constexpr int OF_WEIGHTS = OUTPUTS * SIDE * 2, OF_ROWS = ROWS * SIDE * 2;  // bytes of SIDE inputs
constexpr int STRIP = DEPTH * OF_WEIGHTS, WEIGHTS = STRIPS * STRIP, STAGE = WEIGHTS + DEPTH * OF_ROWS;

struct Params {
    TensorMap weights, rows;
    void* out;
    const u16* bias;
    long long part_pitch, row_pitch;  // strides of parts and rows of `out`, in elements
    int outputs, num_rows;
    int parts, tiles;  // tiles of a part
    int as_is;         // nonzero if sums are stored in float32
};

struct alignas(1024) Shared {
    unsigned char ring[STAGES * STAGE];
    u64 weights_there[STAGES], rows_there[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives as much");
static_assert(IN_FLIGHT > 0 && IN_FLIGHT <= STAGES, "a barrier tells a phase from the next one alone");

struct Place {
    int output, part;  // a program's first output, and its part
};

// Advance by one tile in the ring; barriers' phases alternate.
DEV void forward(int* slot, u32* turn) {
    if (++*slot < STAGES) return;
    *slot = 0;
    *turn ^= 1;
}

DEV void fetch_weights(const Params& p, Shared* s, Place at) {
    u64 once = policy_first();
    ask_for_map(&p.weights);
    int slot = 0, old = 0, first = at.part * p.tiles * DEPTH;
    u32 turn = 1, old_turn = 0;  // the first round waits for no barrier
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        wait_for(&s->empty[slot], turn);
        if (i >= IN_FLIGHT) {  // earlier requests are served first
            wait_for(&s->weights_there[old], old_turn);
            forward(&old, &old_turn);
        }
        mbar_expect(&s->weights_there[slot], WEIGHTS);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
            copy_tile(s->ring + slot * STAGE + strip * STRIP, &p.weights, at.output + strip * p.outputs,
                      first + i * DEPTH, &s->weights_there[slot], once);
        forward(&slot, &turn);
    }
}

DEV void fetch_rows(const Params& p, Shared* s, Place at) {
    ask_for_map(&p.rows);  // fetching it takes as long as fetching a tile
    wait_for_kernel_in_front();
    int slot = 0, first = at.part * p.tiles * DEPTH;
    u32 turn = 1;
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        wait_for(&s->empty[slot], turn);
        mbar_expect(&s->rows_there[slot], DEPTH * OF_ROWS);
        copy_rows(s->ring + slot * STAGE + WEIGHTS, &p.rows, 0, first + i * DEPTH, &s->rows_there[slot]);
        forward(&slot, &turn);
    }
}

struct Sums {
    float d[STRIPS][COLUMNS / 2];
};

DEV void multiply(const Params& p, Shared* s, Sums* sums) {
    int group = THREAD / 128, lane = THREAD % 32;
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sums->d[strip][i] = 0;
    int slot = 0, before = 0;
    u32 turn = 0;
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        wait_for(&s->weights_there[slot], turn);
        wait_for(&s->rows_there[slot], turn);
        const unsigned char* weights = s->ring + slot * STAGE;
        const unsigned char* rows = weights + WEIGHTS + group * COLUMNS * SIDE * 2;
        begin_products();
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int k = 0; k < DEPTH * SIDE / 16; k++)
                multiply_tiles<COLUMNS>(sums->d[strip], weights + strip * STRIP + k / 4 * OF_WEIGHTS + k % 4 * 32,
                                        rows + k / 4 * OF_ROWS + k % 4 * 32);
        end_products();
        // With two strips the compiler keeps no GEMM running across iterations.
        wait_for_products<STRIPS == 1>();
        int read = STRIPS == 1 ? before : slot;  // by this warp
        if ((i || STRIPS == 2) && lane == 0) mbar_arrive(&s->empty[read]);
        before = slot;
        forward(&slot, &turn);
    }
    wait_for_products<0>();
}

// A thread has outputs `row` and `row + 8` of a warp's 16, of rows 2 * pair, and one more, of every 8.
template <class Take>
DEV void each_sum(const Params& p, Place at, Take take) {
    int t = THREAD, lane = t % 32;
    int output = at.output + t % 128 / 32 * 16 + lane / 4, row = t / 128 * COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) {
        int n = output + i / 2 % 2 * 8, r = row + i / 4 * 8 + i % 2;
        if (n < p.outputs && r < p.num_rows) take(i, n, at.part * p.part_pitch + r * p.row_pitch + n);
    }
}

DEV void store(const Params& p, Place at, const Sums& sums) {
    if (STRIPS == 2) {
        each_sum(p, at, [&](int i, int, long long to) { ((u16*)p.out)[to] = to_bf16(gated(sums.d[0][i], sums.d[STRIPS - 1][i])); });
    } else if (p.as_is) {
        each_sum(p, at, [&](int i, int, long long to) { ((float*)p.out)[to] = sums.d[0][i]; });
    } else {
        each_sum(p, at, [&](int i, int n, long long to) {
            ((u16*)p.out)[to] = to_bf16(p.bias ? sums.d[0][i] + wide(kept1(p.bias + n)) : sums.d[0][i]);
        });
    }
}

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->weights_there[i], 1);
            mbar_init(&s->rows_there[i], 1);
            mbar_init(&s->empty[i], GROUPS * 4);
        }
        fence_init();
    }
    bar_sync(0, THREADS);
    let_next_kernel_in();
    Place at = {BLOCK / p.parts * OUTPUTS, BLOCK % p.parts};
    if (THREAD >= CONSUMERS + 32) {
        if (elected()) fetch_rows(p, s, at);
    } else if (THREAD >= CONSUMERS) {
        if (elected()) fetch_weights(p, s, at);
    } else {
        Sums sums;
        multiply(p, s, &sums);
        store(p, at, sums);
    }
}

#ifndef EMULATED
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_linear(const __grid_constant__ Params p) {
    program(p, (Shared*)memory);
}
#endif
