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
// ascending order by `merge`. A warp has 16 * M rows side by side: a row's sums do not see other rows. Positions that a row
// does not see weigh exactly 0, and adding 0 changes no sum: a row that goes through blocks behind its position stays as it
// is. (K and V are finite. An infinite V would reach earlier rows, as 0 times infinity.)
//
// Decode: one thread block per sequence, KV head and chunk. The group's query heads are its rows, and its warps share a block.
// What the chunks give goes to memory, and the last thread block merges it. Prefill: one thread block per tile of rows and KV
// head. A tile's rows are tokens times the heads of the group, each warp has some of them, and merges as it goes.

// Positions of a block and of a chunk. Other numbers give other bits.
constexpr u32 BLOCK = 64;
constexpr u32 CHUNK = 256;

constexpr u32 DIM = HEAD_DIM;

// Warps of a thread block, blocks of which K and V are in shared memory or on their way, rows of a warp in 16, and thread
// blocks that a multiprocessor holds. No bit depends on them. (On an H100 these were the fastest of those that fit.)
constexpr int DECODE_WARPS = 4, PREFILL_WARPS = 4;
constexpr int DECODE_STAGES = DIM == 64 ? 3 : 2, PREFILL_STAGES = 2;
constexpr int PREFILL_M = DIM == 64 ? 2 : 1;
constexpr int PREFILL_RESIDENT = 2;
static_assert(DIM == 64 || DIM == 128, "sizes of heads that there are numbers for");

// Steps of 16 along a head and along a block, tiles of 8 along a block and along a head.
constexpr int DIM_STEPS = DIM / 16;
constexpr int KEY_STEPS = BLOCK / 16;
constexpr int KEY_TILES = BLOCK / 8;
constexpr int DIM_TILES = DIM / 8;

// Shared memory holds K and then V of a block, as rows of DIM elements. The 16-byte granules of a row are permuted by its
// number, so that the 8 rows that `ldmatrix` reads at once lie in different banks.
constexpr u32 ROW_BYTES = DIM * 2;
constexpr u32 GRANULES = ROW_BYTES / 16;
constexpr u32 SIDE_BYTES = BLOCK * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * SIDE_BYTES;
extern __shared__ __align__(128) unsigned char memory[];

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
};

// Rows of one sequence that one thread block computes.
struct Tile {
    u32 first_row;
    u32 rows;
    // Position of the first row.
    u32 start;
    // Where the sequence's pages begin.
    u32 table;
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

// Softmax of 16 * M rows over some positions: references, sums of weights, and weighted sums of V, of whose columns a warp
// has one of SPLIT parts. They lie as `mma` distributes a product: of 16 rows a thread has lane / 4 and the eighth after it,
// of 8 columns lane % 4 * 2 and the next. Sums of weights are products with a V of ones, so that their columns are all the
// same.
template <int M, int SPLIT> struct Softmax {
    float top[M][2];
    float sum[M][4];
    float out[M][DIM_TILES / SPLIT][4];
};

template <int M, int SPLIT> INLINE void clear(Softmax<M, SPLIT> &softmax)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
        softmax.top[m][0] = softmax.top[m][1] = MINUS_INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            softmax.sum[m][i] = 0.0f;
#pragma unroll
            for (int n = 0; n < DIM_TILES / SPLIT; n++)
                softmax.out[m][n][i] = 0.0f;
        }
    }
}

// The merged chunks of prefill. What is weighted sums of V in a softmax lies in shared memory here, [tile][thread]: it is
// touched once per chunk, and registers are short.
template <int M> struct Merged {
    float top[M][2];
    float sum[M][2];
    float4 *out;
};

template <int M, u32 THREADS> INLINE void merge(Merged<M> &all, const Softmax<M, 1> &chunk)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
        Factors by[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            by[half] = factors(all.top[m][half], chunk.top[m][half]);
            all.sum[m][half] = merge(all.sum[m][half], chunk.sum[m][2 * half], by[half]);
        }
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            float4 *out = all.out + (m * DIM_TILES + n) * THREADS + threadIdx.x;
            const float4 before = *out;
            *out = make_float4(merge(before.x, chunk.out[m][n][0], by[0]), merge(before.y, chunk.out[m][n][1], by[0]),
                               merge(before.z, chunk.out[m][n][2], by[1]), merge(before.w, chunk.out[m][n][3], by[1]));
        }
    }
}

