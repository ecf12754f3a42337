// A whole decode step of one sequence: programs, one on each multiprocessor, that wait for each other's
// words between the phases of layers.

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->full[i], 1);
            mbar_init(&s->empty[i], 1);  // a tile is one warp's
        }
        s->dead = 0;
        fence_init();
    }
    bar_sync(0, THREADS);
    if (THREAD >= CONSUMERS) {
        if (elected()) produce(p, s);
        return;
    }
    Consumer c;
    c.start(&p, s);
#pragma unroll 1
    for (int half = 0;; half++) {
        c.first_product(half);
        if (half == 2 * p.num_layers) break;
        if (half % 2 == 0) c.attend(half / 2);
        c.second_product(half);
    }
    c.leave();
}

#ifndef EMULATED
extern __shared__ __align__(OF_GROUP) unsigned char memory[];
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Params p) {
    program(p, (Shared*)memory);
}
#endif
