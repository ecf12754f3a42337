// Parts of a context, as in kernels/triton/softmax.py.
DEV int part_begin(int part) {
    int doubled = part / 16 - 1;
    doubled = doubled > 0 ? doubled : 0;
    return (part - doubled * 16) * (128 << doubled);
}
DEV int part_of(int position) {
    int doubled = 0;
    while (position >= 4096 << doubled) doubled++;
    return position / (128 << doubled) + doubled * 16;
}
