// Runs the programs of a launch, all of their threads in turns, on one core.

static const Params* the_params;
static char* the_shared;  // of all programs
static const size_t OWN = (sizeof(Shared) + 1023) / 1024 * 1024;
static void body() {
    program(*the_params, (Shared*)(the_shared + OWN * BLOCK));
    fibers[here].over = true;
    for (;;) yield();
}
extern "C" int shared_bytes() { return (int)sizeof(Shared); }
// `late` is a program whose threads run when those of all others are over, or -1. Each seed has turns of its own.
extern "C" void launch(const Params* p, int late, int programs, int seed) {
    const size_t STACK = 16384;
    const int LONG = 20000;  // turns
    int n = programs * THREADS, left = n;
    srand(seed);
    threads_of_block = THREADS;
    the_params = p;
    shared_of_block = OWN;
    the_shared = (char*)aligned_alloc(1024, OWN * programs);
    memset(the_shared, 0xff, OWN * programs);
    fibers = new Fiber[n]();
    lanes = new Lane[n]();
    named = new Named[programs * MOST_NAMED]();
    char* stacks = (char*)mmap(0, STACK * n, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < n; i++) {
        Fiber* f = &fibers[i];
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = stacks + STACK * i;
        f->context.uc_stack.ss_size = STACK;
        f->block = i / THREADS;
        f->thread = i % THREADS;
        makecontext(&f->context, body, 0);
    }
    std::vector<int> asleep(n / 32 + 1), program_asleep(programs);
    u64 seen = 0;
    for (int still = 0; left; still++) {
        for (int i = 0; i < n; i++) {
            int &rest = asleep[i / 32], &long_rest = program_asleep[i / THREADS];
            // Some warps fall far behind the others, and some programs.
            if (i % 32 == 0) rest = rest ? rest - 1 : rand() % 512 ? 0 : rand() % 40;
            if (i % THREADS == 0) long_rest = long_rest ? long_rest - 1 : rand() % 1024 ? 0 : rand() % 400;
            if (fibers[i].block == late && left > THREADS) continue;
            if (fibers[i].over || rest || long_rest || (rand() & 15) == 0) continue;
            here = i;
            give_turn(&fibers[i]);
            left -= fibers[i].over;
            progress += fibers[i].over;
        }
        finish_some_copies();
        see_some_words(false);
        if (progress != seen) seen = progress, still = 0;
        if (still > LONG) refuse("all wait for each other");
    }
    see_some_words(true);
    copies.clear();
    acquired.clear();
    munmap(stacks, STACK * n);
    free(the_shared);
    delete[] fibers;
    delete[] lanes;
    delete[] named;
}
