    // ------------------------------------------------------------ attention
    //
    // A piece is a KV head's new token or a part of its context, with the query heads that share the KV
    // head. Tokens are added up as in kernels/triton/softmax.py, and pieces at the end. Of a part, each
    // warp computes the scores of 8 of 64 tokens, and 16 elements of a head's values: both are read from
    // the cache, block by block, directly into the tensor cores' layout.
    static constexpr int DEEP = DIM / 16;

    struct Held {  // registers of a lane, for 64 tokens
        u32 k[DEEP * 2], v[TILE_T / 4];
    };
    DEV long long place_of(int kv_head, int token) const {
        long long block = p->table[token / BLOCK_SIZE];
        return block * p->block_pitch + ((long long)kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * DIM;
    }
    // Offset of 16 tokens of a tile, which are contiguous in a block. Where a block has all tokens of a
    // tile, the table is read once.
    DEV long long place_of_some(int kv_head, int tile, int sixteen) const {
        if (BLOCK_SIZE % TILE_T) return place_of(kv_head, tile + sixteen * 16);
        return place_of(kv_head, tile) + sixteen * 16 * DIM;
    }
    DEV void read_keys(const Layer& layer, int kv_head, int begin, int end, Held* h) const {
        int token = warp * 8 + row;
#pragma unroll
        for (int i = 0; i < DEEP * 2; i++) h->k[i] = 0;
        if (begin + token >= end) return;
        const u16* k = layer.keys + place_of_some(kv_head, begin, token / 16) + token % 16 * DIM + pair * 2;
#pragma unroll
        for (int i = 0; i < DEEP * 2; i++) h->k[i] = cached2(k + i * 8);
    }
    DEV void read_values(const Layer& layer, int kv_head, int begin, int end, Held* h) const {
        int dim = warp * 16 + row * 2;  // even elements are columns of one GEMM, odd ones of another
#pragma unroll
        for (int sixteen = 0; sixteen < TILE_T / 16; sixteen++) {
            int left = dim < DIM ? end - begin - sixteen * 16 - pair * 2 : 0;
            const u16* v = layer.values + dim + pair * 2 * DIM;
            if (left > 0) v += place_of_some(kv_head, begin, sixteen);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int token = i / 2 * 8 + i % 2;
                h->v[sixteen * 4 + i] = token < left ? cached2(v + token * DIM) : 0;
            }
        }
    }
    // The new words of a head of a group: of a query, of the group's key, or of its value.
    DEV const u32* head_of(int kv_head, int member) const {
        int head = kv_head * GROUP + member;
        if (member >= GROUP) head = HEADS + kv_head + (member - GROUP) * KV_HEADS;
        return p->qkv_new + head * DIM;
    }
    // Norm factor of a new head, by a warp: 8 squares in each lane, then the lanes by halves.
    DEV void measure(int kv_head, int member, u32 stamp) {
        const u32* head = head_of(kv_head, member) + lane * 8;
        float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        hear<u32, 4, 2>(lane * 8 < DIM ? 3 : 0, stamp, [&](int j) { return head + j * 4; },
                   [&](int j, const u32* w) {
#pragma unroll
                       for (int e = 0; e < 4; e++) x[j * 4 + e] = number(w[e]);
                   });
        float squares = times_plus(x[0], x[0], x[1] * x[1]);
#pragma unroll
        for (int i = 2; i < 8; i++) squares = times_plus(x[i], x[i], squares);
#pragma unroll
        for (int m = power_of_two(DIM) / 16; m; m >>= 1) squares += shfl(squares, m);
        if (lane == 0) s->factors[member] = root_under_one(over(squares, (float)DIM) + p->head_epsilon);
    }
    DEV float normed(float x, const u16* gain, int d, int member) const {
        if (!NORMED || !gain) return x;
        return rounded(rounded(x * s->factors[member]) * wide(kept1(gain + d)));
    }
    // Load the queries of a head's group, one row each, and optionally its new key and value, which are
    // stored: all as in the cache, normed and rotated by the token's position.
    DEV void bring(const Layer& layer, int kv_head, bool own_too, u32 stamp) {
        constexpr int HALF = TURN / 2, MINE = ((GROUP + 2) * DIM + CONSUMERS - 1) / CONSUMERS;
        int members = GROUP + own_too * 2;
        if (NORMED) {
#pragma unroll 1
            for (int member = warp; member < GROUP + own_too; member += WARPS) measure(kv_head, member, stamp);
            meet();
        }
        float x[MINE], y[MINE], cosine[MINE], sine[MINE];
        u32 some = 0;
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            int i = j * CONSUMERS + t, d = i % DIM;
            x[j] = y[j] = cosine[j] = sine[j] = 0;
            if (i >= members * DIM) continue;
            some |= 1u << j;
            if (!layer.cosines || d >= TURN || i >= (GROUP + 1) * DIM) continue;
            some |= 1u << (MINE + j);  // the element it is rotated with
            cosine[j] = wide(kept1(layer.cosines + (long long)own * TURN + d));
            sine[j] = wide(kept1(layer.sines + (long long)own * TURN + d));
        }
        long long to = own_too ? place_of(kv_head, own) : 0;
        hear<u32, 1, 2 * MINE>(some, stamp, [&](int j) {
            int i = j % MINE * CONSUMERS + t, d = i % DIM;
            return head_of(kv_head, i / DIM) + (j < MINE ? d : other(d));
        }, [&](int j, const u32* w) { (j < MINE ? x : y)[j % MINE] = number(w[0]); });
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            int i = j * CONSUMERS + t, member = i / DIM, d = i % DIM;
            if (!(some >> j & 1)) continue;
            const u16* gain = member < GROUP ? layer.query_gain : member == GROUP ? layer.key_gain : 0;
            float v = normed(x[j], gain, d, member);
            if (some >> (MINE + j) & 1)
                v = times_plus(v, cosine[j], normed(y[j], gain, other(d), member) * (d < HALF ? -sine[j] : sine[j]));
            if (member < GROUP) s->q[member * Q_PITCH + d] = to_bf16(v);
            else keep(layer, to, member - GROUP, d, to_bf16(v));
        }
        meet();
    }
    // The element of a head that another is rotated with.
    DEV static int other(int d) { return d < TURN / 2 ? d + TURN / 2 : d - TURN / 2; }
    // Store an element of the new key or value.
    DEV void keep(const Layer& layer, long long to, int which, int d, u16 value) {
        s->own[which * DIM + d] = value;
        if (*(volatile int*)&s->dead) value = 0x7fff;
        (which ? layer.values : layer.keys)[to + d] = value;
    }
    DEV void query_fragment(u32* a, int deep) const {
        load_matrices(a, &s->q[(lane % 8 + lane / 8 % 2 * 8) * Q_PITCH + deep * 16 + lane / 16 * 8]);
    }
    DEV u64* sums_of(int head, int piece) const {
        return p->sums + ((long long)head * (p->most_parts + 1) + piece) * DIM;
    }
    DEV u64* seen_of(int head, int piece) const {
        return p->seen + ((long long)head * (p->most_parts + 1) + piece) * 2;
    }
    DEV void note(int kv_head, int piece, int member, float top, float total, u32 stamp) const {
        if (member >= GROUP) return;
        u64* to = seen_of(kv_head * GROUP + member, piece);
        tell(to, top, stamp);
        tell(to + 1, total, stamp);
    }

    // Attend to the new token.
    DEV void look_at_own(int kv_head, u32 stamp) {
        if (warp == 0) {  // the key is the first column, and the others stay empty
            float d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int deep = 0; deep < DEEP; deep++) {
                u32 a[4];
                query_fragment(a, deep);
                const u32* k = (const u32*)s->own + deep * 8 + pair;
                mma(d, a[0], a[1], a[2], a[3], row == 0 ? k[0] : 0, row == 0 ? k[4] : 0);
            }
            if (pair == 0) {
                note(kv_head, 0, row, d[0] * p->scale, 1, stamp);
                note(kv_head, 0, row + 8, d[2] * p->scale, 1, stamp);
            }
        }
