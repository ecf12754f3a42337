// A computing warpgroup. Of every 16 rows a thread has two, `row` and `row + 8`, and of every 8 columns
// two.
struct Attending {
    const Params& p;
    Shared* s;
    int group, t, warp, lane, row, pair;
    Turn k, v;
    int side;  // buffer of the item's queries; the next item's are loaded into the other one meanwhile
    Item item;
    int position[2];        // positions of its rows' tokens
    float scores[TILE_T / 2];
    float top[2], sums[SUMS];  // results of the current part of the context
    bool kept;                 // sums accumulate if true; false where a part begins
    float all_top[2], all_total[2], all[DIM / 2];

    DEV Attending(const Params& params, Shared* shared) : p(params), s(shared), k{0, 0}, v{0, 0}, side(1) {
        group = alike(THREAD / 128), t = THREAD % 128, warp = t / 32, lane = t % 32, row = lane / 4, pair = lane % 4;
    }
    DEV void meet() const { bar_sync(1 + group, 128); }
    DEV int token_of(int own_row) const { return (group * ROWS + own_row) / TILE_G; }
    DEV bool real(int own_row) const { return token_of(own_row) < item.count && own_row % TILE_G < GROUP; }
    DEV int own_row(int half) const { return warp * 16 + row + half * 8; }
    DEV long long head_of(int own_row) const { return item.kv_head * GROUP + own_row % TILE_G; }

