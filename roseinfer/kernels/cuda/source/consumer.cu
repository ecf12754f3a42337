// The other warps wait for activations, and multiply.

struct Consumer : Words {
    int t, warp, lane;
    int slot;       // first slot of a wave's next tiles: each warp takes the one at its index
    u32 turn;
    int piece;      // offset of a lane's piece in a tile's first group
    int row, pair;  // row or column of a GEMM fragment, and pair of inputs
    int own;        // position of the new token

    DEV void start(const Params* params, Shared* shared) {
        Words::start(params, shared);
        t = THREAD; warp = t / 32; lane = t % 32;
        row = lane / 4; pair = lane % 4;
        slot = 0; turn = 0;
        piece = lane % 8 * (SIDE * 2) + (lane / 8 ^ lane % 8) * 16;
        own = (int)*p->length;
        // Rows without a query of the group stay empty.
#pragma unroll 1
        for (int i = t; i < 16 * Q_PITCH; i += CONSUMERS) s->q[i] = 0;
    }
    DEV void meet() { bar_sync(1, CONSUMERS); }

    // ------------------------------------------------------------ GEMMs
    //
    // Offset of an input for `multiply`: a lane loads 8 of 32 at once, and so pairs are contiguous.
    DEV u16* input(int k) {
        int group = k / TOGETHER, e = k % TOGETHER;
        return s->x + group * TOGETHER + (e % 8) / 2 * 8 + e / 8 * 2 + e % 2;
    }
    // A warp's chains of 8 outputs each: inputs are added up 16 by 16, first to last, as in the Triton
    // kernels, whose bits they have. Inputs are the rows of the first factor, all equal or empty; the
    // weights of an output are a column of the second.
    template <class Take>
    DEV void multiply(int chains, Cut cut, Take take) {
#pragma unroll 1
        for (int wave = 0; wave < chains; wave += WARPS) {
            int some = chains - wave < WARPS ? chains - wave : WARPS;
            int chain = wave + warp;
            float d[4] = {0, 0, 0, 0};
            const uint4* x = (const uint4*)(s->x + chain % cut.parts * cut.of_part()) + pair;
#pragma unroll 1
            for (int depth = 0; depth < cut.depth; depth++) {
                if (warp < some) add_tile(d, x, cut.groups);
                x += cut.groups * (SIDE / 8);
                forward(some, &slot, &turn);
            }
            if (warp < some && row == 0) take(chain * ROWS + pair * 2, d[0], d[1]);
        }
    }
    DEV void add_tile(float* d, const uint4* x, int groups) {
        int own = slot;
        u32 own_turn = turn;
        forward(warp, &own, &own_turn);
        wait_for(&s->full[own], own_turn);
        const unsigned char* from = s->ring + own * SLOT;
#pragma unroll 8
        for (int k = 0; k < groups; k++) {
            u32 w[4];
            load_matrices(w, from + k * OF_GROUP + piece);
            multiply_some(d, w, x[k * 8]);
            load_matrices(w, from + k * OF_GROUP + (piece ^ 64));  // 4 pieces further
            multiply_some(d, w, x[k * 8 + 4]);
        }
        sync_warp();
        if (lane == 0) mbar_arrive(&s->empty[own]);
    }
    DEV void multiply_some(float* d, const u32* w, uint4 a) {
        mma(d, a.x, 0, a.y, 0, w[0], w[1]);
        mma(d, a.z, 0, a.w, 0, w[2], w[3]);
    }
    DEV void keep_two(int at, float a, float b) {
        s->results[at] = a;
        s->results[at + 1] = b;
    }
    // The sum of a row's parts, in order.
    DEV float sum_of(int r, int parts) const {
        float total = 0;
#pragma unroll 1
        for (int part = 0; part < parts; part++)
            total += s->results[(r / ROWS * parts + part) * ROWS + r % ROWS];
        return total;
    }

    // ------------------------------------------------------------ norms
    typedef RowNorm<WIDTH, NORM_WARPS, CONSUMERS> Norm;
    static constexpr int HELD = Norm::HELD;

    DEV void norm_into_inputs(const float* v, const u16* gain) {
        float factor = Norm::factor(v, s->squares, t, p->epsilon, [&] { meet(); });
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int n = Norm::held(t, i);
            if (n < WIDTH) *input(n) = Norm::normed(v[i], factor, gain[i]);
        }
        meet();
    }
    // The gain of the next norm depends on nothing, and is loaded before any wait.
    DEV void read_gain(const u16* from, u16* gain) const {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int n = Norm::held(t, i);
            gain[i] = n < WIDTH ? kept1(from + n) : 0;
        }
    }
    DEV void hear_residual(const u32* from, u32 stamp, float* v) const {
        constexpr int V = Norm::LOADED, N = HELD / V;
        u32 some = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (Norm::held(t, j * V) < WIDTH) some |= 1u << j;
#pragma unroll
        for (int i = 0; i < HELD; i++) v[i] = 0;
        hear<u32, V, N>(some, stamp, [&](int j) { return from + Norm::held(t, j * V); },
                   [&](int j, const u32* w) {
#pragma unroll
                       for (int e = 0; e < V; e++) v[j * V + e] = number(w[e]);
                   });
    }
    DEV void read_word(float* v) const {
        const u16* from = p->words + *p->token * WIDTH;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int n = Norm::held(t, i);
            v[i] = n < WIDTH ? rounded(wide(kept1(from + n)) * p->embedding_multiplier) : 0;
            if (n < WIDTH && BLOCK == 0) tell(p->residual + n, to_bf16(v[i]), stamp_of(0));
        }
    }
    // Load words as inputs: a thread requests up to 16 times 4 of them at a time.
    DEV void hear_inputs(const u32* from, int count, u32 stamp) {
        constexpr int ALL = (larger(ATT, MLP) / 4 + CONSUMERS - 1) / CONSUMERS, TIMES = (ALL + 15) / 16;
        constexpr int PLACES = (ALL + TIMES - 1) / TIMES;
#pragma unroll 1
        for (int begin = t * 4; begin < count; begin += PLACES * CONSUMERS * 4) {
            u32 some = 0;
#pragma unroll
            for (int j = 0; j < PLACES; j++)
                if (begin + j * CONSUMERS * 4 < count) some |= 1u << j;
            u32* to = (u32*)input(begin);
            hear<u32, 4, PLACES>(some, stamp, [&](int j) { return from + begin + j * CONSUMERS * 4; },
                            [&](int j, const u32* w) {
                                to[j * CONSUMERS * 2] = both(w[0], w[1]);
                                to[j * CONSUMERS * 2 + 4] = both(w[2], w[3]);
                            });
        }
        meet();
    }
