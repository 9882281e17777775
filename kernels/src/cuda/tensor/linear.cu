// Y = X W^T for bf16 weights, on Hopper's tensor cores.
//
// Weights are packed in tiles of 64 rows and blocks of 64 columns, 8 KiB each, in the order that the tensor cores read
// them in from shared memory ("128-byte swizzle": of each row of 128 bytes, the 16 bytes at position p are those of
// chunk p ^ (row % 8)). The blocks of a tile lie one after the other along K, so that a tile is one contiguous stream.
//
//            K ->
//        +--------+--------+--------+--------+
//  tile  | 8 KiB  | 8 KiB  | 8 KiB  | 8 KiB  |      a slice is a range of blocks
//        +--------+--------+--------+--------+
//        |<--- slice 0 --->|<--- slice 1 --->|
//
// The sum of an output is defined by the matrix alone: within a slice one chain of wgmma of 16 columns each, ascending,
// and the slices' sums are added in f32, ascending. Every kernel here follows it, with weights as the 64 rows of
// operand A and tokens as the columns of operand B, so a row's results do not depend on what other rows there are, nor
// on the kernel.
//
// A block has one producer thread, which keeps a ring of stages in shared memory filled by bulk copies, and one or two
// warp groups of consumers, which multiply. A stage is one block of K: 64 weights by 64 for each consumer group, and
// TOKENS rows of X. Blocks meet in clusters in two ways: those of a SPLIT kernel have a slice each and send each other
// their sums, and those of another are a pair that takes the same rows of X, of which each loads half for both.
//
// hopper.cu stands before this text.

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

// ------------------------------------------------------------------------------------------------------------ Epilogue

/// Far more exact than bf16.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

