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

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

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

/// One block of columns of as many rows as the map's box has. Rows beyond the last are zeros.
__device__ __forceinline__ void copy_rows(u32 target, const Map *map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
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

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

/// What one thread has of 16 packed rows and 8 tokens: packed rows `g` and `g + 8` of tokens `2 q` and `2 q + 1`, where g is a
/// quarter of the lane and q the rest.
struct Corner {
    float low[2];
    float high[2];
};

/// Writes what the warp has of 16 packed rows from `row` on and 8 tokens from `token` on. All lanes take part.
__device__ __forceinline__ void finish(const Product &product, u32 row, u32 token, const Corner &corner) {
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    token += lane % 4 * 2;
    if (product.epilogue == GATED) {
        // Packed rows are 8 gates and 8 ups. Neighbours swap a token each, so that both write two outputs at once.
        const u32 odd = g % 2;
        const float first = silu(corner.low[0]) * corner.high[0], second = silu(corner.low[1]) * corner.high[1];
        const float mine = odd ? second : first;
        const float received = __shfl_xor_sync(~0u, odd ? first : second, 4);
        const u32 output = row / 2 + (g & ~1u);
        if (token + odd < product.rows && output < product.outputs / 2) {
            u16 *out = static_cast<u16 *>(product.out) + (token + odd) * product.stride + output;
            *reinterpret_cast<u32 *>(out) = odd ? bf16_pair(received, mine) : bf16_pair(mine, received);
        }
        return;
    }
    // Packed rows g and g + 8 are outputs 2 g and 2 g + 1.
    const u32 output = row + 2 * g;
    if (output >= product.outputs) return;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        if (token + i >= product.rows) break;
        const u64 at = (token + i) * product.stride + output;
        if (product.epilogue == STORE_BF16) {
            *reinterpret_cast<u32 *>(static_cast<u16 *>(product.out) + at) = bf16_pair(corner.low[i], corner.high[i]);
        } else {
            float2 *out = reinterpret_cast<float2 *>(static_cast<float *>(product.out) + at);
            float2 value = make_float2(corner.low[i], corner.high[i]);
            if (product.epilogue == ADD) {
                const float2 before = *out;
                value = make_float2(before.x + value.x, before.y + value.y);
            }
            *out = value;
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------------- Kernels

/// Which weights and which rows a block multiplies.
struct Position {
    /// Of the weights, in units of GROUPS tiles.
    u32 weights;
    /// In units of TOKENS.
    u32 rows;
};

__device__ __forceinline__ Position position(u32 index, u32 weight_tiles, u32 row_tiles) {
    const u32 band = index / (BAND * weight_tiles);
    const u32 within = index - band * BAND * weight_tiles;
    const u32 width = min(BAND, row_tiles - band * BAND);
    return {within / width, band * BAND + within % width};
}

/// The first block of columns of a slice.
__device__ __forceinline__ u32 slice_start(const Product &product, u32 slice) {
    return slice * product.blocks / product.slices;
}

/// What the threads of a block share.
template <u32 GROUPS, u32 TOKENS>
struct Ring {
    static constexpr u32 STAGE_BYTES = (GROUPS * TILE + TOKENS) * BLOCK * 2;

    /// Addresses in shared memory: the stages, and a barrier of each for when it is full and for when it is empty again.
    u32 stages, full, empty;

    __device__ __forceinline__ Ring(const void *memory, u32 count) {
        stages = (shared_address(memory) + 1023) & ~1023u;
        full = stages + count * STAGE_BYTES;
        empty = full + count * 8;
    }
    __device__ __forceinline__ u32 weights(u32 stage, u32 group) const {
        return stages + stage * STAGE_BYTES + group * TILE_BYTES;
    }
    __device__ __forceinline__ u32 rows(u32 stage) const { return weights(stage, GROUPS); }
};

/// What a block computes: tiles `first`, `first + step`, ... below `end`, and of each these slices.
struct Work {
    u32 first, step, end;
    u32 weight_tiles, row_tiles;
    u32 first_slice, last_slice;
};

template <u32 GROUPS, u32 TOKENS, bool SPLIT>
__device__ __forceinline__ Work work_of_block(const Product &product) {
    Work work;
    work.weight_tiles = (product.tiles + GROUPS - 1) / GROUPS;
    work.row_tiles = (product.rows + TOKENS - 1) / TOKENS;
    work.end = work.weight_tiles * work.row_tiles;
    const u32 blocks = SPLIT ? product.slices : 1;
    work.first = blockIdx.x / blocks;
    work.step = gridDim.x / blocks;
    work.first_slice = blockIdx.x % blocks;
    work.last_slice = SPLIT ? work.first_slice + 1 : product.slices;
    return work;
}

/// One thread fills the ring.
template <u32 GROUPS, u32 TOKENS>
__device__ __forceinline__ void produce(const Map *map, const Product &product, const Work &work, const Ring<GROUPS, TOKENS> &ring) {
    const u32 first = slice_start(product, work.first_slice), last = slice_start(product, work.last_slice);
    const u64 policy = work.row_tiles == 1 ? read_once() : read_again();
    auto fill_weights = [&](u32 stage, const Position &at, u32 block) {
        barrier_expect(ring.full + 8 * stage, ring.STAGE_BYTES);
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) {
            // The last group may be beyond the matrix. Its results are not written.
            const u32 tile = min(at.weights * GROUPS + group, product.tiles - 1);
            const u16 *source = product.weights + (static_cast<u64>(tile) * product.blocks + block) * (TILE * BLOCK);
            copy_weights(ring.weights(stage, group), source, ring.full + 8 * stage, policy);
        }
    };

    // Weights depend on no earlier kernel: they are under way before it is waited for.
    const u32 ahead = min(product.stages, last - first);
    const Position start = position(work.first, work.weight_tiles, work.row_tiles);
    for (u32 i = 0; i < ahead; ++i) fill_weights(i, start, first + i);
    wait_for_prerequisites();

    Stage stage;
    u32 filled = 0;
    for (u32 tile = work.first; tile < work.end; tile += work.step) {
        const Position at = position(tile, work.weight_tiles, work.row_tiles);
        for (u32 block = first; block < last; ++block, ++filled) {
            if (filled >= ahead) {
                barrier_wait(ring.empty + 8 * stage.index, stage.parity ^ 1);
                fill_weights(stage.index, at, block);
            }
            copy_rows(ring.rows(stage.index), map, block * BLOCK, at.rows * TOKENS, ring.full + 8 * stage.index);
            stage.next(product.stages);
        }
    }
}

/// Multiplies the blocks `first` to `last` of the group's weights and the rows, which are in the ring from `stage` on.
template <u32 GROUPS, u32 TOKENS>
__device__ __forceinline__ void multiply_slice(float (&sums)[TOKENS / 2], const Product &product, const Ring<GROUPS, TOKENS> &ring,
                                               u32 group, u32 first, u32 last, Stage &stage) {
    const bool leader = threadIdx.x % 32 == 0;
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
            if (leader) barrier_arrive(ring.empty + 8 * before);
        }
        before = stage.index;
        stage.next(product.stages);
    }
    multiply_wait<0>();
    if (leader) barrier_arrive(ring.empty + 8 * before);
}

