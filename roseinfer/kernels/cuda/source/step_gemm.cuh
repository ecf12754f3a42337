// GEMMs of the megakernel: one thread fetches the program's weights, and the other warps multiply.
#pragma once

#include "step_layout.cuh"

// One thread fetches the program's rows of all matrices, in the order of their use, into a ring of tiles in
// shared memory: one instruction per tile. It only waits for free stages, since weights depend on nothing.
// The ring continues in a launch that times out too: a warp that did not wait for a tile would use a stage
// that is still being filled.
struct Producer {
    Shared* s;
    u64 evict_first;
    const TensorMap *map, *last;  // maps of the matrix that is fetched, and of the last one
    int stage, oldest;            // stages of the next tile, and of the tile IN_FLIGHT before it
    u32 parity, oldest_parity;

    DEV void start(const Params& p, Shared* shared) {
        s = shared; evict_first = evict_first_policy();
        map = p.maps; last = map + p.num_layers * MATRICES;
        // The first round waits for no barrier: the phase before its first counts as over.
        stage = 0; oldest = STAGES - IN_FLIGHT;
        parity = oldest_parity = 1;
        acquire_map(map);
    }
    DEV void fetch_tile(int row, int group, u32 bytes) {
        mbar_wait(&s->empty[stage], parity);
        // More concurrent requests than this delay each other (docs/explanation/performance.md).
        mbar_wait(&s->full[oldest], oldest_parity);
        mbar_expect(&s->full[stage], bytes);
        copy_tile(s->ring + stage * STAGE_BYTES, map, row, group, &s->full[stage], evict_first);
        advance(1, &stage, &parity);
        advance(1, &oldest, &oldest_parity);
    }
    // The next matrix: one or two strips, MLP rows apart, `count` rows each. A tile with fewer than ROWS of
    // them contains the following rows of the matrix, or zeros: their sums are ignored.
    DEV void fetch_matrix(int first, int count, GemmSplit split, int strips) {
        int blocks = row_blocks(count), chains = blocks * strips * split.parts;
        if (map != last) acquire_map(map + 1);
#pragma unroll 1
        for (int wave = 0; wave < chains; wave += WARPS) {
            int end = chains - wave < WARPS ? chains : wave + WARPS;
#pragma unroll 1
            for (int tile = 0; tile < split.tiles; tile++)
#pragma unroll 1
                for (int chain = wave; chain < end; chain++) {
                    int block = chain / split.parts, part = chain % split.parts;
                    int row = first + block * ROWS;
                    if (block >= blocks) row += MLP - blocks * ROWS;
                    fetch_tile(row, (part * split.tiles + tile) * split.groups, GROUP_BYTES * split.groups);
                }
        }
        map++;
    }
};

DEV void produce(const Params& p, Shared* s) {
    Producer producer;
    producer.start(p, s);
    int first, count;
#pragma unroll 1
    for (int matrix = 0; matrix <= p.num_layers * MATRICES; matrix++) {
        int half = matrix / 2, mlp = half % 2;
        bool second = matrix % 2, head = matrix == p.num_layers * MATRICES;
        program_rows(second ? WIDTH : head ? VOCAB : mlp ? MLP : QKV,
                     phase_index(half, second ? SECOND_GEMM : FIRST_GEMM), &first, &count);
        GemmSplit of_half = second_gemm_split(mlp);
        GemmSplit split = {second ? of_half.parts : WIDTH_SPLIT.parts, second ? of_half.tiles : WIDTH_SPLIT.tiles,
                           second ? of_half.groups : WIDTH_SPLIT.groups};
        producer.fetch_matrix(first, count, split, mlp && !second ? 2 : 1);
    }
}

// The other warps wait for activations, and multiply.
struct Consumer : Exchange {
    int t, warp, lane;
    int stage;      // first stage of a wave's next tiles: each warp takes the one at its index
    u32 parity;
    int piece;      // offset of a lane's piece in a tile's first group
    int row, pair;  // row or column of a GEMM fragment, and pair of inputs
    int position;   // of the new token

    DEV void start(const Params* params, Shared* shared) {
        Exchange::start(params, shared);
        t = THREAD; warp = t / 32; lane = t % 32;
        row = lane / 4; pair = lane % 4;
        stage = 0; parity = 0;
        piece = lane % 8 * (SIDE * 2) + (lane / 8 ^ lane % 8) * 16;
        position = (int)*p->length;
        // Rows without a query of the group stay empty.
#pragma unroll 1
        for (int i = t; i < 16 * QUERY_STRIDE; i += CONSUMERS) s->queries[i] = 0;
    }
    DEV void sync() { barrier_sync(1, CONSUMERS); }

