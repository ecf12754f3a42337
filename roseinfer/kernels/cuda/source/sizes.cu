// Sizes of the model and of the machine, which are macros, and constants derived from them.
//
// Macros: WIDTH, HEADS, KV_HEADS, DIM, MLP, VOCAB, TURN, BLOCK_SIZE, OUT_PARTS, DOWN_PARTS, NORM_WARPS,
// NORMED, PROGRAMS, MOST_CHUNK, STAGES, IN_FLIGHT, MOST_SUMS, MOST_INPUTS, SHARED_BYTES.

#ifndef MOST_POLLS
#define MOST_POLLS (1 << 22)  // polls of words until a program times out: seconds
#endif

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM, ATT = HEADS * DIM;
constexpr int ROWS = 8;          // outputs of a tile of weights
constexpr int TOGETHER = 32;     // inputs that are multiplied by two instructions
constexpr int TILE_T = 64;       // tokens of a tile in attention
constexpr int SIDE = 64;         // contiguous inputs of a tile
constexpr int MATRICES = 4;      // matrices per layer

// The inputs of a tile, of parts of `inputs` inputs.
DEV constexpr int chunk_of(int inputs) {
    int chunk = inputs < MOST_CHUNK ? inputs : MOST_CHUNK;
    while (inputs % chunk || chunk % SIDE) chunk--;
    return chunk;
}
// A tile is groups of SIDE inputs, and a group the 128 bytes of each of its rows. Of the 16-byte pieces of
// a row, piece i is at i XOR the row, which avoids bank conflicts. The copy engine swizzles a tile so if it
// begins at a multiple of a group's bytes.
constexpr int OF_GROUP = ROWS * SIDE * 2;
constexpr int SLOT = OF_GROUP / SIDE * larger(chunk_of(WIDTH), larger(chunk_of(ATT / OUT_PARTS),
                                                                      chunk_of(MLP / DOWN_PARTS)));
constexpr int Q_PITCH = DIM + 8, W_PITCH = TILE_T + 8;

static_assert(GROUP * KV_HEADS == HEADS && GROUP <= 16, "a group of query heads is a tile's rows");
static_assert(BLOCK_SIZE % 16 == 0, "16 tokens lie side by side");
static_assert(DIM % 16 == 0 && DIM <= 16 * WARPS, "a warp takes 16 of a head's numbers");
static_assert((1ll << 32) / VOCAB > PROGRAMS, "rows are counted in 32 bits");
static_assert(WIDTH >= PROGRAMS && QKV >= PROGRAMS && MLP >= PROGRAMS, "a program has rows of all products");
// A warp that waits for a tile knows that a tile up to WARPS before it has arrived, and so that all have up
// to IN_FLIGHT before that. The previous tile in the slot must be among these: a barrier distinguishes a
// phase from the next one, and not from the one after that.
static_assert(IN_FLIGHT > 0 && STAGES >= WARPS + IN_FLIGHT, "more tiles are needed");

struct Layer {
    const u16 *norm, *bias, *mlp_norm;
    const u16 *cosines, *sines;  // [positions, TURN]; null where the layer does not rotate
    const u16 *query_gain, *key_gain;
    u16 *keys, *values;          // [blocks, KV_HEADS, BLOCK_SIZE, DIM], with a stride of blocks
};

struct Params {
    const Layer* layers;
    const TensorMap* maps;  // by layer: of qkv, out, gate_up_weight and down; then of the head
    const u16 *words, *norm_end;
    const long long *token, *length, *table;
    u32 *residual;   // [2, WIDTH]: input of a layer, and after its attention; words, as the next three (words.cu)
    u32 *qkv_new;    // [QKV]
    u32 *attended;   // [ATT]
    u32 *hidden;     // [MLP]
    u16 *logits;     // [VOCAB]
    u64 *sums;       // [HEADS, parts + 1, DIM]: partial sums of the new token, then of each part
    u64 *seen;       // [HEADS, parts + 1, 2]: the highest score, and the sum of weights
    u32 *sync;       // [0]: launches, [32]: finished programs
    int *error;      // [0]: nonzero if a program timed out in this launch, [1]: launches that timed out
    long long block_pitch;
    int num_layers, most_parts;
    float epsilon, head_epsilon, embedding_multiplier, residual_multiplier, scale;
};

struct alignas(128) Shared {
    unsigned char ring[STAGES * SLOT];    // first, since it begins at a multiple of OF_GROUP bytes
    alignas(16) u16 x[MOST_INPUTS];       // a GEMM's inputs, in the order in which lanes load them
    float results[MOST_SUMS]; // results of a phase's GEMMs, by chain
    alignas(16) u16 q[16 * Q_PITCH];
    alignas(16) u16 weights[16 * W_PITCH];
    alignas(16) u16 own[2 * DIM];         // the new key and value of a head
    float highest[WARPS * 16];
    float squares[32];
    float factors[17];        // norm factors of a group's queries, and of its key
    u64 full[STAGES], empty[STAGES];
    int dead;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives as much");


// A layer has two halves: attention, and the MLP. A half has a first GEMM, attention or nothing, and a
// second GEMM, whose result is added to the residual stream. The head is one more first GEMM.
enum Phase { FIRST, ATTENTION, SECOND };
DEV int phase_of(int half, Phase phase) { return half * 3 + phase; }

// A program's share of n rows in a phase; the programs with one more row alternate.
DEV void share(int n, int phase, int* first, int* count) {
    u32 rank = (BLOCK + 29 * phase) % PROGRAMS;
    int a = rank * n / PROGRAMS;
    *first = a;
    *count = (rank + 1) * n / PROGRAMS - a;
}

// Advance by tiles in the ring; barriers' phases alternate.
DEV void forward(int tiles, int* slot, u32* turn) {
    *slot += tiles;
    if (*slot >= STAGES) {
        *slot -= STAGES;
        *turn ^= 1;
    }
}

// The split of a GEMM: inputs are added up in parts, and a part's inputs arrive in tiles.
struct Cut {
    int parts, depth, groups;  // tiles of a part, and groups of a tile
    DEV int of_part() const { return depth * groups * SIDE; }
};
DEV constexpr Cut cut_of(int inputs, int parts) {
    return {parts, inputs / parts / chunk_of(inputs / parts), chunk_of(inputs / parts) / SIDE};
}
constexpr Cut OF_WIDTH = cut_of(WIDTH, 1), OF_ATT = cut_of(ATT, OUT_PARTS), OF_MLP = cut_of(MLP, DOWN_PARTS);
static_assert(ATT % OUT_PARTS == 0 && MLP % DOWN_PARTS == 0, "parts have as many inputs");
DEV Cut second_cut(int mlp) {
    return {mlp ? OF_MLP.parts : OF_ATT.parts, mlp ? OF_MLP.depth : OF_ATT.depth,
            mlp ? OF_MLP.groups : OF_ATT.groups};
}

// The tiles of weights of a phase: chains of GEMMs, in consecutive waves of as many chains as there are
// warps. A chain is 8 outputs in one part of their inputs, and belongs to one warp. In a wave all chains'
// first tiles come first, so that every warp has work early.
DEV int blocks_of(int rows) { return (rows + ROWS - 1) / ROWS; }