template <u32 COUNT>
__device__ __forceinline__ Corner corner(const float (&sums)[COUNT], u32 i) {
    return {{sums[4 * i], sums[4 * i + 1]}, {sums[4 * i + 2], sums[4 * i + 3]}};
}

/// Adds the slices that the blocks of the cluster have, each block for some of the tokens.
template <u32 GROUPS, u32 TOKENS>
__device__ __forceinline__ void finish_cluster(const float (&sums)[TOKENS / 2], const Product &product,
                                               const Ring<GROUPS, TOKENS> &ring, u32 slice, u32 row, u32 token) {
    // The stages are free: this block's copies have arrived, and once all its consumers are here, they have been read.
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
    const u32 mine = ring.stages + threadIdx.x * 16;
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; ++i) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * GROUPS * 128 * 16), "f"(sums[4 * i]),
                     "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3])
                     : "memory");
    }
    cluster_sync();
    for (u32 i = slice; i < TOKENS / 8; i += product.slices) {
        Corner total;
        for (u32 other = 0; other < product.slices; ++other) {
            u32 address;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(mine + i * GROUPS * 128 * 16), "r"(other));
            float4 sum;
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                         : "r"(address)
                         : "memory");
            if (other == 0) {
                total = {{sum.x, sum.y}, {sum.z, sum.w}};
            } else {
                total = {{total.low[0] + sum.x, total.low[1] + sum.y}, {total.high[0] + sum.z, total.high[1] + sum.w}};
            }
        }
        finish(product, row, token + 8 * i, total);
    }
    cluster_sync();
}

