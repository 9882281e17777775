// What an executor does to rows of a batch besides matrix products and attention. The bits of a row depend on that row alone:
// every sum has one order, which the sizes of the model fix.

INLINE float from_bf16(u32 bits)
{
    return __uint_as_float(bits << 16);
}

// ---- Embedding

// Grid: rows. Thread blocks of any size.
extern "C" __global__ void embed(const u32 *tokens, const u16 *table, float *residual, u32 hidden, u32 vocabulary)
{
    follow();
    const u32 row = blockIdx.x, token = tokens[row];
    float4 *to = (float4 *)(residual + row * (u64)hidden);
    const uint4 *from = (const uint4 *)(table + token * (u64)hidden);
    for (u32 i = threadIdx.x; i < hidden / 8; i += blockDim.x) {
        // A token that the model does not have is a row of zeros.
        const uint4 bits = token < vocabulary ? from[i] : make_uint4(0, 0, 0, 0);
        to[2 * i] = make_float4(from_bf16(bits.x), from_bf16(bits.x >> 16), from_bf16(bits.y), from_bf16(bits.y >> 16));
        to[2 * i + 1] = make_float4(from_bf16(bits.z), from_bf16(bits.z >> 16), from_bf16(bits.w), from_bf16(bits.w >> 16));
    }
}

// ---- RMS norm

// A thread keeps this many vectors of 4 elements between the two uses of a row.
constexpr int NORM_VECTORS = 8;

INLINE float square_sum(float4 v)
{
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmul_rn(v.x, v.x))));
}

// The sum over a warp, in every thread.
INLINE float warp_sum(float sum)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, distance));
    return sum;
}

// Row `selected[i]` of the residual stream, or row i without a selection, becomes row i of the output. Grid: rows of the
// output. Thread blocks of whole warps, whose threads times NORM_VECTORS are enough for a row.
extern "C" __global__ void __launch_bounds__(512)
    rms_norm(const float *residual, const u32 *selected, const float *weight, u16 *normed, u32 hidden, float epsilon)
{
    start_the_next_kernel();
    const u32 vectors = hidden / 4;
    float4 weights[NORM_VECTORS], kept[NORM_VECTORS];
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const u32 at = i * blockDim.x + threadIdx.x;
        if (at < vectors)
            weights[i] = ((const float4 *)weight)[at];
    }
    wait_for_the_kernel_before();
    const u32 row = selected ? selected[blockIdx.x] : blockIdx.x;
    const float4 *from = (const float4 *)(residual + row * (u64)hidden);
    uint2 *to = (uint2 *)(normed + blockIdx.x * (u64)hidden);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const u32 at = i * blockDim.x + threadIdx.x;
        if (at < vectors) {
            kept[i] = from[at];
            sum = __fadd_rn(sum, square_sum(kept[i]));
        }
    }
    __shared__ float sums[16];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++)
        total = __fadd_rn(total, sums[warp]);
    const float factor = rsqrtf(__fmaf_rn(total, 1.0f / hidden, epsilon));

#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const u32 at = i * blockDim.x + threadIdx.x;
        if (at < vectors) {
            const float4 v = kept[i], w = weights[i];
            to[at] = make_uint2(bf16_pair(v.x * factor * w.x, v.y * factor * w.y),
                                bf16_pair(v.z * factor * w.z, v.w * factor * w.w));
        }
    }
}

// ---- From the qkv product to the queries and the pool

struct Rotate {
    Pool pool;
    // [row][queries, K, V][DIM].
    const float *qkv;
    // [row][DIM / 2].
    const float *cosines;
    const float *sines;
    // Weights of the norms of each head, [DIM], or null where the model has none.
    const float *query_norm;
    const float *key_norm;
    u16 *queries;
    const u32 *position;
    const u32 *table;
    const u32 *pages;
    u32 heads;
    u32 kv_heads;
    float epsilon;
    u32 unused;
};

