// Attention of the megakernel, which programs share: by KV heads, and the context of a head in parts.
//
// A task is a KV head's new token or a part of its context, with the query heads that share the KV head.
// Tokens are added up as in kernels/triton/softmax.py, and the partial results, first the new token's, at
// the end. Of a part, each warp computes the scores of 8 of 64 tokens, and 16 elements of a head's values:
// both are read from the cache, block by block, directly into the tensor cores' layout.
#pragma once

#include "step_gemm.cuh"

struct Attention : Consumer {
    static constexpr int HEAD_STEPS = DIM / 16, TILE_STEPS = TILE_T / 16;

    struct Fragments {  // registers of a lane, for 64 tokens
        u32 k[HEAD_STEPS * 2], v[TILE_T / 4];
    };
    struct SoftmaxState {  // online softmax of a part
        float max_score[2], weight_sum[4], sums[2][4];  // sums of even elements, and of odd ones
    };

    DEV long long cache_offset(int kv_head, int token) const {
        long long block = p->table[token / BLOCK_SIZE];
        return block * p->block_stride + ((long long)kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * DIM;
    }
    // Offset of 16 tokens of a tile, which are contiguous in a block. Where a block has all tokens of a
    // tile, the table is read once.
    DEV long long step_offset(int kv_head, int tile, int step) const {
        if (BLOCK_SIZE % TILE_T) return cache_offset(kv_head, tile + step * 16);
        return cache_offset(kv_head, tile) + step * 16 * DIM;
    }
    DEV void load_keys(const Layer& layer, int kv_head, int begin, int end, Fragments* f) const {
        int token = warp * 8 + row;
#pragma unroll
        for (int i = 0; i < HEAD_STEPS * 2; i++) f->k[i] = 0;
        if (begin + token >= end) return;
        const u16* k = layer.keys + step_offset(kv_head, begin, token / 16) + token % 16 * DIM + pair * 2;
#pragma unroll
        for (int i = 0; i < HEAD_STEPS * 2; i++) f->k[i] = load_pair(k + i * 8);
    }
    DEV void load_values(const Layer& layer, int kv_head, int begin, int end, Fragments* f) const {
        int element = warp * 16 + row * 2;  // even elements are columns of one GEMM, odd ones of another
#pragma unroll
        for (int step = 0; step < TILE_STEPS; step++) {
            int left = element < DIM ? end - begin - step * 16 - pair * 2 : 0;
            const u16* v = layer.values + element + pair * 2 * DIM;
            if (left > 0) v += step_offset(kv_head, begin, step);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int token = i / 2 * 8 + i % 2;
                f->v[step * 4 + i] = token < left ? load_pair(v + token * DIM) : 0;
            }
        }
    }

