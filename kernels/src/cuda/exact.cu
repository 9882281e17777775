// The CPU's math on a GPU, bit by bit: each sum in the CPU's order, each rounding where the CPU rounds.
//
// One thread per output, or per lane of a sum. No thread reads what another one of the same launch writes, so that threads may
// run one after the other: a C compiler compiles this too, for the tests, which run it on a CPU. It keeps to what C and CUDA
// share.
//
// To be compiled without contraction of products and sums (`--fmad=false`, `-ffp-contract=off`): a fused multiply-add is where
// `fmaf` says so. Division and square root are IEEE 754's.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __cplusplus
#define EXPORTED extern "C"
#else
#define EXPORTED
#endif

// Every access to memory. The tests' own look at each.
#ifndef LOAD
#define LOAD(pointer) (*(pointer))
#define STORE(pointer, value) (*(pointer) = (value))
#endif

// A thread's number in the second dimension of the grid. The first one counts rows.
#define COLUMN(threads) (blockIdx.y * (threads) + threadIdx.x)

#define THREADS 256
// Loads of a thread that are on their way together, in sums that wait for memory.
#define AT_ONCE 32

// ---- numbers ----

static __device__ __forceinline__ float from_bf16(u32 bits)
{
    return __uint_as_float(bits << 16);
}

static __device__ __forceinline__ float from_f16(u32 bits)
{
    u32 sign = (bits & 0x8000) << 16;
    u32 exponent = bits >> 10 & 0x1f;
    u32 fraction = bits & 0x3ff;
    if (exponent == 0)
        // A subnormal is fraction * 2^-24, which a float holds exactly.
        return __uint_as_float(__float_as_uint((float)fraction / 16777216.0f) | sign);
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000 | fraction << 13);
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static __device__ __forceinline__ float from_f32(float value)
{
    return value;
}