    // ------------------------------------------------------------ GEMMs
    //
    // Address of an input for `multiply`: a lane loads 8 of 32 at once, and so pairs are contiguous.
    DEV u16* input(int k) {
        int group = k / INTERLEAVED, e = k % INTERLEAVED;
        return s->inputs + group * INTERLEAVED + (e % 8) / 2 * 8 + e / 8 * 2 + e % 2;
    }
    // A warp's chains of 8 outputs each: inputs are added up 16 by 16, first to last, as in the Triton
    // kernels, whose bits they have. Inputs are the rows of the first factor, all equal or empty; the
    // weights of an output are a column of the second. store(index, first, second) gets pairs of sums.
    template <class Store>
    DEV void multiply(int chains, GemmSplit split, Store store) {
#pragma unroll 1
        for (int wave = 0; wave < chains; wave += WARPS) {
            int wave_chains = chains - wave < WARPS ? chains - wave : WARPS;
            int chain = wave + warp;
            float d[4] = {0, 0, 0, 0};
            const uint4* x = (const uint4*)(s->inputs + chain % split.parts * split.part_inputs()) + pair;
#pragma unroll 1
            for (int tile = 0; tile < split.tiles; tile++) {
                if (warp < wave_chains) multiply_tile(d, x, split.groups);
                x += split.groups * (SIDE / 8);
                advance(wave_chains, &stage, &parity);
            }
            if (warp < wave_chains && row == 0) store(chain * ROWS + pair * 2, d[0], d[1]);
        }
    }
    DEV void multiply_tile(float* d, const uint4* x, int groups) {
        int warp_stage = stage;
        u32 warp_parity = parity;
        advance(warp, &warp_stage, &warp_parity);
        mbar_wait(&s->full[warp_stage], warp_parity);
        const unsigned char* tile = s->ring + warp_stage * STAGE_BYTES;
#pragma unroll 8
        for (int k = 0; k < groups; k++) {
            u32 w[4];
            load_matrices(w, tile + k * GROUP_BYTES + piece);
            multiply_inputs(d, w, x[k * 8]);
            load_matrices(w, tile + k * GROUP_BYTES + (piece ^ 64));  // 4 pieces further
            multiply_inputs(d, w, x[k * 8 + 4]);
        }
        sync_warp();
        if (lane == 0) mbar_arrive(&s->empty[warp_stage]);
    }
    DEV void multiply_inputs(float* d, const u32* w, uint4 a) {
        mma(d, a.x, 0, a.y, 0, w[0], w[1]);
        mma(d, a.z, 0, a.w, 0, w[2], w[3]);
    }
    DEV void store_results(int index, float first, float second) {
        s->results[index] = first;
        s->results[index + 1] = second;
    }
    // The sum of a row's parts, in order.
    DEV float sum_parts(int r, int parts) const {
        float total = 0;
#pragma unroll 1
        for (int part = 0; part < parts; part++)
            total += s->results[(r / ROWS * parts + part) * ROWS + r % ROWS];
        return total;
    }

    // ------------------------------------------------------------ inputs
    typedef RowNorm<WIDTH, NORM_WARPS, CONSUMERS> Norm;
    static constexpr int THREAD_ELEMENTS = Norm::THREAD_ELEMENTS;

    DEV void norm_into_inputs(const float* v, const u16* gain) {
        float factor = Norm::factor(v, s->squares, t, p->epsilon, [&] { sync(); });
#pragma unroll
        for (int i = 0; i < THREAD_ELEMENTS; i++) {
            int n = Norm::index(t, i);
            if (n < WIDTH) *input(n) = Norm::normed(v[i], factor, gain[i]);
        }
        sync();
    }
    // The gain of the next norm depends on nothing, and is loaded before any wait.
    DEV void load_gain(const u16* from, u16* gain) const {
#pragma unroll
        for (int i = 0; i < THREAD_ELEMENTS; i++) {
            int n = Norm::index(t, i);
            gain[i] = n < WIDTH ? load_constant(from + n) : 0;
        }
    }
    DEV void receive_residual(const u32* from, u32 stamp, float* v) const {
        constexpr int V = Norm::VECTOR, N = THREAD_ELEMENTS / V;
        u32 wanted = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (Norm::index(t, j * V) < WIDTH) wanted |= 1u << j;
#pragma unroll
        for (int i = 0; i < THREAD_ELEMENTS; i++) v[i] = 0;
        receive<u32, V, N>(wanted, stamp, [&](int j) { return from + Norm::index(t, j * V); },
                           [&](int j, const u32* w) {
#pragma unroll
                               for (int e = 0; e < V; e++) v[j * V + e] = value_of(w[e]);
                           });
    }
    // Load the token's embedding, which the first program publishes as the residual stream.
    DEV void load_embedding(float* v) const {
        const u16* from = p->embedding + *p->token * WIDTH;
#pragma unroll
        for (int i = 0; i < THREAD_ELEMENTS; i++) {
            int n = Norm::index(t, i);
            v[i] = n < WIDTH ? round_to_bf16(bf16_to_float(load_constant(from + n)) * p->embedding_multiplier) : 0;
            if (n < WIDTH && BLOCK == 0) publish(p->residual + n, to_bf16(v[i]), stamp_of(0));
        }
    }
    // Receive words as inputs: a thread requests up to 16 times 4 of them at a time.
    DEV void receive_inputs(const u32* from, int count, u32 stamp) {
        constexpr int LOADS = (max_int(ATTENDED, MLP) / 4 + CONSUMERS - 1) / CONSUMERS, ROUNDS = (LOADS + 15) / 16;
        constexpr int N = (LOADS + ROUNDS - 1) / ROUNDS;
#pragma unroll 1
        for (int begin = t * 4; begin < count; begin += N * CONSUMERS * 4) {
            u32 wanted = 0;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (begin + j * CONSUMERS * 4 < count) wanted |= 1u << j;
            u32* to = (u32*)input(begin);
            receive<u32, 4, N>(wanted, stamp, [&](int j) { return from + begin + j * CONSUMERS * 4; },
                               [&](int j, const u32* w) {
                                   to[j * CONSUMERS * 2] = pack_values(w[0], w[1]);
                                   to[j * CONSUMERS * 2 + 4] = pack_values(w[2], w[3]);
                               });
        }
        sync();
    }
};