#pragma unroll 1
        for (int i = t; i < GROUP * DIM; i += CONSUMERS)
            tell(sums_of(kv_head * GROUP + i / DIM, 0) + i % DIM, wide(s->own[DIM + i % DIM]), stamp);
    }

    // Attend to consecutive parts of the context. A tile is loaded while the previous one is computed; the
    // first one is loaded before the queries arrive, since it depends on nothing.
    struct Looking {
        float top[2], total[4], sums[2][4];
    };
    DEV void take_parts(const Layer& layer, int kv_head, int first, int last, bool own_too, u32 stamp) {
        int begin = part_begin(first), stop = end_of(last), part = first - 1, end = begin;
        Looking l;
        Held h;
#pragma unroll 1
        for (int tile = begin - TILE_T; tile < stop; tile += TILE_T) {
            bool some = tile >= begin, more = tile + TILE_T < stop;
            if (some && tile >= end) {
                end = end_of(++part + 1);
                begin_looking(&l);
            }
            if (some) look_at_keys(tile, end, h, &l);
            if (more) read_keys(layer, kv_head, tile + TILE_T, stop, &h);
            if (some) look_at_values(h, &l);
            if (more) read_values(layer, kv_head, tile + TILE_T, stop, &h);
            if (!some) {
                bring(layer, kv_head, own_too, stamp);
                if (own_too) look_at_own(kv_head, stamp);
            } else if (tile + TILE_T >= end) tell_part(kv_head, part + 1, l, stamp);
        }
    }
    DEV int end_of(int parts) const {
        int end = part_begin(parts);
        return end < own ? end : own;
    }
    DEV static void begin_looking(Looking* l) {
#pragma unroll
        for (int i = 0; i < 2; i++) l->top[i] = as_float(0xff800000u);  // minus infinity
#pragma unroll
        for (int e = 0; e < 4; e++) l->total[e] = l->sums[0][e] = l->sums[1][e] = 0;
    }
    // Turn the scores of a tile into weights.
    DEV void look_at_keys(int begin, int end, const Held& h, Looking* l) {
        const float NOTHING = as_float(0xff800000u);  // minus infinity
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int deep = 0; deep < DEEP; deep++) {
            u32 a[4];
            query_fragment(a, deep);
            mma(d, a[0], a[1], a[2], a[3], h.k[deep * 2], h.k[deep * 2 + 1]);
        }
        int token = begin + warp * 8 + pair * 2;
        if (token >= end) d[0] = d[2] = NOTHING;
        if (token + 1 >= end) d[1] = d[3] = NOTHING;
        float shrink[2];
        weigh(d, l->top, shrink);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            l->total[e] *= shrink[e / 2];
            l->sums[0][e] *= shrink[e / 2];
            l->sums[1][e] *= shrink[e / 2];
        }
    }
    DEV void look_at_values(const Held& h, Looking* l) const {
#pragma unroll
        for (int i = 0; i < TILE_T / 16; i++) {
            u32 a[4];
            const u16* w = &s->weights[(lane % 8 + lane / 8 % 2 * 8) * W_PITCH + i * 16 + lane / 16 * 8];
            load_matrices(a, w);
            const u32* four = h.v + i * 4;  // two tokens each: their even elements, then their odd ones
            mma(l->total, a[0], a[1], a[2], a[3], 0x3f803f80u, 0x3f803f80u);
            mma(l->sums[0], a[0], a[1], a[2], a[3], evens(four), evens(four + 2));
            mma(l->sums[1], a[0], a[1], a[2], a[3], odds(four), odds(four + 2));
        }
    }
    DEV void tell_part(int kv_head, int piece, const Looking& l, u32 stamp) const {
        if (warp == 0 && pair == 0) {
            note(kv_head, piece, row, l.top[0], l.total[0], stamp);
            note(kv_head, piece, row + 8, l.top[1], l.total[2], stamp);
        }
        if (warp * 16 >= DIM) return;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int member = row + e / 2 % 2 * 8, d = warp * 16 + (pair * 2 + e % 2) * 2 + e / 4;
            if (member < GROUP)
                tell(sums_of(kv_head * GROUP + member, piece) + d, l.sums[e / 4][e % 4], stamp);
        }
    }
    DEV u32 evens(const u32* two) const { return (two[0] & 0xffffu) | two[1] << 16; }
    DEV u32 odds(const u32* two) const { return two[0] >> 16 | (two[1] & 0xffff0000u); }

    // Turn a tile's scores into weights, for all warps, and compute the factor by which earlier sums
    // shrink.
    DEV void weigh(const float* d, float* top, float* shrink) {
        float most[2] = {larger_of(d[0], d[1]), larger_of(d[2], d[3])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = larger_of(most[i], shfl(most[i], 1));
            most[i] = larger_of(most[i], shfl(most[i], 2));
            if (pair == 0) s->highest[warp * 16 + i * 8 + row] = most[i];
        }
        meet();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float highest = s->highest[i * 8 + row];
#pragma unroll
            for (int w = 1; w < WARPS; w++) highest = larger_of(highest, s->highest[w * 16 + i * 8 + row]);
            float higher = larger_of(top[i], highest * p->scale);
            shrink[i] = exp2_flushed(top[i] - higher);
            top[i] = higher;
            float first = exp2_flushed(times_plus(d[i * 2], p->scale, -higher));
            float second = exp2_flushed(times_plus(d[i * 2 + 1], p->scale, -higher));
            *(u32*)&s->weights[(i * 8 + row) * W_PITCH + warp * 8 + pair * 2] = two_bf16(first, second);
        }
        meet();
    }

    // Add up the pieces of heads: the new token's, then the parts' in order. A program owns some elements
    // of all heads. Its threads load words of many pieces at a time into the space of GEMM inputs, and then
    // one thread adds up one element.
    static constexpr int NUMBERS = (ATT + PROGRAMS - 1) / PROGRAMS;  // elements of a program, at most
    static constexpr int OF_HEADS = (NUMBERS + DIM - 2) / DIM + 1;   // heads that these elements are in
    static constexpr int OF_PIECE = NUMBERS + 2 * OF_HEADS;
    static constexpr int COLUMNS = power_of_two(OF_PIECE), PIECES = CONSUMERS / COLUMNS;  // at a time
    static constexpr int PLACES = smaller(10, MOST_INPUTS / 2 / OF_PIECE / larger(PIECES, 1));
    static constexpr int AT_A_TIME = PLACES * PIECES;
    static_assert(AT_A_TIME > 0, "a program has too many numbers of heads, or a product too few inputs");

    DEV void fold(int layer, int pieces, u32 stamp) {
        afresh(t);
        int first, count;
        share(ATT, phase_of(2 * layer, ATTENTION), &first, &count);
        const float* sums = (const float*)s->x;
        const float* seen = sums + AT_A_TIME * NUMBERS + ((first + t) / DIM - first / DIM) * 2;
        float top = 0, total = 0, sum = 0;
#pragma unroll 1
        for (int begin = 0; begin < pieces; begin += AT_A_TIME) {
            int some = pieces - begin < AT_A_TIME ? pieces - begin : AT_A_TIME;
            bring_pieces(first, count, begin, some, stamp);
            meet();
            if (t < count)
#pragma unroll 4
                for (int j = 0; j < some; j++) {
                    float more_top = seen[j * 2 * OF_HEADS], more_total = seen[j * 2 * OF_HEADS + 1];
                    float more = sums[j * NUMBERS + t];
                    if (begin + j == 0) top = more_top, total = more_total, sum = more;
                    else {
                        float higher = larger_of(top, more_top);
                        float shrink = exp2_flushed(top - higher), weight = exp2_flushed(more_top - higher);
                        top = higher;
                        total = total * shrink + more_total * weight;
                        sum = sum * shrink + more * weight;
                    }
                }
            meet();
        }
        if (t < count) tell(p->attended + first + t, to_bf16(over(sum, total)), stamp);
    }
    // Load the partial results of some pieces: the sums of the program's elements, and the highest score
    // and the sum of weights of each head that they are in.
    DEV void bring_pieces(int first, int count, int begin, int some, u32 stamp) {
        int column = t % COLUMNS, piece = t / COLUMNS, seen = column - NUMBERS;
        bool is_sum = seen < 0;
        int heads = (first + count - 1) / DIM - first / DIM + 1;
        const u64* from = is_sum ? sums_of((first + column) / DIM, begin + piece) + (first + column) % DIM
                                 : seen_of(first / DIM + seen / 2, begin + piece) + seen % 2;
        int pitch = PIECES * (is_sum ? DIM : 2);
        float* to = (float*)s->x + (is_sum ? piece * NUMBERS + column
                                           : AT_A_TIME * NUMBERS + piece * 2 * OF_HEADS + seen);
        int to_pitch = PIECES * (is_sum ? NUMBERS : 2 * OF_HEADS);
        u32 wanted = 0;
        if (is_sum ? column < count : seen < 2 * heads)
#pragma unroll
            for (int j = 0; j < PLACES; j++)
                if (piece + j * PIECES < some) wanted |= 1u << j;
        hear<u64, 1, PLACES>(wanted, stamp, [&](int j) { return from + j * pitch; },
                             [&](int j, const u64* w) { to[j * to_pitch] = number(w[0]); });
    }

    // Programs share the KV heads, and the programs of a head share its context: each has the parts that
    // end in its range of tokens. The first one, which never has more than others, attends to the new token
    // too.
    DEV int parts() const { return own ? part_of(own - 1) + 1 : 0; }
    DEV int rank(int layer) const { return (u32)(BLOCK + 29 * phase_of(2 * layer, ATTENTION)) % PROGRAMS; }
    DEV void parts_of(int rank, int kv_head, int* first, int* last) const {
        int member = rank / KV_HEADS;
        bool more = kv_head < PROGRAMS - FEWEST * KV_HEADS;
        *first = stretch_begin(member, more);
        *last = member + 1 < FEWEST + more ? stretch_begin(member + 1, more) : parts();
    }
    // The programs of a head are this many, or one more: computed without divisions.
    static constexpr int FEWEST = PROGRAMS < KV_HEADS ? 1 : PROGRAMS / KV_HEADS;
    DEV int stretch_begin(int member, bool more) const {
        u32 before = (u32)own * member;
        return part_of(more ? before / (FEWEST + 1) : before / FEWEST);
    }

    DEV void attend(int layer) {
        afresh(t);
        const Layer& own_layer = p->layers[layer];
        u32 stamp = stamp_of(layer);
        int mine = rank(layer), first, last;
#pragma unroll 1
        for (int kv_head = mine % KV_HEADS; kv_head < KV_HEADS; kv_head += PROGRAMS) {
            bool own_too = mine < KV_HEADS;
            parts_of(mine, kv_head, &first, &last);
            if (own_too || first < last) take_parts(own_layer, kv_head, first, last, own_too, stamp);
            meet();
        }
        // Last, after all results that other programs may wait for.
        fold(layer, parts() + 1, stamp);
    }
