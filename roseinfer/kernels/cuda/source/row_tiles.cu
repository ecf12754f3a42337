// Attention of rows that decode: each is the new token of a sequence, which is stored first.
//
// A program has one row and one KV head, with the query heads that share it. Its warps take the parts of the context
// in turn (kernels/context_parts.py). A warp fetches keys of 64 tokens, then their values, and so on, as far ahead as it
// has places. They depend on no other kernel of the step, and so are on their way while the one in front ends. Tokens
// and numbers of heads are the 16 rows of products, and query heads the 8 columns, of which fewer are in vain.
//
// Each row adds up in the order of kernels/triton/softmax.py, and gets the same bits.
//
// Told: DIM, numbers of a head; GROUP, query heads of a KV head; BLOCK_SIZE; WARPS; PLACES of a warp, for keys or
// values of a tile each; SHARED_BYTES.

constexpr int TILE_T = 64;  // tokens that are looked at together
constexpr int SIDE = 64;    // numbers that lie side by side
constexpr int THREADS = WARPS * 32;
constexpr int STRIP = TILE_T * SIDE * 2;  // bytes of a tile by SIDE numbers
constexpr int DEEP = DIM / SIDE;
constexpr int AT_ONCE = smaller(BLOCK_SIZE, TILE_T);  // tokens that lie one behind the other
constexpr int EIGHTS = GROUP > 8 ? 2 : 1;  // of query heads
constexpr int Q_PITCH = DIM + 8, SUMS_PITCH = DIM + 4;  // which keep heads off each other's banks

struct Params {
    TensorMap keys, values;
    const u16 *query, *key, *value;
    u16 *k_cache, *v_cache;
    const u16 *cosines, *sines;  // of positions, by which queries and keys are yet to be rotated, or nothing
    u16* out;
    const long long *tables, *lengths;
    long long query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    long long block_rows, head_rows;  // rows of a cache from one to the next
    long long table_width, length_pitch;
    int kv_heads;
    float scale;
};

// What was seen of a part of the context.
struct Seen {
    float sums[GROUP][SUMS_PITCH], top[GROUP], total[GROUP];
};
struct alignas(1024) Shared {
    unsigned char tiles[WARPS][PLACES][DEEP * STRIP];
    alignas(16) u16 queries[EIGHTS * 8 * Q_PITCH];
    alignas(16) u16 own_key[DIM], own_value[DIM];
    alignas(16) Seen seen[WARPS];
    float own_top[GROUP];
    u64 there[WARPS][PLACES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives as much");
static_assert(DIM % SIDE == 0 && GROUP <= 16, "two products have columns for all query heads");
static_assert(BLOCK_SIZE % TILE_T == 0 || (TILE_T % BLOCK_SIZE == 0 && BLOCK_SIZE >= 8), "tiles fit blocks");

// Where a warp is in the tiles of its parts: at keys or at values.
struct TileTurn {
    int part, begin, end;  // of the part
    bool values;
    RingTurn<PLACES> place;

    DEV TileTurn(int first_part) : values(false), place{0, 0} { go_to(first_part); }
    DEV void go_to(int next_part) {
        part = next_part;
        begin = part_begin(part), end = part_begin(part + 1);
    }
    DEV void forward() {
        place.forward();
        values = !values;
        if (values) return;
        begin += TILE_T;
        if (begin == end) go_to(part + WARPS);
    }
};
