// Prefill attention: many new tokens of a sequence, whose keys and values are stored already.
//
// A program has 64 rows for each warpgroup: consecutive tokens of a sequence, and of each the query heads
// that share a KV head. One thread fetches keys and values of 64 tokens at a time into two rings. A
// warpgroup multiplies its queries by the keys of the next tile, and its weights by the values of a tile
// while it computes the weights of those scores. Meanwhile other warpgroups use the tensor cores too.
//
// Each row is added up in the order of kernels/triton/softmax.py, and gets the same bits.

#if !defined(DIM) || !defined(GROUP) || !defined(BLOCK_SIZE) || !defined(GROUPS) || !defined(REGISTERS) || \
    !defined(STAGES) || !defined(SHARED_BYTES)
#error "prefill_attention.cu needs macros: DIM GROUP BLOCK_SIZE GROUPS REGISTERS STAGES SHARED_BYTES"
#endif

#include "arithmetic.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int TILE_T = 64;  // tokens of a tile
constexpr int TILE_STEPS = TILE_T / 16, HEAD_STEPS = DIM / 16;  // steps of 16 tokens, and of 16 elements
constexpr int SIDE = 64;    // contiguous elements
constexpr int ROWS = 64;    // rows of a warpgroup
constexpr int TILE_G = next_power_of_2(GROUP);
constexpr int TOKENS = ROWS / TILE_G;  // tokens of a warpgroup
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STRIP_BYTES = 64 * SIDE * 2;  // of 64 rows by SIDE elements
constexpr int STRIPS = DIM / SIDE;
constexpr int ONES = 8;                 // columns of ones after the values, whose sums are the sums of weights
constexpr int SUMS = (DIM + ONES) / 2;  // sums of a thread
constexpr int WARP_TOKENS = max_int(16 / TILE_G, 1);      // tokens of a warp
constexpr int TOKEN_TILES = max_int(WARP_TOKENS / 8, 1);  // the same, by 8
constexpr int PIECES = DIM / 8;                           // 16-byte pieces of a row
constexpr int LOAD_ROWS = 32 / PIECES;                    // rows that a warp loads, one piece per thread
constexpr int TOKEN_LOADS = max_int(WARP_TOKENS / LOAD_ROWS, 1);  // pieces that a thread loads of a warp's tokens
constexpr int HALF_PIECES = PIECES / 2;  // pieces of half a row, which is rotated with the other half
constexpr int ROUNDS = DIM / 32;         // rounds in which a warp loads its rows of queries
constexpr int TOKEN_ROUNDS = min_int(TILE_G, ROUNDS);    // rounds in which a thread loads one token's queries
constexpr int RUN_TOKENS = min_int(BLOCK_SIZE, TILE_T);  // contiguous tokens

struct Params {
    TensorMap keys, values;
    const u16 *query, *k_cache, *v_cache;
    const u16 *cosines, *sines;  // rotation of queries, by position; null without a rotation
    u16* out;
    const long long *tables, *sequences, *rows, *counts, *positions;
    long long query_token, query_head, out_token, out_head;  // strides in elements
    long long block_rows, head_rows;  // strides in rows of a cache
    long long table_width;
    int tiles, kv_heads, programs;
    float scale;
};

struct alignas(1024) Shared {
    unsigned char queries[2][GROUPS][STRIPS * STRIP_BYTES];
    unsigned char keys[STAGES][STRIPS * STRIP_BYTES], values[STAGES][(STRIPS + 1) * STRIP_BYTES];
    u64 keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must cover Shared");
static_assert(DIM % SIDE == 0 && 16 % min_int(TILE_G, 16) == 0, "rows and heads must fit the GEMMs");
static_assert(BLOCK_SIZE % TILE_T == 0 || (TILE_T % BLOCK_SIZE == 0 && BLOCK_SIZE >= 8), "tiles must fit blocks");

typedef PipelineState<STAGES> State;

// An item: a tile of query tokens, for one KV head.
struct Item {
    const long long* table;
    long long row;  // row of the first token's queries
    int kv_head, count, position;

