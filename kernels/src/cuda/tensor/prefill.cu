// Attention of prefill, on Hopper's tensor cores. attention.cu stands before this text, with its softmax and its order of sums.
//
// One thread block per tile of rows and KV head. A tile's rows are tokens times the heads of a KV head, heads side by side. Each
// of GROUPS groups of 128 threads has 64 of them, of which each of its warps has 16. One more warp keeps a ring of stages in shared
// memory filled with K and V of the blocks, by copies of boxes: as many tokens of a page as divide a block. The tensor cores read
// K and V there themselves. While they multiply for one group, others compute weights.
//
// The products are chains over 16 columns each, in ascending order. A chain of `wgmma` has the bits of a chain of `mma`.

// No bit depends on these numbers. (On an H100 they were the fastest of those that fit.)
constexpr int GROUPS = DIM == 64 ? 4 : 3;
constexpr int STAGES = DIM == 64 ? 4 : 3;
// Registers of a thread of the groups, and of the others.
constexpr int REGISTERS = DIM == 64 ? 112 : 160, FEW_REGISTERS = 24;

constexpr u32 CONSUMERS = 128 * GROUPS;
// The warp that fills the ring has a group of its own, so that the others have its registers.
constexpr u32 THREADS = CONSUMERS + 128;
constexpr int LINES = DIM / 64;

// Operands of `wgmma` begin at multiples of 1 KiB.
extern __shared__ __align__(1024) unsigned char tile_memory[];

// ---- One block

// Takes a block of positions from `first` on into the softmax of the group's rows. `shared` is where its K and V lie. `whole`:
// every row sees all of it. All warps of the group take part.
INLINE void attend_tile(Softmax<1> &softmax, Queries &queries, u32 shared, u32 first, bool whole, float scale)
{
    float scores[KEY_TILES][4];
    hold(queries.bits);
    multiply_begin();
#pragma unroll
    for (int k = 0; k < DIM_STEPS; k++) {
        const u32 at = shared + k / 4 * (BLOCK * LINE_BYTES) + k % 4 * 32;
        multiply_64<0>(scores, queries.bits[k], operand(at), k > 0);
    }
    multiply_commit();
    multiply_wait<0>();
    hold(scores);

    if (!whole)
        hide(scores, first, queries.seen);
    float highest[2], base[2];
    highest_of(highest, scores);
    raise(base, softmax, highest, scale);
    u32 weights[KEY_STEPS][4];
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++)
        weigh(weights[k], scores[2 * k], scores[2 * k + 1], scale, base);

    hold(softmax.out);
    hold(weights);
    multiply_begin();
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            const u32 at = shared + SIDE_BYTES + line * (BLOCK * LINE_BYTES) + k * 16 * LINE_BYTES;
            multiply_64<1>(*(float(*)[8][4])softmax.out[8 * line], weights[k], operand(at), true);
        }
    }
    multiply_commit();
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++)
        multiply(softmax.sum, weights[k], BF16_ONES, BF16_ONES);
    multiply_wait<0>();
    hold(softmax.out);
}

// ---- Chunks

// The merged chunks of 64 rows. What is weighted sums of V in a softmax lies in shared memory here, each thread's own CONSUMERS
// apart: it is touched once per chunk, and registers are short.
struct Merged {
    float top[2];
    float sum[2];
    float4 *out;
};

INLINE void merge(Merged &all, const Softmax<1> &chunk)
{
    Factors by[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        by[half] = factors(all.top[half], chunk.top[half]);
        all.sum[half] = merge(all.sum[half], chunk.sum[2 * half], by[half]);
    }
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++) {
        float4 *out = all.out + n * CONSUMERS;
        const float4 before = *out;
        *out = make_float4(merge(before.x, chunk.out[n][0], by[0]), merge(before.y, chunk.out[n][1], by[0]),
                           merge(before.z, chunk.out[n][2], by[1]), merge(before.w, chunk.out[n][3], by[1]));
    }
}

