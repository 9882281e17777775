// Hopper's instructions that kernels are written in: barriers, copies, and products on the tensor cores. Addresses of
// 32 bits are in shared memory. It is text that the sources of kernels begin with, after bits.cuh.

/// A tensor map of the driver (CUtensorMap).
struct alignas(64) Map {
    u64 words[16];
};

// ----------------------------------------------------------------------------------------------------- Synchronisation

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

/// Copies, and the other blocks of the cluster, are told of barriers.
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Registers of each thread of this group of 128, of which others can have those that it gives up.
template <u32 COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
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

/// What the blocks of a cluster wait for is that the others have started, or end. It orders no memory: a release would
/// stall.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/// Until the kernels before this one in the stream are done, and what they wrote is seen.
__device__ __forceinline__ void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// The next kernel in the stream may start, as far as it has room.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// -------------------------------------------------------------------------------------------------------------- Copies

/// Data that are read once make room for others in L2 before anything else does.
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

/// Bytes that lie one after the other, in multiples of 16. The barrier is told of them.
__device__ __forceinline__ void copy_bytes(u32 target, const void *source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

/// The map is read before it is needed.
__device__ __forceinline__ void prefetch_map(const Map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// A box of the map, from this column and row on. Rows beyond the last are zeros.
__device__ __forceinline__ void copy_box(u32 target, const Map *map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

/// As `copy_box`, of a map of four dimensions.
__device__ __forceinline__ void copy_box(u32 target, const Map *map, const u32 (&at)[4], u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            target),
        "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier)
        : "memory");
}

/// As `copy_box`, into the same place of both blocks of a pair.
__device__ __forceinline__ void copy_box_to_pair(u32 target, const Map *map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>(3))
        : "memory");
}

/// Tensor cores see what this thread has stored in shared memory.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Waits for the other warps of the group.
__device__ __forceinline__ void meet_group(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---------------------------------------------------------------------------------------------- Loads, stores and sums

__device__ __forceinline__ void shared_store(u32 address, const float *values) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3])
                 : "memory");
}

__device__ __forceinline__ void shared_load(u32 address, float *values) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address)
                 : "memory");
}

/// Stores to the same address of another block, whose barrier is told of the 16 bytes.
__device__ __forceinline__ void store_at(u32 address, u32 barrier, u32 peer, const float *values) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     shared_of(address, peer)),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(shared_of(barrier, peer))
                 : "memory");
}

/// Adds where the numbers lie, in L2: nothing waits for what was there. Each sum is rounded once, to the nearest.
__device__ __forceinline__ void add(float *out, float2 value) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(out), "f"(value.x), "f"(value.y) : "memory");
}

// -------------------------------------------------------------------------------------------------------- Tensor cores

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

/// sums = (add ? sums : 0) + the product of 64 x 16 elements in registers, as `mma` distributes them, and 16 x 64 elements in
/// shared memory. Of those, 64 lie side by side: with TRANSPOSED the columns, and otherwise the rows.
template <int TRANSPOSED>
__device__ __forceinline__ void multiply_64(float (&sums)[8][4], const u32 (&a)[4], u64 b, bool add) {
#define FOUR(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
    asm volatile("{ .reg .pred add;\nsetp.ne.u32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
                 "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, %38; }"
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(add)), "n"(TRANSPOSED));
#undef FOUR
}

/// What is done with these registers before stays before, and what is done after stays after.
template <int ROWS>
__device__ __forceinline__ void hold(float (&sums)[ROWS][4]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory");
}
template <int ROWS>
__device__ __forceinline__ void hold(u32 (&factors)[ROWS][4]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        asm volatile("" : "+r"(factors[i][0]), "+r"(factors[i][1]), "+r"(factors[i][2]), "+r"(factors[i][3])::"memory");
}

#define PLACES_0_7 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PLACES_8_15 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_16_31 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_32_47 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_48_63 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_64_79 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES_64_87 PLACES_64_79 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PLACES_80_95 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES_96_111 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PLACES_112_127 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PLACES_4 "%0,%1,%2,%3"
#define PLACES_8 PLACES_0_7
#define PLACES_16 PLACES_8 PLACES_8_15
#define PLACES_32 PLACES_16 PLACES_16_31
#define PLACES_64 PLACES_32 PLACES_32_47 PLACES_48_63
#define PLACES_88 PLACES_64 PLACES_64_87
#define PLACES_96 PLACES_64 PLACES_64_79 PLACES_80_95
#define PLACES_128 PLACES_96 PLACES_96_111 PLACES_112_127
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_88(i) SUMS_64(i), SUMS_16(i + 64), SUMS_8(i + 80)
#define SUMS_96(i) SUMS_64(i), SUMS_32(i + 64)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)

/// sums = (add ? sums : 0) + the product of 64 weights' rows and TOKENS rows of X, over 16 columns. The operands after
/// the COUNT sums are numbered A, B and C.
#define MULTIPLY(TOKENS, COUNT, A, B, C)                                                                               \
    __device__ __forceinline__ void multiply(float(&sums)[COUNT], u64 weights, u64 rows, u32 add) {                    \
        asm volatile("{ .reg .pred add;\nsetp.ne.u32 add, %" #C ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" PLACES_##COUNT "}, %" #A ", %" #B\
                     ", add, 1, 1, 0, 0; }"                                                                            \
                     : SUMS_##COUNT(0)                                                                                 \
                     : "l"(weights), "l"(rows), "r"(add));                                                             \
    }

MULTIPLY(8, 4, 4, 5, 6)
MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(176, 88, 88, 89, 90)
MULTIPLY(192, 96, 96, 97, 98)
MULTIPLY(256, 128, 128, 129, 130)