    DEV int last() const { return position + count - 1; }
    DEV int clamp(int token) const { return min_int(token, count - 1); }
    DEV int tiles() const { return (last() + TILE_T - 1) / TILE_T; }
    DEV long long cache_row(const Params& p, int token) const {
        return table[token / BLOCK_SIZE] * p.block_rows + kv_head * p.head_rows + token % BLOCK_SIZE;
    }
};

// Items with the longest contexts come first: of all sequences, or, where these are many, of each. Programs
// take items back and forth, so that each gets long and short ones. Items of a sequence that run at about
// the same time load its keys and values from memory once. An item's description is loaded while the
// previous item is computed.
struct QueryTile {
    int sequence, row, count, position;
};
DEV int item_index(const Params& p, int begin, int round) { return begin + (round % 2 ? p.programs - 1 - BLOCK : BLOCK); }
DEV QueryTile load_query_tile(const Params& p, int i) {
    int tile = i / p.kv_heads;
    if (tile >= p.tiles) return {0, 0, 0, 0};
    return {*(const int*)(p.sequences + tile), *(const int*)(p.rows + tile), *(const int*)(p.counts + tile),
            *(const int*)(p.positions + tile)};
}
DEV Item item_of(const Params& p, QueryTile tile, int i) {
    return {p.tables + tile.sequence * p.table_width, tile.row, i % p.kv_heads, tile.count, tile.position};
}
template <class Body>
DEV void for_each_item(const Params& p, Body body) {
    int items = p.tiles * p.kv_heads;
    QueryTile next = load_query_tile(p, item_index(p, 0, 0));
#pragma unroll 1
    for (int begin = 0, round = 0; begin < items; begin += p.programs, round++) {
        int i = item_index(p, begin, round);
        QueryTile current = next;
        next = load_query_tile(p, item_index(p, begin + p.programs, round + 1));
        if (i < items)
            body(item_of(p, current, i), item_of(p, next, item_index(p, begin + p.programs, round + 1)));
    }
}

// The thread that fetches keys and values, as far ahead as the rings allow. Blocks after the last token's may not
// exist: the last token's block replaces them.
DEV void fetch_tile(const Params& p, const Item& item, const TensorMap* map, int begin, unsigned char* to, u64* full) {
    mbar_expect(full, STRIPS * STRIP_BYTES);
#pragma unroll
    for (int at = 0; at < TILE_T; at += RUN_TOKENS) {
        int token = begin + at;
        if (RUN_TOKENS < TILE_T && token >= item.last()) token = (item.last() - 1) / BLOCK_SIZE * BLOCK_SIZE;
        int row = (int)item.cache_row(p, token);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
            copy_tile(to + strip * STRIP_BYTES + at * SIDE * 2, map, row, strip, full);
    }
}

DEV void fetch(const Params& p, Shared* s) {
    prefetch_map(&p.keys);
    prefetch_map(&p.values);
    wait_for_previous_kernel();
    State k = {0, 1}, v = {0, 1};
    for_each_item(p, [&](const Item& item, const Item&) {
        int tiles = item.tiles();
#pragma unroll 1
        for (int i = 0; i <= tiles; i++) {
            if (i < tiles) {
                mbar_wait(&s->keys_empty[k.stage], k.parity);
                fetch_tile(p, item, &p.keys, i * TILE_T, s->keys[k.stage], &s->keys_full[k.stage]);
                k.advance();
            }
            if (i && tiles) {
                mbar_wait(&s->values_empty[v.stage], v.parity);
                fetch_tile(p, item, &p.values, (i - 1) * TILE_T, s->values[v.stage], &s->values_full[v.stage]);
                v.advance();
            }
        }
    });
}

// A computing warpgroup. Of every 16 rows a thread has two, `row` and `row + 8`, and of every 8 columns two.
struct PromptAttention {
    const Params& p;
    Shared* s;
    int group, t, warp, lane, row, pair;
    State k, v;
    int buffer;  // of the item's queries; the next item's are loaded into the other one meanwhile
    Item item;
    int position[2];  // positions of its rows' tokens
    float scores[TILE_T / 2];
    float max_score[2], sums[SUMS];  // online softmax of the current part of the context
    bool accumulate;                 // false where a part begins: its first GEMM overwrites the sums
    float merged_max[2], merged_weight_sum[2], merged[DIM / 2];

