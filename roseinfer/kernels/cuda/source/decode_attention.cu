// Decode attention: each row is the new token of a sequence, which is stored first.
//
// A program has one row and one KV head, with the query heads that share it. Its warps process the parts of
// the context in turn (arithmetic.cuh). A warp fetches keys of 64 tokens, then their values, and so on, as
// far ahead as it has stages. They depend on no other kernel of the step, and so are in flight while the
// previous one ends. Tokens and elements of heads are the 16 rows of GEMMs, and query heads the 8 columns;
// unused columns are wasted.
//
// Each row is added up in the order of kernels/triton/softmax.py, and gets the same bits.

#if !defined(DIM) || !defined(GROUP) || !defined(BLOCK_SIZE) || !defined(WARPS) || !defined(STAGES) || \
    !defined(SHARED_BYTES)
#error "decode_attention.cu needs macros: DIM GROUP BLOCK_SIZE WARPS STAGES SHARED_BYTES"
#endif

#include "arithmetic.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"

constexpr int TILE_T = 64;  // tokens of a tile
constexpr int SIDE = 64;    // contiguous elements
constexpr int THREADS = WARPS * 32;
constexpr int STRIP_BYTES = TILE_T * SIDE * 2;  // of a tile by SIDE elements
constexpr int STRIPS = DIM / SIDE;
constexpr int TILE_STEPS = TILE_T / 16, HEAD_STEPS = DIM / 16;  // steps of 16 tokens, and of 16 elements
constexpr int RUN_TOKENS = min_int(BLOCK_SIZE, TILE_T);  // contiguous tokens
constexpr int HEAD_TILES = GROUP > 8 ? 2 : 1;  // tiles of 8 query heads
constexpr int QUERY_STRIDE = DIM + 8, SUMS_STRIDE = DIM + 4;  // strides of heads that avoid bank conflicts

struct Params {
    TensorMap keys, values;
    const u16 *query, *key, *value;
    u16 *k_cache, *v_cache;
    const u16 *cosines, *sines;  // rotation of queries and keys, by position; null without a rotation
    u16* out;
    const long long *tables, *lengths;
    long long query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    long long block_rows, head_rows;  // strides in rows of a cache
    long long table_width, length_stride;
    int kv_heads;
    float scale;
};

