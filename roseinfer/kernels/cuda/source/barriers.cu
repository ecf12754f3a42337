// Wait until a phase of a barrier in shared memory is over.
DEV void wait_for(u64* b, u32 parity) {
    while (!mbar_try(b, parity)) yield();
}