    DEV PromptAttention(const Params& params, Shared* shared) : p(params), s(shared), k{0, 0}, v{0, 0}, buffer(1) {
        group = warp_uniform(THREAD / 128), t = THREAD % 128, warp = t / 32, lane = t % 32;
        row = lane / 4, pair = lane % 4;
    }
    DEV void sync() const { barrier_sync(1 + group, 128); }
    // A row of the warpgroup: its token in the item, its query head, and whether it is stored.
    DEV int token_of(int r) const { return (group * ROWS + r) / TILE_G; }
    DEV long long head_of(int r) const { return item.kv_head * GROUP + r % TILE_G; }
    DEV bool is_stored(int r) const { return token_of(r) < item.count && r % TILE_G < GROUP; }
    DEV int thread_row(int half) const { return warp * 16 + row + half * 8; }

    DEV void attend(const Item& current, const Item& next) {
        item = current;
        buffer = warp_uniform(buffer ^ 1);
        t = THREAD % 128;
        launder(t);  // values derived from it take no other registers
        warp = warp_uniform(t / 32), lane = t % 32, row = lane / 4, pair = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) position[half] = item.position + token_of(thread_row(half));
        begin_item();
        if (next.count) load_queries(next);
        sync();  // all warps' queries are loaded
        int tiles = item.tiles(), own_tiles = count_own_tiles();
        begin_part();
        u32 weights[TILE_T / 4];
        if (own_tiles) {
            issue_scores();
            wait_for_scores<0>();
            float rescale[2];
            update_softmax(0, rescale, [](int, int) {});
            round_weights(weights);
        }
        int part = 0, end = part_begin(1);
        bool part_ended = false;  // it is merged while the scores of the next one's second tile are computed
        float part_max[2];
#pragma unroll 1
        for (int i = 1; i < own_tiles; i++) {
            issue_scores();
            if (part_ended) end_part(part_max);
            part_ended = i * TILE_T == end;
            if (part_ended) end = part_begin(++part + 1);
            part_max[0] = max_score[0], part_max[1] = max_score[1];
            attend_to_tile(i * TILE_T, weights, part_ended);
        }
        if (own_tiles) {
            if (part_ended) end_part(part_max);
            attend_to_last_tile((own_tiles - 1) * TILE_T, weights);
            merge(max_score);
        }
        // Skip the tiles that only other warpgroups attend to.
        for (int i = own_tiles; i < tiles; i++) {
            mbar_wait(&s->keys_full[k.stage], k.parity);
            mbar_wait(&s->values_full[v.stage], v.parity);
            sync_warp();  // all lanes have waited before one of them signals it
            release(s->keys_empty, &k);
            release(s->values_empty, &v);
        }
        store();
    }
    DEV int count_own_tiles() const {
        int tokens = item.count - group * TOKENS;
        if (tokens <= 0) return 0;
        int last = item.position + group * TOKENS + (tokens < TOKENS ? tokens : TOKENS) - 1;
        return (last + TILE_T - 1) / TILE_T;
    }
    DEV void release(u64* empty, State* state) const {
        if (lane == 0) mbar_arrive(&empty[state->stage]);
        state->advance();
    }

    DEV void query_fragment(u32* a, int step) const {
        load_matrices(a, query_piece(warp * 16 + lane % 16, step * 2 + lane / 16));
    }

