// Prefill attention: many new tokens of a sequence, whose keys and values are stored already.
//
// A program has 64 rows for each warpgroup: consecutive tokens of a sequence, and of each the query heads
// that share a KV head. One thread fetches keys and values of 64 tokens at a time into two rings. A
// warpgroup multiplies its queries by the keys of the next tile, and its weights by the values of a tile
// while it computes the weights of those scores. Meanwhile other warpgroups use the tensor cores too.
//
// Each row is added up in the order of kernels/triton/softmax.py, and gets the same bits.
//
// Macros: DIM, elements per head; GROUP, query heads per KV head; BLOCK_SIZE; GROUPS, warpgroups, and
// REGISTERS of each of their threads; STAGES, tiles of each ring; SHARED_BYTES.

constexpr int TILE_T = 64;  // tokens of a tile
constexpr int SIXTEENS = TILE_T / 16;
constexpr int SIDE = 64;    // contiguous elements
constexpr int ROWS = 64;    // rows of a warpgroup
constexpr int TILE_G = power_of_two(GROUP);
constexpr int TOKENS = ROWS / TILE_G;  // tokens of a warpgroup
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STRIP = 64 * SIDE * 2;  // bytes of 64 rows by SIDE elements
constexpr int DEEP = DIM / SIDE;
constexpr int ONES = 8;                 // columns of ones after the values, whose sums are the sums of weights
constexpr int SUMS = (DIM + ONES) / 2;  // sums of a thread
constexpr int OWN_TOKENS = larger(16 / TILE_G, 1);  // tokens of a warp
constexpr int EIGHTS = larger(OWN_TOKENS / 8, 1);   // the same, by 8
constexpr int AT_A_TIME = 32 / (DIM / 8);    // rows that a warp loads, 16 bytes per thread
constexpr int OWN_PIECES = larger(OWN_TOKENS / AT_A_TIME, 1);  // pieces of a thread
constexpr int HALF = DIM / 16;  // pieces of half a row, which is rotated with the other half
constexpr int ROUNDS = DIM / 32;  // rounds in which a warp loads its rows of queries
constexpr int ALIKE = smaller(TILE_G, ROUNDS);  // rounds in which a thread loads one token's queries
constexpr int AT_ONCE = smaller(BLOCK_SIZE, TILE_T);  // contiguous tokens

struct Params {
    TensorMap keys, values;
    const u16 *query, *k_cache, *v_cache;
    const u16 *cosines, *sines;  // rotation of queries, by position; null without a rotation
    u16* out;
    const long long *tables, *sequences, *rows, *counts, *positions;
    long long query_token, query_head, out_token, out_head;  // strides in elements
    long long block_rows, head_rows;  // strides in rows of a cache
    long long table_width;
    int tiles, kv_heads, programs;
    float scale;
};

struct alignas(1024) Shared {
    unsigned char queries[2][GROUPS][DEEP * STRIP], keys[STAGES][DEEP * STRIP], values[STAGES][(DEEP + 1) * STRIP];
    u64 keys_there[STAGES], keys_read[STAGES], values_there[STAGES], values_read[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives as much");
static_assert(DIM % SIDE == 0 && 16 % smaller(TILE_G, 16) == 0, "rows and heads fit the products");
static_assert(BLOCK_SIZE % TILE_T == 0 || (TILE_T % BLOCK_SIZE == 0 && BLOCK_SIZE >= 8), "tiles fit blocks");

typedef RingTurn<STAGES> Turn;

// Some tokens of a sequence, for one KV head.
struct Item {
    const long long* table;
    long long row;  // row of the first token's queries
    int kv_head, count, position;

    DEV int last() const { return position + count - 1; }
    DEV int there(int token) const { return smaller(token, count - 1); }
    DEV int tiles() const { return (last() + TILE_T - 1) / TILE_T; }
    DEV long long cache_row(const Params& p, int token) const {
        return table[token / BLOCK_SIZE] * p.block_rows + kv_head * p.head_rows + token % BLOCK_SIZE;
    }
};

// Items with the longest contexts come first: of all sequences, or, where these are many, of each. Programs
// take items back and forth, so that each gets long and short ones. Items of a sequence that run at about
// the same time load its keys and values from memory once. An item's description is loaded while the
// previous item is computed.
struct Columns {
    int sequence, row, count, position;
};
DEV int item_at(const Params& p, int begin, int round) { return begin + (round % 2 ? p.programs - 1 - BLOCK : BLOCK); }
DEV Columns columns_of(const Params& p, int i) {
    int tile = i / p.kv_heads;
    if (tile >= p.tiles) return {0, 0, 0, 0};
    return {*(const int*)(p.sequences + tile), *(const int*)(p.rows + tile), *(const int*)(p.counts + tile),
            *(const int*)(p.positions + tile)};
}
DEV Item item_of(const Params& p, Columns c, int i) {
    return {p.tables + c.sequence * p.table_width, c.row, i % p.kv_heads, c.count, c.position};
}
template <class Take>
DEV void each_item(const Params& p, Take take) {
    int items = p.tiles * p.kv_heads;
    Columns next = columns_of(p, item_at(p, 0, 0));
#pragma unroll 1
    for (int begin = 0, round = 0; begin < items; begin += p.programs, round++) {
        int i = item_at(p, begin, round);
        Columns own = next;
        next = columns_of(p, item_at(p, begin + p.programs, round + 1));
        if (i < items)
            take(item_of(p, own, i), item_of(p, next, item_at(p, begin + p.programs, round + 1)));
    }
}
