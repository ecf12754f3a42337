// GEMMs of many rows, by pairs of programs that share the weights they fetch.
//
// A pair computes 256 rows by 128 outputs at a time, one such item after the other. Each of the two
// programs fetches its own half of the rows, and half of the weights for both, 64 inputs at a time, into a
// ring. Two warpgroups multiply 64 rows each, and for either a thread loads the residual tile and stores
// the result. So only the fetching threads wait for global memory.
//
// Either the parts of a GEMM are added up, each from its first input to its last, and the sum is added to
// the residual stream: with the bits of parts that kernels/triton/norm.py adds up. Or gates are multiplied
// together with the gated values.

#if !defined(GATES) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "paired.cu needs macros: GATES STAGES SHARED_BYTES"
#endif

#include "arithmetic.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int SIDE = 64, OUTPUTS = 128, GROUP_ROWS = 64, GROUPS = 2, ROWS = GROUP_ROWS * GROUPS;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STRIPS = GATES ? 2 : 1;
constexpr int ROWS_BYTES = ROWS * SIDE * 2, WEIGHTS_BYTES = OUTPUTS * SIDE * 2;  // of SIDE inputs
constexpr int STAGE_BYTES = ROWS_BYTES + STRIPS * WEIGHTS_BYTES;
constexpr int OUT_BYTES = GROUP_ROWS * OUTPUTS * 2, OUT_STRIP_BYTES = GROUP_ROWS * SIDE * 2;
constexpr int BAND = 8;  // row tiles that are computed before the next outputs: concurrent items share both

struct Params {
    TensorMap rows, weights, out;
    int outputs, num_rows;
    int parts, tiles;  // tiles of a part
    int pairs;
    float scale;  // of the sum that is added to the residual stream
    char unused[40];
};

struct alignas(1024) Shared {
    unsigned char ring[STAGES * STAGE_BYTES];
    unsigned char out[GROUPS][OUT_BYTES];  // the residual tile, and then the result
    u64 full[STAGES], empty[STAGES];
    u64 out_ready[GROUPS], out_written[GROUPS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must cover Shared");

typedef PipelineState<STAGES> State;
struct Item {
    int row, output;  // a program's first row and output
};
template <class Body>
DEV void for_each_item(const Params& p, Body body) {
    int across = (p.outputs + OUTPUTS - 1) / OUTPUTS, down = (p.num_rows + 2 * ROWS - 1) / (2 * ROWS);
#pragma unroll 1
    for (int i = BLOCK / 2; i < across * down; i += p.pairs) {
        int band = i / (BAND * across), rest = i % (BAND * across), high = min_int(BAND, down - band * BAND);
        body(Item{((band * BAND + rest % high) * 2 + BLOCK % 2) * ROWS, rest / high * OUTPUTS});
    }
}

DEV void fetch(const Params& p, Shared* s) {
    constexpr int HALF = OUTPUTS / 2;
    prefetch_map(&p.rows);
    prefetch_map(&p.weights);
    wait_for_previous_kernel();
    int program = BLOCK % 2;
    State state = {0, 1};
    for_each_item(p, [&](const Item& item) {
#pragma unroll 1
        for (int i = 0; i < p.parts * p.tiles; i++) {
            u64* full = &s->full[state.stage];
            unsigned char* rows = s->ring + state.stage * STAGE_BYTES;
            unsigned char* weights = rows + ROWS_BYTES + program * WEIGHTS_BYTES / 2;
            mbar_wait(&s->empty[state.stage], state.parity);
            mbar_expect(full, STAGE_BYTES);
            copy_tile(rows, &p.rows, item.row, i, full);
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++)
                multicast_tile(weights + strip * WEIGHTS_BYTES, &p.weights,
                               item.output + program * HALF + strip * p.outputs, i, full);
            state.advance();
        }
    });
}

// Load the residual tile of a warpgroup, and store its result.
DEV void load_and_store_out(const Params& p, Shared* s, int group) {
    prefetch_map(&p.out);
    wait_for_previous_kernel();
    u32 parity = 0;
    for_each_item(p, [&](const Item& item) {
        int row = item.row + group * GROUP_ROWS, column = item.output / SIDE;
        if (GATES) {
            mbar_arrive(&s->out_ready[group]);
        } else {
            mbar_expect(&s->out_ready[group], OUT_BYTES);
            copy_tile(s->out[group], &p.out, row, column, &s->out_ready[group]);
        }
        mbar_wait(&s->out_written[group], parity);
        store_tile(&p.out, row, column, s->out[group]);
        wait_for_stores_read();
        parity ^= 1;
    });
}

// A computing warpgroup.
struct PairedGemm {
    const Params& p;
    Shared* s;
    int group, lane;
    State state;
    u32 out_parity;
    float first[OUTPUTS / 2];   // sums of the current part, or gates
    float second[OUTPUTS / 2];  // the sum of parts, or gated values

