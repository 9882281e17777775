// Digests of parts of pages: XXH3-64 of each block, mixed with its place, and added up (see `digest.rs`).
//
// A C compiler compiles this too, for the tests, which run it on a CPU, one thread after the other. So it keeps to what C and
// CUDA share, but for shuffles between threads: without them, the first of the threads that share a block does the work of all.
//
// XXH3 (xxHash's specification, doc/xxhash_spec.md) of more than 240 bytes keeps eight sums of 64 bits, to each of which every
// stripe of 64 bytes adds its words. Four threads share a block, each with two neighbouring sums, which take nothing from the
// other six.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __cplusplus
#define EXPORTED extern "C"
// For what is seldom called, so that it takes no registers from what is not.
#define APART __noinline__
#else
#define EXPORTED
#define APART
#endif

// Every access to memory. The tests' own look at each.
#ifndef LOAD
#define LOAD(pointer) (*(pointer))
#define STORE(pointer, value) (*(pointer) = (value))
#define ADD_AT_ONCE(pointer, value) atomicAdd(pointer, value)
#endif

// Threads of a block of the grid.
#define THREADS 128
// Threads of a block of K and V.
#define SHARES 4
// Blocks that a thread of the second kernel adds up.
#define TERMS 8

// Stripes after which the sums are scrambled.
#define ROUND 16
// Stripes that a thread loads before it uses the first.
#define EACH 16
// Bytes of the longest value that has a formula of its own.
#define SHORT 240

// Division by a number that the host knows, exact for dividends below 2^31: (n * multiplier) >> shift.
typedef struct {
    u32 value;
    u32 multiplier;
    u32 shift;
} Divisor;

// Where the rows of K, or of V, lie. In bytes.
typedef struct {
    u64 start;
    u64 page;
    u64 head;
    u64 layer;
    u64 token;
    u32 row;
    // Pieces of 16 bytes in a row, where rows consist of such.
    Divisor pieces;
} Side;

typedef struct {
    Side sides[2];
    // The model's number of the pool's first head.
    u64 first_head;
} Pool;

// Layers and heads of one page. A block of it is a head of a layer, heads first.
typedef struct {
    // Of the page in what is digested.
    u64 index;
    u32 page;
    u32 tokens;
    u32 first_layer;
    u32 layers;
    u32 first_head;
    u32 heads;
} Part;

// A block's rows of K and then of V, as if they were one behind the other.
typedef struct {
    u64 address[2];
    u32 length;
    // Bytes of K.
    u32 split;
} Rows;

// ---- XXH3 ----

// The default secret, as little-endian words.
static __constant__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB,
    0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0, 0xCB00C391BB52283C, 0xA32E531B8B65D088,
    0x4EF90DA297486471, 0xD8ACDEA946EF1938, 0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A,
    0x647378D9C97E9FC8, 0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};

#define PRIME_32_1 0x9E3779B1
#define PRIME_32_2 0x85EBCA77
#define PRIME_32_3 0xC2B2AE3D
#define PRIME_64_1 0x9E3779B185EBCA87
#define PRIME_64_2 0xC2B2AE3D27D4EB4F
#define PRIME_64_3 0x165667B19E3779F9
#define PRIME_64_4 0x85EBCA77C2B2AE63
#define PRIME_64_5 0x27D4EB2F165667C5

// What the eight sums begin as.
static __constant__ const u64 FIRST[8] = {
    PRIME_32_3, PRIME_64_1, PRIME_64_2, PRIME_64_3, PRIME_64_4, PRIME_32_2, PRIME_64_5, PRIME_32_1,
};

// Eight bytes from the middle of two words, the first of which is skipped to this byte, from 1 to 7.
static __device__ __forceinline__ u64 between(u64 low, u64 high, u32 byte)
{
    return low >> 8 * byte | high << (64 - 8 * byte);
}

static __device__ __forceinline__ u64 secret(u32 byte)
{
    u32 word = byte / 8;
    return byte % 8 == 0 ? SECRET[word] : between(SECRET[word], SECRET[word + 1], byte % 8);
}

// The halves of a product, one over the other.
static __device__ __forceinline__ u64 fold(u64 a, u64 b)
{
    return a * b ^ __umul64hi(a, b);
}

