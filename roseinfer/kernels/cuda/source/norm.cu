// The norm of a row whose elements are distributed over threads. Squares are added up in the order of
// Triton's norm kernels: some in each of their threads, then the threads of a warp by halves, then the
// warps by halves.

template <int NUMBERS, int TRITONS_WARPS, int ITS_THREADS>
struct RowNorm {
    static constexpr int TRITONS = TRITONS_WARPS * 32;  // threads
    static constexpr int EACH = larger(power_of_two(NUMBERS) / TRITONS, 1);
    static constexpr int RUN = EACH < 8 ? EACH : 8;  // contiguous elements
    static constexpr int TURNS = (TRITONS + ITS_THREADS - 1) / ITS_THREADS;
    static constexpr int HELD = TURNS * EACH;
    static constexpr int LOADED = RUN < 4 ? RUN : 4;  // at once

    // Index of a thread's element, or one past the row.
    DEV static int held(int t, int i) {
        int turn = i / EACH, own = turn * ITS_THREADS + t;
        if (own >= TRITONS) return NUMBERS;
        return i % EACH / RUN * RUN * TRITONS + own * RUN + i % RUN;
    }
    // Factor of the elements before their gain.
    template <class Meet>
    DEV static float factor(const float* v, float* squares_of_warps, int t, float epsilon, Meet meet) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const float* x = v + turn * EACH;
            float squares = x[0] * x[0];
            if (EACH > 1) squares = times_plus(x[0], x[0], x[1] * x[1]);
#pragma unroll
            for (int i = 2; i < EACH; i++) squares = times_plus(x[i], x[i], squares);
#pragma unroll
            for (int m = 16; m; m >>= 1) squares += shfl(squares, m);
            int warp = (turn * ITS_THREADS + t) / 32;
            if (t % 32 == 0 && warp < TRITONS_WARPS) squares_of_warps[warp] = squares;
        }
        meet();
        float total = squares_of_warps[t % TRITONS_WARPS];
#pragma unroll
        for (int m = TRITONS_WARPS / 2; m; m >>= 1) total += shfl(total, m);
        return root_under_one(times_plus(total, (float)(1.0 / NUMBERS), epsilon));
    }
    DEV static u16 normed(float x, float factor, u16 gain) { return to_bf16(rounded(x * factor) * wide(gain)); }
};
