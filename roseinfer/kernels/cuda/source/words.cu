// Programs exchange words: a bfloat16 in the upper half, and in the lower half a stamp, which identifies
// the layer and launch in which the word was written. A writer stores the word, and needs no fence and no
// counter. A reader loads it, and does so again while its stamp is not the expected one. So a word never
// depends on other memory, and words may arrive in any order.
//
// An old word never has the expected stamp. Stamps are counted: a launch uses one per layer, and one more
// for the residual stream after the last one. Every word is written once in every layer of every launch,
// even in one that times out, so the previous content is at most one launch old. Memory begins with zeros,
// and the first launch's stamps with one. Partial results of a context's piece are words of 64 bits, a
// float32 and a stamp of 32 bits: a piece may be unused for long before a context has it again,
// but stamps of 32 bits wrap only after days of uninterrupted steps.
//
// No program writes a word that another has yet to read in the previous layer. Every program has rows of
// every GEMM, and a GEMM's rows need all of its inputs. So a program that sees all outputs of a GEMM knows
// that every program has read all of the GEMM's inputs. A word of
//
// qkv_new is written by a program that has read all of the residual stream into the layer. That is made by
// `lower` of all programs, after `gate` of all, after `finish_attention` of all, after attention of all
// heads, whose pieces had read all of qkv_new.
//
// sums and seen, of a piece, are written by a program that has seen queries of the layer. They are made
// after `lower`, `gate` and `finish_attention` of all programs in the previous layer, which had read all of
// attended, and so after the programs that had read all pieces.
//
// attended is written by a program that has seen all pieces of a head, which had read the layer's qkv_new.
// That is made by `project` of all programs, after `lower`, `gate` and `finish_attention` of all in the
// previous layer, which had read all of attended.
//
// residual[1] is written by a program that has read all of attended: after `project` of all programs, and
// so after `lower` and `gate` of all in the previous layer, which had read it.
//
// hidden is written by a program that has read all of residual[1]: after attention and `project` of all
// programs, and so after `lower` of all in the previous layer, which had read it.
//
// residual[0] is written by a program that has read all of hidden, after `gate` of all programs and so
// after `finish_attention` and `project` of all in this layer, which had read it.
//
// The next launch begins when all programs of this one have exited.

struct Words {
    const Params* p;
    Shared* s;
    u32 begin;  // stamp of the first layer

    DEV void start(const Params* params, Shared* shared) {
        p = params; s = shared;
        u32 launch;
        load_words<1>((const u32*)p->sync, &launch);
        begin = launch * (u32)(p->num_layers + 1) + 1;
    }
    DEV u32 stamp_of(int layer) const { return begin + layer; }

    // After a timeout a program makes no valid number any more, and neither do its readers.
    DEV void tell(u32* to, u16 value, u32 stamp) const {
        u32 told = *(volatile int*)&s->dead ? 0x7fff : value;
        store_word(to, told << 16 | (stamp & 0xffff));
    }
    DEV void tell(u64* to, float value, u32 stamp) const {
        u32 told = *(volatile int*)&s->dead ? 0x7fff0000u : as_bits(value);
        store_word(to, (u64)told << 32 | stamp);
    }
    // Receive words as they arrive, V contiguous ones at each of N places. Bit j of `some` is set if the
    // thread wants those at place j. After a timeout it receives no more.
    template <class Word, int V, int N, class Place, class Take>
    DEV void hear(u32 some, u32 stamp, Place place, Take take) const {
        static_assert(N < 32, "a bit each");
        u32 missing = some;
#pragma unroll 1
        for (int polls = 0; missing; polls++) {
            Word w[N][V];
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int e = 0; e < V; e++) w[j][e] = 0;  // otherwise registers are kept for it elsewhere too
                if (missing >> j & 1) load_words<V>(place(j), w[j]);
            }
            u32 before = missing;
#pragma unroll
            for (int j = 0; j < N; j++)
                if ((missing >> j & 1) && stamped<V>(w[j], stamp)) {
                    take(j, w[j]);
                    missing ^= 1u << j;
                }
            if (missing == before && give_up(polls)) return;
        }
    }
    template <int V, class Word>
    DEV static bool stamped(const Word* w, u32 stamp) {
        constexpr u32 BITS = sizeof(Word) == 8 ? 0xffffffffu : 0xffffu;
        bool all = true;
#pragma unroll
        for (int e = 0; e < V; e++) all = all && (((u32)w[e] ^ stamp) & BITS) == 0;
        return all;
    }
    DEV bool give_up(int polls) const {
        bool others = (polls & 255) == 255 && *(volatile int*)p->error;
        if (polls >= MOST_POLLS) *(volatile int*)p->error = 1;
        else if (!others) {
            yield();
            return false;
        }
        *(volatile int*)&s->dead = 1;
        return true;
    }
};
// The elements of two words, side by side.
DEV u32 both(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }
DEV float number(u32 word) { return as_float(word & 0xffff0000u); }
DEV float number(u64 word) { return as_float((u32)(word >> 32)); }