// Online softmax of a part of the context, for each query head.
struct PartResult {
    float sums[GROUP][SUMS_STRIDE], max_score[GROUP], weight_sum[GROUP];
};
struct alignas(1024) Shared {
    unsigned char tiles[WARPS][STAGES][STRIPS * STRIP_BYTES];
    alignas(16) u16 queries[HEAD_TILES * 8 * QUERY_STRIDE];
    alignas(16) u16 new_key[DIM], new_value[DIM];
    alignas(16) PartResult results[WARPS];
    float new_score[GROUP];
    u64 full[WARPS][STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must cover Shared");
static_assert(DIM % SIDE == 0 && GROUP <= 16, "two GEMMs must have columns for all query heads");
static_assert(BLOCK_SIZE % TILE_T == 0 || (TILE_T % BLOCK_SIZE == 0 && BLOCK_SIZE >= 8), "tiles must fit blocks");

// Position of a warp in the tiles of its parts: at keys or at values.
struct TileCursor {
    int part, begin, end;  // index of the part, first token of the next tile, end of the part
    bool values;
    PipelineState<STAGES> state;

    DEV TileCursor(int first_part) : values(false), state{0, 0} { begin_part(first_part); }
    DEV void begin_part(int next_part) {
        part = next_part;
        begin = part_begin(part), end = part_begin(part + 1);
    }
    DEV void advance() {
        state.advance();
        values = !values;
        if (values) return;
        begin += TILE_T;
        if (begin == end) begin_part(part + WARPS);
    }
};

// A row and a KV head. Of every 16 rows of a GEMM a thread has two, `row` and `row + 8`, and of every 8
// columns two.
struct RowAttention {
    const Params& p;
    Shared* s;
    int t, warp, lane, row, pair;
    int sequence, kv_head, position;  // of the new token
    const long long* table;
    TileCursor computing, fetching;
    u64 evict_first;
    u32 queries[HEAD_TILES][HEAD_STEPS][2];
    float scores[HEAD_TILES][TILE_STEPS][4];
    // Online softmax of the current part.
    float max_score[HEAD_TILES][2], weight_sum[HEAD_TILES][4], sums[HEAD_TILES][HEAD_STEPS][4];

    DEV RowAttention(const Params& params, Shared* shared)
        : p(params), s(shared), computing(THREAD / 32), fetching(THREAD / 32) {
        t = THREAD, warp = warp_uniform(t / 32), lane = t % 32, row = lane / 4, pair = lane % 4;
        sequence = BLOCK / p.kv_heads, kv_head = BLOCK % p.kv_heads;
        table = p.tables + sequence * p.table_width;
        prefetch(table);  // it arrives while the length does
        position = (int)p.lengths[sequence * p.length_stride];
        evict_first = evict_first_policy();
    }
    DEV void sync() const { barrier_sync(0, THREADS); }

    DEV void attend() {
        for (int i = 0; i < STAGES; i++) fetch_next();
        u32 cosines = 0, sines = 0;
        if (p.cosines) {  // all rounds of a thread have the same offset in a head
            long long at = (long long)position * DIM + t % HEAD_QUADS * 2;
            cosines = *(const u32*)(p.cosines + at), sines = *(const u32*)(p.sines + at);
        }
        wait_for_previous_kernel();
        load_new_heads(cosines, sines);
        sync();
        load_query_fragments();
        if (warp == WARPS - 1) attend_to_new_token();  // it has the fewest parts
        attend_to_parts();
    }

    // Fetch keys or values of stored tokens. Blocks after the last token's may not exist: its block replaces
    // them.
    DEV void fetch_next() {
        if (fetching.begin >= position) return;
        int stage = fetching.state.stage;
        if (elect_one()) {
            const TensorMap* map = fetching.values ? &p.values : &p.keys;
            mbar_expect(&s->full[warp][stage], STRIPS * STRIP_BYTES);
#pragma unroll
            for (int at = 0; at < TILE_T; at += RUN_TOKENS) {
                int first = (int)cache_row(min_int(fetching.begin + at, (position - 1) / RUN_TOKENS * RUN_TOKENS));
#pragma unroll
                for (int strip = 0; strip < STRIPS; strip++)
                    copy_tile(s->tiles[warp][stage] + strip * STRIP_BYTES + at * SIDE * 2, map, first, strip,
                              &s->full[warp][stage], evict_first);
            }
        }
        fetching.advance();
    }
    DEV long long cache_row(int token) const {
        return table[token / BLOCK_SIZE] * p.block_rows + kv_head * p.head_rows + token % BLOCK_SIZE;
    }

    // Load the new token's heads, the queries first: two elements of one half of a head, and two of the
    // other half, at a time. Queries and key are rotated, and key and value are stored.
    static constexpr int HEAD_QUADS = DIM / 4;
    static constexpr int ALL_QUADS = (GROUP + 2) * HEAD_QUADS, LOAD_ROUNDS = (ALL_QUADS + THREADS - 1) / THREADS;
    DEV const u16* new_head(int member) const {
        if (member < GROUP) return p.query + sequence * p.query_token + (kv_head * GROUP + member) * p.query_head;
        if (member == GROUP) return p.key + sequence * p.key_token + kv_head * p.key_head;
        return p.value + sequence * p.value_token + kv_head * p.value_head;
    }
    DEV void load_new_heads(u32 cosines, u32 sines) {
        u32 first[LOAD_ROUNDS], second[LOAD_ROUNDS];
        int at = t % HEAD_QUADS * 2;
#pragma unroll
        for (int i = 0; i < LOAD_ROUNDS; i++) {
            int member = (i * THREADS + t) / HEAD_QUADS;
            if (member >= GROUP + 2) break;
            const u16* from = new_head(member) + at;
            first[i] = *(const u32*)from, second[i] = *(const u32*)(from + DIM / 2);
        }
        long long offset = cache_row(position) * DIM + at;
#pragma unroll
        for (int i = 0; i < LOAD_ROUNDS; i++) {
            int member = (i * THREADS + t) / HEAD_QUADS;
            if (member >= GROUP + 2) break;
            if (p.cosines && member <= GROUP) rotate_pairs(first[i], second[i], cosines, sines);
            u16* to = s->queries + member * QUERY_STRIDE;
            if (member >= GROUP) {
                u16* stored = (member == GROUP ? p.k_cache : p.v_cache) + offset;
                *(u32*)stored = first[i], *(u32*)(stored + DIM / 2) = second[i];
                to = member == GROUP ? s->new_key : s->new_value;
            }
            *(u32*)(to + at) = first[i], *(u32*)(to + at + DIM / 2) = second[i];
        }
    }
    // Columns after the last head contain arbitrary data, and are not stored.
    DEV void load_query_fragments() {
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int step = 0; step < HEAD_STEPS; step += 2)
                load_matrices(queries[tile][step],
                              s->queries + (tile * 8 + lane % 8) * QUERY_STRIDE + step * 16 + lane / 8 * 8);
    }
    // The query head of the group that element i of a thread's fragments belongs to.
    DEV int member_of(int tile, int i) const { return tile * 8 + pair * 2 + i % 2; }
    // The new key is the first row of a GEMM, and the others stay empty.
    DEV void attend_to_new_token() {
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
            float d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int step = 0; step < HEAD_STEPS; step++) {
                const u32* k = (const u32*)s->new_key + step * 8 + pair;
                mma(d, row == 0 ? k[0] : 0, 0, row == 0 ? k[4] : 0, 0, queries[tile][step][0], queries[tile][step][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row == 0 && member_of(tile, i) < GROUP) s->new_score[member_of(tile, i)] = d[i] * p.scale;
        }
    }

    // Compute the parts, one in each warp at a time, and merge the new token and all parts in their order. A
    // thread merges two elements of a head in each round.
    static constexpr int PAIRS = GROUP * DIM / 2, MERGE_ROUNDS = (PAIRS + THREADS - 1) / THREADS;
    DEV void attend_to_parts() {
        float merged_max[MERGE_ROUNDS], merged_weight_sum[MERGE_ROUNDS], merged[MERGE_ROUNDS][2];
        int parts = position ? part_index(position - 1) + 1 : 0;
#pragma unroll 1
        for (int begin = 0; begin == 0 || begin < parts; begin += WARPS) {
            if (begin) sync();  // all earlier parts have been merged
            if (begin + warp < parts) compute_part();
            sync();
            int computed = min_int(WARPS, parts - begin);
#pragma unroll
            for (int i = 0; i < MERGE_ROUNDS; i++) {
                int index = i * THREADS + t, member = index / (DIM / 2), element = index % (DIM / 2) * 2;
                if (index >= PAIRS) break;
                if (begin == 0) {
                    u32 value = *(const u32*)(s->new_value + element);
                    merged_max[i] = s->new_score[member], merged_weight_sum[i] = 1;
                    merged[i][0] = low_to_float(value), merged[i][1] = high_to_float(value);
                }
                for (int w = 0; w < computed; w++) {
                    const PartResult& part = s->results[w];
                    merge(part.max_score[member], part.weight_sum[member], part.sums[member] + element, &merged_max[i],
                          &merged_weight_sum[i], merged[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MERGE_ROUNDS; i++) {
            int index = i * THREADS + t, member = index / (DIM / 2), element = index % (DIM / 2) * 2;
            if (index >= PAIRS) break;
            u16* to = p.out + sequence * p.out_token + (kv_head * GROUP + member) * p.out_head + element;
            *(u32*)to = pack_bf16(divide(merged[i][0], merged_weight_sum[i]), divide(merged[i][1], merged_weight_sum[i]));
        }
    }
    DEV static void merge(float max_score, float weight_sum, const float* sums, float* merged_max,
                          float* merged_weight_sum, float* merged) {
        float new_max = max_float(*merged_max, max_score);
        float rescale = exp2_ftz(*merged_max - new_max), weight = exp2_ftz(max_score - new_max);
        *merged_max = new_max;
        *merged_weight_sum = *merged_weight_sum * rescale + weight_sum * weight;
        merged[0] = merged[0] * rescale + sums[0] * weight;
        merged[1] = merged[1] * rescale + sums[1] * weight;
    }

    DEV void compute_part() {
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
            max_score[tile][0] = max_score[tile][1] = minus_infinity();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weight_sum[tile][i] = 0;
#pragma unroll
                for (int n = 0; n < HEAD_STEPS; n++) sums[tile][n][i] = 0;
            }
        }
        int part = computing.part;
#pragma unroll 1
        while (computing.part == part && computing.begin < position) attend_to_tile();
        PartResult* result = &s->results[warp];
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int member = member_of(tile, i);
                if (member >= GROUP) break;
                if (row == 0) result->max_score[member] = max_score[tile][i], result->weight_sum[member] = weight_sum[tile][i];
#pragma unroll
                for (int n = 0; n < HEAD_STEPS; n++) {
                    result->sums[member][n * 16 + row] = sums[tile][n][i];
                    result->sums[member][n * 16 + row + 8] = sums[tile][n][i + 2];
                }
            }
    }
    DEV void attend_to_tile() {
        int begin = computing.begin;
        multiply_keys(wait_for_tile());
        release_tile();
        update_softmax(begin);
        unsigned char* values = wait_for_tile();
        if (begin + TILE_T > position) zero_from(values, position - begin);
        multiply_values(values);
        release_tile();
    }
    DEV unsigned char* wait_for_tile() const {
        mbar_wait(&s->full[warp][computing.state.stage], computing.state.parity);
        return s->tiles[warp][computing.state.stage];
    }
    // Fetch the next tile into the stage of the current one.
    DEV void release_tile() {
        sync_warp();  // all lanes have read it
        computing.advance();
        fetch_next();
    }
    DEV void multiply_keys(const unsigned char* keys) {
#pragma unroll
        for (int step = 0; step < HEAD_STEPS; step++) {
            u32 k[TILE_STEPS][4];
#pragma unroll
            for (int n = 0; n < TILE_STEPS; n++)
                load_matrices(k[n], swizzled_piece(keys, n * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
                for (int n = 0; n < TILE_STEPS; n++) {
                    float* d = scores[tile][n];
                    if (step == 0) d[0] = d[1] = d[2] = d[3] = 0;
                    mma(d, k[n][0], k[n][1], k[n][2], k[n][3], queries[tile][step][0], queries[tile][step][1]);
                }
        }
    }
    // Turn a tile's scores into weights, and rescale earlier sums.
    DEV void update_softmax(int begin) {
        if (begin + TILE_T > position) {
#pragma unroll
            for (int i = 0; i < HEAD_TILES * TILE_T / 4; i++)
                if (begin + i / 4 % TILE_STEPS * 16 + row + i / 2 % 2 * 8 >= position)
                    scores[i / (TILE_T / 4)][i / 4 % TILE_STEPS][i % 4] = minus_infinity();
        }
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float tile_max = minus_infinity();
#pragma unroll
                for (int n = 0; n < TILE_STEPS; n++)
                    tile_max = max_float(tile_max, max_float(scores[tile][n][i], scores[tile][n][i + 2]));
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) tile_max = max_float(tile_max, shuffle_xor(tile_max, mask));
                float new_max = max_float(max_score[tile][i], tile_max * p.scale);
                float rescale = exp2_ftz(max_score[tile][i] - new_max);
                max_score[tile][i] = new_max;
#pragma unroll
                for (int half = i; half < 4; half += 2) {
#pragma unroll
                    for (int n = 0; n < TILE_STEPS; n++)
                        scores[tile][n][half] = exp2_ftz(fmadd(scores[tile][n][half], p.scale, -new_max));
                    weight_sum[tile][half] *= rescale;
#pragma unroll
                    for (int n = 0; n < HEAD_STEPS; n++) sums[tile][n][half] *= rescale;
                }
            }
    }
    DEV void multiply_values(const unsigned char* values) {
        const u32 ONES = 0x3f803f80u;
#pragma unroll
        for (int i = 0; i < TILE_STEPS; i++) {
            u32 weights[HEAD_TILES][2];
#pragma unroll
            for (int tile = 0; tile < HEAD_TILES; tile++) {
#pragma unroll
                for (int half = 0; half < 2; half++)
                    weights[tile][half] = transpose_matrix(pack_bf16(scores[tile][i][half * 2], scores[tile][i][half * 2 + 1]));
                mma(weight_sum[tile], ONES, ONES, ONES, ONES, weights[tile][0], weights[tile][1]);
            }
#pragma unroll
            for (int first = 0; first < HEAD_STEPS; first += 4) {
                u32 v[4][4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    load_matrices_transposed(v[n], swizzled_piece(values, i * 16 + lane / 16 * 8 + lane % 8,
                                                                  (first + n) * 2 + lane / 8 % 2));
#pragma unroll
                for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        mma(sums[tile][first + n], v[n][0], v[n][1], v[n][2], v[n][3], weights[tile][0], weights[tile][1]);
            }
        }
    }
    // Cache slots after the last visible token may contain anything, and zero times NaN is NaN.
    DEV void zero_from(unsigned char* values, int tokens) {
        const uint4 zeros = {0, 0, 0, 0};
        for (int i = tokens * 8 + lane; i < TILE_T * 8; i += 32)
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) *(uint4*)(values + strip * STRIP_BYTES + i * 16) = zeros;
        sync_warp();
    }
    // Address of 8 elements of a token, in the copy engine's swizzled order.
    DEV static const unsigned char* swizzled_piece(const unsigned char* tile, int token, int piece) {
        return tile + piece / 8 * STRIP_BYTES + token * SIDE * 2 + ((piece % 8 ^ token % 8) << 4);
    }
};

DEV void program(const Params& p, Shared* s) {
    int warp = THREAD / 32;
    if (THREAD % 32 == 0) {
        for (int i = 0; i < STAGES; i++) mbar_init(&s->full[warp][i], 1);
        fence_init();
        prefetch_map(&p.keys);
        prefetch_map(&p.values);
    }
    sync_warp();
    launch_next_kernel();
    RowAttention(p, s).attend();
}

KERNEL(attend_rows, __launch_bounds__(THREADS))