    // A warp loads its rows' queries, and its own tokens' keys and values, 16 bytes per thread. Keys and
    // values are in the buffer of the next queries, until each thread has those that it needs.
    DEV void begin_item() {
        uint4 keys[TOKEN_LOADS], values[TOKEN_LOADS];
        load_own(values, p.v_cache);
        load_own(keys, p.k_cache);
        u32 own_values[DIM / 4], own_keys[TOKEN_TILES][DIM / 8];
        sync_warp();
        stage_own(values);
        sync_warp();
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2)
            load_matrices(own_values + n * 2, next_query_piece(warp * 16 + lane % 16 / TILE_G, n + lane / 16));
        sync_warp();
        stage_own(keys);
        wait_for_async_copies();
        if (p.cosines) rotate_queries();
        fence_async_proxy();
        sync_warp();
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
            for (int i = 0; i < DIM / 8; i += 4)
                load_matrices(own_keys[n] + i, next_query_piece(warp * 16 + n * 8 + lane % 8 % WARP_TOKENS, i + lane / 8));
        attend_to_own_tokens(own_keys, own_values);
    }
    DEV void load_own(uint4* pieces, const u16* cache) const {
#pragma unroll
        for (int i = 0; i < TOKEN_LOADS; i++) {
            int token = item.clamp(token_of(warp * 16) + min_int(i * LOAD_ROWS + lane / PIECES, WARP_TOKENS - 1));
            pieces[i] = *(const uint4*)(cache + item.cache_row(p, item.position + token) * DIM + lane % PIECES * 8);
        }
    }
    DEV void stage_own(const uint4* pieces) {
#pragma unroll
        for (int i = 0; i < TOKEN_LOADS; i++) {
            int token = i * LOAD_ROWS + lane / PIECES;
            if (token < WARP_TOKENS) *(uint4*)next_query_piece(warp * 16 + token, lane % PIECES) = pieces[i];
        }
    }
    // Padding rows have another row's elements, and are not stored. A thread loads pieces that are half a
    // row apart, and rotates them.
    DEV int loaded_row(int round) const { return warp * 16 + lane / HALF_PIECES * ROUNDS + round; }
    DEV int loaded_piece(int half) const { return lane % HALF_PIECES + half * HALF_PIECES; }
    DEV void load_queries(const Item& next) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int r = loaded_row(i), member = r % TILE_G;
            member = member < GROUP ? member : 0;
            const u16* from = p.query + (next.row + next.clamp(token_of(r))) * p.query_token +
                              (next.kv_head * GROUP + member) * p.query_head + lane % HALF_PIECES * 8;
            copy_16_bytes_async(next_query_piece(r, loaded_piece(0)), from);
            copy_16_bytes_async(next_query_piece(r, loaded_piece(1)), from + DIM / 2);
        }
        if (t == 0) prefetch(next.table + next.position / BLOCK_SIZE);
    }
    DEV void rotate_queries() const {
        uint4 c, s;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            if (i % TOKEN_ROUNDS == 0) {  // another token
                long long at = (long long)(item.position + item.clamp(token_of(loaded_row(i)))) * DIM + lane % HALF_PIECES * 8;
                c = *(const uint4*)(p.cosines + at), s = *(const uint4*)(p.sines + at);
            }
            uint4* first = (uint4*)query_piece(loaded_row(i), loaded_piece(0));
            uint4* second = (uint4*)query_piece(loaded_row(i), loaded_piece(1));
            uint4 a = *first, b = *second;
            rotate_pairs(a.x, b.x, c.x, s.x);
            rotate_pairs(a.y, b.y, c.y, s.y);
            rotate_pairs(a.z, b.z, c.z, s.z);
            rotate_pairs(a.w, b.w, c.w, s.w);
            *first = a, *second = b;
        }
    }
    // Attend to the rows' own tokens, whose scores are the diagonal of a GEMM with all of the warp's tokens.
    DEV void attend_to_own_tokens(const u32 (*keys)[DIM / 8], const u32* values) {
        int first = token_of(warp * 16);
        float d[TOKEN_TILES][4];
#pragma unroll
        for (int i = 0; i < TOKEN_TILES * 4; i++) d[i / 4][i % 4] = 0;
#pragma unroll
        for (int step = 0; step < HEAD_STEPS; step++) {
            u32 a[4];
            query_fragment(a, step);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) mma(d[n], a[0], a[1], a[2], a[3], keys[n][step * 2], keys[n][step * 2 + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int token = token_of(thread_row(half));
            float score = 0;
#pragma unroll
            for (int i = 0; i < TOKEN_TILES * 2; i++)
                if (token - first == i / 2 * 8 + pair * 2 + i % 2) score = d[i / 2][half * 2 + i % 2];
            score += shuffle_xor(score, 1);
            score += shuffle_xor(score, 2);
            merged_max[half] = score * p.scale;
            merged_weight_sum[half] = 1;
        }
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) {
            merged[i * 2] = low_to_float(values[i]);
            merged[i * 2 + 1] = high_to_float(values[i]);
        }
    }

    DEV void begin_part() {
#pragma unroll
        for (int half = 0; half < 2; half++) max_score[half] = minus_infinity();
        accumulate = false;
    }
    // Multiply the next tile's keys by the queries.
    DEV void issue_scores() {
        mbar_wait(&s->keys_full[k.stage], k.parity);
        wgmma_fence();
        multiply_keys();
        wgmma_commit();
    }
    template <int PENDING>
    DEV void wait_for_scores() {
        wgmma_wait<PENDING>();
        pin_registers<TILE_T / 2>(scores);
        release(s->keys_empty, &k);
    }
    DEV void multiply_keys() {
        TileDescriptor queries = describe_rows(s->queries[buffer][group]), keys = describe_rows(s->keys[k.stage]);
#pragma unroll
        for (int i = 0; i < HEAD_STEPS; i++) {
            int bytes = i / 4 * STRIP_BYTES + i % 4 * 32;
            if (i) wgmma_accumulate<TILE_T>(scores, advance_descriptor(queries, bytes), advance_descriptor(keys, bytes));
            else wgmma_overwrite<TILE_T>(scores, queries, keys);
        }
    }
    // Multiply a tile's weights by its values, and compute the weights of the next one meanwhile. A warp
    // waits until its next GEMM can begin, and so it issues one at a time.
    DEV void attend_to_tile(int next, u32* weights, bool part_ended) {
        mbar_wait(&s->values_full[v.stage], v.parity);
        wgmma_fence();
        multiply_values(weights, 0, 1);
        wait_for_scores<1>();
        float rescale[2];
        if (part_ended) max_score[0] = max_score[1] = minus_infinity();
        update_softmax(next, rescale, [&](int first, int last) { multiply_values(weights, first, last); });
        pin_registers<TILE_T / 2>(scores);
        // Without a branch before it the compiler would place the wait before all weights are computed.
        if (!part_ended && any_lane(rescale[0] != 1.0f || rescale[1] != 1.0f)) {
            wgmma_wait_all<1>();
            pin_value_operands(weights);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] *= rescale[i / 2 % 2];
        } else {
            wgmma_wait_all<2>();
            pin_value_operands(weights);
        }
        release(s->values_empty, &v);
        round_weights(weights);
    }
    DEV void end_part(const float* part_max) {
        merge(part_max);
        accumulate = false;
    }
    DEV void pin_value_operands(u32* weights) {
        pin_registers<SUMS>(sums);
        pin_registers<TILE_T / 4>(weights);
    }
    // Issue the GEMMs of some steps of 16 tokens.
    DEV void multiply_values(const u32* weights, int first, int last) {
        TileDescriptor values = describe_columns(s->values[v.stage], STRIP_BYTES);
#pragma unroll
        for (int i = first; i < last; i++)
            wgmma_registers<DIM + ONES>(sums, weights + i * 4, advance_descriptor(values, i * 16 * SIDE * 2), i || accumulate);
        wgmma_commit();
        accumulate = true;
    }
    DEV void attend_to_last_tile(int begin, u32* weights) {
        mbar_wait(&s->values_full[v.stage], v.parity);
        if (begin + TILE_T > item.last()) zero_from(item.last() - begin);
        wgmma_fence();
        multiply_values(weights, 0, TILE_STEPS);
        wgmma_wait<0>();
        pin_value_operands(weights);
        release(s->values_empty, &v);
    }
    // Cache slots after the last visible token may contain anything, and zero times NaN is NaN.
    DEV void zero_from(int tokens) {
        const uint4 zeros = {0, 0, 0, 0};
        for (int i = tokens * 8 + t; i < TILE_T * 8; i += 128)
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) *(uint4*)(s->values[v.stage] + strip * STRIP_BYTES + i * 16) = zeros;
        fence_async_proxy();
        sync();
    }
    // Turn a tile's scores into weights, and compute the factor that rescales earlier sums. issue(first, last)
    // issues GEMMs of the previous tile meanwhile.
    template <class Issue>
    DEV void update_softmax(int begin, float* rescale, Issue issue) {
        if (begin + TILE_T > item.position + group * TOKENS) {
#pragma unroll
            for (int i = 0; i < TILE_T / 2; i++)
                if (begin + i / 4 * 8 + pair * 2 + i % 2 >= position[i / 2 % 2]) scores[i] = minus_infinity();
        }
        float shift[2], tile_max[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; i++) four[i] = max_float(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]);
