    // ------------------------------------------------------------ the phases of a layer without attention
    //
    // Norm the residual stream, and multiply it. The norm's gain is loaded before waiting for words.
    DEV void first_product(int half) {
        afresh(t);
        int layer = half / 2, mlp = half % 2, first, count;
        bool head = half == 2 * p->num_layers;
        u16 gain[HELD];
        float v[HELD];
        read_gain(head ? p->norm_end : mlp ? p->layers[layer].mlp_norm : p->layers[layer].norm, gain);
        share(head ? VOCAB : mlp ? MLP : QKV, phase_of(half, FIRST), &first, &count);
        if (half == 0) read_word(v);
        else hear_residual(p->residual + mlp * WIDTH, stamp_of(layer), v);
        norm_into_inputs(v, gain);
        int blocks = blocks_of(count);
        u16* logits = head ? p->logits + first : 0;
        multiply(mlp ? 2 * blocks : blocks, OF_WIDTH, [&](int r, float a, float b) {
            if (!logits) return keep_two(r, a, b);
            if (r < count) logits[r] = to_bf16(a);
            if (r + 1 < count) logits[r + 1] = to_bf16(b);
        });
        meet();
        // After a timeout, results are NaN. Choosing a token reports a row of NaN (kernels/triton/greedy.py).
        bool none = head && *(volatile int*)&s->dead;
#pragma unroll 1
        for (int r = t; r < count; r += CONSUMERS) {
            if (none) logits[r] = 0x7fff;
            else if (mlp) tell(p->hidden + first + r, to_bf16(gated(s->results[r], s->results[blocks * ROWS + r])), stamp_of(layer));
            else if (!head) tell(p->qkv_new + first + r, to_bf16(biased(layer, first + r, s->results[r])), stamp_of(layer));
        }
    }
    DEV float biased(int layer, int row, float v) const {
        const u16* bias = p->layers[layer].bias;
        return bias ? v + wide(kept1(bias + row)) : v;
    }
    // Multiply the results of this half, and add to the residual stream. The previous residual is loaded
    // before waiting for words.
    DEV void second_product(int half) {
        afresh(t);
        constexpr int MINE = (WIDTH / PROGRAMS + CONSUMERS) / CONSUMERS;  // rows, at most
        int layer = half / 2, mlp = half % 2, first, count;
        share(WIDTH, phase_of(half, SECOND), &first, &count);
        const u32* from = p->residual + mlp * WIDTH + first + t;
        float before[MINE];
        u32 some = 0;
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            before[j] = 0;
            if (t + j * CONSUMERS < count) some |= 1u << j;
        }
        hear<u32, 1, MINE>(some, stamp_of(layer), [&](int j) { return from + j * CONSUMERS; },
                      [&](int j, const u32* w) { before[j] = number(w[0]); });
        hear_inputs(mlp ? p->hidden : p->attended, mlp ? MLP : ATT, stamp_of(layer));
        Cut cut = second_cut(mlp);
        multiply(blocks_of(count) * cut.parts, cut, [&](int r, float a, float b) { keep_two(r, a, b); });
        meet();
        u32* to = p->residual + (mlp ? 0 : WIDTH) + first;
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            int r = t + j * CONSUMERS;
            if (r >= count) continue;
            float sum = times_plus(sum_of(r, cut.parts), p->residual_multiplier, before[j]);
            tell(to + r, to_bf16(sum), stamp_of(layer + mlp));
        }
    }
    // The last program to end counts the launch, and resets the rest for the next one.
    DEV void leave() {
        meet();
        if (t) return;
        if (add_and_see(p->sync + 32) != PROGRAMS - 1) return;
        p->sync[0] += 1;
        p->sync[32] = 0;
        if (p->error[0]) p->error[1] += 1;
        p->error[0] = 0;
    }
};
