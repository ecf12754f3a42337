// What the programs of the megakernel share: sizes, parameters, shared memory, the split of GEMMs, and the
// exchange of activations in global memory.
#pragma once

#if !defined(WIDTH) || !defined(HEADS) || !defined(KV_HEADS) || !defined(DIM) || !defined(MLP) || !defined(VOCAB) || \
    !defined(ROTARY_DIM) || !defined(BLOCK_SIZE) || !defined(OUT_PARTS) || !defined(DOWN_PARTS) || \
    !defined(NORM_WARPS) || !defined(NORMED) || !defined(PROGRAMS) || !defined(MAX_CHUNK) || !defined(STAGES) || \
    !defined(IN_FLIGHT) || !defined(MAX_RESULTS) || !defined(MAX_INPUTS) || !defined(SHARED_BYTES)
#error "whole_step.cu needs macros: \
WIDTH HEADS KV_HEADS DIM MLP VOCAB ROTARY_DIM BLOCK_SIZE OUT_PARTS DOWN_PARTS NORM_WARPS NORMED PROGRAMS \
MAX_CHUNK STAGES IN_FLIGHT MAX_RESULTS MAX_INPUTS SHARED_BYTES"
#endif
#ifndef MAX_POLLS
#define MAX_POLLS (1 << 22)  // polls of words until a program times out: seconds
#endif

#include "arithmetic.cuh"
#include "machine.cuh"
#include "pipeline.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM, ATTENDED = HEADS * DIM;
constexpr int ROWS = 8;          // outputs of a tile of weights
constexpr int INTERLEAVED = 32;  // inputs that are multiplied by two instructions
constexpr int TILE_T = 64;       // tokens of a tile in attention
constexpr int SIDE = 64;         // contiguous inputs of a tile
constexpr int MATRICES = 4;      // matrices per layer

// The inputs of a tile, of parts of `inputs` inputs.
DEV constexpr int chunk_of(int inputs) {
    int chunk = inputs < MAX_CHUNK ? inputs : MAX_CHUNK;
    while (inputs % chunk || chunk % SIDE) chunk--;
    return chunk;
}
// A tile is groups of SIDE inputs, and a group the 128 bytes of each of its rows. Of the 16-byte pieces of
// a row, piece i is at i XOR the row, which avoids bank conflicts. The copy engine swizzles a tile so if it
// begins at a multiple of a group's bytes.
constexpr int GROUP_BYTES = ROWS * SIDE * 2;
constexpr int STAGE_BYTES = GROUP_BYTES / SIDE * max_int(chunk_of(WIDTH), max_int(chunk_of(ATTENDED / OUT_PARTS),
                                                                                  chunk_of(MLP / DOWN_PARTS)));
constexpr int QUERY_STRIDE = DIM + 8, WEIGHT_STRIDE = TILE_T + 8;

static_assert(GROUP * KV_HEADS == HEADS && GROUP <= 16, "a group of query heads must fit the rows of a GEMM");
static_assert(BLOCK_SIZE % 16 == 0, "16 tokens must be contiguous");
static_assert(DIM % 16 == 0 && DIM <= 16 * WARPS, "a warp computes 16 elements of a head");
static_assert((1ll << 32) / VOCAB > PROGRAMS, "rows are counted in 32 bits");
static_assert(WIDTH >= PROGRAMS && QKV >= PROGRAMS && MLP >= PROGRAMS, "a program must have rows of all GEMMs");
static_assert(ATTENDED % OUT_PARTS == 0 && MLP % DOWN_PARTS == 0, "parts must have equal numbers of inputs");
// A warp that waits for a tile knows that a tile up to WARPS before it has arrived, and so that all have up
// to IN_FLIGHT before that. The previous tile in the stage must be among these: a barrier distinguishes a
// phase from the next one, and not from the one after that.
static_assert(IN_FLIGHT > 0 && STAGES >= WARPS + IN_FLIGHT, "more stages are needed");

struct Layer {
    const u16 *norm, *bias, *mlp_norm;
    const u16 *cosines, *sines;  // [positions, ROTARY_DIM]; null where the layer does not rotate
    const u16 *query_gain, *key_gain;
    u16 *keys, *values;          // [blocks, KV_HEADS, BLOCK_SIZE, DIM], with a stride of blocks
};