/// A group of 128 threads multiplies 64 rows of weights.
template <u32 GROUPS, u32 TOKENS, bool SPLIT>
__device__ __forceinline__ void consume(const Product &product, const Work &work, const Ring<GROUPS, TOKENS> &ring) {
    const u32 group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    Stage stage;
    float sums[TOKENS / 2];
    for (u32 tile = work.first; tile < work.end; tile += work.step) {
        const Position at = position(tile, work.weight_tiles, work.row_tiles);
        const u32 row = (at.weights * GROUPS + group) * TILE + warp * 16, token = at.rows * TOKENS;
        const u32 first = slice_start(product, work.first_slice), second = slice_start(product, work.first_slice + 1);
        multiply_slice(sums, product, ring, group, first, second, stage);
        if (SPLIT && product.slices > 1) {
            wait_for_prerequisites();
            finish_cluster(sums, product, ring, work.first_slice, row, token);
            return;
        }
        if (!SPLIT && product.slices > 1) {
            float total[TOKENS / 2];
#pragma unroll
            for (u32 i = 0; i < TOKENS / 2; ++i) total[i] = sums[i];
            for (u32 slice = 1; slice < product.slices; ++slice) {
                multiply_slice(sums, product, ring, group, slice_start(product, slice), slice_start(product, slice + 1), stage);
#pragma unroll
                for (u32 i = 0; i < TOKENS / 2; ++i) total[i] += sums[i];
            }
#pragma unroll
            for (u32 i = 0; i < TOKENS / 2; ++i) sums[i] = total[i];
        }
        wait_for_prerequisites();
#pragma unroll
        for (u32 i = 0; i < TOKENS / 8; ++i) finish(product, row, token + 8 * i, corner(sums, i));
    }
}

template <u32 GROUPS, u32 TOKENS, bool SPLIT>
__device__ __forceinline__ void run(const Map *map, const Product &product) {
    extern __shared__ char memory[];
    const Ring<GROUPS, TOKENS> ring(memory, product.stages);
    const Work work = work_of_block<GROUPS, TOKENS, SPLIT>(product);
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < product.stages; ++stage) {
            barrier_init(ring.full + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, GROUPS * 4);
        }
        // Copies are told of them, too.
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    launch_dependents();
    if (threadIdx.x >= GROUPS * 128) {
        if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * 128) produce(map, product, work, ring);
        __syncwarp();
        if (SPLIT && product.slices > 1) {
            cluster_sync();
            cluster_sync();
        }
    } else {
        if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<GROUPS, TOKENS, SPLIT>(product, work, ring);
    }
}

#define KERNEL(NAME, THREADS, GROUPS, TOKENS, SPLIT)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Map map, const __grid_constant__ Product product) {  \
        run<GROUPS, TOKENS, SPLIT>(&map, product);                                                                                  \
    }

// One warp of producers beside one group of consumers. Beside two it is a group of its own, to give them its registers.
KERNEL(linear_split_8, 160, 1, 8, true)
KERNEL(linear_split_16, 160, 1, 16, true)
KERNEL(linear_split_32, 160, 1, 32, true)
KERNEL(linear_split_64, 160, 1, 64, true)
KERNEL(linear_split_128, 160, 1, 128, true)
KERNEL(linear_split_256, 384, 2, 256, true)
KERNEL(linear_whole_128, 384, 2, 128, false)
KERNEL(linear_whole_192, 384, 2, 192, false)

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
