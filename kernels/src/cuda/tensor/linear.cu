// Y = X W^T for bf16 weights, on Hopper's tensor cores.
//
// Weights are packed in tiles of 64 rows and blocks of 64 columns, 8 KiB each, in the order that the tensor cores read them in
// from shared memory ("128-byte swizzle": of each row of 128 bytes, the 16 bytes at position p are those of chunk p ^ (row % 8)).
// The blocks of a tile lie one after the other along K, so that a tile is one contiguous stream.
//
//            K ->
//        +--------+--------+--------+--------+
//  tile  | 8 KiB  | 8 KiB  | 8 KiB  | 8 KiB  |      a slice is a range of blocks
//        +--------+--------+--------+--------+
//        |<---- slice 0 --->|<---- slice 1 --->|
//
// The sum of an output is defined by the matrix alone: within a slice one chain of wgmma of 16 columns each, ascending, and the
// slices' sums are added in f32, ascending. Every kernel here follows it, with weights as the 64 rows of operand A and tokens as
// the columns of operand B, so a row's results do not depend on what other rows there are, nor on the kernel.
//
// A block has one producer thread, which keeps a ring of stages in shared memory filled by bulk copies, and one or two warp
// groups of consumers, which multiply. A stage is one block of K: 64 weights by 64 for each consumer group, and TOKENS rows of X.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/// A tensor map of the driver (CUtensorMap).
struct alignas(64) Map {
    u64 words[16];
};

/// What is done with the product. The order is that of `Output` in linear.rs.
enum Epilogue : u32 { STORE, ADD, STORE_BF16, GATED };

struct Product {
    /// Packed.
    const u16 *weights;
    /// f32 or bf16, by the epilogue.
    void *out;
    /// Elements from one row of `out` to the next.
    u64 stride;
    /// Of X and of `out`.
    u32 rows;
    /// Rows of the matrix.
    u32 outputs;
    /// Tiles of 64 rows of the matrix.
    u32 tiles;
    /// Blocks of 64 columns of the matrix.
    u32 blocks;
    u32 slices;
    /// Stages of the ring.
    u32 stages;
    Epilogue epilogue;
};

constexpr u32 TILE = 64;
constexpr u32 BLOCK = 64;
constexpr u32 TILE_BYTES = TILE * BLOCK * 2;
/// Row tiles that are computed side by side, so that weights and rows are both read again while they are in L2.
constexpr u32 BAND = 8;

// ---------------------------------------------------------------------------------------------------------------- Synchronisation

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// The same shared memory of another block of the cluster.
__device__ __forceinline__ u32 shared_of(u32 address, u32 peer) {
    u32 theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(peer));
    return theirs;
}

__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 peer) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(shared_of(barrier, peer)) : "memory");
}

/// What the blocks of a cluster wait for is that the others have started, or end. It orders no memory: a release would stall.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/// Until the kernels before this one in the stream are done, and what they wrote is seen.
__device__ __forceinline__ void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// The next kernel in the stream may start, as far as it has room.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// A stage of the ring, with the parity of its barriers.
struct Stage {
    u32 index = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next(u32 stages) {
        if (++index == stages) {
            index = 0;
            parity ^= 1;
        }
    }
};

// ------------------------------------------------------------------------------------------------------------------------- Copies

/// Weights that are read once make room for others in L2 before anything else does.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 read_again() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_weights(u32 target, const u16 *source, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(TILE_BYTES), "r"(barrier), "l"(policy)
        : "memory");
}

/// The map is read before it is needed.
__device__ __forceinline__ void prefetch_map(const Map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// As `copy_rows`, into the same place of both blocks of a pair.
__device__ __forceinline__ void copy_rows_to_pair(u32 target, const Map *map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>(3))
        : "memory");
}

/// One block of columns of as many rows as the map's box has. Rows beyond the last are zeros.
__device__ __forceinline__ void copy_rows(u32 target, const Map *map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_row(void *target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes) : "memory");
}

/// Adds numbers in f32 to those at the target.
__device__ __forceinline__ void add_row(void *target, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
}

// ------------------------------------------------------------------------------------------------------------------- Tensor cores

