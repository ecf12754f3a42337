// GEMMs of many rows, by pairs of programs that share the weights they fetch.
//
// A pair computes 256 rows by 128 outputs at a time, one such item after the other. Each of the two
// programs fetches its own half of the rows, and half of the weights for both, 64 inputs at a time, into a
// ring. Two warpgroups multiply 64 rows each, and for either a thread loads the residual tile and stores
// the result. So only the fetching threads wait for global memory.
//
// Either the parts of a GEMM are added up, each from its first input to its last, and the sum is added to
// the residual stream: with the bits of parts that kernels/triton/norm.py adds up. Or gates are multiplied
// together with the gated values.
//
// Macros: GATES; STAGES, tiles of the ring; SHARED_BYTES.

constexpr int SIDE = 64, OUTPUTS = 128, GROUP_ROWS = 64, GROUPS = 2, ROWS = GROUP_ROWS * GROUPS;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STRIPS = GATES ? 2 : 1;
constexpr int OF_ROWS = ROWS * SIDE * 2, OF_WEIGHTS = OUTPUTS * SIDE * 2;  // bytes of SIDE inputs
constexpr int STAGE = OF_ROWS + STRIPS * OF_WEIGHTS;
constexpr int OF_OUT = GROUP_ROWS * OUTPUTS * 2, OF_COLUMNS = GROUP_ROWS * SIDE * 2;
constexpr int HIGH = 8;  // row tiles that are computed before the next outputs: concurrent items share both

struct Params {
    TensorMap rows, weights, out;
    int outputs, num_rows;
    int parts, tiles;  // tiles of a part
    int pairs;
    float times;
    char unused[40];
};

struct alignas(1024) Shared {
    unsigned char ring[STAGES * STAGE];
    unsigned char out[GROUPS][OF_OUT];
    u64 there[STAGES], read[STAGES];
    u64 free[GROUPS], written[GROUPS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives as much");

typedef RingTurn<STAGES> Turn;
struct Item {
    int row, output;  // a program's first row and output
};
template <class Take>
DEV void each_item(const Params& p, Take take) {
    int across = (p.outputs + OUTPUTS - 1) / OUTPUTS, down = (p.num_rows + 2 * ROWS - 1) / (2 * ROWS);
#pragma unroll 1
    for (int i = BLOCK / 2; i < across * down; i += p.pairs) {
        int band = i / (HIGH * across), rest = i % (HIGH * across), high = smaller(HIGH, down - band * HIGH);
        take(Item{((band * HIGH + rest % high) * 2 + BLOCK % 2) * ROWS, rest / high * OUTPUTS});
    }
}

DEV void fetch(const Params& p, Shared* s) {
    constexpr int HALF = OUTPUTS / 2;
    ask_for_map(&p.rows);
    ask_for_map(&p.weights);
    wait_for_kernel_in_front();
    int program = BLOCK % 2;
    Turn turn = {0, 1};  // the first round waits for no barrier
    each_item(p, [&](const Item& item) {
#pragma unroll 1
        for (int i = 0; i < p.parts * p.tiles; i++) {
            u64* there = &s->there[turn.slot];
            unsigned char *rows = s->ring + turn.slot * STAGE, *weights = rows + OF_ROWS + program * OF_WEIGHTS / 2;
            wait_for(&s->read[turn.slot], turn.parity);
            mbar_expect(there, STAGE);
            copy_rows(rows, &p.rows, item.row, i, there);
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++)
                copy_rows_to_both(weights + strip * OF_WEIGHTS, &p.weights,
                                  item.output + program * HALF + strip * p.outputs, i, there);
            turn.forward();
        }
    });
}

// Load the residual tile of a warpgroup, and store its result.
DEV void exchange(const Params& p, Shared* s, int group) {
    ask_for_map(&p.out);
    wait_for_kernel_in_front();
    u32 parity = 0;
    each_item(p, [&](const Item& item) {
        int row = item.row + group * GROUP_ROWS, column = item.output / SIDE;
        if (GATES) {
            mbar_arrive(&s->free[group]);
        } else {
            mbar_expect(&s->free[group], OF_OUT);
            copy_rows(s->out[group], &p.out, row, column, &s->free[group]);
        }
        wait_for(&s->written[group], parity);
        take_tile_away(&p.out, row, column, s->out[group]);
        wait_until_read();
        parity ^= 1;
    });
}

struct Multiplying {
    const Params& p;
    Shared* s;
    int group, lane;
    Turn turn;
    u32 parity;
    float part[OUTPUTS / 2];   // or gates
    float other[OUTPUTS / 2];  // the sum of parts, or gated values

