// What warpgroups do, and how kernels follow on each other, on the emulated machine. A product is made
// when it is waited for, and so are the tiles that it is made of read.

static std::set<int> met_front;  // threads
static void wait_for_kernel_in_front() {
    for (int i = rand() & 1 ? rand() % 200 : 0; i; i--) yield();  // it may be over already
    met_front.insert(here);
}
static void let_next_kernel_in() {}
static void ask_for_map(const TensorMap* map) { acquire_map(map), met_front.erase(here); }
static void copy_rows(void* to, const TensorMap* map, int row, int group, u64* b) {
    if (!met_front.count(here)) refuse("rows are fetched while the kernel in front makes them");
    copy_tile(to, map, row, group, b, 0);
}

// The first factor is a tile, or what the four threads of a row hold of it.
struct Multiplied {
    float* d;
    const char* a;
    const u32* held[4];
    const char* b;
    int columns, strip;
    bool afresh;
    u64 rows;  // all the warpgroup's, when it asks: any of its warps may read any of them until all have waited
};
struct Products { std::vector<Multiplied> asked; std::vector<size_t> ends; };
static std::vector<Products> products;  // of all threads
static Products& own_products() {
    size_t at = (size_t)here;
    if (products.size() <= at) products.resize(at + 1);
    return products[at];
}
static float number_in(u64 place) {
    u16 v;
    memcpy(&v, (char*)(place ^ (place >> 7 & 7) << 4), 2);
    u32 bits = (u32)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static float number_at(const char* tile, int row, int k) { return number_in((u64)tile + row * 128 + k * 2); }
static float first_factor(const Multiplied& m, int row, int lower, int k) {
    return m.a ? number_at(m.a, row + lower * 8, k) : half_of(m.held[k % 8 / 2][k / 8 * 2 + lower], k % 2);
}
static float second_factor(const Multiplied& m, int column, int k) {
    if (!m.strip) return number_at(m.b, column, k);
    return number_in((u64)m.b + column / 64 * m.strip + k * 128 + column % 64 * 2);
}
static u64 all_rows(const char* a) {
    u64 sum = 0, eight;
    if (!a || THREAD % 32) return 0;  // one of a warp looks
    for (int i = 0; i < 64 * 128; i += 8) memcpy(&eight, (const char*)((u64)a & ~127ull) + i, 8), sum = sum * 31 + eight;
    return sum;
}
static void make(const Multiplied& m) {
    if (all_rows(m.a) != m.rows) refuse("rows change while they are multiplied");
    int t = THREAD, own = t % 128 / 32 * 16 + t % 32 / 4, first = t % 4 * 2;
    for (int i = 0; i < m.columns / 2; i++) {
        float sum = m.afresh ? 0 : m.d[i];
        for (int k = 0; k < 16; k++)
            sum += first_factor(m, own, i / 2 % 2, k) * second_factor(m, first + i / 4 * 8 + i % 2, k);
        m.d[i] = sum;
    }
}
static void begin_products() { sync_warp(); }  // as all that follows, it is done by a warp as one
static void end_products() { own_products().ends.push_back(own_products().asked.size()); }
template <int LEFT>
static void wait_for_products() {
    sync_warp();
    Products& mine = own_products();
    size_t groups = mine.ends.size() > LEFT ? mine.ends.size() - LEFT : 0;
    size_t some = groups ? mine.ends[groups - 1] : 0;
    for (size_t i = 0; i < some; i++) make(mine.asked[i]);
    mine.asked.erase(mine.asked.begin(), mine.asked.begin() + some);
    mine.ends.erase(mine.ends.begin(), mine.ends.begin() + groups);
    for (size_t& end : mine.ends) end -= some;
    sync_warp();
}
template <int PLACE>
static void wait_for_last_products() { wait_for_products<0>(); }
// A place is an address over 16, and where columns are in strips, how far these lie apart.
struct TilePlace {
    u64 sixteenths;
    int strip;
    const char* check(u64 most) const {
        u64 p = sixteenths << 4;
        if ((p & 1023) >= most) refuse("a tile does not lie where its order begins");
        return (const char*)p;
    }
};
static TilePlace tile_at(const void* p) { return {(u64)p >> 4, 0}; }
static TilePlace columns_at(const void* p, int strip) { return {(u64)p >> 4, strip}; }
static TilePlace further(TilePlace place, int bytes) { return {place.sixteenths + (bytes >> 4), place.strip}; }
template <int COLUMNS_>
static void multiply_places(float* d, TilePlace a, TilePlace b, bool afresh = false) {
    own_products().asked.push_back({d, a.check(128), {}, b.check(128), COLUMNS_, 0, afresh, all_rows(a.check(128))});
}
template <int COLUMNS_>
static void multiply_places_afresh(float* d, TilePlace a, TilePlace b) { multiply_places<COLUMNS_>(d, a, b, true); }
template <int COLUMNS_>
static void multiply_tiles(float* d, const void* a, const void* b) { multiply_places<COLUMNS_>(d, tile_at(a), tile_at(b)); }
template <int COLUMNS_>
static void multiply_held(float* d, const u32* a, TilePlace b, bool kept) {
    u64 all[32][2];
    post((u64)a, 0, all);
    Multiplied m = {d, 0, {}, b.check(1), COLUMNS_, b.strip, !kept, 0};
    for (int i = 0; i < 4; i++) m.held[i] = (const u32*)all[THREAD % 32 / 4 * 4 + i][0];
    own_products().asked.push_back(m);
}
static void show_copy_engine() {}
struct Piece { char* to; const char* from; };
static std::vector<std::vector<Piece>> pieces;  // on their way, of all threads
static void copy_piece(void* to, const void* from) {
    if ((u64)to % 16 || (u64)from % 16) refuse("a piece does not begin at a multiple of its size");
    if (pieces.size() <= (size_t)here) pieces.resize(here + 1);
    if (rand() & 1) memcpy(to, from, 16);
    else pieces[here].push_back({(char*)to, (const char*)from});
}
static void wait_for_copies() {
    if (pieces.size() <= (size_t)here) return;
    for (const Piece& piece : pieces[here]) memcpy(piece.to, piece.from, 16);
    pieces[here].clear();
}
template <int COUNT, class Number>
static void settled(Number*) {}
template <int COUNT>
static void give_registers() {}
template <int COUNT>
static void take_registers() {}
static void ask_for(const void*) {}
static bool any(bool v) {
    u64 all[32][2], one = 0;
    post(v, 0, all);
    for (int i = 0; i < 32; i++) one |= all[i][0];
    return one;
}
