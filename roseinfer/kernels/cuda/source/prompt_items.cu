// Attention of prompts: of many new tokens of a sequence, whose keys and values are stored already.
//
// A program has 64 rows for each warpgroup: consecutive tokens of a sequence, and of each the query
// heads that share a KV head. One thread fetches keys and values of 64 tokens at a time into two
// rings. A warpgroup multiplies its queries by the keys of the next tile, and its weights by the values of a tile
// while it makes weights of those scores. Meanwhile the others have the tensor cores too.
//
// Each row adds up in the order of kernels/triton/softmax.py, and gets the same bits.
//
// Told: DIM, numbers of a head; GROUP, query heads of a KV head; BLOCK_SIZE; GROUPS, warpgroups, and
// REGISTERS of each of their threads; STAGES, tiles of each ring; SHARED_BYTES.

constexpr int TILE_T = 64;  // tokens that are looked at together
constexpr int SIXTEENS = TILE_T / 16;
constexpr int SIDE = 64;    // numbers that lie side by side
constexpr int ROWS = 64;    // of a warpgroup
constexpr int TILE_G = power_of_two(GROUP);
constexpr int TOKENS = ROWS / TILE_G;  // of a warpgroup
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int STRIP = 64 * SIDE * 2;  // bytes of 64 rows by SIDE numbers
constexpr int DEEP = DIM / SIDE;
constexpr int ONES = 8;                 // columns of ones behind the values, whose products are sums of weights
constexpr int SUMS = (DIM + ONES) / 2;  // of a thread
constexpr int OWN_TOKENS = larger(16 / TILE_G, 1);  // tokens of a warp
constexpr int EIGHTS = larger(OWN_TOKENS / 8, 1);   // the same, by 8
constexpr int AT_A_TIME = 32 / (DIM / 8);    // rows that a warp brings, 16 bytes a thread
constexpr int OWN_PIECES = larger(OWN_TOKENS / AT_A_TIME, 1);  // that a thread brings
constexpr int HALF = DIM / 16;  // pieces of half a row, which turns against the other half
constexpr int ROUNDS = DIM / 32;  // in which a warp brings its rows of queries
constexpr int ALIKE = smaller(TILE_G, ROUNDS);  // rounds in which a thread brings those of one token
constexpr int AT_ONCE = smaller(BLOCK_SIZE, TILE_T);  // tokens that lie one behind the other

struct Params {
    TensorMap keys, values;
    const u16 *query, *k_cache, *v_cache;
    const u16 *cosines, *sines;  // of positions, by which queries are yet to be rotated, or nothing
    u16* out;
    const long long *tables, *sequences, *rows, *counts, *positions;
    long long query_token, query_head, out_token, out_head;  // numbers from one to the next
    long long block_rows, head_rows;  // rows of a cache from one to the next
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
    long long row;  // of the first token's queries
    int kv_head, count, position;

    DEV int last() const { return position + count - 1; }
    DEV int there(int token) const { return smaller(token, count - 1); }
    DEV int tiles() const { return (last() + TILE_T - 1) / TILE_T; }
    DEV long long cache_row(const Params& p, int token) const {
        return table[token / BLOCK_SIZE] * p.block_rows + kv_head * p.head_rows + token % BLOCK_SIZE;
    }
};

// Those items come first that see the most: of all sequences, or where these are many, of each. Programs take
// them to and fro, so that each gets long and short ones. Items of a sequence that are taken at about the same
// time have its keys and values come from memory once. What an item is is read while the one before is attended to.
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