    DEV Multiplying(const Params& params, Shared* shared) : p(params), s(shared), turn{0, 0}, parity(0) {
        group = alike(THREAD / 128), lane = THREAD % 32;
    }
    DEV void item() {
        if (GATES) {
            multiply_part();
        } else {
#pragma unroll
            for (int i = 0; i < OUTPUTS / 2; i++) other[i] = 0;
#pragma unroll 1
            for (int at = 0; at < p.parts; at++) {
                multiply_part();
#pragma unroll
                for (int i = 0; i < OUTPUTS / 2; i++) other[i] += part[i];
            }
        }
        put_out();
    }
    DEV void multiply_part() {
        int before = multiply_tile(true);
#pragma unroll 1
        for (int i = 1; i < p.tiles; i++) {
            int slot = multiply_tile(false);
            wait_for_products<1>();
            give_back(before);
            before = slot;
        }
        wait_for_products<0>();
        settled<OUTPUTS / 2>(part);
        if (GATES) settled<OUTPUTS / 2>(other);
        give_back(before);
    }
    DEV int multiply_tile(bool afresh) {
        int slot = turn.slot;
        wait_for(&s->there[slot], turn.parity);
        const unsigned char* stage = s->ring + slot * STAGE;
        TilePlace rows = tile_at(stage + group * GROUP_ROWS * SIDE * 2), weights = tile_at(stage + OF_ROWS);
        begin_products();
#pragma unroll
        for (int k = 0; k < SIDE / 16; k++) {
            TilePlace a = further(rows, k * 32), b = further(weights, k * 32);
            multiply(part, a, b, afresh && k == 0);
            if (GATES) multiply(other, a, further(b, OF_WEIGHTS), afresh && k == 0);
        }
        end_products();
        turn.forward();
        return slot;
    }
    DEV void multiply(float* sums, TilePlace a, TilePlace b, bool afresh) {
        if (afresh) multiply_places_afresh<OUTPUTS>(sums, a, b);
        else multiply_places<OUTPUTS>(sums, a, b);
    }
    DEV void give_back(int slot) const {
        if (lane < 2) arrive_of_pair(&s->read[slot], lane);
    }
    // A thread has rows `row` and `row + 8` of a warp's 16, of outputs 2 * pair, and one more, of every 8.
    DEV void put_out() {
        wait_for(&s->free[group], parity);
        parity ^= 1;
        int row = THREAD % 128 / 32 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned char* to = s->out[group] + (row + half * 8) * SIDE * 2 + pair * 4;
#pragma unroll
            for (int n = 0; n < OUTPUTS / 8; n++) {
                int i = n * 4 + half * 2;
                u32* word = (u32*)(to + n / 8 * OF_COLUMNS + ((n % 8) ^ (row % 8)) * 16);
                *word = GATES ? two_bf16(gated(part[i], other[i]), gated(part[i + 1], other[i + 1]))
                              : two_bf16(added(low(*word), other[i]), added(high(*word), other[i + 1]));
            }
        }
        show_copy_engine();
        sync_warp();
        if (lane == 0) mbar_arrive(&s->written[group]);
    }
    DEV float added(float before, float sum) const { return times_plus(sum, p.times, before); }
};

DEV void program(const Params& p, Shared* s) {
    if (THREAD == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&s->there[i], 1);
            mbar_init(&s->read[i], 2 * GROUPS * 4);
        }
        for (int i = 0; i < GROUPS; i++) {
            mbar_init(&s->free[i], 1);
            mbar_init(&s->written[i], 4);
        }
        fence_init();
    }
    meet_in_pair();
    if (THREAD < CONSUMERS) {
        take_registers<240>();
        Multiplying multiplying(p, s);
        each_item(p, [&](const Item&) { multiplying.item(); });
    } else {
        give_registers<24>();
        int warp = (THREAD - CONSUMERS) / 32;
        if (warp == 0 && elected()) fetch(p, s);
        if (warp && warp <= GROUPS && elected()) exchange(p, s, warp - 1);
    }
    meet_in_pair();
}

#ifndef EMULATED
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void PAIRED __launch_bounds__(THREADS, 1) multiply_in_pairs(const __grid_constant__ Params p) {
    program(p, (Shared*)memory);
}
#endif
