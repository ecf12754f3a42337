// A row and a KV head. Of every 16 rows of a GEMM a thread has two, `row` and `row + 8`, and of every 8
// columns two.
struct Attending {
    const Params& p;
    Shared* s;
    int t, warp, lane, row, pair;
    int sequence, kv_head, own;  // the new token's position
    const long long* table;
    TileTurn seeing, fetching;
    u64 once;
    u32 queries[EIGHTS][DIM / 16][2];
    float scores[EIGHTS][TILE_T / 16][4];
    float top[EIGHTS][2], total[EIGHTS][4], sums[EIGHTS][DIM / 16][4];  // results of the current part

    DEV Attending(const Params& params, Shared* shared)
        : p(params), s(shared), seeing(THREAD / 32), fetching(THREAD / 32) {
        t = THREAD, warp = alike(t / 32), lane = t % 32, row = lane / 4, pair = lane % 4;
        sequence = BLOCK / p.kv_heads, kv_head = BLOCK % p.kv_heads;
        table = p.tables + sequence * p.table_width;
        ask_for(table);  // it arrives while the length does
        own = (int)p.lengths[sequence * p.length_pitch];
        once = policy_first();
    }
    DEV void meet() const { bar_sync(0, THREADS); }

    DEV void attend() {
        for (int i = 0; i < PLACES; i++) fetch_next();
        u32 cosines = 0, sines = 0;
        if (p.cosines) {  // all rounds of a thread have the same offset in a head
            long long at = (long long)own * DIM + t % WORDS * 2;
            cosines = *(const u32*)(p.cosines + at), sines = *(const u32*)(p.sines + at);
        }
        wait_for_kernel_in_front();
        bring(cosines, sines);
        meet();
        hold_queries();
        if (warp == WARPS - 1) look_at_own();  // it has the fewest parts
        add_up();
    }

    // Fetch keys or values of stored tokens. Blocks after the last one's may not exist: the last one
    // replaces them.
    DEV void fetch_next() {
        if (fetching.begin >= own) return;
        int slot = fetching.place.slot;
        if (elected()) {
            const TensorMap* map = fetching.values ? &p.values : &p.keys;
            mbar_expect(&s->there[warp][slot], DEEP * STRIP);
#pragma unroll
            for (int at = 0; at < TILE_T; at += AT_ONCE) {
                int first = (int)cache_row(smaller(fetching.begin + at, (own - 1) / AT_ONCE * AT_ONCE));
#pragma unroll
                for (int deep = 0; deep < DEEP; deep++)
                    copy_tile(s->tiles[warp][slot] + deep * STRIP + at * SIDE * 2, map, first, deep,
                              &s->there[warp][slot], once);
            }
        }
        fetching.forward();
    }
    DEV long long cache_row(int token) const {
        return table[token / BLOCK_SIZE] * p.block_rows + kv_head * p.head_rows + token % BLOCK_SIZE;
    }