// The nearest bf16, ties to even. NaN stays NaN.
static __device__ __forceinline__ u16 to_bf16(float value)
{
    u32 bits = __float_as_uint(value);
    if (value != value)
        return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// As `math::exp`.
static __device__ __forceinline__ float exponential(float x)
{
    float high = x > 88.0f ? 88.0f : x;
    float clamped = high < -87.0f ? -87.0f : high;
    float rounded = fmaf(clamped, 1.44269504f, 12582912.0f);
    float n = rounded - 12582912.0f;
    float r = fmaf(n, -(355.0f / 512.0f), clamped);
    r = fmaf(n, 2.1219444e-4f, r);
    float sum = 1.0f / 5040.0f;
    sum = fmaf(r, sum, 1.0f / 720.0f);
    sum = fmaf(r, sum, 1.0f / 120.0f);
    sum = fmaf(r, sum, 1.0f / 24.0f);
    sum = fmaf(r, sum, 1.0f / 6.0f);
    sum = fmaf(r, sum, 0.5f);
    sum = fmaf(r, sum, 1.0f);
    sum = fmaf(r, sum, 1.0f);
    float scale = __uint_as_float((__float_as_uint(rounded) << 23) + 0x3f800000);
    return x < -87.0f ? 0.0f : sum * scale;
}

// Eight lanes in the order of `math::lanes::tree`.
static __device__ __forceinline__ float tree(const float *lanes)
{
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Eight elements from an address that is a multiple of 16 bytes.
static __device__ __forceinline__ void eight_f32(const float *source, float *wide)
{
    float4 low = LOAD((const float4 *)source);
    float4 high = LOAD((const float4 *)source + 1);
    wide[0] = low.x, wide[1] = low.y, wide[2] = low.z, wide[3] = low.w;
    wide[4] = high.x, wide[5] = high.y, wide[6] = high.z, wide[7] = high.w;
}

#define EIGHT(name, widen)                                                                                             \
    static __device__ __forceinline__ void name(const u16 *source, float *wide)                                        \
    {                                                                                                                  \
        uint4 pairs = LOAD((const uint4 *)source);                                                                     \
        wide[0] = widen(pairs.x & 0xffff), wide[1] = widen(pairs.x >> 16);                                             \
        wide[2] = widen(pairs.y & 0xffff), wide[3] = widen(pairs.y >> 16);                                             \
        wide[4] = widen(pairs.z & 0xffff), wide[5] = widen(pairs.z >> 16);                                             \
        wide[6] = widen(pairs.w & 0xffff), wide[7] = widen(pairs.w >> 16);                                             \
    }

EIGHT(eight_bf16, from_bf16)
EIGHT(eight_f16, from_f16)

// ---- rows ----

// The table's rows of the tokens from `first` on. Other tokens have rows of zeros.
#define EMBED(name, type, widen)                                                                                       \
    EXPORTED __global__ void __launch_bounds__(THREADS)                                                                \
        name(const type *table, const u32 *tokens, u32 first, u32 held, u32 width, float *out)                         \
    {                                                                                                                  \
        u32 column = COLUMN(THREADS);                                                                                  \
        if (column >= width)                                                                                           \
            return;                                                                                                    \
        u32 entry = LOAD(tokens + blockIdx.x) - first;                                                                 \
        float value = 0.0f;                                                                                            \
        if (entry < held)                                                                                              \
            value = widen(LOAD(table + (u64)entry * width + column));                                                  \
        STORE(out + (u64)blockIdx.x * width + column, value);                                                          \
    }

EMBED(embed_f32, float, from_f32)
EMBED(embed_bf16, u16, from_bf16)
EMBED(embed_f16, u16, from_f16)

// The eight lanes of each head's sum of squares. A thread is a lane of a head.
EXPORTED __global__ void __launch_bounds__(THREADS)
    square_lanes(const float *data, u32 stride, u32 heads, u32 width, u64 lanes, float *sums)
{
    u64 lane = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (lane >= lanes)
        return;
    u64 head = lane / 8;
    const float *x = data + head / heads * stride + head % heads * width + lane % 8;
    float sum = 0.0f;
    u32 i = 0;
    // Many loads are on their way before the first is used.
    for (; i + 8 * AT_ONCE <= width; i += 8 * AT_ONCE) {
        float values[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            values[j] = LOAD(x + i + 8 * j);
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            sum = fmaf(values[j], values[j], sum);
    }
    for (; i < width; i += 8) {
        float value = LOAD(x + i);
        sum = fmaf(value, value, sum);
    }
    STORE(sums + lane, sum);
}

// What a head is multiplied by, from its eight lanes.
static __device__ __forceinline__ float inverse_rms(const float *sums, u32 width, float epsilon)
{
    float lanes[8];
    eight_f32(sums, lanes);
    return 1.0f / sqrtf(tree(lanes) / (float)width + epsilon);
}

EXPORTED __global__ void __launch_bounds__(THREADS)
    rms_norm(const float *x, const float *sums, const float *weight, float epsilon, u32 width, float *y)
{
    u32 column = COLUMN(THREADS);
    if (column >= width)
        return;
    float scale = inverse_rms(sums + 8 * (u64)blockIdx.x, width, epsilon);
    u64 at = (u64)blockIdx.x * width + column;
    STORE(y + at, LOAD(x + at) * scale * LOAD(weight + column));
}

// A thread is a pair of a head's dimensions. Without `weight` there is no norm.
EXPORTED __global__ void __launch_bounds__(THREADS)
    rotate_heads(float *data, u32 stride, u32 heads, u32 head_dim, const float *weight, float epsilon, const float *sums,
                 const float *cosines, const float *sines)
{
    u32 pairs = head_dim / 2;
    u32 column = COLUMN(THREADS);
    u32 head = column / pairs;
    u32 pair = column % pairs;
    if (head >= heads)
        return;
    u64 row = blockIdx.x;
    float *first = data + row * stride + (u64)head * head_dim + pair;
    float *second = first + pairs;
    float a = LOAD(first);
    float b = LOAD(second);
    if (weight != 0) {
        float scale = inverse_rms(sums + 8 * (row * heads + head), head_dim, epsilon);
        a = a * scale * LOAD(weight + pair);
        b = b * scale * LOAD(weight + pairs + pair);
    }
    float cosine = LOAD(cosines + row * pairs + pair);
    float sine = LOAD(sines + row * pairs + pair);
    STORE(first, fmaf(a, cosine, -(b * sine)));
    STORE(second, fmaf(b, cosine, a * sine));
}

#define GATED(name, argument)                                                                                          \
    EXPORTED __global__ void __launch_bounds__(THREADS) name(const float *gate_up, u32 width, float *y)                \
    {                                                                                                                  \
        u32 column = COLUMN(THREADS);                                                                                  \
        if (column >= width)                                                                                           \
            return;                                                                                                    \
        const float *row = gate_up + 2 * (u64)blockIdx.x * width + column;                                             \
        float gate = LOAD(row);                                                                                        \
        float up = LOAD(row + width);                                                                                  \
        STORE(y + (u64)blockIdx.x * width + column, gate / (1.0f + exponential(argument)) * up);                       \
    }

GATED(gated_silu, -gate)
GATED(gated_gelu_tanh, -1.5957692f * fmaf(gate * gate * gate, 0.044715f, gate))

EXPORTED __global__ void __launch_bounds__(THREADS) add(float *x, const float *y, u64 length)
{
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (at < length)
        STORE(x + at, LOAD(x + at) + LOAD(y + at));
}

EXPORTED __global__ void __launch_bounds__(THREADS)
    select_rows(const float *x, const u32 *indices, u32 width, float *y)
{
    u32 column = COLUMN(THREADS);
    if (column < width)
        STORE(y + (u64)blockIdx.x * width + column, LOAD(x + (u64)LOAD(indices + blockIdx.x) * width + column));
}

// ---- the greatest of each row ----

// Threads of a row. Each takes every such element.
#define SHARES 256

// The greatest of a share and the lowest place where it is. -inf and 0 where nothing is greater than -inf.
EXPORTED __global__ void __launch_bounds__(SHARES) greatest_of_shares(const float *x, u32 width, float *values, u32 *places)
{
    const float *row = x + (u64)blockIdx.x * width;
    float greatest = __uint_as_float(0xff800000);
    u32 place = 0;
    u32 i = threadIdx.x;
    for (; i + SHARES * (AT_ONCE - 1) < width; i += SHARES * AT_ONCE) {
        float values[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            values[j] = LOAD(row + i + SHARES * j);
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            if (values[j] > greatest) {
                greatest = values[j];
                place = i + SHARES * j;
            }
    }
    for (; i < width; i += SHARES) {
        float value = LOAD(row + i);
        if (value > greatest) {
            greatest = value;
            place = i;
        }
    }
    STORE(values + blockIdx.x * SHARES + threadIdx.x, greatest);
    STORE(places + blockIdx.x * SHARES + threadIdx.x, place);
}

EXPORTED __global__ void __launch_bounds__(32)
    greatest_of_rows(const float *values, const u32 *places, u32 rows, u32 *out)
{
    u32 row = blockIdx.x * 32 + threadIdx.x;
    if (row >= rows)
        return;
    float greatest = __uint_as_float(0xff800000);
    u32 place = 0;
#pragma unroll 32
    for (u32 i = row * SHARES; i < (row + 1) * SHARES; i++) {
        float value = LOAD(values + i);
        u32 at = LOAD(places + i);
        if (value > greatest || (value == greatest && at < place)) {
            greatest = value;
            place = at;
        }
    }
    STORE(out + row, place);
}

// ---- the matrix product ----

#define LINEAR_THREADS 32

// The next `ahead` vectors of weights, all of which are loaded before the first is used.
#define LINEAR_STEP(eight, tile, ahead)                                                                                \
    {                                                                                                                  \
        float weights[ahead][8];                                                                                       \
        _Pragma("unroll") for (u32 step = 0; step < ahead; step++) eight(row + k + 8 * step, weights[step]);           \
        _Pragma("unroll") for (u32 step = 0; step < ahead; step++)                                                     \
        {                                                                                                              \
            _Pragma("unroll") for (u32 i = 0; i < tile; i++)                                                           \
            {                                                                                                          \
                float values[8];                                                                                       \
                eight_f32(input + (u64)i * inputs + k + 8 * step, values);                                             \
                _Pragma("unroll") for (u32 j = 0; j < 8; j++) sums[i] = fmaf(values[j], weights[step][j], sums[i]);    \
            }                                                                                                          \
        }                                                                                                              \
    }

// One chain of multiply-adds over the inner dimension for each output. A thread has one output of `tile` rows, of which there
// are as many at least. The last tile may overlap the one before it, and then writes the same once more. `ahead` is how many
// vectors of weights are on their way together.
#define LINEAR(name, type, widen, eight, tile, ahead)                                                                  \
    EXPORTED __global__ void __launch_bounds__(LINEAR_THREADS)                                                         \
        name(const float *__restrict__ x, u32 rows, const type *__restrict__ weight, u32 outputs, u32 inputs,          \
             float *__restrict__ y)                                                                                    \
    {                                                                                                                  \
        u32 output = COLUMN(LINEAR_THREADS);                                                                           \
        if (output >= outputs)                                                                                         \
            return;                                                                                                    \
        u32 first = blockIdx.x * tile < rows - tile ? blockIdx.x * tile : rows - tile;                                 \
        const float *input = x + (u64)first * inputs;                                                                  \
        const type *row = weight + (u64)output * inputs;                                                               \
        float sums[tile];                                                                                              \
        _Pragma("unroll") for (u32 i = 0; i < tile; i++) sums[i] = 0.0f;                                               \
        u32 k = 0;                                                                                                     \
        if (inputs % 8 == 0) {                                                                                         \
            for (; k + 8 * ahead <= inputs; k += 8 * ahead)                                                            \
                LINEAR_STEP(eight, tile, ahead)                                                                        \
            for (; k < inputs; k += 8)                                                                                 \
                LINEAR_STEP(eight, tile, 1)                                                                            \
        }                                                                                                              \
        for (; k < inputs; k++) {                                                                                      \
            float value = widen(LOAD(row + k));                                                                        \
            _Pragma("unroll") for (u32 i = 0; i < tile; i++) sums[i] =                                                 \
                fmaf(LOAD(input + (u64)i * inputs + k), value, sums[i]);                                               \
        }                                                                                                              \
        _Pragma("unroll") for (u32 i = 0; i < tile; i++) STORE(y + (u64)(first + i) * outputs + output, sums[i]);      \
    }

LINEAR(linear_f32_1, float, from_f32, eight_f32, 1, 8)
LINEAR(linear_f32_2, float, from_f32, eight_f32, 2, 8)
LINEAR(linear_f32_8, float, from_f32, eight_f32, 8, 2)
LINEAR(linear_bf16_1, u16, from_bf16, eight_bf16, 1, 8)
LINEAR(linear_bf16_2, u16, from_bf16, eight_bf16, 2, 8)
LINEAR(linear_bf16_8, u16, from_bf16, eight_bf16, 8, 2)
LINEAR(linear_f16_1, u16, from_f16, eight_f16, 1, 8)
LINEAR(linear_f16_2, u16, from_f16, eight_f16, 2, 8)
LINEAR(linear_f16_8, u16, from_f16, eight_f16, 8, 2)

// ---- K and V ----

// As `KvView`.
typedef struct {
    u64 start[2];
    u64 page[2];
    u64 head[2];
    u64 token[2];
    u32 page_tokens;
    u32 element;
} KvView;

// Division by a number that the host knows, exact for dividends below 2^31: (n * multiplier) >> shift.
typedef struct {
    u32 value;
    u32 multiplier;
    u32 shift;
} Divisor;

// Address of a row of K or V of one head, whose first page would begin at `start`. `pages` are those of the row's sequence, and
// `tokens` divides by the tokens of a page.
static __device__ __forceinline__ u64 kv_row(const KvView *kv, u32 side, u64 start, Divisor tokens, const u32 *pages,
                                             u32 position)
{
    u32 number = (u32)(((u64)position * tokens.multiplier) >> tokens.shift);
    return start + LOAD(pages + number) * kv->page[side] + (position - number * tokens.value) * kv->token[side];
}

// K and V of each row to their place in the pool. A thread is an element of K or V.
EXPORTED __global__ void __launch_bounds__(THREADS)
    write_kv(const float *data, u32 stride, u32 first_key, u32 first_value, u32 heads, u32 head_dim, const u32 *positions,
             const u32 *tables, const u32 *pages, const __grid_constant__ KvView kv, const Divisor tokens)
{
    u32 width = heads * head_dim;
    u32 column = COLUMN(THREADS);
    if (column >= 2 * width)
        return;
    u32 side = column >= width;
    u32 at = column - side * width;
    float value = LOAD(data + (u64)blockIdx.x * stride + (side ? first_value : first_key) + at);
    u64 start = kv.start[side] + at / head_dim * kv.head[side];
    u64 row = kv_row(&kv, side, start, tokens, pages + LOAD(tables + blockIdx.x), LOAD(positions + blockIdx.x));
    if (kv.element == 4)
        STORE((float *)row + at % head_dim, value);
    else
        STORE((u16 *)row + at % head_dim, to_bf16(value));
}

// ---- attention: a grid of (rows, heads, threads over positions, blocks or dimensions) ----

// Positions of one step of the online softmax.
#define BLOCK 16

#define ATTENTION_THREADS 64
#define ATTENTION_INDEX (blockIdx.z * ATTENTION_THREADS + threadIdx.x)

// What lies in between, for one row's head: scores and then weights, each block's greatest score, sum of weights, and what
// is before it is multiplied by. `room` is the number of positions, a multiple of 16. A fourth number per block keeps scores
// at multiples of 16 bytes.
typedef struct {
    float *scores;
    float *maxima;
    float *added;
    float *corrections;
} Between;

static __device__ __forceinline__ Between between(float *scratch, u32 heads, u32 room)
{
    u32 blocks = room / BLOCK;
    Between all;
    all.scores = scratch + ((u64)blockIdx.x * heads + blockIdx.y) * (room + 4 * blocks);
    all.maxima = all.scores + room;
    all.added = all.maxima + blocks;
    all.corrections = all.added + blocks;
    return all;
}

// Positions that the row sees: its own and those before.
static __device__ __forceinline__ u32 seen_by_row(const u32 *positions, u32 room)
{
    u32 seen = LOAD(positions + blockIdx.x) + 1;
    return seen < room ? seen : room;
}

// The scores of a row's head. A thread is a position.
#define ATTENTION_SCORES(name, type, eight)                                                                            \
    EXPORTED __global__ void __launch_bounds__(ATTENTION_THREADS)                                                      \
        name(const float *queries, u32 stride, u32 heads, u32 group, u32 head_dim, float scale, const u32 *positions,  \
             const u32 *tables, const u32 *pages, const __grid_constant__ KvView kv, const Divisor tokens, float *scratch, u32 room) \
    {                                                                                                                  \
        u32 seen = seen_by_row(positions, room);                                                                       \
        if (ATTENTION_INDEX >= seen)                                                                                   \
            return;                                                                                                    \
        Between at = between(scratch, heads, room);                                                                    \
        const float *query = queries + (u64)blockIdx.x * stride + (u64)blockIdx.y * head_dim;                          \
        const u32 *own = pages + LOAD(tables + blockIdx.x);                                                            \
        u64 start = kv.start[0] + blockIdx.y / group * kv.head[0];                                                     \
        for (u32 position = ATTENTION_INDEX; position < seen; position += gridDim.z * ATTENTION_THREADS) {             \
            const type *key = (const type *)kv_row(&kv, 0, start, tokens, own, position);                         \
            float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};                                          \
            _Pragma("unroll 8") for (u32 i = 0; i < head_dim; i += 8)                                                  \
            {                                                                                                          \
                float a[8], b[8];                                                                                      \
                eight_f32(query + i, a);                                                                               \
                eight(key + i, b);                                                                                     \
                _Pragma("unroll") for (u32 j = 0; j < 8; j++) sums[j] = fmaf(a[j], b[j], sums[j]);                     \
            }                                                                                                          \
            STORE(at.scores + position, tree(sums) * scale);                                                           \
        }                                                                                                              \
    }

ATTENTION_SCORES(attention_scores_f32, float, eight_f32)
ATTENTION_SCORES(attention_scores_bf16, u16, eight_bf16)

// The greatest score of each block. NaN is none. A thread is a block.
EXPORTED __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_maxima(u32 heads, const u32 *positions, float *scratch, u32 room)
{
    u32 seen = seen_by_row(positions, room);
    Between at = between(scratch, heads, room);
    for (u32 block = ATTENTION_INDEX; block * BLOCK < seen; block += gridDim.z * ATTENTION_THREADS) {
        float greatest = __uint_as_float(0xff800000);
        for (u32 position = block * BLOCK; position < seen && position < (block + 1) * BLOCK; position++) {
            float score = LOAD(at.scores + position);
            greatest = score > greatest ? score : greatest;
        }
        STORE(at.maxima + block, greatest);
    }
}

// Turns each block's scores into weights, by the greatest score of the block and those before it. A thread is a block.
EXPORTED __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_weights(u32 heads, const u32 *positions, float *scratch, u32 room)
{
    u32 seen = seen_by_row(positions, room);
    Between at = between(scratch, heads, room);
    float before = __uint_as_float(0xff800000);
    u32 passed = 0;
    for (u32 block = ATTENTION_INDEX; block * BLOCK < seen; block += gridDim.z * ATTENTION_THREADS) {
        for (; passed + AT_ONCE <= block; passed += AT_ONCE) {
            float maxima[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                maxima[i] = LOAD(at.maxima + passed + i);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                before = maxima[i] > before ? maxima[i] : before;
        }
        for (; passed < block; passed++) {
            float score = LOAD(at.maxima + passed);
            before = score > before ? score : before;
        }
        float own = LOAD(at.maxima + block);
        float maximum = own > before ? own : before;
        float weights[BLOCK], lanes[8];
#pragma unroll
        for (u32 slot = 0; slot < BLOCK; slot++) {
            // What the row does not see weighs as a score of -inf.
            weights[slot] = __uint_as_float(0xff800000);
            if (block * BLOCK + slot < seen)
                weights[slot] = LOAD(at.scores + block * BLOCK + slot);
        }
#pragma unroll
        for (u32 slot = 0; slot < BLOCK; slot++) {
            weights[slot] = exponential(weights[slot] - maximum);
            if (block * BLOCK + slot < seen)
                STORE(at.scores + block * BLOCK + slot, weights[slot]);
        }
#pragma unroll
        for (u32 lane = 0; lane < 8; lane++)
            lanes[lane] = weights[lane] + weights[lane + 8];
        STORE(at.added + block, tree(lanes));
        STORE(at.corrections + block, exponential(before - maximum));
    }
}

// Blocks whose values are loaded before the first is used.
#define VALUE_BLOCKS 4

// Adds the values of the next blocks.
#define ATTENTION_STEP(type, widen, count, is_seen)                                                                    \
    {                                                                                                                  \
        float values[count * BLOCK], weights[count * BLOCK], added[count], corrections[count];                         \
        _Pragma("unroll") for (u32 slot = 0; slot < count * BLOCK; slot++)                                             \
        {                                                                                                              \
            u32 position = block * BLOCK + slot;                                                                       \
            values[slot] = 0.0f;                                                                                       \
            if (is_seen)                                                                                               \
                values[slot] = widen(LOAD((const type *)kv_row(&kv, 1, start, tokens, own, position)));                \
        }                                                                                                              \
        _Pragma("unroll") for (u32 i = 0; i < 2 * count; i++)                                                          \
            eight_f32(at.scores + block * BLOCK + 8 * i, weights + 8 * i);                                             \
        _Pragma("unroll") for (u32 i = 0; i < count; i++)                                                              \
        {                                                                                                              \
            added[i] = LOAD(at.added + block + i);                                                                     \
            corrections[i] = LOAD(at.corrections + block + i);                                                         \
        }                                                                                                              \
        _Pragma("unroll") for (u32 i = 0; i < count; i++)                                                              \
        {                                                                                                              \
            sum = fmaf(sum, corrections[i], added[i]);                                                                 \
            weighted = weighted * corrections[i];                                                                      \
            _Pragma("unroll") for (u32 slot = i * BLOCK; slot < (i + 1) * BLOCK; slot++)                               \
            {                                                                                                          \
                if (is_seen)                                                                                           \
                    weighted = fmaf(weights[slot], values[slot], weighted);                                            \
            }                                                                                                          \
        }                                                                                                              \
    }

// The weighted values over the sum of the weights. A thread is a dimension.
#define ATTENTION_VALUES(name, type, widen)                                                                            \
    EXPORTED __global__ void __launch_bounds__(ATTENTION_THREADS)                                                      \
        name(u32 heads, u32 group, u32 head_dim, const u32 *__restrict__ positions, const u32 *__restrict__ tables,    \
             const u32 *__restrict__ pages, const __grid_constant__ KvView kv, const Divisor tokens,                   \
             float *__restrict__ scratch, u32 room, float *__restrict__ out)                                           \
    {                                                                                                                  \
        u32 dimension = ATTENTION_INDEX;                                                                               \
        if (dimension >= head_dim)                                                                                     \
            return;                                                                                                    \
        u32 seen = seen_by_row(positions, room);                                                                       \
        Between at = between(scratch, heads, room);                                                                    \
        const u32 *own = pages + LOAD(tables + blockIdx.x);                                                            \
        u64 start = kv.start[1] + blockIdx.y / group * kv.head[1] + dimension * sizeof(type);                          \
        float sum = 0.0f, weighted = 0.0f;                                                                             \
        u32 block = 0;                                                                                                 \
        for (; (block + VALUE_BLOCKS) * BLOCK <= seen; block += VALUE_BLOCKS)                                          \
            ATTENTION_STEP(type, widen, VALUE_BLOCKS, 1)                                                               \
        for (; block * BLOCK < seen; block++)                                                                          \
            ATTENTION_STEP(type, widen, 1, block * BLOCK + slot < seen)                                                \
        float inverse = 1.0f / sum;                                                                                    \
        STORE(out + ((u64)blockIdx.x * heads + blockIdx.y) * head_dim + dimension, weighted * inverse);                \
    }

ATTENTION_VALUES(attention_values_f32, float, from_f32)
ATTENTION_VALUES(attention_values_bf16, u16, from_bf16)
