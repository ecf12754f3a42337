// Linear layers of a few rows whose weights stream through shared memory.
//
// A program computes one or two strips of 64 outputs of a layer in a part of their inputs; a gated layer has as many
// strips of gates in addition. Weights are the first factor of its GEMMs, so that rows may be as few as 16. One thread
// fetches tiles of weights into a ring as far ahead as it has space: they depend on no other kernel, and so are in
// flight while the previous kernel ends. Another fetches the rows when that has ended.

#if !defined(COLUMNS) || !defined(GROUPS) || !defined(STRIPS) || !defined(GATED) || !defined(DEPTH) || \
    !defined(STAGES) || !defined(IN_FLIGHT) || !defined(SHARED_BYTES)
#error "streamed.cu needs macros: COLUMNS GROUPS STRIPS GATED DEPTH STAGES IN_FLIGHT SHARED_BYTES"
#endif

#include "arithmetic.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int OUTPUTS = 64;  // smallest number that a warpgroup's GEMM has
constexpr int SIDE = 64;     // contiguous inputs
constexpr int ROWS = COLUMNS * GROUPS;
constexpr int OUTPUT_STRIPS = GATED ? STRIPS / 2 : STRIPS;  // gates come before the values that they gate
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 64;
constexpr int WEIGHTS_BYTES = OUTPUTS * SIDE * 2, ROWS_BYTES = ROWS * SIDE * 2;  // of SIDE inputs
constexpr int STRIP_BYTES = DEPTH * WEIGHTS_BYTES, STAGE_WEIGHTS_BYTES = STRIPS * STRIP_BYTES;
constexpr int STAGE_BYTES = STAGE_WEIGHTS_BYTES + DEPTH * ROWS_BYTES;

struct Params {
    TensorMap weights, rows;
    void* out;
    const u16* bias;
    long long part_stride, row_stride;  // of `out`, in elements
    int outputs, num_rows;
    int parts, tiles;    // tiles of a part
    int out_is_float32;  // nonzero if sums are stored without rounding
};

struct alignas(1024) Shared {
    unsigned char ring[STAGES * STAGE_BYTES];
    u64 weights_full[STAGES], rows_full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must cover Shared");
static_assert(IN_FLIGHT > 0 && IN_FLIGHT <= STAGES, "a barrier distinguishes a phase only from the next one");

typedef PipelineState<STAGES> State;

struct WorkItem {
    int output, part;  // a program's first output, and its part
};

DEV void fetch_weights(const Params& p, Shared* s, WorkItem item) {
    u64 evict_first = evict_first_policy();
    prefetch_map(&p.weights);
    int first = item.part * p.tiles * DEPTH;
    State state = {0, 1}, oldest = {0, 0};  // `oldest` in flight
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        mbar_wait(&s->empty[state.stage], state.parity);
        if (i >= IN_FLIGHT) {  // earlier requests are served first
            mbar_wait(&s->weights_full[oldest.stage], oldest.parity);
            oldest.advance();
        }
        mbar_expect(&s->weights_full[state.stage], STAGE_WEIGHTS_BYTES);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
            copy_tile(s->ring + state.stage * STAGE_BYTES + strip * STRIP_BYTES, &p.weights,
                      item.output + strip % OUTPUT_STRIPS * OUTPUTS + strip / OUTPUT_STRIPS * p.outputs,
                      first + i * DEPTH, &s->weights_full[state.stage], evict_first);
        state.advance();
    }
}

DEV void fetch_rows(const Params& p, Shared* s, WorkItem item) {
    prefetch_map(&p.rows);  // fetching it takes as long as fetching a tile
    wait_for_previous_kernel();
    int first = item.part * p.tiles * DEPTH;
    State state = {0, 1};
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        mbar_wait(&s->empty[state.stage], state.parity);
        mbar_expect(&s->rows_full[state.stage], DEPTH * ROWS_BYTES);
        copy_tile(s->ring + state.stage * STAGE_BYTES + STAGE_WEIGHTS_BYTES, &p.rows, 0, first + i * DEPTH,
                  &s->rows_full[state.stage]);
        state.advance();
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
    State state = {0, 0};
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < p.tiles; i++) {
        mbar_wait(&s->weights_full[state.stage], state.parity);
        mbar_wait(&s->rows_full[state.stage], state.parity);
        const unsigned char* weights = s->ring + state.stage * STAGE_BYTES;
        const unsigned char* rows = weights + STAGE_WEIGHTS_BYTES + group * COLUMNS * SIDE * 2;
        wgmma_fence();
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int k = 0; k < DEPTH * SIDE / 16; k++)
                wgmma_accumulate<COLUMNS>(
                    sums->d[strip], describe_rows(weights + strip * STRIP_BYTES + k / 4 * WEIGHTS_BYTES + k % 4 * 32),
                    describe_rows(rows + k / 4 * ROWS_BYTES + k % 4 * 32));
        wgmma_commit();
        // With several strips the compiler keeps no GEMM running across iterations.
        wgmma_wait<STRIPS == 1>();
        int finished = STRIPS == 1 ? previous : state.stage;  // by this warp
        if ((i || STRIPS > 1) && lane == 0) mbar_arrive(&s->empty[finished]);
        previous = state.stage;
        state.advance();
    }
    wgmma_wait<0>();
}

// Call store(strip, index of the sum, output, offset in `out`) for each sum of a thread: outputs `row` and
// `row + 8` of a warp's 16, of rows 2 * pair, and one more, of every 8.
template <class Store>
DEV void for_each_sum(const Params& p, WorkItem item, Store store) {
    int t = THREAD, lane = t % 32;
    int output = item.output + t % 128 / 32 * 16 + lane / 4, row = t / 128 * COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int strip = 0; strip < OUTPUT_STRIPS; strip++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            int n = output + strip * OUTPUTS + i / 2 % 2 * 8, r = row + i / 4 * 8 + i % 2;
            if (n < p.outputs && r < p.num_rows) store(strip, i, n, item.part * p.part_stride + r * p.row_stride + n);
        }
}

DEV void store_sums(const Params& p, WorkItem item, const Sums& sums) {
    if (GATED) {
        for_each_sum(p, item, [&](int strip, int i, int, long long to) {
            ((u16*)p.out)[to] = to_bf16(silu_mul(sums.d[strip][i], sums.d[STRIPS - OUTPUT_STRIPS + strip][i]));
        });
    } else if (p.out_is_float32) {
        for_each_sum(p, item, [&](int strip, int i, int, long long to) { ((float*)p.out)[to] = sums.d[strip][i]; });
    } else {
        for_each_sum(p, item, [&](int strip, int i, int n, long long to) {
            float sum = sums.d[strip][i];
            ((u16*)p.out)[to] = to_bf16(p.bias ? sum + bf16_to_float(load_constant(p.bias + n)) : sum);
        });
    }
}

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->weights_full[i], 1);
            mbar_init(&s->rows_full[i], 1);
            mbar_init(&s->empty[i], GROUPS * 4);
        }
        fence_init();
    }
    barrier_sync(0, THREADS);
    launch_next_kernel();
    WorkItem item = {BLOCK / p.parts * OUTPUTS * OUTPUT_STRIPS, BLOCK % p.parts};
    if (THREAD >= CONSUMERS + 32) {
        if (elect_one()) fetch_rows(p, s, item);
    } else if (THREAD >= CONSUMERS) {
        if (elect_one()) fetch_weights(p, s, item);
    } else {
        Sums sums;
        multiply(p, s, &sums);
        store_sums(p, item, sums);
    }
}

KERNEL(stream_linear, __launch_bounds__(THREADS, 1))