    DEV PairedGemm(const Params& params, Shared* shared) : p(params), s(shared), state{0, 0}, out_parity(0) {
        group = warp_uniform(THREAD / 128), lane = THREAD % 32;
    }
    DEV void compute_item() {
        if (GATES) {
            multiply_part();
        } else {
#pragma unroll
            for (int i = 0; i < OUTPUTS / 2; i++) second[i] = 0;
#pragma unroll 1
            for (int part = 0; part < p.parts; part++) {
                multiply_part();
#pragma unroll
                for (int i = 0; i < OUTPUTS / 2; i++) second[i] += first[i];
            }
        }
        write_out();
    }
    DEV void multiply_part() {
        int previous = multiply_tile(true);
#pragma unroll 1
        for (int i = 1; i < p.tiles; i++) {
            int stage = multiply_tile(false);
            wgmma_wait<1>();
            release(previous);
            previous = stage;
        }
        wgmma_wait<0>();
        pin_registers<OUTPUTS / 2>(first);
        if (GATES) pin_registers<OUTPUTS / 2>(second);
        release(previous);
    }
    DEV int multiply_tile(bool overwrite) {
        int stage = state.stage;
        mbar_wait(&s->full[stage], state.parity);
        const unsigned char* tiles = s->ring + stage * STAGE_BYTES;
        TileDescriptor rows = describe_rows(tiles + group * GROUP_ROWS * SIDE * 2);
        TileDescriptor weights = describe_rows(tiles + ROWS_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SIDE / 16; k++) {
            TileDescriptor a = advance_descriptor(rows, k * 32), b = advance_descriptor(weights, k * 32);
            multiply(first, a, b, overwrite && k == 0);
            if (GATES) multiply(second, a, advance_descriptor(b, WEIGHTS_BYTES), overwrite && k == 0);
        }
        wgmma_commit();
        state.advance();
        return stage;
    }
    DEV void multiply(float* sums, TileDescriptor a, TileDescriptor b, bool overwrite) {
        if (overwrite) wgmma_overwrite<OUTPUTS>(sums, a, b);
        else wgmma_accumulate<OUTPUTS>(sums, a, b);
    }
    DEV void release(int stage) const {
        if (lane < 2) mbar_arrive_in_pair(&s->empty[stage], lane);
    }
    // A thread has rows `row` and `row + 8` of a warp's 16, of outputs 2 * pair, and one more, of every 8.
    DEV void write_out() {
        mbar_wait(&s->out_ready[group], out_parity);
        out_parity ^= 1;
        int row = THREAD % 128 / 32 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned char* out = s->out[group] + (row + half * 8) * SIDE * 2 + pair * 4;
#pragma unroll
            for (int n = 0; n < OUTPUTS / 8; n++) {
                int i = n * 4 + half * 2;
                u32* to = (u32*)(out + n / 8 * OUT_STRIP_BYTES + ((n % 8) ^ (row % 8)) * 16);
                *to = GATES ? pack_bf16(silu_mul(first[i], second[i]), silu_mul(first[i + 1], second[i + 1]))
                            : pack_bf16(add(low_to_float(*to), second[i]), add(high_to_float(*to), second[i + 1]));
            }
        }
        fence_async_proxy();
        sync_warp();
        if (lane == 0) mbar_arrive(&s->out_written[group]);
    }
    DEV float add(float residual, float sum) const { return fmadd(sum, p.scale, residual); }
};

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->full[i], 1);
            mbar_init(&s->empty[i], 2 * GROUPS * 4);
        }
        for (int i = 0; i < GROUPS; i++) {
            mbar_init(&s->out_ready[i], 1);
            mbar_init(&s->out_written[i], 4);
        }
        fence_init();
    }
    sync_pair();
    if (THREAD < CONSUMERS) {
        claim_registers<240>();
        PairedGemm gemm(p, s);
        for_each_item(p, [&](const Item&) { gemm.compute_item(); });
    } else {
        release_registers<24>();
        int warp = (THREAD - CONSUMERS) / 32;
        if (warp == 0 && elect_one()) fetch(p, s);
        if (warp && warp <= GROUPS && elect_one()) load_and_store_out(p, s, warp - 1);
    }
    sync_pair();
}

KERNEL(multiply_in_pairs, PAIRED __launch_bounds__(THREADS, 1))