/// Writes what the warp has of 16 packed rows from `row` on and COUNT * 2 tokens from `token` on. All lanes take part.
///
/// They go from registers to memory. Through shared memory and bulk copies products of 8192 rows took 3 to 17 % longer
/// on an H100: the copies of the results are in the way of those of the operands.
///
/// For each 8 tokens, a thread has packed rows `g` and `g + 8` of tokens `2 q` and `2 q + 1`: in the order of wgmma,
/// row g of both tokens and then row g + 8, where g is a quarter of the lane and q the rest.
template <u32 COUNT>
__device__ __forceinline__ void finish(const Product &product, u32 row, u32 token, const float (&sums)[COUNT]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    token += lane % 4 * 2;
    if (product.epilogue == GATED) {
        // Packed rows are 8 gates and 8 ups. Neighbours swap a token each, so that both write two outputs at once.
        const u32 odd = g % 2, output = row / 2 + (g & ~1u);
        token += odd;
        u16 *out = static_cast<u16 *>(product.out) + token * product.stride + output;
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4, token += 8, out += 8 * product.stride) {
            const float first = silu(sums[i]) * sums[i + 2], second = silu(sums[i + 1]) * sums[i + 3];
            const float mine = odd ? second : first;
            const float received = __shfl_xor_sync(~0u, odd ? first : second, 4);
            if (token < product.rows && output < product.outputs / 2)
                *reinterpret_cast<u32 *>(out) = odd ? bf16_pair(received, mine) : bf16_pair(mine, received);
        }
        return;
    }
    // Packed rows g and g + 8 are outputs 2 g and 2 g + 1.
    const u32 output = row + 2 * g;
    if (output >= product.outputs) return;
    const u64 at = token * product.stride + output;
    if (product.epilogue == STORE_BF16) {
        u16 *out = static_cast<u16 *>(product.out) + at;
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4, token += 8, out += 8 * product.stride) {
            if (token < product.rows) *reinterpret_cast<u32 *>(out) = bf16_pair(sums[i], sums[i + 2]);
            if (token + 1 < product.rows)
                *reinterpret_cast<u32 *>(out + product.stride) = bf16_pair(sums[i + 1], sums[i + 3]);
        }
        return;
    }
    float *out = static_cast<float *>(product.out) + at;
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4, token += 8, out += 8 * product.stride) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            if (token + j >= product.rows) break;
            const float2 value = make_float2(sums[i + j], sums[i + j + 2]);
            if (product.epilogue == ADD) {
                add(out + j * product.stride, value);
            } else {
                *reinterpret_cast<float2 *>(out + j * product.stride) = value;
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- Kernels

/// Which blocks compute the slices of a product.
enum Slices {
    /// A block one, and the blocks of a cluster all of them.
    SPLIT,
    /// A block all of them, one after the other.
    ADDED,
    /// The matrix has only one.
    ONE,
};

/// What a kernel is made for: GROUPS groups of 128 consumers multiply 64 rows of weights each with the same TOKENS rows
/// of X.
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

    __device__ __forceinline__ Ring(const void *memory, u32 count) {
        stages = shared_address(memory);
        full = stages + count * S::STAGE_BYTES;
        empty = full + count * 8;
        received = empty + count * 8;
        inbox = received + 16;
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
            copy_bytes(ring.weights(stage, group), source, TILE_BYTES, ring.full + 8 * stage, policy);
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
                copy_box_to_pair(rows + half * BLOCK * 2, map, block * BLOCK, at.row + half, full);
            } else {
                copy_box(rows, map, block * BLOCK, at.row, full);
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
__device__ __forceinline__ void multiply_slice(float (&sums)[S::COUNT], const Product &product, const Ring<S> &ring,
                                               u32 group, u32 first, u32 last, Stage &stage) {
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

/// How many times 8 tokens a block of a cluster adds up: those whose number is the block's, modulo the number of
/// blocks.
template <class S>
__device__ __forceinline__ u32 added_by(u32 peer, u32 peers) {
    return (S::TOKENS / 8 + peers - 1 - peer) / peers;
}

/// Adds the slices that the blocks of the cluster have.
template <class S>
__device__ __forceinline__ void finish_cluster(const float (&sums)[S::COUNT], const Product &product,
                                               const Ring<S> &ring, u32 peer, u32 row, u32 token) {
    const u32 peers = product.slices;
    auto place = [&](u32 eight, u32 slice) {
        return ring.inbox + (eight / peers * peers + slice) * S::EIGHT_BYTES + threadIdx.x * 16;
    };
    // All have started, and wait for what is sent.
    cluster_wait();
#pragma unroll
    for (u32 i = 0; i < S::TOKENS / 8; ++i) {
        const u32 to = i % peers;
        if (to == peer) {
            shared_store(place(i, peer), sums + 4 * i);
        } else {
            store_at(place(i, peer), ring.received, to, sums + 4 * i);
        }
    }
    if (peer >= S::TOKENS / 8) return;
    barrier_wait(ring.received, 0);
    for (u32 i = peer; i < S::TOKENS / 8; i += peers) {
        float total[4];
        for (u32 slice = 0; slice < peers; ++slice) {
            float sum[4];
            shared_load(place(i, slice), sum);
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
    Stage stage;
    float sums[S::COUNT];
    for (u32 tile = work.first; tile < work.end; tile += work.step) {
        const Position at = position<S>(work, tile);
        const u32 row = (at.weights + group) * TILE + warp * 16;
        auto multiply = [&](u32 slice) {
            const u32 first = slice_start(product, slice), last = slice_start(product, slice + 1);
            multiply_slice(sums, product, ring, group, first, last, stage);
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
            finish(product, row, at.row, total);
        } else if (S::SLICES == SPLIT && product.slices > 1) {
            // One tile for each cluster.
            wait_for_prerequisites();
            finish_cluster(sums, product, ring, work.peer, row, at.row);
            return;
        } else {
            wait_for_prerequisites();
            finish(product, row, at.row, sums);
        }
    }
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
        barriers_are_ready();
        if (split) {
            const u32 eights = added_by<S>(work.peer, product.slices) * (product.slices - 1);
            barrier_expect(ring.received, eights * S::EIGHT_BYTES);
        }
    }
    __syncthreads();
    launch_dependents();
    if (split || S::PEERS > 1) cluster_arrive();
    if (S::PEERS > 1) cluster_wait();

    if (threadIdx.x >= S::CONSUMERS) {
        if (S::GROUPS > 1) fewer_registers<40>();
        if (threadIdx.x == S::CONSUMERS) produce(map, product, work, ring);
        __syncwarp();
        if (split) cluster_wait();
    } else {
        if (S::GROUPS > 1) more_registers<232>();
        consume(product, work, ring);
    }
    if (S::PEERS > 1) {
        // The other block arrives at barriers of this one.
        cluster_arrive();
        cluster_wait();
    }
}

#define KERNEL(NAME, THREADS, GROUPS, TOKENS, SLICES)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const __grid_constant__ Map map, const __grid_constant__ Product product) {                               \
        run<Shape<GROUPS, TOKENS, SLICES>>(&map, product);                                                             \
    }

// One warp of producers beside one group of consumers. Beside two it is a group of its own, to give them its registers.
KERNEL(linear_split_8, 160, 1, 8, SPLIT)
KERNEL(linear_split_16, 160, 1, 16, SPLIT)
KERNEL(linear_split_32, 160, 1, 32, SPLIT)
KERNEL(linear_split_64, 160, 1, 64, SPLIT)
KERNEL(linear_split_128, 384, 2, 128, SPLIT)
KERNEL(linear_added_128, 384, 2, 128, ADDED)
KERNEL(linear_added_176, 384, 2, 176, ADDED)
KERNEL(linear_added_192, 384, 2, 192, ADDED)
KERNEL(linear_one_256, 384, 2, 256, ONE)

/// Packs a matrix: each thread 16 bytes of the result. `half` is the number of gates of a gated matrix and 0 for
/// others.
extern "C" __global__ void __launch_bounds__(256)
    linear_pack(const uint4 *source, uint4 *packed, u32 outputs, u32 inputs, u32 blocks, u32 half, u64 count) {
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
