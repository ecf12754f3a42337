// Arithmetic with the bits of the Triton kernels: rounding to bfloat16, rotary embeddings, the norm of a row,
// and the parts of a context.
#pragma once

#include "machine.cuh"

DEV constexpr int max_int(int a, int b) { return a > b ? a : b; }
DEV constexpr int min_int(int a, int b) { return a < b ? a : b; }
DEV constexpr int next_power_of_2(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}
DEV float max_float(float a, float b) { return fmaxf(a, b); }
DEV float minus_infinity() { return as_float(0xff800000u); }
DEV float bf16_to_float(u16 v) { return as_float((u32)v << 16); }
// The first and the second of two packed bfloat16.
DEV float low_to_float(u32 pair) { return as_float(pair << 16); }
DEV float high_to_float(u32 pair) { return as_float(pair & 0xffff0000u); }
DEV float round_to_bf16(float v) { return as_float(pack_bf16(0.0f, v)); }
// silu(gate) * up, rounded where the model's own modules round, except at the end. A power that is
// negligible next to one may be flushed.
DEV float silu_mul(float gate, float up) {
    gate = round_to_bf16(gate);
    float sigmoid = reciprocal(1.0f + exp2_ftz(gate * -1.44269502162933349609375f));
    return round_to_bf16(gate * sigmoid) * round_to_bf16(up);
}
// Rotate two elements of the first half of a head, and the elements of the second half that pair with them.
DEV void rotate_pairs(u32& first, u32& second, u32 cosines, u32 sines) {
    float a[2] = {low_to_float(first), high_to_float(first)}, b[2] = {low_to_float(second), high_to_float(second)};
    float c[2] = {low_to_float(cosines), high_to_float(cosines)}, s[2] = {low_to_float(sines), high_to_float(sines)};
    first = pack_bf16(fmadd(a[0], c[0], -b[0] * s[0]), fmadd(a[1], c[1], -b[1] * s[1]));
    second = pack_bf16(fmadd(b[0], c[0], a[0] * s[0]), fmadd(b[1], c[1], a[1] * s[1]));
}

// The norm of a row whose elements are distributed over the threads of a program. Squares are added up in
// the order of Triton's norm kernels: some in each of their threads, then the threads of a warp by halves,
// then the warps by halves.
template <int ELEMENTS, int TRITON_WARPS, int PROGRAM_THREADS>
struct RowNorm {
    static constexpr int TRITON_THREADS = TRITON_WARPS * 32;
    static constexpr int TRITON_ELEMENTS = max_int(next_power_of_2(ELEMENTS) / TRITON_THREADS, 1);  // per thread
    static constexpr int RUN = TRITON_ELEMENTS < 8 ? TRITON_ELEMENTS : 8;  // contiguous elements
    static constexpr int ROUNDS = (TRITON_THREADS + PROGRAM_THREADS - 1) / PROGRAM_THREADS;
    static constexpr int THREAD_ELEMENTS = ROUNDS * TRITON_ELEMENTS;
    static constexpr int VECTOR = RUN < 4 ? RUN : 4;  // elements of a load

    // Index in the row of element i of a thread, or one past the row.
    DEV static int index(int thread, int i) {
        int round = i / TRITON_ELEMENTS, triton_thread = round * PROGRAM_THREADS + thread;
        if (triton_thread >= TRITON_THREADS) return ELEMENTS;
        return i % TRITON_ELEMENTS / RUN * RUN * TRITON_THREADS + triton_thread * RUN + i % RUN;
    }
    // Factor of the elements before their gain.
    template <class Sync>
    DEV static float factor(const float* v, float* warp_squares, int thread, float epsilon, Sync sync) {
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const float* x = v + round * TRITON_ELEMENTS;
            float squares = x[0] * x[0];
            if (TRITON_ELEMENTS > 1) squares = fmadd(x[0], x[0], x[1] * x[1]);
#pragma unroll
            for (int i = 2; i < TRITON_ELEMENTS; i++) squares = fmadd(x[i], x[i], squares);
#pragma unroll
            for (int mask = 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
            int warp = (round * PROGRAM_THREADS + thread) / 32;
            if (thread % 32 == 0 && warp < TRITON_WARPS) warp_squares[warp] = squares;
        }
        sync();
        float total = warp_squares[thread % TRITON_WARPS];
#pragma unroll
        for (int mask = TRITON_WARPS / 2; mask; mask >>= 1) total += shuffle_xor(total, mask);
        return reciprocal_sqrt(fmadd(total, (float)(1.0 / ELEMENTS), epsilon));
    }
    DEV static u16 normed(float x, float factor, u16 gain) {
        return to_bf16(round_to_bf16(x * factor) * bf16_to_float(gain));
    }
};

// Parts of a context, as in kernels/triton/softmax.py: the first token of one, and the one that has a token.
DEV int part_begin(int part) {
    int doublings = part / 16 - 1;
    doublings = doublings > 0 ? doublings : 0;
    return (part - doublings * 16) * (128 << doublings);
}
DEV int part_index(int token) {
    int doublings = 0;
    while (token >= 4096 << doublings) doublings++;
    return token / (128 << doublings) + doublings * 16;
}