struct Params {
    const Layer* layers;
    const TensorMap* maps;  // by layer: of qkv, out, gate_up_weight and down; then of the head
    const u16 *embedding, *final_norm;
    const long long *token, *length, *table;
    // Words that programs exchange.
    u32 *residual;           // [2, WIDTH]: input of a layer, and after its attention
    u32 *qkv_new;            // [QKV]
    u32 *attended;           // [ATTENDED]
    u32 *hidden;             // [MLP]
    u16 *logits;             // [VOCAB]
    u64 *sums;               // [HEADS, parts + 1, DIM]: weighted values of the new token, then of each part
    u64 *softmax_stats;      // [HEADS, parts + 1, 2]: the highest score, and the sum of weights
    u32 *counters;           // [0]: launches, [32]: finished programs
    int *timeouts;           // [0]: nonzero if a program timed out in this launch, [1]: launches that timed out
    long long block_stride;  // of a cache, in elements
    int num_layers, max_parts;
    float epsilon, head_epsilon, embedding_multiplier, residual_multiplier, scale;
};

struct alignas(128) Shared {
    unsigned char ring[STAGES * STAGE_BYTES];  // first, since it begins at a multiple of GROUP_BYTES
    alignas(16) u16 inputs[MAX_INPUTS];        // of a GEMM, in the order in which lanes load them
    float results[MAX_RESULTS];                // of a phase's GEMMs, by chain
    alignas(16) u16 queries[16 * QUERY_STRIDE];
    alignas(16) u16 weights[16 * WEIGHT_STRIDE];
    alignas(16) u16 new_key_value[2 * DIM];    // of a head
    float warp_max[WARPS * 16];                // highest scores of a tile, by warp
    float squares[32];
    float norm_factors[17];                    // of a group's queries, and of its key
    u64 full[STAGES], empty[STAGES];
    int timed_out;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must cover Shared");

// ---------------------------------------------------------------- phases, and the split of GEMMs
//
// A layer has two halves: attention, and the MLP. A half has a first GEMM, attention or nothing, and a
// second GEMM, whose result is added to the residual stream. The head is one more first GEMM.
enum Phase { FIRST_GEMM, ATTENTION, SECOND_GEMM };
DEV int phase_index(int half, Phase phase) { return half * 3 + phase; }

// A program's rows, of n rows of a phase; the programs with one more row alternate.
DEV void program_rows(int n, int phase, int* first, int* count) {
    u32 rank = (BLOCK + 29 * phase) % PROGRAMS;
    int a = rank * n / PROGRAMS;
    *first = a;
    *count = (rank + 1) * n / PROGRAMS - a;
}

// Advance by stages of the ring; barriers' phases alternate.
DEV void advance(int stages, int* stage, u32* parity) {
    *stage += stages;
    if (*stage >= STAGES) {
        *stage -= STAGES;
        *parity ^= 1;
    }
}

// The split of a GEMM: inputs are added up in parts, and a part's inputs arrive in tiles.
struct GemmSplit {
    int parts, tiles, groups;  // tiles of a part, and groups of a tile
    DEV int part_inputs() const { return tiles * groups * SIDE; }
};
DEV constexpr GemmSplit split_gemm(int inputs, int parts) {
    return {parts, inputs / parts / chunk_of(inputs / parts), chunk_of(inputs / parts) / SIDE};
}
constexpr GemmSplit WIDTH_SPLIT = split_gemm(WIDTH, 1), ATTENDED_SPLIT = split_gemm(ATTENDED, OUT_PARTS),
                    MLP_SPLIT = split_gemm(MLP, DOWN_PARTS);
DEV GemmSplit second_gemm_split(int mlp) {
    return {mlp ? MLP_SPLIT.parts : ATTENDED_SPLIT.parts, mlp ? MLP_SPLIT.tiles : ATTENDED_SPLIT.tiles,
            mlp ? MLP_SPLIT.groups : ATTENDED_SPLIT.groups};
}

// The tiles of weights of a phase: chains of GEMMs, in consecutive waves of as many chains as there are
// warps. A chain is 8 outputs in one part of their inputs, and belongs to one warp. In a wave all chains'
// first tiles come first, so that every warp has work early.
DEV int row_blocks(int rows) { return (rows + ROWS - 1) / ROWS; }

// ---------------------------------------------------------------- the exchange of activations
//
// Programs exchange words: a bfloat16 in the upper half, and in the lower half a stamp, which identifies
// the layer and launch in which the word was written. A writer stores the word, and needs no fence and no
// counter. A reader loads it, and does so again while its stamp is not the expected one. So a word never
// depends on other memory, and words may arrive in any order.
//
// An old word never has the expected stamp. Stamps are counted: a launch uses one per layer, and one more
// for the residual stream after the last one. Every word is written once in every layer of every launch,
// even in one that times out, so the previous content is at most one launch old. Memory begins with zeros,
// and the first launch's stamps with one. Partial results of attention are words of 64 bits, a float32 and
// a stamp of 32 bits: a part of the context may be unused for long before a context has it again, but
// stamps of 32 bits wrap only after days of uninterrupted steps.
//
// No program writes a word that another has yet to read in the previous layer. Every program has rows of
// every GEMM, and a GEMM's rows need all of its inputs. So a program that has all outputs of a GEMM knows
// that every program has read all of the GEMM's inputs. A layer is, in this order, the QKV GEMM, attention to
// the parts of the context, their merge, the output GEMM, the gate-up GEMM and the down GEMM. A word of
//
// qkv_new is written by a program that has read all of the residual stream into the layer. That is made by
// the down GEMM of all programs, after the gate-up GEMM of all, after the output GEMM of all, after attention
// of all heads, whose parts had read all of qkv_new.
//
// sums and softmax_stats, of a part, are written by a program that has received queries of the layer. They
// are made after the down, gate-up and output GEMMs of all programs in the previous layer, which had read all
// of attended, and so after the programs that had merged all parts.
//
// attended is written by a program that has received all parts of a head, which had read the layer's qkv_new.
// That is made by the QKV GEMM of all programs, after the down, gate-up and output GEMMs of all in the
// previous layer, which had read all of attended.
//
// residual[1] is written by a program that has read all of attended: after the QKV GEMM of all programs, and
// so after the down and gate-up GEMMs of all in the previous layer, which had read it.
//
// hidden is written by a program that has read all of residual[1]: after attention and the QKV GEMM of all
// programs, and so after the down GEMM of all in the previous layer, which had read it.
//
// residual[0] is written by a program that has read all of hidden, after the gate-up GEMM of all programs and
// so after the output and QKV GEMMs of all in this layer, which had read it.
//
// The next launch begins when all programs of this one have exited.
struct Exchange {
    const Params* p;
    Shared* s;
    u32 first_stamp;  // of the first layer

