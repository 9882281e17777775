// Attention over a paged pool of K and V in bf16, on tensor cores, with sums in f32. NVRTC compiles it when the program runs,
// with HEAD_DIM given: 64 or 128.
//
// The bits of a row depend on its query and on the K and V of the positions that it sees, and on nothing else: not on the
// batch, the chunking of its prompt, the pages, or the kernel. So the order of every sum is fixed by absolute positions:
//
//     position    0        64       128      192      256      320            BLOCK = 64, CHUNK = 256
//                 | block  | block  | block  | block  | block  | block  ...
//                 |              chunk                |        chunk    ...
//
// Within a chunk, blocks follow each other in an online softmax, which starts anew with every chunk. Chunks are merged in
// ascending order by `merge`. A warp has 16 rows side by side: a row's sums do not see other rows. Positions that a row
// does not see weigh exactly 0, and adding 0 changes no sum: a row that goes through blocks behind its position stays as it
// is. (K and V are finite. An infinite V would reach earlier rows, as 0 times infinity.)
//
// This text has decode, and what prefill (prefill.cu) shares with it. Decode: one thread block per sequence, KV head and chunk.
// The group's query heads are its rows, and its warps share a block. What the chunks give goes to memory, and the last thread
// block merges it.

// Positions of a block and of a chunk. Other numbers give other bits.
constexpr u32 BLOCK = 64;
constexpr u32 CHUNK = 256;

constexpr u32 DIM = HEAD_DIM;

// Warps of a thread block, and blocks of which K and V are in shared memory or on their way. No bit depends on them. (On an H100
// these were the fastest of those that fit.)
constexpr int DECODE_WARPS = 4;
constexpr int DECODE_STAGES = DIM == 64 ? 3 : 2;
static_assert(DIM == 64 || DIM == 128, "sizes of heads that there are numbers for");

// Steps of 16 along a head and along a block, tiles of 8 along a block and along a head.
constexpr int DIM_STEPS = DIM / 16;
constexpr int KEY_STEPS = BLOCK / 16;
constexpr int KEY_TILES = BLOCK / 8;
constexpr int DIM_TILES = DIM / 8;

// Shared memory holds K and then V of a block. Each consists of lines of 64 elements: the first 64 of all rows, and with heads of
// 128 the others after them. The 16-byte granules of a line are permuted by its number, as `wgmma` reads them ("128-byte
// swizzle"). So the 8 rows that `ldmatrix` reads at once lie in different banks.
constexpr u32 LINE_BYTES = 128;
constexpr u32 ROW_BYTES = DIM * 2;
constexpr u32 GRANULES = ROW_BYTES / 16;
constexpr u32 SIDE_BYTES = BLOCK * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * SIDE_BYTES;

extern __shared__ __align__(128) unsigned char memory[];

// Where a granule of a row of K or V lies.
INLINE u32 place(u32 row, u32 granule)
{
    return granule / 8 * (BLOCK * LINE_BYTES) + row * LINE_BYTES + (granule % 8 ^ row % 8) * 16;
}

// Two ones in bf16.
constexpr u32 BF16_ONES = 0x3f803f80;

struct Attend {
    Pool pool;
    const u16 *queries;
    // The pages of all sequences, one sequence after the other.
    const u32 *pages;
    // Query heads, and how many of them share a KV head.
    u32 heads;
    Divisor group;
    // Elements from one row of queries to the next. Outputs have no gaps.
    u32 query_stride;
    // What scores are multiplied by, times the binary logarithm of e.
    float scale;
    // Tokens of a page that prefill copies at once.
    u32 copied;
    u32 unused;
};

// What chunks give, by [row of the batch][head][chunk].
struct Partials {
    // Weighted sums of V, [DIM].
    float *values;
    // The reference and the sum of weights.
    float2 *sums;
    // Thread blocks that are done, by [row of the batch][KV head]. 0 before and after.
    u32 *done;
    // Chunks that a row has room for.
    u32 chunks;
    u32 unused;
};

// ---- Softmax

INLINE float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What weights of a maximum are relative to: the next multiple of 8 in logarithms to base 2. So it rarely rises, and weights
// are up to 1 and of full precision all the same. Nothing has minus infinity.
INLINE float reference_of(float highest)
{
    return 8.0f * ceilf(0.125f * highest);
}