template <int M, u32 THREADS> INLINE void clear(Merged<M> &all)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            all.top[m][half] = MINUS_INFINITY;
            all.sum[m][half] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
            all.out[(m * DIM_TILES + n) * THREADS + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// ---- One block

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

// Adds the product of 16 x 16 and 16 x 8 elements.
INLINE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 * M query rows, as `mma` takes them, and how many positions each sees.
template <int M> struct Queries {
    u32 bits[M][DIM_STEPS][4];
    u32 seen[M][2];
};

// What warps tell each other that share a block: the maxima of their scores, and their weights, as `mma` takes them.
template <int M, int SPLIT> struct Exchange {
    float highest[SPLIT][M][16];
    uint4 weights[M][KEY_STEPS][32];
};

// Takes a block of positions from `first` on into the softmax. `shared` is where its K and V lie. `whole`: every row sees all
// of it. SPLIT warps share the block: each has as many keys for the scores, and as many columns of V. Alone or not, each score
// and each sum is the same chain of products.
template <int M, int SPLIT>
INLINE void attend(Softmax<M, SPLIT> &softmax, const Queries<M> &queries, u32 shared, u32 first, bool whole, float scale,
                   Exchange<M, SPLIT> *exchange)
{
    constexpr int OWN_KEYS = KEY_TILES / SPLIT, OWN_STEPS = KEY_STEPS / SPLIT, OWN_DIMS = DIM_TILES / SPLIT;
    const u32 lane = threadIdx.x % 32;
    const u32 part = SPLIT == 1 ? 0 : threadIdx.x / 32;
    const u32 first_key = part * OWN_KEYS * 8;

    float scores[M][OWN_KEYS][4] = {};
    {
        // Of two tiles of 8 keys, the lower and the upper 8 of 16 dimensions.
        const u32 row = first_key + lane / 16 * 8 + lane % 8;
        const u32 granule = lane / 8 % 2;
#pragma unroll
        for (int k = 0; k < DIM_STEPS; k++) {
            const u32 at = shared + row * ROW_BYTES + ((2 * k + granule) ^ (lane % 8)) * 16;
#pragma unroll
            for (int n = 0; n < OWN_KEYS; n += 2) {
                u32 keys[4];
                load_matrices(keys, at + n * 8 * ROW_BYTES);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply(scores[m][n], queries.bits[m][k], keys[0], keys[1]);
                    multiply(scores[m][n + 1], queries.bits[m][k], keys[2], keys[3]);
                }
            }
        }
    }
    if (!whole) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < OWN_KEYS; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (first + first_key + n * 8 + lane % 4 * 2 + i % 2 >= queries.seen[m][i / 2])
                        scores[m][n][i] = MINUS_INFINITY;
                }
            }
        }
    }

    float highest[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < OWN_KEYS; n++)
                most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
            highest[m][half] = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
            if constexpr (SPLIT > 1)
                exchange->highest[part][m][half * 8 + lane / 4] = highest[m][half];
        }
    }
    if constexpr (SPLIT > 1) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int other = 0; other < SPLIT; other++)
                    highest[m][half] = fmaxf(highest[m][half], exchange->highest[other][m][half * 8 + lane / 4]);
            }
        }
    }

    float base[M][2], kept[M][2];
    bool rises = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float top = fmaxf(softmax.top[m][half], reference_of(__fmul_rn(highest[m][half], scale)));
            base[m][half] = base_of(top);
            kept[m][half] = exp2_of(softmax.top[m][half] - base[m][half]);
            rises |= softmax.top[m][half] != top;
            softmax.top[m][half] = top;
        }
    }
    // References rarely rise, and a factor of 1 changes nothing.
    if (__any_sync(0xffffffff, rises)) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                softmax.sum[m][i] = __fmul_rn(softmax.sum[m][i], kept[m][i / 2]);