static __device__ __forceinline__ u64 avalanche(u64 hash)
{
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

static __device__ __forceinline__ u64 older_avalanche(u64 hash)
{
    hash = (hash ^ hash >> 33) * PRIME_64_2;
    hash = (hash ^ hash >> 29) * PRIME_64_3;
    return hash ^ hash >> 32;
}

static __device__ __forceinline__ u64 swapped(u64 value)
{
    u64 result = 0;
    for (u32 byte = 0; byte < 8; byte++)
        result = result << 8 | (value >> 8 * byte & 0xff);
    return result;
}

static __device__ __forceinline__ u64 turned(u64 value, u32 left)
{
    return value << left | value >> (64 - left);
}

// Adds a word of a stripe to its sum, and to its neighbour's sum.
static __device__ __forceinline__ void accumulate(u64 *own, u64 *other, u64 word, u64 key)
{
    u64 mixed = word ^ key;
    *own += (u64)(u32)mixed * (u32)(mixed >> 32);
    *other += word;
}

static __device__ __forceinline__ u64 scrambled(u64 sum, u64 key)
{
    return (sum ^ sum >> 47 ^ key) * PRIME_32_1;
}

// ---- a block's bytes ----

// The rows of one block.
static __device__ __forceinline__ Rows rows_of(const Pool *pool, const Part *part, u32 block)
{
    u32 layer = part->first_layer + block / part->heads;
    u32 head = part->first_head + block % part->heads;
    Rows rows;
#pragma unroll
    for (u32 side = 0; side < 2; side++) {
        const Side *at = &pool->sides[side];
        rows.address[side] = at->start + part->page * at->page + head * at->head + layer * at->layer;
    }
    rows.split = part->tokens * pool->sides[0].row;
    rows.length = rows.split + part->tokens * pool->sides[1].row;
    return rows;
}

// Sixteen bytes that lie in one row, at a multiple of 16.
static __device__ __forceinline__ ulonglong2 piece(const Pool *pool, const Rows *rows, u32 byte)
{
    u32 value = byte >= rows->split;
    const Side *k = &pool->sides[0], *v = &pool->sides[1];
    // Chosen one by one: parameters that are indexed would be copied to memory.
    u32 multiplier = value ? v->pieces.multiplier : k->pieces.multiplier;
    u32 shift = value ? v->pieces.shift : k->pieces.shift;
    u32 pieces = value ? v->pieces.value : k->pieces.value;
    u64 step = value ? v->token : k->token;
    u64 first = value ? rows->address[1] : rows->address[0];
    u32 number = (value ? byte - rows->split : byte) / 16;
    u32 token = (u32)(((u64)number * multiplier) >> shift);
    return __ldcs((const ulonglong2 *)(first + token * step + 16 * (number - token * pieces)));
}

static __device__ __forceinline__ u64 byte_at(const Pool *pool, const Rows *rows, u32 byte)
{
    u32 side = byte >= rows->split;
    const Side *at = &pool->sides[side];
    u32 number = byte - (side ? rows->split : 0);
    return LOAD((const u8 *)(rows->address[side] + number / at->row * at->token + number % at->row));
}

static __device__ __forceinline__ u64 bytes_at(const Pool *pool, const Rows *rows, u32 byte, u32 count)
{
    u64 value = 0;
    for (u32 i = 0; i < count; i++)
        value |= byte_at(pool, rows, byte + i) << 8 * i;
    return value;
}

// ---- any block, by one thread, a byte at a time ----

static __device__ __forceinline__ u64 mixed_16(const Pool *pool, const Rows *rows, u32 byte, u32 key)
{
    return fold(bytes_at(pool, rows, byte, 8) ^ secret(key), bytes_at(pool, rows, byte + 8, 8) ^ secret(key + 8));
}

static __device__ APART u64 hash_of_16(const Pool *pool, const Rows *rows)
{
    u32 length = rows->length;
    if (length > 8) {
        u64 low = bytes_at(pool, rows, 0, 8) ^ secret(24) ^ secret(32);
        u64 high = bytes_at(pool, rows, length - 8, 8) ^ secret(40) ^ secret(48);
        return avalanche(length + swapped(low) + high + fold(low, high));
    }
    if (length >= 4) {
        u64 value = bytes_at(pool, rows, length - 4, 4) + (bytes_at(pool, rows, 0, 4) << 32);
        value ^= secret(8) ^ secret(16);
        value ^= turned(value, 49) ^ turned(value, 24);
        value *= 0x9FB21C651E98DF25;
        value = (value ^ ((value >> 35) + length)) * 0x9FB21C651E98DF25;
        return value ^ value >> 28;
    }
    if (length > 0) {
        u64 value = byte_at(pool, rows, 0) << 16 | byte_at(pool, rows, length / 2) << 24 |
                    byte_at(pool, rows, length - 1) | (u64)length << 8;
        return older_avalanche(value ^ ((secret(0) ^ secret(4)) & 0xffffffff));
    }
    return older_avalanche(secret(56) ^ secret(64));
}

static __device__ APART u64 hash_of_240(const Pool *pool, const Rows *rows)
{
    u32 length = rows->length;
    u64 hash = length * PRIME_64_1;
    if (length <= 128) {
        // From both ends to the middle.
        for (u32 pair = 0; 32 * pair < length; pair++) {
            hash += mixed_16(pool, rows, 16 * pair, 32 * pair);
            hash += mixed_16(pool, rows, length - 16 * (pair + 1), 32 * pair + 16);
        }
        return avalanche(hash);
    }
    for (u32 i = 0; i < 8; i++)
        hash += mixed_16(pool, rows, 16 * i, 16 * i);
    hash = avalanche(hash);
    for (u32 i = 8; i < length / 16; i++)
        hash += mixed_16(pool, rows, 16 * i, 16 * (i - 8) + 3);
    return avalanche(hash + mixed_16(pool, rows, length - 16, 136 - 17));
}

static __device__ __forceinline__ void add_stripe(const Pool *pool, const Rows *rows, u32 byte, u32 key, u64 *sums)
{
    for (u32 i = 0; i < 8; i++)
        accumulate(&sums[i], &sums[i ^ 1], bytes_at(pool, rows, byte + 8 * i, 8), secret(key + 8 * i));
}

static __device__ APART u64 hash_of_more(const Pool *pool, const Rows *rows)
{
    u64 sums[8];
    for (u32 i = 0; i < 8; i++)
        sums[i] = FIRST[i];
    // The last byte is always in the last stripe, which overlaps what is before it.
    u32 stripes = (rows->length - 1) / 64;
    for (u32 stripe = 0; stripe < stripes; stripe++) {
        add_stripe(pool, rows, 64 * stripe, 8 * (stripe % ROUND), sums);
        if (stripe % ROUND == ROUND - 1)
            for (u32 i = 0; i < 8; i++)
                sums[i] = scrambled(sums[i], SECRET[16 + i]);
    }
    add_stripe(pool, rows, rows->length - 64, 121, sums);
    u64 hash = rows->length * PRIME_64_1;
    for (u32 i = 0; i < 8; i += 2)
        hash += fold(sums[i] ^ secret(11 + 8 * i), sums[i + 1] ^ secret(19 + 8 * i));
    return avalanche(hash);
}

// ---- blocks of more than SHORT bytes whose rows consist of pieces of 16 bytes ----

// What the pair of sums of this share comes to.
static __device__ __forceinline__ u64 fold_of(const Pool *pool, const Rows *rows, u32 share)
{
    // The words of the secret that these two sums meet.
    u64 keys[ROUND + 2];
#pragma unroll
    for (u32 i = 0; i < ROUND + 2; i++)
        keys[i] = SECRET[2 * share + i];
    u64 a = FIRST[2 * share];
    u64 b = FIRST[2 * share + 1];
    u32 own = 16 * share;
    // The last byte is always in the last stripe, which overlaps what is before it.
    u32 stripes = (rows->length - 1) / 64;
    ulonglong2 last = piece(pool, rows, rows->length - 64 + own);
    u32 first = 0;
    for (; first + ROUND <= stripes; first += ROUND) {
#pragma unroll
        for (u32 from = 0; from < ROUND; from += EACH) {
            ulonglong2 words[EACH];
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                words[i] = piece(pool, rows, 64 * (first + from + i) + own);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                accumulate(&a, &b, words[i].x, keys[from + i]);
                accumulate(&b, &a, words[i].y, keys[from + i + 1]);
            }
        }
        a = scrambled(a, keys[ROUND]);
        b = scrambled(b, keys[ROUND + 1]);
    }
#pragma unroll
    for (u32 from = 0; from < ROUND; from += EACH) {
        ulonglong2 words[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (first + from + i < stripes)
                words[i] = piece(pool, rows, 64 * (first + from + i) + own);
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (first + from + i < stripes) {
                accumulate(&a, &b, words[i].x, keys[from + i]);
                accumulate(&b, &a, words[i].y, keys[from + i + 1]);
            }
    }
    // The secret's bytes from 121 on, and from 11 on.
    accumulate(&a, &b, last.x, between(keys[15], keys[16], 1));
    accumulate(&b, &a, last.y, between(keys[16], keys[17], 1));
    return fold(a ^ between(keys[1], keys[2], 3), b ^ between(keys[2], keys[3], 3));
}

// XXH3 of 32 bytes: the block's place and its hash.
static __device__ __forceinline__ u64 term_of(const Pool *pool, const Part *part, u32 block, u64 hash)
{
    u64 layer = part->first_layer + block / part->heads;
    u64 head = pool->first_head + part->first_head + block % part->heads;
    return avalanche(32 * PRIME_64_1 + fold(part->index ^ SECRET[0], layer ^ SECRET[1]) +
                     fold(head ^ SECRET[2], hash ^ SECRET[3]));
}

static __device__ __forceinline__ Part part_at(const Part *parts)
{
    Part part;
    part.index = LOAD(&parts->index);
    part.page = LOAD(&parts->page);
    part.tokens = LOAD(&parts->tokens);
    part.first_layer = LOAD(&parts->first_layer);
    part.layers = LOAD(&parts->layers);
    part.first_head = LOAD(&parts->first_head);
    part.heads = LOAD(&parts->heads);
    return part;
}

// ---- kernels: a grid of (parts, threads over blocks) ----

// Adds the terms of each part's blocks to the part's digest, if they are of more than SHORT bytes and their rows consist of
// pieces of 16 bytes. Four threads share a block.
EXPORTED __global__ void __launch_bounds__(THREADS) digest_long(const __grid_constant__ Pool pool, const Part *parts, u64 *digests)
{
    u32 number = blockIdx.y * THREADS + threadIdx.x;
    u32 share = number % SHARES;
    u32 block = number / SHARES;
    Part part = part_at(&parts[blockIdx.x]);
    u32 end = part.heads * part.layers;
    u32 length = part.tokens * (pool.sides[0].row + pool.sides[1].row);
    // The same for all threads of a block of the grid, so that all of them meet below.
    if (length <= SHORT || blockIdx.y * (THREADS / SHARES) >= end)
        return;
    u64 term = 0;
#ifdef __cplusplus
    // Threads behind the last block do the last one, and drop what it comes to.
    u32 present = block < end ? block : end - 1;
    Rows rows = rows_of(&pool, &part, present);
    u64 sum = fold_of(&pool, &rows, share);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (share == 0 && block < end)
        term = term_of(&pool, &part, block, avalanche(length * PRIME_64_1 + sum));
    // The terms of a warp are added up.
#pragma unroll
    for (u32 distance = SHARES; distance < 32; distance *= 2)
        term += __shfl_xor_sync(0xffffffff, term, distance);
    if (number % 32 != 0)
        return;
#else
    if (share != 0 || block >= end)
        return;
    Rows rows = rows_of(&pool, &part, block);
    u64 sum = length * PRIME_64_1;
    for (u32 each = 0; each < SHARES; each++)
        sum += fold_of(&pool, &rows, each);
    term = term_of(&pool, &part, block, avalanche(sum));
#endif
    ADD_AT_ONCE(digests + blockIdx.x, term);
}

// The same for all other blocks. With `wide`, rows consist of pieces of 16 bytes. A thread has several blocks.
EXPORTED __global__ void __launch_bounds__(THREADS)
    digest_rest(const __grid_constant__ Pool pool, const Part *parts, u32 wide, u64 *digests)
{
    Part part = part_at(&parts[blockIdx.x]);
    u32 block = (blockIdx.y * THREADS + threadIdx.x) * TERMS;
    u32 end = part.heads * part.layers;
    u32 length = part.tokens * (pool.sides[0].row + pool.sides[1].row);
    if (block >= end || (wide && length > SHORT))
        return;
    end = block + TERMS < end ? block + TERMS : end;
    u64 sum = 0;
    for (; block < end; block++) {
        Rows rows = rows_of(&pool, &part, block);
        u64 hash;
        if (length <= 16)
            hash = hash_of_16(&pool, &rows);
        else if (length <= SHORT)
            hash = hash_of_240(&pool, &rows);
        else
            hash = hash_of_more(&pool, &rows);
        sum += term_of(&pool, &part, block, hash);
    }
    ADD_AT_ONCE(digests + blockIdx.x, sum);
}