// What is subtracted from scores: 0 for nothing, so that no infinity is subtracted from another.
INLINE float base_of(float reference)
{
    return reference == MINUS_INFINITY ? 0.0f : reference;
}

// What sums with two references are multiplied by when they are added up. `top` becomes the common reference.
struct Factors {
    float before;
    float after;
};

INLINE Factors factors(float &top, float other)
{
    float common = fmaxf(top, other);
    float base = base_of(common);
    Factors by = {exp2_of(top - base), exp2_of(other - base)};
    top = common;
    return by;
}

// The one formula by which chunks are merged. Into nothing (0, and no maximum) a chunk goes unchanged, and a chunk of which a
// row sees nothing changes nothing.
INLINE float merge(float before, float after, Factors by)
{
    return __fmaf_rn(before, by.before, __fmul_rn(after, by.after));
}

// Softmax of 16 rows over some positions: references, sums of weights, and weighted sums of V, of whose columns a warp has one
// of SPLIT parts. They lie as `mma` distributes a product: a thread has rows lane / 4 and the eighth after it, and of 8 columns
// lane % 4 * 2 and the next. Sums of weights are products with a V of ones, so that their columns are all the same.
template <int SPLIT> struct Softmax {
    float top[2];
    float sum[4];
    float out[DIM_TILES / SPLIT][4];
};

template <int SPLIT> INLINE void clear(Softmax<SPLIT> &softmax)
{
    softmax.top[0] = softmax.top[1] = MINUS_INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        softmax.sum[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < DIM_TILES / SPLIT; n++)
            softmax.out[n][i] = 0.0f;
    }
}

// ---- One block

// Adds the product of 16 x 16 and 16 x 8 elements.
INLINE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 query rows, as products take them, and how many positions each sees.
struct Queries {
    u32 bits[DIM_STEPS][4];
    u32 seen[2];
};

// Positions that a row does not see have the score minus infinity. `first` is the position of the first score.
template <int TILES> INLINE void hide(float (&scores)[TILES][4], u32 first, const u32 (&seen)[2])
{
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + n * 8 + threadIdx.x % 4 * 2 + i % 2 >= seen[i / 2])
                scores[n][i] = MINUS_INFINITY;
        }
    }
}

// The highest score of each of the thread's rows.
template <int TILES> INLINE void highest_of(float (&highest)[2], const float (&scores)[TILES][4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = MINUS_INFINITY;
#pragma unroll
        for (int n = 0; n < TILES; n++)
            most = fmaxf(most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        highest[half] = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    }
}

// Makes references fit these scores, too. Returns what is subtracted from scaled scores.
template <int SPLIT>
INLINE void raise(float (&base)[2], Softmax<SPLIT> &softmax, const float (&highest)[2], float scale)
{
    float kept[2];
    bool rises = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float top = fmaxf(softmax.top[half], reference_of(__fmul_rn(highest[half], scale)));
        base[half] = base_of(top);
        kept[half] = exp2_of(softmax.top[half] - base[half]);
        rises |= softmax.top[half] != top;
        softmax.top[half] = top;
    }
    // References rarely rise, and a factor of 1 changes nothing.
    if (__any_sync(0xffffffff, rises)) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            softmax.sum[i] = __fmul_rn(softmax.sum[i], kept[i / 2]);
#pragma unroll
            for (int n = 0; n < DIM_TILES / SPLIT; n++)
                softmax.out[n][i] = __fmul_rn(softmax.out[n][i], kept[i / 2]);
        }
    }
}

// The weights of 16 keys, which become a factor of the second product as they lie.
INLINE void weigh(u32 (&weights)[4], const float (&low)[4], const float (&high)[4], float scale, const float (&base)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&pair)[4] = i < 2 ? low : high;
        const int half = i % 2;
        weights[i] = bf16_pair(exp2_of(__fmaf_rn(pair[2 * half], scale, -base[half])),
                               exp2_of(__fmaf_rn(pair[2 * half + 1], scale, -base[half])));
    }
}

// ---- From the pool into shared memory

// Copies 16 bytes while the thread goes on, or writes zeros.
INLINE void copy_granule(u32 shared, u64 from, bool present)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(present ? 16 : 0));
}

// Where the K of a block's rows lie: their pages, and the rows of the pool from there on. A thread knows those at lane, and
// lane + 32. What is read from memory is not used before `load_block`, so that a thread can go on meanwhile.
struct Places {
    u32 page[BLOCK / 32];
    u32 within[BLOCK / 32];
};