#pragma unroll
                for (int n = 0; n < OWN_DIMS; n++)
                    softmax.out[m][n][i] = __fmul_rn(softmax.out[m][n][i], kept[m][i / 2]);
            }
        }
    }

    // The weights of 16 keys become a factor of the second product as they lie.
    auto weigh = [&](u32 (&weights)[4], int m, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&pair)[4] = scores[m][2 * k + i / 2];
            const int half = i % 2;
            weights[i] = bf16_pair(exp2_of(__fmaf_rn(pair[2 * half], scale, -base[m][half])),
                                   exp2_of(__fmaf_rn(pair[2 * half + 1], scale, -base[m][half])));
        }
    };
    if constexpr (SPLIT > 1) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int k = 0; k < OWN_STEPS; k++) {
                u32 weights[4];
                weigh(weights, m, k);
                exchange->weights[m][part * OWN_STEPS + k][lane] = make_uint4(weights[0], weights[1], weights[2], weights[3]);
            }
        }
        __syncthreads();
    }

    // Of 8 and 8 more keys, two tiles of 8 dimensions. The weights of the next keys are computed while these are multiplied.
    const u32 row = lane % 16;
    const u32 granule = part * OWN_DIMS + lane / 16;
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
        u32 weights[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if constexpr (SPLIT > 1) {
                const uint4 all = exchange->weights[m][k][lane];
                weights[m][0] = all.x, weights[m][1] = all.y, weights[m][2] = all.z, weights[m][3] = all.w;
            } else {
                weigh(weights[m], m, k);
            }
            multiply(softmax.sum[m], weights[m], BF16_ONES, BF16_ONES);
        }
        const u32 at = shared + SIDE_BYTES + (k * 16 + row) * ROW_BYTES;
#pragma unroll
        for (int n = 0; n < OWN_DIMS; n += 2) {
            u32 values[4];
            load_transposed(values, at + ((n + granule) ^ (lane % 8)) * 16);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(softmax.out[m][n], weights[m], values[0], values[1]);
                multiply(softmax.out[m][n + 1], weights[m], values[2], values[3]);
            }
        }
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
        const u32 to = shared + row * ROW_BYTES + (granule ^ (row % 8)) * 16;
        copy_granule(to, keys + from, first + row < limit);
        copy_granule(to + SIDE_BYTES, values + from, first + row < limit);
    }
}