__device__ __forceinline__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Until at most `LEFT` of the committed groups are under way.
template <int LEFT>
__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/// How an operand lies in shared memory: rows of 128 bytes, swizzled, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 operand(u32 address) {
    return static_cast<u64>(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define PLACES_0_7 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PLACES_8_15 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_16_31 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_32_47 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_48_63 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_64_79 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES_80_95 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES_96_111 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PLACES_112_127 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PLACES_4 "%0,%1,%2,%3"
#define PLACES_8 PLACES_0_7
#define PLACES_16 PLACES_8 PLACES_8_15
#define PLACES_32 PLACES_16 PLACES_16_31
#define PLACES_64 PLACES_32 PLACES_32_47 PLACES_48_63
#define PLACES_96 PLACES_64 PLACES_64_79 PLACES_80_95
#define PLACES_128 PLACES_96 PLACES_96_111 PLACES_112_127
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_96(i) SUMS_64(i), SUMS_32(i + 64)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)

/// sums = (add ? sums : 0) + the product of 64 weights' rows and TOKENS rows of X, over 16 columns. The operands after the COUNT
/// sums are numbered A, B and C.
#define MULTIPLY(TOKENS, COUNT, A, B, C)                                                                                            \
    __device__ __forceinline__ void multiply(float(&sums)[COUNT], u64 weights, u64 rows, u32 add) {                                 \
        asm volatile("{ .reg .pred add;\nsetp.ne.u32 add, %" #C ", 0;\n"                                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" PLACES_##COUNT "}, %" #A ", %" #B            \
                     ", add, 1, 1, 0, 0; }"                                                                                         \
                     : SUMS_##COUNT(0)                                                                                              \
                     : "l"(weights), "l"(rows), "r"(add));                                                                          \
    }

MULTIPLY(8, 4, 4, 5, 6)
MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(192, 96, 96, 97, 98)
MULTIPLY(256, 128, 128, 129, 130)

// ----------------------------------------------------------------------------------------------------------------------- Epilogue

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/// Adds where the numbers lie, in L2: nothing waits for what was there. Each is rounded once, as by the instruction.
__device__ __forceinline__ void add(float *out, float2 value) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(out), "f"(value.x), "f"(value.y) : "memory");
}

/// Far more exact than bf16.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

/// What a thread has of 16 packed rows and 8 tokens: packed rows `g` and `g + 8` of tokens `2 q` and `2 q + 1`, where g is a quarter of
/// the lane and q the rest. It is in the order of wgmma: row g of both tokens, and then row g + 8.
struct Corner {
    float values[4];

    /// Packed rows g and g + 8 are outputs 2 g and 2 g + 1.
    __device__ __forceinline__ float2 pair(u32 token) const { return make_float2(values[token], values[token + 2]); }
    __device__ __forceinline__ u32 bf16(u32 token) const { return bf16_pair(values[token], values[token + 2]); }
    /// Of a gated matrix they are a gate and an up. Neighbours in g swap a token each, so that each has two outputs, g and g ^ 1, of
    /// token `2 q + g % 2`. All lanes take part.
    __device__ __forceinline__ u32 gated() const {
        const u32 odd = threadIdx.x / 4 % 2;
        const float first = silu(values[0]) * values[2], second = silu(values[1]) * values[3];
        const float mine = odd ? second : first;
        const float received = __shfl_xor_sync(~0u, odd ? first : second, 4);
        return odd ? bf16_pair(received, mine) : bf16_pair(mine, received);
    }
};

template <u32 COUNT>
__device__ __forceinline__ Corner corner(const float (&sums)[COUNT], u32 eight) {
    return {{sums[4 * eight], sums[4 * eight + 1], sums[4 * eight + 2], sums[4 * eight + 3]}};
}

/// Writes what the warp has of 16 packed rows from `row` on and COUNT * 2 tokens from `token` on, each thread for itself.
template <u32 COUNT>
__device__ __forceinline__ void finish(const Product &product, u32 row, u32 token, const float (&sums)[COUNT]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    token += lane % 4 * 2;
    if (product.epilogue == GATED) {
        const u32 output = row / 2 + (g & ~1u);
        token += g % 2;
        u16 *out = static_cast<u16 *>(product.out) + token * product.stride + output;
#pragma unroll
        for (u32 i = 0; i < COUNT / 4; ++i, token += 8, out += 8 * product.stride) {
            const u32 pair = corner(sums, i).gated();
            if (token < product.rows && output < product.outputs / 2) *reinterpret_cast<u32 *>(out) = pair;
        }
        return;
    }
    const u32 output = row + 2 * g;
    if (output >= product.outputs) return;
    u64 at = token * product.stride + output;
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; ++i, token += 8, at += 8 * product.stride) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            if (token + j >= product.rows) break;
            const u64 place = at + j * product.stride;
            if (product.epilogue == STORE_BF16) {
                *reinterpret_cast<u32 *>(static_cast<u16 *>(product.out) + place) = corner(sums, i).bf16(j);
            } else if (product.epilogue == ADD) {
                add(static_cast<float *>(product.out) + place, corner(sums, i).pair(j));
            } else {
                *reinterpret_cast<float2 *>(static_cast<float *>(product.out) + place) = corner(sums, i).pair(j);
            }
        }
    }
}