INLINE Places find(const Pool &pool, const u32 *table, u32 head, u32 first, u32 limit)
{
    Places places;
#pragma unroll
    for (u32 i = 0; i < BLOCK / 32; i++) {
        const u32 position = min(first + i * 32 + threadIdx.x % 32, limit - 1);
        const u32 index = divide(position, pool.page_tokens);
        const u32 slot = position - index * pool.page_tokens.value;
        places.page[i] = table[index];
        places.within[i] = head * pool.head + slot * pool.token;
    }
    return places;
}

// Begins to load K and V of the block from position `first` on. Positions from `limit` on become zeros: what lies there has
// not been written, and is not multiplied even by 0.
template <u32 THREADS> INLINE void load_block(u32 shared, const Pool &pool, const Places &places, u32 first, u32 limit)
{
    constexpr u32 ROWS = THREADS / GRANULES;
    const u32 granule = threadIdx.x % GRANULES;
    const u64 keys = pool.start[0] + granule * 16, values = pool.start[1] + granule * 16;
    const u32 low = places.page[0] * pool.page + places.within[0], high = places.page[1] * pool.page + places.within[1];
#pragma unroll
    for (u32 i = 0; i < (BLOCK + ROWS - 1) / ROWS; i++) {
        // The rows of a warp are side by side and on one side of 32.
        const u32 row = i * ROWS + threadIdx.x / GRANULES;
        if (BLOCK % ROWS != 0 && row >= BLOCK)
            break;
        const u64 from = __shfl_sync(0xffffffff, row < 32 ? low : high, row % 32) * (u64)ROW_BYTES;
        const u32 to = shared + place(row, granule);
        copy_granule(to, keys + from, first + row < limit);
        copy_granule(to + SIDE_BYTES, values + from, first + row < limit);
    }
}

