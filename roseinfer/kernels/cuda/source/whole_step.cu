// The megakernel, a whole decode step of one sequence: programs, one on each multiprocessor, that wait for
// each other's words between the phases of layers.

#include "step_attention.cuh"

// The phases of a layer, by the warps that multiply.
struct Step : Attention {
    // Norm the residual stream, and multiply it. The norm's gain is loaded before waiting for words.
    DEV void first_gemm(int half) {
        launder(t);
        int layer = half / 2, mlp = half % 2, first, count;
        bool head = half == 2 * p->num_layers;
        u16 gain[THREAD_ELEMENTS];
        float v[THREAD_ELEMENTS];
        load_gain(head ? p->final_norm : mlp ? p->layers[layer].mlp_norm : p->layers[layer].norm, gain);
        program_rows(head ? VOCAB : mlp ? MLP : QKV, phase_index(half, FIRST_GEMM), &first, &count);
        if (half == 0) load_embedding(v);
        else receive_residual(p->residual + mlp * WIDTH, stamp_of(layer), v);
        norm_into_inputs(v, gain);
        int blocks = row_blocks(count);
        u16* logits = head ? p->logits + first : 0;
        multiply(mlp ? 2 * blocks : blocks, WIDTH_SPLIT, [&](int r, float a, float b) {
            if (!logits) return store_results(r, a, b);
            if (r < count) logits[r] = to_bf16(a);
            if (r + 1 < count) logits[r + 1] = to_bf16(b);
        });
        sync();
        // After a timeout, results are NaN. Choosing a token reports a row of NaN (kernels/triton/greedy.py).
        bool invalid = head && timed_out();
#pragma unroll 1
        for (int r = t; r < count; r += CONSUMERS) {
            if (invalid) logits[r] = 0x7fff;
            else if (mlp) {
                float gated = silu_mul(s->results[r], s->results[blocks * ROWS + r]);
                publish(p->hidden + first + r, to_bf16(gated), stamp_of(layer));
            } else if (!head) {
                publish(p->qkv_new + first + r, to_bf16(add_bias(layer, first + r, s->results[r])), stamp_of(layer));
            }
        }
    }
    DEV float add_bias(int layer, int row, float v) const {
        const u16* bias = p->layers[layer].bias;
        return bias ? v + bf16_to_float(load_constant(bias + row)) : v;
    }
    // Multiply the results of this half, and add to the residual stream. The previous residual is loaded
    // before waiting for words.
    DEV void second_gemm(int half) {
        launder(t);
        constexpr int THREAD_ROWS = (WIDTH / PROGRAMS + CONSUMERS) / CONSUMERS;  // at most
        int layer = half / 2, mlp = half % 2, first, count;
        program_rows(WIDTH, phase_index(half, SECOND_GEMM), &first, &count);
        const u32* from = p->residual + mlp * WIDTH + first + t;
        float residual[THREAD_ROWS];
        u32 wanted = 0;
#pragma unroll
        for (int j = 0; j < THREAD_ROWS; j++) {
            residual[j] = 0;
            if (t + j * CONSUMERS < count) wanted |= 1u << j;
        }
        receive<u32, 1, THREAD_ROWS>(wanted, stamp_of(layer), [&](int j) { return from + j * CONSUMERS; },
                                     [&](int j, const u32* w) { residual[j] = value_of(w[0]); });
        receive_inputs(mlp ? p->hidden : p->attended, mlp ? MLP : ATTENDED, stamp_of(layer));
        GemmSplit split = second_gemm_split(mlp);
        multiply(row_blocks(count) * split.parts, split, [&](int r, float a, float b) { store_results(r, a, b); });
        sync();
        u32* to = p->residual + (mlp ? 0 : WIDTH) + first;
#pragma unroll
        for (int j = 0; j < THREAD_ROWS; j++) {
            int r = t + j * CONSUMERS;
            if (r >= count) continue;
            float sum = fmadd(sum_parts(r, split.parts), p->residual_multiplier, residual[j]);
            publish(to + r, to_bf16(sum), stamp_of(layer + mlp));
        }
    }
    // The last program to end counts the launch, and resets the rest for the next one.
    DEV void finish() {
        sync();
        if (t) return;
        if (atomic_increment(p->counters + 32) != PROGRAMS - 1) return;
        p->counters[0] += 1;
        p->counters[32] = 0;
        if (p->timeouts[0]) p->timeouts[1] += 1;
        p->timeouts[0] = 0;
    }
};

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->full[i], 1);
            mbar_init(&s->empty[i], 1);  // a tile is one warp's
        }
        s->timed_out = 0;
        fence_init();
    }
    barrier_sync(0, THREADS);
    if (THREAD >= CONSUMERS) {
        if (elect_one()) produce(p, s);
        return;
    }
    Step step;
    step.start(&p, s);
#pragma unroll 1
    for (int half = 0;; half++) {
        step.first_gemm(half);
        if (half == 2 * p.num_layers) break;
        if (half % 2 == 0) step.attend(half / 2);
        step.second_gemm(half);
    }
    step.finish();
}

KERNEL(decode_step, __launch_bounds__(THREADS, 1))