/// Tokens whose rows leave through shared memory at a time, and bytes of a group's part of a row, if it is f32. Rows are 16 bytes
/// further apart than they are long, so that those of a warp are in different banks.
constexpr u32 LEAVING = 64, LEAVING_BYTES = LEAVING * (TILE * 4 + 16);

__device__ __forceinline__ void shared_store(u32 address, float2 value) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

__device__ __forceinline__ void shared_store(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// Writes what a group of 128 threads has of 64 packed rows from `row` on and COUNT * 2 tokens from `token` on, through shared
/// memory: copies take it from there while the group multiplies on.
template <u32 COUNT>
__device__ __forceinline__ void finish_group(const Product &product, u32 row, u32 token, const float (&sums)[COUNT], u32 outbox) {
    const u32 thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
    const u32 group = threadIdx.x / 128;
    const bool gated = product.epilogue == GATED, bf16 = product.epilogue == STORE_BF16;
    // Bytes of a packed row in a row of the result: a gate and an up make one bf16.
    const u32 each = gated ? 1 : bf16 ? 2 : 4;
    const u32 distance = TILE * each + 16;
    const u32 mine = outbox + warp * 16 * each + (gated ? (2 * q + g % 2) * distance + g / 2 * 4 : 2 * q * distance + 2 * g * each);
    // What is beyond the matrix stays here.
    const u32 bytes = row < product.outputs ? min(TILE, product.outputs - row) * each : 0;
    const u32 element = gated || bf16 ? 2 : 4;
    char *out = static_cast<char *>(product.out) + (token + thread) * product.stride * element + row * each;
#pragma unroll
    for (u32 start = 0; start < COUNT / 4; start += LEAVING / 8) {
        // Those that copied before have read what they copied.
        if (thread < LEAVING) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#pragma unroll
        for (u32 i = 0; i < LEAVING / 8; ++i) {
            const u32 to = mine + i * 8 * distance;
            const Corner values = corner(sums, start + i);
            if (gated) {
                shared_store(to, values.gated());
            } else if (bf16) {
                shared_store(to, values.bf16(0));
                shared_store(to + distance, values.bf16(1));
            } else {
                shared_store(to, values.pair(0));
                shared_store(to + distance, values.pair(1));
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
        if (thread < LEAVING && token + thread + start * 8 < product.rows && bytes > 0) {
            if (product.epilogue == ADD) {
                add_row(out, outbox + thread * distance, bytes);
            } else {
                copy_row(out, outbox + thread * distance, bytes);
            }
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        out += LEAVING * product.stride * element;
    }
}

// ------------------------------------------------------------------------------------------------------------------------- Kernels

/// Which blocks compute the slices of a product.
enum Slices {
    /// A block one, and the blocks of a cluster all of them.
    SPLIT,
    /// A block all of them, one after the other.
    ADDED,
    /// The matrix has only one.
    ONE,
};

/// What a kernel is made for: GROUPS groups of 128 consumers multiply 64 rows of weights each with the same TOKENS rows of X.
template <u32 GROUPS_, u32 TOKENS_, Slices SLICES_>
struct Shape {
    static constexpr u32 GROUPS = GROUPS_, TOKENS = TOKENS_;
    static constexpr Slices SLICES = SLICES_;
    /// Two blocks of large tiles are a cluster. They take the same rows of X, and each loads half of them for both.
    static constexpr u32 PEERS = GROUPS == 2 && SLICES != SPLIT ? 2 : 1;
    static constexpr u32 CONSUMERS = GROUPS * 128;
    static constexpr u32 STAGE_BYTES = (GROUPS * TILE + TOKENS) * BLOCK * 2;
    /// Sums of a thread, and bytes of the block's sums of 8 tokens.
    static constexpr u32 COUNT = TOKENS / 2, EIGHT_BYTES = CONSUMERS * 4 * 4;
};

/// The first block of columns of a slice.
__device__ __forceinline__ u32 slice_start(const Product &product, u32 slice) {
    return slice * product.blocks / product.slices;
}

/// What the threads of a block share. All are addresses in shared memory.
template <class S>
struct Ring {
    u32 stages;
    /// A barrier for each stage.
    u32 full, empty;
    /// What the blocks of a cluster send each other, and the barrier for when it is there.
    u32 inbox, received;
    /// Rows of the result on their way out.
    u32 outbox;

    __device__ __forceinline__ Ring(const void *memory, u32 count) {
        stages = shared_address(memory);
        full = stages + count * S::STAGE_BYTES;
        empty = full + count * 8;
        received = empty + count * 8;
        inbox = outbox = received + 16;
    }
    __device__ __forceinline__ u32 weights(u32 stage, u32 group) const {
        return stages + stage * S::STAGE_BYTES + group * TILE_BYTES;
    }
    __device__ __forceinline__ u32 rows(u32 stage) const { return weights(stage, S::GROUPS); }
};

/// What a block computes: tiles `first`, `first + step`, ... below `end`, and of each these slices.
struct Work {
    u32 first, step, end;
    /// Tiles of the weights and of the rows, in units of what a cluster takes.
    u32 weight_tiles, row_tiles;
    u32 first_slice, last_slice;
    /// The block's number in its cluster.
    u32 peer;
};

template <class S>
__device__ __forceinline__ Work work_of_block(const Product &product) {
    Work work;
    work.weight_tiles = (product.tiles + S::GROUPS * S::PEERS - 1) / (S::GROUPS * S::PEERS);
    work.row_tiles = (product.rows + S::TOKENS - 1) / S::TOKENS;
    work.end = work.weight_tiles * work.row_tiles;
    const u32 cluster = S::SLICES == SPLIT ? product.slices : S::PEERS;
    work.first = blockIdx.x / cluster;
    work.step = gridDim.x / cluster;
    work.peer = blockIdx.x % cluster;
    work.first_slice = S::SLICES == SPLIT ? work.peer : 0;
    work.last_slice = S::SLICES == SPLIT ? work.peer + 1 : product.slices;
    return work;
}

/// A tile of the result.
struct Position {
    /// The block's first tile of 64 rows of weights.
    u32 weights;
    /// The first row of X.
    u32 row;
};

template <class S>
__device__ __forceinline__ Position position(const Work &work, u32 index) {
    const u32 band = index / (BAND * work.weight_tiles);
    const u32 within = index - band * BAND * work.weight_tiles;
    const u32 width = min(BAND, work.row_tiles - band * BAND);
    const u32 weights = within / width, rows = band * BAND + within % width;
    return {(weights * S::PEERS + (S::PEERS > 1 ? work.peer : 0)) * S::GROUPS, rows * S::TOKENS};
}

/// One thread fills the ring.
template <class S>
__device__ __forceinline__ void produce(const Map *map, const Product &product, const Work &work, const Ring<S> &ring) {
    const u32 first = slice_start(product, work.first_slice), last = slice_start(product, work.last_slice);
    const u64 policy = work.row_tiles == 1 ? read_once() : read_again();
    auto fill_weights = [&](u32 stage, const Position &at, u32 block) {
        barrier_expect(ring.full + 8 * stage, S::STAGE_BYTES);
#pragma unroll
        for (u32 group = 0; group < S::GROUPS; ++group) {
            // The last tile may be beyond the matrix. Its results are not written.
            const u32 tile = min(at.weights + group, product.tiles - 1);
            const u16 *source = product.weights + (static_cast<u64>(tile) * product.blocks + block) * (TILE * BLOCK);
            copy_weights(ring.weights(stage, group), source, ring.full + 8 * stage, policy);
        }
    };

    // Weights depend on no earlier kernel: they are under way before it is waited for.
    prefetch_map(map);
    const u32 ahead = min(product.stages, last - first);
    const Position start = position<S>(work, work.first);
    for (u32 i = 0; i < ahead; ++i) fill_weights(i, start, first + i);
    wait_for_prerequisites();

    Stage stage;
    u32 filled = 0;
    for (u32 tile = work.first; tile < work.end; tile += work.step) {
        const Position at = position<S>(work, tile);
        for (u32 block = first; block < last; ++block, ++filled) {
            const u32 full = ring.full + 8 * stage.index, rows = ring.rows(stage.index);
            if (filled >= ahead) {
                barrier_wait(ring.empty + 8 * stage.index, stage.parity ^ 1);
                fill_weights(stage.index, at, block);
            }
            if (S::PEERS == 2) {
                const u32 half = work.peer * (S::TOKENS / 2);
                copy_rows_to_pair(rows + half * BLOCK * 2, map, block * BLOCK, at.row + half, full);
            } else {
                copy_rows(rows, map, block * BLOCK, at.row, full);
            }
            stage.next(product.stages);
        }
    }
}

/// A warp has read a stage.
template <class S>
__device__ __forceinline__ void release(const Ring<S> &ring, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    if (S::PEERS == 1) {
        if (lane == 0) barrier_arrive(ring.empty + 8 * stage);
    } else {
        // Both blocks fill it.
        if (lane < S::PEERS) barrier_arrive_at(ring.empty + 8 * stage, lane);
    }
}

/// Multiplies the blocks `first` to `last` of the group's weights and the rows, which are in the ring from `stage` on.
template <class S>
__device__ __forceinline__ void multiply_slice(float (&sums)[S::COUNT], const Product &product, const Ring<S> &ring, u32 group,
                                               u32 first, u32 last, Stage &stage) {
    u32 before = 0;
    for (u32 block = first; block < last; ++block) {
        barrier_wait(ring.full + 8 * stage.index, stage.parity);
        const u64 weights = operand(ring.weights(stage.index, group)), rows = operand(ring.rows(stage.index));
        multiply_begin();
#pragma unroll
        for (u32 k = 0; k < BLOCK / 16; ++k) multiply(sums, weights + 2 * k, rows + 2 * k, block > first || k > 0);
        multiply_commit();
        if (block > first) {
            multiply_wait<1>();
            release(ring, before);
        }
        before = stage.index;
        stage.next(product.stages);
    }
    multiply_wait<0>();
    release(ring, before);
}

/// The sums of 8 tokens of one block for another, at the place of this thread and this block.
__device__ __forceinline__ void send(u32 inbox, u32 received, u32 peer, const float *sums) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     shared_of(inbox, peer)),
                 "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]), "r"(shared_of(received, peer))
                 : "memory");
}

/// How many times 8 tokens a block of a cluster adds up: those whose number is the block's, modulo the number of blocks.
template <class S>
__device__ __forceinline__ u32 added_by(u32 peer, u32 peers) {
    return (S::TOKENS / 8 + peers - 1 - peer) / peers;
}

/// Adds the slices that the blocks of the cluster have.
template <class S>
__device__ __forceinline__ void finish_cluster(const float (&sums)[S::COUNT], const Product &product, const Ring<S> &ring, u32 peer,
                                               u32 row, u32 token) {
    const u32 peers = product.slices;
    auto place = [&](u32 eight, u32 slice) {
        return ring.inbox + (eight / peers * peers + slice) * S::EIGHT_BYTES + threadIdx.x * 16;
    };
    // All have started, and wait for what is sent.
    cluster_wait();
#pragma unroll
    for (u32 i = 0; i < S::TOKENS / 8; ++i) {
        const u32 to = i % peers;
        if (to != peer) {
            send(place(i, peer), ring.received, to, sums + 4 * i);
        } else {
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place(i, peer)), "f"(sums[4 * i]), "f"(sums[4 * i + 1]),
                         "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3])
                         : "memory");
        }
    }
    if (peer >= S::TOKENS / 8) return;
    barrier_wait(ring.received, 0);
    for (u32 i = peer; i < S::TOKENS / 8; i += peers) {
        float total[4];
        for (u32 slice = 0; slice < peers; ++slice) {
            float sum[4];
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                         : "r"(place(i, slice))
                         : "memory");
#pragma unroll
            for (u32 j = 0; j < 4; ++j) total[j] = slice == 0 ? sum[j] : total[j] + sum[j];
        }
        finish(product, row, token + 8 * i, total);
    }
}