// Calls `attend` with the shared memory and the first position of each block from `first` to before `end`, in ascending
// order, while the blocks after it are on their way. Before, it calls `ready`, which waits for the kernel before. Until then
// it looks up pages, and loads blocks that lie before the position `settled`, which no kernel writes that may still run. All
// threads of the thread block take part.
template <u32 THREADS, int STAGES, class Ready, class Attend>
INLINE void each_block(const Pool &pool, const u32 *table, u32 head, u32 first, u32 end, u32 limit, u32 settled, Ready ready,
                       Attend attend)
{
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    Places places[STAGES];
#pragma unroll
    for (u32 ahead = 0; ahead < STAGES; ahead++)
        places[ahead] = find(pool, table, head, (first + ahead) * BLOCK, limit);
    // Of the first blocks those that are settled, which are the first ones, or the others.
    auto load_first = [&](bool of_settled) {
#pragma unroll
        for (u32 ahead = 0; ahead < STAGES - 1; ahead++) {
            const u32 block = first + ahead;
            if (((block + 1) * BLOCK <= settled) != of_settled)
                continue;
            if (block < end)
                load_block<THREADS>(shared + ahead * STAGE_BYTES, pool, places[ahead], block * BLOCK, limit);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
    };
    load_first(true);
    ready();
    load_first(false);
    Places next_places = places[STAGES - 1];
    u32 stage = 0;
    for (u32 block = first; block < end; block++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        // This block is there, and all threads are through with the one before it, whose place the next one takes.
        __syncthreads();
        const u32 next = block + STAGES - 1;
        const u32 free = stage == 0 ? STAGES - 1 : stage - 1;
        if (next < end)
            load_block<THREADS>(shared + free * STAGE_BYTES, pool, next_places, next * BLOCK, limit);
        asm volatile("cp.async.commit_group;" ::: "memory");
        // What this reads has come when it is needed.
        next_places = find(pool, table, head, (next + 1) * BLOCK, limit);
        attend(shared + stage * STAGE_BYTES, block * BLOCK);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// Reads a row's share of this thread, or zeros where there is no row.
INLINE void load_query(u32 (&bits)[DIM_STEPS][4], int half, const u16 *row)
{
#pragma unroll
    for (int k = 0; k < DIM_STEPS; k++) {
        const u16 *from = row + k * 16 + threadIdx.x % 4 * 2;
        bits[k][half] = row ? *(const u32 *)from : 0;
        bits[k][half + 2] = row ? *(const u32 *)(from + 8) : 0;
    }
}

// ---- Decode

// Reads four matrices of 8 x 8 elements. Each thread gives the address of a row of one.
INLINE void load_matrices(u32 (&to)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}

INLINE void load_transposed(u32 (&to)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}

// What warps tell each other that share a block: the maxima of their scores, and their weights, as `mma` takes them.
struct Exchange {
    float highest[DECODE_WARPS][16];
    uint4 weights[KEY_STEPS][32];
};

// Takes a block of positions from `first` on into the softmax. `shared` is where its K and V lie. `whole`: every row sees all
// of it. The warps share the block: each has as many keys for the scores, and as many columns of V. Each score and each sum is
// the same chain of products as in prefill.
INLINE void attend(Softmax<DECODE_WARPS> &softmax, const Queries &queries, u32 shared, u32 first, bool whole, float scale,
                   Exchange *exchange)
{
    constexpr int OWN_KEYS = KEY_TILES / DECODE_WARPS, OWN_STEPS = KEY_STEPS / DECODE_WARPS;
    constexpr int OWN_DIMS = DIM_TILES / DECODE_WARPS;
    const u32 lane = threadIdx.x % 32, part = threadIdx.x / 32;
    const u32 first_key = part * OWN_KEYS * 8;

    float scores[OWN_KEYS][4] = {};
    {
        // Of two tiles of 8 keys, the lower and the upper 8 of 16 dimensions.
        const u32 row = first_key + lane / 16 * 8 + lane % 8;
        const u32 granule = lane / 8 % 2;
#pragma unroll
        for (int k = 0; k < DIM_STEPS; k++) {
            const u32 at = shared + place(row, 2 * k + granule);
#pragma unroll
            for (int n = 0; n < OWN_KEYS; n += 2) {
                u32 keys[4];
                load_matrices(keys, at + n * 8 * LINE_BYTES);
                multiply(scores[n], queries.bits[k], keys[0], keys[1]);
                multiply(scores[n + 1], queries.bits[k], keys[2], keys[3]);
            }
        }
    }
    if (!whole)
        hide(scores, first + first_key, queries.seen);

    float highest[2];
    highest_of(highest, scores);
#pragma unroll
    for (int half = 0; half < 2; half++)
        exchange->highest[part][half * 8 + lane / 4] = highest[half];
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int other = 0; other < DECODE_WARPS; other++)
            highest[half] = fmaxf(highest[half], exchange->highest[other][half * 8 + lane / 4]);
    }
    float base[2];
    raise(base, softmax, highest, scale);
#pragma unroll
    for (int k = 0; k < OWN_STEPS; k++) {
        u32 weights[4];
        weigh(weights, scores[2 * k], scores[2 * k + 1], scale, base);
        exchange->weights[part * OWN_STEPS + k][lane] = make_uint4(weights[0], weights[1], weights[2], weights[3]);
    }
    __syncthreads();

    // Of 8 and 8 more keys, two tiles of 8 dimensions.
    const u32 row = lane % 16;
    const u32 granule = part * OWN_DIMS + lane / 16;
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
        const uint4 all = exchange->weights[k][lane];
        const u32 weights[4] = {all.x, all.y, all.z, all.w};
        multiply(softmax.sum, weights, BF16_ONES, BF16_ONES);
        const u32 at = shared + SIDE_BYTES + k * 16 * LINE_BYTES;
#pragma unroll
        for (int n = 0; n < OWN_DIMS; n += 2) {
            u32 values[4];
            load_transposed(values, at + place(row, n + granule));
            multiply(softmax.out[n], weights, values[0], values[1]);
            multiply(softmax.out[n + 1], weights, values[2], values[3]);
        }
    }
}

// Merges the chunks of a row and head, and writes the output. A warp does it, of which each thread has DIM / 32 columns.
INLINE void combine(const Partials &partials, u64 row_and_head, u32 chunks, u16 *outputs)
{
    constexpr int COLUMNS = DIM / 32;
    const u64 first = row_and_head * partials.chunks;
    const u32 column = threadIdx.x % 32 * COLUMNS;
    float top = MINUS_INFINITY, sum = 0.0f, out[COLUMNS] = {};
#pragma unroll 4
    for (u64 chunk = first; chunk < first + chunks; chunk++) {
        const float2 sums = __ldcg(partials.sums + chunk);
        const Factors by = factors(top, sums.x);
        sum = merge(sum, sums.y, by);
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) {
            const float2 values = __ldcg((const float2 *)(partials.values + chunk * DIM + column + i));
            out[i] = merge(out[i], values.x, by);
            out[i + 1] = merge(out[i + 1], values.y, by);
        }
    }
    const float share = __frcp_rn(sum);
    u32 *to = (u32 *)(outputs + row_and_head * DIM + column);
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2)
        to[i / 2] = bf16_pair(out[i] * share, out[i + 1] * share);
}