    DEV void attend(const Item& given, const Item& next) {
        item = given;
        side = alike(side ^ 1);
        t = THREAD % 128;
        afresh(t);  // values derived from it take no other registers
        warp = alike(t / 32), lane = t % 32, row = lane / 4, pair = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) position[half] = item.position + token_of(own_row(half));
        begin_item();
        if (next.count) bring_queries(next);
        meet();  // all warps' queries are loaded
        int tiles = item.tiles(), mine = own_tiles();
        begin_part();
        u32 weights[TILE_T / 4];
        if (mine) {
            ask_for_scores();
            wait_for_scores<0>();
            float shrink[2];
            weigh(0, shrink, [](int, int) {});
            round_weights(weights);
        }
        int part = 0, end = part_begin(1);
        bool ends = false;  // end of a part, merged while the scores of the next one's second tile are computed
        float part_top[2];
#pragma unroll 1
        for (int i = 1; i < mine; i++) {
            ask_for_scores();
            if (ends) end_part(part_top);
            ends = i * TILE_T == end;
            if (ends) end = part_begin(++part + 1);
            part_top[0] = top[0], part_top[1] = top[1];
            look_at_tile(i * TILE_T, weights, ends);
        }
        if (mine) {
            if (ends) end_part(part_top);
            look_at_last((mine - 1) * TILE_T, weights);
            fold(top);
        }
        // Skip the tiles that only other warpgroups attend to.
        for (int i = mine; i < tiles; i++) {
            wait_for(&s->keys_there[k.slot], k.parity);
            wait_for(&s->values_there[v.slot], v.parity);
            sync_warp();  // all lanes have waited before one of them signals it
            give_back(s->keys_read, &k);
            give_back(s->values_read, &v);
        }
        store();
    }
    DEV int own_tiles() const {
        int tokens = item.count - group * TOKENS;
        if (tokens <= 0) return 0;
        int last = item.position + group * TOKENS + (tokens < TOKENS ? tokens : TOKENS) - 1;
        return (last + TILE_T - 1) / TILE_T;
    }
    DEV void give_back(u64* read, Turn* turn) const {
        if (lane == 0) mbar_arrive(&read[turn->slot]);
        turn->forward();
    }

    DEV void query_fragment(u32* a, int deep) const {
        load_matrices(a, place_in_queries(warp * 16 + lane % 16, deep * 2 + lane / 16));
    }

    // A warp loads its rows' queries, and its own tokens' keys and values, 16 bytes per thread. Keys and
    // values are in the buffer of the next queries, until each thread has those that it needs.
    DEV void begin_item() {
        uint4 keys[OWN_PIECES], values[OWN_PIECES];
        read_own(values, p.v_cache);
        read_own(keys, p.k_cache);
        u32 two[DIM / 4], own_keys[EIGHTS][DIM / 8];
        sync_warp();
        lay_own(values);
        sync_warp();
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2)
            load_matrices(two + n * 2, place_in_next(warp * 16 + lane % 16 / TILE_G, n + lane / 16));
        sync_warp();
        lay_own(keys);
        wait_for_copies();
        if (p.cosines) rotate();
        show_copy_engine();
        sync_warp();
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < DIM / 8; i += 4)
                load_matrices(own_keys[e] + i, place_in_next(warp * 16 + e * 8 + lane % 8 % OWN_TOKENS, i + lane / 8));
        look_at_own(own_keys, two);
    }
    DEV int there(int token) const { return item.there(token); }
    DEV void read_own(uint4* pieces, const u16* cache) const {
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++) {
            int token = there(token_of(warp * 16) + smaller(i * AT_A_TIME + lane / (DIM / 8), OWN_TOKENS - 1));
            pieces[i] = *(const uint4*)(cache + item.cache_row(p, item.position + token) * DIM + lane % (DIM / 8) * 8);
        }
    }
    // Padding rows have another row's elements, and are not stored. A thread loads pieces that are half a
    // row apart, and rotates them.
    DEV int row_of(int round) const { return warp * 16 + lane / HALF * ROUNDS + round; }
    DEV int piece_of(int half) const { return lane % HALF + half * HALF; }
    DEV void bring_queries(const Item& next) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int own = row_of(i), member = own % TILE_G;
            member = member < GROUP ? member : 0;
            const u16* from = p.query + (next.row + next.there(token_of(own))) * p.query_token +
                              (next.kv_head * GROUP + member) * p.query_head + lane % HALF * 8;
            copy_piece(place_in_next(own, piece_of(0)), from);
            copy_piece(place_in_next(own, piece_of(1)), from + DIM / 2);
        }
        if (t == 0) ask_for(next.table + next.position / BLOCK_SIZE);
    }
    DEV void rotate() const {
        uint4 c, s;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            if (i % ALIKE == 0) {  // another token
                long long at = (long long)(item.position + there(token_of(row_of(i)))) * DIM + lane % HALF * 8;
                c = *(const uint4*)(p.cosines + at), s = *(const uint4*)(p.sines + at);
            }
            uint4* first = (uint4*)place_in_queries(row_of(i), piece_of(0));
            uint4* second = (uint4*)place_in_queries(row_of(i), piece_of(1));
            uint4 a = *first, b = *second;
            turn_two(a.x, b.x, c.x, s.x);
            turn_two(a.y, b.y, c.y, s.y);
            turn_two(a.z, b.z, c.z, s.z);
            turn_two(a.w, b.w, c.w, s.w);
            *first = a, *second = b;
        }
    }
    DEV void lay_own(const uint4* pieces) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++) {
            int own = i * AT_A_TIME + lane / (DIM / 8);
            if (own < OWN_TOKENS) *(uint4*)place_in_next(warp * 16 + own, lane % (DIM / 8)) = pieces[i];
        }
    }
    // Attend to the rows' own tokens, whose scores are the diagonal of a GEMM with all of the warp's
    // tokens.
    DEV void look_at_own(const u32 (*keys)[DIM / 8], const u32* two) {
        int first = token_of(warp * 16);
        float d[EIGHTS][4];
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; i++) d[i / 4][i % 4] = 0;
#pragma unroll
        for (int deep = 0; deep < DIM / 16; deep++) {
            u32 a[4];
            query_fragment(a, deep);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) mma(d[e], a[0], a[1], a[2], a[3], keys[e][deep * 2], keys[e][deep * 2 + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int token = token_of(own_row(half));
            float product = 0;
#pragma unroll
            for (int i = 0; i < EIGHTS * 2; i++)
                if (token - first == i / 2 * 8 + pair * 2 + i % 2) product = d[i / 2][half * 2 + i % 2];
            product += shfl(product, 1);
            product += shfl(product, 2);
            all_top[half] = product * p.scale;
            all_total[half] = 1;
        }
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) {
            all[i * 2] = low(two[i]);
            all[i * 2 + 1] = high(two[i]);
        }
    }

    DEV void begin_part() {
#pragma unroll
        for (int half = 0; half < 2; half++) top[half] = as_float(0xff800000u);  // minus infinity
        kept = false;
    }
    // Multiply the next tile's keys by the queries.
    DEV void ask_for_scores() {
        wait_for(&s->keys_there[k.slot], k.parity);
        begin_products();
        multiply_keys();
        end_products();
    }
    template <int LEFT>
    DEV void wait_for_scores() {
        wait_for_products<LEFT>();
        settled<TILE_T / 2>(scores);
        give_back(s->keys_read, &k);
    }
    DEV void multiply_keys() {
        TilePlace queries = tile_at(s->queries[side][group]), keys = tile_at(s->keys[k.slot]);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            int bytes = i / 4 * STRIP + i % 4 * 32;
            if (i) multiply_places<TILE_T>(scores, further(queries, bytes), further(keys, bytes));
            else multiply_places_afresh<TILE_T>(scores, queries, keys);
        }
    }
    // Multiply a tile's weights by its values, and compute the weights of the next one meanwhile. A warp
    // waits until its next GEMM can begin, and so it issues one at a time.
    DEV void look_at_tile(int next, u32* weights, bool ends) {
        wait_for(&s->values_there[v.slot], v.parity);
        begin_products();
        multiply_values(weights, 0, 1);
        wait_for_scores<1>();
        float shrink[2];
        if (ends) top[0] = top[1] = as_float(0xff800000u);
        weigh(next, shrink, [&](int first, int last) { multiply_values(weights, first, last); });
        settled<TILE_T / 2>(scores);
        // Without a branch before it the compiler would place the wait before all weights are computed.
        if (!ends && any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
            wait_for_last_products<1>();
            settle_values(weights);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] *= shrink[i / 2 % 2];
        } else {
            wait_for_last_products<2>();
            settle_values(weights);
        }
        give_back(s->values_read, &v);
        round_weights(weights);
    }
    DEV void end_part(const float* top) {
        fold(top);
        kept = false;
    }
    DEV void settle_values(u32* weights) {
        settled<SUMS>(sums);
        settled<TILE_T / 4>(weights);
    }
    // Weights of 16 tokens at a time.
    DEV void multiply_values(const u32* weights, int first, int last) {
        TilePlace values = columns_at(s->values[v.slot], STRIP);
#pragma unroll
        for (int i = first; i < last; i++)
            multiply_held<DIM + ONES>(sums, weights + i * 4, further(values, i * 16 * SIDE * 2), i || kept);
        end_products();
        kept = true;
    }
    // The last tile.
    DEV void look_at_last(int begin, u32* weights) {
        wait_for(&s->values_there[v.slot], v.parity);
        if (begin + TILE_T > item.last()) clear_behind(item.last() - begin);
        begin_products();
        multiply_values(weights, 0, SIXTEENS);
        wait_for_products<0>();
        settle_values(weights);
        give_back(s->values_read, &v);
    }
    // Slots after the last visible token may contain anything, and zero times NaN is NaN.
    DEV void clear_behind(int tokens) {
        const uint4 nothing = {0, 0, 0, 0};
        for (int i = tokens * 8 + t; i < TILE_T * 8; i += 128)
#pragma unroll
            for (int deep = 0; deep < DEEP; deep++) *(uint4*)(s->values[v.slot] + deep * STRIP + i * 16) = nothing;
        show_copy_engine();
        meet();
    }
    // Turn a tile's scores into weights, and compute the factor by which earlier sums shrink. GEMMs of the
    // previous tile are issued meanwhile.
    template <class Ask>
    DEV void weigh(int begin, float* shrink, Ask ask) {
        const float NOTHING = as_float(0xff800000u);  // minus infinity
        if (begin + TILE_T > item.position + group * TOKENS) {
#pragma unroll
            for (int i = 0; i < TILE_T / 2; i++)
                if (begin + i / 4 * 8 + pair * 2 + i % 2 >= position[i / 2 % 2]) scores[i] = NOTHING;
        }
        float less[2], most[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float some[4];
#pragma unroll
            for (int i = 0; i < 4; i++) some[i] = larger_of(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]);
#pragma unroll
            for (int i = 4; i < TILE_T / 8; i++)
                some[i % 4] = larger_of(some[i % 4], larger_of(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
            most[half] = larger_of(larger_of(some[0], some[1]), larger_of(some[2], some[3]));
        }
        ask(1, SIXTEENS - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            most[half] = larger_of(most[half], shfl(most[half], 1));
            most[half] = larger_of(most[half], shfl(most[half], 2));
            float higher = larger_of(top[half], most[half] * p.scale);
            less[half] = higher == NOTHING ? 0.0f : higher;
            shrink[half] = exp2_flushed(top[half] - less[half]);
            top[half] = higher;
        }
        ask(SIXTEENS - 1, SIXTEENS);
#pragma unroll
        for (int i = 0; i < TILE_T / 2; i++) scores[i] = exp2_flushed(times_plus(scores[i], p.scale, -less[i / 2 % 2]));
    }
    DEV void round_weights(u32* weights) const {
#pragma unroll
        for (int i = 0; i < TILE_T / 4; i++) weights[i] = two_bf16(scores[i * 2], scores[i * 2 + 1]);
    }
    // Merge a part into the parts before it.
    DEV void fold(const float* top) {
        float shrink[2], weight[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float higher = larger_of(all_top[half], top[half]);
            shrink[half] = exp2_flushed(all_top[half] - higher), weight[half] = exp2_flushed(top[half] - higher);
            all_top[half] = higher;
            all_total[half] = all_total[half] * shrink[half] + sums[DIM / 2 + half * 2] * weight[half];
        }
        if (any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {  // most parts have no higher score than those before
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) all[i] *= shrink[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) all[i] += sums[i] * weight[i / 2 % 2];
    }
    // The queries have been read: the results are written into their buffer, and then stored row by row.
    DEV void store() {
        meet();
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                const float* two = all + n * 4 + half * 2;
                *(u32*)(place_in_queries(own_row(half), n) + pair * 4) =
                    two_bf16(over(two[0], all_total[half]), over(two[1], all_total[half]));
            }
        }
        sync_warp();
        constexpr int LANES = DIM / 8;  // lanes per row
#pragma unroll
        for (int i = 0; i < 16; i += 32 / LANES) {
            int own = warp * 16 + i + lane / LANES, piece = lane % LANES;
            uint4 numbers = *(const uint4*)place_in_queries(own, piece);
            if (real(own))
                *(uint4*)(p.out + (item.row + token_of(own)) * p.out_token + head_of(own) * p.out_head + piece * 8) = numbers;
        }
    }
    // Offset of 8 elements of a row, in the copy engine's swizzled order.
    DEV unsigned char* place_in_queries(int own, int piece) const { return place(s->queries[side][group], own, piece); }
    DEV unsigned char* place_in_next(int own, int piece) const { return place(s->queries[side ^ 1][group], own, piece); }
    DEV unsigned char* place(unsigned char* queries, int own, int piece) const {
        return queries + piece / 8 * STRIP + own * SIDE * 2 + ((piece % 8 ^ own % 8) << 4);
    }
};
