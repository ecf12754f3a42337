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

struct Multiplied { float* d; const char *a, *b; int columns; };
struct Products { std::vector<Multiplied> asked; std::vector<size_t> ends; };
static std::vector<Products> products;  // of all threads
static Products& own_products() {
    size_t at = (size_t)here;
    if (products.size() <= at) products.resize(at + 1);
    return products[at];
}
static float number_at(const char* tile, int row, int k) {
    u64 place = (u64)tile + row * 128 + k * 2;
    u16 v;
    memcpy(&v, (char*)(place ^ (place >> 7 & 7) << 4), 2);
    u32 bits = (u32)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static void make(const Multiplied& m) {
    int t = THREAD, own = t % 128 / 32 * 16 + t % 32 / 4, first = t % 4 * 2;
    for (int i = 0; i < m.columns / 2; i++)
        for (int k = 0; k < 16; k++)
            m.d[i] += number_at(m.a, own + i / 2 % 2 * 8, k) * number_at(m.b, first + i / 4 * 8 + i % 2, k);
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
template <int COLUMNS_>
static void multiply_tiles(float* d, const void* a, const void* b) {
    if (((u64)a & 1023) >= 128 || ((u64)b & 1023) >= 128) refuse("a tile does not lie where its order begins");
    own_products().asked.push_back({d, (const char*)a, (const char*)b, COLUMNS_});
}