/// A group of 128 threads multiplies 64 rows of weights.
template <class S>
__device__ __forceinline__ void consume(const Product &product, const Work &work, const Ring<S> &ring) {
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    const u32 outbox = ring.outbox + group * LEAVING_BYTES;
    Stage stage;
    float sums[S::COUNT];
    for (u32 tile = work.first; tile < work.end; tile += work.step) {
        const Position at = position<S>(work, tile);
        const u32 row = (at.weights + group) * TILE;
        auto multiply = [&](u32 slice) {
            multiply_slice(sums, product, ring, group, slice_start(product, slice), slice_start(product, slice + 1), stage);
        };
        multiply(work.first_slice);
        if (S::SLICES == ADDED) {
            float total[S::COUNT];
#pragma unroll
            for (u32 i = 0; i < S::COUNT; ++i) total[i] = sums[i];
            for (u32 slice = 1; slice < product.slices; ++slice) {
                multiply(slice);
#pragma unroll
                for (u32 i = 0; i < S::COUNT; ++i) total[i] += sums[i];
            }
            wait_for_prerequisites();
            finish_group(product, row, at.row, total, outbox);
        } else if (S::SLICES == SPLIT && product.slices > 1) {
            // One tile for each cluster.
            wait_for_prerequisites();
            finish_cluster(sums, product, ring, work.peer, row + warp * 16, at.row);
            return;
        } else {
            wait_for_prerequisites();
            if (S::PEERS > 1) {
                finish_group(product, row, at.row, sums, outbox);
            } else {
                finish(product, row + warp * 16, at.row, sums);
            }
        }
    }
    // What leaves is read from here until it is gone.
    if (S::PEERS > 1) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class S>
__device__ __forceinline__ void run(const Map *map, const Product &product) {
    extern __shared__ __align__(1024) char memory[];
    const Ring<S> ring(memory, product.stages);
    const Work work = work_of_block<S>(product);
    const bool split = S::SLICES == SPLIT && product.slices > 1;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < product.stages; ++stage) {
            barrier_init(ring.full + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, S::CONSUMERS / 32 * S::PEERS);
        }
        barrier_init(ring.received, 1);
        // Copies, and other blocks, are told of them.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (split) barrier_expect(ring.received, added_by<S>(work.peer, product.slices) * (product.slices - 1) * S::EIGHT_BYTES);
    }
    __syncthreads();
    launch_dependents();
    if (split || S::PEERS > 1) cluster_arrive();
    if (S::PEERS > 1) cluster_wait();

    if (threadIdx.x >= S::CONSUMERS) {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == S::CONSUMERS) produce(map, product, work, ring);
        __syncwarp();
        if (split) cluster_wait();
    } else {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(product, work, ring);
    }
    if (S::PEERS > 1) {
        // The other block arrives at barriers of this one.
        cluster_arrive();
        cluster_wait();
    }
}