    // The new token's words of a member of a group: of a query, of the group's key, or of its value.
    DEV const u32* new_head(int kv_head, int member) const {
        int head = kv_head * GROUP + member;
        if (member >= GROUP) head = HEADS + kv_head + (member - GROUP) * KV_HEADS;
        return p->qkv_new + head * DIM;
    }
    // Compute the norm factor of a new head, by a warp: 8 squares in each lane, then the lanes by halves.
    DEV void compute_norm_factor(int kv_head, int member, u32 stamp) {
        const u32* head = new_head(kv_head, member) + lane * 8;
        float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        receive<u32, 4, 2>(lane * 8 < DIM ? 3 : 0, stamp, [&](int j) { return head + j * 4; },
                           [&](int j, const u32* w) {
#pragma unroll
                               for (int e = 0; e < 4; e++) x[j * 4 + e] = value_of(w[e]);
                           });
        float squares = fmadd(x[0], x[0], x[1] * x[1]);
#pragma unroll
        for (int i = 2; i < 8; i++) squares = fmadd(x[i], x[i], squares);
#pragma unroll
        for (int mask = next_power_of_2(DIM) / 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
        if (lane == 0) s->norm_factors[member] = reciprocal_sqrt(divide(squares, (float)DIM) + p->head_epsilon);
    }
    DEV float normed(float x, const u16* gain, int d, int member) const {
        if (!NORMED || !gain) return x;
        return round_to_bf16(round_to_bf16(x * s->norm_factors[member]) * bf16_to_float(load_constant(gain + d)));
    }
    // Load the queries of a head's group, one row each, and optionally its new key and value, which are
    // stored: all as in the cache, normed and rotated by the token's position.
    DEV void load_new_heads(const Layer& layer, int kv_head, bool with_new_token, u32 stamp) {
        constexpr int HALF = ROTARY_DIM / 2, N = ((GROUP + 2) * DIM + CONSUMERS - 1) / CONSUMERS;
        int members = GROUP + with_new_token * 2;
        if (NORMED) {
#pragma unroll 1
            for (int member = warp; member < GROUP + with_new_token; member += WARPS)
                compute_norm_factor(kv_head, member, stamp);
            sync();
        }
        float x[N], y[N], cosine[N], sine[N];
        u32 wanted = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = j * CONSUMERS + t, d = i % DIM;
            x[j] = y[j] = cosine[j] = sine[j] = 0;
            if (i >= members * DIM) continue;
            wanted |= 1u << j;
            if (!layer.cosines || d >= ROTARY_DIM || i >= (GROUP + 1) * DIM) continue;
            wanted |= 1u << (N + j);  // the element it is rotated with
            cosine[j] = bf16_to_float(load_constant(layer.cosines + (long long)position * ROTARY_DIM + d));
            sine[j] = bf16_to_float(load_constant(layer.sines + (long long)position * ROTARY_DIM + d));
        }
        long long offset = with_new_token ? cache_offset(kv_head, position) : 0;
        receive<u32, 1, 2 * N>(wanted, stamp, [&](int j) {
            int i = j % N * CONSUMERS + t, d = i % DIM;
            return new_head(kv_head, i / DIM) + (j < N ? d : rotation_partner(d));
        }, [&](int j, const u32* w) { (j < N ? x : y)[j % N] = value_of(w[0]); });
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = j * CONSUMERS + t, member = i / DIM, d = i % DIM;
            if (!(wanted >> j & 1)) continue;
            const u16* gain = member < GROUP ? layer.query_gain : member == GROUP ? layer.key_gain : 0;
            float v = normed(x[j], gain, d, member);
            if (wanted >> (N + j) & 1) {
                float partner = normed(y[j], gain, rotation_partner(d), member);
                v = fmadd(v, cosine[j], partner * (d < HALF ? -sine[j] : sine[j]));
            }
            if (member < GROUP) s->queries[member * QUERY_STRIDE + d] = to_bf16(v);
            else store_new(layer, offset, member - GROUP, d, to_bf16(v));
        }
        sync();
    }
    // The element of a head that another is rotated with.
    DEV static int rotation_partner(int d) { return d < ROTARY_DIM / 2 ? d + ROTARY_DIM / 2 : d - ROTARY_DIM / 2; }
    // Store an element of the new key or value.
    DEV void store_new(const Layer& layer, long long offset, int is_value, int d, u16 value) {
        s->new_key_value[is_value * DIM + d] = value;
        if (timed_out()) value = 0x7fff;
        (is_value ? layer.values : layer.keys)[offset + d] = value;
    }
    DEV void query_fragment(u32* a, int step) const {
        load_matrices(a, &s->queries[(lane % 8 + lane / 8 % 2 * 8) * QUERY_STRIDE + step * 16 + lane / 16 * 8]);
    }

    // Partial result 0 of a head is the new token's, and i + 1 that of part i of the context.
    DEV u64* sums_of(int head, int partial) const {
        return p->sums + ((long long)head * (p->max_parts + 1) + partial) * DIM;
    }
    DEV u64* stats_of(int head, int partial) const {
        return p->softmax_stats + ((long long)head * (p->max_parts + 1) + partial) * 2;
    }
    DEV void publish_stats(int kv_head, int partial, int member, float max_score, float weight_sum, u32 stamp) const {
        if (member >= GROUP) return;
        u64* to = stats_of(kv_head * GROUP + member, partial);
        publish(to, max_score, stamp);
        publish(to + 1, weight_sum, stamp);
    }

    DEV void attend_to_new_token(int kv_head, u32 stamp) {
        if (warp == 0) {  // the key is the first column, and the others stay empty
            float d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int step = 0; step < HEAD_STEPS; step++) {
                u32 a[4];
                query_fragment(a, step);
                const u32* k = (const u32*)s->new_key_value + step * 8 + pair;
                mma(d, a[0], a[1], a[2], a[3], row == 0 ? k[0] : 0, row == 0 ? k[4] : 0);
            }
            if (pair == 0) {
                publish_stats(kv_head, 0, row, d[0] * p->scale, 1, stamp);
                publish_stats(kv_head, 0, row + 8, d[2] * p->scale, 1, stamp);
            }
        }