#pragma unroll
            for (int i = 4; i < TILE_T / 8; i++)
                four[i % 4] = max_float(four[i % 4], max_float(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
            tile_max[half] = max_float(max_float(four[0], four[1]), max_float(four[2], four[3]));
        }
        issue(1, TILE_STEPS - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            tile_max[half] = max_float(tile_max[half], shuffle_xor(tile_max[half], 1));
            tile_max[half] = max_float(tile_max[half], shuffle_xor(tile_max[half], 2));
            float new_max = max_float(max_score[half], tile_max[half] * p.scale);
            shift[half] = new_max == minus_infinity() ? 0.0f : new_max;
            rescale[half] = exp2_ftz(max_score[half] - shift[half]);
            max_score[half] = new_max;
        }
        issue(TILE_STEPS - 1, TILE_STEPS);
#pragma unroll
        for (int i = 0; i < TILE_T / 2; i++) scores[i] = exp2_ftz(fmadd(scores[i], p.scale, -shift[i / 2 % 2]));
    }
    DEV void round_weights(u32* weights) const {
#pragma unroll
        for (int i = 0; i < TILE_T / 4; i++) weights[i] = pack_bf16(scores[i * 2], scores[i * 2 + 1]);
    }
    // Merge a part into the parts before it.
    DEV void merge(const float* part_max) {
        float rescale[2], weight[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float new_max = max_float(merged_max[half], part_max[half]);
            rescale[half] = exp2_ftz(merged_max[half] - new_max), weight[half] = exp2_ftz(part_max[half] - new_max);
            merged_max[half] = new_max;
            merged_weight_sum[half] = merged_weight_sum[half] * rescale[half] + sums[DIM / 2 + half * 2] * weight[half];
        }
        if (any_lane(rescale[0] != 1.0f || rescale[1] != 1.0f)) {  // most parts have no higher score than those before
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) merged[i] *= rescale[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) merged[i] += sums[i] * weight[i / 2 % 2];
    }
    // The queries have been read: the results are written into their buffer, and then stored row by row.
    DEV void store() {
        sync();
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                const float* two = merged + n * 4 + half * 2;
                *(u32*)(query_piece(thread_row(half), n) + pair * 4) =
                    pack_bf16(divide(two[0], merged_weight_sum[half]), divide(two[1], merged_weight_sum[half]));
            }
        }
        sync_warp();
