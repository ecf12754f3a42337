// Arithmetic that all kernels share.

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
DEV float rounded(float v) { return as_float(two_bf16(0.0f, v)); }
// silu(gate) * up, rounded where the model's own modules round, except at the end. A power that is
// negligible next to one may be flushed.
DEV float gated(float gate, float up) {
    gate = rounded(gate);
    float open = one_over(1.0f + exp2_flushed(gate * -1.44269502162933349609375f));
    return rounded(gate * open) * rounded(up);
}
// Rotate a head: two elements of one half, and the elements of the other half that they are paired with.
DEV void turn_two(u32& first, u32& second, u32 cosines, u32 sines) {
    float a[2] = {low(first), high(first)}, b[2] = {low(second), high(second)};
    float c[2] = {low(cosines), high(cosines)}, s[2] = {low(sines), high(sines)};
    first = two_bf16(times_plus(a[0], c[0], -b[0] * s[0]), times_plus(a[1], c[1], -b[1] * s[1]));
    second = two_bf16(times_plus(b[0], c[0], a[0] * s[0]), times_plus(b[1], c[1], a[1] * s[1]));
}