#pragma unroll 1
        for (int i = t; i < GROUP * DIM; i += CONSUMERS)
            publish(sums_of(kv_head * GROUP + i / DIM, 0) + i % DIM, bf16_to_float(s->new_key_value[DIM + i % DIM]), stamp);
    }

    // Attend to consecutive parts of the context. A tile is loaded while the previous one is computed; the
    // first one is loaded before the queries arrive, since it depends on nothing.
    DEV void attend_to_parts(const Layer& layer, int kv_head, int first, int last, bool with_new_token, u32 stamp) {
        int begin = part_begin(first), stop = end_of(last), part = first - 1, end = begin;
        SoftmaxState state;
        Fragments f;
#pragma unroll 1
        for (int tile = begin - TILE_T; tile < stop; tile += TILE_T) {
            bool is_tile = tile >= begin, has_next = tile + TILE_T < stop;
            if (is_tile && tile >= end) {
                end = end_of(++part + 1);
                reset(&state);
            }
            if (is_tile) multiply_keys(tile, end, f, &state);
            if (has_next) load_keys(layer, kv_head, tile + TILE_T, stop, &f);
            if (is_tile) multiply_values(f, &state);
            if (has_next) load_values(layer, kv_head, tile + TILE_T, stop, &f);
            if (!is_tile) {
                load_new_heads(layer, kv_head, with_new_token, stamp);
                if (with_new_token) attend_to_new_token(kv_head, stamp);
            } else if (tile + TILE_T >= end) publish_part(kv_head, part + 1, state, stamp);
        }
    }
    DEV int end_of(int parts) const {
        int end = part_begin(parts);
        return end < position ? end : position;
    }
    DEV static void reset(SoftmaxState* state) {
#pragma unroll
        for (int i = 0; i < 2; i++) state->max_score[i] = minus_infinity();
#pragma unroll
        for (int e = 0; e < 4; e++) state->weight_sum[e] = state->sums[0][e] = state->sums[1][e] = 0;
    }
    // Compute the weights of a tile, and rescale earlier sums.
    DEV void multiply_keys(int begin, int end, const Fragments& f, SoftmaxState* state) {
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < HEAD_STEPS; step++) {
            u32 a[4];
            query_fragment(a, step);
            mma(d, a[0], a[1], a[2], a[3], f.k[step * 2], f.k[step * 2 + 1]);
        }
        int token = begin + warp * 8 + pair * 2;
        if (token >= end) d[0] = d[2] = minus_infinity();
        if (token + 1 >= end) d[1] = d[3] = minus_infinity();
        float rescale[2];
        share_weights(d, state->max_score, rescale);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            state->weight_sum[e] *= rescale[e / 2];
            state->sums[0][e] *= rescale[e / 2];
            state->sums[1][e] *= rescale[e / 2];
        }
    }
    DEV void multiply_values(const Fragments& f, SoftmaxState* state) const {
#pragma unroll
        for (int i = 0; i < TILE_STEPS; i++) {
            u32 a[4];
            const u16* w = &s->weights[(lane % 8 + lane / 8 % 2 * 8) * WEIGHT_STRIDE + i * 16 + lane / 16 * 8];
            load_matrices(a, w);
            const u32* four = f.v + i * 4;  // tokens, with two elements each
            mma(state->weight_sum, a[0], a[1], a[2], a[3], 0x3f803f80u, 0x3f803f80u);
            mma(state->sums[0], a[0], a[1], a[2], a[3], even_elements(four), even_elements(four + 2));
            mma(state->sums[1], a[0], a[1], a[2], a[3], odd_elements(four), odd_elements(four + 2));
        }
    }
    DEV void publish_part(int kv_head, int partial, const SoftmaxState& state, u32 stamp) const {
        if (warp == 0 && pair == 0) {
            publish_stats(kv_head, partial, row, state.max_score[0], state.weight_sum[0], stamp);
            publish_stats(kv_head, partial, row + 8, state.max_score[1], state.weight_sum[2], stamp);
        }
        if (warp * 16 >= DIM) return;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int member = row + e / 2 % 2 * 8, d = warp * 16 + (pair * 2 + e % 2) * 2 + e / 4;
            if (member < GROUP)
                publish(sums_of(kv_head * GROUP + member, partial) + d, state.sums[e / 4][e % 4], stamp);
        }
    }
    DEV u32 even_elements(const u32* tokens) const { return (tokens[0] & 0xffffu) | tokens[1] << 16; }
    DEV u32 odd_elements(const u32* tokens) const { return tokens[0] >> 16 | (tokens[1] & 0xffff0000u); }

    // Turn a tile's scores into weights, for all warps, and compute the factor that rescales earlier sums.
    DEV void share_weights(const float* d, float* max_score, float* rescale) {
        float own_max[2] = {max_float(d[0], d[1]), max_float(d[2], d[3])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own_max[i] = max_float(own_max[i], shuffle_xor(own_max[i], 1));
            own_max[i] = max_float(own_max[i], shuffle_xor(own_max[i], 2));
            if (pair == 0) s->warp_max[warp * 16 + i * 8 + row] = own_max[i];
        }
        sync();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float tile_max = s->warp_max[i * 8 + row];
#pragma unroll
            for (int w = 1; w < WARPS; w++) tile_max = max_float(tile_max, s->warp_max[w * 16 + i * 8 + row]);
            float new_max = max_float(max_score[i], tile_max * p->scale);
            rescale[i] = exp2_ftz(max_score[i] - new_max);
            max_score[i] = new_max;
            float first = exp2_ftz(fmadd(d[i * 2], p->scale, -new_max));
            float second = exp2_ftz(fmadd(d[i * 2 + 1], p->scale, -new_max));
            *(u32*)&s->weights[(i * 8 + row) * WEIGHT_STRIDE + warp * 8 + pair * 2] = pack_bf16(first, second);
        }
        sync();
    }

    // Merge partial results: the new token's, and then the parts' in order. A program merges some elements of
    // all heads. Its threads receive words of many partial results at a time into the space of GEMM inputs,
    // and then one thread merges one element.
    static constexpr int ELEMENTS = (ATTENDED + PROGRAMS - 1) / PROGRAMS;  // of a program, at most
    static constexpr int SPANNED_HEADS = (ELEMENTS + DIM - 2) / DIM + 1;   // heads that these elements are in
    static constexpr int PARTIAL_WORDS = ELEMENTS + 2 * SPANNED_HEADS;
    static constexpr int COLUMNS = next_power_of_2(PARTIAL_WORDS), LOAD_PARTIALS = CONSUMERS / COLUMNS;  // at a time
    static constexpr int LOADS = min_int(10, MAX_INPUTS / 2 / PARTIAL_WORDS / max_int(LOAD_PARTIALS, 1));
    static constexpr int BATCH = LOADS * LOAD_PARTIALS;
    static_assert(BATCH > 0, "a program has too many elements of heads, or a GEMM too few inputs");

    DEV void merge_partials(int layer, int partials, u32 stamp) {
        launder(t);
        int first, count;
        program_rows(ATTENDED, phase_index(2 * layer, ATTENTION), &first, &count);
        const float* sums = (const float*)s->inputs;
        const float* stats = sums + BATCH * ELEMENTS + ((first + t) / DIM - first / DIM) * 2;
        float max_score = 0, weight_sum = 0, sum = 0;
#pragma unroll 1
        for (int begin = 0; begin < partials; begin += BATCH) {
            int batch = partials - begin < BATCH ? partials - begin : BATCH;
            receive_partials(first, count, begin, batch, stamp);
            sync();
            if (t < count)
#pragma unroll 4
                for (int j = 0; j < batch; j++) {
                    float next_max = stats[j * 2 * SPANNED_HEADS], next_weight_sum = stats[j * 2 * SPANNED_HEADS + 1];
                    float next_sum = sums[j * ELEMENTS + t];
                    if (begin + j == 0) max_score = next_max, weight_sum = next_weight_sum, sum = next_sum;
                    else {
                        float new_max = max_float(max_score, next_max);
                        float rescale = exp2_ftz(max_score - new_max), weight = exp2_ftz(next_max - new_max);
                        max_score = new_max;
                        weight_sum = weight_sum * rescale + next_weight_sum * weight;
                        sum = sum * rescale + next_sum * weight;
                    }
                }
            sync();
        }
        if (t < count) publish(p->attended + first + t, to_bf16(divide(sum, weight_sum)), stamp);
    }
    // Receive some partial results: the sums of the program's elements, and the highest score and the sum of
    // weights of each head that they are in.
    DEV void receive_partials(int first, int count, int begin, int batch, u32 stamp) {
        int column = t % COLUMNS, partial = t / COLUMNS, stat = column - ELEMENTS;
        bool is_sum = stat < 0;
        int heads = (first + count - 1) / DIM - first / DIM + 1;
        const u64* from = is_sum ? sums_of((first + column) / DIM, begin + partial) + (first + column) % DIM
                                 : stats_of(first / DIM + stat / 2, begin + partial) + stat % 2;
        int from_stride = LOAD_PARTIALS * (is_sum ? DIM : 2);
        float* to = (float*)s->inputs + (is_sum ? partial * ELEMENTS + column
                                                : BATCH * ELEMENTS + partial * 2 * SPANNED_HEADS + stat);
        int to_stride = LOAD_PARTIALS * (is_sum ? ELEMENTS : 2 * SPANNED_HEADS);
        u32 wanted = 0;
        if (is_sum ? column < count : stat < 2 * heads)
#pragma unroll
            for (int j = 0; j < LOADS; j++)
                if (partial + j * LOAD_PARTIALS < batch) wanted |= 1u << j;
        receive<u64, 1, LOADS>(wanted, stamp, [&](int j) { return from + j * from_stride; },
                               [&](int j, const u64* w) { to[j * to_stride] = value_of(w[0]); });
    }

    // Programs share the KV heads, and the programs of a head share its context: each has the parts that
    // end in its range of tokens. The first one, which never has more than others, attends to the new token
    // too.
    DEV int parts() const { return position ? part_index(position - 1) + 1 : 0; }
    DEV int rank_in(int layer) const { return (u32)(BLOCK + 29 * phase_index(2 * layer, ATTENTION)) % PROGRAMS; }
    DEV void part_range(int rank, int kv_head, int* first, int* last) const {
        int member = rank / KV_HEADS;
        bool more = kv_head < PROGRAMS - MIN_PROGRAMS * KV_HEADS;
        *first = range_begin(member, more);
        *last = member + 1 < MIN_PROGRAMS + more ? range_begin(member + 1, more) : parts();
    }
    // The programs of a head are this many, or one more: computed without divisions.
    static constexpr int MIN_PROGRAMS = PROGRAMS < KV_HEADS ? 1 : PROGRAMS / KV_HEADS;
    DEV int range_begin(int member, bool more) const {
        u32 token = (u32)position * member;
        return part_index(more ? token / (MIN_PROGRAMS + 1) : token / MIN_PROGRAMS);
    }

    DEV void attend(int layer) {
        launder(t);
        const Layer& pointers = p->layers[layer];
        u32 stamp = stamp_of(layer);
        int rank = rank_in(layer), first, last;
#pragma unroll 1
        for (int kv_head = rank % KV_HEADS; kv_head < KV_HEADS; kv_head += PROGRAMS) {
            bool with_new_token = rank < KV_HEADS;
            part_range(rank, kv_head, &first, &last);
            if (with_new_token || first < last) attend_to_parts(pointers, kv_head, first, last, with_new_token, stamp);
            sync();
        }
        // Last, after all results that other programs may wait for.
        merge_partials(layer, parts() + 1, stamp);
    }
};
