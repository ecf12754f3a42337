// Decode attention: each row is the new token of a sequence, which is stored first.
//
// A program has one row and one KV head, with the query heads that share it. Its warps process the parts of
// the context in turn (context_parts.cu). A warp fetches keys of 64 tokens, then their values, and so on,
// as far ahead as it has places. They depend on no other kernel of the step, and so are in flight while the
// previous one ends. Tokens and elements of heads are the 16 rows of GEMMs, and query heads the 8 columns;
// unused columns are wasted.
//
// Each row is added up in the order of kernels/triton/softmax.py, and gets the same bits.
//
// Macros: DIM, elements per head; GROUP, query heads per KV head; BLOCK_SIZE; WARPS; PLACES of a warp, for
// keys or values of a tile each; SHARED_BYTES.

constexpr int TILE_T = 64;  // tokens of a tile
constexpr int SIDE = 64;    // contiguous elements
constexpr int THREADS = WARPS * 32;
constexpr int STRIP = TILE_T * SIDE * 2;  // bytes of a tile by SIDE elements
constexpr int DEEP = DIM / SIDE;
constexpr int AT_ONCE = smaller(BLOCK_SIZE, TILE_T);  // contiguous tokens
constexpr int EIGHTS = GROUP > 8 ? 2 : 1;  // groups of 8 query heads
constexpr int Q_PITCH = DIM + 8, SUMS_PITCH = DIM + 4;  // strides of heads that avoid bank conflicts

struct Params {
    TensorMap keys, values;
    const u16 *query, *key, *value;
    u16 *k_cache, *v_cache;
    const u16 *cosines, *sines;  // rotation of queries and keys, by position; null without a rotation
    u16* out;
    const long long *tables, *lengths;
    long long query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    long long block_rows, head_rows;  // strides in rows of a cache
    long long table_width, length_pitch;
    int kv_heads;
    float scale;
};

// Partial result of a part of the context.
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

// Position of a warp in the tiles of its parts: at keys or at values.
struct TileTurn {
    int part, begin, end;  // index of the part, first token of the next tile, end of the part
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
