// Arithmetic that all kernels do alike.

DEV constexpr int larger(int a, int b) { return a > b ? a : b; }
DEV constexpr int smaller(int a, int b) { return a < b ? a : b; }
DEV constexpr int power_of_two(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
}
DEV float larger_of(float a, float b) { return fmaxf(a, b); }
DEV float wide(u16 v) { return as_float((u32)v << 16); }
DEV float low(u32 two) { return as_float(two << 16); }
DEV float high(u32 two) { return as_float(two & 0xffff0000u); }
DEV float rounded(float v) { return wide(to_bf16(v)); }
// silu(gate) * up, rounded where the model's own modules round.
DEV u16 gated(float gate, float up) {
    gate = rounded(gate);
    up = rounded(up);
    float open = over(1.0f, 1.0f + exp2_full((0.0f - gate) * 1.44269502162933349609375f));
    return to_bf16(rounded(gate * open) * up);
}