#pragma unroll
        for (int i = 0; i < 16; i += LOAD_ROWS) {
            int r = warp * 16 + i + lane / PIECES, piece = lane % PIECES;
            uint4 elements = *(const uint4*)query_piece(r, piece);
            if (is_stored(r))
                *(uint4*)(p.out + (item.row + token_of(r)) * p.out_token + head_of(r) * p.out_head + piece * 8) = elements;
        }
    }
    // Address of 8 elements of a row, in the copy engine's swizzled order.
    DEV unsigned char* query_piece(int r, int piece) const { return swizzled_piece(s->queries[buffer][group], r, piece); }
    DEV unsigned char* next_query_piece(int r, int piece) const {
        return swizzled_piece(s->queries[buffer ^ 1][group], r, piece);
    }
    DEV static unsigned char* swizzled_piece(unsigned char* queries, int r, int piece) {
        return queries + piece / 8 * STRIP_BYTES + r * SIDE * 2 + ((piece % 8 ^ r % 8) << 4);
    }
};

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->keys_full[i], 1);
            mbar_init(&s->values_full[i], 1);
            mbar_init(&s->keys_empty[i], GROUPS * 4);
            mbar_init(&s->values_empty[i], GROUPS * 4);
        }
        fence_init();
    }
    for (int i = THREAD; i < STAGES * STRIP_BYTES / 4; i += THREADS)
        ((u32*)(s->values[i / (STRIP_BYTES / 4)] + STRIPS * STRIP_BYTES))[i % (STRIP_BYTES / 4)] = 0x3f803f80u;
    fence_async_proxy();
    barrier_sync(0, THREADS);
    if (THREAD >= CONSUMERS) {
        release_registers<24>();
        if (THREAD < CONSUMERS + 32 && elect_one()) fetch(p, s);
    } else {
        claim_registers<REGISTERS>();
        wait_for_previous_kernel();
        PromptAttention attention(p, s);
        attention.load_queries(item_of(p, load_query_tile(p, BLOCK), BLOCK));
        for_each_item(p, [&](const Item& item, const Item& next) { attention.attend(item, next); });
    }
}

KERNEL(attend_prompts, __launch_bounds__(THREADS, 1))