#define KERNEL(NAME, THREADS, GROUPS, TOKENS, SLICES)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                        \
        NAME(const __grid_constant__ Map map, const __grid_constant__ Product product) {                                            \
        run<Shape<GROUPS, TOKENS, SLICES>>(&map, product);                                                                          \
    }

// One warp of producers beside one group of consumers. Beside two it is a group of its own, to give them its registers.
KERNEL(linear_split_8, 160, 1, 8, SPLIT)
KERNEL(linear_split_16, 160, 1, 16, SPLIT)
KERNEL(linear_split_32, 160, 1, 32, SPLIT)
KERNEL(linear_split_64, 160, 1, 64, SPLIT)
KERNEL(linear_split_128, 384, 2, 128, SPLIT)
KERNEL(linear_added_128, 384, 2, 128, ADDED)
KERNEL(linear_added_192, 384, 2, 192, ADDED)
KERNEL(linear_one_256, 384, 2, 256, ONE)

/// Packs a matrix: each thread 16 bytes of the result. `half` is the number of gates of a gated matrix and 0 for others.
extern "C" __global__ void __launch_bounds__(256) linear_pack(const uint4 *source, uint4 *packed, u32 outputs, u32 inputs, u32 blocks,
                                                             u32 half, u64 count) {
    const u64 index = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= count) return;
    const u32 chunk = index % 8 ^ index / 8 % 8;
    const u64 block = index / (TILE_BYTES / 16);
    const u32 packed_row = block / blocks * TILE + index / 8 % TILE;
    const u32 column = block % blocks * BLOCK + chunk * 8;
    const u32 first = packed_row / 16 * 16, g = packed_row % 8, high = packed_row / 8 % 2;
    const u32 row = half == 0 ? first + 2 * g + high : first / 2 + g + high * half;
    const bool inside = (half == 0 ? row < outputs : first / 2 + g < half) && column < inputs;
    packed[index] = inside ? source[(static_cast<u64>(row) * inputs + column) / 8] : make_uint4(0, 0, 0, 0);
}
