// What programs hand to each other is words: a bfloat16 in the upper half, and in the lower half a
// stamp, which says in which layer of which launch the word was written. A writer stores the word,
// and needs no fence and no counter. A reader loads it, and does so again while its stamp is not the
// one that is waited for. So words are never looked at behind anything else, and may come in any order.
//
// An old word never has the stamp that is waited for. Stamps are counted: a launch takes as many as it
// has layers, and one more for the residual stream behind the last one. Every word is written once in
// every layer of every launch, even in one that somebody gives up, so what lies there before is at most
// one launch old. Memory begins with zeros, and the first launch's stamps with one. What was seen of a
// piece of a context are words of 64 bits, a float32 and a stamp of 32 bits: a piece may wait long for
// a context that has it again, but as many layers as such stamps count are days of nothing but steps.
//
// Nobody writes a word that somebody else has yet to read in the layer before. Every program has rows
// of every product, and a product's rows need all of its inputs. So whoever sees all of what a product
// makes knows that every program has read all inputs that it was made of. A word of
//   qkv_new is written by who has read all of the residual stream into the layer. That is made by
//     `lower` of all programs, behind `gate` of all, behind `finish_attention` of all, behind attention
//     of all heads, whose pieces had read all of qkv_new.
//   sums and seen, of a piece, are written by who has seen queries of the layer. They are made behind
//     `lower`, `gate` and `finish_attention` of all programs in the layer before, which had read all of
//     attended, and so behind who had read all pieces.
//   attended is written by who has seen all pieces of a head, which had read the layer's qkv_new. That
//     is made by `project` of all programs, behind `lower`, `gate` and `finish_attention` of all in the
//     layer before, which had read all of attended.
//   residual[1] is written by who has read all of attended: behind `project` of all programs, and so
//     behind `lower` and `gate` of all in the layer before, which had read it.
//   hidden is written by who has read all of residual[1]: behind attention and `project` of all
//     programs, and so behind `lower` of all in the layer before, which had read it.
//   residual[0] is written by who has read all of hidden, behind `gate` of all programs and so behind
//     `finish_attention` and `project` of all in this layer, which had read it.
// The next launch begins when all of this one are gone.

struct Words {
    const Params* p;
    Shared* s;
    u32 begin;  // the stamp of the first layer

    DEV void start(const Params* params, Shared* shared) {
        p = params; s = shared;
        u32 launch;
        load_words<1>((const u32*)p->sync, &launch);
        begin = launch * (u32)(p->num_layers + 1) + 1;
    }
    DEV u32 stamp_of(int layer) const { return begin + layer; }

    // A program that has given up makes no number any more, and so neither does who reads that.
    DEV void tell(u32* to, u16 value, u32 stamp) const {
        u32 told = *(volatile int*)&s->dead ? 0x7fff : value;
        store_word(to, told << 16 | (stamp & 0xffff));
    }
    DEV void tell(u64* to, float value, u32 stamp) const {
        u32 told = *(volatile int*)&s->dead ? 0x7fff0000u : as_bits(value);
        store_word(to, (u64)told << 32 | stamp);
    }
    // Take words as they come, V side by side at each of N places. Bit j of `some` says whether the
    // thread wants those at place j. Who gives up takes no more.
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
                for (int e = 0; e < V; e++) w[j][e] = 0;  // else registers are kept for it elsewhere too
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
// The numbers of two words, side by side.
DEV u32 both(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }
DEV float number(u32 word) { return as_float(word & 0xffff0000u); }
DEV float number(u64 word) { return as_float((u32)(word >> 32)); }