// Counts one more, and returns how many there were. What the threads of this thread block wrote before it is seen by those that
// count later, when all threads of either thread block have met before and after.
INLINE u32 count(u32 *counter)
{
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Grid: chunks, KV heads, rows of the batch. `position` and `table` belong to the first row of the batch.
template <int STAGES>
INLINE void decode(const Attend &a, const Partials &partials, const u32 *position, const u32 *table, u16 *outputs)
{
    start_the_next_kernel();
    const u32 chunk = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
    const u32 own = position[row];
    const u32 *pages = a.pages + table[row];
    if (own == NO_POSITION || own < chunk * CHUNK) {
        wait_for_the_kernel_before();
        return;
    }
    const u32 limit = min(own + 1, (chunk + 1) * CHUNK);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 group = a.group.value;
    const u64 first_head = row * (u64)a.heads + head * group;

    Queries queries;
    Softmax<DECODE_WARPS> softmax;
    clear(softmax);
    const u32 first = chunk * (CHUNK / BLOCK), end = (limit + BLOCK - 1) / BLOCK;
    Exchange *exchange = (Exchange *)(memory + STAGES * STAGE_BYTES);
    each_block<32 * DECODE_WARPS, STAGES>(
        a.pool, pages, head, first, end, limit, own,
        [&] {
            wait_for_the_kernel_before();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 member = lane / 4 + 8 * half;
                const u16 *from = a.queries + row * (u64)a.query_stride + (head * group + member) * DIM;
                load_query(queries.bits, half, member < group ? from : nullptr);
                queries.seen[half] = limit;
            }
        },
        [&](u32 shared, u32 at) { attend(softmax, queries, shared, at, at + BLOCK <= limit, a.scale, exchange); });

    // Positions for which there is no room are not seen.
    const u32 chunks = min(own / CHUNK + 1, partials.chunks);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 member = lane / 4 + 8 * half;
        if (member >= group)
            continue;
        const u32 column = warp * (DIM / DECODE_WARPS) + lane % 4 * 2;
        if (chunks == 1) {
            // As merged with nothing.
            const float share = __frcp_rn(softmax.sum[2 * half]);
            u16 *to = outputs + (first_head + member) * DIM + column;
#pragma unroll
            for (int n = 0; n < DIM_TILES / DECODE_WARPS; n++)
                *(u32 *)(to + n * 8) =
                    bf16_pair(softmax.out[n][2 * half] * share, softmax.out[n][2 * half + 1] * share);
        } else {
            const u64 index = (first_head + member) * partials.chunks + chunk;
            if (lane % 4 == 0 && warp == 0)
                partials.sums[index] = make_float2(softmax.top[half], softmax.sum[2 * half]);
            float *to = partials.values + index * DIM + column;
#pragma unroll
            for (int n = 0; n < DIM_TILES / DECODE_WARPS; n++)
                *(float2 *)(to + n * 8) = make_float2(softmax.out[n][2 * half], softmax.out[n][2 * half + 1]);
        }
    }
    if (chunks == 1)
        return;

    // The last thread block of a row and KV head merges what all of them have written.
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        u32 *done = partials.done + row * gridDim.y + head;
        last = count(done) + 1 == chunks;
        if (last)
            *done = 0;
    }
    if (__syncthreads_or(last)) {
        for (u32 member = warp; member < group; member += DECODE_WARPS)
            combine(partials, first_head + member, chunks, outputs);
    }
}

extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)
    attention_decode(const __grid_constant__ Attend a, const __grid_constant__ Partials partials, const u32 *position,
                     const u32 *table, u16 *outputs)
{
    decode<DECODE_STAGES>(a, partials, position, table, outputs);
}

// For so few thread blocks that each may have all of its K and V on their way at once.
extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS)
    attention_decode_few(const __grid_constant__ Attend a, const __grid_constant__ Partials partials, const u32 *position,
                         const u32 *table, u16 *outputs)
{
    decode<CHUNK / BLOCK + 1>(a, partials, position, table, outputs);
}
