// A program of the prefill kernel.

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->keys_there[i], 1);
            mbar_init(&s->values_there[i], 1);
            mbar_init(&s->keys_read[i], GROUPS * 4);
            mbar_init(&s->values_read[i], GROUPS * 4);
        }
        fence_init();
    }
    for (int i = THREAD; i < STAGES * STRIP / 4; i += THREADS)
        ((u32*)(s->values[i / (STRIP / 4)] + DEEP * STRIP))[i % (STRIP / 4)] = 0x3f803f80u;
    show_copy_engine();
    bar_sync(0, THREADS);
    if (THREAD >= CONSUMERS) {
        give_registers<24>();
        if (THREAD < CONSUMERS + 32 && elected()) fetch(p, s);
    } else {
        take_registers<REGISTERS>();
        wait_for_kernel_in_front();
        Attending attending(p, s);
        attending.bring_queries(item_of(p, columns_of(p, BLOCK), BLOCK));
        each_item(p, [&](const Item& item, const Item& next) { attending.attend(item, next); });
    }
}

#ifndef EMULATED
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prompts(const __grid_constant__ Params p) {
    program(p, (Shared*)memory);
}
#endif