    DEV void start(const Params* params, Shared* shared) {
        p = params; s = shared;
        u32 launch;
        load_relaxed<1>((const u32*)p->counters, &launch);
        first_stamp = launch * (u32)(p->num_layers + 1) + 1;
    }
    DEV u32 stamp_of(int layer) const { return first_stamp + layer; }
    DEV bool timed_out() const { return *(volatile int*)&s->timed_out; }

    // After a timeout a program makes no valid number any more, and neither do its readers.
    DEV void publish(u32* to, u16 value, u32 stamp) const {
        u32 bits = timed_out() ? 0x7fff : value;
        store_relaxed(to, bits << 16 | (stamp & 0xffff));
    }
    DEV void publish(u64* to, float value, u32 stamp) const {
        u32 bits = timed_out() ? 0x7fff0000u : as_bits(value);
        store_relaxed(to, (u64)bits << 32 | stamp);
    }
    // Receive words as they arrive, V contiguous ones at each of N addresses: address(j) of those with index
    // j, for which receive calls store(j, words). Bit j of `wanted` is set if the thread wants them. After a
    // timeout it receives no more.
    template <class Word, int V, int N, class Address, class Store>
    DEV void receive(u32 wanted, u32 stamp, Address address, Store store) const {
        static_assert(N < 32, "each index needs a bit");
        u32 missing = wanted;
#pragma unroll 1
        for (int polls = 0; missing; polls++) {
            Word w[N][V];
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int e = 0; e < V; e++) w[j][e] = 0;  // otherwise registers are kept for it elsewhere too
                if (missing >> j & 1) load_relaxed<V>(address(j), w[j]);
            }
            u32 before = missing;
#pragma unroll
            for (int j = 0; j < N; j++)
                if ((missing >> j & 1) && have_stamp<V>(w[j], stamp)) {
                    store(j, w[j]);
                    missing ^= 1u << j;
                }
            if (missing == before && must_stop(polls)) return;
        }
    }
    template <int V, class Word>
    DEV static bool have_stamp(const Word* w, u32 stamp) {
        constexpr u32 BITS = sizeof(Word) == 8 ? 0xffffffffu : 0xffffu;
        bool all = true;
#pragma unroll
        for (int e = 0; e < V; e++) all = all && (((u32)w[e] ^ stamp) & BITS) == 0;
        return all;
    }
    // Return true after a timeout of this or of another program.
    DEV bool must_stop(int polls) const {
        bool others = (polls & 255) == 255 && *(volatile int*)p->timeouts;
        if (polls >= MAX_POLLS) *(volatile int*)p->timeouts = 1;
        else if (!others) {
            yield();
            return false;
        }
        *(volatile int*)&s->timed_out = 1;
        return true;
    }
};
// The values of two words, packed, and the value of one.
DEV u32 pack_values(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }
DEV float value_of(u32 word) { return as_float(word & 0xffff0000u); }
DEV float value_of(u64 word) { return as_float((u32)(word >> 32)); }
