// Waiting for a barrier in shared memory, and positions in a ring of stages that barriers guard.
#pragma once

#include "machine.cuh"

// Wait until the phase of a barrier with this parity is over.
DEV void mbar_wait(u64* barrier, u32 parity) {
    while (!mbar_try(barrier, parity)) yield();
}

// Position of a thread in a ring: the phases of a stage's barriers alternate. A thread that fills the ring
// begins with parity 1, for which it waits in no stage of the first round.
template <int COUNT>
struct PipelineState {
    int stage;
    u32 parity;
    DEV void advance() {
        if (++stage < COUNT) return;
        stage = 0;
        parity ^= 1;
    }
};