    // Load the new token's heads, the queries first: two elements of one half of a head, and two of the
    // other half, at a time. Queries and key are rotated, and key and value are stored.
    static constexpr int WORDS = DIM / 4;
    static constexpr int ALL_WORDS = (GROUP + 2) * WORDS, ROUNDS = (ALL_WORDS + THREADS - 1) / THREADS;
    DEV const u16* head(int member) const {
        if (member < GROUP) return p.query + sequence * p.query_token + (kv_head * GROUP + member) * p.query_head;
        if (member == GROUP) return p.key + sequence * p.key_token + kv_head * p.key_head;
        return p.value + sequence * p.value_token + kv_head * p.value_head;
    }
    DEV void bring(u32 cosines, u32 sines) {
        u32 first[ROUNDS], second[ROUNDS];
        int at = t % WORDS * 2;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int member = (i * THREADS + t) / WORDS;
            if (member >= GROUP + 2) break;
            const u16* from = head(member) + at;
            first[i] = *(const u32*)from, second[i] = *(const u32*)(from + DIM / 2);
        }
        long long to = cache_row(own) * DIM + at;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int member = (i * THREADS + t) / WORDS;
            if (member >= GROUP + 2) break;
            if (p.cosines && member <= GROUP) turn_two(first[i], second[i], cosines, sines);
            u16* kept = s->queries + member * Q_PITCH;
            if (member >= GROUP) {
                u16* stored = (member == GROUP ? p.k_cache : p.v_cache) + to;
                *(u32*)stored = first[i], *(u32*)(stored + DIM / 2) = second[i];
                kept = member == GROUP ? s->own_key : s->own_value;
            }
            *(u32*)(kept + at) = first[i], *(u32*)(kept + at + DIM / 2) = second[i];
        }
    }
    // Columns after the last head contain arbitrary data, and are not stored.
    DEV void hold_queries() {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int deep = 0; deep < DIM / 16; deep += 2)
                load_matrices(queries[e][deep], s->queries + (e * 8 + lane % 8) * Q_PITCH + deep * 16 + lane / 8 * 8);
    }
    // The query heads of a thread's elements.
    DEV int member_of(int e, int i) const { return e * 8 + pair * 2 + i % 2; }
    // The key is the first row of a GEMM, and the others stay empty.
    DEV void look_at_own() {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int deep = 0; deep < DIM / 16; deep++) {
                const u32* k = (const u32*)s->own_key + deep * 8 + pair;
                mma(d, row == 0 ? k[0] : 0, 0, row == 0 ? k[4] : 0, 0, queries[e][deep][0], queries[e][deep][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row == 0 && member_of(e, i) < GROUP) s->own_top[member_of(e, i)] = d[i] * p.scale;
        }
    }

    // Merge the new token, and then all parts in their order. A thread has two elements of a head in each
    // round.
    static constexpr int PAIRS = GROUP * DIM / 2, MINE = (PAIRS + THREADS - 1) / THREADS;
    DEV void add_up() {
        float all_top[MINE], all_total[MINE], all[MINE][2];
        int parts = own ? part_of(own - 1) + 1 : 0;
#pragma unroll 1
        for (int begin = 0; begin == 0 || begin < parts; begin += WARPS) {
            if (begin) meet();  // all earlier parts have been added
            if (begin + warp < parts) look_at_part();
            meet();
            int some = smaller(WARPS, parts - begin);
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                int own_pair = i * THREADS + t, member = own_pair / (DIM / 2), dim = own_pair % (DIM / 2) * 2;
                if (own_pair >= PAIRS) break;
                if (begin == 0) {
                    u32 two = *(const u32*)(s->own_value + dim);
                    all_top[i] = s->own_top[member], all_total[i] = 1, all[i][0] = low(two), all[i][1] = high(two);
                }
                for (int w = 0; w < some; w++) {
                    const Seen& seen = s->seen[w];
                    fold(seen.top[member], seen.total[member], seen.sums[member] + dim, &all_top[i], &all_total[i], all[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            int own_pair = i * THREADS + t, member = own_pair / (DIM / 2), dim = own_pair % (DIM / 2) * 2;
            if (own_pair >= PAIRS) break;
            u16* to = p.out + sequence * p.out_token + (kv_head * GROUP + member) * p.out_head + dim;
            *(u32*)to = two_bf16(over(all[i][0], all_total[i]), over(all[i][1], all_total[i]));
        }
    }
    DEV static void fold(float top, float total, const float* two, float* all_top, float* all_total, float* all) {
        float higher = larger_of(*all_top, top);
        float shrink = exp2_flushed(*all_top - higher), weight = exp2_flushed(top - higher);
        *all_top = higher;
        *all_total = *all_total * shrink + total * weight;
        all[0] = all[0] * shrink + two[0] * weight;
        all[1] = all[1] * shrink + two[1] * weight;
    }

    DEV void look_at_part() {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            top[e][0] = top[e][1] = as_float(0xff800000u);  // minus infinity
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total[e][i] = 0;
#pragma unroll
                for (int n = 0; n < DIM / 16; n++) sums[e][n][i] = 0;
            }
        }
        int part = seeing.part;
#pragma unroll 1
        while (seeing.part == part && seeing.begin < own) look_at_tile();
        Seen* seen = &s->seen[warp];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int member = member_of(e, i);
                if (member >= GROUP) break;
                if (row == 0) seen->top[member] = top[e][i], seen->total[member] = total[e][i];
#pragma unroll
                for (int n = 0; n < DIM / 16; n++) {
                    seen->sums[member][n * 16 + row] = sums[e][n][i];
                    seen->sums[member][n * 16 + row + 8] = sums[e][n][i + 2];
                }
            }
    }
    DEV void look_at_tile() {
        int begin = seeing.begin;
        multiply_keys(arrived());
        go_on();
        weigh(begin);
        unsigned char* values = arrived();
        if (begin + TILE_T > own) clear_behind(values, own - begin);
        multiply_values(values);
        go_on();
    }
    DEV unsigned char* arrived() const {
        wait_for(&s->there[warp][seeing.place.slot], seeing.place.parity);
        return s->tiles[warp][seeing.place.slot];
    }
    DEV void go_on() {
        sync_warp();  // before one of its lanes overwrites them
        seeing.forward();
        fetch_next();
    }
    DEV void multiply_keys(const unsigned char* keys) {
#pragma unroll
        for (int deep = 0; deep < DIM / 16; deep++) {
            u32 k[TILE_T / 16][4];
#pragma unroll
            for (int n = 0; n < TILE_T / 16; n++)
                load_matrices(k[n], place(keys, n * 16 + lane % 16, deep * 2 + lane / 16));
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                for (int n = 0; n < TILE_T / 16; n++) {
                    float* d = scores[e][n];
                    if (deep == 0) d[0] = d[1] = d[2] = d[3] = 0;
                    mma(d, k[n][0], k[n][1], k[n][2], k[n][3], queries[e][deep][0], queries[e][deep][1]);
                }
        }
    }
    // Turn a tile's scores into weights, and shrink earlier sums.
    DEV void weigh(int begin) {
        const float NOTHING = as_float(0xff800000u);  // minus infinity
        if (begin + TILE_T > own) {
#pragma unroll
            for (int i = 0; i < EIGHTS * TILE_T / 4; i++)
                if (begin + i / 4 % (TILE_T / 16) * 16 + row + i / 2 % 2 * 8 >= own)
                    scores[i / (TILE_T / 4)][i / 4 % (TILE_T / 16)][i % 4] = NOTHING;
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float most = NOTHING;
#pragma unroll
                for (int n = 0; n < TILE_T / 16; n++)
                    most = larger_of(most, larger_of(scores[e][n][i], scores[e][n][i + 2]));
#pragma unroll
                for (int other = 4; other < 32; other *= 2) most = larger_of(most, shfl(most, other));
                float higher = larger_of(top[e][i], most * p.scale), shrink = exp2_flushed(top[e][i] - higher);
                top[e][i] = higher;
#pragma unroll
                for (int half = i; half < 4; half += 2) {
#pragma unroll
                    for (int n = 0; n < TILE_T / 16; n++)
                        scores[e][n][half] = exp2_flushed(times_plus(scores[e][n][half], p.scale, -higher));
                    total[e][half] *= shrink;
#pragma unroll
                    for (int n = 0; n < DIM / 16; n++) sums[e][n][half] *= shrink;
                }
            }
    }
    DEV void multiply_values(const unsigned char* values) {
        const u32 ONES = 0x3f803f80u;
#pragma unroll
        for (int i = 0; i < TILE_T / 16; i++) {
            u32 weights[EIGHTS][2];
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
#pragma unroll
                for (int half = 0; half < 2; half++)
                    weights[e][half] = turned(two_bf16(scores[e][i][half * 2], scores[e][i][half * 2 + 1]));
                mma(total[e], ONES, ONES, ONES, ONES, weights[e][0], weights[e][1]);
            }
#pragma unroll
            for (int first = 0; first < DIM / 16; first += 4) {
                u32 v[4][4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    load_matrices_turned(v[n], place(values, i * 16 + lane / 16 * 8 + lane % 8,
                                                     (first + n) * 2 + lane / 8 % 2));
#pragma unroll
                for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        mma(sums[e][first + n], v[n][0], v[n][1], v[n][2], v[n][3], weights[e][0], weights[e][1]);
            }
        }
    }
    // Slots after the last visible token may contain anything, and zero times NaN is NaN.
    DEV void clear_behind(unsigned char* values, int tokens) {
        const uint4 nothing = {0, 0, 0, 0};
        for (int i = tokens * 8 + lane; i < TILE_T * 8; i += 32)
#pragma unroll
            for (int deep = 0; deep < DEEP; deep++) *(uint4*)(values + deep * STRIP + i * 16) = nothing;
        sync_warp();
    }
    // Offset of 8 elements of a token, in the copy engine's swizzled order.
    DEV static const unsigned char* place(const unsigned char* tile, int token, int piece) {
        return tile + piece / 8 * STRIP + token * SIDE * 2 + ((piece % 8 ^ token % 8) << 4);
    }
};

DEV void program(const Params& p, Shared* s) {
    int warp = THREAD / 32;
    if (THREAD % 32 == 0) {
        for (int i = 0; i < PLACES; i++) mbar_init(&s->there[warp][i], 1);
        fence_init();
        ask_for_map(&p.keys);
        ask_for_map(&p.values);
    }
    sync_warp();
    let_next_kernel_in();
    Attending(p, s).attend();
}

#ifndef EMULATED
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void __launch_bounds__(THREADS) attend_rows(const __grid_constant__ Params p) {
    program(p, (Shared*)memory);
}
#endif
