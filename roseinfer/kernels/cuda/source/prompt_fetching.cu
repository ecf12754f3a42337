// The thread that fetches keys and values, as far ahead as the rings allow.

// Blocks after the last token's may not exist: the last one replaces them.
DEV void fetch_tile(const Params& p, const Item& item, const TensorMap* map, int begin, unsigned char* to, u64* there) {
    mbar_expect(there, DEEP * STRIP);
#pragma unroll
    for (int at = 0; at < TILE_T; at += AT_ONCE) {
        int token = begin + at;
        if (AT_ONCE < TILE_T && token >= item.last()) token = (item.last() - 1) / BLOCK_SIZE * BLOCK_SIZE;
        int row = (int)item.cache_row(p, token);
#pragma unroll
        for (int deep = 0; deep < DEEP; deep++) copy_rows(to + deep * STRIP + at * SIDE * 2, map, row, deep, there);
    }
}

DEV void fetch(const Params& p, Shared* s) {
    ask_for_map(&p.keys);
    ask_for_map(&p.values);
    wait_for_kernel_in_front();
    Turn k = {0, 1}, v = {0, 1};  // the first round waits for no barrier
    each_item(p, [&](const Item& item, const Item&) {
        int tiles = item.tiles();
#pragma unroll 1
        for (int i = 0; i <= tiles; i++) {
            if (i < tiles) {
                wait_for(&s->keys_read[k.slot], k.parity);
                fetch_tile(p, item, &p.keys, i * TILE_T, s->keys[k.slot], &s->keys_there[k.slot]);
                k.forward();
            }
            if (i && tiles) {
                wait_for(&s->values_read[v.slot], v.parity);
                fetch_tile(p, item, &p.values, (i - 1) * TILE_T, s->values[v.slot], &s->values_there[v.slot]);
                v.forward();
            }
        }
    });
}