// Calls `attend` with the shared memory and the first position of each block from `first` to before `end`, in ascending
// order, while the blocks after it are on their way. Before, it calls `ready`, which waits for the kernel before. Until then
// it looks up pages, and loads blocks that lie before the position `settled`, which that kernel does not write. All threads
// of the thread block take part.
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
    const u32 chunk = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
    const u32 own = position[row];
    const u32 *pages = a.pages + table[row];
    if (own == NO_POSITION || own < chunk * CHUNK) {
        follow();
        return;
    }
    const u32 limit = min(own + 1, (chunk + 1) * CHUNK);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 group = a.group.value;
    const u64 first_head = row * (u64)a.heads + head * group;

    Queries<1> queries;
    Softmax<1, DECODE_WARPS> softmax;
    clear(softmax);
    const u32 first = chunk * (CHUNK / BLOCK), end = (limit + BLOCK - 1) / BLOCK;
    Exchange<1, DECODE_WARPS> *exchange = (Exchange<1, DECODE_WARPS> *)(memory + STAGES * STAGE_BYTES);
    each_block<32 * DECODE_WARPS, STAGES>(
        a.pool, pages, head, first, end, limit, own,
        [&] {
            follow();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 member = lane / 4 + 8 * half;
                const u16 *from = a.queries + row * (u64)a.query_stride + (head * group + member) * DIM;
                load_query(queries.bits[0], half, member < group ? from : nullptr);
                queries.seen[0][half] = limit;
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
            const float share = __frcp_rn(softmax.sum[0][2 * half]);
            u16 *to = outputs + (first_head + member) * DIM + column;
#pragma unroll
            for (int n = 0; n < DIM_TILES / DECODE_WARPS; n++)
                *(u32 *)(to + n * 8) =
                    bf16_pair(softmax.out[0][n][2 * half] * share, softmax.out[0][n][2 * half + 1] * share);
        } else {
            const u64 index = (first_head + member) * partials.chunks + chunk;
            if (lane % 4 == 0 && warp == 0)
                partials.sums[index] = make_float2(softmax.top[0][half], softmax.sum[0][2 * half]);
            float *to = partials.values + index * DIM + column;
#pragma unroll
            for (int n = 0; n < DIM_TILES / DECODE_WARPS; n++)
                *(float2 *)(to + n * 8) = make_float2(softmax.out[0][n][2 * half], softmax.out[0][n][2 * half + 1]);
        }
    }
    if (chunks == 1)
        return;

    // The last thread block of a row and KV head merges what all of them have written.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 *done = partials.done + row * gridDim.y + head;
        last = count(done) + 1 == chunks;
        if (last)
            *done = 0;
    }
    __syncthreads();
    if (last) {
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

// ---- Prefill

// Grid: KV heads, tiles. A tile's rows are its tokens times the heads of a group, heads side by side.
extern "C" __global__ void __launch_bounds__(32 * PREFILL_WARPS, PREFILL_RESIDENT)
    attention_prefill(const __grid_constant__ Attend a, const Tile *tiles, u16 *outputs)
{
    constexpr int M = PREFILL_M;
    constexpr u32 THREADS = 32 * PREFILL_WARPS;
    const Tile tile = tiles[blockIdx.y];
    const u32 head = blockIdx.x;
    const u32 lane = threadIdx.x % 32;
    const u32 first_row = threadIdx.x / 32 * (16 * M);
    const u32 limit = tile.start + tile.rows;
    Queries<M> queries;
    auto load_queries = [&] {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 row = first_row + m * 16 + half * 8 + lane / 4;
                const u32 token = divide(row, a.group), member = row - token * a.group.value;
                const u16 *from =
                    a.queries + (tile.first_row + token) * (u64)a.query_stride + (head * a.group.value + member) * DIM;
                load_query(queries.bits[m], half, token < tile.rows ? from : nullptr);
                queries.seen[m][half] = tile.start + token + 1;
            }
        }
    };
    // Positions that every row of the warp sees, and that none sees.
    const u32 first_token = divide(first_row, a.group), last_token = divide(first_row + 16 * M - 1, a.group);
    const u32 seen_by_all = tile.start + first_token + 1;
    const u32 seen_by_none = first_token < tile.rows ? tile.start + min(last_token + 1, tile.rows) : 0;

    Merged<M> all;
    all.out = (float4 *)(memory + PREFILL_STAGES * STAGE_BYTES);
    clear<M, THREADS>(all);
    Softmax<M, 1> softmax;
    clear(softmax);
    const u32 end = (limit + BLOCK - 1) / BLOCK;
    each_block<THREADS, PREFILL_STAGES>(
        a.pool, a.pages + tile.table, head, 0, end, limit, 0,
        [&] {
            follow();
            load_queries();
        },
        [&](u32 shared, u32 at) {
            if (at < seen_by_none)
                attend(softmax, queries, shared, at, at + BLOCK <= seen_by_all, a.scale, (Exchange<M, 1> *)nullptr);
            if ((at + BLOCK) % CHUNK == 0 || at + BLOCK >= limit) {
                merge<M, THREADS>(all, softmax);
                clear(softmax);
            }
        });

#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = first_row + m * 16 + half * 8 + lane / 4;
            const u32 token = divide(row, a.group), member = row - token * a.group.value;
            if (token >= tile.rows)
                continue;
            const float share = __frcp_rn(all.sum[m][half]);
            u16 *to = outputs + ((tile.first_row + token) * (u64)a.heads + head * a.group.value + member) * DIM + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                const float *out = (const float *)(all.out + (m * DIM_TILES + n) * THREADS + threadIdx.x) + 2 * half;
                *(u32 *)(to + n * 8) = bf16_pair(out[0] * share, out[1] * share);
            }
        }
    }
}