INLINE void clear(Merged &all)
{
    all.top[0] = all.top[1] = MINUS_INFINITY;
    all.sum[0] = all.sum[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++)
        all.out[n * CONSUMERS] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// ---- The kernel

// Rows of one sequence that one thread block computes.
struct Tile {
    u32 first_row;
    u32 rows;
    // Position of the first row.
    u32 start;
    // Where the sequence's pages begin.
    u32 table;
};

// Addresses in shared memory.
struct Ring {
    u32 stages;
    // A barrier for each stage.
    u32 full, empty;
};

// Fills the ring with the blocks that begin before `limit`. A box is `box` tokens of a page. A warp takes part.
INLINE void produce(const Map *keys, const Map *values, const Attend &a, const Tile &tile, const Ring &ring, u32 limit)
{
    const u32 lane = threadIdx.x % 32, box = a.copied;
    const u32 *table = a.pages + tile.table;
    // Positions behind the limit are not seen. Boxes there are copies of the last box before it.
    const u32 last = (limit - 1) / box * box;
    u32 stage = 0, parity = 0;
    for (u32 first = 0; first < limit; first += BLOCK) {
        const u32 full = ring.full + 8 * stage, to = ring.stages + stage * STAGE_BYTES;
        barrier_wait(ring.empty + 8 * stage, parity ^ 1);
        if (lane == 0)
            barrier_expect(full, STAGE_BYTES);
        __syncwarp();
        for (u32 row = lane * box; row < BLOCK; row += 32 * box) {
            const u32 position = min(first + row, last);
            const u32 index = divide(position, a.pool.page_tokens);
            const u32 slot = position - index * a.pool.page_tokens.value;
            const u32 page = table[index];
#pragma unroll
            for (int line = 0; line < LINES; line++) {
                const u32 at[4] = {(u32)line * 64, slot, blockIdx.x, page};
                const u32 place = to + line * (BLOCK * LINE_BYTES) + row * LINE_BYTES;
                copy_box(place, keys, at, full);
                copy_box(place + SIDE_BYTES, values, at, full);
            }
        }
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
    }
}

// The rows of V from `first` on become zeros: what lies there has not been written, and is not multiplied even by 0.
INLINE void clear_rows(u32 values, u32 first)
{
    for (u32 granule = threadIdx.x % 128; granule < (BLOCK - first) * GRANULES; granule += 128) {
        const u32 at = values + place(first + granule / GRANULES, granule % GRANULES);
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    show_to_tensor_cores();
    meet_group(threadIdx.x / 128);
}

// A group of threads computes its rows.
INLINE void consume(const Attend &a, const Tile &tile, const Ring &ring, u32 limit, u16 *outputs)
{
    const u32 head = blockIdx.x, lane = threadIdx.x % 32;
    // Of the tile, the first rows of the group and of this thread.
    const u32 group_row = threadIdx.x / 128 * 64;
    const u32 own_row = group_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    Queries queries;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = own_row + half * 8;
        const u32 token = divide(row, a.group), member = row - token * a.group.value;
        const u16 *from =
            a.queries + (tile.first_row + token) * (u64)a.query_stride + (head * a.group.value + member) * DIM;
        load_query(queries.bits, half, token < tile.rows ? from : nullptr);
        queries.seen[half] = tile.start + token + 1;
    }
    // Positions that every row of the group sees, and that none sees.
    const u32 first_token = divide(group_row, a.group), last_token = divide(group_row + 63, a.group);
    const u32 seen_by_all = tile.start + first_token + 1;
    const u32 seen_by_none = first_token < tile.rows ? tile.start + min(last_token + 1, tile.rows) : 0;

    Merged all;
    all.out = (float4 *)(tile_memory + STAGES * STAGE_BYTES) + threadIdx.x;
    clear(all);
    Softmax<1> softmax;
    clear(softmax);
    u32 stage = 0, parity = 0;
    for (u32 at = 0; at < limit; at += BLOCK) {
        const u32 shared = ring.stages + stage * STAGE_BYTES;
        barrier_wait(ring.full + 8 * stage, parity);
        if (at < seen_by_none) {
            if (at + BLOCK > limit)
                clear_rows(shared + SIDE_BYTES, limit - at);
            attend_tile(softmax, queries, shared, at, at + BLOCK <= seen_by_all, a.scale);
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(ring.empty + 8 * stage);
        if ((at + BLOCK) % CHUNK == 0 || at + BLOCK >= limit) {
            merge(all, softmax);
            clear(softmax);
        }
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = own_row + half * 8;
        const u32 token = divide(row, a.group), member = row - token * a.group.value;
        if (token >= tile.rows)
            continue;
        const float share = __frcp_rn(all.sum[half]);
        u16 *to = outputs + ((tile.first_row + token) * (u64)a.heads + head * a.group.value + member) * DIM + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            const float *out = (const float *)(all.out + n * CONSUMERS) + 2 * half;
            *(u32 *)(to + n * 8) = bf16_pair(out[0] * share, out[1] * share);
        }
    }
}

// Grid: KV heads, tiles. The maps are those of K and of V, with the dimensions element, token of a page, head, page.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(const __grid_constant__ Map keys, const __grid_constant__ Map values, const __grid_constant__ Attend a,
                      const Tile *tiles, u16 *outputs)
{
    const Tile tile = tiles[blockIdx.y];
    const u32 limit = tile.start + tile.rows;
    Ring ring;
    ring.stages = shared_address(tile_memory);
    ring.full = ring.stages + STAGES * STAGE_BYTES + CONSUMERS * DIM_TILES * 16;
    ring.empty = ring.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(ring.full + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, 4 * GROUPS);
        }
        barriers_are_ready();
    }
    __syncthreads();
    follow();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers<FEW_REGISTERS>();
        if (threadIdx.x < CONSUMERS + 32)
            produce(&keys, &values, a, tile, ring, limit);
    } else {
        more_registers<REGISTERS>();
        consume(a, tile, ring, limit, outputs);
    }
}