// Grid: rows, heads of queries, K and V by heads of a thread block. A head is DIM / 4 threads, each with elements 2i, 2i + 1
// and the two that they are rotated with.
template <u32 DIM> INLINE void rotate_and_store(const Rotate &r)
{
    constexpr u32 THREADS = DIM / 4;
    start_the_next_kernel();
    const u32 row = blockIdx.x, position = r.position[row];
    const u32 head = blockIdx.y * (blockDim.x / THREADS) + threadIdx.x / THREADS;
    const u32 heads = r.heads + 2 * r.kv_heads;
    const u32 at = threadIdx.x % THREADS * 2;
    const bool query = head < r.heads, value = head >= r.heads + r.kv_heads;
    if (position == NO_POSITION || head >= heads) {
        wait_for_the_kernel_before();
        return;
    }
    u16 *to;
    if (query) {
        to = r.queries + (row * (u64)r.heads + head) * DIM;
    } else {
        const u32 kv_head = value ? head - r.heads - r.kv_heads : head - r.heads;
        const u32 index = divide(position, r.pool.page_tokens), slot = position - index * r.pool.page_tokens.value;
        const u64 page = r.pages[r.table[row] + index];
        to = (u16 *)r.pool.start[value] + (page * r.pool.page + kv_head * r.pool.head + slot * r.pool.token) * DIM;
    }
    const u64 angle = row * (u64)(DIM / 2) + at;
    const float2 c = *(const float2 *)(r.cosines + angle), s = *(const float2 *)(r.sines + angle);
    wait_for_the_kernel_before();

    const float *from = r.qkv + (row * (u64)heads + head) * DIM + at;
    float2 low = *(const float2 *)from, high = *(const float2 *)(from + DIM / 2);

    const float *weight = query ? r.query_norm : value ? nullptr : r.key_norm;
    if (weight) {
        float sum = __fmaf_rn(high.y, high.y, __fmaf_rn(high.x, high.x, __fmaf_rn(low.y, low.y, __fmul_rn(low.x, low.x))));
        // The threads of a head are side by side in a warp, and all of them are here.
        const u32 threads = THREADS == 32 ? 0xffffffff : 0xffff << (threadIdx.x & 16);
#pragma unroll
        for (int distance = THREADS / 2; distance > 0; distance /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(threads, sum, distance));
        const float factor = rsqrtf(__fmaf_rn(sum, 1.0f / DIM, r.epsilon));
        const float2 a = *(const float2 *)(weight + at), b = *(const float2 *)(weight + at + DIM / 2);
        low = make_float2(low.x * factor * a.x, low.y * factor * a.y);
        high = make_float2(high.x * factor * b.x, high.y * factor * b.y);
    }
    if (!value) {
        const float2 l = low, h = high;
        low = make_float2(__fmaf_rn(l.x, c.x, -__fmul_rn(h.x, s.x)), __fmaf_rn(l.y, c.y, -__fmul_rn(h.y, s.y)));
        high = make_float2(__fmaf_rn(h.x, c.x, __fmul_rn(l.x, s.x)), __fmaf_rn(h.y, c.y, __fmul_rn(l.y, s.y)));
    }

    *(u32 *)(to + at) = bf16_pair(low.x, low.y);
    *(u32 *)(to + at + DIM / 2) = bf16_pair(high.x, high.y);
}

extern "C" __global__ void rotate_and_store_64(const __grid_constant__ Rotate rotate)
{
    rotate_and_store<64>(rotate);
}

extern "C" __global__ void rotate_and_store_128(const __grid_constant__ Rotate rotate)
{
    rotate_and_store<128>(rotate);
}

// ---- Greedy sampling

// A number that is larger for a larger logit, and for the lower index of equal ones. NaN is below everything.
INLINE u64 rank_of(float logit, u32 index)
{
    // -0 becomes 0.
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    const u32 order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    return (u64)(logit == logit ? order : 0) << 32 | ~index;
}

INLINE u64 warp_highest(u64 rank)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        rank = max(rank, __shfl_xor_sync(0xffffffff, rank, distance));
    return rank;
}

// Parts of a row, one per thread of a warp in the end.
constexpr u32 PARTS = 32;
constexpr u32 ARGMAX_THREADS = 256;

// The highest of each part of each row, [row][part]. Grid: rows, parts.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax_parts(const float *logits, u64 *highest, u32 vocabulary)
{
    follow();
    const float *row = logits + blockIdx.x * (u64)vocabulary;
    // A row begins anywhere, its vectors at the first multiple of 16 bytes. What is before and after them is in part 0.
    const u32 before = min((u32)(-(u64)row / sizeof(float) % 4), vocabulary);
    const u32 vectors = (vocabulary - before) / 4, each = (vectors + PARTS - 1) / PARTS;
    u64 best = 0;
    if (blockIdx.y == 0) {
        const u32 i = threadIdx.x, after = before + 4 * vectors + i;
        if (i < before)
            best = rank_of(row[i], i);
        if (after < vocabulary)
            best = max(best, rank_of(row[after], after));
    }
    const u32 end = min((blockIdx.y + 1) * each, vectors);
#pragma unroll 4
    for (u32 i = blockIdx.y * each + threadIdx.x; i < end; i += ARGMAX_THREADS) {
        const float4 v = ((const float4 *)(row + before))[i];
        const u32 index = before + 4 * i;
        best = max(best, max(rank_of(v.x, index), rank_of(v.y, index + 1)));
        best = max(best, max(rank_of(v.z, index + 2), rank_of(v.w, index + 3)));
    }
    __shared__ u64 bests[ARGMAX_THREADS / 32];
    best = warp_highest(best);
    if (threadIdx.x % 32 == 0)
        bests[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x < 32) {
        best = warp_highest(threadIdx.x < ARGMAX_THREADS / 32 ? bests[threadIdx.x] : 0);
        if (threadIdx.x == 0)
            highest[blockIdx.x * PARTS + blockIdx.y] = best;
    }
}

// Grid: rows. Thread blocks of a warp.
extern "C" __global__ void __launch_bounds__(PARTS) argmax_merge(const u64 *parts, u32 *highest)
{
    follow();
    const u64 best = warp_highest(parts[blockIdx.x * PARTS + threadIdx.x]);
    if (threadIdx.x == 0)
        highest[blockIdx.x] = ~(u32)best;
}

// ---- What a batch is told of

// Copies `vectors` vectors, from the host's memory too. Grid: enough thread blocks of any size.
extern "C" __global__ void copy_words(const uint4 *source, uint4 *target, u32 vectors)
{
    follow();
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < vectors)
        target[at] = source[at];
}
